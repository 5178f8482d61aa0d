"""Nack, release, extend and expire leases, and say what became of a lease that is over."""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from weakref import WeakValueDictionary

from rooms.db.leases.acquire import (
    ACCESS_TO_ONE,
    ALWAYS_TRUE,
    LIVE_LEASES,
    SubscriptionAccess,
    parse_indexes,
)
from rooms.db.operational.outbox import sidelined_ctes
from rooms.db.pg_arrays import literal_array
from rooms.db.queue.claims import LARGEST_ORGANISATION, OF_OTHER_ORGANISATIONS
from rooms.db.queue.ordering import RELEASED_COUNT, advance_ordering
from rooms.db.statement_parts import JOIN_MESSAGE, REPLACE_SIDELINED
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.state_machine import LogKind, Reason, State

FULL_SCAN_EVERY: Final = timedelta(seconds=30)
"""The time between two scans of all leases."""
SCAN_OVERLAP: Final = timedelta(seconds=60)
"""A lease that was made, or seen, so long before is left to the next full scan."""
_FIRST_SCAN: Final = datetime(2000, 1, 1, tzinfo=UTC)


_REQUESTED_LEASES: Final = LIVE_LEASES.format(
    wanted="""unnest(%(rooms)s::int4[], %(id)s::uuid[], %(generation)s::int4[])
        WITH ORDINALITY AS v (room_id, id, generation, k)""",
    room="v.room_id",
    subscription="%(subscription)s::uuid",
    may="(SELECT standing FROM e) >= 2",
)

# From leases that were picked and locked to what follows from their end: the queue again after
# `delay_ms`, or the wait for that beyond the broker's lookahead, or the end of the delivery. What
# would come due after its expiry is not queued, and a delivery without a message is sidelined.
# `receives` is 1, or 0 if no consumer was given the message.
_RELEASE_CTES: Final = f"""
, n AS MATERIALIZED (
    SELECT p.k, d.room_id, d.id, d.message_id, d.subscription_id, d.generation, d.attempt, d.expires_at,
        s.version - s.lane_changes AS policy, m.priority, m.event_type, m.event_version, m.correlation_id,
        CASE WHEN d.expires_at <= now() THEN 'expired'
            WHEN m.id IS NULL THEN 'sidelined'
            WHEN s.max_receives <= d.attempt + 1 AND %(receives)s::int4 > 0 THEN 'sidelined'
            WHEN d.expires_at <= now() + %(delay)s::int8 * interval '1 ms' THEN 'expired'
            WHEN %(delay)s::int8 > %(lookahead)s::int8 THEN 'scheduled'
            ELSE 'queued' END::delivery_state AS next,
        CASE WHEN d.expires_at <= now() THEN NULL
            WHEN m.id IS NULL THEN '{Reason.ORPHAN}'
            WHEN s.max_receives <= d.attempt + 1 AND %(receives)s::int4 > 0 THEN '{Reason.NACKED}'
            WHEN d.expires_at <= now() + %(delay)s::int8 * interval '1 ms' THEN '{Reason.TOO_LATE}' END AS reason
    FROM picked p CROSS JOIN LATERAL (
        SELECT * FROM deliveries d WHERE d.room_id = p.room_id AND d.id = p.id LIMIT 1
    ) d {JOIN_MESSAGE} LEFT JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = d.room_id AND s.id = d.subscription_id LIMIT 1
    ) s ON true
    WHERE d.generation = p.generation AND d.state = 'leased'
), gone AS (
    DELETE FROM leases l USING picked p WHERE l.room_id = ANY (ARRAY[p.room_id]) AND l.id = p.id
), u AS (
    UPDATE deliveries t SET state = n.next, reason = n.reason, attempts = t.attempts + %(receives)s::int4, updated_at = now(),
        generation = t.generation + (n.next <> 'expired')::int4,
        attempt = t.attempt + (n.next <> 'expired')::int4 * %(receives)s::int4,
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
    {REPLACE_SIDELINED}
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, delay_ms, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id,
        CASE WHEN next IN ('queued', 'scheduled') THEN %(kind)s::text ELSE next::text END, subscription_id, id, new_generation,
        new_attempt, event_type, event_version, correlation_id, policy,
        CASE WHEN next IN ('queued', 'scheduled') THEN %(delay)s::int8 END, reason FROM u
    RETURNING 1
){sidelined_ctes("SELECT * FROM u WHERE next = 'sidelined'")}{advance_ordering("SELECT room_id, id FROM u WHERE next = 'expired'")}
"""  # noqa: S608 - constants of this package

_GIVE_BACK: Final = f"""
WITH e AS MATERIALIZED ({ACCESS_TO_ONE}), picked AS MATERIALIZED ({_REQUESTED_LEASES}) {_RELEASE_CTES}
SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, (SELECT standing FROM e), coalesce((SELECT string_agg(k::text, ',') FROM u), ''),
    EXISTS (SELECT FROM u WHERE next = 'queued')
"""  # noqa: S608 - constants of this package

_EXTEND: Final = f"""
WITH e AS MATERIALIZED ({ACCESS_TO_ONE}), picked AS MATERIALIZED ({_REQUESTED_LEASES}), u AS (
    UPDATE leases l SET until = now() + %(lease)s::int8 * interval '1 ms'
    FROM picked p CROSS JOIN LATERAL (
        SELECT * FROM deliveries d WHERE d.room_id = p.room_id AND d.id = p.id LIMIT 1
    ) d WHERE l.room_id = ANY (ARRAY[p.room_id]) AND l.id = p.id AND d.generation = p.generation RETURNING p.k
)
SELECT 0, (SELECT standing FROM e), coalesce((SELECT string_agg(k::text, ',') FROM u), '')
"""  # noqa: S608 - constants of this package

# Spans rooms, as time does; a request that settles a lease at this moment keeps it. Settled leases
# stay in the index while an old snapshot may see them: a scan that begins at the last one's time
# does not read them.
_LAPSED: Final = f"""
    SELECT * FROM (
        SELECT 0 AS k, room_id, id, generation, subscription_id, until FROM leases
        WHERE until >= %(low)s::timestamptz AND until <= now(){{others}}
        ORDER BY until LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
    ) l WHERE {ALWAYS_TRUE.format("generation")}
"""  # noqa: S608 - constants of this package
_EXPIRE_TEMPLATE: Final = f"""
WITH picked AS MATERIALIZED ({{lapsed}}) {_RELEASE_CTES}
SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, (SELECT count(*) FROM picked),
    coalesce((SELECT string_agg(DISTINCT subscription_id::text, ',') FROM u WHERE next = 'queued'), ''), now(){{more}}
"""  # noqa: S608 - constants of this package
_EXPIRE: Final = _EXPIRE_TEMPLATE.format(lapsed=_LAPSED.format(others=""), more="")
_LATEST_AND_LARGEST: Final = (
    f", (SELECT max(until) FROM picked), {LARGEST_ORGANISATION.format('picked')}"  # noqa: S608
)
_EXPIRE_OF_OTHERS: Final = _EXPIRE_TEMPLATE.format(
    lapsed=_LAPSED.format(others=OF_OTHER_ORGANISATIONS), more=_LATEST_AND_LARGEST
)

# Nearly always none has ended, and the large statement takes a millisecond to find that out.
_ANY_EXPIRED: Final = """
SELECT 0, now(), EXISTS (SELECT FROM leases WHERE until >= %(low)s::timestamptz AND until <= now())
"""

_LAPSE_PARAMETERS: Final = {"delay": 0, "kind": LogKind.LEASE_ENDED, "receives": 1}

_ACCESS: Final = f"SELECT 0, standing FROM ({ACCESS_TO_ONE}) e"  # noqa: S608 - constants of this package

_INSPECT: Final = """
SELECT 0, v.k, d.state::text, d.generation, l.until > now()
FROM unnest(%(rooms)s::int4[], %(subscriptions)s::uuid[], %(id)s::uuid[]) WITH ORDINALITY AS v (room_id, subscription_id, id, k)
    CROSS JOIN LATERAL (SELECT * FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id LIMIT 1) d
    LEFT JOIN LATERAL (SELECT * FROM leases l WHERE l.room_id = v.room_id AND l.id = v.id LIMIT 1) l ON true
WHERE d.subscription_id = v.subscription_id
UNION ALL SELECT 0, NULL, NULL, NULL, NULL
"""

_SUBSCRIPTIONS: Final = """
SELECT 0, v.k, d.subscription_id::text
FROM unnest(%(rooms)s::int4[], %(id)s::uuid[]) WITH ORDINALITY AS v (room_id, id, k)
    CROSS JOIN LATERAL (SELECT * FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id LIMIT 1) d
UNION ALL SELECT 0, NULL, NULL
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
class LapsedBatch:
    """Hold one batch: how many leases ended, the last at `latest_until` (None: there were none).

    `queued_in`: the subscriptions in which a delivery was queued; `largest`: the organisation with
    the most of these leases; `ended_at`: PostgreSQL's time.
    """

    ended: int
    queued_in: Sequence[SubscriptionId]
    latest_until: datetime | None
    largest: OrganisationId | None
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsettledDelivery:
    """Hold the state of a delivery whose lease could not be settled.

    `leased`: it is under a lease that has not expired.
    """

    state: State
    generation: int
    leased: bool


class LeaseQueries:
    """End, move and look up leases through one writer.

    The writer serves its callers in order, and one request may name a thousand leases. So each
    organisation has one statement there at a time, and no other waits for all that it has asked
    for. A caller may be cancelled, as when a stream ends. A statement that has begun is not: that
    would end the connection, for all.

    StorageUnavailableError: in doubt. StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._turns: WeakValueDictionary[OrganisationId | None, asyncio.Lock] = (
            WeakValueDictionary()
        )
        self._running: set[asyncio.Future[list[tuple[Any, ...]]]] = set()
        self._scan_from: datetime | None = None
        self._full_scan_at = _FIRST_SCAN

    async def close(self) -> None:
        """Wait until the statements under way have ended, before their connection is closed."""
        if self._running:
            await asyncio.wait(self._running)

    async def access(
        self, room: RoomId, subscription: SubscriptionId, organisation: OrganisationId
    ) -> SubscriptionAccess:
        """Return how this organisation may use the subscription."""
        parameters = {"room": room, "subscription": subscription, "organisation": organisation}
        ((standing,),) = await self._run_in_turn(organisation, _ACCESS, parameters)
        return SubscriptionAccess(standing)

    async def nack(
        self,
        room: RoomId,
        subscription: SubscriptionId,
        organisation: OrganisationId,
        leases: Sequence[tuple[bytes, bytes]],
        *,
        delay_ms: int,
    ) -> tuple[SubscriptionAccess, frozenset[int], bool]:
        """Give leases (delivery id as 16 bytes, generation as 4) back.

        They are due again in `delay_ms`. Return what the subscription is, the indexes of those
        given back, and whether any of them is queued again.
        """
        parameters = _lease_parameters(room, subscription, organisation, leases) | {
            "delay": delay_ms,
            "kind": LogKind.NACKED,
            "receives": 1,
        }
        ((standing, settled, queued),) = await self._run_in_turn(
            organisation, _GIVE_BACK, parameters
        )
        return SubscriptionAccess(standing), parse_indexes(settled) or frozenset(), queued

    async def release(
        self,
        room: RoomId,
        subscription: SubscriptionId,
        organisation: OrganisationId,
        leases: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """Give leases back whose messages no consumer was given: they count no receive."""
        parameters = _lease_parameters(room, subscription, organisation, leases) | {
            "delay": 0,
            "kind": LogKind.RELEASED,
            "receives": 0,
        }
        await self._run_in_turn(organisation, _GIVE_BACK, parameters)

    async def extend(
        self,
        room: RoomId,
        subscription: SubscriptionId,
        organisation: OrganisationId,
        leases: Sequence[tuple[bytes, bytes]],
        *,
        lease_ms: int,
    ) -> tuple[SubscriptionAccess, frozenset[int]]:
        """Let leases end `lease_ms` from now.

        Return the subscription's access, and the indexes of those leases.
        """
        parameters = _lease_parameters(room, subscription, organisation, leases) | {
            "lease": lease_ms
        }
        ((standing, settled),) = await self._run_in_turn(organisation, _EXTEND, parameters)
        return SubscriptionAccess(standing), parse_indexes(settled) or frozenset()

    async def expire(self, *, limit: int) -> tuple[int, list[SubscriptionId]]:
        """End leases that have expired, the oldest first.

        Return how many, and the subscriptions in which a delivery was queued.
        """
        low = self._scan_from or "-infinity"
        ended, queued = 0, ""
        ((at, any_expired),) = await self._writer.run(_ANY_EXPIRED, {"low": low})
        if any_expired:
            parameters = {**_LAPSE_PARAMETERS, "limit": limit, "low": low}
            ((ended, queued, at),) = await self._writer.run(_EXPIRE, parameters)
        if self._scan_from is None:
            self._full_scan_at = at
        whole = ended >= limit or at - self._full_scan_at >= FULL_SCAN_EVERY
        self._scan_from = None if whole else at - SCAN_OVERLAP
        return ended, _split_ids(queued)

    async def expire_in_turn(
        self, low: datetime, *, limit: int, excluded: Sequence[OrganisationId]
    ) -> LapsedBatch:
        """End leases that have expired at `low` or later, but for those of some organisations."""
        parameters = {
            **_LAPSE_PARAMETERS,
            "limit": limit,
            "low": low,
            "organisations": literal_array(excluded),
        }
        rows = await self._writer.run(_EXPIRE_OF_OTHERS, parameters)
        ended, queued, at, latest, largest = rows[0]
        return LapsedBatch(
            ended=ended,
            queued_in=_split_ids(queued),
            latest_until=latest,
            largest=None if largest is None else OrganisationId(largest),
            ended_at=at,
        )

    async def inspect(
        self,
        deliveries: Sequence[tuple[RoomId, SubscriptionId, bytes]],
        *,
        organisation: OrganisationId | None = None,
    ) -> Mapping[int, UnsettledDelivery]:
        """Return by index the state of those deliveries, of these subscriptions, that exist.

        A delivery's id is 16 bytes. The organisation asks; None: several do.
        """
        parameters = {
            "rooms": literal_array(room for room, _, _ in deliveries),
            "subscriptions": literal_array(subscription for _, subscription, _ in deliveries),
            "id": literal_array(delivery.hex() for _, _, delivery in deliveries),
        }
        return {
            ordinal - 1: UnsettledDelivery(
                state=State(state), generation=generation, leased=bool(live)
            )
            for ordinal, state, generation, live in await self._run_in_turn(
                organisation, _INSPECT, parameters
            )
        }

    async def find_subscriptions(
        self, deliveries: Sequence[tuple[RoomId, bytes]], *, organisation: OrganisationId
    ) -> Mapping[int, SubscriptionId]:
        """Return by index the subscriptions of those deliveries that exist.

        A delivery's id is 16 bytes. The organisation asks.
        """
        parameters = {
            "rooms": literal_array(room for room, _ in deliveries),
            "id": literal_array(delivery.hex() for _, delivery in deliveries),
        }
        return {
            ordinal - 1: SubscriptionId(subscription)
            for ordinal, subscription in await self._run_in_turn(
                organisation, _SUBSCRIPTIONS, parameters
            )
        }

    async def due_in(
        self, queues: Collection[tuple[RoomId, SubscriptionId]], *, ahead_s: float
    ) -> Mapping[SubscriptionId, float]:
        """Return the subscriptions with a delivery that is due within `ahead_s` seconds.

        The value says in how many seconds; 0 or less: it is due now.
        """
        parameters = {
            "room": literal_array(room for room, _ in queues),
            "subscription": literal_array(identity for _, identity in queues),
            "ahead_s": ahead_s,
        }
        return {SubscriptionId(row[0]): row[1] for row in await self._writer.run(_DUE, parameters)}

    async def _run_in_turn(
        self, organisation: OrganisationId | None, statement: str, parameters: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        turn = self._turns.setdefault(organisation, asyncio.Lock())
        await turn.acquire()
        running = asyncio.ensure_future(self._writer.run(statement, parameters))
        self._running.add(running)

        def on_end(ended: "asyncio.Future[list[tuple[Any, ...]]]") -> None:
            self._running.discard(ended)
            turn.release()
            if not ended.cancelled():
                ended.exception()  # or it would be logged where its caller was cancelled

        running.add_done_callback(on_end)
        return await asyncio.shield(running)


def _split_ids(joined: str) -> list[SubscriptionId]:
    return [SubscriptionId(identity) for identity in joined.split(",") if identity]


def _lease_parameters(
    room: RoomId,
    subscription: SubscriptionId,
    organisation: OrganisationId,
    leases: Sequence[tuple[bytes, bytes]],
) -> dict[str, Any]:
    return {
        "room": room,
        "subscription": subscription,
        "organisation": organisation,
        "rooms": literal_array([room] * len(leases)),
        "id": literal_array(delivery.hex() for delivery, _ in leases),
        "generation": literal_array(
            int.from_bytes(generation, "big", signed=True) for _, generation in leases
        ),
    }
