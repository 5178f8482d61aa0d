"""Rescue entries of a magazine that were taken and never finished, and those of sidelines."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from delivery.maintenance.task import ShouldContinue
from delivery.sideline.magazines import SidelineMagazineCache
from delivery.sideline.sweep_jobs import group_jobs, run_sweep_jobs
from rooms.batching import for_each_limited
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.sideline.entries import EntryRef, SidelineEntries
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.magazine import MAX_BATCH, StoredEntry
from rooms.errors import MagazineMissingError
from rooms.ports import Clock, Magazine

Rescue = Callable[[Sequence[StoredEntry], float], Awaitable[None]]
"""Move or delete stuck entries, which the sweep stamped as its own at most so many seconds ago."""


async def sweep_magazine(
    magazine: Magazine,
    rescue: Rescue,
    should_continue: ShouldContinue,
    *,
    epoch: int,
    older_than_s: float,
    clock: Clock,
    concurrency: int = 1,
    limit: int = MAX_BATCH,
    batches: asyncio.Semaphore | None = None,
) -> int:
    """Sweep every shard and return the number of stuck entries. Errors are the magazine's.

    `batches`: bounds how many batches of several magazines are in memory at a time.
    """
    found = 0
    slots = batches or asyncio.Semaphore(concurrency)

    async def sweep_shard(shard: int) -> None:
        nonlocal found
        more = True
        while more and should_continue():
            async with slots:
                # Hundreds of shards may have waited for their turn.
                if not should_continue():
                    return
                began_s = clock.monotonic()
                batch = await magazine.sweep(
                    shard, epoch=epoch, older_than_s=older_than_s, limit=limit
                )
                if batch.entries:
                    await rescue(batch.entries, clock.monotonic() - began_s)
                    found += len(batch.entries)
            # Another pass after a rescue moves the pointer over the rescued entries.
            more = batch.is_full or bool(batch.entries)

    await for_each_limited(sweep_shard, range(magazine.shards), limit=concurrency)
    return found


_log = logging.getLogger(__name__)

STUCK_AFTER_S: Final = 20 * 60.0
FIRST_SWEEP_S: Final = 10 * 60.0
SWEEP_EVERY_S: Final = 15 * 60.0
MAX_CONCURRENT_SIDELINES: Final = 64


class SidelineSweeper:
    """Sweep in one epoch: the store refuses an older one (StaleEpochError), which changes nothing.

    A stuck entry that its row still names is reloaded; any other is deleted. All sidelines are
    swept periodically, and single ones by a job; both use the same epoch.
    """

    name = "sweep of sidelines"

    def __init__(
        self,
        sidelines: SidelineEntries,
        magazine_cache: SidelineMagazineCache,
        job_queue: JobQueue,
        clock: Clock,
        *,
        epoch: int,
        on_swept: Callable[[int], None],
        on_sweep_ended: Callable[[str], None],
        older_than_s: float = STUCK_AFTER_S,
        first_s: float = FIRST_SWEEP_S,
    ) -> None:
        """Report rescued entries to `on_swept`, and to `on_sweep_ended` "done" or "failed".

        The first sweep of all sidelines starts `first_s` after the term began.
        """
        self._sidelines = sidelines
        self._magazine_cache = magazine_cache
        self._epoch = epoch
        self._on_swept = on_swept
        self._on_sweep_ended = on_sweep_ended
        self._older_than_s = older_than_s
        self._job_queue = job_queue
        self._clock = clock
        self._next_at = clock.monotonic() + first_s

    async def run(self, should_continue: ShouldContinue) -> None:
        """Run sweep jobs, and sweep every sideline when that is due."""
        if not should_continue():
            return

        async def sweep(job: OpenJob) -> int:
            return await self.sweep(
                SubscriptionId(job.arguments["subscription_id"]), should_continue
            )

        jobs = await self._job_queue.fetch_open({JobKind.SWEEP_SIDELINE})
        await run_sweep_jobs(
            group_jobs(jobs, lambda job: job.arguments.get("subscription_id")),
            sweep,
            should_continue,
            job_queue=self._job_queue,
            clock=self._clock,
        )
        if self._clock.monotonic() >= self._next_at:
            await self._run_full_sweep(should_continue)
            self._next_at = self._clock.monotonic() + SWEEP_EVERY_S

    async def _run_full_sweep(self, should_continue: ShouldContinue) -> None:
        try:
            await self.sweep_all(should_continue)
        except Exception:
            self._on_sweep_ended("failed")
            raise
        self._on_sweep_ended("done")

    async def sweep_all(self, should_continue: ShouldContinue) -> None:
        """Sweep every sideline once, several at a time."""

        async def sweep_one(subscription: SubscriptionId) -> None:
            await self.sweep(subscription, should_continue)

        after: SubscriptionId | None = None
        while should_continue() and (page := await self._sidelines.list_subscriptions(after)):
            await for_each_limited(sweep_one, page, limit=MAX_CONCURRENT_SIDELINES)
            after = page[-1]

    async def sweep(self, subscription: SubscriptionId, should_continue: ShouldContinue) -> int:
        """Sweep one subscription's sideline and return the number of stuck entries."""
        magazine = await self._magazine_cache.get(subscription) if should_continue() else None
        if magazine is None:
            return 0

        async def rescue(taken: Sequence[StoredEntry], _held_for_s: float) -> None:
            # Nothing is rescued twice: its row names one slot.
            await self._rescue(subscription, magazine, taken)

        try:
            return await sweep_magazine(
                magazine,
                rescue,
                should_continue,
                epoch=self._epoch,
                older_than_s=self._older_than_s,
                clock=self._clock,
            )
        except MagazineMissingError:
            self._magazine_cache.invalidate(subscription)
            return 0

    async def _rescue(
        self, subscription: SubscriptionId, magazine: Magazine, taken: Sequence[StoredEntry]
    ) -> None:
        slots = await self._sidelines.find_slots(
            subscription, [DeliveryId(stored.entry.id) for stored in taken]
        )
        named = [
            stored for stored in taken if slots.get(DeliveryId(stored.entry.id)) == stored.slot
        ]
        orphans = [
            stored.slot for stored in taken if slots.get(DeliveryId(stored.entry.id)) != stored.slot
        ]
        if orphans:
            await magazine.delete(orphans, swept=True)
        if named:
            await self._reload(subscription, magazine, named)
        _log.info("%d stuck entries in the sideline of subscription %s", len(taken), subscription)
        self._on_swept(len(taken))

    async def _reload(
        self, subscription: SubscriptionId, magazine: Magazine, stuck: Sequence[StoredEntry]
    ) -> None:
        slots = await magazine.reload(stuck)
        moved = [
            (stored, slot) for stored, slot in zip(stuck, slots, strict=True) if slot is not None
        ]
        refs = [
            EntryRef(
                delivery_id=DeliveryId(stored.entry.id),
                subscription_id=subscription,
                generation=stored.entry.generation,
                slot=stored.slot,
            )
            for stored, _ in moved
        ]
        recorded = await self._sidelines.record_moved(refs, [slot for _, slot in moved])
        late = [slot for (_, slot), done in zip(moved, recorded, strict=True) if not done]
        if late:
            await magazine.delete(late)
