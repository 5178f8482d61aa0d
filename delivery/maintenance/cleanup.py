"""Clean up idempotency keys, dead writers and the broker's queues, and make partitions ahead.

Each function is one run of a task of `service.py`. It calls `should_continue` before a statement.
"""

import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Final, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.sessions import delete_ended
from rooms.db.connection import transaction
from rooms.db.queue.relay import existing_subscriptions
from rooms.db.retention.cleanup import delete_dead_writers, delete_expired_keys
from rooms.db.retention.partitions import (
    SHORT_LOCKS,
    MissingDay,
    add_exclusion,
    create_partitions,
    default_partition_bytes,
    drop_exclusions,
    missing_days,
    validate_exclusion,
)
from rooms.db.retention.replace import MAX_DEFAULT_PARTITION_BYTES
from rooms.db.writer import LogWriter
from rooms.domain.ids import first_id
from rooms.ports import Broker, Clock

_log = logging.getLogger(__name__)

KEY_BATCH: Final = 5000
WRITER_BATCH: Final = 1000

_T = TypeVar("_T")


async def clean_idempotency_keys(writer: LogWriter, should_continue: ShouldContinue) -> None:
    """Delete every expired idempotency key."""
    while should_continue() and await delete_expired_keys(writer, limit=KEY_BATCH) == KEY_BATCH:
        pass


async def clean_dead_writers(writer: LogWriter, should_continue: ShouldContinue) -> None:
    """Delete every writer whose session ended long ago and that claims nothing."""
    while (
        should_continue() and await delete_dead_writers(writer, limit=WRITER_BATCH) == WRITER_BATCH
    ):
        pass


async def clean_sessions(engine: AsyncEngine, should_continue: ShouldContinue) -> None:
    """Delete every session and sign-in link that ended more than a day ago."""
    while should_continue():
        async with transaction(engine) as connection:
            if not await delete_ended(connection):
                return


async def delete_orphan_queues(
    writer: LogWriter, broker: Broker, should_continue: ShouldContinue
) -> None:
    """Delete queues of this installation whose subscription does not exist.

    A relay that was suspended may have created one after the subscription was deleted. A queue
    with a consumer waits for a later run.
    """
    # In this order: a queue is only created for a subscription that exists.
    queues = await broker.list_queues() if should_continue() else ()
    existing = await existing_subscriptions(writer, queues) if queues else frozenset()
    for queue in queues:
        if not should_continue():
            return
        if queue not in existing and await broker.delete_queue(queue):
            _log.warning("deleted the queue of subscription %s, which does not exist", queue)


async def create_partitions_ahead(
    engine: AsyncEngine, clock: Clock, should_continue: ShouldContinue
) -> None:
    """Create the missing partitions of the coming week, one transaction a day.

    StorageRefusedError: a lock was not granted in time.
    """
    if not should_continue():
        return
    await _in_transaction(engine, drop_exclusions)
    now = clock.now()
    days = await _in_transaction(engine, partial(missing_days, now=now), short_locks=False)
    failure: DBAPIError | None = None
    for day in days:
        if not should_continue():
            break
        try:
            await _create_day(engine, day, now)
        except DBAPIError as exc:  # something about this day: the next ones can be created
            failure = failure or exc
    if failure is not None:
        raise failure


async def _create_day(engine: AsyncEngine, day: MissingDay, now: datetime) -> None:
    large = await _in_transaction(engine, default_partition_bytes) > MAX_DEFAULT_PARTITION_BYTES
    # Rows of a day that has begun may arrive at any moment. It is not excluded, and its rows stay
    # in the default partitions.
    if not large:
        await _in_transaction(engine, partial(create_partitions, day=day))
    elif day.low > first_id(int(now.timestamp() * 1000)):
        await _create_with_exclusion(engine, day)


async def _create_with_exclusion(engine: AsyncEngine, day: MissingDay) -> None:
    # The default partitions are scanned before the short lock, or every publish would wait for the
    # scan. A process that dies in between leaves constraints, which the next run drops.
    try:
        await _in_transaction(engine, partial(add_exclusion, day=day))
        await _in_transaction(engine, partial(validate_exclusion, day=day), short_locks=False)
        await _in_transaction(engine, partial(create_partitions, day=day))
    finally:
        await _in_transaction(engine, drop_exclusions)


async def _in_transaction(
    engine: AsyncEngine, work: Callable[[Connection], _T], *, short_locks: bool = True
) -> _T:
    """Run `work` in a transaction; `short_locks` for one that other statements may wait for."""
    async with transaction(engine) as connection:
        for setting in SHORT_LOCKS if short_locks else ():
            await connection.execute(setting)
        return await connection.run_sync(work)
