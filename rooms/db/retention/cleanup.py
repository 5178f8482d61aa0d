"""Delete what is not removed with a day's partitions.

These are rows of old messages in the default partitions, finished jobs, exports sealed long ago
and what they know of writers, idle sequences, expired idempotency keys, and writers that ended long
ago.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rooms.db.connection import Connection
from rooms.db.publish.insert import IDEMPOTENCY_TTL
from rooms.db.queries.restored_log import is_not_exported
from rooms.db.retention.bounded_locks import LOCK_CONFLICTS, ShouldContinue, fetch_rows
from rooms.db.retention.replace import ENDED_LONG_AGO, MAX_LOCK_MS
from rooms.db.statement_parts import session_lives
from rooms.db.writer import LIVENESS_LOCK, LogWriter
from rooms.domain.ids import first_id
from rooms.errors import StorageRefusedError

_DELETE_BATCH: Final = 500
_DELETE_TRIES: Final = 5
_PAUSE_S: Final = 0.2

# The default partition gets rows that have no day: from a clock that is far ahead, from weeks
# without maintenance, and log rows of deleted messages. Deletable rows are searched without a lock,
# because there may be many. While they are deleted no process may make a delivery of them. Every
# worker's outcome waits behind this lock, so no more than a page is deleted under it.
_LOCK_DEFAULT_DELIVERIES: Final = "LOCK TABLE deliveries_rest IN SHARE ROW EXCLUSIVE MODE"
# The messages of a batch share a millisecond, and with it the range of their deliveries: it is read
# once for all of them, or each would read those of the whole batch. "IS TRUE" keeps the planner
# from joining them one by one.
_MOMENTS: Final = "SELECT DISTINCT p.room_id, left(p.id::text, 13) AS at FROM page p"
_RANGE: Final = """d.room_id = t.room_id AND d.id >= (t.at || '-0000-0000-000000000000')::uuid
    AND d.id <= (t.at || '-ffff-ffff-ffffffffffff')::uuid"""
_NOT_EXPORTED: Final = is_not_exported(
    "l.xid::text::int8", "%(below)s::int8", "%(restored_end)s::int8"
)
_STAYING_CTES: Final = f"""moments AS MATERIALIZED ({_MOMENTS}), staying AS MATERIALIZED (
    SELECT DISTINCT d.room_id, d.message_id FROM moments t CROSS JOIN LATERAL (
        SELECT d.room_id, d.message_id FROM deliveries d WHERE {_RANGE} AND NOT {ENDED_LONG_AGO} OFFSET 0
    ) d
)"""  # noqa: S608 - constants of this package
_DELETABLE: Final = f"""(m.room_id, m.id) NOT IN (SELECT room_id, message_id FROM staying) AND NOT EXISTS (
        SELECT FROM log_entries_rest l WHERE l.room_id = m.room_id AND l.message_id = m.id AND {_NOT_EXPORTED}
    )"""  # noqa: S608 - constants of this package
_OLD_MESSAGES: Final = f"""
WITH page AS MATERIALIZED (
    SELECT m.room_id, m.id FROM messages_rest m
    WHERE (m.room_id, m.id) > (%(room)s::int4, %(last)s::uuid) AND m.id < %(first)s::uuid
    ORDER BY m.room_id, m.id LIMIT %(limit)s
), {_STAYING_CTES}
SELECT m.room_id, m.id, {_DELETABLE} FROM page m ORDER BY m.room_id, m.id
"""  # noqa: S608 - constants of this package
_DELETE_MESSAGES: Final = f"""
WITH page AS MATERIALIZED (
    SELECT * FROM unnest(%(rooms)s::int4[], %(ids)s::uuid[]) AS v (room_id, id)
), {_STAYING_CTES}, gone AS (
    DELETE FROM messages_rest m USING page v
    WHERE m.room_id = v.room_id AND m.id = v.id AND {_DELETABLE} RETURNING m.room_id, m.id, m.caller_id
), ids AS (
    DELETE FROM message_ids i USING gone g WHERE i.room_id = g.room_id AND i.caller_id = g.caller_id AND i.message_id = g.id
), d AS (
    DELETE FROM deliveries_rest d USING moments t
    WHERE {_RANGE} AND ((d.room_id, d.message_id) IN (SELECT room_id, id FROM gone)) IS TRUE
), l AS (
    DELETE FROM log_entries_rest l USING gone g WHERE l.room_id = g.room_id AND l.message_id = g.id
) SELECT count(*) FROM gone
"""  # noqa: S608 - constants of this package
_DELETE_WITHOUT_MESSAGE: Final = f"""
WITH d AS (
    DELETE FROM deliveries_rest WHERE ctid = ANY (ARRAY(
        SELECT d.ctid FROM deliveries_rest d WHERE d.id < %(first)s::uuid AND {ENDED_LONG_AGO}
            AND NOT EXISTS (SELECT FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id) LIMIT %(limit)s
    )) RETURNING 1
), l AS (
    DELETE FROM log_entries_rest WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM log_entries_rest l WHERE l.message_id < %(first)s::uuid AND l.ts < %(before)s::timestamptz
            AND NOT {_NOT_EXPORTED}
            AND NOT EXISTS (SELECT FROM messages m WHERE m.room_id = l.room_id AND m.id = l.message_id) LIMIT %(limit)s
    )) RETURNING 1
) SELECT (SELECT count(*) FROM d) + (SELECT count(*) FROM l)
"""  # noqa: S608 - constants of this package
_ANY_IN_DEFAULT: Final = """
SELECT EXISTS (SELECT FROM messages_rest) OR EXISTS (SELECT FROM deliveries_rest) OR EXISTS (SELECT FROM log_entries_rest)
"""
_DELETE_JOBS: Final = """
WITH gone AS (DELETE FROM jobs WHERE finished_at < %(before)s::timestamptz RETURNING 1) SELECT count(*) FROM gone
"""
# The totals of what they exported are reported, so the last of them keeps the sums.
_DELETE_EXPORTS: Final = """
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
# A destination that is not used any more. If it is used again, it begins like a new one.
_DELETE_EXPORT_WRITERS: Final = """
WITH gone AS (
    DELETE FROM log_export_writers w WHERE NOT EXISTS (
        SELECT FROM log_exports e WHERE e.destination = w.destination AND e.system = split_part(w.system, '/', 1)
            AND (e.sealed_at IS NULL OR greatest(e.sealed_at, e.seen_at) >= %(before)s::timestamptz)
    ) RETURNING 1
) SELECT count(*) FROM gone
"""
# A key that was idle for so long has no message that a consumer could compare the next one with,
# but for one in progress. Pages by primary key, so that no statement reads a million rows.
_DELETE_SEQUENCES: Final = """
WITH page AS MATERIALIZED (
    SELECT room_id, subscription_id, key, updated_at FROM sequences
    WHERE (room_id, subscription_id, key) > (%(room)s::int4, %(subscription)s::uuid, %(key)s::bytea)
    ORDER BY room_id, subscription_id, key LIMIT %(limit)s
), gone AS (
    DELETE FROM sequences s USING page p
    WHERE p.updated_at < %(before)s::timestamptz AND s.room_id = p.room_id AND s.subscription_id = p.subscription_id
        AND s.key = p.key AND s.updated_at < %(before)s::timestamptz AND NOT EXISTS (
            SELECT FROM ordered_keys k WHERE k.room_id = s.room_id AND k.subscription_id = s.subscription_id AND k.key = s.key)
    RETURNING 1
) SELECT (SELECT count(*) FROM gone), p.room_id, p.subscription_id, p.key
FROM page p ORDER BY p.room_id DESC, p.subscription_id DESC, p.key DESC LIMIT 1
"""
_SEQUENCE_BATCH: Final = 5_000
MAX_XID: Final = (1 << 63) - 1


async def delete_old_jobs_and_exports(connection: Connection, before: datetime) -> int:
    """Delete the records of jobs and exports that ended before `before`.

    And those of writers for destinations without a later export. Return how many there were.
    """
    return sum(
        [
            (await fetch_rows(connection, statement, before=before))[0][0]
            for statement in (_DELETE_JOBS, _DELETE_EXPORTS, _DELETE_EXPORT_WRITERS)
        ]
    )


async def delete_idle_sequences(
    connection: Connection,
    before: datetime,
    should_continue: ShouldContinue,
    *,
    limit: int = _SEQUENCE_BATCH,
) -> int:
    """Delete the sequences whose key has had no message since `before`; return how many.

    Such a key starts again at 1. StorageRefusedError: not now.
    """
    gone, position = 0, {"room": -1, "subscription": first_id(0), "key": b""}
    while should_continue():
        found = await _delete_page(
            connection, _DELETE_SEQUENCES, {**position, "before": before, "limit": limit}
        )
        if not found:
            break
        count, room, subscription, key = found[0]
        gone += count
        position = {"room": room, "subscription": subscription, "key": key}
    return gone


async def clean_default_partitions(
    connection: Connection,
    before: datetime,
    exported: int | None,
    should_continue: ShouldContinue,
    *,
    restored_end: int = 0,
    lock_ms: int = MAX_LOCK_MS,
) -> int:
    """Delete old messages of the default partitions in batches; return how many rows were deleted.

    StorageRefusedError: not now. `exported` and `restored_end`: as for `PartitionReplacement`;
    `lock_ms`: how long a batch may hold others up.
    """
    gone = 0
    below = MAX_XID if exported is None else exported
    values = {
        "before": before,
        "first": first_id(int(before.timestamp() * 1000)),
        "below": below,
        "restored_end": restored_end,
        "limit": _DELETE_BATCH,
    }
    if not (await fetch_rows(connection, _ANY_IN_DEFAULT))[0][0]:
        return 0
    room, last = -1, first_id(0)
    while should_continue() and (
        found := await fetch_rows(connection, _OLD_MESSAGES, **values, room=room, last=last)
    ):
        room, last, _ = found[-1]
        old = [(message_room, message) for message_room, message, may_go in found if may_go]
        if old:
            page = {"rooms": [row[0] for row in old], "ids": [row[1] for row in old]}
            gone += await _delete_counted(
                connection, _DELETE_MESSAGES, {**values, **page}, locked_ms=lock_ms
            )
    while should_continue() and (
        count := await _delete_counted(connection, _DELETE_WITHOUT_MESSAGE, values)
    ):
        gone += count
    return gone


async def _delete_counted(
    connection: Connection,
    statement: str,
    values: Mapping[str, Any],
    *,
    locked_ms: int | None = None,
) -> int:
    """Execute a deletion and return its count; see `_delete_page`."""
    ((count,),) = await _delete_page(connection, statement, values, locked_ms=locked_ms)
    return int(count)


async def _delete_page(
    connection: Connection,
    statement: str,
    values: Mapping[str, Any],
    *,
    locked_ms: int | None = None,
) -> Sequence[Sequence[Any]]:
    """Execute a deletion and return its rows.

    With `locked_ms` it runs while no delivery can be made, for at most so long.
    """
    for tries in range(1, _DELETE_TRIES + 1):
        try:
            async with connection.transaction():
                await connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                if locked_ms is not None:
                    await connection.execute(f"SET LOCAL statement_timeout = {locked_ms}")
                    # If the process is suspended in the middle of this, the server ends the
                    # session, so that others can go on.
                    await connection.execute(
                        f"SET LOCAL idle_in_transaction_session_timeout = {locked_ms}"
                    )
                    await connection.execute(_LOCK_DEFAULT_DELIVERIES)
                return await fetch_rows(connection, statement, **values)
        except LOCK_CONFLICTS as exc:
            if tries == _DELETE_TRIES:
                raise StorageRefusedError(f"another transaction holds a lock: {exc}") from exc
            await asyncio.sleep(_PAUSE_S)
    raise AssertionError("the last try returns or raises")


DEAD_WRITER_TTL: Final = "7 days"
"""The time for which a dead writer stays on record."""

_DELETE_EXPIRED_KEYS: Final = f"""
WITH old AS MATERIALIZED (
    SELECT room_id, key FROM idempotency_keys WHERE created_at <= now() - interval '{IDEMPOTENCY_TTL}'
    LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM idempotency_keys k
    WHERE k.room_id = ANY (ARRAY(SELECT DISTINCT room_id FROM old)) AND k.key = ANY (ARRAY(SELECT key FROM old))
        AND k.created_at <= now() - interval '{IDEMPOTENCY_TTL}'
    RETURNING 1
)
SELECT 0, count(*) FROM gone
"""  # noqa: S608 - constants of this package

# The log keeps the numbers of deleted writers; nothing else refers to them.
_DELETE_DEAD_WRITERS: Final = f"""
WITH old AS MATERIALIZED (
    SELECT id FROM writers w WHERE started_at <= now() - interval '{DEAD_WRITER_TTL}' AND NOT {session_lives("w.id")} ORDER BY id LIMIT %(limit)s::int4
), gone AS (
    DELETE FROM writers w USING old WHERE w.id = old.id
        AND w.id NOT IN (SELECT worker FROM outbox WHERE worker IS NOT NULL)
    RETURNING 1
)
SELECT 0, count(*) FROM gone
"""  # noqa: S608 - constants of this package


async def delete_expired_keys(writer: LogWriter, *, limit: int) -> int:
    """Delete expired idempotency keys; return how many there were.

    Errors: those of `LogWriter.run`.
    """
    return int((await writer.run(_DELETE_EXPIRED_KEYS, {"limit": limit}))[0][0])


async def delete_dead_writers(writer: LogWriter, *, limit: int) -> int:
    """Delete writers whose session ended long ago and that claim nothing; return how many.

    Errors: those of `LogWriter.run`.
    """
    return int(
        (await writer.run(_DELETE_DEAD_WRITERS, {"life": LIVENESS_LOCK, "limit": limit}))[0][0]
    )
