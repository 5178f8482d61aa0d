"""Begin, extend and end sessions; each sign-in and sign-out is an entry of the journal."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.changes import make_entry
from rooms.api.deps import ApiServices
from rooms.api.sessions import DEFAULT_SESSION_S, PORTAL_PATH
from rooms.db.authentication import client_block
from rooms.db.catalog import sessions as records
from rooms.db.catalog.api_keys import new_key
from rooms.db.connection import transaction
from rooms.db.journal import append
from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import RateLimitedError, UnauthenticatedError
from rooms.token_buckets import TokenBuckets

IDLE_S: Final = 3600
"""Seconds without a request after which a session ends."""
_EXTEND_EVERY_S: Final = 60.0
_MAX_REMEMBERED: Final = 10_000
LINKS_PER_S: Final = 2
"""Links that one address may try in a second."""
SIGN_INS_PER_S: Final = 5
"""Sessions that begin with one key in a second: each is a row, with a rate limit of its own."""
_PATHS: Final[Mapping[bool, str]] = {False: "/console", True: PORTAL_PATH}
"""Name what is entered and left for the journal, by whether it is a portal."""


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
        self._links: TokenBuckets[str] = TokenBuckets(LINKS_PER_S, services.clock.monotonic)
        self._keys: TokenBuckets[KeyId] = TokenBuckets(SIGN_INS_PER_S, services.clock.monotonic)

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
        if not self._keys.take(principal.key_id):
            raise RateLimitedError("too many people sign in with this key at once")
        return await self.begin(
            scope,
            organisation=principal.organisation_id,
            name=principal.key_name or "API key",
            scopes=principal.scopes,
            by="key",
            parent=principal.key_id,
            presented=principal.text_hash,
        )

    async def begin_by_link(
        self, scope: Mapping[str, Any], token: str, kind: records.LinkKind
    ) -> StartedSession:
        """Begin the session of a link of this kind. UnauthenticatedError, RateLimitedError."""
        if not self._links.take(client_block(scope.get("client"))):
            raise RateLimitedError("too many links were tried from this address")
        # One transaction, because a link that begins no session must not be used up.
        async with transaction(self._services.engine) as connection:
            link = await records.use_link(connection, token, kind)
            if link is None:
                raise UnauthenticatedError(
                    "this link is used up, or has expired; `rooms sign-in` makes another one"
                )
            return await self.begin(
                scope,
                organisation=link.organisation_id,
                name=link.name,
                scopes=link.scopes,
                restrictions=link.columns,
                ends_at=link.session_end(self._services.clock.now()),
                by=link.kind.value,
                maker=link.maker,
                within=connection,
            )

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
        parent: KeyId | None = None,
        presented: bytes | None = None,
        maker: KeyId | None = None,
        within: AsyncConnection | None = None,
    ) -> StartedSession:
        """Begin a session and write it into the journal.

        `by`: how the person signed in. `parent`: the key that was presented, and the hash of its
        text; the session has what this key may do. `maker`: the key that made the link. `within`:
        the connection of a transaction that the caller commits; None: one of its own.
        UnauthenticatedError: the key has just ended, or the maker may do less than the link.
        """
        services = self._services
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
