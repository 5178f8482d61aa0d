"""Run the maintenance of handler queues: reconciler, deletions, shovel and sweeper."""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.handlers.known_queues import KnownQueues
from delivery.handlers.magazines import QueueMagazineCache, drop_queue_magazines
from delivery.handlers.shovel import QueueShovel
from delivery.handlers.sweeper import QueueSweeper
from delivery.maintenance.age_limits import earlier_time
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.service import TaskSpec
from delivery.maintenance.task import ShouldContinue
from delivery.maintenance.task_context import TaskContext
from rooms.db.catalog.handler_queues import (
    delete_queue,
    existing_names,
    hold_queue,
    list_interrupted_deletions,
    mark_deleting,
)
from rooms.db.connection import transaction
from rooms.db.jobs.jobs import JobQueue, OpenJob, create_job
from rooms.db.notify import Channel
from rooms.domain.handler_queue import HandlerQueue
from rooms.domain.job import JobKind
from rooms.errors import MagazineMissingError, MagazineUnavailableError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Clock, Magazines

_log = logging.getLogger(__name__)

_RECORDS_OUTAGE: Final = "reads of handler queue records failed"
FULL_SCAN_EVERY_S: Final = 30.0
_EVERY_S: Final = 1.0
"""Seconds between two runs of each task; the shovel and the sweeper also have own schedules."""
MAX_CONCURRENT_DELETIONS: Final = 4
"""Each may take a connection or thread of the store for minutes, and one is an organisation's."""
MIN_ORPHAN_RECORD_AGE: Final = timedelta(minutes=10)
"""Age from which a record without a queue is dropped: a creation may be under way before."""


class QueueReconciler:
    """Make records and magazines in the store agree with the queues in PostgreSQL.

    Requests the deletion of those that expired, and completes a deletion whose job has failed.
    """

    name = "reconciliation of handler queues"

    def __init__(
        self,
        engine: AsyncEngine,
        magazines: Magazines,
        magazine_cache: QueueMagazineCache,
        clock: Clock,
        *,
        new_job_id: Callable[[], str],
        report_depth: Callable[[str, str, int], None],
        on_deleted: Callable[[str], None],
    ) -> None:
        """Report (queue, magazine, depth), and queues that are deleted after that.

        Check everything every `FULL_SCAN_EVERY_S`.
        """
        self._engine = engine
        self._known_queues = KnownQueues(engine)
        self._magazines = magazines
        self._magazine_cache = magazine_cache
        self._clock = clock
        self._new_job_id = new_job_id
        self._report_depth = report_depth
        self._on_deleted = on_deleted
        self._reported: set[str] = set()
        self._next_full_scan = 0.0
        self._reconciled: dict[str, tuple[datetime, bool]] = {}

    async def run(self, should_continue: ShouldContinue) -> None:
        """Reconcile changed queues, and at times check everything."""
        if self._clock.monotonic() >= self._next_full_scan:
            self._reconciled.clear()
            for name in await list_interrupted_deletions(self._engine) if should_continue() else ():
                await delete_with_magazines(self._engine, self._magazines, name)
            if should_continue():
                await self._drop_orphan_records()
            self._next_full_scan = self._clock.monotonic() + FULL_SCAN_EVERY_S
        queues = await self._known_queues.refresh()
        names = {queue.store_name for queue in queues}
        self._magazine_cache.retain(names)
        for name in self._reconciled.keys() - names:
            del self._reconciled[name]
        for name in self._reported - names:
            self._on_deleted(name)
        self._reported &= names
        changed = [
            queue
            for queue in queues
            if self._reconciled.get(queue.store_name) != (queue.updated_at, queue.active)
        ]
        if changed:
            await self._reconcile_all(changed, should_continue)

    async def _reconcile_all(
        self, queues: Sequence[HandlerQueue], should_continue: ShouldContinue
    ) -> None:
        now = await earlier_time(self._engine, self._clock.now())
        for queue in queues:
            if not should_continue():
                return
            await self._reconcile(queue, now)

    async def _reconcile(self, queue: HandlerQueue, now: datetime) -> None:
        if queue.is_purgeable(now):
            await self._request_deletion(queue)
            return
        try:
            magazines = await self._magazine_cache.get(queue)
            depths = [
                (await magazine.state()).depth for magazine in (magazines.main, magazines.sideline)
            ]
        except MagazineMissingError:
            async with transaction(self._engine) as connection:
                # A deletion drops them, too: what is made again after it would stay for ever.
                if not await hold_queue(connection, queue.store_name):
                    return
                _log.warning(
                    "the store has lost magazines of the queue %s: creating them again, empty",
                    queue.store_name,
                )
                await self._magazine_cache.create(queue, now)
            depths = [0, 0]
        await self._magazines.save_queue_record(queue.to_record())
        for which, depth in zip(("main", "sideline"), depths, strict=True):
            self._report_depth(queue.store_name, which, depth)
        self._reported.add(queue.store_name)
        self._reconciled[queue.store_name] = queue.updated_at, queue.active

    async def _request_deletion(self, queue: HandlerQueue) -> None:
        async with transaction(self._engine) as connection:
            # It was read before all others were reconciled: its owner may have kept it since.
            if not await mark_deleting(
                connection, queue.store_name, unchanged_since=queue.updated_at
            ):
                return
            await create_job(
                connection,
                queue.organisation_id,
                JobKind.DELETE_QUEUE,
                new_id=self._new_job_id(),
                room=None,
                arguments={"queue": queue.name, "store_name": queue.store_name},
            )
        _log.info("deleting the queue %s, which expired long ago", queue.store_name)

    async def _drop_orphan_records(self) -> None:
        """Drop records without a queue: of an interrupted creation, or from an older backup."""
        try:
            records = [
                *await self._magazines.list_queue_records(),
                *await self._magazines.list_queue_records(active=False),
            ]
        except MagazineUnavailableError as exc:
            OUTAGES.record_failure(exc, _RECORDS_OUTAGE)
            return
        OUTAGES.record_success(_RECORDS_OUTAGE)
        before = await earlier_time(self._engine, self._clock.now()) - MIN_ORPHAN_RECORD_AGE
        old = [record.name for record in records if record.created_at < before]
        if old:
            async with transaction(self._engine) as connection:
                existing = await existing_names(connection, old)
            for name in set(old) - existing:
                _log.warning("dropping the magazines of %s, which belong to no queue", name)
                await drop_queue_magazines(self._magazines, name)


class QueueDeletions:
    """Run the jobs that delete queues: a queue may have millions of messages.

    Several organisations have one at a time each, so that none waits for all queues of another. A
    deletion cannot stop before its end.
    """

    name = "deletion of handler queues"

    def __init__(self, engine: AsyncEngine, magazines: Magazines, job_queue: JobQueue) -> None:
        self._engine = engine
        self._magazines = magazines
        self._jobs = JobRunner(
            job_queue,
            {JobKind.DELETE_QUEUE: self._run_job},
            name=self.name,
            max_concurrent=MAX_CONCURRENT_DELETIONS,
            max_of_organisation=1,
        )

    async def run(self, should_continue: ShouldContinue) -> None:
        """Run the open jobs."""
        await self._jobs.run(should_continue)

    async def _run_job(self, job: OpenJob, _: ShouldContinue) -> bool:
        # Jobs of earlier versions have only one name.
        name = str(job.arguments.get("store_name") or job.arguments["queue"])
        await delete_with_magazines(self._engine, self._magazines, name)
        return True


async def delete_with_magazines(engine: AsyncEngine, magazines: Magazines, name: str) -> None:
    """Drop the magazines first, then the name, so that no queue of that name exists before."""
    await drop_queue_magazines(magazines, name)
    async with transaction(engine) as connection:
        await delete_queue(connection, name)


class QueueTasks:
    """Create the tasks of handler queues."""

    def __init__(self, magazines: Magazines, metrics: Metrics) -> None:
        self._magazines = magazines
        self._metrics = metrics

    def task_specs(self) -> Sequence[TaskSpec]:
        """Return the tasks, each with its partition."""
        return (
            TaskSpec(partition="queues/keeping", every_s=_EVERY_S, create=self._reconciler),
            TaskSpec(partition="queues/deletions", every_s=_EVERY_S, create=self._deletions),
            TaskSpec(partition="queues/shovel", every_s=_EVERY_S, create=self._shovel),
            TaskSpec(partition="queues/sweep", every_s=_EVERY_S, create=self._sweeper),
        )

    def _reconciler(self, context: TaskContext) -> QueueReconciler:
        return QueueReconciler(
            context.engine,
            self._magazines,
            QueueMagazineCache(self._magazines),
            context.clock,
            new_job_id=context.new_job_id,
            report_depth=self._report_depth,
            on_deleted=self._metrics.queue_series.forget,
        )

    def _deletions(self, context: TaskContext) -> QueueDeletions:
        return QueueDeletions(context.engine, self._magazines, context.job_queue)

    def _report_depth(self, queue: str, which: str, count: int) -> None:
        metrics, series = self._metrics, self._metrics.queue_series.of
        # Prometheus sees no increase in a series that begins above 0.
        series(metrics.queue_sweep_failures, queue)
        series(metrics.queue_handled, queue, "sidelined")
        series(metrics.queue_shoveled, queue, "queued")
        series(metrics.queue_swept, queue, which)
        series(metrics.queue_depth, queue, which).set(count)

    def _shovel(self, context: TaskContext) -> QueueShovel:
        series = self._metrics.queue_series.of
        return QueueShovel(
            context.engine,
            QueueMagazineCache(self._magazines),
            context.clock,
            on_loaded=lambda queue: context.notifier.notify(Channel.MESSAGES, queue),
            on_shoveled=lambda queue, what, count: series(
                self._metrics.queue_shoveled, queue, what
            ).inc(count),
        )

    def _sweeper(self, context: TaskContext) -> QueueSweeper:
        series = self._metrics.queue_series.of
        return QueueSweeper(
            context.engine,
            QueueMagazineCache(self._magazines),
            context.job_queue,
            context.clock,
            epoch=context.epoch,
            on_swept=lambda queue, which, count: series(
                self._metrics.queue_swept, queue, which
            ).inc(count),
            on_failed=lambda queue: series(self._metrics.queue_sweep_failures, queue).inc(),
        )
