"""What push workers need to know of subscriptions, many at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from psycopg.rows import dict_row

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.policy import RetryPolicy
from rooms.domain.states import SubscriptionStatus
from rooms.storage.engine import Connection
from rooms.storage.literals import array

_LOAD: Final = """
SELECT s.room_id, s.id::text AS id, s.push_url, s.headers, s.terminal_statuses, s.ignorable_statuses, s.timeout_ms,
    s.cloud_events, s.status, s.status_reason, s.version, s.secret,
    CASE WHEN s.previous_secret_until > now() THEN s.previous_secret END AS previous_secret,
    coalesce(s.delivery_delay_ms, r.delivery_delay_ms) AS delay_ms,
    coalesce(s.delivery_delay_multiplier, r.delivery_delay_multiplier) AS multiplier,
    coalesce(s.delivery_attempts, r.delivery_attempts) AS attempts,
    r.delivery_max_delay_ms AS max_delay_ms, r.delivery_jitter AS jitter
FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id)
    JOIN subscriptions s ON s.room_id = v.room_id AND s.id = v.id
    JOIN rooms r ON r.id = s.room_id
WHERE s.status <> 'deleted' AND s.push_url IS NOT NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRecord:
    """A PUSH subscription as a worker needs it; the secrets still sealed."""

    room_id: RoomId
    subscription_id: SubscriptionId
    push_url: str
    headers: Mapping[str, str]
    timeout_ms: int
    cloud_events: bool
    status: SubscriptionStatus
    version: int
    sealed_secrets: tuple[bytes, ...]
    """The current one first, then the one before while its overlap lasts."""
    policy: RetryPolicy
    status_reason: str | None = field(default=None, compare=False)
    """What stands beside the status, whatever it is."""


async def load_endpoints(
    connection: Connection, wanted: Iterable[tuple[RoomId, SubscriptionId]]
) -> dict[SubscriptionId, EndpointRecord]:
    """The PUSH subscriptions among `wanted` that still exist."""
    pairs = list(wanted)
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(
            _LOAD, {"room": array(room for room, _ in pairs), "id": array(identity for _, identity in pairs)}
        )
        rows = await cursor.fetchall()
    return {
        SubscriptionId(row["id"]): EndpointRecord(
            room_id=RoomId(row["room_id"]),
            subscription_id=SubscriptionId(row["id"]),
            push_url=row["push_url"],
            headers=row["headers"],
            timeout_ms=row["timeout_ms"],
            cloud_events=row["cloud_events"],
            status=SubscriptionStatus(row["status"]),
            version=row["version"],
            sealed_secrets=tuple(filter(None, (row["secret"], row["previous_secret"]))),
            policy=RetryPolicy(
                delay_ms=row["delay_ms"],
                multiplier=row["multiplier"],
                attempts=row["attempts"],
                max_delay_ms=row["max_delay_ms"],
                jitter=row["jitter"],
                terminal_statuses=frozenset(row["terminal_statuses"]),
                ignorable_statuses=frozenset(row["ignorable_statuses"]),
                version=row["version"],
            ),
            status_reason=row["status_reason"],
        )
        for row in rows
    }
