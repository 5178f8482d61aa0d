"""Apply grants whose time has begun or ended to the subscriptions that depend on them.

Publishing compares grants with the clock, and needs no task. A subscription has a stored status, so
a task suspends it when its grant ends, and lifts the suspension when another one begins.
"""

import logging
from collections.abc import Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.grants import rooms_with_due_grants
from rooms.db.catalog.rooms import touch_shared_room
from rooms.db.catalog.suspensions import ChangedSubscription
from rooms.db.connection import autocommit, transaction
from rooms.db.jobs.granted_subscriptions import NewJobId, reconcile_grants
from rooms.db.notify import Channel, Notifier
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import NotFoundError, StorageRefusedError

_log = logging.getLogger(__name__)

BATCH: Final = 100
"""Rooms that are read at a time: what comes due meanwhile waits for them."""
_NO_ORGANISATION: Final = OrganisationId("00000000-0000-0000-0000-000000000000")


async def apply_due_grants(
    engine: AsyncEngine,
    notifier: Notifier,
    new_job_id: NewJobId,
    should_continue: ShouldContinue,
) -> None:
    """Apply what is due, room by room; a room that is locked waits for the next run.

    The rooms' owners take turns, so one waits for a room of each other owner.
    StorageUnavailableError.
    """
    after, left_out = _NO_ORGANISATION, set[RoomId]()
    while should_continue():
        async with autocommit(engine) as connection:
            due = await rooms_with_due_grants(
                connection, after=after, left_out=left_out, limit=BATCH
            )
        for room, owner in due:
            if not should_continue():
                return
            after = owner
            try:
                if not await _apply(engine, notifier, new_job_id, room):
                    left_out.add(room)
            except StorageRefusedError as exc:
                left_out.add(room)
                _log.info("grants of room %d are applied later: %s", room, exc)
        if len(due) < BATCH:
            return


async def _apply(
    engine: AsyncEngine, notifier: Notifier, new_job_id: NewJobId, room: RoomId
) -> bool:
    """Apply the grants of a room; return whether it was there."""
    try:
        async with transaction(engine) as connection:
            await touch_shared_room(connection, room)
            changed = await reconcile_grants(connection, room, new_job_id)
    except NotFoundError:
        return False  # it is being deleted, with its grants
    notify_changed(notifier, room, changed)
    return True


def notify_changed(
    notifier: Notifier, room: RoomId, changed: Sequence[ChangedSubscription]
) -> None:
    """Notify every process of a room whose grants were applied, and log what has changed."""
    notifier.notify(Channel.CONFIG, str(room))
    for subscription in changed:
        _log.info("subscription %s is %s: its grant", subscription.id, subscription.status)
        is_pull = subscription.type is SubscriptionType.PULL
        notifier.notify_queued(subscription.id if is_pull else None)
