"""What gathers beside the days: rows of old messages in the default partitions, finished jobs, exports long sealed."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import first_id
from rooms.errors import StorageRefusedError
from rooms.storage.engine import Connection
from rooms.storage.patience import BUSY, GoOn, rows
from rooms.storage.retention import HELD_MS, OVER

_BATCH: Final = 500
_TRIES: Final = 5
_PAUSE_S: Final = 0.2

# The default partition gets what has no day: of a clock that is far ahead, of weeks without upkeep, and log rows of what is
# gone. What may go is looked for without a lock, as nobody knows how much is there. While it goes nobody makes a delivery of
# it; but every worker's decision waits behind this lock, so no more than a page is deleted under it.
_LOCK: Final = "LOCK TABLE deliveries_rest IN SHARE ROW EXCLUSIVE MODE"
_RANGE: Final = """d.id >= (left(m.id::text, 13) || '-0000-0000-000000000000')::uuid
    AND d.id <= (left(m.id::text, 13) || '-ffff-ffff-ffffffffffff')::uuid AND d.message_id = m.id"""
_GOES: Final = f"""NOT EXISTS (
        SELECT FROM deliveries d WHERE d.room_id = m.room_id AND {_RANGE} AND NOT {OVER}
    ) AND NOT EXISTS (
        SELECT FROM log_entries_rest l WHERE l.room_id = m.room_id AND l.message_id = m.id AND l.xid::text::int8 >= %(below)s::int8
    )"""  # noqa: S608 - text of our own
_OLD: Final = f"""
SELECT m.room_id, m.id FROM messages_rest m
WHERE (m.room_id, m.id) > (%(room)s::int4, %(last)s::uuid) AND m.id < %(first)s::uuid AND {_GOES}
ORDER BY m.room_id, m.id LIMIT %(limit)s
"""  # noqa: S608 - text of our own
_MESSAGES: Final = f"""
WITH gone AS (
    DELETE FROM messages_rest m USING unnest(%(rooms)s::int4[], %(ids)s::uuid[]) AS v (room_id, id)
    WHERE m.room_id = v.room_id AND m.id = v.id AND {_GOES} RETURNING m.room_id, m.id, m.caller_id
), ids AS (
    DELETE FROM message_ids i USING gone g WHERE i.room_id = g.room_id AND i.caller_id = g.caller_id AND i.message_id = g.id
), d AS (
    DELETE FROM deliveries_rest d USING gone m WHERE d.room_id = m.room_id AND {_RANGE}
), l AS (
    DELETE FROM log_entries_rest l USING gone g WHERE l.room_id = g.room_id AND l.message_id = g.id
) SELECT count(*) FROM gone
"""  # noqa: S608 - text of our own
_LONELY: Final = f"""
WITH d AS (
    DELETE FROM deliveries_rest WHERE ctid = ANY (ARRAY(
        SELECT d.ctid FROM deliveries_rest d WHERE d.id < %(first)s::uuid AND {OVER}
            AND NOT EXISTS (SELECT FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id) LIMIT %(limit)s
    )) RETURNING 1
), l AS (
    DELETE FROM log_entries_rest WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM log_entries_rest l WHERE l.message_id < %(first)s::uuid AND l.ts < %(before)s::timestamptz
            AND l.xid::text::int8 < %(below)s::int8
            AND NOT EXISTS (SELECT FROM messages m WHERE m.room_id = l.room_id AND m.id = l.message_id) LIMIT %(limit)s
    )) RETURNING 1
) SELECT (SELECT count(*) FROM d) + (SELECT count(*) FROM l)
"""  # noqa: S608 - text of our own
_ANY: Final = """
SELECT EXISTS (SELECT FROM messages_rest) OR EXISTS (SELECT FROM deliveries_rest) OR EXISTS (SELECT FROM log_entries_rest)
"""
_JOBS: Final = """
WITH gone AS (DELETE FROM jobs WHERE finished_at < %(before)s::timestamptz RETURNING 1) SELECT count(*) FROM gone
"""
# What they have exported in all is told of; the last of them goes on counting it.
_EXPORTS: Final = """
WITH old AS (
    SELECT destination, system, max(id) AS last, sum(rows) AS rows, sum(bytes) AS bytes, sum(files) AS files FROM log_exports
    WHERE sealed_at < %(before)s::timestamptz GROUP BY destination, system HAVING count(*) > 1
), counted AS (
    UPDATE log_exports e SET rows = o.rows, bytes = o.bytes, files = o.files FROM old o WHERE e.id = o.last
), gone AS (
    DELETE FROM log_exports e USING old o WHERE e.destination = o.destination AND e.system = o.system
        AND e.sealed_at < %(before)s::timestamptz AND e.id < o.last RETURNING 1
) SELECT count(*) FROM gone
"""
EVERY_XID: Final = (1 << 63) - 1


async def forget_jobs_and_exports(connection: Connection, before: datetime) -> int:
    """Delete the records of what was done before `before`; how many there were."""
    return sum([(await rows(connection, statement, before=before))[0][0] for statement in (_JOBS, _EXPORTS)])


async def empty_rest(
    connection: Connection, before: datetime, exported: int | None, go_on: GoOn, *, held_ms: int = HELD_MS
) -> int:
    """Delete old messages that no day has, in batches, as a day's go; how many rows in the end.

    StorageRefusedError: not now. `exported`: as for `Replacement`; `held_ms`: how long a batch may hold others up.
    """
    gone = 0
    below = EVERY_XID if exported is None else exported
    values = {"before": before, "first": first_id(int(before.timestamp() * 1000)), "below": below, "limit": _BATCH}
    if not (await rows(connection, _ANY))[0][0]:
        return 0
    room, last = -1, first_id(0)
    while go_on() and (found := await rows(connection, _OLD, **values, room=room, last=last)):
        room, last = found[-1]
        page = {"rooms": [row[0] for row in found], "ids": [row[1] for row in found]}
        gone += await _deleted(connection, _MESSAGES, {**values, **page}, locked_ms=held_ms)
    while go_on() and (count := await _deleted(connection, _LONELY, values)):
        gone += count
    return gone


async def _deleted(
    connection: Connection, statement: str, values: Mapping[str, Any], *, locked_ms: int | None = None
) -> int:
    """How many a statement says; with `locked_ms` while nobody makes a delivery, which may not last longer."""
    for tries in range(1, _TRIES + 1):
        try:
            async with connection.transaction():
                await connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                if locked_ms is not None:
                    await connection.execute(f"SET LOCAL statement_timeout = {locked_ms}")
                    # Frozen in the middle of this, a process would hold everybody up.
                    await connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = {locked_ms}")
                    await connection.execute(_LOCK)
                ((count,),) = await rows(connection, statement, **values)
            return int(count)
        except BUSY as exc:
            if tries == _TRIES:
                raise StorageRefusedError(f"somebody is in the way: {exc}") from exc
            await asyncio.sleep(_PAUSE_S)
    raise AssertionError("the last try returns or raises")
