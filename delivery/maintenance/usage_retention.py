"""Apply the retention of usage: delete the counts of old hours."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.service import TaskContext, TaskSpec
from delivery.maintenance.task import FunctionTask, ShouldContinue
from rooms.db.connection import transaction
from rooms.db.usage.count import DELETE_BATCH, delete_before

PARTITION: Final = "upkeep/usage-retention"
INTERVAL_S: Final = 3600.0


async def delete_old_usage(
    engine: AsyncEngine, now: datetime, days: int, should_continue: ShouldContinue
) -> None:
    """Delete the usage of hours that are older than `days`, a batch a transaction.

    The time is that of PostgreSQL if this process's clock, `now`, is ahead of it.

    StorageUnavailableError, StorageRefusedError.
    """
    if not should_continue():
        return
    async with transaction(engine) as connection:
        at: datetime = (await connection.execute(select(func.now()))).scalar_one()
    before = min(now, at) - timedelta(days=days)
    deleted = DELETE_BATCH
    while deleted == DELETE_BATCH and should_continue():
        deleted = await delete_before(engine, before)


def usage_retention_specs(days: int) -> Sequence[TaskSpec]:
    """Return the hourly task; none if everything is kept (0 days)."""
    if not days:
        return ()

    def create(context: TaskContext) -> FunctionTask:
        async def run(should_continue: ShouldContinue) -> None:
            await delete_old_usage(context.engine, context.clock.now(), days, should_continue)

        return FunctionTask("usage retention", run)

    return [TaskSpec(partition=PARTITION, every_s=INTERVAL_S, create=create)]
