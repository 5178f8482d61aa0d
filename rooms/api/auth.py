"""Authenticate callers and check their scopes: one guard for every route under `/v1`."""

from collections.abc import Collection, Iterable, Mapping
from inspect import cleandoc
from typing import Any, Final

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency
from litestar.enums import HttpMethod
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.params import SkipValidation

from rooms.api.client_identity import STATE_KEY, CertificateMismatchError, ClientCertificate
from rooms.api.deps import ApiServices
from rooms.db.authentication import ClientAddress
from rooms.domain.principal import Principal, Restriction
from rooms.domain.state_machine import Scope
from rooms.errors import ForbiddenError, SuspendedError

ServicesDep = NamedDependency[SkipValidation[ApiServices]]
"""The argument `services` of a handler."""
Caller = NamedDependency[SkipValidation[Principal]]
"""The argument `principal` of a handler: the caller that the guard has admitted."""
_VIEWED: Final = frozenset({Scope.MANAGE, Scope.OPERATE})
"""Scopes whose reading routes `view` opens, too."""
_READS: Final = frozenset({HttpMethod.GET, HttpMethod.HEAD})
SCOPES: Final = "scopes"
"""The key in a handler's `opt` for its scopes."""
ALLOWS: Final = "allows_restricted"
"""The key in a handler's `opt` for the restricted keys that may use it."""
BELOW_ROOM: Final = frozenset({Restriction.ROOMS})
OF_EVENTS: Final = frozenset({Restriction.ROOMS, Restriction.EVENT_TYPES})
OF_SUBSCRIPTIONS: Final = frozenset({Restriction.ROOMS, Restriction.SUBSCRIPTIONS})
FOR_EVERY_KEY: Final = frozenset(Restriction)
_TAKES_MESSAGES: Final = (Scope.SUBSCRIBE,)
DATA_PLANE: Final = "data_plane"
"""The key in the `opt` of a handler that moves messages: the delivery log has what it does."""
FOR_PORTALS: Final = "for_portals"
"""The key in the `opt` of a handler that a session of a portal may call."""
CHANGES_NOTHING: Final = "changes_nothing"
"""The key in the `opt` of a handler that takes a body, and only reads: its refusals are no attempts
to change something.
"""
SECURITY_SCHEME: Final = "api_key"
"""The name of the security scheme in the OpenAPI document."""


def require_scopes(*scopes: Scope, allows: Collection[Restriction] = ()) -> dict[str, Any]:
    """Return a handler's `opt`: one of `scopes` is enough; `admin` implies all but `platform`.

    `allows`: the restrictions that a key may have. The handler sees to it that such a key reaches
    nothing else; what belongs to the whole organisation allows none.
    """
    return {SCOPES: scopes, ALLOWS: frozenset(allows)}


def for_portals(opt: Mapping[str, Any]) -> dict[str, Any]:
    """Return a handler's `opt` with the right of sessions of portals to call it.

    The handler sees to it that such a session reaches the organisation's own subscriptions only.
    """
    return {**opt, FOR_PORTALS: True}


def moves_messages(*scopes: Scope, allows: Collection[Restriction]) -> dict[str, Any]:
    """Return the `opt` of a handler that publishes or receives messages."""
    return {**require_scopes(*scopes, allows=allows), DATA_PLANE: True}


def sufficient_scopes(scopes: Iterable[Scope]) -> tuple[Scope, ...]:
    """Return every scope that opens a route which needs one of `scopes`."""
    required = tuple(dict.fromkeys(scopes))
    return (
        required
        if required == (Scope.PLATFORM,)
        else tuple(dict.fromkeys((*required, Scope.ADMIN)))
    )


def declare_scopes(handler: HTTPRouteHandler, path: str) -> None:
    """Document scopes and restricted keys, and let `view` read. RuntimeError: it has no scopes."""
    scopes: tuple[Scope, ...] | None = handler.opt.get(SCOPES)
    if not scopes:
        raise RuntimeError(f"{path} declares no scopes")
    if (
        handler.http_methods <= _READS
        and not handler.opt.get(DATA_PLANE)
        and not _VIEWED.isdisjoint(scopes)
    ):
        handler.opt[SCOPES] = scopes = tuple(dict.fromkeys((*scopes, Scope.VIEW)))
    required = sufficient_scopes(scopes)
    description = getattr(handler.fn, "__doc__", None) or ""
    handler.description = (
        f"{cleandoc(description)}\n\nNeeds a key with the scope {' or '.join(required)}. "
        f"{_restricted_keys(handler.opt[ALLOWS])}"
    )
    handler.security = [{SECURITY_SCHEME: [scope.value]} for scope in required]


def _restricted_keys(allowed: Collection[Restriction]) -> str:
    """Return the sentence about restricted keys; others answer 403."""
    if len(allowed) == len(Restriction):
        return "Every restricted key may use it, for what it is restricted to."
    if not allowed:
        return "No restricted key may use it: 403."
    named = [one.value for one in Restriction if one in allowed]
    return f"Of restricted keys, those restricted to {' or '.join(named)} may use it; others: 403."


async def authenticate(
    services: ApiServices,
    headers: Mapping[bytes, bytes],
    scopes: Iterable[Scope],
    client: ClientAddress | None = None,
    certificate: ClientCertificate | None = None,
) -> Principal:
    """Return the principal of a request that moves messages: in its rate limit, with a scope.

    `headers`: the first one of each name, in lower case. `client`: the address and port of the
    peer, which is the proxy behind a proxy. `certificate`: of the connection.
    UnauthenticatedError, RateLimitedError, MalformedError, ForbiddenError, SuspendedError.
    """
    principal = await services.callers.authenticate(headers, client, certificate)
    admit(services, principal, scopes, changes=True)
    return principal


def authenticate_cached(
    services: ApiServices,
    headers: Mapping[bytes, bytes],
    scopes: Iterable[Scope],
    client: ClientAddress | None = None,
    certificate: ClientCertificate | None = None,
) -> Principal | None:
    """Return what `authenticate` does, where that needs no look-up; None: it needs one.

    UnauthenticatedError, RateLimitedError, ForbiddenError, SuspendedError.
    """
    principal = services.callers.find_cached(headers, client, certificate)
    if principal is not None:
        admit(services, principal, scopes, changes=True)
    return principal


def admit(
    services: ApiServices, principal: Principal, scopes: Iterable[Scope], *, changes: bool
) -> None:
    """Check a principal's rate limit, scopes, and, if the request changes something, its status.

    RateLimitedError, ForbiddenError, SuspendedError.
    """
    services.rate_limiter.acquire(principal.key_id)
    if not principal.has_scope(*scopes):
        raise ForbiddenError(
            f"this needs a key with the scope {' or '.join(sufficient_scopes(scopes))}"
        )
    if principal.is_session and tuple(scopes) == _TAKES_MESSAGES:
        # What a person reads of payloads is in the journal; what consumers take is not.
        raise ForbiddenError("a session of the console takes no messages: use an API key")
    if principal.suspended and changes:
        raise SuspendedError(
            "your organisation is suspended: it may read its configuration, and nothing else"
        )


async def authorize(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Guard a route: store the principal for the handler's argument `principal`."""
    if connection.scope.get("method") == HttpMethod.OPTIONS:
        return  # it only lists methods, as the public document does
    headers = dict(reversed([*connection.scope["headers"]]))  # of several, the first
    services: ApiServices = connection.app.state.services
    peer = connection.scope.get("client")
    certificate = connection.scope["state"].get(STATE_KEY)
    services.shares.leave()
    try:
        principal = await services.callers.authenticate(headers, peer, certificate)
    except CertificateMismatchError as exc:
        connection.scope["auth"] = exc.principal
        raise
    finally:
        connection.scope["client"] = services.callers.source(headers, peer)
    connection.scope["auth"] = principal  # a refusal is in the journal, too
    services.shares.enter(principal.organisation_id)
    is_read = connection.scope.get("method") in _READS and not handler.opt.get(DATA_PLANE)
    admit(services, principal, handler.opt[SCOPES], changes=not is_read)
    if principal.is_portal and not handler.opt.get(FOR_PORTALS):
        raise ForbiddenError("a portal is about its subscriptions, and this is about more")
    refused = principal.restrictions - handler.opt[ALLOWS]
    if refused:
        raise ForbiddenError(
            f"this key is restricted to {' and '.join(sorted(refused))}, and this is about more"
        )


# Each dependency of a handler needs the one before, because Litestar resolves several at a time in
# tasks of their own, which takes longer than all of them.
async def provide_principal(
    request: Request[Any, Principal, Any],
    services: ServicesDep,  # noqa: ARG001 - it comes before
) -> Principal:
    """Return the principal that the guard admitted."""
    return request.auth


async def provide_services(request: Request[Any, Any, Any]) -> ApiServices:
    """Return the services of the application."""
    services: ApiServices = request.app.state.services
    return services
