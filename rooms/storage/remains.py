"""What gathers beside the days: rows of old messages in the default partitions, finished jobs, exports long sealed."""

import asyncio
from datetime import datetime
from typing import Final

from rooms.domain.ids import first_id
from rooms.errors import StorageRefusedError
from rooms.storage.engine import Connection
from rooms.storage.patience import BUSY, GoOn, rows
from rooms.storage.retention import OVER

_BATCH: Final = 500
_TRIES: Final = 5
_PAUSE_S: Final = 0.2

# The default partition gets what has no day: of a clock that is far ahead, of weeks without upkeep, and log rows of what is
# gone. While it is locked nobody makes a delivery of a message that goes.
_LOCK: Final = "LOCK TABLE deliveries_rest IN SHARE ROW EXCLUSIVE MODE"
_RANGE: Final = """d.id >= (left(m.id::text, 13) || '-0000-0000-000000000000')::uuid
    AND d.id <= (left(m.id::text, 13) || '-ffff-ffff-ffffffffffff')::uuid AND d.message_id = m.id"""
_LOGGED: Final = """AND NOT EXISTS (
        SELECT FROM delivery_log_rest l WHERE l.room_id = m.room_id AND l.message_id = m.id AND l.xid::text::int8 >= %(below)s::int8)"""
_MESSAGES: Final = f"""
WITH gone AS (
    DELETE FROM messages_rest WHERE ctid = ANY (ARRAY(
        SELECT m.ctid FROM messages_rest m WHERE m.id < %(first)s::uuid AND NOT EXISTS (
            SELECT FROM deliveries d WHERE d.room_id = m.room_id AND {_RANGE} AND NOT {OVER}
        ) {_LOGGED} LIMIT %(limit)s
    )) RETURNING room_id, id, caller_id
), ids AS (
    DELETE FROM message_ids i USING gone g WHERE i.room_id = g.room_id AND i.caller_id = g.caller_id AND i.message_id = g.id
), d AS (
    DELETE FROM deliveries_rest d USING gone m WHERE d.room_id = m.room_id AND {_RANGE}
), l AS (
    DELETE FROM delivery_log_rest l USING gone g WHERE l.room_id = g.room_id AND l.message_id = g.id
) SELECT count(*) FROM gone
"""  # noqa: S608 - text of our own
_LONELY: Final = f"""
WITH d AS (
    DELETE FROM deliveries_rest WHERE ctid = ANY (ARRAY(
        SELECT d.ctid FROM deliveries_rest d WHERE d.id < %(first)s::uuid AND {OVER}
            AND NOT EXISTS (SELECT FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id) LIMIT %(limit)s
    )) RETURNING 1
), l AS (
    DELETE FROM delivery_log_rest WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM delivery_log_rest l WHERE l.message_id < %(first)s::uuid AND l.ts < %(before)s::timestamptz
            AND l.xid::text::int8 < %(below)s::int8
            AND NOT EXISTS (SELECT FROM messages m WHERE m.room_id = l.room_id AND m.id = l.message_id) LIMIT %(limit)s
    )) RETURNING 1
) SELECT (SELECT count(*) FROM d) + (SELECT count(*) FROM l)
"""  # noqa: S608 - text of our own
_ANY: Final = """
SELECT EXISTS (SELECT FROM messages_rest) OR EXISTS (SELECT FROM deliveries_rest) OR EXISTS (SELECT FROM delivery_log_rest)
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


async def empty_rest(connection: Connection, before: datetime, exported: int | None, go_on: GoOn) -> int:
    """Delete old messages that no day has, in batches, as a day's go; how many rows in the end.

    StorageRefusedError: not now. `exported`: as for `Replacement`.
    """
    gone = 0
    below = EVERY_XID if exported is None else exported
    values = {"before": before, "first": first_id(int(before.timestamp() * 1000)), "below": below, "limit": _BATCH}
    if not (await rows(connection, _ANY))[0][0]:
        return 0
    for statement in (_MESSAGES, _LONELY):
        tries = 0
        while go_on():
            try:
                async with connection.transaction():
                    await connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                    await connection.execute(_LOCK)
                    ((count,),) = await rows(connection, statement, **values)
            except BUSY as exc:
                tries += 1
                if tries == _TRIES:
                    raise StorageRefusedError(f"somebody is in the way: {exc}") from exc
                await asyncio.sleep(_PAUSE_S)
                continue
            gone += count
            if not count:
                break
    return gone
