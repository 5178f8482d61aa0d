"""A lane as people see it: what holds for it, and how it stands."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.lane import LANE_SETTINGS, Circuit, LanePolicy, lane_policy
from rooms.domain.room import Subscription

MOST: Final = 100_000
"""So many held deliveries are counted; more than these count as these."""
_SETTINGS: Final = ", ".join(f"coalesce(s.{name}, r.{name}) AS {name}" for name in LANE_SETTINGS)
_LOOK: Final = text(f"""
SELECT {_SETTINGS}, coalesce(s.ordered, r.ordered) AS ordered, l.circuit_open, l.circuit_since, l.probe_at, l.probes, l.failing_since, l.concurrency, l.concurrency_at,
    EXISTS (SELECT FROM outbox o WHERE o.room_id = l.room_id AND o.id = l.probe AND o.generation = l.probe_generation
        AND o.attempt = l.probe_attempt) AS probing,
    (SELECT coalesce(jsonb_object_agg(h.reason, h.n), '{{}}') FROM (
        SELECT reason, count(*) AS n FROM (
            SELECT reason FROM held WHERE -room_id = -s.room_id AND subscription_id = s.id LIMIT {MOST}
        ) h GROUP BY reason
    ) h) AS held
FROM subscriptions s JOIN rooms r ON r.id = s.room_id LEFT JOIN lanes l ON l.room_id = s.room_id AND l.id = s.id
WHERE s.room_id = :room AND s.id = :subscription
""")  # noqa: S608 - names of our own columns
_RESET: Final = text("""
UPDATE lanes SET circuit_open = false, circuit_since = CASE WHEN circuit_open THEN now() ELSE circuit_since END,
    probe_at = NULL, probe = NULL, failing_since = NULL
WHERE room_id = :room AND id = :subscription AND (circuit_open OR failing_since IS NOT NULL)
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """How a lane stands. `concurrency` is what a worker reported last, and when: None where trouble never lowered it."""

    policy: LanePolicy
    ordered: bool
    circuit: Circuit
    circuit_since: datetime | None
    next_probe_at: datetime | None
    probes: int
    failing_since: datetime | None
    concurrency: int | None
    concurrency_at: datetime | None
    held: Mapping[str, int]


async def look_at_lane(connection: AsyncConnection, subscription: Subscription) -> LaneView:
    """The lane of a subscription that is there."""
    row = (
        (await connection.execute(_LOOK, {"room": subscription.room_id, "subscription": subscription.id}))
        .mappings()
        .one()
    )
    policy = lane_policy({name: row[name] for name in LANE_SETTINGS})
    is_open = bool(row["circuit_open"] and policy.circuit_failures)
    if not policy.circuit_failures:
        circuit = Circuit.OFF
    elif not is_open:
        circuit = Circuit.CLOSED
    else:
        circuit = Circuit.HALF_OPEN if row["probing"] else Circuit.OPEN
    return LaneView(
        policy=policy,
        ordered=row["ordered"],
        circuit=circuit,
        circuit_since=row["circuit_since"] if policy.circuit_failures else None,
        next_probe_at=row["probe_at"] if is_open else None,
        probes=row["probes"] if is_open else 0,
        failing_since=row["failing_since"],
        concurrency=row["concurrency"],
        concurrency_at=row["concurrency_at"],
        held=row["held"],
    )


async def reset_lane(connection: AsyncConnection, subscription: Subscription) -> bool:
    """Close its circuit and forget its failures; whether there was anything of the kind."""
    found = await connection.execute(_RESET, {"room": subscription.room_id, "subscription": subscription.id})
    return found.rowcount > 0
