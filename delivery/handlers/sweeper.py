"""Rescue messages of handler queues that were fired and never finished."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.known_queues import KnownQueues, in_turns
from delivery.handlers.magazines import QueueMagazineCache, QueueMagazines, to_sideline_entry
from delivery.handlers.outcome import SidelineReason
from delivery.maintenance.task import ShouldContinue
from delivery.sideline.store_answers import StoreAnswers, StoreAttempt
from delivery.sideline.sweep_jobs import MAGAZINE_ERRORS, SweepJobs
from delivery.sideline.sweeper import sweep_magazine
from rooms.batching import for_each_limited
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.handler_queue import HandlerQueue
from rooms.domain.job import JobKind
from rooms.domain.magazine import MAX_BATCH, SIDELINE_SUFFIX, StoredEntry
from rooms.errors import MagazineUnavailableError, NotFoundError, StaleEpochError
from rooms.outages import OUTAGES
from rooms.ports import Clock

_log = logging.getLogger(__name__)

FIRST_SWEEP_S: Final = 10 * 60.0
SWEEP_EVERY_S: Final = 15 * 60.0
MAX_CONCURRENT_QUEUES: Final = 64
MAX_CONCURRENT_SHARDS: Final = 8
MAX_CONCURRENT_BATCHES: Final = 16
"""Batches of all queues together, each of which may have `MAX_BATCH_BYTES` in memory."""
_MIN_HELD_S: Final = 10.0
"""A sweeper that took less time for a batch was not suspended."""
_SWEEP_OUTAGE: Final = "sweeps of handler queues failed"
_STUCK_DETAIL: Final = "handed out and never finished"


class QueueSweeper:
    """Sweep in one epoch: the store refuses an older one (StaleEpochError), which changes nothing.

    Stuck messages of the main magazine go to the sideline. Those of the sideline, whose shovel
    died, are reloaded there. All queues are swept periodically, and single magazines by a job. A
    sweep of all ends when the store is away for all of them.
    """

    name = "sweep of handler queues"

    def __init__(
        self,
        engine: AsyncEngine,
        magazine_cache: QueueMagazineCache,
        job_queue: JobQueue,
        clock: Clock,
        *,
        epoch: int,
        on_swept: Callable[[str, str, int], None],
        on_failed: Callable[[str], None],
        first_s: float = FIRST_SWEEP_S,
        every_s: float = SWEEP_EVERY_S,
        batch: int = MAX_BATCH,
    ) -> None:
        """Report (queue, magazine, count) to `on_swept`, and a queue that failed to `on_failed`."""
        self._known_queues = KnownQueues(engine)
        self._magazine_cache = magazine_cache
        self._job_queue = job_queue
        self._sweep_jobs = SweepJobs(job_queue, clock)
        self._clock = clock
        self._epoch = epoch
        self._on_swept = on_swept
        self._on_failed = on_failed
        self._every_s = every_s
        self._batch = batch
        self._batches = asyncio.Semaphore(MAX_CONCURRENT_BATCHES)
        self._next_at = clock.monotonic() + first_s
        self._begin_after: str | None = None
        """The last queue of a sweep of all that was given up; None: the next one begins anew."""

    async def run(self, should_continue: ShouldContinue) -> None:
        """Run sweep jobs, and sweep every queue when that is due."""
        jobs = await self._job_queue.fetch_open({JobKind.SWEEP_QUEUE}) if should_continue() else []
        all_due = self._clock.monotonic() >= self._next_at
        if not jobs and not all_due:
            return
        queues = {queue.store_name: queue for queue in await self._known_queues.refresh()}
        self._magazine_cache.retain(queues)

        async def sweep(job: OpenJob) -> int | None:
            return await self._sweep_for(job, queues, should_continue)

        await self._sweep_jobs.run(jobs, _magazine_of, sweep, should_continue)
        if all_due:
            await self.sweep_all(list(queues.values()), should_continue)
            self._next_at = self._clock.monotonic() + self._every_s

    async def sweep_all(
        self, queues: Sequence[HandlerQueue], should_continue: ShouldContinue
    ) -> None:
        """Sweep both magazines of every queue once; a failure does not stop the others.

        If the store is away for all of them, no other is begun, and the next sweep begins behind
        the last one.
        """
        answers = StoreAnswers()
        last: str | None = None

        def may_continue() -> bool:
            return should_continue() and not answers.is_away

        async def sweep_one(queue: HandlerQueue) -> None:
            nonlocal last
            if not may_continue():
                return
            last = queue.store_name
            attempt = answers.begin()
            try:
                # Main first: its stuck messages are new in the sideline, and not stuck there.
                await self.sweep(queue, may_continue, sideline=False, attempt=attempt)
                await self.sweep(queue, may_continue, sideline=True, attempt=attempt)
            except MAGAZINE_ERRORS as exc:
                if isinstance(exc, MagazineUnavailableError):
                    attempt.record_unavailable()  # perhaps it could not be opened
                self._record_failure(queue, exc, should_continue)

        turns = in_turns(queues)
        names = [queue.store_name for queue in turns]
        begin = names.index(self._begin_after) + 1 if self._begin_after in names else 0
        await for_each_limited(
            sweep_one, [*turns[begin:], *turns[:begin]], limit=MAX_CONCURRENT_QUEUES
        )
        self._begin_after = last if answers.is_away else None

    async def sweep(
        self,
        queue: HandlerQueue,
        should_continue: ShouldContinue,
        *,
        sideline: bool,
        attempt: StoreAttempt | None = None,
    ) -> int:
        """Sweep one magazine and return the number of stuck messages.

        `attempt` gets whether the store answers.
        """
        pair = await self._magazine_cache.get(queue)
        magazine = pair.sideline if sideline else pair.main
        older_than_s = queue.sideline_stuck_after_s if sideline else queue.stuck_after_s

        async def rescue(taken: Sequence[StoredEntry], held_for_s: float) -> int:
            # A reload leaves what another has moved; a load does not.
            if not sideline and held_for_s > max(older_than_s / 2, _MIN_HELD_S):
                # The stamp of the next term's sweeper is younger than this.
                taken = await magazine.take(
                    [one.slot for one in taken], older_than_s=held_for_s - older_than_s / 2
                )
            if taken:
                await rescue_entries(pair, taken, sideline=sideline)
            self._on_swept(queue.store_name, "sideline" if sideline else "main", len(taken))
            return len(taken)

        found = await sweep_magazine(
            magazine,
            rescue,
            should_continue,
            epoch=self._epoch,
            older_than_s=older_than_s,
            clock=self._clock,
            concurrency=MAX_CONCURRENT_SHARDS,
            limit=self._batch,
            batches=self._batches,
            attempt=attempt,
        )
        OUTAGES.record_success(_SWEEP_OUTAGE)
        if found:
            _log.info("%d stuck messages in %s", found, magazine.name)
        return found

    async def _sweep_for(
        self, job: OpenJob, queues: dict[str, HandlerQueue], should_continue: ShouldContinue
    ) -> int | None:
        name, sideline = _magazine_of(job)
        queue = queues.get(name)
        if queue is None:
            raise NotFoundError("the queue does not exist any more")
        try:
            return await self.sweep(queue, should_continue, sideline=sideline)
        except MAGAZINE_ERRORS as exc:
            # The job waits for the next run; the periodic sweep does not wait for the job.
            self._record_failure(queue, exc, should_continue)
            return None

    def _record_failure(
        self, queue: HandlerQueue, exc: Exception, should_continue: ShouldContinue
    ) -> None:
        if isinstance(exc, StaleEpochError) and not should_continue():
            return  # the next term sweeps the queue, or has done so
        if isinstance(exc, MagazineUnavailableError):
            OUTAGES.record_failure(exc, _SWEEP_OUTAGE)
        else:
            _log.warning("the queue %s could not be swept: %s", queue.store_name, exc)
        self._magazine_cache.invalidate(queue.store_name)
        self._on_failed(queue.store_name)


def _magazine_of(job: OpenJob) -> tuple[str, bool]:
    """Return the queue's name in the store, and whether its sideline is meant."""
    # Jobs of earlier versions have only one name.
    name = str(job.arguments.get("store_name", job.arguments.get("queue")))
    return name, str(job.arguments.get("magazine")).endswith(SIDELINE_SUFFIX)


async def rescue_entries(
    queue_magazines: QueueMagazines, taken: Sequence[StoredEntry], *, sideline: bool
) -> None:
    """Move stuck messages, stamped by the sweeper, to the end of the sideline."""
    if sideline:
        await queue_magazines.sideline.reload(taken)
        return
    await queue_magazines.sideline.load(
        [to_sideline_entry(one.entry, SidelineReason.STUCK, _STUCK_DETAIL) for one in taken]
    )
    await queue_magazines.main.delete([one.slot for one in taken], swept=True)
