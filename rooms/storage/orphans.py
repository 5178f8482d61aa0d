"""What comes to rest because its parts do not fit: copies of deliveries that have no row, deliveries whose message has
none, such whose copy cannot be read, and such that whoever claims them dies with.
"""

from collections.abc import Sequence
from typing import Final

from rooms.domain.copy import PRIORITIES, Copy
from rooms.domain.ids import DeliveryId, RoomId, room_of
from rooms.domain.states import LogKind, Reason, State
from rooms.ports import Unreadable
from rooms.storage.literals import array, bytes_array, numbers, plain, text_array
from rooms.storage.writer import Writer

Step = tuple[DeliveryId, int, int]
"""(delivery, generation, attempt)"""

LAST_MS: Final = 253_402_300_799_000
"""The end of the year 9999."""

# Up to its mark retention has gone through the past: what has no row there had ended.
_ENDED: Final = """EXISTS (SELECT FROM upkeep_marks k WHERE k.name = 'retention'
    AND v.id < rpad(lpad(to_hex((extract(epoch FROM k.at) * 1000)::int8), 12, '0'), 32, '0')::uuid)"""
# What the magazine has to be given of the deliveries `d`.
_SIDE: Final = """side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, {0} FROM d
    ON CONFLICT (room_id, id) DO UPDATE SET generation = excluded.generation, since = excluded.since,
        reason = excluded.reason, shard = NULL, pointer = NULL
)"""
_SIDE_ORPHANS: Final = _SIDE.format(f"'{Reason.ORPHAN}'")
_SIDE_FOR: Final = _SIDE.format("%(reason)s::text")

# Whoever settles the copies afterwards must be able to count on what is written here, whatever its session says of
# claims: hence the first line.
_ADOPT: Final = f"""
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)), v AS MATERIALIZED (
    SELECT v.* FROM durable, unnest(
        %(room)s::int4[], %(id)s::uuid[], %(message)s::uuid[], %(subscription)s::uuid[], %(generation)s::int4[],
        %(attempt)s::int4[], %(priority)s::int2[], %(type)s::text[], %(version)s::int4[], %(correlation)s::text[],
        %(published)s::int8[], %(expires)s::int8[], %(headers)s::bytea[], %(payload)s::bytea[]
    ) WITH ORDINALITY AS v (
        room_id, id, message_id, subscription_id, generation, attempt, priority, event_type, event_version,
        correlation_id, published_ms, expires_ms, headers, payload, n
    )
), known AS MATERIALIZED (
    SELECT v.*, s.version AS policy, timestamptz 'epoch' + v.expires_ms * interval '1 ms' AS expires_at
    FROM v CROSS JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = v.room_id AND s.id = v.subscription_id LIMIT 1
    ) s CROSS JOIN LATERAL (SELECT * FROM rooms r WHERE r.id = v.room_id LIMIT 1) r
    WHERE s.status <> 'deleted' AND NOT r.deleting AND NOT {_ENDED}
), m AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, published_at, expires_at,
        correlation_id, headers, payload)
    SELECT room_id, message_id, event_type, event_version, priority, 1,
        timestamptz 'epoch' + published_ms * interval '1 ms', expires_at, correlation_id, headers, coalesce(payload, '')
    FROM known ON CONFLICT (room_id, id) DO NOTHING
), d AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, reason, generation, attempt, attempts,
        expires_at)
    SELECT room_id, id, message_id, subscription_id, '{State.SIDELINED}', '{Reason.ORPHAN}', generation, attempt, attempt,
        expires_at FROM known ON CONFLICT (room_id, id) DO NOTHING
    RETURNING room_id, id, subscription_id, generation
), {_SIDE_ORPHANS}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id, '{LogKind.SIDELINED}', subscription_id, id,
        generation, attempt, event_type, event_version, correlation_id, policy, %(host)s::text, '{Reason.ORPHAN}'
    FROM known WHERE id IN (SELECT id FROM d)
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d), (SELECT count(*) FROM v) - (SELECT count(*) FROM known)
"""  # noqa: S608 - words of our own

# Its message may be gone together with the delivery, both of one day; its work says enough to make a row of it.
_SIDELINE: Final = f"""
WITH v AS MATERIALIZED (
    SELECT o.room_id, o.id, o.message_id, o.subscription_id, o.generation, o.attempt, o.expires_at
    FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) CROSS JOIN LATERAL (
        SELECT * FROM outbox o WHERE o.room_id = v.room_id AND o.id = v.id LIMIT 1 FOR UPDATE SKIP LOCKED
    ) o CROSS JOIN LATERAL (
        SELECT count(*) AS there FROM (
            SELECT FROM messages m WHERE m.room_id = o.room_id AND m.id = o.message_id LIMIT 1
        ) m
    ) m WHERE m.there = 0
), d AS (
    INSERT INTO deliveries AS t (room_id, id, message_id, subscription_id, state, reason, generation, attempt, expires_at)
    SELECT room_id, id, message_id, subscription_id, '{State.SIDELINED}', '{Reason.ORPHAN}', generation, attempt, expires_at
    FROM v
    ON CONFLICT (room_id, id) DO UPDATE SET state = excluded.state, reason = excluded.reason, due_at = NULL,
        updated_at = now()
    WHERE t.state IN ('{State.QUEUED}', '{State.SCHEDULED}') AND t.generation = excluded.generation
        AND t.attempt = excluded.attempt
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), gone AS (
    DELETE FROM outbox o USING v WHERE o.room_id = ANY (ARRAY[v.room_id]) AND o.id = v.id
), {_SIDE_ORPHANS}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id, '{LogKind.SIDELINED}', subscription_id, id,
        generation, attempt, %(host)s::text, '{Reason.ORPHAN}' FROM d
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d)
"""  # noqa: S608 - words of our own

_APART: Final = f"""
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)), v AS MATERIALIZED (
    SELECT v.* FROM durable, unnest(
        %(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[], %(error)s::text[]
    ) AS v (room_id, id, generation, attempt, error)
), d AS (
    UPDATE deliveries t SET state = '{State.SIDELINED}', reason = %(reason)s::text, last_error = v.error, due_at = NULL,
        updated_at = now()
    FROM v WHERE t.room_id = v.room_id AND t.id = v.id AND t.generation = v.generation AND t.attempt = v.attempt
        AND t.state = '{State.QUEUED}'
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), gone AS (
    DELETE FROM outbox o USING d WHERE o.room_id = ANY (ARRAY[d.room_id]) AND o.id = d.id
), {_SIDE_FOR}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.SIDELINED}',
        d.subscription_id, d.id, d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text,
        %(reason)s::text
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d)
"""  # noqa: S608 - words of our own


def _time(at_ms: int) -> int:
    # Nobody has checked what such a copy says.
    return min(max(at_ms, 0), LAST_MS)


async def adopt(writer: Writer, copies: Sequence[Copy]) -> tuple[int, int]:
    """Make rows of copies whose deliveries have none: sidelined, with their message where that is gone too.

    How many deliveries were made, and of how many none was, because their subscription is gone or they had ended. Durable
    when it returns. Errors are `Writer.run`'s.
    """
    # Of several steps of a delivery the last one is its truth.
    last = {copy.delivery_id: copy for copy in sorted(copies, key=lambda copy: (copy.generation, copy.attempt))}
    orphans = [last[identity] for identity in sorted(last)]
    rows = await writer.run(
        _ADOPT,
        {
            "room": numbers(copy.room_id for copy in orphans),
            "id": plain(copy.delivery_id for copy in orphans),
            "message": plain(copy.message_id for copy in orphans),
            "subscription": plain(copy.subscription_id for copy in orphans),
            "generation": numbers(copy.generation for copy in orphans),
            "attempt": numbers(copy.attempt for copy in orphans),
            "priority": numbers(min(max(copy.priority, 0), PRIORITIES - 1) for copy in orphans),
            "type": text_array(copy.event_type for copy in orphans),
            "version": numbers(copy.event_version for copy in orphans),
            "correlation": text_array(copy.correlation_id for copy in orphans),
            "published": numbers(_time(copy.published_ms) for copy in orphans),
            "expires": array(None if copy.expires_ms is None else _time(copy.expires_ms) for copy in orphans),
            "headers": bytes_array(copy.headers for copy in orphans),
            "payload": bytes_array(copy.payload for copy in orphans),
            "host": writer.host,
        },
    )
    made, homeless = rows[0]
    return int(made), int(homeless)


async def sideline(writer: Writer, deliveries: Sequence[tuple[RoomId, DeliveryId]]) -> int:
    """Sideline deliveries that have work and no message row, and end their work; how many there were.

    Errors are `Writer.run`'s.
    """
    rows = await writer.run_isolated(
        _SIDELINE,
        {
            "room": numbers(room for room, _ in deliveries),
            "id": plain(identity for _, identity in deliveries),
            "host": writer.host,
        },
    )
    return int(rows[0][0])


async def sideline_unreadable(writer: Writer, messages: Sequence[Unreadable]) -> int:
    """Sideline the deliveries that wait for these messages, as far as they can be told; how many there were.

    Durable when it returns. Errors are `Writer.run`'s.
    """
    steps = {
        (delivery_id, message.generation, message.attempt): message.reason
        for message in messages
        if (delivery_id := message.delivery_id) is not None
    }
    if not steps:
        return 0
    return await _put_apart(writer, [(*step, error) for step, error in steps.items()], Reason.UNREADABLE)


async def sideline_stuck(writer: Writer, steps: Sequence[Step], *, why: str) -> int:
    """Sideline deliveries that still stand at these steps, as `stuck`; how many there were.

    Durable when it returns. Errors are `Writer.run`'s.
    """
    return await _put_apart(writer, [(*step, why) for step in steps], Reason.STUCK)


async def _put_apart(
    writer: Writer, steps: Sequence[tuple[DeliveryId, int | None, int | None, str]], reason: Reason
) -> int:
    rows = await writer.run(
        _APART,
        {
            "room": numbers(room_of(identity) for identity, _, _, _ in steps),
            "id": plain(identity for identity, _, _, _ in steps),
            "generation": array(generation for _, generation, _, _ in steps),
            "attempt": array(attempt for _, _, attempt, _ in steps),
            "error": text_array(error for _, _, _, error in steps),
            "reason": reason,
            "host": writer.host,
        },
    )
    return int(rows[0][0])
