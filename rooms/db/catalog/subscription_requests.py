"""Bound what an organisation leaves in a room of another one without the owner's approval.

A pending subscription has no deliveries: routing does not read it, and it cannot be replayed to. So
one that ends before its approval needs no job, and its rows are deleted after a while
(`upkeep/requests`). The journals of both sides keep what happened.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import and_, func, or_, select, text, tuple_, update
from sqlalchemy import delete as delete_from
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.tables.rooms import subscription_history, subscriptions
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.room import Subscription
from rooms.domain.state_machine import SubscriptionStatus

MAX_CHANGES: Final = 20
"""The changes of a subscription before its approval that its history keeps, the newest."""
_DELETE_ENDED: Final = text("""
WITH page AS MATERIALIZED (
    SELECT room_id, id FROM subscriptions WHERE never_approved AND status_since < :before
    ORDER BY status_since LIMIT :limit
), l AS (
    DELETE FROM lanes l USING page p WHERE l.room_id = p.room_id AND l.id = p.id
), s AS (
    DELETE FROM shovel_schedules s USING page p WHERE s.room_id = p.room_id AND s.subscription_id = p.id
), h AS (
    DELETE FROM subscription_history h USING page p WHERE h.room_id = p.room_id AND h.subscription_id = p.id
), gone AS (
    DELETE FROM subscriptions s USING page p WHERE s.room_id = p.room_id AND s.id = p.id RETURNING 1
) SELECT count(*) FROM gone
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Count an organisation's subscriptions to a room of another one without an approval."""

    pending: int
    """They wait for the owner."""
    ended: int
    """They ended before it approved, and are still on record."""


async def count_requests(
    connection: AsyncConnection, room: RoomId, subscriber: OrganisationId
) -> Requests:
    """Count what an organisation requested of a room."""
    is_pending = subscriptions.c.status == SubscriptionStatus.PENDING.value
    has_ended = subscriptions.c.never_approved
    statement = select(
        func.count().filter(is_pending).label("pending"),
        func.count().filter(has_ended).label("ended"),
    ).where(
        subscriptions.c.room_id == room,
        subscriptions.c.organisation_id == subscriber,
        or_(is_pending, has_ended),
    )
    row = (await connection.execute(statement)).one()
    return Requests(pending=row.pending, ended=row.ended)


async def mark_ended(connection: AsyncConnection, subscription: Subscription) -> bool:
    """Mark a subscription that ends now, if it was never approved; return whether it is so.

    The caller has locked its room, and stores the new status after this.
    """
    never_approved = or_(
        subscriptions.c.never_approved, subscriptions.c.status == SubscriptionStatus.PENDING.value
    )
    statement = (
        update(subscriptions)
        .where(
            subscriptions.c.room_id == subscription.room_id,
            subscriptions.c.id == subscription.id,
        )
        .values(never_approved=never_approved)
        .returning(subscriptions.c.never_approved)
    )
    return bool(await connection.scalar(statement))


async def forget_changes(connection: AsyncConnection, subscription: Subscription) -> None:
    """Delete the oldest changes of a pending subscription from its history.

    Nothing is computed from them: they were never approved.
    """
    history = subscription_history
    old = (
        select(history.c.room_id, history.c.id)
        .where(
            history.c.room_id == subscription.room_id,
            history.c.subscription_id == subscription.id,
            history.c.action == "changed",
            history.c.status == SubscriptionStatus.PENDING.value,
        )
        .order_by(history.c.at.desc(), history.c.id.desc())
        .offset(MAX_CHANGES)
    )
    await connection.execute(
        delete_from(history).where(
            and_(
                history.c.room_id == subscription.room_id,
                tuple_(history.c.room_id, history.c.id).in_(old),
            )
        )
    )


async def delete_ended(connection: AsyncConnection, before: datetime, *, limit: int) -> int:
    """Delete the next ones that ended before then, with their history; return how many."""
    values = {"before": before, "limit": limit}
    return int(await connection.scalar(_DELETE_ENDED, values) or 0)
