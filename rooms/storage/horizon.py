"""Work beyond the broker's horizon: what comes near enough is to be sent. It serves all rooms at once, as time does.

It is found by an index whose first part is a slot, a hash of the delivery's id. A bucket is a range of slots, and the number
of buckets a row that may be changed at any time: no work row moves when it is, and the statement reads it anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.place import LATER, TO_SEND
from rooms.domain.states import LogKind, State
from rooms.storage.literals import numbers
from rooms.storage.writer import Writer

SLOTS: Final = 256
"""More buckets than these there cannot be."""

# Two who look into one bucket at once see the same rows, and each row is changed by one of them: the other waits for it,
# and finds it changed.
_COME_DUE: Final = f"""
WITH s AS MATERIALIZED (
    SELECT slot FROM due_buckets n CROSS JOIN unnest(%(buckets)s::int4[]) AS b (bucket) CROSS JOIN LATERAL
        generate_series(b.bucket * {SLOTS} / n.count, (b.bucket + 1) * {SLOTS} / n.count - 1) AS slot
    WHERE n.one AND b.bucket < n.count
), near AS MATERIALIZED (
    SELECT s.slot, o.room_id, o.id FROM s CROSS JOIN LATERAL (
        SELECT room_id, id FROM outbox
        WHERE kind IN ({LATER[0]:d}, {LATER[1]:d}) AND (uuid_hash(id) & {SLOTS - 1}) = s.slot
            AND due_at <= now() + %(horizon)s::int8 * interval '1 ms'
        ORDER BY due_at LIMIT %(limit)s::int4
    ) o
), o AS (
    UPDATE outbox o SET kind = o.kind - {LATER[0] - TO_SEND[0]:d} FROM near p
    WHERE o.room_id = ANY (ARRAY[p.room_id]) AND o.id = p.id AND o.kind + 0 BETWEEN {LATER[0]:d} AND {LATER[1]:d}
        AND o.due_at <= now() + %(horizon)s::int8 * interval '1 ms'
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
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM o),
    coalesce((SELECT max(n) FROM (SELECT count(*) AS n FROM near GROUP BY slot) full_slots), 0) >= %(limit)s::int4
"""  # noqa: S608 - numbers and words of our own

_COUNT: Final = "SELECT 0, (SELECT count FROM due_buckets WHERE one)"
_SET: Final = (
    "WITH s AS (UPDATE due_buckets SET count = %(count)s::int4 WHERE one RETURNING 1) SELECT 0, count(*) FROM s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How many rows moved, and whether there may be more right now."""

    moved: int
    more: bool


async def come_due(writer: Writer, *, buckets: Sequence[int], limit: int) -> Look:
    """Let what is due within the horizon of the writer's shape be sent, the earliest of each slot first, `limit` of each.

    Generation and attempt stay: no copy of this step was ever sent. Errors are `Writer.run`'s.
    """
    parameters = {"buckets": numbers(buckets), "limit": limit, "host": writer.host}
    ((moved, more),) = await writer.run(_COME_DUE, parameters)
    return Look(moved=int(moved), more=bool(more))


async def bucket_count(writer: Writer) -> int:
    """How many buckets there are now. Errors are `Writer.run`'s."""
    return int((await writer.run(_COUNT, {}))[0][0])


async def set_bucket_count(writer: Writer, count: int) -> None:
    """Have another number of buckets, 1 to SLOTS, from now on. Errors are `Writer.run`'s."""
    await writer.run(_SET, {"count": count})
