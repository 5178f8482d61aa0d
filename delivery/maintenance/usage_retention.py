"""Apply the retention of usage: delete the counts of old hours."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.age_limits import age_limit, age_limit_specs
from delivery.maintenance.service import TaskSpec
from delivery.maintenance.task import ShouldContinue
from rooms.db.usage.count import DELETE_BATCH, delete_before

PARTITION: Final = "upkeep/usage-retention"


async def delete_old_usage(
    engine: AsyncEngine, now: datetime, days: int, should_continue: ShouldContinue
) -> None:
    """Delete the usage of hours that are older than `days`, a batch a transaction.

    `now`: this process's clock; see `age_limit`.

    StorageUnavailableError, StorageRefusedError.
    """
    if not should_continue():
        return
    before = await age_limit(engine, now, days)
    deleted = DELETE_BATCH
    while deleted == DELETE_BATCH and should_continue():
        deleted = await delete_before(engine, before)


def usage_retention_specs(days: int) -> Sequence[TaskSpec]:
    """Return the hourly task; none if everything is kept (0 days)."""
    return age_limit_specs(delete_old_usage, partition=PARTITION, name="usage retention", days=days)
