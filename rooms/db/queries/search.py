"""Find resources by a part of their name, and messages by a key, by bounded reads of an index.

What these statements return are candidates: rooms in which the organisation has a part, and ids
that the caller of this module reads again as the principal, by the functions that decide what it
sees.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import MessageId, RoomId, SubscriptionId
from rooms.domain.principal import Principal

MAX_ROOMS: Final = 10_000
"""So many rooms of an organisation are looked at, and so many of others in which it has a part."""
MAX_NAMES: Final = 20_000
"""So many names of a kind are compared with the text."""
MAX_SAME: Final = 1000
"""So many rows with exactly the text are looked at, where they may belong to others."""
MAX_RECENT: Final = 20_000
"""So many of the newest messages are compared, over at most `RECENT_ROOMS` rooms."""
RECENT_ROOMS: Final = 50

_ALLOWED: Final = "(CAST(:rooms AS int4[]) IS NULL OR {id} = ANY (CAST(:rooms AS int4[])))"
_OWN: Final = f"""own AS MATERIALIZED (
    SELECT r.id, r.name FROM rooms r WHERE r.organisation_id = CAST(:organisation AS uuid) AND NOT r.deleting AND {_ALLOWED.format(id="r.id")}
    LIMIT {MAX_ROOMS}
)"""  # noqa: S608 - constants of this module
_SHARED: Final = f"""part AS MATERIALIZED (
    SELECT room_id AS id FROM (SELECT s.room_id FROM subscriptions s WHERE s.organisation_id = CAST(:organisation AS uuid) AND s.status <> 'deleted' LIMIT {MAX_ROOMS}) s
    UNION SELECT room_id FROM (SELECT g.room_id FROM grants g WHERE g.organisation_id = CAST(:organisation AS uuid) AND g.revoked_at IS NULL LIMIT {MAX_ROOMS}) g
), shared AS MATERIALIZED (
    SELECT r.id, r.name FROM part JOIN rooms r ON r.id = part.id
    WHERE r.organisation_id <> CAST(:organisation AS uuid) AND NOT r.deleting AND {_ALLOWED.format(id="r.id")}
)"""  # noqa: S608 - constants of this module
_LIVE: Final = "s.status NOT IN ('deleted', 'rejected', 'terminated')"
"""The condition of the index by name."""
_LIKE: Final = "strpos(lower({name}), lower(:text)) > 0"
_BEST: Final = "{name} <> :text, length({name}), {name}"

ROOM_NAMES: Final = f"""
WITH {_OWN}, {_SHARED}
SELECT r.id, r.name FROM (SELECT * FROM own UNION SELECT * FROM shared) r
WHERE {_LIKE.format(name="r.name")} ORDER BY {_BEST.format(name="r.name")}, r.id LIMIT :limit
"""  # noqa: S608 - constants of this module
# By their exact name, of whatever age; by a part of it, among the newest.
SUBSCRIPTION_NAMES: Final = f"""
WITH {_OWN}, found AS (
    SELECT s.id, s.room_id, s.name FROM (
        SELECT s.id, s.room_id, s.name FROM subscriptions s
        WHERE s.organisation_id = CAST(:organisation AS uuid) AND s.status <> 'deleted' ORDER BY s.id DESC LIMIT {MAX_NAMES}
    ) s WHERE {_LIKE.format(name="s.name")}
    UNION
    SELECT s.id, s.room_id, s.name FROM (
        SELECT s.* FROM subscriptions s WHERE s.name = :text AND {_LIVE} LIMIT {MAX_SAME}
    ) s WHERE s.organisation_id = CAST(:organisation AS uuid)
    UNION
    SELECT s.id, s.room_id, s.name FROM subscriptions s
    WHERE s.name = :text AND {_LIVE} AND s.room_id = ANY (ARRAY(SELECT id FROM own))
)
SELECT f.id::text AS id, f.room_id, f.name, r.name AS room FROM found f JOIN rooms r ON r.id = f.room_id AND NOT r.deleting
WHERE {_ALLOWED.format(id="f.room_id")} AND (CAST(:subscriptions AS uuid[]) IS NULL OR f.id = ANY (CAST(:subscriptions AS uuid[])))
ORDER BY {_BEST.format(name="f.name")}, f.id LIMIT :limit
"""  # noqa: S608 - constants of this module
EVENT_TYPE_NAMES: Final = f"""
WITH {_OWN}, found AS (
    SELECT * FROM (
        SELECT t.room_id, t.name FROM event_types t WHERE t.room_id = ANY (ARRAY(SELECT id FROM own)) LIMIT {MAX_NAMES}
    ) t WHERE {_LIKE.format(name="t.name")}
    UNION
    SELECT t.room_id, t.name FROM event_types t WHERE t.room_id = ANY (ARRAY(SELECT id FROM own)) AND t.name = :text
)
SELECT f.room_id, f.name, own.name AS room FROM found f JOIN own ON own.id = f.room_id
ORDER BY {_BEST.format(name="f.name")}, f.room_id LIMIT :limit
"""  # noqa: S608 - constants of this module
CALLER_IDS: Final = f"""
WITH {_OWN}, {_SHARED}
SELECT * FROM (
    SELECT i.message_id::text AS id FROM message_ids i WHERE i.room_id = ANY (ARRAY(SELECT id FROM own)) AND i.caller_id = :text
    UNION ALL
    SELECT i.message_id::text FROM message_ids i WHERE i.room_id = ANY (ARRAY(SELECT id FROM shared)) AND i.caller_id = :foreign_text
) i ORDER BY i.id DESC LIMIT :limit
"""  # noqa: S608 - constants of this module
BUSINESS_KEYS: Final = f"""
WITH {_OWN}, {_SHARED}
SELECT * FROM (
    SELECT * FROM (
        SELECT m.id::text AS id FROM messages m
        WHERE m.business_key = :text AND m.room_id = ANY (ARRAY(SELECT id FROM own)) LIMIT {MAX_SAME}
    ) m
    UNION ALL
    SELECT m.id::text FROM (
        SELECT m.id, m.publisher_organisation_id FROM messages m
        WHERE m.business_key = :text AND m.room_id = ANY (ARRAY(SELECT id FROM shared)) LIMIT {MAX_SAME}
    ) m WHERE m.publisher_organisation_id = CAST(:organisation AS uuid)
) m ORDER BY m.id DESC LIMIT :limit
"""  # noqa: S608 - constants of this module
# Correlation ids and ordering keys have no index, because each publish would pay for it.
RECENT_KEYS: Final = f"""
WITH newest AS MATERIALIZED (
    SELECT r.id FROM rooms r WHERE r.organisation_id = CAST(:organisation AS uuid) AND NOT r.deleting AND {_ALLOWED.format(id="r.id")}
    ORDER BY r.created_at DESC LIMIT {RECENT_ROOMS}
)
SELECT m.id::text AS id, m.correlation_id = :text AS by_correlation FROM newest CROSS JOIN LATERAL (
    SELECT m.id, m.correlation_id, m.ordering_key FROM messages m WHERE m.room_id = newest.id
    ORDER BY m.id DESC LIMIT {MAX_RECENT} / (SELECT count(*) FROM newest)
) m WHERE m.correlation_id = :text OR m.ordering_key = :text ORDER BY m.id DESC LIMIT :limit
"""  # noqa: S608 - constants of this module
STATEMENTS: Final[Mapping[str, str]] = {
    "rooms": ROOM_NAMES,
    "subscriptions": SUBSCRIPTION_NAMES,
    "event types": EVENT_TYPE_NAMES,
    "caller ids": CALLER_IDS,
    "business keys": BUSINESS_KEYS,
    "recent keys": RECENT_KEYS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRoom:
    """Name a room."""

    id: RoomId
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSubscription:
    """Name a subscription of the organisation, or one to a room of it."""

    id: SubscriptionId
    room_id: RoomId
    room: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEventType:
    """Name an event type of a room that the organisation owns."""

    room_id: RoomId
    room: str
    name: str


class Search:
    """Look for one text on behalf of a principal."""

    def __init__(
        self, connection: AsyncConnection, principal: Principal, wanted: str, *, limit: int
    ) -> None:
        self._connection = connection
        organisation = principal.organisation_id
        subscriptions = principal.subscriptions
        self._parameters: dict[str, Any] = {
            "organisation": organisation,
            "rooms": None if principal.rooms is None else sorted(principal.rooms),
            "subscriptions": None if subscriptions is None else sorted(subscriptions),
            "text": wanted,
            "foreign_text": f"{organisation} {wanted}",
            "limit": limit,
        }

    async def rooms(self) -> Sequence[NamedRoom]:
        """Return rooms, own ones and others, whose name contains the text; the best first."""
        return [NamedRoom(**row) for row in await self._rows(ROOM_NAMES)]

    async def subscriptions(self) -> Sequence[NamedSubscription]:
        """Return subscriptions, own ones and those to own rooms, by their name."""
        return [NamedSubscription(**row) for row in await self._rows(SUBSCRIPTION_NAMES)]

    async def event_types(self) -> Sequence[NamedEventType]:
        """Return event types of own rooms whose name contains the text."""
        return [NamedEventType(**row) for row in await self._rows(EVENT_TYPE_NAMES)]

    async def by_caller_id(self) -> Sequence[MessageId]:
        """Return messages to which the organisation gave the text as their id; newest first."""
        return [MessageId(row["id"]) for row in await self._rows(CALLER_IDS)]

    async def by_business_key(self) -> Sequence[MessageId]:
        """Return messages with the text as their business key."""
        return [MessageId(row["id"]) for row in await self._rows(BUSINESS_KEYS)]

    async def by_recent_key(self) -> Sequence[tuple[MessageId, str]]:
        """Return recent messages of own rooms by correlation id or ordering key, and by which."""
        return [
            (MessageId(row["id"]), "correlation_id" if row["by_correlation"] else "ordering_key")
            for row in await self._rows(RECENT_KEYS)
        ]

    async def _rows(self, statement: str) -> Sequence[Mapping[str, Any]]:
        used = {name: value for name, value in self._parameters.items() if f":{name}" in statement}
        found = await self._connection.execute(text(statement), used)
        return [dict(row) for row in found.mappings()]
