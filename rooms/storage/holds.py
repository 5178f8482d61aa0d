"""The way back of what is held: as many as a lane has room for, at a set rate, or the one that probes an open circuit."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rooms.domain.ids import SubscriptionId, room_of
from rooms.domain.states import Reason
from rooms.storage.writer import Writer

_PICKED: Final = """
    SELECT room_id, id, priority, delay_ms, abandoned FROM held
    WHERE -room_id = -%(room)s::int4 AND subscription_id = %(subscription)s::uuid AND reason = %(reason)s::text
    ORDER BY id LIMIT {limit} FOR UPDATE SKIP LOCKED
"""
_RELEASE: Final = """
WITH {given}picked AS MATERIALIZED ({picked}), gone AS (
    DELETE FROM held h USING picked p WHERE h.room_id = ANY (ARRAY[p.room_id]) AND h.id = p.id
), d AS (
    UPDATE deliveries t SET state = 'queued', reason = NULL, generation = t.generation + 1, due_at = now(), updated_at = now()
    FROM picked p WHERE t.room_id = p.room_id AND t.id = p.id AND t.state = 'held'
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt, t.expires_at, p.priority, p.delay_ms,
        p.abandoned
), o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, delay_ms, due_at, expires_at,
        abandoned)
    SELECT room_id, id, message_id, subscription_id, %(push)s::int2, priority, generation, attempt, delay_ms, now(),
        expires_at, abandoned FROM d
){told}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, delay_ms, worker_host, correlation_id, event_type, event_version)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, 'released', d.subscription_id, d.id,
        d.generation, d.attempt, d.delay_ms, %(worker_host)s::text, m.correlation_id, m.event_type, m.event_version
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM picked)
"""
_RELEASE_HELD: Final = _RELEASE.format(given="", picked=_PICKED.format(limit="%(limit)s::int4"), told="")

# The bucket of the drain stands in the lane's row, so that all workers draw from one: at most what filled up since the
# last draw, and never more at once than `burst`. Who finds the row locked lets its turn go by.
_DRAIN: Final = _RELEASE.format(
    given="""lane AS MATERIALIZED (
    SELECT room_id, id, greatest(drained_until, now() - %(burst)s::float8 / %(per_s)s::float8 * interval '1 s') AS since
    FROM lanes WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid LIMIT 1 FOR UPDATE SKIP LOCKED
), free AS MATERIALIZED (
    SELECT least(%(limit)s::int4, floor(extract(epoch FROM now() - since)::float8 * %(per_s)s::float8 + 1e-6))::int4 AS n
    FROM lane
), """,
    picked=_PICKED.format(limit="greatest(0, (SELECT n FROM free))"),
    told=""", spent AS (
    UPDATE lanes t SET drained_until = lane.since + (SELECT count(*) FROM picked) / %(per_s)s::float8 * interval '1 s'
    FROM lane WHERE t.room_id = lane.room_id AND t.id = lane.id AND EXISTS (SELECT FROM picked)
)""",
)

# One probe in a period, whoever looks: the row of the circuit is locked, its time moved on and the probe named in one
# statement. The subscription's next version makes every worker that gets the copy read what it is.
_PROBE: Final = _RELEASE.format(
    given="""circuit AS MATERIALIZED (
    SELECT room_id, id FROM lanes
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND circuit_open AND probe_at <= now()
    LIMIT 1 FOR UPDATE SKIP LOCKED
), """,
    picked=_PICKED.format(limit="(SELECT count(*)::int4 FROM circuit)"),
    told=""", named AS (
    UPDATE lanes t SET probe_at = now() + %(open_ms)s::int8 * interval '1 ms', probe = d.id,
        probe_generation = d.generation, probe_attempt = d.attempt, probes = t.probes + 1
    FROM d WHERE t.room_id = d.room_id AND t.id = d.subscription_id
), learnt AS (
    UPDATE subscriptions s SET version = s.version + 1 FROM d WHERE s.room_id = d.room_id AND s.id = d.subscription_id
)""",
)

_MAKE: Final = """
WITH made AS (
    INSERT INTO lanes (room_id, id) VALUES (%(room)s::int4, %(subscription)s::uuid) ON CONFLICT DO NOTHING RETURNING 1
) SELECT 0, count(*) FROM made
"""

# Jumps from one subscription and reason to the next in the index instead of reading every held row.
_HELD: Final = """
WITH RECURSIVE s (id, reason) AS (
    (SELECT subscription_id, reason FROM held ORDER BY subscription_id, reason LIMIT 1)
    UNION ALL
    SELECT h.subscription_id, h.reason FROM s, LATERAL (
        SELECT subscription_id, reason FROM held
        WHERE (subscription_id, reason) > (s.id, s.reason) ORDER BY subscription_id, reason LIMIT 1
    ) h
)
SELECT 0, id::text, reason FROM s UNION ALL SELECT 0, NULL, NULL
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A subscription has deliveries that are held for this reason."""

    subscription: SubscriptionId
    reason: Reason


class Way(StrEnum):
    """How held deliveries go on."""

    ROOM = "room"
    """Their lane had room for them."""
    DRAIN = "drain"
    PROBE = "probe"


class Holds:
    """Queues held deliveries again, oldest first, through one writer; each call says how many there were."""

    def __init__(self, writer: Writer, *, released: Callable[[Way, Reason, int], None] | None = None) -> None:
        """`released` is told how many of which reason went on, and which way."""
        self._writer = writer
        self._released = released

    async def held(self) -> list[Held]:
        """What is held, and why."""
        return [Held(SubscriptionId(row[0]), Reason(row[1])) for row in await self._writer.run(_HELD, {})]

    async def release(self, held: Held, *, limit: int) -> int:
        """Up to `limit` of them."""
        return self._told(Way.ROOM, held, await self._run(_RELEASE_HELD, held, limit=limit))

    async def drain(self, held: Held, *, limit: int, per_s: float, burst: int) -> int:
        """Up to `limit`, and together with everybody else's draining no more than `per_s` a second and `burst` more."""
        values = {"limit": limit, "per_s": per_s, "burst": burst}
        moved = await self._run(_DRAIN, held, **values)
        if not moved and await self._run(_MAKE, held):
            moved = await self._run(_DRAIN, held, **values)
        return self._told(Way.DRAIN, held, moved)

    async def probe(self, held: Held, *, open_ms: int) -> int:
        """One, where the circuit is open and its time has come; the next not before `open_ms`."""
        return self._told(Way.PROBE, held, await self._run(_PROBE, held, open_ms=open_ms))

    def _told(self, way: Way, held: Held, moved: int) -> int:
        if moved and self._released is not None:
            self._released(way, held.reason, moved)
        return moved

    async def _run(self, statement: str, held: Held, **values: float) -> int:
        rows = await self._writer.run(
            statement,
            {
                "room": room_of(held.subscription),
                "subscription": held.subscription,
                "reason": held.reason,
                "worker_host": self._writer.host,
                **values,
            },
        )
        return int(rows[0][0])
