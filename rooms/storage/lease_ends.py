"""What ends or moves a lease but an ack: nack, its time, an extension; and what became of a lease that is over."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.states import Reason, State
from rooms.storage.leases import ONE_ROW, PICKED, STANDING, Standing, indexes
from rooms.storage.literals import array
from rooms.storage.order import TURNS, pass_on
from rooms.storage.writer import Writer

WHOLE_EVERY: Final = timedelta(seconds=30)
"""How often all leases are looked at."""
BEHIND: Final = timedelta(seconds=60)
"""A lease that was made, or seen, so long before is left to the next look at all."""
_LONG_AGO: Final = datetime(2000, 1, 1, tzinfo=UTC)

_ASKED: Final = STANDING.format(
    entries="""SELECT %(room)s::int4 AS room_id, %(subscription)s::uuid AS subscription_id,
    %(organisation)s::uuid AS organisation_id"""
)
_WANTED: Final = PICKED.format(
    wanted="""unnest(%(rooms)s::int4[], %(id)s::uuid[], %(generation)s::int4[])
        WITH ORDINALITY AS v (room_id, id, generation, k)""",
    room="v.room_id",
    subscription="%(subscription)s::uuid",
    may="(SELECT standing FROM e) >= 2",
)

# From leases that were picked and locked to what follows from their end: the queue again, after `delay_ms`, or the wait
# for that beyond the broker's horizon, or the end of the delivery. What would come due after its expiry is not sent, and
# what has no message any more comes to rest.
_BACK: Final = f"""
, n AS MATERIALIZED (
    SELECT p.k, d.room_id, d.id, d.message_id, d.subscription_id, d.generation, d.attempt, d.expires_at,
        s.version AS policy, m.priority, m.event_type, m.event_version, m.correlation_id,
        CASE WHEN d.expires_at <= now() THEN 'expired'
            WHEN m.id IS NULL THEN 'sidelined'
            WHEN s.max_receives <= d.attempt + 1 THEN 'sidelined'
            WHEN d.expires_at <= now() + %(delay)s::int8 * interval '1 ms' THEN 'expired'
            WHEN %(delay)s::int8 > %(horizon)s::int8 THEN 'scheduled'
            ELSE 'queued' END::delivery_state AS next,
        CASE WHEN d.expires_at <= now() THEN NULL
            WHEN m.id IS NULL THEN '{Reason.ORPHAN}'
            WHEN s.max_receives <= d.attempt + 1 THEN '{Reason.NACKED}'
            WHEN d.expires_at <= now() + %(delay)s::int8 * interval '1 ms' THEN '{Reason.TOO_LATE}' END AS reason
    FROM picked p CROSS JOIN LATERAL (
        SELECT * FROM deliveries d WHERE d.room_id = p.room_id AND d.id = p.id LIMIT 1
    ) d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true LEFT JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = d.room_id AND s.id = d.subscription_id LIMIT 1
    ) s ON true
    WHERE d.generation = p.generation AND d.state = 'leased'
), gone AS (
    DELETE FROM leases l USING picked p WHERE l.room_id = ANY (ARRAY[p.room_id]) AND l.id = p.id
), u AS (
    UPDATE deliveries t SET state = n.next, reason = n.reason, attempts = t.attempts + 1, updated_at = now(),
        generation = t.generation + (n.next <> 'expired')::int4, attempt = t.attempt + (n.next <> 'expired')::int4,
        due_at = CASE WHEN n.next IN ('queued', 'scheduled') THEN now() + %(delay)s::int8 * interval '1 ms' END
    FROM n WHERE t.room_id = n.room_id AND t.id = n.id AND t.generation = n.generation AND t.attempt = n.attempt
        AND t.state = 'leased'
    RETURNING n.*, t.generation AS new_generation, t.attempt AS new_attempt
), o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, delay_ms, due_at,
        expires_at)
    SELECT room_id, id, message_id, subscription_id, %(pull)s::int2 + CASE next WHEN 'scheduled' THEN 4 ELSE 0 END,
        priority, new_generation, new_attempt, %(delay)s::int8, now() + %(delay)s::int8 * interval '1 ms', expires_at
    FROM u WHERE next IN ('queued', 'scheduled')
    ON CONFLICT (room_id, id) DO NOTHING
), side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, new_generation, reason FROM u WHERE next = 'sidelined'
    ON CONFLICT (room_id, id) DO UPDATE SET generation = excluded.generation, since = excluded.since,
        reason = excluded.reason, shard = NULL, pointer = NULL
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, delay_ms, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id,
        CASE WHEN next IN ('queued', 'scheduled') THEN %(kind)s::text ELSE next::text END, subscription_id, id, new_generation,
        new_attempt, event_type, event_version, correlation_id, policy,
        CASE WHEN next IN ('queued', 'scheduled') THEN %(delay)s::int8 END, reason FROM u
    RETURNING 1
){pass_on("SELECT room_id, id FROM u WHERE next = 'expired'")}
"""  # noqa: S608 - text of our own

_NACK: Final = f"""
WITH e AS MATERIALIZED ({_ASKED}), picked AS MATERIALIZED ({_WANTED}) {_BACK}
SELECT (SELECT count(*) FROM l) + {TURNS}, (SELECT standing FROM e), coalesce((SELECT string_agg(k::text, ',') FROM u), ''),
    EXISTS (SELECT FROM u WHERE next = 'queued')
"""  # noqa: S608 - text of our own

_EXTEND: Final = f"""
WITH e AS MATERIALIZED ({_ASKED}), picked AS MATERIALIZED ({_WANTED}), u AS (
    UPDATE leases l SET until = least(now() + %(lease)s::int8 * interval '1 ms', d.expires_at)
    FROM picked p CROSS JOIN LATERAL (
        SELECT * FROM deliveries d WHERE d.room_id = p.room_id AND d.id = p.id LIMIT 1
    ) d WHERE l.room_id = ANY (ARRAY[p.room_id]) AND l.id = p.id AND d.generation = p.generation RETURNING p.k
)
SELECT 0, (SELECT standing FROM e), coalesce((SELECT string_agg(k::text, ',') FROM u), '')
"""  # noqa: S608 - text of our own

# Spans rooms, as time does; whoever settles a lease at this moment keeps it. Settled leases stay in the index while
# somebody's snapshot may see them: a look from the last one's time on does not walk over them.
_END: Final = f"""
WITH picked AS MATERIALIZED (
    SELECT * FROM (
        SELECT 0 AS k, room_id, id, generation FROM leases WHERE until >= %(low)s::timestamptz AND until <= now()
        ORDER BY until LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
    ) l WHERE {ONE_ROW.format("generation")}
) {_BACK}
SELECT (SELECT count(*) FROM l) + {TURNS}, (SELECT count(*) FROM picked),
    coalesce((SELECT string_agg(DISTINCT subscription_id::text, ',') FROM u WHERE next = 'queued'), ''), now()
"""  # noqa: S608 - text of our own

_STANDING: Final = f"SELECT 0, standing FROM ({_ASKED}) e"  # noqa: S608 - text of our own

_LOOK: Final = """
SELECT 0, v.k, d.state::text, d.generation, l.until > now()
FROM unnest(%(rooms)s::int4[], %(id)s::uuid[]) WITH ORDINALITY AS v (room_id, id, k)
    CROSS JOIN LATERAL (SELECT * FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id LIMIT 1) d
    LEFT JOIN LATERAL (SELECT * FROM leases l WHERE l.room_id = v.room_id AND l.id = v.id LIMIT 1) l ON true
WHERE d.subscription_id = %(subscription)s::uuid
UNION ALL SELECT 0, NULL, NULL, NULL, NULL
"""

_DUE: Final = """
SELECT 0, v.subscription_id::text, o.wait_s
FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) AS v (room_id, subscription_id)
    CROSS JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = v.room_id AND s.id = v.subscription_id LIMIT 1
    ) s
    CROSS JOIN LATERAL (
        SELECT min(o.wait_s) AS wait_s FROM generate_series(0, 9) p (priority), LATERAL (
            SELECT extract(epoch FROM o.due_at - now())::float8 AS wait_s FROM outbox o
            WHERE o.kind = 1 AND -o.room_id = -v.room_id AND o.subscription_id = v.subscription_id
                AND o.priority = p.priority AND o.due_at <= now() + %(ahead_s)s::float8 * interval '1 s'
                AND coalesce(o.expires_at, 'infinity') > now()
            ORDER BY o.due_at LIMIT 1
        ) o
    ) o
WHERE s.status = 'active' AND o.wait_s IS NOT NULL
UNION ALL SELECT 0, NULL, NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A delivery whose lease could not be settled, as it stands: `live`, it is under a lease that is not over."""

    state: State
    generation: int
    live: bool


class LeaseEnds:
    """Ends and moves leases through one writer. StorageUnavailableError: in doubt. StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._low: datetime | None = None
        self._whole_at = _LONG_AGO

    async def standing(self, room: RoomId, subscription: SubscriptionId, organisation: OrganisationId) -> Standing:
        """What the subscription is to this organisation."""
        asked = {"room": room, "subscription": subscription, "organisation": organisation}
        return Standing((await self._writer.run(_STANDING, asked))[0][0])

    async def nack(
        self,
        room: RoomId,
        subscription: SubscriptionId,
        organisation: OrganisationId,
        leases: Sequence[tuple[bytes, bytes]],
        *,
        delay_ms: int,
    ) -> tuple[Standing, frozenset[int], bool]:
        """Give leases (delivery id as 16 bytes, generation as 4) back, to come again in `delay_ms`.

        What the subscription is, the indexes of those given back, and whether any of them is queued again.
        """
        asked = _asked(room, subscription, organisation, leases) | {"delay": delay_ms, "kind": "nacked"}
        ((standing, settled, queued),) = await self._writer.run(_NACK, asked)
        return Standing(standing), indexes(settled) or frozenset(), queued

    async def extend(
        self,
        room: RoomId,
        subscription: SubscriptionId,
        organisation: OrganisationId,
        leases: Sequence[tuple[bytes, bytes]],
        *,
        lease_ms: int,
    ) -> tuple[Standing, frozenset[int]]:
        """Let leases end `lease_ms` from now; the subscription's standing and the indexes of those that will."""
        asked = _asked(room, subscription, organisation, leases) | {"lease": lease_ms}
        ((standing, settled),) = await self._writer.run(_EXTEND, asked)
        return Standing(standing), indexes(settled) or frozenset()

    async def end(self, *, limit: int) -> tuple[int, list[SubscriptionId]]:
        """End leases whose time is up, the oldest first: how many there were, and whose queues got something."""
        asked = {"limit": limit, "delay": 0, "kind": "lease_ended", "low": self._low or "-infinity"}
        ((ended, queued, at),) = await self._writer.run(_END, asked)
        if self._low is None:
            self._whole_at = at
        whole = ended >= limit or at - self._whole_at >= WHOLE_EVERY
        self._low = None if whole else at - BEHIND
        return ended, [SubscriptionId(identity) for identity in queued.split(",") if identity]

    async def look(self, room: RoomId, subscription: SubscriptionId, deliveries: Sequence[bytes]) -> Mapping[int, Seen]:
        """By index: how those deliveries of the subscription stand that exist."""
        asked = {
            "rooms": array([room] * len(deliveries)),
            "id": array(map(bytes.hex, deliveries)),
            "subscription": subscription,
        }
        return {
            ordinal - 1: Seen(state=State(state), generation=generation, live=bool(live))
            for ordinal, state, generation, live in await self._writer.run(_LOOK, asked)
        }

    async def due(
        self, queues: Collection[tuple[RoomId, SubscriptionId]], *, ahead_s: float
    ) -> Mapping[SubscriptionId, float]:
        """Those of the subscriptions that have something to hand out now or within `ahead_s`, and in how many seconds; 0 or
        less: now.
        """
        asked = {
            "room": array(room for room, _ in queues),
            "subscription": array(identity for _, identity in queues),
            "ahead_s": ahead_s,
        }
        return {SubscriptionId(row[0]): row[1] for row in await self._writer.run(_DUE, asked)}


def _asked(
    room: RoomId, subscription: SubscriptionId, organisation: OrganisationId, leases: Sequence[tuple[bytes, bytes]]
) -> dict[str, Any]:
    return {
        "room": room,
        "subscription": subscription,
        "organisation": organisation,
        "rooms": array([room] * len(leases)),
        "id": array(delivery.hex() for delivery, _ in leases),
        "generation": array(int.from_bytes(generation, "big", signed=True) for _, generation in leases),
    }
