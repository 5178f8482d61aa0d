"""Count the deliveries of one subscription, or of a room, by what they wait for."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.organisation_stats import MAX_ROWS_READ
from rooms.domain.ids import RoomId, SubscriptionId

MAX_COUNTED: Final = 100_000
"""So many rows of a kind are counted."""

_COUNT: Final = text("""
SELECT (SELECT least(count(*), :most) FROM (SELECT o.subscription_id FROM outbox o WHERE o.room_id = :room LIMIT :read) o
        WHERE o.subscription_id = CAST(:subscription AS uuid)) AS waiting,
    (SELECT least(count(*), :most) FROM (SELECT l.subscription_id FROM leases l WHERE l.room_id = :room LIMIT :read) l
        WHERE l.subscription_id = CAST(:subscription AS uuid)) AS leased,
    (SELECT count(*) FROM (SELECT FROM sidelined s WHERE s.room_id = :room
        AND s.subscription_id = CAST(:subscription AS uuid) LIMIT :most) s) AS sidelined,
    (SELECT coalesce(json_object_agg(reason, n), '{}') FROM (
        SELECT reason, count(*) AS n FROM (SELECT h.reason FROM held h WHERE h.room_id = :room
            AND h.subscription_id = CAST(:subscription AS uuid) LIMIT :most) h GROUP BY reason
    ) h) AS held,
    (SELECT min(s.since) FROM sidelined s WHERE s.room_id = :room
        AND s.subscription_id = CAST(:subscription AS uuid)) AS sidelined_since,
    (SELECT l.failing_since FROM lanes l WHERE l.room_id = :room
        AND l.id = CAST(:subscription AS uuid)) AS failing_since
""")


_COUNT_ROOM: Final = text("""
SELECT (SELECT count(*) FROM (SELECT FROM outbox o WHERE o.room_id = :room LIMIT :most) o) AS waiting,
    (SELECT count(*) FROM (SELECT FROM leases l WHERE l.room_id = :room LIMIT :most) l) AS leased,
    (SELECT count(*) FROM (SELECT FROM held h WHERE h.room_id = :room LIMIT :most) h) AS held,
    (SELECT count(*) FROM (SELECT FROM sidelined s WHERE s.room_id = :room LIMIT :most) s) AS sidelined,
    (SELECT count(*) FROM (SELECT FROM subscriptions u WHERE u.room_id = :room AND u.status <> 'deleted' LIMIT :most) u) AS subscriptions,
    (SELECT count(*) FROM (SELECT FROM event_types e WHERE e.room_id = :room LIMIT :most) e) AS event_types,
    (SELECT count(*) FROM (SELECT FROM messages m WHERE m.room_id = :room LIMIT :most) m) AS messages
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomCounts:
    """Count what a room has, up to 100,000 of each.

    `waiting`: deliveries that are queued or scheduled. With leased and held ones these are the
    unfinished deliveries, which a clear cancels and a restore restores.
    """

    waiting: int
    leased: int
    held: int
    sidelined: int
    subscriptions: int
    event_types: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionCounts:
    """Count a subscription's unfinished and sidelined deliveries, among up to 100,000 of each.

    `waiting`: queued or scheduled; `held`: by reason. `failing_since`: only failures since then.
    """

    waiting: int
    leased: int
    sidelined: int
    held: Mapping[str, int]
    sidelined_since: datetime | None
    failing_since: datetime | None


async def count_deliveries(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId
) -> SubscriptionCounts:
    """Return the counts of one subscription."""
    row = await connection.execute(
        _COUNT,
        {
            "room": room,
            "subscription": subscription,
            "most": MAX_COUNTED,
            "read": MAX_ROWS_READ,
        },
    )
    return SubscriptionCounts(**row.mappings().one())


async def count_in_room(connection: AsyncConnection, room: RoomId) -> RoomCounts:
    """Return the counts of one room."""
    row = await connection.execute(_COUNT_ROOM, {"room": room, "most": MAX_COUNTED})
    return RoomCounts(**row.mappings().one())
