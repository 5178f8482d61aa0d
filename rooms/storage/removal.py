"""Taking away what a deleted subscription or room has left, a batch a statement."""

from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import RoomId, SubscriptionId, first_id
from rooms.domain.states import Event, Reason, State, SubscriptionStatus
from rooms.domain.transitions import sources
from rooms.storage.ends import end_statement
from rooms.storage.writer import Writer

BATCH: Final = 1000
START: Final = first_id(0)
"""Before every id."""

_OPEN: Final = ", ".join(f"'{state}'" for state in sorted(sources(Event.CANCEL)))
# A page is so many rows of the index, whatever their state, so that no statement walks over a million finished ones.
_PAGE: Final = """
page AS MATERIALIZED (
    SELECT room_id, id, generation, attempt, state, expires_at FROM deliveries
    WHERE room_id = %(room)s::int4 AND id > %(after)s::uuid {of} ORDER BY id LIMIT %(limit)s::int4
),"""


def _cancel(of: str = "") -> str:
    return end_statement(
        given=_PAGE.format(of=of),
        candidates=f"SELECT * FROM page WHERE state IN ({_OPEN})",  # noqa: S608 - words of our own
        state=State.CANCELLED,
        reason=Reason.SUBSCRIPTION_DELETED,
        lease_goes="true",
        answer="(SELECT count(*) FROM spared), (SELECT count(*) FROM page), (SELECT id::text FROM page ORDER BY id DESC LIMIT 1)",
    )


_CANCEL_ROOM: Final = _cancel()
_CANCEL_SUBSCRIPTION: Final = _cancel("AND subscription_id = %(subscription)s::uuid")

_COUNT_DELIVERIES: Final = """
SELECT 0, count(*) FROM deliveries WHERE room_id = %(room)s AND subscription_id = %(subscription)s::uuid
"""
_COUNT_ROOM: Final = """
SELECT 0, (SELECT count(*) FROM deliveries WHERE room_id = %(room)s)
    + (SELECT count(*) FROM log_entries WHERE room_id = %(room)s)
    + (SELECT count(*) FROM messages WHERE room_id = %(room)s)
"""
_STATUS: Final = """
SELECT 0, (SELECT status FROM subscriptions WHERE room_id = %(room)s AND id = %(subscription)s::uuid)
"""
_SUBSCRIPTIONS: Final = "SELECT 0, id::text FROM subscriptions WHERE room_id = %(room)s UNION ALL SELECT 0, NULL"
_DELETING: Final = "SELECT 0, (SELECT deleting FROM rooms WHERE id = %(room)s)"

# From one key on, so that a batch does not walk over the rows that those before it left dead.
_DELETE: Final = """
WITH last AS MATERIALIZED (
    SELECT * FROM (
        SELECT {keys} FROM {table} WHERE room_id = %(room)s::int4 AND {first} >= %(after)s::{type}
        ORDER BY {keys} LIMIT %(limit)s::int4
    ) v ORDER BY {descending} LIMIT 1
), gone AS (
    DELETE FROM {table} WHERE room_id = %(room)s::int4 AND {first} >= %(after)s::{type}
        AND {first} <= (SELECT {first} FROM last) AND ({keys}) <= (SELECT {keys} FROM last) RETURNING 1
)
SELECT 0, (SELECT count(*) FROM gone), (SELECT {first}::text FROM last)
"""


_BY_TEXT: Final = frozenset({"idempotency_keys", "message_ids"})
"""Their rows are found by text, not by an id of ours."""


def _delete(table: str, *keys: str) -> str:
    return _DELETE.format(
        table=table,
        keys=", ".join(keys),
        descending=", ".join(f"{key} DESC" for key in keys),
        first=keys[0],
        type="text" if table in _BY_TEXT else "uuid",
    )


# Work first, so that nobody takes it up; what others find their way by goes last.
_TABLES: Final = {
    table: _delete(table, *keys)
    for table, *keys in (
        ("outbox", "id"),
        ("held", "id"),
        ("leases", "id"),
        ("sidelined", "id"),
        ("lanes", "id"),
        ("ordered_waiting", "subscription_id", "key", "position"),
        ("ordered_keys", "subscription_id", "key"),
        ("shovel_schedules", "subscription_id"),
        ("deliveries", "id"),
        ("log_entries", "message_id", "writer_id", "writer_seq"),
        ("messages", "id"),
        ("idempotency_keys", "key"),
        ("message_ids", "caller_id"),
        ("event_type_versions", "id"),
        ("event_types", "id"),
        ("subscriptions", "id"),
    )
}
COUNTED: Final = frozenset({"deliveries", "log_entries", "messages"})
"""The tables whose rows make up the progress of a room's deletion."""

_DELETE_ROOM: Final = """
WITH gone AS (DELETE FROM rooms WHERE id = %(room)s AND deleting RETURNING 1) SELECT 0, count(*) FROM gone
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One step through deliveries: `seen` rows up to the id `last` (None: there were none after the one given), of
    which `cancelled` ended, and `spared` are under way and must be looked at again.
    """

    cancelled: int
    spared: int
    seen: int
    last: str | None


class Removal:
    """Removes through one writer. StorageUnavailableError: in doubt; StorageRefusedError: nothing happened."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def room_deleting(self, room: RoomId) -> bool | None:
        """Whether the room's deletion was asked for; None: there is no room."""
        rows = await self._writer.run(_DELETING, {"room": room})
        return rows[0][0] if rows else None

    async def subscription_deleted(self, room: RoomId, subscription: SubscriptionId) -> bool | None:
        """Whether the subscription's deletion was asked for; None: there is none."""
        rows = await self._writer.run(_STATUS, {"room": room, "subscription": subscription})
        return bool(rows[0][0] == SubscriptionStatus.DELETED) if rows else None

    async def subscriptions(self, room: RoomId) -> list[SubscriptionId]:
        """All that the room has a row of, deleted ones too."""
        return [SubscriptionId(row[0]) for row in await self._writer.run(_SUBSCRIPTIONS, {"room": room})]

    async def count(self, room: RoomId, subscription: SubscriptionId | None) -> int:
        """The deliveries of a subscription; of a room (None) all rows that grow."""
        statement = _COUNT_ROOM if subscription is None else _COUNT_DELIVERIES
        rows = await self._writer.run(statement, {"room": room, "subscription": subscription})
        return int(rows[0][0])

    async def cancel(
        self, room: RoomId, subscription: SubscriptionId | None, after: str, *, limit: int = BATCH
    ) -> Page:
        """Cancel what is unfinished or sidelined among the next deliveries, of one subscription or (None) all."""
        parameters = {"room": room, "after": after, "limit": limit, "host": self._writer.host}
        if subscription is None:
            rows = await self._writer.run(_CANCEL_ROOM, parameters)
        else:
            rows = await self._writer.run(_CANCEL_SUBSCRIPTION, {**parameters, "subscription": subscription})
        cancelled, spared, seen, last = rows[0]
        return Page(cancelled=cancelled, spared=spared, seen=seen, last=last)

    async def delete(self, table: str, room: RoomId, after: str, *, limit: int = BATCH) -> tuple[int, str | None]:
        """Delete the next rows of a room; how many, and from where to go on (None: there were none)."""
        count, last = (await self._writer.run(_TABLES[table], {"room": room, "after": after, "limit": limit}))[0]
        return int(count), last

    async def delete_room(self, room: RoomId) -> None:
        """Delete the room itself, the last of it."""
        await self._writer.run(_DELETE_ROOM, {"room": room})

    @staticmethod
    def tables() -> tuple[tuple[str, str], ...]:
        """Everything that names a room, in the order of its deletion, and where each begins."""
        return tuple((table, "" if table in _BY_TEXT else START) for table in _TABLES)
