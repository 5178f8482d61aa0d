"""Counts of the deliveries that rest as orphans, by subscription."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.domain.states import Reason
from rooms.storage.writer import Writer

_COUNT: Final = f"""
SELECT 0, o.* FROM (SELECT 0) one LEFT JOIN (
    SELECT s.subscription_id::text, r.name AS room, u.name, count(*) AS n, count(*) FILTER (WHERE m.there) AS whole,
        min(s.since) AS since
    FROM sidelined s CROSS JOIN LATERAL (
        SELECT * FROM subscriptions u WHERE u.room_id = s.room_id AND u.id = s.subscription_id AND u.status <> 'deleted' LIMIT 1
    ) u CROSS JOIN LATERAL (SELECT * FROM rooms r WHERE r.id = s.room_id AND NOT r.deleting LIMIT 1) r
    LEFT JOIN LATERAL (
        SELECT EXISTS (SELECT FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id OFFSET 0) AS there
        FROM deliveries d WHERE d.room_id = s.room_id AND d.id = s.id LIMIT 1
    ) m ON true
    WHERE s.reason = '{Reason.ORPHAN}' GROUP BY 1, 2, 3 ORDER BY n DESC, 1 LIMIT 1000
) o ON true
"""  # noqa: S608 - a word of our own


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanCount:
    """Orphans of one subscription: all, those `whole` that have their message and can be sent, and the oldest's time."""

    subscription_id: SubscriptionId
    room: str
    name: str
    count: int
    whole: int
    since: datetime


async def count_orphans(writer: Writer) -> Sequence[OrphanCount]:
    """Return up to 1,000 subscriptions that have any, the most first. Reads the whole sideline; errors are `Writer.run`'s."""
    return [
        OrphanCount(
            subscription_id=SubscriptionId(identity), room=room, name=name, count=count, whole=whole, since=since
        )
        for identity, room, name, count, whole, since in await writer.run(_COUNT, {})
    ]
