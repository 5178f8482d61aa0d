"""Count usage from the log, every few seconds and before the log is deleted, and for quotas."""

import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.jobs import sleep_unless_stopped
from delivery.maintenance.task import ShouldContinue
from rooms.db.connection import transaction
from rooms.db.quotas import delete_old_use, estimate_stored, limited_stores
from rooms.db.retention.log_index import LogIndex
from rooms.db.usage import count as records
from rooms.db.usage.minutes import DELETE_BATCH, delete_old_minutes
from rooms.domain.ids import OrganisationId
from rooms.metrics import Metrics

_log = logging.getLogger(__name__)

CountUsage = Callable[[ShouldContinue], Awaitable[bool]]
"""Count; return whether every row is counted that was written before the call."""
_POLLS: Final = 20
_POLL_S: Final = 0.1
"""Looks of a task that waits for what is being written, and the seconds between them."""
MAX_COUNT_S: Final = 1.0
"""The time of one call for what an organisation has limited, except for one count."""
DELAY_WARN_S: Final = 3600.0
"""The age of an open transaction above which the log says that usage waits for it."""


async def count_usage(
    engine: AsyncEngine,
    should_continue: ShouldContinue,
    *,
    max_transactions: int = records.MAX_TRANSACTIONS,
) -> records.Horizon | None:
    """Add the rows of the log that are settled to their hours, a bounded number a transaction.

    Return what was settled and is counted; None: the term ended.

    StorageUnavailableError, StorageRefusedError.
    """
    if not should_continue():
        return None
    horizon = await records.read_horizon(engine)
    while should_continue():
        if not await records.count_next(engine, horizon, max_transactions=max_transactions):
            await records.mark_complete(engine, horizon)
            return horizon
    return None


async def update_usage(
    engine: AsyncEngine,
    metrics: Metrics,
    log_index: LogIndex,
    should_continue: ShouldContinue,
) -> None:
    """Update the index, count, delete old minutes, and report how far behind the counts are.

    StorageUnavailableError, StorageRefusedError.
    """
    await log_index.update(engine, should_continue)
    if await count_usage(engine, should_continue) is None:
        return
    deleted = DELETE_BATCH
    while deleted == DELETE_BATCH and should_continue():
        deleted = await delete_old_minutes(engine)
    async with transaction(engine) as connection:
        at: datetime = (await connection.execute(select(func.now()))).scalar_one()
        complete = await records.complete_until(connection)
    delay_s = 0.0 if complete is None else max((at - complete).total_seconds(), 0.0)
    metrics.usage_delay.set(delay_s)
    if delay_s > DELAY_WARN_S:
        _log.warning("usage of the last %.0f s waits for a transaction that is open", delay_s)


async def is_counted_until(
    engine: AsyncEngine, before: datetime, should_continue: ShouldContinue
) -> bool:
    """Count, and return whether everything before that time is counted.

    StorageUnavailableError, StorageRefusedError.
    """
    await count_usage(engine, should_continue)
    async with transaction(engine) as connection:
        complete = await records.complete_until(connection)
    return complete is not None and complete >= before


def usage_counter(engine: AsyncEngine) -> CountUsage:
    """Return a function for jobs that delete what is counted, or what counting looks up.

    It waits for transactions that are open, up to two seconds; a job that gets False tries again.
    """

    async def count(should_continue: ShouldContinue) -> bool:
        written: int | None = None
        for _ in range(_POLLS):
            horizon = await count_usage(engine, should_continue)
            if horizon is None:
                return False
            written = horizon.next_xid if written is None else written
            if horizon.settled_xid >= written:
                return True
            if not await sleep_unless_stopped(_POLL_S, should_continue):
                return False
        return False

    return count


async def update_quotas(engine: AsyncEngine, should_continue: ShouldContinue) -> None:
    """Count the messages of each room and organisation with a limit, one a transaction.

    An organisation may limit all its rooms, of millions of messages each. So organisations take
    turns, and what of one takes longer than `MAX_COUNT_S` is counted in later calls.

    StorageUnavailableError, StorageRefusedError.
    """
    if not should_continue():
        return
    stores = await limited_stores(engine)
    used_s: defaultdict[OrganisationId, float] = defaultdict(float)
    for store in stores:
        if not should_continue():
            return
        if used_s[store.owner] >= MAX_COUNT_S:
            continue
        begun_s = time.monotonic()
        await estimate_stored(engine, store)
        used_s[store.owner] += time.monotonic() - begun_s
    if should_continue():
        await delete_old_use(engine, [store.subject for store in stores])
