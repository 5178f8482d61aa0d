"""What workers share of a lane: its circuit, since when it only fails, its rate; and endpoints that are disabled.

A change that other workers must act on counts the subscription's version up: whoever takes a copy after it reads the
lane anew before anything is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId, room_of
from rooms.storage.literals import array, numbers
from rooms.storage.writer import Writer

DISABLED_EVENT: Final = "rooms.endpoint.disabled"
"""The event type that operational endpoints get."""
# The status is looked at by an expression, so that no index but the key can be thought to help.
_LEARNT: Final = """learnt AS (
    UPDATE subscriptions s SET version = s.version + 1 FROM l WHERE s.room_id = l.room_id AND s.id = l.id
)
SELECT 0, count(*) FROM l
"""
_OPEN: Final = f"""
WITH l AS (
    INSERT INTO lanes AS t (room_id, id, circuit_open, circuit_since, probe_at)
    SELECT room_id, id, true, now(), now() + %(open_ms)s::int8 * interval '1 ms' FROM subscriptions
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND status || '' = 'active'
    ON CONFLICT (room_id, id) DO UPDATE SET circuit_open = true, circuit_since = excluded.circuit_since,
        probe_at = excluded.probe_at, probe = NULL, probes = 0
    WHERE NOT t.circuit_open RETURNING t.room_id, t.id
), {_LEARNT}"""  # noqa: S608 - text of our own
_CLOSE: Final = f"""
WITH l AS (
    UPDATE lanes SET circuit_open = false, circuit_since = now(), probe_at = NULL, probe = NULL
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND circuit_open RETURNING room_id, id
), {_LEARNT}"""  # noqa: S608 - text of our own
_FAILING: Final = f"""
WITH l AS (
    INSERT INTO lanes AS t (room_id, id, failing_since)
    SELECT room_id, id, now() - %(for_s)s::float8 * interval '1 s' FROM subscriptions
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND status || '' = 'active'
    ON CONFLICT (room_id, id) DO UPDATE SET failing_since = excluded.failing_since
    WHERE t.failing_since IS NULL RETURNING t.room_id, t.id
), {_LEARNT}"""  # noqa: S608 - text of our own
_WELL: Final = f"""
WITH l AS (
    UPDATE lanes SET failing_since = NULL
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND failing_since IS NOT NULL RETURNING room_id, id
), {_LEARNT}"""  # noqa: S608 - text of our own

# Disabling and telling are one statement: nobody is disabled without the room's operational endpoint, where it has one,
# getting to know, and that news is a delivery like any other from then on.
_DISABLE: Final = f"""
WITH s AS (
    UPDATE subscriptions s SET status = 'disabled', status_reason = %(reason)s, status_since = now(), updated_at = now(),
        version = version + 1
    WHERE s.room_id = %(room)s::int4 AND s.id = %(subscription)s::uuid AND s.status || '' = 'active' AND (
        %(failing_ms)s::int8 IS NULL OR EXISTS (
            SELECT FROM lanes l WHERE l.room_id = s.room_id AND l.id = s.id
                AND l.failing_since <= now() - %(failing_ms)s::int8 * interval '1 ms'))
    RETURNING s.room_id, s.id, s.name, s.push_url, s.status_reason
), r AS (
    UPDATE rooms SET plan_version = plan_version + 1 WHERE id IN (SELECT room_id FROM s)
), told AS MATERIALIZED (
    SELECT o.room_id, %(message)s::uuid AS message_id, %(delivery)s::uuid AS id, o.id AS subscription_id, o.version,
        CASE WHEN r.message_expiration_ms > 0 THEN now() + r.message_expiration_ms * interval '1 ms' END AS expires_at,
        convert_to(jsonb_build_object('type', '{DISABLED_EVENT}', 'room_id', s.room_id, 'subscription_id', s.id,
            'name', s.name, 'push_url', s.push_url, 'reason', s.status_reason, 'disabled_at', now())::text, 'UTF8') AS payload
    FROM s, rooms r, LATERAL (
        SELECT * FROM subscriptions o
        WHERE o.room_id = s.room_id AND o.operational AND o.status || '' <> 'deleted' AND o.id <> s.id LIMIT 1
    ) o WHERE r.id = s.room_id
), m AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, expires_at, correlation_id, payload)
    SELECT room_id, message_id, '{DISABLED_EVENT}', 1, 4, 1, expires_at, message_id::text, payload FROM told
), d AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, 'queued', now(), expires_at FROM told
), w AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, %(push)s::int2, 4, 0, 0, now(), expires_at FROM told
), l AS (
    INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, subscription_id, delivery_id, generation,
        attempt, event_version, fanout, payload_bytes, policy_version, correlation_id, event_type)
    SELECT room_id, message_id, %(writer)s::int4, %(seq)s::int8, 'published', NULL, NULL, NULL, NULL, 1, 1,
        octet_length(payload), NULL, message_id::text, '{DISABLED_EVENT}' FROM told
    UNION ALL
    SELECT room_id, message_id, %(writer)s::int4, %(seq)s::int8 + 1, 'enqueued', subscription_id, id, 0, 0, 1, NULL, NULL,
        version, message_id::text, '{DISABLED_EVENT}' FROM told
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM s), (SELECT count(*) FROM told)
"""  # noqa: S608 - words of our own

# Beside the status, not instead of it: when the key is back, everything goes on by itself.
_REMARK: Final = """
WITH s AS (
    UPDATE subscriptions SET status_reason = %(reason)s
    WHERE room_id = %(room)s AND id = %(subscription)s::uuid AND status = 'active' AND version = %(version)s RETURNING 1
)
SELECT 0, count(*) FROM s
"""

# A bucket for each lane, kept as the time at which it will be full again: `burst` tokens, `per_s` new ones a second. The
# rows are locked in the order given, which is the same for everybody.
_DRAW: Final = """
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(wanted)s::int4[], %(per_s)s::float8[], %(burst)s::float8[])
        WITH ORDINALITY AS v (room_id, id, wanted, per_s, burst, n)
), b AS MATERIALIZED (
    SELECT v.n, v.room_id, v.id, v.wanted, v.per_s,
        greatest(l.spent_until, clock_timestamp() - v.burst / v.per_s * interval '1 s') AS since
    FROM v, LATERAL (
        SELECT spent_until FROM lanes l WHERE l.room_id = v.room_id AND l.id = v.id LIMIT 1 FOR UPDATE
    ) l
), g AS MATERIALIZED (
    SELECT n, room_id, id, since, per_s, least(wanted, floor(free + 1e-6))::int4 AS granted, free
    FROM (SELECT b.*, greatest(0, extract(epoch FROM clock_timestamp() - since)::float8 * per_s) AS free FROM b) b
), u AS (
    UPDATE lanes t SET spent_until = g.since + g.granted / g.per_s * interval '1 s'
    FROM g WHERE g.granted > 0 AND t.room_id = ANY (ARRAY[g.room_id]) AND t.id = g.id
)
SELECT 0, n, granted, (floor(free + 1e-6) + 1 - free) / per_s FROM g UNION ALL SELECT 0, NULL, NULL, NULL
"""
_MAKE: Final = """
WITH made AS (
    INSERT INTO lanes (room_id, id)
    SELECT room_id, id FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) ON CONFLICT DO NOTHING RETURNING 1
) SELECT 0, count(*) FROM made
"""
_REPORT: Final = """
WITH made AS (
    INSERT INTO lanes AS t (room_id, id, concurrency, concurrency_at)
    SELECT room_id, id, concurrency, now()
    FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(concurrency)s::int4[]) AS v (room_id, id, concurrency)
    ON CONFLICT (room_id, id) DO UPDATE SET concurrency = excluded.concurrency, concurrency_at = excluded.concurrency_at
    RETURNING 1
) SELECT 0, count(*) FROM made
"""


@dataclass(frozen=True, slots=True)
class Wish:
    """A lane wants to make so many attempts now."""

    subscription: SubscriptionId
    wanted: int
    per_s: float
    burst: int


@dataclass(frozen=True, slots=True)
class Grant:
    """It may make so many; the next one comes free in `next_s` seconds, if nobody else takes it."""

    count: int
    next_s: float


class SharedLanes:
    """Writes through one writer. The booleans say whether this call was the one that changed it."""

    def __init__(self, writer: Writer, *, limited: Callable[[int], None] | None = None) -> None:
        """`limited` is told of draws that got less than they wanted: of how many lanes."""
        self._writer = writer
        self._limited = limited

    async def open_circuit(self, subscription: SubscriptionId, *, open_ms: int) -> bool:
        """From now on only probes are sent, the first after `open_ms`."""
        return await self._change(_OPEN, subscription, open_ms=open_ms)

    async def close_circuit(self, subscription: SubscriptionId) -> bool:
        """A probe succeeded."""
        return await self._change(_CLOSE, subscription)

    async def failing(self, subscription: SubscriptionId, *, for_s: float) -> bool:
        """There were nothing but failures for so long."""
        return await self._change(_FAILING, subscription, for_s=for_s)

    async def well(self, subscription: SubscriptionId) -> bool:
        """There was a success."""
        return await self._change(_WELL, subscription)

    async def disable(
        self,
        subscription: SubscriptionId,
        *,
        reason: str,
        message: MessageId,
        delivery: DeliveryId,
        failing_ms: int | None = None,
    ) -> bool:
        """Disable an endpoint until somebody resumes it, and tell its room's operational endpoint by a message and a
        delivery of these ids. With `failing_ms` only where all workers know of nothing but failures for so long.
        """
        return await self._change(
            _DISABLE, subscription, reason=reason, message=message, delivery=delivery, failing_ms=failing_ms
        )

    async def remark(self, room: RoomId, subscription: SubscriptionId, *, version: int, reason: str | None) -> None:
        """Say beside an active subscription's status why it cannot be served (None: it can), if it is as it was."""
        await self._writer.run(
            _REMARK, {"room": room, "subscription": subscription, "version": version, "reason": reason}
        )

    async def draw(self, wishes: Sequence[Wish]) -> dict[SubscriptionId, Grant]:
        """What each lane may do now, all workers together no more than its rate and burst allow."""
        ordered = sorted(wishes, key=lambda wish: (room_of(wish.subscription), wish.subscription))
        values = {
            "room": numbers(room_of(wish.subscription) for wish in ordered),
            "id": array(wish.subscription for wish in ordered),
            "wanted": numbers(wish.wanted for wish in ordered),
            "per_s": numbers(wish.per_s for wish in ordered),
            "burst": numbers(wish.burst for wish in ordered),
        }
        rows = await self._writer.run(_DRAW, values)
        if len(rows) < len(ordered):
            await self._writer.run(_MAKE, values)
            rows = await self._writer.run(_DRAW, values)
        grants = {ordered[n - 1].subscription: Grant(granted, next_s) for n, granted, next_s in rows}
        if self._limited is not None:
            self._limited(
                sum(wish.subscription in grants and grants[wish.subscription].count < wish.wanted for wish in ordered)
            )
        return grants

    async def report(self, concurrency: Sequence[tuple[SubscriptionId, int]]) -> None:
        """How many attempts at a time this worker makes on these lanes."""
        ordered = sorted(concurrency, key=lambda one: (room_of(one[0]), one[0]))
        await self._writer.run(
            _REPORT,
            {
                "room": numbers(room_of(identity) for identity, _ in ordered),
                "id": array(identity for identity, _ in ordered),
                "concurrency": numbers(limit for _, limit in ordered),
            },
        )

    async def _change(self, statement: str, subscription: SubscriptionId, **values: float | str | None) -> bool:
        rows = await self._writer.run(
            statement, {"room": room_of(subscription), "subscription": subscription, **values}
        )
        return bool(rows[0][0])
