"""Delete what is older than a number of days, as tasks that run every hour."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.service import TaskContext, TaskSpec
from delivery.maintenance.task import FunctionTask, ShouldContinue
from rooms.db.connection import transaction

INTERVAL_S: Final = 3600.0

DeleteOld = Callable[[AsyncEngine, datetime, int, ShouldContinue], Awaitable[None]]
"""Delete what is older than so many days at a time, which is this process's."""


async def earlier_time(engine: AsyncEngine, now: datetime) -> datetime:
    """Return this process's time `now`, or PostgreSQL's if that is earlier.

    A fast clock would delete what is still in use. StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        at: datetime = (await connection.execute(select(func.now()))).scalar_one()
    return min(now, at)


async def age_limit(engine: AsyncEngine, now: datetime, days: int) -> datetime:
    """Return the time that is `days` ago, by PostgreSQL's clock if `now` is ahead of it.

    StorageUnavailableError, StorageRefusedError.
    """
    return await earlier_time(engine, now) - timedelta(days=days)


def age_limit_specs(
    delete_old: DeleteOld, *, partition: str, name: str, days: int
) -> Sequence[TaskSpec]:
    """Return the hourly task; none if everything is kept (0 days)."""
    if not days:
        return ()

    def create(context: TaskContext) -> FunctionTask:
        async def run(should_continue: ShouldContinue) -> None:
            await delete_old(context.engine, context.clock.now(), days, should_continue)

        return FunctionTask(name, run)

    return [TaskSpec(partition=partition, every_s=INTERVAL_S, create=create)]
