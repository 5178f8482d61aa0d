"""Suspend subscriptions that live by grants when they lose one, and lift that when they may go on.

A subscription of another organisation lives by grants unless its room's owner approved it. While it
is suspended, its messages are held. Some of them may be of event types that a later, narrower grant
does not cover. So where it has had such event types (`former_types`), it stays suspended until a
job has cancelled what is not covered (`rooms.db.jobs.ungranted`), and no release comes before.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, Select, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.access import Patterns, is_covered
from rooms.db.catalog.grants import has_ended_grant, mark_applied, subscribe_grants
from rooms.db.catalog.subscription_states import SERVICE, SubscriptionAction, standing_of
from rooms.db.catalog.subscriptions import subscription_from_row
from rooms.db.catalog.suspensions import (
    ChangedSubscription,
    StandingChange,
    apply_suspensions,
    read_pages,
)
from rooms.db.statement_parts import insert_from_json, rows_as_json
from rooms.db.tables.organisations import jobs
from rooms.db.tables.rooms import rooms, subscriptions
from rooms.domain.event_type_pattern import EVERY_EVENT_TYPE, MAX_PATTERNS, covers
from rooms.domain.ids import JobId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.job import JobKind, JobState
from rooms.domain.room import Subscription
from rooms.domain.sharing import Grant, GrantKind
from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus
from rooms.domain.subscription_status import Suspension, lift, suspend

_REASON: Final = "grant"
"""The reason that histories have of these changes."""
_IS_OPEN: Final = jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING))
# The index has these constants as its condition.
_OPEN_CANCELLATIONS: Final = text(f"""
SELECT arguments->>'subscription_id' FROM jobs
WHERE room_id = :room AND kind = '{JobKind.CANCEL_UNGRANTED}'
    AND state IN ('{JobState.QUEUED}', '{JobState.RUNNING}')
""")  # noqa: S608 - constants of this package
NewJobId = Callable[[], str]
"""Return the id of a new job."""


async def reconcile_grants(
    connection: AsyncConnection,
    room: RoomId,
    new_job_id: NewJobId,
    *,
    changed_kind: GrantKind | None = None,
) -> Sequence[ChangedSubscription]:
    """Suspend subscriptions whose grant is over, and lift those with one; return the changed.

    One that must wait until a job has cancelled something is lifted by this job. The transaction
    must have touched the room; `changed_kind` is of the grant that it created or revoked.
    """
    kinds = await mark_applied(connection, room) | {changed_kind}
    if GrantKind.SUBSCRIBE not in kinds:
        return []
    granted = _Granted(await subscribe_grants(connection, room))
    changed: list[ChangedSubscription] = []
    async for rows in read_pages(connection, _dependent(room)):
        changed += await _reconcile(connection, room, rows, granted, new_job_id)
    return changed


async def reconcile_subscription(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId, new_job_id: NewJobId
) -> Sequence[ChangedSubscription]:
    """Do for one subscription, whose event types changed, what `reconcile_grants` does for all."""
    granted = _Granted(await subscribe_grants(connection, room))
    statement = _dependent(room).where(subscriptions.c.id == subscription)
    rows = (await connection.execute(statement)).mappings().all()
    return await _reconcile(connection, room, rows, granted, new_job_id)


class _Granted:
    """Find the patterns that valid grants allow an organisation; None: every event type."""

    def __init__(self, live: Collection[Grant]) -> None:
        self._live = live
        self._found: dict[OrganisationId, frozenset[str] | None] = {}

    def to(self, organisation: OrganisationId) -> frozenset[str] | None:
        if organisation not in self._found:
            self._found[organisation] = _granted_to(organisation, self._live)
        return self._found[organisation]


async def _reconcile(
    connection: AsyncConnection,
    room: RoomId,
    rows: Sequence[RowMapping],
    granted: _Granted,
    new_job_id: NewJobId,
) -> Sequence[ChangedSubscription]:
    changes, waiting = [], []
    for row in rows:
        found = subscription_from_row(row)
        covered = granted.to(found.organisation_id)
        if _must_cancel(found, covered):
            waiting.append((found.id, found.name, OrganisationId(row["owner"])))
        change = _change_by_grants(found, covered)
        if change is not None:
            changes.append(change)
    if waiting:
        await _request_cancellations(connection, room, waiting, new_job_id)
    return await apply_suspensions(connection, changes, SERVICE, reason=_REASON)


def _change_by_grants(found: Subscription, granted: frozenset[str] | None) -> StandingChange | None:
    """Suspend a subscription, or lift that, by the patterns of its grants; None: no change."""
    now = standing_of(found)
    if _is_granted(found, granted) and is_covered(granted, found.former_types):
        after, action = lift(now, [Suspension.GRANT]), SubscriptionAction.REINSTATED
    else:
        after, action = suspend(now, Suspension.GRANT), SubscriptionAction.SUSPENDED
    if after == now:
        return None
    return StandingChange(subscription=found, standing=after, action=action)


async def _request_cancellations(
    connection: AsyncConnection,
    room: RoomId,
    waiting: Collection[tuple[SubscriptionId, str, OrganisationId]],
    new_job_id: NewJobId,
) -> None:
    """Create jobs, unless there are open ones, which end under the lock of the room.

    They belong to the room's owner: their progress shows how much it gave the subscriptions.
    """
    has_job = set((await connection.execute(_OPEN_CANCELLATIONS, {"room": room})).scalars())
    rows = [
        {
            "id": new_job_id(),
            "organisation_id": owner,
            "room_id": room,
            "kind": JobKind.CANCEL_UNGRANTED.value,
            "arguments": {"room_id": room, "subscription_id": subscription, "name": name},
        }
        for subscription, name, owner in waiting
        if subscription not in has_job
    ]
    if rows:
        statement = insert_from_json(jobs, tuple(rows[0]))
        await connection.execute(statement, {"rows": rows_as_json(rows)})


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


def _must_cancel(subscription: Subscription, granted: frozenset[str] | None) -> bool:
    """Return whether it may go on once deliveries of other event types are cancelled."""
    return _is_granted(subscription, granted) and not is_covered(granted, subscription.former_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    """Hold by what a walk cancels deliveries. Two are equal if nothing has changed meanwhile."""

    kept: frozenset[str]
    """The patterns that grants cover."""
    taken: tuple[Patterns, tuple[str, ...]]
    """Patterns that the subscription takes, and those that it took formerly."""
    version: int = field(compare=False)
    """That of the subscription."""
    seen_at: datetime = field(compare=False)
    """PostgreSQL's time after both were read."""


async def find_cancellation(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId
) -> Cancellation | None:
    """Return by what deliveries of a subscription must be cancelled.

    None: nothing must be, since the grants cover all that it took, or not what it takes.
    """
    found = await _find(connection, room, subscription)
    if found is None:
        return None
    granted = _granted_to(found.organisation_id, await subscribe_grants(connection, room))
    if granted is None or not _must_cancel(found, granted):
        return None
    now = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
    return Cancellation(kept=granted, taken=_taken(found), version=found.version, seen_at=now)


def _taken(subscription: Subscription) -> tuple[Patterns, tuple[str, ...]]:
    return names_of(subscription), subscription.former_types


async def finish_cancellation(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    job: JobId,
    walked: Cancellation | None,
) -> Sequence[ChangedSubscription] | None:
    """End the job and lift what waits for it; return the subscription if that changed it.

    None: more must be cancelled: its event types changed meanwhile, or a grant has ended. What
    that covered for a while may have been redelivered behind the walk.
    `walked`: every delivery of other event types than its `kept` has ended; None: none was
    cancelled. The transaction must have locked the room, so no grant changes meanwhile.
    """
    found = await _find(connection, room, subscription)
    granted: frozenset[str] | None = frozenset()
    if found is not None:
        granted = _granted_to(found.organisation_id, await subscribe_grants(connection, room))
        if _must_cancel(found, granted):
            if (
                walked is None
                or walked.taken != _taken(found)
                or not is_covered(granted, tuple(walked.kept))
                or await has_ended_grant(connection, room, found.organisation_id, walked.seen_at)
            ):
                return None
            left = former_types_left(found, walked.kept)
            await connection.execute(
                update(subscriptions)
                .where(subscriptions.c.room_id == room, subscriptions.c.id == subscription)
                .values(former_types=list(left))
            )
            found = replace(found, former_types=left)
    await connection.execute(
        update(jobs)
        .where(jobs.c.id == job, _IS_OPEN)
        .values(
            state=JobState.DONE.value, error=None, updated_at=func.now(), finished_at=func.now()
        )
    )
    change = None if found is None else _change_by_grants(found, granted)
    changes = [] if change is None else [change]
    return await apply_suspensions(connection, changes, SERVICE, reason=_REASON)


def former_types_left(subscription: Subscription, kept: frozenset[str]) -> tuple[str, ...]:
    """Return the column `former_types` once all deliveries outside `kept` have ended.

    What it took formerly and keeps, without what it takes now: nothing else can be unfinished.
    """
    former, present = frozenset(subscription.former_types), names_of(subscription)
    both = {one for one in former if covers(kept, one)} | {
        one for one in kept if covers(former, one)
    }
    return tuple(
        sorted(
            one for one in both if not covers(both - {one}, one) and not is_covered(present, (one,))
        )
    )


async def _find(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId
) -> Subscription | None:
    statement = _dependent(room).where(subscriptions.c.id == subscription)
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else subscription_from_row(row)
