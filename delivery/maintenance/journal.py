"""Apply the retention of the journal: delete the oldest entries of each organisation's chain."""

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.service import TaskContext, TaskSpec
from delivery.maintenance.task import FunctionTask, ShouldContinue
from rooms.db.connection import transaction
from rooms.db.journal import delete_before, list_chains
from rooms.domain.ids import OrganisationId, first_id

_log = logging.getLogger(__name__)

PARTITION: Final = "upkeep/journal"
INTERVAL_S: Final = 3600.0
BATCH: Final = 1000
"""Entries that one transaction deletes: changes of the organisation wait for it."""
_CHAINS: Final = 1000


async def delete_old_entries(
    engine: AsyncEngine, now: datetime, days: int, should_continue: ShouldContinue
) -> None:
    """Delete what is older than `days`, a batch a transaction.

    The time is that of PostgreSQL if this process's clock, `now`, is ahead of it.

    StorageUnavailableError, StorageRefusedError.
    """
    if not should_continue():
        return
    async with transaction(engine) as connection:
        at: datetime = (await connection.execute(select(func.now()))).scalar_one()
    before = min(now, at) - timedelta(days=days)
    after = first_id(0)
    while should_continue():
        async with transaction(engine) as connection:
            chains = await list_chains(connection, after=after, limit=_CHAINS)
        for organisation in chains:
            await _delete_from(engine, organisation, before, should_continue)
        if len(chains) < _CHAINS:
            return
        after = chains[-1]


async def _delete_from(
    engine: AsyncEngine,
    organisation: OrganisationId,
    before: datetime,
    should_continue: ShouldContinue,
) -> None:
    deleted, last = 0, BATCH
    while last == BATCH and should_continue():
        async with transaction(engine) as connection:
            last = await delete_before(connection, organisation, before, limit=BATCH)
        deleted += last
    if deleted:
        _log.info("deleted %d old entries of the journal of %s", deleted, organisation)


def journal_retention_specs(days: int) -> Sequence[TaskSpec]:
    """Return the hourly task; none if everything is kept (0 days)."""
    if not days:
        return ()

    def create(context: TaskContext) -> FunctionTask:
        async def run(should_continue: ShouldContinue) -> None:
            await delete_old_entries(context.engine, context.clock.now(), days, should_continue)

        return FunctionTask("journal retention", run)

    return [TaskSpec(partition=PARTITION, every_s=INTERVAL_S, create=create)]
