"""Give scheduled deliveries that are due within the broker's look-ahead to the relay.

One statement serves all rooms.

Rows are found by an index that begins with a slot, a hash of the delivery's id. A schedule shard is
a range of slots. The number of shards is one row that may be changed at any time: no work row moves
then, and the statement reads it anew.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.pg_arrays import number_array
from rooms.db.statement_parts import JOIN_MESSAGE
from rooms.db.tables.processes import due_buckets
from rooms.db.writer import LogWriter
from rooms.domain.state_machine import LogKind, State
from rooms.domain.work_location import SCHEDULED, TO_RELAY

HASH_SLOTS: Final = 256
"""There cannot be more shards than slots."""

# Two processes that stage one shard at once see the same rows, and each row is changed by one of
# them: the other waits for it, and finds it changed.
_STAGE_DUE: Final = f"""
WITH s AS MATERIALIZED (
    SELECT slot FROM due_buckets n CROSS JOIN unnest(%(buckets)s::int4[]) AS b (bucket) CROSS JOIN LATERAL
        generate_series(b.bucket * {HASH_SLOTS} / n.count, (b.bucket + 1) * {HASH_SLOTS} / n.count - 1) AS slot
    WHERE n.one AND b.bucket < n.count
), near AS MATERIALIZED (
    SELECT s.slot, o.room_id, o.id FROM s CROSS JOIN LATERAL (
        SELECT room_id, id FROM outbox
        WHERE kind IN ({SCHEDULED[0]:d}, {SCHEDULED[1]:d}) AND (uuid_hash(id) & {HASH_SLOTS - 1}) = s.slot
            AND due_at <= now() + %(lookahead)s::int8 * interval '1 ms'
        ORDER BY due_at LIMIT %(limit)s::int4
    ) o
), o AS (
    UPDATE outbox o SET kind = o.kind - {SCHEDULED[0] - TO_RELAY[0]:d} FROM near p
    WHERE o.room_id = ANY (ARRAY[p.room_id]) AND o.id = p.id AND o.kind + 0 BETWEEN {SCHEDULED[0]:d} AND {SCHEDULED[1]:d}
        AND o.due_at <= now() + %(lookahead)s::int8 * interval '1 ms'
    RETURNING o.room_id, o.id
), d AS (
    UPDATE deliveries t SET state = '{State.QUEUED}', updated_at = now()
    FROM o WHERE t.room_id = ANY (ARRAY[o.room_id]) AND t.id = o.id AND t.state = '{State.SCHEDULED}'
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, worker_host, correlation_id, event_type, event_version)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.COMING_DUE}',
        d.subscription_id, d.id, d.generation, d.attempt, %(host)s::text, m.correlation_id, m.event_type, m.event_version
    FROM d {JOIN_MESSAGE} RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM o),
    coalesce((SELECT max(n) FROM (SELECT count(*) AS n FROM near GROUP BY slot) full_slots), 0) >= %(limit)s::int4
"""  # noqa: S608 - constants of this package

_SHARD_COUNT: Final = "SELECT 0, (SELECT count FROM due_buckets WHERE one)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Hold how many rows moved, and whether there may be more right now."""

    staged: int
    has_more: bool


async def stage_due(writer: LogWriter, *, shards: Sequence[int], limit: int) -> StageResult:
    """Give what is due within the lookahead to the relay.

    The earliest of each slot come first, `limit` of each. Generation and attempt stay: no copy of
    this version was ever sent. Errors: those of `LogWriter.run`.
    """
    parameters = {"buckets": number_array(shards), "limit": limit, "host": writer.host}
    ((moved, more),) = await writer.run(_STAGE_DUE, parameters)
    return StageResult(staged=int(moved), has_more=bool(more))


async def schedule_shard_count(writer: LogWriter) -> int:
    """Return the number of schedule shards. Errors: those of `LogWriter.run`."""
    return int((await writer.run(_SHARD_COUNT, {}))[0][0])


async def set_schedule_shard_count(connection: AsyncConnection, count: int) -> int:
    """Set the number of schedule shards, 1 to HASH_SLOTS, and return the former one."""
    former = int(await connection.scalar(select(due_buckets.c.count).with_for_update()) or 0)
    await connection.execute(update(due_buckets).values(count=count))
    return former
