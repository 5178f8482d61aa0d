"""Serve the pages by which people sign in at an OpenID Connect provider."""

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from litestar import Response, get, post
from litestar.datastructures import Cookie
from litestar.response import Redirect

from rooms.api.deps import ApiServices
from rooms.console.oidc import (
    Attempt,
    Identity,
    OidcClient,
    OidcConfiguration,
    OidcError,
    OidcSignIn,
    ProviderAwayError,
)
from rooms.console.page import HOME, PUBLIC, Page, PageDep
from rooms.console.sessions import cookies_of, host_bound_name, is_secure
from rooms.console.sign_in import enter, safe_path
from rooms.console.sign_in_limit import SignInLimit
from rooms.db.catalog.organisations import (
    ListedOrganisation,
    find_organisation,
    resolve_organisation,
)
from rooms.db.connection import transaction
from rooms.db.secrets import Cipher
from rooms.domain.ids import OrganisationId
from rooms.domain.role import GroupRoles, Role, roles_of, scopes_of
from rooms.domain.sharing import OrganisationStatus
from rooms.errors import ForbiddenError
from rooms.settings import Settings

START_PATH: Final = "/console/oidc/start"
CALLBACK_PATH: Final = "/console/oidc/callback"
CHOICE_PATH: Final = "/console/oidc/organisation"
ATTEMPTS_PER_S: Final = 10
_COOKIES_PATH: Final = "/console/oidc"
_ATTEMPT: Final = "rooms_oidc"
_CHOICE: Final = "rooms_oidc_choice"
_ATTEMPT_S: Final = 600
_CHOICE_S: Final = 300
_MAX_SEALED: Final = 4000
"""Characters of a cookie; browsers keep about 4,096."""
_MAX_TARGET: Final = 1024
"""Bytes of the page to go on to: it is in both cookies."""
_HTTP_FORBIDDEN: Final = 403
_HTTP_UNAVAILABLE: Final = 503


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Hold, sealed, who signed in and among which organisations this person chooses."""

    subject: str
    name: str
    entries: bytes
    """Those of `ROOMS_OIDC_ROLES` that apply, a bit for each: a person may have hundreds."""
    setting: bytes
    """The digest of `ROOMS_OIDC_ROLES`: in another setting, the bits would give other roles."""
    target: str
    expires_at: int


def open_oidc(services: ApiServices) -> OidcSignIn:
    """Return the sign-in of the settings, which have an issuer and what it needs."""
    settings: Settings = services.settings
    client = OidcClient(
        OidcConfiguration(
            issuer=settings.oidc_issuer or "",
            client_id=settings.oidc_client_id or "",
            client_secret=settings.oidc_client_secret,
            scopes=settings.oidc_scopes,
            groups_claim=settings.oidc_groups_claim,
            redirect_uri=f"{settings.public_url}{CALLBACK_PATH}",
        ),
        monotonic=services.clock.monotonic,
        now_s=lambda: services.clock.now_ms() // 1000,
    )
    return OidcSignIn(
        client=client,
        group_roles=settings.oidc_roles,
        sign_in_limit=SignInLimit(
            services, ATTEMPTS_PER_S, "too many sign-ins were tried from this address"
        ),
    )


@get(START_PATH, opt={PUBLIC: True}, status_code=303)
async def start_oidc(page: PageDep) -> Response[Any]:
    """Send the browser to the provider."""
    target = safe_path(page.query("to"))
    if len(msgspec.json.encode(target)) > _MAX_TARGET:
        target = HOME
    try:
        address, attempt = await _parts(page).client.start(target, expires_s=_ATTEMPT_S)
    except OidcError as exc:
        return _refused(page, exc)
    answer = Redirect(address, status_code=303)
    answer.set_cookie(_sealed_cookie(page, _ATTEMPT, attempt, _ATTEMPT_S))
    return answer


@get(CALLBACK_PATH, opt={PUBLIC: True})
async def finish_oidc(page: PageDep) -> Response[Any]:
    """Begin a session of the person that the provider names, or ask for an organisation."""
    parts = _parts(page)
    try:
        attempt = _open(page, _ATTEMPT, Attempt)
        if attempt is None:
            raise OidcError("this browser began no sign-in, or cookies are off; begin again")
        query = {name: value for name, value in page.request.query_params.items() if value}
        async with parts.sign_in_limit.attempt(page.request.scope.get("client")) as succeed:
            person = await parts.client.finish(attempt, query)
            succeed()
        offered = await _organisations(page, roles_of(parts.group_roles, person.groups))
        if not offered:
            raise OidcError(
                f"no group of {person.name} has a role here; ask the administrator of Rooms"
            )
    except OidcError as exc:
        return _refused(page, exc)
    if len(offered) == 1:
        ((member, roles),) = offered
        return await _enter(page, member, roles, person, attempt.target)
    choice = Choice(
        subject=person.subject,
        name=person.name,
        entries=_to_bits([one.applies_to(person.groups) for one in parts.group_roles]),
        setting=_digest(parts.group_roles),
        target=attempt.target,
        expires_at=page.parts.services.clock.now_ms() // 1000 + _CHOICE_S,
    )
    answer: Response[Any] = page.render(
        "oidc_organisation.html", names=[member.name for member, _ in offered], person=person.name
    )
    answer.set_cookie(_ended_cookie(page, _ATTEMPT))
    answer.set_cookie(_sealed_cookie(page, _CHOICE, choice, _CHOICE_S))
    return answer


@post(CHOICE_PATH, opt={PUBLIC: True})
async def choose_organisation(page: PageDep) -> Response[Any]:
    """Begin the session in the organisation that the person chose."""
    page.key = None  # the form is older than a session of this browser
    form = await page.form()
    choice = _open(page, _CHOICE, Choice)
    now_s = page.parts.services.clock.now_ms() // 1000
    name = form.text("organisation") or ""
    roles_by_name = {} if choice is None else _roles_of(choice, _parts(page).group_roles)
    if choice is None or choice.expires_at <= now_s or name not in roles_by_name:
        return _refused(page, OidcError("the sign-in took too long; begin again"))
    offered = await _organisations(page, {name: roles_by_name[name]})
    if not offered:
        return _refused(page, OidcError("this organisation has been deleted"))
    ((member, roles),) = offered
    person = Identity(subject=choice.subject, name=choice.name, groups=frozenset())
    return await _enter(page, member, roles, person, choice.target)


def _roles_of(choice: Choice, group_roles: Sequence[GroupRoles]) -> Mapping[str, frozenset[Role]]:
    """Return the roles by the names of organisations; none if the setting has changed since."""
    if choice.setting != _digest(group_roles):
        return {}
    bits = int.from_bytes(choice.entries, "little")
    chosen = [one for place, one in enumerate(group_roles) if bits >> place & 1]
    return roles_of(chosen, [one.group for one in chosen])


def _to_bits(flags: Sequence[bool]) -> bytes:
    number = sum(flag << place for place, flag in enumerate(flags))
    return number.to_bytes((len(flags) + 7) // 8, "little")


def _digest(group_roles: Sequence[GroupRoles]) -> bytes:
    """Return the same for the same setting in every process."""
    entries = [(one.group, one.organisation, sorted(one.roles)) for one in group_roles]
    return hashlib.sha256(msgspec.json.encode(entries)).digest()


async def _enter(
    page: Page, member: ListedOrganisation, roles: frozenset[Role], person: Identity, target: str
) -> Response[Any]:
    started = await page.parts.sessions.begin(
        page.request.scope,
        organisation=OrganisationId(member.id),
        name=person.name,
        scopes=scopes_of(roles),
        by=f"oidc {person.subject}",
        source=f"oidc {person.subject}",
    )
    answer = enter(page, started, safe_path(target))
    for cookie in (_ATTEMPT, _CHOICE):
        answer.set_cookie(_ended_cookie(page, cookie))
    return answer


async def _organisations(
    page: Page, roles: Mapping[str, frozenset[Role]]
) -> list[tuple[ListedOrganisation, frozenset[Role]]]:
    """Return the organisations of these names that are there, and the roles in them."""
    found = []
    async with transaction(page.parts.services.engine) as connection:
        for name, given in sorted(roles.items()):
            member = await resolve_organisation(connection, name)
            if member is None or member.name != name:
                continue
            whole = await find_organisation(connection, member.id)
            if whole.status is not OrganisationStatus.DELETING:
                found.append((member, given))
    return found


def _parts(page: Page) -> OidcSignIn:
    oidc = page.parts.oidc
    if oidc is None:
        raise ForbiddenError("sign-in by OpenID Connect is not set up")
    return oidc


def _refused(page: Page, error: OidcError) -> Response[Any]:
    away = isinstance(error, ProviderAwayError)
    answer = page.render(
        "sign_in.html",
        http_status=_HTTP_UNAVAILABLE if away else _HTTP_FORBIDDEN,
        token=None,
        failure=f"{str(error)[:1].upper()}{str(error)[1:]}.",
        to=HOME,
    )
    answer.set_cookie(_ended_cookie(page, _ATTEMPT))
    return answer


def _sealed_cookie(page: Page, name: str, value: msgspec.Struct, max_age_s: int) -> Cookie:
    cipher: Cipher = page.parts.services.cipher
    sealed = cipher.encrypt(msgspec.json.encode(value), _purpose(name))
    return _cookie(page, name, urlsafe_b64encode(sealed).rstrip(b"=").decode(), max_age_s)


def _ended_cookie(page: Page, name: str) -> Cookie:
    return _cookie(page, name, "", 0)


def _cookie(page: Page, name: str, value: str, max_age_s: int) -> Cookie:
    scope = page.request.scope
    return Cookie(
        # Another host of the domain could set a cookie of a plain name, with a sign-in of its own.
        key=host_bound_name(scope, name),
        value=value,
        path="/" if is_secure(scope) else _COOKIES_PATH,
        max_age=max_age_s,
        httponly=True,
        secure=is_secure(scope),
        # The provider sends the browser back by a link, which a strict cookie would not follow.
        samesite="lax",
    )


def _open(page: Page, name: str, kind: type[Any]) -> Any:
    """Return what a sealed cookie holds; None: it is missing, or was not sealed here."""
    scope = page.request.scope
    text = cookies_of(scope).get(host_bound_name(scope, name), "")
    if not text or len(text) > _MAX_SEALED:
        return None
    try:
        sealed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        plain = page.parts.services.cipher.decrypt(sealed, _purpose(name))
        return msgspec.json.decode(plain, type=kind)
    except ValueError:
        return None


def _purpose(name: str) -> bytes:
    return f"console cookie {name}".encode()


ROUTES: Final = (start_oidc, finish_oidc, choose_organisation)
