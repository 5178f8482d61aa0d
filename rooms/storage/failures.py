"""Which subscriptions of an organisation are failing, since when and why, read from what waits and rests there now."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, born_ms
from rooms.domain.states import SubscriptionStatus

MOST: Final = 100_000
"""So many rows of a sideline, and of a room's outbox, are counted; more than these count as these."""

# Each subscription costs a look into the index of the sidelines, each room a walk over its part of the outbox. `w`: what
# is tried again; ids tell the time of the publish, and the last id is the newest failure but for a retry's length.
_FAILING: Final = text(f"""
WITH u AS MATERIALIZED (
    SELECT u.room_id, r.name AS room, u.id, u.name, u.type, u.push_url, u.status, u.status_since, u.status_reason
    FROM rooms r JOIN subscriptions u ON u.room_id = r.id
    WHERE r.organisation_id = :organisation AND NOT r.deleting AND u.status <> '{SubscriptionStatus.DELETED}'
), w AS MATERIALIZED (
    SELECT o.subscription_id, count(*) AS retrying, min(o.id::text) AS oldest, max(o.id::text) AS newest
    FROM (SELECT DISTINCT room_id FROM u) r CROSS JOIN LATERAL (
        SELECT o.subscription_id, o.id, o.attempt FROM outbox o WHERE o.room_id = r.room_id LIMIT {MOST}
    ) o WHERE o.attempt > 0 GROUP BY o.subscription_id
), f AS (
    SELECT u.*, s.since, coalesce(w.retrying, 0) AS retrying, w.oldest, w.newest FROM u LEFT JOIN LATERAL (
        SELECT s.since FROM sidelined s WHERE s.room_id = u.room_id AND s.subscription_id = u.id ORDER BY s.since, s.id LIMIT 1
    ) s ON true LEFT JOIN w ON w.subscription_id = u.id
    WHERE s.since IS NOT NULL OR w.retrying > 0 OR u.status = '{SubscriptionStatus.DISABLED}'
), shown AS MATERIALIZED (
    SELECT f.*, count(*) OVER () AS total FROM f
    ORDER BY coalesce(f.since, CASE WHEN f.status = '{SubscriptionStatus.DISABLED}' THEN f.status_since END, now()), f.oldest, f.id
    LIMIT :limit
)
SELECT f.*, n.sidelined, coalesce(t.last_error, l.last_error) AS last_error, coalesce(t.last_status, l.last_status) AS last_status
FROM shown f LEFT JOIN LATERAL (
    SELECT count(*) AS sidelined FROM (
        SELECT FROM sidelined s WHERE s.room_id = f.room_id AND s.subscription_id = f.id LIMIT {MOST}
    ) s
) n ON true LEFT JOIN LATERAL (
    SELECT s.id FROM sidelined s WHERE s.room_id = f.room_id AND s.subscription_id = f.id ORDER BY s.since DESC, s.id DESC LIMIT 1
) s ON true LEFT JOIN LATERAL (
    SELECT d.last_error, d.last_status FROM deliveries d WHERE d.room_id = f.room_id AND d.id = s.id LIMIT 1
) l ON true LEFT JOIN LATERAL (
    SELECT d.last_error, d.last_status FROM deliveries d WHERE d.room_id = f.room_id AND d.id = f.newest::uuid LIMIT 1
) t ON true
""")  # noqa: S608 - words of our own


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A subscription whose deliveries fail: `sidelined` rest, `retrying` are tried again; or whose endpoint was disabled.

    `failing_since`: when the oldest of them was put aside or (retries) published; `last_error` and `last_status` are
    those of the newest.
    """

    room_id: RoomId
    room: str
    subscription_id: SubscriptionId
    name: str
    type: str
    status: str
    push_url: str | None
    sidelined: int
    oldest_sidelined_at: datetime | None
    retrying: int
    failing_since: datetime
    last_status: int | None
    last_error: str | None


async def failing(
    connection: AsyncConnection, organisation: OrganisationId, *, limit: int
) -> tuple[Sequence[Failing], int]:
    """The first of those that fail, the longest failing first; and how many there are in all."""
    rows = (await connection.execute(_FAILING, {"organisation": organisation, "limit": limit})).mappings().all()
    found = []
    for row in rows:
        begins = [row["since"]]
        if row["status"] == SubscriptionStatus.DISABLED:
            begins.append(row["status_since"])
        if row["oldest"] is not None:
            begins.append(datetime.fromtimestamp(born_ms(row["oldest"]) / 1000, UTC))
        found.append(
            Failing(
                room_id=RoomId(row["room_id"]),
                room=row["room"],
                subscription_id=SubscriptionId(str(row["id"])),
                name=row["name"],
                type=row["type"],
                status=row["status"],
                push_url=row["push_url"],
                sidelined=row["sidelined"],
                oldest_sidelined_at=row["since"],
                retrying=row["retrying"],
                failing_since=min(begin for begin in begins if begin is not None),
                last_status=row["last_status"],
                last_error=row["last_error"] or row["status_reason"],
            )
        )
    return sorted(found, key=lambda one: one.failing_since), rows[0]["total"] if rows else 0
