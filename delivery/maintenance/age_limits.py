"""Delete what is older than a number of days, as tasks that run every hour.

They are journal entries, usage, and requests to subscribe that ended without approval.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.service import TaskSpec
from delivery.maintenance.task import FunctionTask, ShouldContinue
from delivery.maintenance.task_context import TaskContext
from rooms.db.catalog.subscription_requests import delete_ended
from rooms.db.connection import autocommit, transaction
from rooms.db.journal import delete_before, list_chains
from rooms.db.usage.count import DELETE_BATCH as USAGE_BATCH
from rooms.db.usage.count import delete_before as delete_usage_before
from rooms.domain.ids import OrganisationId, first_id

_log = logging.getLogger(__name__)

INTERVAL_S: Final = 3600.0

DeleteOld = Callable[[AsyncEngine, datetime, int, ShouldContinue], Awaitable[None]]
"""Delete what is older than so many days at a time, which is this process's."""


async def earlier_time(engine: AsyncEngine, now: datetime) -> datetime:
    """Return this process's time `now`, or PostgreSQL's if that is earlier.

    A fast clock would delete what is still in use. StorageUnavailableError, StorageRefusedError.
    """
    async with autocommit(engine) as connection:
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


JOURNAL_PARTITION: Final = "upkeep/journal"
JOURNAL_BATCH: Final = 1000
"""Entries that one transaction deletes: changes of the organisation wait for it."""
_CHAINS: Final = 1000


async def delete_old_entries(
    engine: AsyncEngine, now: datetime, days: int, should_continue: ShouldContinue
) -> None:
    """Delete what is older than `days`, a batch a transaction.

    `now`: this process's clock; see `age_limit`.

    StorageUnavailableError, StorageRefusedError.
    """
    if not should_continue():
        return
    before = await age_limit(engine, now, days)
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
    deleted, last = 0, JOURNAL_BATCH
    while last == JOURNAL_BATCH and should_continue():
        async with transaction(engine) as connection:
            last = await delete_before(connection, organisation, before, limit=JOURNAL_BATCH)
        deleted += last
    if deleted:
        _log.info("deleted %d old entries of the journal of %s", deleted, organisation)


def journal_retention_specs(days: int) -> Sequence[TaskSpec]:
    """Return the hourly task; none if everything is kept (0 days)."""
    return age_limit_specs(
        delete_old_entries, partition=JOURNAL_PARTITION, name="journal retention", days=days
    )


USAGE_PARTITION: Final = "upkeep/usage-retention"


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
    deleted = USAGE_BATCH
    while deleted == USAGE_BATCH and should_continue():
        deleted = await delete_usage_before(engine, before)


def usage_retention_specs(days: int) -> Sequence[TaskSpec]:
    """Return the hourly task; none if everything is kept (0 days)."""
    return age_limit_specs(
        delete_old_usage, partition=USAGE_PARTITION, name="usage retention", days=days
    )


REQUESTS_PARTITION: Final = "upkeep/requests"
REQUESTS_DAYS: Final = 30
"""Days for which subscriptions that ended without approval stay on record."""
REQUESTS_BATCH: Final = 500


async def delete_old_requests(
    engine: AsyncEngine, now: datetime, days: int, should_continue: ShouldContinue
) -> None:
    """Delete subscriptions that ended without approval more than `days` ago, with their history.

    `now`: this process's clock; see `age_limit`.

    StorageUnavailableError, StorageRefusedError.
    """
    if not should_continue():
        return
    before = await age_limit(engine, now, days)
    deleted = REQUESTS_BATCH
    while deleted == REQUESTS_BATCH and should_continue():
        async with transaction(engine) as connection:
            deleted = await delete_ended(connection, before, limit=REQUESTS_BATCH)


def request_retention_specs() -> Sequence[TaskSpec]:
    """Return the hourly task."""
    return age_limit_specs(
        delete_old_requests,
        partition=REQUESTS_PARTITION,
        name="retention of ended requests to subscribe",
        days=REQUESTS_DAYS,
    )
