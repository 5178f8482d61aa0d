"""Store the sessions of people in the console, and the links that begin them.

A session is an API key of its own kind, so what holds for keys holds for it: scopes, restrictions,
and the second after which a revoked one is refused everywhere. It ends when it was idle for a while
(`expires_at` moves with its use), and at `ends_at` in any case. A link works once, or, for a
portal, until it expires. Only hashes of their texts are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import RowMapping, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.catalog.api_keys import KeyKind, hash_key, last_use
from rooms.db.tables.organisations import api_keys, sign_in_links
from rooms.domain.ids import KeyId, OrganisationId, room_of
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import UnauthenticatedError

_SCOPES: Final = frozenset(Scope)
_GIVEN_BY_KEY: Final = (
    "scopes",
    "application",
    "rooms",
    "event_types",
    "subscriptions",
    "networks",
)
KEPT_S: Final = 86_400
"""Seconds for which ended sessions and expired links stay on record."""
_CLEANUP_BATCH: Final = 1000
MAX_LIVE_OF_LINK: Final = 100
"""Sessions of one portal link that live at once. Each has a rate limit of its own.

A further one ends the one that would end first. Each time that a page with a portal is loaded, a
session begins, and that of the time before is left behind: to refuse would lock its people out.
"""


DEFAULT_SESSION_S: Final = 43_200
"""Seconds after which a session ends in any case, unless the maker of its link says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Describe a session."""

    id: KeyId
    organisation_id: OrganisationId
    name: str
    """Of the person, or of the key that was presented."""
    scopes: frozenset[Scope]
    application: str | None
    created_at: datetime
    last_used_at: datetime | None
    """To the hour."""
    expires_at: datetime
    """It ends then, if it is not used before."""
    ends_at: datetime
    """It ends then in any case."""
    is_portal: bool
    """It opens the pages of a portal, and no other."""


async def create_session(
    connection: AsyncConnection,
    *,
    new_id: str,
    organisation: OrganisationId,
    name: str,
    text: str,
    columns: Mapping[str, Any],
    idle_s: int,
    ends_at: datetime,
    now: datetime,
    parent: KeyId | None = None,
    presented: bytes | None = None,
    maker: KeyId | None = None,
    maker_session: KeyId | None = None,
) -> Session:
    """Store a session. `columns`: its scopes and restrictions.

    `parent`: the key that was presented, with the hash of its text (`presented`). The session gets
    what this key may do now instead of `columns`, and ends with it. `maker`: the key that made the
    link, with the hash of the text that did; the session ends with it, too. So it does with the
    `maker_session` that made the link. UnauthenticatedError: the key or that session was revoked,
    rotated or ended since, or the maker may do less than the link.

    `columns` with a `link_hash`: as `use_link` in this transaction returned it, and one of
    `MAX_LIVE_OF_LINK` sessions of the link ends.
    """
    parent_hash = None
    if parent is not None or maker is not None:
        key = await _lock_parent(connection, organisation, parent or maker, presented)
        if parent is not None:
            columns = {column: key[column] for column in _GIVEN_BY_KEY}
        elif not _includes(key, columns):
            raise UnauthenticatedError("the key that made this link may do less now")
        ends = (ends_at, key["expires_at"], key["previous_until"])
        ends_at = min(end for end in ends if end is not None)
        parent_hash = presented or key["key_hash"]
    if maker_session is not None:
        await _lock_maker_session(connection, maker_session)
    if (link_hash := columns.get("link_hash")) is not None:
        await _end_surplus(connection, link_hash)
    row = await connection.execute(
        insert(api_keys)
        .values(
            id=new_id,
            organisation_id=organisation,
            name=name,
            kind=KeyKind.SESSION.value,
            key_hash=hash_key(text.encode()),
            parent_id=parent or maker,
            parent_hash=parent_hash,
            ends_at=ends_at,
            expires_at=min(ends_at, now + timedelta(seconds=idle_s)),
            **columns,
        )
        .returning(api_keys)
    )
    return _session(row.mappings().one())


async def _end_surplus(connection: AsyncConnection, link_hash: bytes) -> None:
    """End sessions of a link that leave no room for a further one.

    `use_link` has locked the link until the commit, so no other session of it begins meanwhile.
    """
    surplus = (
        select(api_keys.c.id)
        .where(
            api_keys.c.link_hash == link_hash,
            api_keys.c.revoked_at.is_(None),
            api_keys.c.expires_at > func.now(),
        )
        .order_by(api_keys.c.expires_at.desc(), api_keys.c.id.desc())
        .offset(MAX_LIVE_OF_LINK - 1)
    )
    await connection.execute(
        update(api_keys).where(api_keys.c.id.in_(surplus)).values(revoked_at=func.now())
    )


async def _lock_parent(
    connection: AsyncConnection,
    organisation: OrganisationId,
    parent: KeyId | None,
    presented: bytes | None,
) -> Mapping[str, Any]:
    """Return the row of a key that is valid, and keep it from changing until the commit.

    `previous_until` is None unless the text before the last rotation was presented.
    """
    row = await connection.execute(
        select(
            *(api_keys.c[column] for column in (*_GIVEN_BY_KEY, "expires_at", "key_hash")),
            api_keys.c.previous_key_hash,
            api_keys.c.previous_until,
            (api_keys.c.previous_until > func.now()).label("previous_is_valid"),
        )
        .where(
            api_keys.c.id == parent,
            api_keys.c.organisation_id == organisation,
            api_keys.c.kind != KeyKind.SESSION.value,
            api_keys.c.revoked_at.is_(None),
            or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > func.now()),
        )
        .with_for_update(read=True)
    )
    key = row.mappings().one_or_none()
    if key is not None and presented in {None, key["key_hash"]}:
        return {**key, "previous_until": None}
    if key is None or not key["previous_is_valid"] or key["previous_key_hash"] != presented:
        raise UnauthenticatedError("this key was revoked, rotated, or has ended")
    return dict(key)


async def _lock_maker_session(connection: AsyncConnection, identity: KeyId) -> None:
    """Keep the session that made a link from being ended until the commit."""
    valid = select(api_keys.c.id).where(api_keys.c.id == identity, api_keys.c.revoked_at.is_(None))
    if await connection.scalar(valid.with_for_update(read=True)) is None:
        raise UnauthenticatedError("the session that made this link has ended")


def _includes(key: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Return whether a key may do all that a link gives, of which it is the maker."""
    maker, session = _abilities(key), _abilities(given)
    if not maker.scopes.isdisjoint((Scope.MANAGE, Scope.OPERATE)):
        maker = replace(maker, scopes=maker.scopes | {Scope.VIEW})
    is_same_application = maker.application in {None, session.application}
    return is_same_application and maker.includes(session)


def _abilities(columns: Mapping[str, Any]) -> Principal:
    """Return what a key or a link with these columns may do, within one organisation."""
    rooms, subscriptions = columns.get("rooms"), columns.get("subscriptions")
    if rooms is None and subscriptions is not None:
        rooms = map(room_of, subscriptions)
    event_types, networks = columns.get("event_types"), columns.get("networks")
    return Principal(
        key_id=KeyId(""),
        organisation_id=OrganisationId(""),
        scopes=known_scopes(columns["scopes"]),
        application=columns.get("application"),
        rooms=None if rooms is None else frozenset(rooms),
        subscriptions=None if subscriptions is None else frozenset(subscriptions),
        event_types=None if event_types is None else tuple(event_types),
        networks=None if networks is None else tuple(networks),
    )


async def find_session_end(connection: AsyncConnection, identity: KeyId) -> datetime | None:
    """Return the last moment of a session; None: there is none of this id."""
    end: datetime | None = await connection.scalar(
        select(api_keys.c.ends_at).where(api_keys.c.id == identity)
    )
    return end


async def extend_session(connection: AsyncConnection, identity: KeyId, *, idle_s: int) -> None:
    """Move the end of a session that is being used, never beyond its last."""
    await connection.execute(
        update(api_keys)
        .where(
            api_keys.c.id == identity,
            api_keys.c.kind == KeyKind.SESSION.value,
            api_keys.c.revoked_at.is_(None),
            api_keys.c.expires_at > func.now(),
        )
        .values(
            expires_at=func.least(
                api_keys.c.ends_at, func.now() + func.make_interval(0, 0, 0, 0, 0, 0, idle_s)
            )
        )
    )


async def end_session(
    connection: AsyncConnection, organisation: OrganisationId, identity: str
) -> Session | None:
    """End a session; every process refuses it within a second. None: there is none.

    The portal sessions of its links end with it.
    """
    found = await connection.execute(
        update(api_keys)
        .where(
            api_keys.c.id == identity,
            api_keys.c.organisation_id == organisation,
            api_keys.c.kind == KeyKind.SESSION.value,
        )
        .values(revoked_at=func.coalesce(api_keys.c.revoked_at, func.now()))
        .returning(api_keys)
    )
    row = found.mappings().one_or_none()
    if row is None:
        return None
    await end_sessions_of_links(connection, [KeyId(row["id"])])
    return _session(row)


async def end_sessions_of_links(connection: AsyncConnection, makers: Sequence[KeyId]) -> None:
    """End the portal sessions that began by links of these sessions.

    The rows of these were changed before, by the same transaction: a session that begins at the
    same time locks them, so it either exists now or finds its maker ended.
    """
    links = select(sign_in_links.c.token_hash).where(sign_in_links.c.session_id.in_(makers))
    await connection.execute(
        update(api_keys)
        .where(api_keys.c.link_hash.in_(links), api_keys.c.revoked_at.is_(None))
        .values(revoked_at=func.now())
    )


async def list_sessions(
    connection: AsyncConnection, organisation: OrganisationId, *, before: str | None, limit: int
) -> Sequence[Session]:
    """Return the sessions of an organisation that have not ended, newest first."""
    statement = select(api_keys).where(
        api_keys.c.organisation_id == organisation,
        api_keys.c.kind == KeyKind.SESSION.value,
        api_keys.c.revoked_at.is_(None),
        api_keys.c.expires_at > func.now(),
    )
    if before is not None:
        statement = statement.where(api_keys.c.id < before)
    rows = await connection.execute(statement.order_by(api_keys.c.id.desc()).limit(limit))
    return [_session(row) for row in rows.mappings()]


async def find_presented(connection: AsyncConnection, principal: Principal) -> bytes | None:
    """Return the hash of the key's text by which a principal acts, also by a session of the key.

    A link that it makes ends with this text. None: it acts by no text of a key.
    """
    if not principal.is_session:
        return principal.text_hash
    found: bytes | None = await connection.scalar(
        select(api_keys.c.parent_hash).where(api_keys.c.id == principal.key_id)
    )
    return found


async def delete_ended(connection: AsyncConnection) -> int:
    """Delete a page of ended sessions and expired links; return how many rows went."""
    before = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, KEPT_S)
    ended = (
        select(api_keys.c.id)
        .where(api_keys.c.kind == KeyKind.SESSION.value, api_keys.c.expires_at < before)
        .limit(_CLEANUP_BATCH)
    )
    sessions = await connection.execute(delete(api_keys).where(api_keys.c.id.in_(ended)))
    expired = (
        select(sign_in_links.c.token_hash)
        .where(sign_in_links.c.expires_at < before)
        .limit(_CLEANUP_BATCH)
    )
    links = await connection.execute(
        delete(sign_in_links).where(sign_in_links.c.token_hash.in_(expired))
    )
    return sessions.rowcount + links.rowcount


def _session(row: RowMapping) -> Session:
    return Session(
        id=KeyId(row["id"]),
        organisation_id=OrganisationId(row["organisation_id"]),
        name=row["name"],
        scopes=known_scopes(row["scopes"]),
        application=row["application"],
        created_at=row["created_at"],
        last_used_at=last_use(row),
        expires_at=row["expires_at"],
        ends_at=row["ends_at"],
        is_portal=row["portal"],
    )


def known_scopes(names: Sequence[str]) -> frozenset[Scope]:
    """Return stored scopes without those of a newer version."""
    return frozenset(Scope(name) for name in names if name in _SCOPES)
