"""List the subscriptions of a principal that have something in their sideline."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.subscription_counts import (
    OWN_SUBSCRIPTIONS,
    has_more_subscriptions,
    own_parameters,
)
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import SubscriptionStatus, SubscriptionType

MAX_COUNTED: Final = 10_000
"""So many deliveries of a sideline are counted; a larger number counts as this."""
MAX_SCANNED: Final = 5000
"""So many subscriptions are looked at by one statement."""

# A window of own subscriptions: each costs one look into the index of `sidelined`.
_OWN: Final = f"""own AS MATERIALIZED (
    SELECT s.room_id, s.id, true AS mine FROM ({OWN_SUBSCRIPTIONS} AND s.status <> 'deleted'
        AND (CAST(:before AS uuid) IS NULL OR s.id < CAST(:before AS uuid))
        ORDER BY s.id DESC LIMIT :scanned) s
)"""  # noqa: S608 - constants of this package
# A window of subscriptions of all organisations that have something sidelined, from one entry of
# the index of `sidelined` to that of the next subscription: for an organisation with many, most of
# which have nothing.
_ANY: Final = f"""walk(id, n) AS (
    (SELECT t.subscription_id, 1 FROM sidelined t
        WHERE t.subscription_id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff') ORDER BY t.subscription_id DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT t.subscription_id FROM sidelined t WHERE t.subscription_id < w.id ORDER BY t.subscription_id DESC LIMIT 1), w.n + 1
    FROM walk w WHERE w.id IS NOT NULL AND w.n < :scanned
), own AS MATERIALIZED (
    SELECT s.room_id, w.id, s.id IS NOT NULL AS mine FROM walk w LEFT JOIN LATERAL (
        {OWN_SUBSCRIPTIONS} AND s.status <> 'deleted' AND s.id = w.id LIMIT 1
    ) s ON true WHERE w.id IS NOT NULL
)"""  # noqa: S608 - constants of this package
_STATEMENT: Final = f"""
WITH RECURSIVE {{window}}, found AS MATERIALIZED (
    SELECT own.room_id, own.id, o.since AS oldest FROM own CROSS JOIN LATERAL (
        SELECT s.since FROM sidelined s WHERE s.subscription_id = own.id AND -s.room_id = -own.room_id ORDER BY s.since, s.id LIMIT 1
    ) o WHERE own.mine AND EXISTS (SELECT FROM rooms r WHERE r.id = own.room_id AND NOT r.deleting)
    ORDER BY own.id DESC LIMIT :limit
)
SELECT u.id, u.name, u.type, u.status, u.room_id, r.name AS room, f.oldest AS oldest_at, n.newest_at, c.reasons AS by_reason,
    d.last_status, d.last_error, p.interval_s AS schedule_interval_s, p.next_at AS schedule_next_at,
    w.scanned, w.last
FROM (SELECT count(*) AS scanned, min(own.id::text) AS last FROM own) w
LEFT JOIN found f ON true
LEFT JOIN subscriptions u ON u.room_id = f.room_id AND u.id = f.id
LEFT JOIN rooms r ON r.id = f.room_id
LEFT JOIN LATERAL (
    SELECT s.id, s.since AS newest_at FROM sidelined s WHERE s.subscription_id = f.id AND -s.room_id = -f.room_id
    ORDER BY s.since DESC, s.id DESC LIMIT 1
) n ON true
LEFT JOIN LATERAL (
    SELECT jsonb_object_agg(c.reason, c.n) AS reasons FROM (
        SELECT c.reason, count(*) AS n FROM (
            SELECT s.reason FROM sidelined s WHERE s.subscription_id = f.id AND -s.room_id = -f.room_id LIMIT {MAX_COUNTED}
        ) c GROUP BY c.reason
    ) c
) c ON true
LEFT JOIN LATERAL (SELECT d.last_status, d.last_error FROM deliveries d WHERE d.room_id = f.room_id AND d.id = n.id LIMIT 1) d ON true
LEFT JOIN shovel_schedules p ON p.room_id = f.room_id AND p.subscription_id = f.id
ORDER BY f.id DESC
"""  # noqa: S608 - constants of this package
OVERVIEW: Final = _STATEMENT.format(window=_OWN)
OVERVIEW_OF_MANY: Final = _STATEMENT.format(window=_ANY)
_OVERVIEW: Final = text(OVERVIEW)
_OVERVIEW_OF_MANY: Final = text(OVERVIEW_OF_MANY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelineOverview:
    """Describe a subscription with a sideline that is not empty.

    `by_reason` counts up to 10,000 deliveries; the error is that of the newest one.
    """

    subscription_id: SubscriptionId
    name: str
    type: SubscriptionType
    status: SubscriptionStatus
    room_id: RoomId
    room: str
    by_reason: Mapping[str, int]
    oldest_at: datetime
    newest_at: datetime
    last_status: int | None
    last_error: str | None
    schedule_interval_s: int | None
    schedule_next_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewScan:
    """Hold what one statement found, newest subscription first, and where the next goes on.

    `further` None: there are no more.
    """

    found: Sequence[SidelineOverview]
    further: str | None


async def list_sidelines(
    connection: AsyncConnection,
    principal: Principal,
    *,
    before: str | None,
    limit: int,
    max_scanned: int = MAX_SCANNED,
) -> OverviewScan:
    """Return subscriptions with sidelined deliveries among the next `max_scanned` ones.

    These are its own, or, where it has more than `MAX_SCANNED`, those of all organisations that
    have sidelined deliveries.
    """
    whose = own_parameters(principal)
    many = await has_more_subscriptions(connection, whose, MAX_SCANNED)
    parameters = whose | {"before": before, "limit": limit, "scanned": max_scanned}
    statement = _OVERVIEW_OF_MANY if many else _OVERVIEW
    rows = (await connection.execute(statement, parameters)).mappings().all()
    found = [
        SidelineOverview(
            subscription_id=SubscriptionId(str(row["id"])),
            type=SubscriptionType(row["type"]),
            status=SubscriptionStatus(row["status"]),
            room_id=RoomId(row["room_id"]),
            **{
                name: row[name]
                for name in (
                    "name",
                    "room",
                    "by_reason",
                    "oldest_at",
                    "newest_at",
                    "last_status",
                    "last_error",
                    "schedule_interval_s",
                    "schedule_next_at",
                )
            },
        )
        for row in rows
        if row["id"] is not None
    ]
    if len(found) == limit:
        return OverviewScan(found=found, further=found[-1].subscription_id)
    is_end = rows[0]["scanned"] < max_scanned
    return OverviewScan(found=found, further=None if is_end else rows[0]["last"])
