"""Rescue entries of a magazine that were taken and never finished, and those of sidelines."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from delivery.maintenance.task import ShouldContinue
from delivery.sideline.magazines import SidelineMagazineCache
from delivery.sideline.store_answers import StoreAnswers, StoreAttempt
from delivery.sideline.sweep_jobs import MAGAZINE_ERRORS, SweepJobs
from rooms.batching import for_each_limited
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.sideline.entries import EntryRef, SidelineEntries
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.magazine import MAX_BATCH, StoredEntry
from rooms.errors import MagazineMissingError, MagazineUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock, Magazine

Rescue = Callable[[Sequence[StoredEntry], float], Awaitable[int]]
"""Move or delete stuck entries, which the sweep stamped as its own at most so many seconds ago.

Return their number, without those that another has taken since.
"""


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
    attempt: StoreAttempt | None = None,
) -> int:
    """Sweep every shard and return the number of rescued entries. Errors are the magazine's.

    `batches`: bounds how many batches of several magazines are in memory at a time; `attempt`: gets
    whether the store answers.
    """
    found = 0
    slots = batches or asyncio.Semaphore(concurrency)
    is_answered = asyncio.Event()
    is_unavailable = False

    async def sweep_shard(shard: int) -> None:
        # If the store is away, the shards of one magazine take one time-out, and one of `batches`.
        if shard > 0:
            await is_answered.wait()
        try:
            await sweep_to_end(shard)
        finally:
            is_answered.set()

    async def sweep_to_end(shard: int) -> None:
        nonlocal found, is_unavailable
        more = True
        while more and should_continue():
            async with slots:
                # Hundreds of shards may have waited for their turn.
                if is_unavailable or not should_continue():
                    return
                began_s = clock.monotonic()
                try:
                    batch = await magazine.sweep(
                        shard, epoch=epoch, older_than_s=older_than_s, limit=limit
                    )
                except MagazineUnavailableError:
                    # Before the place is free: another magazine would begin to wait there.
                    is_unavailable = True
                    if attempt is not None:
                        attempt.record_unavailable()
                    raise
                is_answered.set()
                if attempt is not None:
                    attempt.record_answer()
                if batch.entries:
                    # In two steps: other shards add to the sum meanwhile.
                    rescued = await rescue(batch.entries, clock.monotonic() - began_s)
                    found += rescued
            # Another pass after a rescue moves the pointer over the rescued entries.
            more = batch.is_full or bool(batch.entries)

    await for_each_limited(sweep_shard, range(magazine.shards), limit=concurrency)
    return found


_log = logging.getLogger(__name__)

STUCK_AFTER_S: Final = 20 * 60.0
FIRST_SWEEP_S: Final = 10 * 60.0
SWEEP_EVERY_S: Final = 15 * 60.0
MAX_CONCURRENT_SIDELINES: Final = 64
_MAX_REPORTED: Final = 100
"""Failing sidelines that have a line each in the log; the end of a pass counts all."""
_SWEEP_OUTAGE: Final = "sweeps of sidelines failed"


class SidelineSweeper:
    """Sweep in one epoch: the store refuses an older one (StaleEpochError), which changes nothing.

    A stuck entry that its row still names is reloaded; any other is deleted. All sidelines are
    swept periodically, and single ones by a job; both use the same epoch. A sideline that fails
    stops neither the others nor their jobs.
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

        A sweep is not reported if the term ends before it. The first sweep of all sidelines starts
        `first_s` after the term began.
        """
        self._sidelines = sidelines
        self._magazine_cache = magazine_cache
        self._epoch = epoch
        self._on_swept = on_swept
        self._on_sweep_ended = on_sweep_ended
        self._older_than_s = older_than_s
        self._job_queue = job_queue
        self._sweep_jobs = SweepJobs(job_queue, clock)
        self._clock = clock
        self._next_at = clock.monotonic() + first_s
        self._begin_after: SubscriptionId | None = None
        """The last sideline of a pass that was given up; None: the next one begins at the first."""
        self._reported: set[SubscriptionId] = set()

    async def run(self, should_continue: ShouldContinue) -> None:
        """Run sweep jobs, and sweep every sideline when that is due."""
        if not should_continue():
            return

        async def sweep(job: OpenJob) -> int | None:
            subscription = SubscriptionId(job.arguments["subscription_id"])
            try:
                return await self._sweep_reported(subscription, should_continue)
            except MAGAZINE_ERRORS:
                return None  # the job waits for the next run

        jobs = await self._job_queue.fetch_open({JobKind.SWEEP_SIDELINE})
        await self._sweep_jobs.run(
            jobs, lambda job: job.arguments.get("subscription_id"), sweep, should_continue
        )
        if should_continue() and self._clock.monotonic() >= self._next_at:
            await self._run_full_sweep(should_continue)

    async def _run_full_sweep(self, should_continue: ShouldContinue) -> None:
        try:
            failed = await self.sweep_all(should_continue)
        except Exception:
            self._on_sweep_ended("failed")
            raise
        if not should_continue():
            return  # the next term sweeps what this one has not
        self._next_at = self._clock.monotonic() + SWEEP_EVERY_S
        if failed:
            _log.warning("%d sidelines could not be swept", failed)
        self._on_sweep_ended("failed" if failed else "done")

    async def sweep_all(self, should_continue: ShouldContinue) -> int:
        """Sweep every sideline once, several at a time; return how many failed.

        Those that fail do not stop the others. If the store is away for all of them, the pass ends,
        and the next one begins behind its last sideline and comes round to it.
        """
        answers = StoreAnswers()
        last: SubscriptionId | None = None
        failed = 0

        async def sweep_one(subscription: SubscriptionId) -> None:
            nonlocal last, failed
            if answers.is_away or not should_continue():
                return
            last = subscription
            attempt = answers.begin()
            try:
                await self._sweep_reported(subscription, should_continue)
            except MagazineUnavailableError:
                failed += 1
                attempt.record_unavailable()
                return
            except MAGAZINE_ERRORS:
                failed += 1
            attempt.record_answer()

        begin = after = self._begin_after
        is_before_end = begin is not None
        while should_continue():
            page = await self._sidelines.list_subscriptions(after)
            if not page and is_before_end:
                after, is_before_end = None, False
                continue
            if begin is not None and not is_before_end:
                page = [one for one in page if one <= begin]
            if not page:
                break
            await for_each_limited(sweep_one, page, limit=MAX_CONCURRENT_SIDELINES)
            if answers.is_away:
                self._begin_after = last
                return failed
            after = page[-1]
        self._begin_after = None
        return failed

    async def _sweep_reported(
        self, subscription: SubscriptionId, should_continue: ShouldContinue
    ) -> int:
        """Sweep one sideline and report its failure. Raises those of `MAGAZINE_ERRORS`."""
        try:
            swept = await self.sweep(subscription, should_continue)
        except MagazineUnavailableError as exc:
            OUTAGES.record_failure(exc, _SWEEP_OUTAGE)
            raise
        except MAGAZINE_ERRORS as exc:
            # Where the term is over, the next one sweeps it, or has done so.
            is_new = subscription not in self._reported and len(self._reported) < _MAX_REPORTED
            if should_continue() and is_new:
                self._reported.add(subscription)
                _log.warning("the sideline of %s could not be swept: %s", subscription, exc)
            raise
        self._reported.discard(subscription)
        OUTAGES.record_success(_SWEEP_OUTAGE)
        return swept

    async def sweep(self, subscription: SubscriptionId, should_continue: ShouldContinue) -> int:
        """Sweep one subscription's sideline and return the number of stuck entries."""
        magazine = await self._magazine_cache.get(subscription) if should_continue() else None
        if magazine is None:
            return 0

        async def rescue(taken: Sequence[StoredEntry], _held_for_s: float) -> int:
            # Nothing is rescued twice: its row names one slot.
            await self._rescue(subscription, magazine, taken)
            return len(taken)

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
