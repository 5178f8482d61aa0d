"""Suspend subscriptions that live by grants when they lose one, and lift that when they may go on.

A subscription of another organisation lives by grants unless its room's owner approved it. While it
is suspended, its messages are held. Some of them may be of event types that a later, narrower grant
does not cover. So where it has had such event types (`former_types`), it stays suspended until a
job has cancelled what is not covered (`rooms.db.jobs.ungranted`), and no release comes before.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

from sqlalchemy import Select, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.access import Patterns, is_covered
from rooms.db.catalog.grants import mark_applied, subscribe_grants
from rooms.db.catalog.subscription_states import (
    SERVICE,
    SubscriptionAction,
    apply,
    standing_of,
)
from rooms.db.catalog.subscriptions import subscription_from_row
from rooms.db.jobs.jobs import create_job
from rooms.db.tables.organisations import jobs
from rooms.db.tables.rooms import rooms, subscriptions
from rooms.domain.event_type_pattern import EVERY_EVENT_TYPE, MAX_PATTERNS, covers
from rooms.domain.ids import JobId, OrganisationId, RoomId, SubscriptionId, first_id
from rooms.domain.job import JobKind, JobState
from rooms.domain.room import Subscription
from rooms.domain.sharing import Grant
from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus
from rooms.domain.subscription_status import Suspension, lift, suspend

_PAGE: Final = 500
"""Subscriptions that are read at a time: the event loop waits while their rows are converted."""
_IS_OPEN: Final = jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING))
NewJobId = Callable[[], str]
"""Return the id of a new job."""


async def reconcile_grants(
    connection: AsyncConnection, room: RoomId, new_job_id: NewJobId
) -> list[Subscription]:
    """Suspend subscriptions whose grant is over, and lift those with one; return the changed.

    One that must wait until a job has cancelled something is lifted by this job. The transaction
    must have touched the room.
    """
    await mark_applied(connection, room)
    live = await subscribe_grants(connection, room)
    granted: dict[OrganisationId, frozenset[str] | None] = {}
    changed = []
    async for found, owner in _dependent_on_grants(connection, room):
        subscriber, now = found.organisation_id, standing_of(found)
        if subscriber not in granted:
            granted[subscriber] = _granted_to(subscriber, live)
        covered = granted[subscriber]
        if not _is_granted(found, covered):
            next_standing, action = suspend(now, Suspension.GRANT), SubscriptionAction.SUSPENDED
        elif is_covered(covered, found.former_types):
            next_standing, action = lift(now, [Suspension.GRANT]), SubscriptionAction.REINSTATED
        else:
            next_standing, action = suspend(now, Suspension.GRANT), SubscriptionAction.SUSPENDED
            await _request_cancellation(connection, found, owner, new_job_id)
        if next_standing != now:
            changed.append(
                await apply(connection, found, next_standing, SERVICE, action, reason="grant")
            )
    return changed


async def _request_cancellation(
    connection: AsyncConnection,
    subscription: Subscription,
    owner: OrganisationId,
    new_job_id: NewJobId,
) -> None:
    """Create the job, unless there is an open one, which ends under the lock of the room.

    It belongs to the room's owner: its progress shows how much the room gave the subscription.
    """
    statement = select(
        exists().where(
            _IS_OPEN,
            jobs.c.kind == JobKind.CANCEL_UNGRANTED.value,
            jobs.c.room_id == subscription.room_id,
            jobs.c.arguments["subscription_id"].astext == subscription.id,
        )
    )
    if await connection.scalar(statement):
        return
    await create_job(
        connection,
        owner,
        JobKind.CANCEL_UNGRANTED,
        new_id=new_job_id(),
        room=subscription.room_id,
        arguments={
            "room_id": subscription.room_id,
            "subscription_id": subscription.id,
            "name": subscription.name,
        },
    )


def _dependent(room: RoomId) -> Select[Any]:
    """Select the subscriptions to a room that live by grants, and the room's owner."""
    return (
        select(subscriptions, rooms.c.organisation_id.label("owner"))
        .join(rooms, rooms.c.id == subscriptions.c.room_id)
        .where(
            subscriptions.c.room_id == room,
            subscriptions.c.organisation_id != rooms.c.organisation_id,
            subscriptions.c.approved_at.is_(None),
            subscriptions.c.status.not_in(
                sorted({*ENDED_STATUSES, SubscriptionStatus.PENDING}),
            ),
        )
    )


async def _dependent_on_grants(
    connection: AsyncConnection, room: RoomId
) -> AsyncIterator[tuple[Subscription, OrganisationId]]:
    """Yield them in the order of their ids, read a page at a time, with the room's owner."""
    statement = _dependent(room).order_by(subscriptions.c.id).limit(_PAGE)
    after = first_id(0)
    while True:
        page = statement.where(subscriptions.c.id > after)
        rows = (await connection.execute(page)).mappings().all()
        for row in rows:
            yield subscription_from_row(row), OrganisationId(row["owner"])
        if len(rows) < _PAGE:
            return
        after = rows[-1]["id"]


def lives_by_grants(subscription: Subscription, *, owns: bool) -> bool:
    """Return whether a subscription that is not pending needs grants; `owns`: the room's owner."""
    is_pending = subscription.status is SubscriptionStatus.PENDING
    return not owns and not is_pending and subscription.approved_at is None


def names_of(subscription: Subscription) -> Patterns:
    """Return the patterns of the event types that a subscription takes now."""
    if subscription.event_types is None:
        return None
    return tuple(interest.name for interest in subscription.event_types)


def former_types_after(now: Subscription) -> list[str]:
    """Return the column `former_types` of a subscription that is about to take others.

    Too many patterns become the one for all event types.
    """
    present = names_of(now)
    known = {*now.former_types, *((EVERY_EVENT_TYPE,) if present is None else present)}
    if EVERY_EVENT_TYPE in known or len(known) > MAX_PATTERNS:
        return [EVERY_EVENT_TYPE]
    return sorted(one for one in known if not covers(known - {one}, one))


def _granted_to(organisation: OrganisationId, live: Iterable[Grant]) -> frozenset[str] | None:
    """Return the patterns that grants allow an organisation; None: every event type."""
    mine = [grant for grant in live if grant.organisation_id in {None, organisation}]
    if any(grant.event_types is None for grant in mine):
        return None
    return frozenset(pattern for grant in mine for pattern in grant.event_types or ())


def _is_granted(subscription: Subscription, granted: frozenset[str] | None) -> bool:
    return granted is None or (bool(granted) and is_covered(granted, names_of(subscription)))


async def find_kept_types(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId
) -> frozenset[str] | None:
    """Return the patterns that grants cover, if deliveries of other event types must be cancelled.

    None: nothing must be cancelled, since the grants cover all that it took, or not what it takes.
    """
    found = await _find(connection, room, subscription)
    if found is None:
        return None
    granted = _granted_to(found.organisation_id, await subscribe_grants(connection, room))
    if not _is_granted(found, granted) or is_covered(granted, found.former_types):
        return None
    return granted


async def finish_cancellation(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    job: JobId,
    new_job_id: NewJobId,
    *,
    kept: frozenset[str] | None,
) -> list[Subscription] | None:
    """End the job and lift what waits for it; return the subscriptions that changed.

    None: grants were narrowed meanwhile, so more must be cancelled. `kept`: patterns, and every
    delivery of other event types has ended; None: none was cancelled. The transaction must have
    touched the room, so no grant changes meanwhile.
    """
    found = await _find(connection, room, subscription)
    wanted = await find_kept_types(connection, room, subscription)
    if found is not None and wanted is not None:
        if kept is None or not is_covered(wanted, tuple(kept)):
            return None
        present = names_of(found)
        await connection.execute(
            update(subscriptions)
            .where(subscriptions.c.room_id == room, subscriptions.c.id == subscription)
            .values(former_types=sorted(one for one in kept if not is_covered(present, (one,))))
        )
    await connection.execute(
        update(jobs)
        .where(jobs.c.id == job, _IS_OPEN)
        .values(state=JobState.DONE.value, updated_at=func.now(), finished_at=func.now())
    )
    return await reconcile_grants(connection, room, new_job_id)


async def _find(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId
) -> Subscription | None:
    statement = _dependent(room).where(subscriptions.c.id == subscription)
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else subscription_from_row(row)
