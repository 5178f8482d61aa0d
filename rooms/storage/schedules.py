"""Schedules: subscriptions whose sideline is shoveled by itself every so often (row B4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, delete, exists, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.job import JobKind, JobState
from rooms.domain.states import SubscriptionStatus
from rooms.storage.tables.magazines import shovel_schedules
from rooms.storage.tables.organisations import jobs
from rooms.storage.tables.rooms import rooms, subscriptions
from rooms.storage.tables.work import sidelined

_MOST: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How often, and how. `rate_per_s` None: as fast as it goes."""

    interval_s: int
    rate_per_s: float | None
    concurrency: int
    max_shovels: int
    next_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A schedule whose time has come, of a sideline that holds something."""

    organisation: OrganisationId
    room: RoomId
    subscription: SubscriptionId
    schedule: Schedule


async def set_schedule(
    connection: AsyncConnection,
    subscription: SubscriptionId,
    *,
    interval_s: int,
    rate_per_s: float | None,
    concurrency: int,
    max_shovels: int,
) -> Schedule:
    """Shovel it from now on, for the first time when the interval is over; in place of the schedule that it had."""
    values = {
        "interval_s": interval_s,
        "rate_per_s": rate_per_s,
        "concurrency": concurrency,
        "max_shovels": max_shovels,
        "next_at": func.now() + _seconds(interval_s),
    }
    statement = (
        insert(shovel_schedules)
        .values(room_id=room_of(subscription), subscription_id=subscription, **values)
        .on_conflict_do_update(index_elements=["room_id", "subscription_id"], set_=values)
        .returning(shovel_schedules)
    )
    return _schedule((await connection.execute(statement)).mappings().one())


async def find_schedule(connection: AsyncConnection, subscription: SubscriptionId) -> Schedule | None:
    """The schedule of a subscription; None: nobody but people shovels it."""
    statement = select(shovel_schedules).where(*_of(subscription))
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else _schedule(row)


async def end_schedule(connection: AsyncConnection, subscription: SubscriptionId) -> bool:
    """Take it away; False where there was none."""
    statement = delete(shovel_schedules).where(*_of(subscription))
    return bool((await connection.execute(statement)).rowcount)


async def due_schedules(connection: AsyncConnection) -> Sequence[Due]:
    """Those whose time has come, each put off by its interval in this transaction: whoever commits has begun them.

    Left out are sidelines that are empty or are being shoveled; schedules of subscriptions that are gone go.
    """
    here = (
        subscriptions.c.room_id == shovel_schedules.c.room_id,
        subscriptions.c.id == shovel_schedules.c.subscription_id,
        subscriptions.c.status != SubscriptionStatus.DELETED,
    )
    await connection.execute(delete(shovel_schedules).where(~exists().where(*here)))
    chosen = (
        select(shovel_schedules, rooms.c.organisation_id)
        .join(rooms, rooms.c.id == shovel_schedules.c.room_id)
        .where(shovel_schedules.c.next_at <= func.now(), rooms.c.deleting.is_(False))
        .order_by(shovel_schedules.c.next_at)
        .limit(_MOST)
        .with_for_update(of=shovel_schedules, skip_locked=True)
    )
    found = (await connection.execute(chosen)).mappings().all()
    return [due for row in found if (due := await _begun(connection, row)) is not None]


async def _begun(connection: AsyncConnection, row: RowMapping) -> Due | None:
    subscription = SubscriptionId(row["subscription_id"])
    schedule = _schedule(row)
    later = update(shovel_schedules).where(*_of(subscription))
    await connection.execute(later.values(next_at=func.now() + _seconds(schedule.interval_s)))
    room = room_of(subscription)
    rests = exists().where(sidelined.c.room_id == room, sidelined.c.subscription_id == subscription)
    under_way = exists().where(
        jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
        jobs.c.kind == JobKind.SHOVEL_SIDELINE,
        jobs.c.arguments["subscription_id"].astext == subscription,
    )
    if not await connection.scalar(select(rests & ~under_way)):
        return None
    return Due(
        organisation=OrganisationId(row["organisation_id"]), room=room, subscription=subscription, schedule=schedule
    )


def _of(subscription: SubscriptionId) -> tuple[Any, Any]:
    return (
        shovel_schedules.c.room_id == room_of(subscription),
        shovel_schedules.c.subscription_id == subscription,
    )


def _seconds(count: int) -> Any:
    return func.make_interval(0, 0, 0, 0, 0, 0, count)


def _schedule(row: RowMapping) -> Schedule:
    return Schedule(
        interval_s=row["interval_s"],
        rate_per_s=row["rate_per_s"],
        concurrency=row["concurrency"],
        max_shovels=row["max_shovels"],
        next_at=row["next_at"],
    )
