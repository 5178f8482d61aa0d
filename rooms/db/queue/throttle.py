"""Share the state of a lane between workers: its circuit, its failures, its rate.

And disable endpoints. A change that other workers must act on counts the subscription's version up.
A worker that takes a copy after it loads the lane again before anything is sent. `lane_changes`
counts such versions, which say nothing of the subscription itself: callers do not see them.

A write may come minutes after the attempts that it follows from. It changes nothing if the
subscription has another URL, secret or header since, was resumed, or its circuit was moved.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rooms.db.operational.outbox import event_ctes
from rooms.db.pg_arrays import literal_array, number_array
from rooms.db.queue.endpoints import EndpointRecord
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.domain.operational_event import OperationalEvent

# The status is tested by an expression, so that the planner uses no index but the key.
_BUMP_VERSION: Final = """learnt AS (
    UPDATE subscriptions s SET version = s.version + 1, lane_changes = s.lane_changes + 1 FROM l WHERE s.room_id = l.room_id AND s.id = l.id
)"""
_COUNT_CHANGED: Final = "\nSELECT 0, count(*) FROM l\n"
# The version would not do, since the circuit raises it, too. Only changes of the subscription set
# the time; a new key of the installation seals secrets and headers anew without a change.
_IS_UNCHANGED: Final = """s.push_url = %(push_url)s::text AND s.status_since = %(status_since)s::timestamptz AND (
        s.updated_at = %(updated_at)s::timestamptz OR s.secret IS NOT DISTINCT FROM %(secret)s::bytea
            AND s.sealed_headers IS NOT DISTINCT FROM %(headers)s::bytea)"""
_OF_UNCHANGED: Final = f"""EXISTS (
        SELECT FROM subscriptions s WHERE s.room_id = t.room_id AND s.id = t.id AND {_IS_UNCHANGED} OFFSET 0)"""
_SAME_CIRCUIT: Final = "t.circuit_since IS NOT DISTINCT FROM %(circuit_since)s::timestamptz"


def _changed_with_event(event: OperationalEvent, data: str) -> str:
    """Return the end of a statement that changed the lanes `l`: others notice, and an event."""
    rows = f"SELECT room_id, id AS subscription_id, {data} AS data FROM l"  # noqa: S608 - constants of this package
    return f"{_BUMP_VERSION}{event_ctes(event, rows)}{_COUNT_CHANGED}"


_SUCCEEDED: Final = """'{"cause": "succeeded"}'::jsonb"""
_OPEN_CIRCUIT: Final = f"""
WITH l AS (
    INSERT INTO lanes AS t (room_id, id, circuit_open, circuit_since, probe_at)
    SELECT room_id, id, true, now(), now() + %(open_ms)s::int8 * interval '1 ms' FROM subscriptions s
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND status || '' = 'active' AND {_IS_UNCHANGED}
    ON CONFLICT (room_id, id) DO UPDATE SET circuit_open = true, circuit_since = excluded.circuit_since,
        probe_at = excluded.probe_at, probe = NULL, probes = 0
    WHERE NOT t.circuit_open AND {_SAME_CIRCUIT} RETURNING t.room_id, t.id
), {_changed_with_event(OperationalEvent.CIRCUIT_OPENED, "'{}'::jsonb")}"""  # noqa: S608 - constants of this package
_CLOSE_CIRCUIT: Final = f"""
WITH l AS (
    UPDATE lanes t SET circuit_open = false, circuit_since = now(), probe_at = NULL, probe = NULL
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND circuit_open AND {_SAME_CIRCUIT} AND {_OF_UNCHANGED}
    RETURNING room_id, id
), {_changed_with_event(OperationalEvent.CIRCUIT_CLOSED, "'{}'::jsonb")}"""  # noqa: S608 - constants of this package
# From now on only: an earlier success of another worker had nothing to clear.
_MARK_FAILING: Final = f"""
WITH l AS (
    INSERT INTO lanes AS t (room_id, id, failing_since)
    SELECT room_id, id, now() FROM subscriptions s
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND status || '' = 'active' AND {_IS_UNCHANGED}
    ON CONFLICT (room_id, id) DO UPDATE SET failing_since = excluded.failing_since
    WHERE t.failing_since IS NULL RETURNING t.room_id, t.id
), {_BUMP_VERSION}{_COUNT_CHANGED}"""  # noqa: S608 - constants of this package
# A success says nothing of failures that were recorded after it.
_CLEAR_FAILING: Final = f"""
WITH l AS (
    UPDATE lanes t SET failing_since = NULL
    WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid AND {_OF_UNCHANGED}
        AND failing_since <= now() - %(age_ms)s::int8 * interval '1 ms' RETURNING room_id, id
), {_changed_with_event(OperationalEvent.ENDPOINT_RECOVERED, _SUCCEEDED)}"""  # noqa: S608 - constants of this package

# Disabling and its event are one statement. The owner of the room sees no more of another
# organisation's endpoint than its host, so no more is in the event: maintenance of the version
# before, which still runs during an upgrade, shows its data to every recipient.
_TARGET: Final = "substring(push_url FROM '^[^:]+://[^/?]+')"
# Like that of `rooms.db.catalog.subscription_states`: no secret, header or path.
_SNAPSHOT: Final = f"""jsonb_build_object('name', name, 'type', type, 'version', version - lane_changes,
        'event_types', event_types, 'filter', filter,
        'target', {_TARGET}, 'proposal', CASE WHEN proposal <> '{{}}' THEN proposal - 'push_url' || CASE
            WHEN jsonb_exists(proposal, 'push_url') THEN jsonb_build_object('target', {_TARGET.replace("push_url", "proposal ->> 'push_url'")})
            ELSE '{{}}' END END)"""
_DISABLED: Final = f"""SELECT room_id, id AS subscription_id, jsonb_build_object('name', name, 'disabled_at', now(),
        'target', {_TARGET}) AS data FROM s"""  # noqa: S608 - constants of this package
# The room is locked before the subscription, as the API does that: the other way round, each could
# wait for the other.
_DISABLE: Final = f"""
WITH locked AS MATERIALIZED (
    SELECT FROM rooms WHERE id = %(room)s::int4 FOR NO KEY UPDATE
), s AS (
    UPDATE subscriptions s SET status = 'disabled', status_reason = %(reason)s, status_since = now(), updated_at = now(),
        version = version + 1
    WHERE EXISTS (SELECT FROM locked) AND s.room_id = %(room)s::int4 AND s.id = %(subscription)s::uuid AND s.status || '' = 'active'
        AND {_IS_UNCHANGED} AND (
        %(failing_ms)s::int8 IS NULL OR EXISTS (
            SELECT FROM lanes l WHERE l.room_id = s.room_id AND l.id = s.id
                AND l.failing_since <= now() - %(failing_ms)s::int8 * interval '1 ms'))
    RETURNING s.room_id, s.id, s.name, s.push_url, s.status_reason, s.type, s.version, s.lane_changes, s.event_types, s.filter,
        s.proposal
), h AS (
    INSERT INTO subscription_history (room_id, subscription_id, action, status, reason, snapshot)
    SELECT room_id, id, 'disabled', 'disabled', status_reason, {_SNAPSHOT} FROM s
), r AS (
    UPDATE rooms SET plan_version = plan_version + 1 WHERE id IN (SELECT room_id FROM s)
){event_ctes(OperationalEvent.ENDPOINT_DISABLED, _DISABLED)}
SELECT 0, count(*) FROM s
"""  # noqa: S608 - constants of this package

# Beside the status, not instead of it: when the key is back, deliveries continue without further
# action.
_SET_STATUS_REASON: Final = """
WITH s AS (
    UPDATE subscriptions SET status_reason = %(reason)s
    WHERE room_id = %(room)s AND id = %(subscription)s::uuid AND status = 'active' AND version = %(version)s RETURNING 1
)
SELECT 0, count(*) FROM s
"""

# A token bucket for each lane, stored as the time at which it will be full again: `burst` tokens,
# `per_s` new ones a second. The rows are locked in the order given, which is the same for every
# worker.
_TAKE_TOKENS: Final = """
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
SELECT 0, n, granted, CASE WHEN granted < floor(free + 1e-6) THEN 0 ELSE (floor(free + 1e-6) + 1 - free) / per_s END FROM g
UNION ALL SELECT 0, NULL, NULL, NULL
"""
_INSERT_LANES: Final = """
WITH made AS (
    INSERT INTO lanes (room_id, id)
    SELECT room_id, id FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) ON CONFLICT DO NOTHING RETURNING 1
) SELECT 0, count(*) FROM made
"""
_REPORT_CONCURRENCY: Final = """
WITH made AS (
    INSERT INTO lanes AS t (room_id, id, concurrency, concurrency_at)
    SELECT room_id, id, concurrency, now()
    FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(concurrency)s::int4[]) AS v (room_id, id, concurrency)
    ON CONFLICT (room_id, id) DO UPDATE SET concurrency = excluded.concurrency, concurrency_at = excluded.concurrency_at
    RETURNING 1
) SELECT 0, count(*) FROM made
"""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Request tokens for attempts of one lane."""

    subscription: SubscriptionId
    tokens: int
    per_s: float
    burst: int


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """Hold the tokens that were granted.

    The next one is free in `next_token_s` (0: now), unless another worker takes it.
    """

    tokens: int
    next_token_s: float


class SharedLaneState:
    """Write lane state through one writer. The booleans say whether this call changed it.

    `tried` is the record with which the attempts were made that a write follows from.
    """

    def __init__(
        self, writer: LogWriter, *, on_limited: Callable[[int], None] | None = None
    ) -> None:
        """Call `on_limited` with the number of lanes that got fewer tokens than they requested."""
        self._writer = writer
        self._on_limited = on_limited

    async def open_circuit(self, tried: EndpointRecord, *, open_ms: int) -> bool:
        """Open the circuit: only probes are sent, the first after `open_ms`."""
        return await self._change(
            _OPEN_CIRCUIT, tried, circuit_since=tried.circuit_since, open_ms=open_ms
        )

    async def close_circuit(self, tried: EndpointRecord) -> bool:
        """Close the circuit after a successful probe."""
        return await self._change(_CLOSE_CIRCUIT, tried, circuit_since=tried.circuit_since)

    async def mark_failing(self, tried: EndpointRecord) -> bool:
        """Record that there are only failures from now on, until a success clears it."""
        return await self._change(_MARK_FAILING, tried)

    async def clear_failing(self, tried: EndpointRecord, *, age_s: float = 0.0) -> bool:
        """Record a success that was seen `age_s` ago."""
        return await self._change(_CLEAR_FAILING, tried, age_ms=int(age_s * 1000))

    async def disable(
        self,
        tried: EndpointRecord,
        *,
        reason: str,
        failing_ms: int | None = None,
    ) -> bool:
        """Disable an endpoint until it is resumed.

        With `failing_ms`, only if all workers have seen only failures for so long.
        """
        return await self._change(_DISABLE, tried, reason=reason, failing_ms=failing_ms)

    async def set_status_reason(
        self, room: RoomId, subscription: SubscriptionId, *, version: int, reason: str | None
    ) -> None:
        """Set the reason why an active subscription cannot be served (None: it can).

        Nothing is changed if its version is another one.
        """
        await self._writer.run(
            _SET_STATUS_REASON,
            {"room": room, "subscription": subscription, "version": version, "reason": reason},
        )

    async def take_tokens(
        self, requests: Sequence[TokenRequest]
    ) -> dict[SubscriptionId, TokenGrant]:
        """Return the tokens of each lane.

        All workers together get no more than its rate and burst allow.
        """
        ordered = sorted(requests, key=lambda one: (room_of(one.subscription), one.subscription))
        values = {
            "room": number_array(room_of(one.subscription) for one in ordered),
            "id": literal_array(one.subscription for one in ordered),
            "wanted": number_array(one.tokens for one in ordered),
            "per_s": number_array(one.per_s for one in ordered),
            "burst": number_array(one.burst for one in ordered),
        }
        rows = await self._writer.run(_TAKE_TOKENS, values)
        if len(rows) < len(ordered):
            await self._writer.run(_INSERT_LANES, values)
            rows = await self._writer.run(_TAKE_TOKENS, values)
        grants = {
            ordered[n - 1].subscription: TokenGrant(granted, next_s) for n, granted, next_s in rows
        }
        if self._on_limited is not None:
            self._on_limited(
                sum(
                    one.subscription in grants and grants[one.subscription].tokens < one.tokens
                    for one in ordered
                )
            )
        return grants

    async def report_concurrency(self, concurrency: Sequence[tuple[SubscriptionId, int]]) -> None:
        """Record how many concurrent attempts this worker makes on these lanes."""
        ordered = sorted(concurrency, key=lambda one: (room_of(one[0]), one[0]))
        await self._writer.run(
            _REPORT_CONCURRENCY,
            {
                "room": number_array(room_of(identity) for identity, _ in ordered),
                "id": literal_array(identity for identity, _ in ordered),
                "concurrency": number_array(limit for _, limit in ordered),
            },
        )

    async def _change(
        self, statement: str, tried: EndpointRecord, **values: float | str | datetime | None
    ) -> bool:
        rows = await self._writer.run(
            statement,
            {
                "room": tried.room_id,
                "subscription": tried.subscription_id,
                "push_url": tried.push_url,
                "status_since": tried.status_since,
                "updated_at": tried.updated_at,
                "secret": next(iter(tried.encrypted_secrets), None),
                "headers": tried.sealed_headers,
                **values,
            },
        )
        return bool(rows[0][0])
