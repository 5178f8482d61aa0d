"""Work beyond the broker's horizon: what comes near enough is to be sent. It serves all rooms at once, as time does."""

from typing import Final

from rooms.domain.place import LATER, TO_SEND
from rooms.domain.states import LogKind, State
from rooms.storage.writer import Writer

_COME_DUE: Final = f"""
WITH picked AS MATERIALIZED (
    SELECT room_id, id FROM outbox
    WHERE kind IN ({LATER[0]:d}, {LATER[1]:d}) AND due_at <= now() + %(horizon)s::int8 * interval '1 ms'
    ORDER BY due_at LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
), o AS (
    UPDATE outbox o SET kind = o.kind - {LATER[0] - TO_SEND[0]:d} FROM picked p
    WHERE o.room_id = ANY (ARRAY[p.room_id]) AND o.id = p.id
), d AS (
    UPDATE deliveries t SET state = '{State.QUEUED}', updated_at = now()
    FROM picked p WHERE t.room_id = p.room_id AND t.id = p.id AND t.state = '{State.SCHEDULED}'
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), l AS (
    INSERT INTO delivery_log (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, worker_host, correlation_id, event_type, event_version)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.COMING_DUE}',
        d.subscription_id, d.id, d.generation, d.attempt, %(host)s::text, m.correlation_id, m.event_type, m.event_version
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM picked)
"""  # noqa: S608 - numbers and words of our own


async def come_due(writer: Writer, *, limit: int) -> int:
    """Let what is due within the horizon of the writer's shape be sent, the earliest first; how many rows there were.

    Generation and attempt stay: no copy of this step was ever sent. Errors are `Writer.run`'s.
    """
    rows = await writer.run(_COME_DUE, {"limit": limit, "host": writer.host})
    return int(rows[0][0])
