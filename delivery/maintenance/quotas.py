"""Estimate what is stored, for the quotas of stored messages, and delete counts of past days."""

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.task import ShouldContinue
from rooms.db.quotas import delete_old_use, estimate_stored, limited_stores


async def update_quotas(engine: AsyncEngine, should_continue: ShouldContinue) -> None:
    """Count the messages of each room and organisation with a limit, one a transaction.

    StorageUnavailableError, StorageRefusedError.
    """
    if not should_continue():
        return
    stores = await limited_stores(engine)
    for store in stores:
        if not should_continue():
            return
        await estimate_stored(engine, store)
    if should_continue():
        await delete_old_use(engine, [store.subject for store in stores])
