"""Delete what a deleted subscription or room has left, a batch a statement."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.db.bounded_counts import count_bounded
from rooms.db.queries.restored_log import LEAST_RESTORED_END, is_restored
from rooms.db.queue.expire import termination_statement
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId, first_id
from rooms.domain.state_machine import Event, Reason, State, SubscriptionStatus, states_allowing

BATCH: Final = 1000
LOG_BATCH: Final = 10_000
"""Rows of the log that are only read."""
START: Final = first_id(0)
"""An id before every other."""

_OVER: Final = frozenset({SubscriptionStatus.DELETED, SubscriptionStatus.TERMINATED})
_CANCELLABLE: Final = ", ".join(f"'{state}'" for state in sorted(states_allowing(Event.CANCEL)))
# A page is a number of rows of the index, in any state, so that no statement reads a million
# finished ones.
PAGE_OF_DELIVERIES: Final = """
page AS MATERIALIZED (
    SELECT room_id, id, generation, attempt, state, expires_at, message_id FROM deliveries
    WHERE room_id = %(room)s::int4 AND id > %(after)s::uuid {of} ORDER BY id LIMIT %(limit)s::int4
),"""


def _cancel(of: str = "", reason: Reason = Reason.SUBSCRIPTION_DELETED) -> str:
    return termination_statement(
        leading_ctes=PAGE_OF_DELIVERIES.format(of=of),
        candidates=f"SELECT room_id, id, generation, attempt, state, expires_at FROM page WHERE state IN ({_CANCELLABLE})",  # noqa: S608 - constants of this package
        state=State.CANCELLED,
        reason=reason,
        lease_condition="true",
        result_columns="(SELECT count(*) FROM spared), (SELECT count(*) FROM page), (SELECT id::text FROM page ORDER BY id DESC LIMIT 1)",
    )


_CANCEL_ROOM: Final = _cancel()
OF_SUBSCRIPTION: Final = "AND subscription_id = %(subscription)s::uuid"
_CANCEL_SUBSCRIPTION: Final = _cancel(OF_SUBSCRIPTION)
_CANCEL_TERMINATED: Final = _cancel(OF_SUBSCRIPTION, Reason.SUBSCRIPTION_TERMINATED)

_COUNT_DELIVERIES: Final = """
SELECT 0, count(*) FROM (
    SELECT FROM deliveries WHERE room_id = %(room)s AND subscription_id = %(subscription)s::uuid LIMIT %(most)s::int4
) c
"""
_COUNT_ROOM: Final = """
SELECT 0, count(*) FROM (
    SELECT FROM deliveries WHERE room_id = %(room)s
    UNION ALL SELECT FROM log_entries WHERE room_id = %(room)s
    UNION ALL SELECT FROM messages WHERE room_id = %(room)s LIMIT %(most)s::int4
) c
"""
_STATUS: Final = """
SELECT 0, (SELECT status FROM subscriptions WHERE room_id = %(room)s AND id = %(subscription)s::uuid)
"""
_SUBSCRIPTIONS: Final = (
    "SELECT 0, id::text FROM subscriptions WHERE room_id = %(room)s UNION ALL SELECT 0, NULL"
)
_IS_DELETING: Final = "SELECT 0, (SELECT deleting FROM rooms WHERE id = %(room)s)"

# Each batch begins at a key, so that it does not read the dead rows that earlier batches left.
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


_KEYED_BY_TEXT: Final = frozenset(
    {
        "idempotency_keys",
        "message_ids",
        "operational_outbox",
        "operational_overflow",
        "operational_pace",
    }
)
"""Tables whose rows are found by text, not by an id."""


def _delete(table: str, *keys: str) -> str:
    return _DELETE.format(
        table=table,
        keys=", ".join(keys),
        descending=", ".join(f"{key} DESC" for key in keys),
        first=keys[0],
        type="text" if table in _KEYED_BY_TEXT else "uuid",
    )


# Work rows go first, so that no process takes up the work. Rows by which others are found go last.
_DELETE_BY_TABLE: Final = {
    table: _delete(table, *keys)
    for table, *keys in (
        ("outbox", "id"),
        ("held", "id"),
        ("leases", "id"),
        ("sidelined", "id"),
        ("lanes", "id"),
        ("ordered_waiting", "subscription_id", "key", "position"),
        ("ordered_keys", "subscription_id", "key"),
        ("sequences", "subscription_id", "key"),
        ("shovel_schedules", "subscription_id"),
        ("operational_messages", "id"),
        ("operational_outbox", "event", "organisation_id", "id"),
        ("operational_overflow", "event", "organisation_id", "slot"),
        ("operational_pace", "event"),
        ("deliveries", "id"),
        ("log_entries", "message_id", "writer_id", "writer_seq"),
        ("messages", "id"),
        ("idempotency_keys", "key"),
        ("message_ids", "caller_id"),
        ("event_type_versions", "id"),
        ("event_types", "id"),
        ("subscription_history", "id"),
        ("grants", "id"),
        ("subscriptions", "id"),
    )
}
COUNTED_TABLES: Final = frozenset({"deliveries", "log_entries", "messages"})
"""The tables whose rows make up the progress of a room's deletion."""

_DELETE_ROOM: Final = """
WITH gone AS (DELETE FROM rooms WHERE id = %(room)s AND deleting RETURNING 1) SELECT 0, count(*) FROM gone
"""
# The last range of each destination, found by the index of ranges: there may be a range a second.
# Nothing of a destination is known before its first export, so the configured one begins at 0.
_EXPORTS_IN_USE: Final = """
WITH RECURSIVE known AS (
    (SELECT destination FROM log_exports ORDER BY destination LIMIT 1)
    UNION ALL
    SELECT n.destination FROM known k CROSS JOIN LATERAL (
        SELECT e.destination FROM log_exports e WHERE e.destination > k.destination ORDER BY e.destination LIMIT 1
    ) n
), exported AS (
    SELECT k.destination, l.end_xid, l.looked_at FROM known k CROSS JOIN LATERAL (
        SELECT e.end_xid, greatest(e.sealed_at, e.seen_at) AS looked_at FROM log_exports e
        WHERE e.destination = k.destination AND e.system = (SELECT system_identifier::text FROM pg_control_system()) AND e.sealed_at IS NOT NULL
        ORDER BY e.first_xid DESC LIMIT 1
    ) l
)
SELECT 0, w.destination, w.end_xid FROM (SELECT 0) one LEFT JOIN (
    SELECT destination, end_xid FROM exported WHERE looked_at > now() - %(recent_s)s::float8 * interval '1 s'
    UNION SELECT %(destination)s::text, coalesce((SELECT end_xid FROM exported WHERE destination = %(destination)s::text), 0)
    WHERE %(destination)s::text IS NOT NULL
) w ON true
"""
# By the primary key and in pages: by the index of transactions a writer may not search.
_LAST_XID: Final = f"""
WITH page AS MATERIALIZED (
    SELECT message_id, writer_id, writer_seq, xid FROM log_entries
    WHERE room_id = %(room)s::int4 AND message_id >= %(message)s::uuid
        AND (message_id, writer_id, writer_seq) > (%(message)s::uuid, %(writer_id)s::int4, %(writer_seq)s::int8)
    ORDER BY message_id, writer_id, writer_seq LIMIT %(limit)s::int4
), last AS (
    SELECT message_id::text, writer_id, writer_seq FROM page ORDER BY page.message_id DESC, writer_id DESC, writer_seq DESC LIMIT 1
)
SELECT 0, (
    SELECT coalesce(max(xid::text::bigint) FILTER (WHERE NOT ({is_restored("xid::text::bigint", "%(restored_end)s::int8")})), -1) FROM page HAVING count(*) > 0
), last.* FROM (SELECT 0) one LEFT JOIN last ON true
"""  # noqa: S608 - constants of this package
RECENT_EXPORT_S: Final = 2 * 86_400.0
"""Age of its last export up to which a destination is in use, also if nothing exports by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelPage:
    """Describe one step through deliveries: `scanned` rows up to the id `last` (None: no more).

    `cancelled` of them ended. `skipped` are in progress and must be tried again.
    """

    cancelled: int
    skipped: int
    scanned: int
    last: str | None


LogPosition = tuple[str, int, int]
"""A row of a room's log: its message, writer and number."""
LOG_START: Final[LogPosition] = (START, 0, 0)


class DeleteQueries:
    """Delete through one writer.

    StorageUnavailableError: in doubt; StorageRefusedError: nothing happened.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def room_deleting(self, room: RoomId) -> bool | None:
        """Return whether the room's deletion was requested; None: there is no room."""
        rows = await self._writer.run(_IS_DELETING, {"room": room})
        return rows[0][0] if rows else None

    async def subscription_deleted(self, room: RoomId, subscription: SubscriptionId) -> bool | None:
        """Return whether it was deleted or terminated; None: there is none."""
        rows = await self._writer.run(_STATUS, {"room": room, "subscription": subscription})
        return rows[0][0] in _OVER if rows else None

    async def subscriptions(self, room: RoomId) -> list[SubscriptionId]:
        """Return all subscriptions of which the room has a row, including deleted ones."""
        return [
            SubscriptionId(row[0]) for row in await self._writer.run(_SUBSCRIPTIONS, {"room": room})
        ]

    async def count(self, room: RoomId, subscription: SubscriptionId | None) -> int | None:
        """Count the deliveries of a subscription, or (None) all rows of a room that grow.

        None: there are too many.
        """
        statement = _COUNT_ROOM if subscription is None else _COUNT_DELIVERIES
        parameters = {"room": room, "subscription": subscription}
        return await count_bounded(self._writer, statement, parameters)

    async def cancel(
        self,
        room: RoomId,
        subscription: SubscriptionId | None,
        after: str,
        *,
        terminated: bool = False,
        limit: int = BATCH,
    ) -> CancelPage:
        """Cancel the unfinished and sidelined ones among the next deliveries.

        They are those of one subscription, which was deleted or `terminated`, or (None) of all.
        """
        parameters = {"room": room, "after": after, "limit": limit, "host": self._writer.host}
        if subscription is None:
            rows = await self._writer.run(_CANCEL_ROOM, parameters)
        else:
            rows = await self._writer.run(
                _CANCEL_TERMINATED if terminated else _CANCEL_SUBSCRIPTION,
                {**parameters, "subscription": subscription},
            )
        cancelled, spared, seen, last = rows[0]
        return CancelPage(cancelled=cancelled, skipped=spared, scanned=seen, last=last)

    async def delete(
        self, table: str, room: RoomId, after: str, *, limit: int = BATCH
    ) -> tuple[int, str | None]:
        """Delete the next rows of a room.

        Return how many, and the key to continue from (None: there were none).
        """
        count, last = (
            await self._writer.run(
                _DELETE_BY_TABLE[table], {"room": room, "after": after, "limit": limit}
            )
        )[0]
        return int(count), last

    async def exports_in_use(self, destination: str | None) -> Mapping[str, int]:
        """Return this destination and all that are in use, each with the end of its exports.

        A row of the log has been exported if its transaction is below it.
        """
        return dict(
            await self._writer.run(
                _EXPORTS_IN_USE, {"destination": destination, "recent_s": RECENT_EXPORT_S}
            )
        )

    async def restored_end(self, destinations: Sequence[str]) -> int:
        """Return the id below which restored rows have been exported to each destination."""
        rows = await self._writer.run(LEAST_RESTORED_END, {"destinations": list(destinations)})
        return int(rows[0][0])

    async def last_transaction(
        self,
        room: RoomId,
        after: LogPosition,
        *,
        restored_end: int = 0,
        limit: int = LOG_BATCH,
    ) -> tuple[int, LogPosition] | None:
        """Return the last transaction of the next rows of a room's log, and the last of them.

        Restored rows below `restored_end` are passed over; -1: there are no others. None: there are
        no more.
        """
        message, writer_id, writer_seq = after
        rows = await self._writer.run(
            _LAST_XID,
            {
                "room": room,
                "message": message,
                "writer_id": writer_id,
                "writer_seq": writer_seq,
                "restored_end": restored_end,
                "limit": limit,
            },
        )
        for xid, *last in rows:
            return xid, (last[0], last[1], last[2])
        return None

    async def delete_room(self, room: RoomId) -> None:
        """Delete the room's own row, the last of it."""
        await self._writer.run(_DELETE_ROOM, {"room": room})

    @staticmethod
    def tables() -> tuple[tuple[str, str], ...]:
        """Return the tables with rows of a room in the order of deletion, and each first key."""
        return tuple(
            (table, "" if table in _KEYED_BY_TEXT else START) for table in _DELETE_BY_TABLE
        )
