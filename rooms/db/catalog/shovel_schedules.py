"""Store the schedules by which sidelines are shoveled automatically."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, delete, exists, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.tables.magazines import shovel_schedules
from rooms.db.tables.messages import sidelined
from rooms.db.tables.organisations import jobs
from rooms.db.tables.rooms import rooms, subscriptions
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.job import JobKind, JobState
from rooms.domain.state_machine import SubscriptionStatus

_MAX_DUE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelineSchedule:
    """Set the interval and the limits of a sideline's shovels. `rate_per_s` None: no limit."""

    interval_s: int
    rate_per_s: float | None
    concurrency: int
    max_shovels: int
    next_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DueSidelineSchedule:
    """Name a schedule that is due, of a sideline that is not empty."""

    organisation: OrganisationId
    room: RoomId
    subscription: SubscriptionId
    schedule: SidelineSchedule


async def set_schedule(
    connection: AsyncConnection,
    subscription: SubscriptionId,
    *,
    interval_s: int,
    rate_per_s: float | None,
    concurrency: int,
    max_shovels: int,
) -> SidelineSchedule:
    """Shovel the sideline from now on, first after one interval. Any older schedule is replaced."""
    values = {
        "interval_s": interval_s,
        "rate_per_s": rate_per_s,
        "concurrency": concurrency,
        "max_shovels": max_shovels,
        "next_at": func.now() + _seconds_interval(interval_s),
    }
    statement = (
        insert(shovel_schedules)
        .values(room_id=room_of(subscription), subscription_id=subscription, **values)
        .on_conflict_do_update(index_elements=["room_id", "subscription_id"], set_=values)
        .returning(shovel_schedules)
    )
    return _schedule((await connection.execute(statement)).mappings().one())


async def find_schedule(
    connection: AsyncConnection, subscription: SubscriptionId
) -> SidelineSchedule | None:
    """Return the schedule of a subscription; None: it is shoveled only by request."""
    statement = select(shovel_schedules).where(*_key_conditions(subscription))
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else _schedule(row)


async def delete_schedule(connection: AsyncConnection, subscription: SubscriptionId) -> bool:
    """Delete the schedule; return False if there was none."""
    statement = delete(shovel_schedules).where(*_key_conditions(subscription))
    return bool((await connection.execute(statement)).rowcount)


async def due_schedules(connection: AsyncConnection) -> Sequence[DueSidelineSchedule]:
    """Return the due schedules, each moved on by its interval.

    The commit of this transaction claims them. Sidelines that are empty or being shoveled are left
    out. Schedules of deleted subscriptions are deleted.
    """
    exists_conditions = (
        subscriptions.c.room_id == shovel_schedules.c.room_id,
        subscriptions.c.id == shovel_schedules.c.subscription_id,
        subscriptions.c.status != SubscriptionStatus.DELETED,
    )
    await connection.execute(delete(shovel_schedules).where(~exists().where(*exists_conditions)))
    chosen = (
        select(shovel_schedules, subscriptions.c.organisation_id)
        .join(rooms, rooms.c.id == shovel_schedules.c.room_id)
        .join(subscriptions, subscriptions.c.id == shovel_schedules.c.subscription_id)
        .where(shovel_schedules.c.next_at <= func.now(), rooms.c.deleting.is_(False))
        .order_by(shovel_schedules.c.next_at)
        .limit(_MAX_DUE)
        .with_for_update(of=shovel_schedules, skip_locked=True)
    )
    found = (await connection.execute(chosen)).mappings().all()
    return [due for row in found if (due := await _claim_schedule(connection, row)) is not None]


async def _claim_schedule(
    connection: AsyncConnection, row: RowMapping
) -> DueSidelineSchedule | None:
    subscription = SubscriptionId(row["subscription_id"])
    schedule = _schedule(row)
    later = update(shovel_schedules).where(*_key_conditions(subscription))
    await connection.execute(
        later.values(next_at=func.now() + _seconds_interval(schedule.interval_s))
    )
    room = room_of(subscription)
    has_entries = exists().where(
        sidelined.c.room_id == room, sidelined.c.subscription_id == subscription
    )
    is_shoveling = exists().where(
        jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
        jobs.c.kind == JobKind.SHOVEL_SIDELINE,
        jobs.c.arguments["subscription_id"].astext == subscription,
    )
    if not await connection.scalar(select(has_entries & ~is_shoveling)):
        return None
    return DueSidelineSchedule(
        organisation=OrganisationId(row["organisation_id"]),
        room=room,
        subscription=subscription,
        schedule=schedule,
    )


def _key_conditions(subscription: SubscriptionId) -> tuple[Any, Any]:
    return (
        shovel_schedules.c.room_id == room_of(subscription),
        shovel_schedules.c.subscription_id == subscription,
    )


def _seconds_interval(count: int) -> Any:
    return func.make_interval(0, 0, 0, 0, 0, 0, count)


def _schedule(row: RowMapping) -> SidelineSchedule:
    return SidelineSchedule(
        interval_s=row["interval_s"],
        rate_per_s=row["rate_per_s"],
        concurrency=row["concurrency"],
        max_shovels=row["max_shovels"],
        next_at=row["next_at"],
    )
