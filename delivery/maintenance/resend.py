"""Recover: send deliveries again that the broker lost, and migrate work rows between brokers.

There are two signs of a loss. The broker has no sentinel: it was restarted or emptied, or is new.
Then every row that was sent is sent again, and the sentinel is put back after the whole walk. Or a
queue holds less than PostgreSQL's rows say for two minutes. Then the rows of that queue are sent
again.

Rows that changed after the missing sentinel was seen were sent after that, and are left out. So
nothing that is published meanwhile is sent twice. A recovery job does the same on request. One
process runs both, one after the other, so that no two walks overlap.

A new sentinel is prepared before that time is read. If the broker restarts during the walk, the
prepared one is lost with what was sent by then, and the walk starts again. So it does after a
process died during a walk. A delivery that is sent twice moves on by one more generation, and its
older copy is stale.

The migration runs after an installation changed its broker or gave it up. It moves work rows that
the former broker would have carried to where the current broker's workers read them.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from delivery.maintenance.job_totals import JobTotals
from delivery.maintenance.jobs import JobHandler, JobRunner
from delivery.maintenance.task import ShouldContinue
from rooms.db.job_progress import JobRun
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.queue.broker_change import START as FIRST_ROW
from rooms.db.queue.broker_change import clear_migration_mark, may_need_migration, migrate_page
from rooms.db.queue.resend import BATCH, SENT_AGAIN, START, ResendQueries, ResendRow
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.work_location import AT_BROKER, TO_RELAY, WorkLocation
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker, Clock

_log = logging.getLogger(__name__)

SHORT_QUEUE_S: Final = 120.0
"""Time for which a queue may hold too little: its rows and its depth are read a moment apart.

It must hold too little at as many comparisons as there are in this time at most: a busy queue does
so now and then, and where a comparison takes long, two of them would be two minutes apart.
"""
COMPARE_S: Final = 10.0
_COMPARE_SHARE: Final = 100
_RETRY_SKIPPED_S: Final = 0.5
_LOG_EVERY: Final = 50_000
NOTHING_TO_DO: Final = (
    "PostgreSQL is the broker: what waits is in its tables, and there is no other copy to be lost"
)
MIGRATE_BATCH: Final = 1000
MAX_MIGRATION_PAUSE_S: Final = 600.0
"""Longest pause between two scans. A scan of a million rows costs a second or two of CPU."""

ALL_LOCATIONS: Final = (*AT_BROKER, *TO_RELAY)
_PUSH_LOCATIONS: Final = (WorkLocation.PUSH_AT_BROKER, WorkLocation.PUSH_TO_RELAY)
_PULL_LOCATIONS: Final = (WorkLocation.PULL_AT_BROKER, WorkLocation.PULL_TO_RELAY)

OnResent = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendScope:
    """Select the rows to send again: in these locations, of one subscription or (None) of all.

    With `before`, only deliveries that have not changed since.
    """

    locations: Collection[WorkLocation] = ALL_LOCATIONS
    subscription: SubscriptionId | None = None
    before: datetime | None = None


def queue_scope(queue: SubscriptionId | None, *, before: datetime | None = None) -> ResendScope:
    """Return the rows of one queue: of a PULL subscription, or (None) of PUSH."""
    return ResendScope(
        locations=_PUSH_LOCATIONS if queue is None else _PULL_LOCATIONS,
        subscription=queue,
        before=before,
    )


async def _ignore(_resent: int) -> None:
    pass


class Resender:
    """Walk over the rows of a scope, and then wait for those that a worker has claimed."""

    def __init__(
        self, queries: ResendQueries, notify: Callable[[], None], *, batch: int = BATCH
    ) -> None:
        """Create it; `notify` wakes the relay."""
        self._queries = queries
        self._notify = notify
        self._batch = batch

    async def run(
        self,
        scope: ResendScope,
        should_continue: ShouldContinue,
        on_resent: OnResent = _ignore,
        *,
        run: JobRun | None = None,
    ) -> bool:
        """Send again, reporting each page's count to `on_resent`; return whether it finished.

        The job of `run` counts what is sent again, until that run is over.
        """
        skipped: dict[ResendRow, None] = {}
        return await self._resend_all(
            scope, should_continue, on_resent, run, skipped
        ) and await self._resend_skipped(scope, should_continue, on_resent, run, skipped)

    async def _resend_all(
        self,
        scope: ResendScope,
        should_continue: ShouldContinue,
        on_resent: OnResent,
        run: JobRun | None,
        skipped: dict[ResendRow, None],
    ) -> bool:
        after, scanned = START, 0
        dead = await self._queries.dead_writers()
        while True:
            if not should_continue():
                return False
            page = await self._queries.resend(
                after,
                locations=scope.locations,
                subscription=scope.subscription,
                dead_writers=dead,
                before=scope.before,
                run=run,
                limit=self._batch,
            )
            if page.is_over:
                return False
            skipped.update(dict.fromkeys(page.skipped))
            if page.resent:
                self._notify()
                await on_resent(page.resent)
            # A page that is not full ends the walk, or it would go on while messages are published.
            if page.last is None or page.scanned < self._batch:
                return True
            if (scanned + page.scanned) // _LOG_EVERY > scanned // _LOG_EVERY:
                _log.info("recovery: %d rows scanned", scanned + page.scanned)
            after, scanned = page.last, scanned + page.scanned

    async def _resend_skipped(
        self,
        scope: ResendScope,
        should_continue: ShouldContinue,
        on_resent: OnResent,
        run: JobRun | None,
        skipped: dict[ResendRow, None],
    ) -> bool:
        while skipped:
            await asyncio.sleep(_RETRY_SKIPPED_S)
            dead = await self._queries.dead_writers()
            rows, skipped = iter(list(skipped)), {}
            while batch := list(itertools.islice(rows, self._batch)):
                if not should_continue():
                    return False
                page = await self._queries.resend_skipped(
                    batch,
                    locations=scope.locations,
                    dead_writers=dead,
                    before=scope.before,
                    run=run,
                )
                if page.is_over:
                    return False
                skipped.update(dict.fromkeys(page.skipped))
                if page.resent:
                    await on_resent(page.resent)
            self._notify()
        return True


class LossDetector:
    """Detect by the sentinel that a broker lost its messages."""

    def __init__(self, queries: ResendQueries, broker: Broker) -> None:
        self._queries = queries
        self._broker = broker
        self._lost_since: datetime | None = None
        self._prepared = ""

    async def lost_since(self) -> datetime | None:
        """Return when the loss was first seen, by PostgreSQL's clock; None: no loss.

        A sentinel is prepared before that time. BrokerUnavailableError forgets both: the broker may
        come back emptied once more.
        """
        try:
            if await self._broker.has_sentinel():
                self._lost_since = None
            elif self._lost_since is None:
                self._prepared = await self._broker.prepare_sentinel()
                self._lost_since = await self._queries.database_time()
        except BrokerUnavailableError:
            self._lost_since = None
            raise
        return self._lost_since

    async def mark_recovered(self) -> bool:
        """Put the sentinel there, after everything was sent again. BrokerUnavailableError.

        False: the broker lost its messages once more meanwhile, which `lost_since` will find.
        """
        self._lost_since = None
        return await self._broker.put_sentinel(self._prepared)


class BrokerRecovery:
    """Detect losses and send again. It remembers short queues, so each term needs a new one."""

    name = "recovery"

    def __init__(
        self,
        queries: ResendQueries,
        broker: Broker,
        clock: Clock,
        notify: Callable[[], None],
        *,
        job_queue: JobQueue | None = None,
        short_queue_s: float = SHORT_QUEUE_S,
        batch: int = BATCH,
    ) -> None:
        """Create it; `notify` wakes the relay. With a `job_queue`, recovery jobs run first."""
        self._queries = queries
        self._resender = Resender(queries, notify, batch=batch)
        self._loss_detector = LossDetector(queries, broker)
        self._job_runner = None
        if job_queue is not None:
            handlers = RecoverJob(
                job_queue, queries, self._loss_detector, notify, batch=batch
            ).handlers()
            self._job_runner = JobRunner(job_queue, handlers, name=self.name)
        self._broker = broker
        self._clock = clock
        self._short_queue_s = short_queue_s
        self._short_queues: dict[SubscriptionId | None, tuple[float, int]] = {}
        """Since when a queue holds too little, and how many comparisons found that."""
        self._next_compare_s = 0.0

    async def run(self, should_continue: ShouldContinue) -> None:
        """Run recovery jobs, then look for losses and send again. BrokerUnavailableError."""
        if self._job_runner is not None:
            await self._job_runner.run(should_continue)
        try:
            if should_continue() and (since := await self._loss_detector.lost_since()) is not None:
                _log.info("the broker has no sentinel: it was restarted or emptied, or is new")
                if await self._resend(ResendScope(before=since), should_continue):
                    if not await self._loss_detector.mark_recovered():
                        _log.info("the broker lost its messages again meanwhile")
                    self._short_queues.clear()
            if should_continue() and self._clock.monotonic() >= self._next_compare_s:
                started_s = self._clock.monotonic()
                await self._compare(should_continue)
                now_s = self._clock.monotonic()
                # Counting includes messages scheduled for later; it takes 1 % of the time at most.
                self._next_compare_s = now_s + max(COMPARE_S, _COMPARE_SHARE * (now_s - started_s))
        except BrokerUnavailableError:
            self._short_queues.clear()  # an unseen queue does not count as short all the while
            raise

    async def _compare(self, should_continue: ShouldContinue) -> None:
        before = await self._queries.count_sent()
        depths = {}
        for queue in before:
            if not should_continue():
                return
            depths[queue] = await self._broker.depth(queue)
        after = await self._queries.count_sent()
        now_s = self._clock.monotonic()
        # Rows come and go between the counts: only those in both are certainly in the queue.
        short = {
            queue
            for queue, depth in depths.items()
            if depth < min(before[queue], after.get(queue, 0))
        }
        known = self._short_queues
        self._short_queues = {
            queue: (since_s, count + 1)
            for queue in short
            for since_s, count in (known.get(queue, (now_s, 0)),)
        }
        for queue, (since_s, count) in list(self._short_queues.items()):
            is_short = min(now_s - since_s, count * COMPARE_S) >= self._short_queue_s
            if not is_short or not should_continue():
                continue
            label = "the PUSH queue" if queue is None else f"the queue of subscription {queue}"
            _log.warning(
                "%s holds %d of %d messages for %.0f s: sending its deliveries again",
                label, depths[queue], before[queue], now_s - since_s,
            )  # fmt: skip
            if await self._resend(queue_scope(queue), should_continue):
                del self._short_queues[queue]

    async def _resend(self, scope: ResendScope, should_continue: ShouldContinue) -> bool:
        resent = 0

        async def on_resent(count: int) -> None:
            nonlocal resent
            resent += count

        finished = await self._resender.run(scope, should_continue, on_resent)
        if resent:
            _log.warning("sent %d deliveries again, because the broker has lost them", resent)
        return finished


class RecoverJob:
    """Run recovery jobs: send again what the broker had when the job was created."""

    def __init__(
        self,
        job_queue: JobQueue,
        queries: ResendQueries,
        loss_detector: LossDetector | None,
        notify: Callable[[], None],
        *,
        batch: int = BATCH,
    ) -> None:
        """Create it; no `loss_detector`: PostgreSQL is the broker. `notify` wakes the relay."""
        self._job_queue = job_queue
        self._queries = queries
        self._totals = JobTotals(job_queue)
        self._loss_detector = loss_detector
        self._resender = Resender(queries, notify, batch=batch)

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of each kind of job."""
        return {JobKind.RECOVER: self._recover}

    async def _recover(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        if self._loss_detector is None:
            await self._job_queue.record_progress(
                job, total=0, result={SENT_AGAIN: 0, "told": NOTHING_TO_DO}
            )
            return True
        since = await self._loss_detector.lost_since()
        await self._totals.record(job, self._queries.count_sent_bounded, should_continue)
        run = await self._job_queue.start_run(job)
        if run is None:
            return False
        # Deliveries that changed after the job's creation were sent after it. But a broker without
        # a sentinel may have been emptied later: it certainly has only those that changed after the
        # loss was seen.
        if not await self._resender.run(
            ResendScope(before=since or job.created_at), should_continue, run=run
        ):
            return False
        if since is not None:
            await self._loss_detector.mark_recovered()
        return True


class NotifyQueued(Protocol):
    """Wake the consumers of queued work: of PUSH, or of one PULL subscription."""

    def __call__(self, subscription: SubscriptionId | None = None, /) -> None: ...


class BrokerMigration:
    """Move work rows to the locations of the current broker mode, which the writer has.

    Scans at the start of a term, and then after 1, 2, 4, … seconds: processes of the former mode
    may run for a while and leave more rows.
    """

    name = "broker migration"

    def __init__(self, writer: LogWriter, notify: NotifyQueued, clock: Clock) -> None:
        self._writer = writer
        self._notify = notify
        self._clock = clock
        self._pause_s = 0.0
        self._next_s = 0.0

    async def run(self, should_continue: ShouldContinue) -> None:
        """Move every unclaimed row, if a scan is due."""
        if self._clock.monotonic() < self._next_s:
            return
        moved = left = 0
        if await may_need_migration(self._writer):
            after = FIRST_ROW
            while True:
                if not should_continue():
                    return
                page = await migrate_page(self._writer, after, limit=MIGRATE_BATCH)
                moved, left = moved + page.migrated, left + page.claimed
                if page.migrated:
                    self._notify()
                    for subscription in page.pull_subscriptions:
                        self._notify(subscription)
                # Rows published after it have the current mode, and do not extend the walk.
                if page.last is None or page.end:
                    break
                after = page.last
            if not moved and not left:
                await clear_migration_mark(self._writer)
        if moved:
            _log.warning("the broker has changed: moved %d deliveries to the current one", moved)
        self._pause_s = (
            1.0 if moved or left else min(MAX_MIGRATION_PAUSE_S, max(1.0, self._pause_s * 2))
        )
        self._next_s = self._clock.monotonic() + self._pause_s
