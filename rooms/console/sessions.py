"""Begin, extend and end sessions, and keep each in a cookie, safe from requests of other sites.

Each sign-in and sign-out is an entry of the journal.

The cookie holds the text of the session's key, which no script can read. It is `Secure` and bound
to the host (`__Host-`) wherever the browser came by HTTPS. A form has a token that is derived from
the key, and a request that changes something must come from this origin; the sign-in form, which
has no session, relies on the origin.

A portal has a cookie of its own name, because a browser sends it where another site frames the
portal: it is `SameSite=None` and `Partitioned`, so each framing site has its own. Without HTTPS
browsers refuse such cookies, and only sites of the same host can frame the portal.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import urlsplit

from litestar.datastructures import Cookie
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.changes import make_entry
from rooms.api.deps import ApiServices
from rooms.api.sessions import DEFAULT_SESSION_S, PORTAL_PATH
from rooms.console.sign_in_limit import SignInLimit
from rooms.db.catalog import sessions as records
from rooms.db.catalog import sign_in_links as links
from rooms.db.catalog.api_keys import new_key
from rooms.db.connection import transaction
from rooms.db.journal import append
from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import ForbiddenError, RateLimitedError, UnauthenticatedError
from rooms.token_buckets import TokenBuckets

IDLE_S: Final = 3600
"""Seconds without a request after which a session ends."""
_EXTEND_EVERY_S: Final = 60.0
_MAX_REMEMBERED: Final = 10_000
LINKS_PER_S: Final = 2
"""Links that one address may try in a second."""
SIGN_INS_PER_S: Final = 5
"""Sessions that begin with one key, portal link or person of a provider in a second.

Each is a row and an entry of the journal, and has a rate limit of its own.
"""
_PATHS: Final[Mapping[bool, str]] = {False: "/console", True: PORTAL_PATH}
"""Name what is entered and left for the journal, by whether it is a portal."""
COOKIE: Final = "rooms_session"
PORTAL_COOKIE: Final = "rooms_portal"
_SECURE_PREFIX: Final = "__Host-"
_TOKEN_PURPOSE: Final = b"rooms console form"
MAX_COOKIES: Final = 8192
"""Bytes of the header that are read."""
_MAX_PREFERENCE: Final = 256
"""Bytes of a choice: more than any has, also in quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedSession:
    """Hold a new session's key, for the cookie, and its longest time in seconds."""

    key: str
    max_age_s: int


class Sessions:
    """Begin and end the sessions of one process."""

    def __init__(self, services: ApiServices) -> None:
        self._services = services
        self._extended: dict[KeyId, float] = {}
        self._links = SignInLimit(
            services, LINKS_PER_S, "too many links were tried from this address"
        )
        self._sources: TokenBuckets[str] = TokenBuckets(SIGN_INS_PER_S, services.clock.monotonic)

    async def begin_by_key(self, scope: Mapping[str, Any], key: str) -> StartedSession:
        """Begin a session that may do what an API key may.

        UnauthenticatedError, RateLimitedError.
        """
        services = self._services
        principal = await services.keys.authenticate(
            b"Bearer " + key.encode("utf-8", "replace"), scope.get("client")
        )
        if principal.is_session:
            raise UnauthenticatedError("sign in with an API key, or with a link")
        return await self.begin(
            scope,
            organisation=principal.organisation_id,
            name=principal.key_name or "API key",
            scopes=principal.scopes,
            by="key",
            source=f"key {principal.key_id}",
            parent=principal.key_id,
            presented=principal.text_hash,
        )

    async def begin_by_link(
        self, scope: Mapping[str, Any], token: str, kind: links.LinkKind
    ) -> StartedSession:
        """Begin the session of a link of this kind. UnauthenticatedError, RateLimitedError."""
        # One transaction, because a link that begins no session must not be used up.
        async with (
            self._links.attempt(scope.get("client")) as succeed,
            transaction(self._services.engine) as connection,
        ):
            link = await links.use_link(connection, token, kind)
            if link is None:
                raise UnauthenticatedError(
                    "this link is used up, or has expired; `rooms sign-in` makes another one"
                )
            started = await self.begin(
                scope,
                organisation=link.organisation_id,
                name=link.name,
                scopes=link.scopes,
                restrictions=link.columns,
                ends_at=link.session_end(self._services.clock.now()),
                by=link.kind.value,
                source=f"link {hashlib.sha256(token.encode()).hexdigest()}",
                presented=link.maker_hash,
                maker=link.maker,
                maker_session=link.maker_session,
                within=connection,
            )
            succeed()
            return started

    async def begin(
        self,
        scope: Mapping[str, Any],
        *,
        organisation: OrganisationId,
        name: str,
        scopes: Iterable[Scope],
        restrictions: Mapping[str, Any] | None = None,
        ends_at: datetime | None = None,
        by: str,
        source: str,
        parent: KeyId | None = None,
        presented: bytes | None = None,
        maker: KeyId | None = None,
        maker_session: KeyId | None = None,
        within: AsyncConnection | None = None,
    ) -> StartedSession:
        """Begin a session and write it into the journal.

        `by`: how the person signed in. `source`: what begins at most `SIGN_INS_PER_S`. `parent`:
        the key that was presented; the session has what this key may do. `maker`: the key that
        made the link; `maker_session`: the session that did. `presented`: the hash of the text of
        the key. `within`: the connection of a
        transaction that the caller commits; None: one of its own.

        UnauthenticatedError: the key has just ended, or the maker may do less than the link.
        RateLimitedError: too many sessions of this source.
        """
        services = self._services
        if not self._sources.take(source):
            raise RateLimitedError("too many people sign in with this key or link at once")
        now = services.clock.now()
        text = new_key(services.random)
        granted = frozenset(scopes)
        identity = KeyId(services.ids.generate_global(services.clock.now_ms()))
        own = transaction(services.engine) if within is None else nullcontext(within)
        async with own as connection:
            session = await records.create_session(
                connection,
                new_id=identity,
                organisation=organisation,
                name=name,
                text=text,
                columns={**(restrictions or {}), "scopes": sorted(one.value for one in granted)},
                idle_s=IDLE_S,
                ends_at=ends_at or now + timedelta(seconds=DEFAULT_SESSION_S),
                now=now,
                parent=parent,
                presented=presented,
                maker=maker,
                maker_session=maker_session,
            )
            person = Principal(
                key_id=session.id,
                organisation_id=organisation,
                scopes=session.scopes,
                key_name=name,
                application=session.application,
                is_session=True,
                is_portal=session.is_portal,
            )
            entry = make_entry(
                services,
                person,
                scope,
                action="sign_in",
                object_path=_PATHS[session.is_portal],
                after={"by": by, "scopes": sorted(session.scopes), "key": parent},
            )
            await append(connection, entry)
        max_age_s = max(0, int((session.ends_at - now).total_seconds()))
        return StartedSession(key=text, max_age_s=max_age_s)

    async def extend(self, identity: KeyId) -> None:
        """Note that a session is used: at most one statement a minute."""
        now = self._services.clock.monotonic()
        if now - self._extended.get(identity, -_EXTEND_EVERY_S) < _EXTEND_EVERY_S:
            return
        if len(self._extended) >= _MAX_REMEMBERED:
            del self._extended[next(iter(self._extended))]
        self._extended[identity] = now
        async with transaction(self._services.engine) as connection:
            await records.extend_session(connection, identity, idle_s=IDLE_S)

    async def end(self, scope: Mapping[str, Any], person: Principal) -> None:
        """End a session, and write it into the journal."""
        services = self._services
        async with transaction(services.engine) as connection:
            await records.end_session(connection, person.organisation_id, person.key_id)
            path = _PATHS[person.is_portal]
            entry = make_entry(services, person, scope, action="sign_out", object_path=path)
            await append(connection, entry)


class PartitionedCookie(Cookie):
    """Be sent in a frame of another site, apart from the frames of all other sites."""

    def to_header(self, **kwargs: Any) -> str:
        """Return the value of `Set-Cookie`; Python's cookies do not know the attribute."""
        return f"{super().to_header(**kwargs)}; Partitioned"


def is_portal_path(path: str) -> bool:
    """Return whether a path is one of the portal, whose pages other sites may frame."""
    return path == PORTAL_PATH or path.startswith(f"{PORTAL_PATH}/")


def cookies_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the cookies of a request; what cannot be read is none."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name == b"cookie" and len(value) <= MAX_COOKIES:
            for part in value.decode("latin-1").split(";"):
                # Only what a browser does not count as part of a name (RFC 6265, 5.2): with other
                # spaces before it, a name passes for one that another host may not set.
                key, _, text = part.strip(" \t").partition("=")
                found.setdefault(key, text)
    return found


def is_secure(scope: Mapping[str, Any]) -> bool:
    """Return whether the browser came by HTTPS, to this process or to the proxy before it.

    A client that sends the proxy's header itself only gets a stricter cookie.
    """
    return scope.get("scheme") == "https" or (b"x-forwarded-proto", b"https") in scope["headers"]


def session_key(scope: Mapping[str, Any]) -> str | None:
    """Return the key that the session's cookie holds; None: there is no session.

    A page of a portal has its own cookie, and no other page reads that one.
    """
    return cookies_of(scope).get(_cookie_name(scope)) or None


def session_cookie(scope: Mapping[str, Any], key: str, *, max_age_s: int) -> Cookie:
    """Return the cookie that begins a session; a `max_age_s` of 0 ends it."""
    kind, fields = _kind_of_cookie(scope)
    return kind(
        key=_cookie_name(scope), value=key, path="/", max_age=max_age_s, httponly=True, **fields
    )


def preference_cookie(scope: Mapping[str, Any], name: str, value: str, *, max_age_s: int) -> Cookie:
    """Return the cookie that keeps what a person chose, for the pages of the same kind."""
    kind, fields = _kind_of_cookie(scope)
    path = PORTAL_PATH if is_portal_path(scope["path"]) else "/console"
    return kind(key=f"rooms_{name}", value=value, path=path, max_age=max_age_s, **fields)


def host_bound_name(scope: Mapping[str, Any], name: str) -> str:
    """Return the name of a cookie that, with HTTPS, no other host of the domain can set.

    Its path must be `/`.
    """
    return _SECURE_PREFIX + name if is_secure(scope) else name


def _cookie_name(scope: Mapping[str, Any]) -> str:
    return host_bound_name(scope, PORTAL_COOKIE if is_portal_path(scope["path"]) else COOKIE)


def _kind_of_cookie(scope: Mapping[str, Any]) -> tuple[type[Cookie], dict[str, Any]]:
    secure = is_secure(scope)
    if secure and is_portal_path(scope["path"]):
        return PartitionedCookie, {"secure": True, "samesite": "none"}
    return Cookie, {"secure": secure, "samesite": "lax"}


def form_token(key: str) -> str:
    """Return the token that the forms of a session contain."""
    return hmac.new(key.encode(), _TOKEN_PURPOSE, hashlib.sha256).hexdigest()[:32]


def check_token(key: str, given: object) -> None:
    """Check a form's token. ForbiddenError."""
    if not isinstance(given, str) or not hmac.compare_digest(
        form_token(key).encode(), given.encode("utf-8", "surrogatepass")
    ):
        raise ForbiddenError(
            "this form is not of your session: open the page again, and repeat what you did"
        )


def check_origin(scope: Mapping[str, Any]) -> None:
    """Check that a request that changes something comes from a page of this origin.

    ForbiddenError: another site sent it, or it does not say where it comes from.
    """
    headers = dict(reversed(scope["headers"]))
    site = headers.get(b"sec-fetch-site")
    if site == b"same-origin":
        return
    origin = headers.get(b"origin")
    if site is None and origin is None:
        raise ForbiddenError("the request has no Origin header, which every browser sends")
    host = headers.get(b"host", b"").decode("latin-1")
    # A browser sends no Sec-Fetch-Site to an address without HTTPS.
    if site is not None or _authority((origin or b"").decode("latin-1")) != host:
        raise ForbiddenError("another site sent this form; open the console and do it there")


def _authority(origin: str) -> str | None:
    """Return the host and port of an origin; None: it is no address."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def read_preference(scope: Mapping[str, Any], name: str) -> str | None:
    """Return what a person chose for this browser: `language`, `theme`, `time_zone` or `times`."""
    value = cookies_of(scope).get(f"rooms_{name}")
    # Python takes time that is quadratic in the length to read a quoted value.
    if value is None or len(value) > _MAX_PREFERENCE:
        return None
    try:
        parsed = SimpleCookie(f"x={value}")
    except CookieError:
        return None
    return parsed["x"].value if "x" in parsed else None
