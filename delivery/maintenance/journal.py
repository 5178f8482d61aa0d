"""Apply the retention of the journal: delete the oldest entries of each organisation's chain."""

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.age_limits import age_limit, age_limit_specs
from delivery.maintenance.service import TaskSpec
from delivery.maintenance.task import ShouldContinue
from rooms.db.connection import transaction
from rooms.db.journal import delete_before, list_chains
from rooms.domain.ids import OrganisationId, first_id

_log = logging.getLogger(__name__)

PARTITION: Final = "upkeep/journal"
BATCH: Final = 1000
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
    deleted, last = 0, BATCH
    while last == BATCH and should_continue():
        async with transaction(engine) as connection:
            last = await delete_before(connection, organisation, before, limit=BATCH)
        deleted += last
    if deleted:
        _log.info("deleted %d old entries of the journal of %s", deleted, organisation)


def journal_retention_specs(days: int) -> Sequence[TaskSpec]:
    """Return the hourly task; none if everything is kept (0 days)."""
    return age_limit_specs(
        delete_old_entries, partition=PARTITION, name="journal retention", days=days
    )
