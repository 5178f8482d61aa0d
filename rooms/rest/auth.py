"""Who asks, and whether they may: one guard in front of every route under /v1."""

from collections.abc import Iterable
from inspect import cleandoc
from typing import Any, Final

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency
from litestar.enums import HttpMethod
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.params import SkipValidation

from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.errors import ForbiddenError
from rooms.rest.services import Services
from rooms.storage.keys import Client

Given = NamedDependency[SkipValidation[Services]]
"""A handler's argument `services`: what the routes work with."""
Caller = NamedDependency[SkipValidation[Principal]]
"""A handler's argument `principal`: who asks, let in by the guard."""
SCOPES: Final = "scopes"
"""The key in a handler's `opt` under which its scopes stand."""
SCHEME: Final = "api_key"
"""The name of the security scheme in the document."""


def needs(*scopes: Scope) -> dict[str, Any]:
    """Return a handler's `opt`: it takes keys with any one of `scopes`; `admin` stands for all but `platform`."""
    return {SCOPES: scopes}


def sufficient(scopes: Iterable[Scope]) -> tuple[Scope, ...]:
    """Return every scope that opens a route which needs one of `scopes`."""
    wanted = tuple(dict.fromkeys(scopes))
    return wanted if wanted == (Scope.PLATFORM,) else tuple(dict.fromkeys((*wanted, Scope.ADMIN)))


def declare_scopes(handler: HTTPRouteHandler, path: str) -> None:
    """Say in the document what the guard asks for. A route that declares no scopes is a mistake: RuntimeError."""
    scopes: tuple[Scope, ...] | None = handler.opt.get(SCOPES)
    if not scopes:
        raise RuntimeError(f"{path} declares no scopes")
    wanted = sufficient(scopes)
    told = getattr(handler.fn, "__doc__", None) or ""
    handler.description = f"{cleandoc(told)}\n\nNeeds a key with the scope {' or '.join(wanted)}."
    handler.security = [{SCHEME: [scope.value]} for scope in wanted]


async def admit(
    services: Services, header: bytes | None, scopes: Iterable[Scope], client: Client | None = None
) -> Principal:
    """Return the principal behind an Authorization header's value, counted and found to have one of `scopes`. `client`: the
    address and port that the request comes from, which behind a proxy are the proxy's.

    UnauthenticatedError, RateLimitedError, ForbiddenError.
    """
    principal = await services.keys.authenticate(header, client)
    services.rates.take(principal.key_id)
    if not principal.may(*scopes):
        raise ForbiddenError(f"this needs a key with the scope {' or '.join(sufficient(scopes))}")
    return principal


async def authorize(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """The guard: puts the principal where handlers find it, as their argument `principal`."""
    if connection.scope.get("method") == HttpMethod.OPTIONS:
        return  # it only says which methods there are, as the document does for everybody
    header = next((value for name, value in connection.scope["headers"] if name == b"authorization"), None)
    services: Services = connection.app.state.services
    connection.scope["auth"] = await admit(services, header, handler.opt[SCOPES], connection.scope.get("client"))


async def provide_principal(request: Request[Any, Principal, Any]) -> Principal:
    """The principal that the guard let in."""
    return request.auth


async def provide_services(request: Request[Any, Any, Any]) -> Services:
    """What the routes work with."""
    services: Services = request.app.state.services
    return services
