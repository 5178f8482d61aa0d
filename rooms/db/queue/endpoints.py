"""Load the subscriptions that push workers need, many at a time."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from psycopg.rows import dict_row

from rooms.db.connection import Connection
from rooms.db.pg_arrays import literal_array
from rooms.domain.ids import DeliveryId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.retry_policy import RetryPolicy
from rooms.domain.state_machine import SubscriptionStatus
from rooms.domain.throttle import NO_LIMITS, THROTTLE_SETTINGS, ThrottlePolicy, throttle_policy

_LOAD: Final = """
SELECT s.room_id, s.id::text AS id, s.organisation_id::text AS organisation_id, r.organisation_id::text AS room_owner_id, s.push_url, s.headers, s.sealed_headers, s.terminal_statuses, s.ignorable_statuses,
    s.cloud_events, s.event_item, s.status, s.status_reason, s.status_since, s.updated_at, s.version, s.lane_changes, s.secret, coalesce(s.ordered, r.ordered) AS ordered,
    CASE WHEN s.previous_secret_until > now() THEN s.previous_secret END AS previous_secret,
    coalesce(s.delivery_delay_ms, r.delivery_delay_ms) AS delay_ms,
    coalesce(s.delivery_delay_multiplier, r.delivery_delay_multiplier) AS multiplier,
    coalesce(s.delivery_attempts, r.delivery_attempts) AS attempts,
    coalesce(s.delivery_max_delay_ms, r.delivery_max_delay_ms) AS max_delay_ms,
    coalesce(s.delivery_jitter, r.delivery_jitter) AS jitter,
    coalesce(s.max_concurrency, r.max_concurrency) AS max_concurrency, coalesce(s.timeout_ms, r.timeout_ms) AS timeout_ms,
    coalesce(s.rate_per_s, r.rate_per_s) AS rate_per_s,
    coalesce(s.rate_burst, r.rate_burst) AS rate_burst, coalesce(s.circuit_failures, r.circuit_failures) AS circuit_failures,
    coalesce(s.circuit_window_ms, r.circuit_window_ms) AS circuit_window_ms,
    coalesce(s.circuit_open_ms, r.circuit_open_ms) AS circuit_open_ms, coalesce(s.drain_per_s, r.drain_per_s) AS drain_per_s,
    coalesce(s.disable_after_ms, r.disable_after_ms) AS disable_after_ms,
    l.circuit_open, l.circuit_since, l.probe::text AS probe, l.probe_generation, l.probe_attempt,
    extract(epoch FROM now() - l.failing_since)::float8 AS failing_s
FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id)
    JOIN subscriptions s ON s.room_id = v.room_id AND s.id = v.id
    JOIN rooms r ON r.id = s.room_id
    LEFT JOIN lanes l ON l.room_id = s.room_id AND l.id = s.id
WHERE s.status NOT IN ('deleted', 'rejected', 'terminated') AND s.push_url IS NOT NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRecord:
    """Hold a PUSH subscription as a worker needs it; secrets and headers are still encrypted."""

    room_id: RoomId
    subscription_id: SubscriptionId
    organisation_id: OrganisationId
    room_owner_id: OrganisationId
    push_url: str
    headers: Mapping[str, str] = field(repr=False)
    """Those that no process has sealed yet, after an upgrade from a version that did not."""
    cloud_events: bool
    event_item: bool
    """The body is GovStack's EventItem around the payload."""
    status: SubscriptionStatus
    status_since: datetime
    updated_at: datetime
    """The last change of the subscription itself; that of its circuit only raises the version."""
    version: int
    encrypted_secrets: tuple[bytes, ...]
    """The current one first, then the previous one while both are valid."""
    policy: RetryPolicy
    sealed_headers: bytes | None = None
    ordered: bool = False
    """True if deliveries with an ordering key are made one after the other."""
    throttle: ThrottlePolicy = NO_LIMITS
    circuit_open: bool = False
    """True if the circuit is open for all workers, and `circuit_failures` is set."""
    circuit_since: datetime | None = None
    """The time at which the circuit was last opened or closed."""
    probe: tuple[DeliveryId, int, int] | None = None
    """The version (delivery, generation, attempt) that probes the open circuit."""
    failing: bool = False
    """True if workers have seen only failures for a while."""
    failing_s: float = field(default=0.0, compare=False)
    """The time for which they have seen only failures, as of this read."""
    status_reason: str | None = field(default=None, compare=False)
    """The reason stored beside the status, for any status."""

    def has_same_target(self, other: "EndpointRecord") -> bool:
        """Return whether attempts with the other record count for this one.

        It has the same URL, secret and headers, and was not resumed since. A new key of the
        installation seals these anew without a change.
        """
        return self is other or (
            self.push_url == other.push_url
            and self.status_since == other.status_since
            and (
                self.updated_at == other.updated_at
                or (
                    self.encrypted_secrets[:1] == other.encrypted_secrets[:1]
                    and self.sealed_headers == other.sealed_headers
                )
            )
        )


async def load_endpoints(
    connection: Connection, wanted: Iterable[tuple[RoomId, SubscriptionId]]
) -> dict[SubscriptionId, EndpointRecord]:
    """Return the PUSH subscriptions among `wanted` that still exist."""
    pairs = list(wanted)
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(
            _LOAD,
            {
                "room": literal_array(room for room, _ in pairs),
                "id": literal_array(identity for _, identity in pairs),
            },
        )
        rows = await cursor.fetchall()
    return {
        SubscriptionId(row["id"]): EndpointRecord(
            room_id=RoomId(row["room_id"]),
            subscription_id=SubscriptionId(row["id"]),
            organisation_id=OrganisationId(row["organisation_id"]),
            room_owner_id=OrganisationId(row["room_owner_id"]),
            push_url=row["push_url"],
            headers=row["headers"],
            sealed_headers=row["sealed_headers"],
            cloud_events=row["cloud_events"],
            event_item=row["event_item"],
            status=SubscriptionStatus(row["status"]),
            status_since=row["status_since"],
            updated_at=row["updated_at"],
            version=row["version"],
            encrypted_secrets=tuple(filter(None, (row["secret"], row["previous_secret"]))),
            policy=RetryPolicy(
                delay_ms=row["delay_ms"],
                multiplier=row["multiplier"],
                attempts=row["attempts"],
                max_delay_ms=row["max_delay_ms"],
                jitter=row["jitter"],
                terminal_statuses=frozenset(row["terminal_statuses"]),
                ignorable_statuses=frozenset(row["ignorable_statuses"]),
                version=row["version"] - row["lane_changes"],
            ),
            ordered=row["ordered"],
            throttle=(lane := _throttle_policy(row)),
            circuit_open=bool(row["circuit_open"] and lane.circuit_failures),
            circuit_since=row["circuit_since"],
            probe=None
            if row["probe"] is None
            else (row["probe"], row["probe_generation"], row["probe_attempt"]),
            failing=row["failing_s"] is not None,
            failing_s=row["failing_s"] or 0.0,
            status_reason=row["status_reason"],
        )
        for row in rows
    }


def _throttle_policy(row: Mapping[str, Any]) -> ThrottlePolicy:
    return throttle_policy({name: row[name] for name in THROTTLE_SETTINGS})
