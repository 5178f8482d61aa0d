"""Count what each consumer of a PULL subscription has under a lease, and find what waits longest.

A consumer is an API key. Leases have no index by subscription, because each pull would pay for it,
so a bounded number of the room's is looked at.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.pull_queue import MAX_SCANNED
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId

MAX_CONSUMERS: Final = 100
CONSUMERS: Final = """
WITH seen AS MATERIALIZED (
    SELECT l.* FROM leases l WHERE l.room_id = CAST(:room AS int4) ORDER BY l.id LIMIT :scanned
), by_key AS (
    SELECT l.key_id, count(*) AS leases, min(d.updated_at) AS oldest_at, min(l.until) AS first_end, max(l.until) AS last_end
    FROM seen l LEFT JOIN LATERAL (
        SELECT d.updated_at FROM deliveries d WHERE d.room_id = l.room_id AND d.id = l.id LIMIT 1
    ) d ON true WHERE l.subscription_id = CAST(:subscription AS uuid) AND l.until > now() GROUP BY 1
)
SELECT w.scanned, h.leases, h.key_id::text AS key_id, k.name, h.oldest_at, h.first_end, h.last_end
FROM (SELECT count(*) AS scanned FROM seen) w LEFT JOIN by_key h ON true
LEFT JOIN LATERAL (SELECT k.name FROM api_keys k WHERE k.id = h.key_id AND k.organisation_id = CAST(:organisation AS uuid) LIMIT 1) k ON true
ORDER BY h.leases DESC, h.key_id LIMIT :most
"""
# What PostgreSQL carries is found by priority, what another broker carries only by due time.
OLDEST: Final = """
SELECT min(o.due_at) FROM (
    (SELECT o.due_at FROM generate_series(0, 9) p (priority), LATERAL (
        SELECT o.due_at FROM outbox o WHERE o.kind = 1 AND -o.room_id = -CAST(:room AS int4)
            AND o.subscription_id = CAST(:subscription AS uuid) AND o.priority = p.priority AND o.due_at <= now() ORDER BY o.due_at LIMIT 1
    ) o)
    UNION ALL
    (SELECT o.due_at FROM outbox o WHERE o.kind IN (3, 5) AND -o.room_id = -CAST(:room AS int4)
        AND o.subscription_id = CAST(:subscription AS uuid) AND o.due_at <= now() ORDER BY o.due_at LIMIT 1)
) o
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConsumer:
    """Describe what a consumer has under leases that have not ended.

    `key_id` None: it is not known, as of leases that a repair made. `name` None: the key is gone.
    `oldest_at`: when the first of its leases was taken; None: it is not known.
    """

    key_id: KeyId | None
    name: str | None
    leases: int
    oldest_at: datetime | None
    first_end: datetime
    last_end: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConsumers:
    """Hold the consumers with the most leases, and the due time of what has waited longest.

    `complete`: every lease of the room was looked at.
    """

    consumers: Sequence[QueueConsumer]
    oldest_due_at: datetime | None
    complete: bool


async def list_consumers(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    organisation: OrganisationId,
    *,
    max_scanned: int = MAX_SCANNED,
) -> QueueConsumers:
    """Return up to 100 consumers of a subscription of `organisation`, and what waits longest."""
    queue = {"room": room, "subscription": subscription}
    more = {"organisation": organisation, "scanned": max_scanned, "most": MAX_CONSUMERS}
    rows = (await connection.execute(text(CONSUMERS), queue | more)).mappings().all()
    return QueueConsumers(
        consumers=[
            QueueConsumer(
                key_id=row["key_id"],
                name=row["name"],
                leases=row["leases"],
                oldest_at=row["oldest_at"],
                first_end=row["first_end"],
                last_end=row["last_end"],
            )
            for row in rows
            if row["leases"] is not None
        ],
        oldest_due_at=await connection.scalar(text(OLDEST), queue),
        complete=rows[0]["scanned"] < max_scanned,
    )
