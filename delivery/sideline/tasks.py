"""Run the maintenance of sidelines: loader, audit, sweeper, jobs and scheduled shovels."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from delivery.maintenance.job_rates import JobRateLimiters
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.service import TaskSpec
from delivery.maintenance.task import ShouldContinue
from delivery.maintenance.task_context import TaskContext
from delivery.sideline.audit import SidelineAudit
from delivery.sideline.loader import SidelineLoader
from delivery.sideline.magazines import SidelineMagazineCache
from delivery.sideline.shovel import ShovelRequest, SidelineShovel, SidelineWalk
from delivery.sideline.sweeper import SidelineSweeper
from rooms.db.catalog.shovel_schedules import DueSidelineSchedule, due_schedules
from rooms.db.connection import transaction
from rooms.db.job_progress import JobRun
from rooms.db.jobs.jobs import JobQueue, OpenJob, create_job
from rooms.db.jobs.requests import MAX_OPEN_JOBS, count_open_jobs
from rooms.db.sideline.entries import SidelineEntries
from rooms.db.sideline.queries import SidelineFilter, count_sideline_bounded
from rooms.db.sideline.shovel import ShovelOutcome, ShovelQueries
from rooms.domain.ids import IdGenerator, JobId, OrganisationId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.state_machine import SubscriptionType
from rooms.metrics import Metrics
from rooms.ports import Clock, Magazines

_log = logging.getLogger(__name__)

_STAYED: Final = frozenset(
    {ShovelOutcome.TOO_OFTEN.value, ShovelOutcome.STALE.value, ShovelOutcome.BUSY.value}
)
"""Outcomes of deliveries that a run does not move: the job's next run finds what is still there."""

_MAX_KEPT: Final = 10_000
"""Jobs whose walk is remembered, also cancelled ones. One that is forgotten begins a new run."""


@dataclass(frozen=True, slots=True)
class _SlicedRun:
    """Hold a run of a job between its time slices."""

    run: JobRun
    walk: SidelineWalk = field(default_factory=SidelineWalk)
    stayed: Counter[str] = field(default_factory=Counter)


class SidelineJobRunner:
    """Run shovel and purge jobs. An interrupted job continues with what the sideline then has.

    So a result counts what all runs have moved, and what the last one has left. What moves
    deliveries counts them, too: no kill and no broken connection loses a count.

    A run goes on in the next time slice where the last one has ended: begun anew, a walk through a
    large sideline might not end in any slice. After an error, and in another process, a new one
    begins.
    """

    name = "sideline jobs"

    def __init__(
        self,
        job_queue: JobQueue,
        shovel: SidelineShovel,
        engine: AsyncEngine,
        clock: Clock,
        *,
        on_moved: Callable[[str, int], None],
    ) -> None:
        """Report outcomes of deliveries, with their counts, to `on_moved`."""
        self._job_queue = job_queue
        self._shovel = shovel
        self._engine = engine
        self._on_moved = on_moved
        self._rate_limiters = JobRateLimiters(clock.monotonic)
        self._runs: dict[JobId, _SlicedRun] = {}
        self._counting = asyncio.Lock()
        handlers = {JobKind.SHOVEL_SIDELINE: self._run_job, JobKind.PURGE_SIDELINE: self._run_job}
        self._jobs = JobRunner(job_queue, handlers, name=self.name)

    async def run(self, should_continue: ShouldContinue) -> None:
        """Run the open jobs."""
        await self._jobs.run(should_continue)

    async def _run_job(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        request = ShovelRequest.from_arguments(job.arguments)
        current = await self._continue_run(job, request)
        if current is None:
            return False

        async def on_progress(batch: Counter[str]) -> None:
            for outcome, count in batch.items():
                if outcome in _STAYED:
                    current.stayed[outcome] += count
                else:
                    self._on_moved(outcome, count)

        move = (
            self._shovel.shovel
            if JobKind(job.kind) is JobKind.SHOVEL_SIDELINE
            else self._shovel.purge
        )
        done = await move(
            request,
            should_continue,
            on_progress,
            limiter=self._rate_limiters.get(job.id, request.rate_per_s),
            requested_at=job.created_at,
            run=current.run,
            walk=current.walk,
        )
        if done:
            self._rate_limiters.forget(job.id)
            for outcome, count in current.stayed.items():
                self._on_moved(outcome, count)
        else:
            self._keep_run(job.id, current)
        return done

    async def _continue_run(self, job: OpenJob, request: ShovelRequest) -> _SlicedRun | None:
        """Return the run of the last time slice, or a new one; None: the job has ended."""
        kept = self._runs.pop(job.id, None)
        if kept is not None and kept.run.position == job.position:
            job.runs[:] = [kept.run]
            return kept
        run = await self._job_queue.start_run(job, recounted=sorted(_STAYED))
        if run is None:
            return None
        # One at a time: the other tasks of the process share the connections.
        async with self._counting, transaction(self._engine) as connection:
            left = await count_sideline_bounded(
                connection, request.room, request.subscription, request.selection
            )
        if left is not None:
            await self._job_queue.record_left(run, left)
        return _SlicedRun(run)

    def _keep_run(self, job: JobId, run: _SlicedRun) -> None:
        if len(self._runs) >= _MAX_KEPT:
            del self._runs[next(iter(self._runs))]
        self._runs[job] = run


class ShovelScheduler:
    """Create a job for each due shovel schedule, like one that a user requests."""

    name = "scheduled shovels"

    def __init__(self, engine: AsyncEngine, clock: Clock, ids: IdGenerator) -> None:
        self._engine = engine
        self._clock = clock
        self._ids = ids
        self._at_limit: frozenset[OrganisationId] = frozenset()
        self._after: datetime | None = None
        """Where the next part of the due schedules begins; None: at the first one."""

    async def run(self, should_continue: ShouldContinue) -> None:
        """Create due jobs; a job and the schedule's next time are one transaction.

        An organisation with too many open jobs gets none: its sidelines wait another interval.
        """
        if not should_continue():
            return
        async with transaction(self._engine) as connection:
            part = await due_schedules(connection, self._after)
            due = part.schedules
            left_out: Counter[OrganisationId] = Counter()
            if due:
                counts = await count_open_jobs(connection, {one.organisation for one in due})
                open_jobs = Counter(counts)
                for one in due:
                    if open_jobs[one.organisation] >= MAX_OPEN_JOBS:
                        left_out[one.organisation] += 1
                        continue
                    open_jobs[one.organisation] += 1
                    await self._create_job(connection, one)
        self._after = part.last
        self._report(left_out)

    async def _create_job(self, connection: AsyncConnection, due: DueSidelineSchedule) -> None:
        request = ShovelRequest(
            subscription=due.subscription,
            selection=SidelineFilter(),
            rate_per_s=due.schedule.rate_per_s,
            concurrency=due.schedule.concurrency,
            max_shovels=due.schedule.max_shovels,
        )
        job = await create_job(
            connection,
            due.organisation,
            JobKind.SHOVEL_SIDELINE,
            new_id=self._ids.generate_global(self._clock.now_ms()),
            room=due.room,
            arguments=request.to_arguments(),
        )
        _log.info("scheduled shovel of the sideline of %s: job %s", due.subscription, job.id)

    def _report(self, left_out: Mapping[OrganisationId, int]) -> None:
        for organisation, count in left_out.items():
            if organisation not in self._at_limit:
                _log.warning(
                    "organisation %s has %d open jobs: %d scheduled shovels wait another interval",
                    organisation,
                    MAX_OPEN_JOBS,
                    count,
                )
        self._at_limit = frozenset(left_out)


class SidelineTasks:
    """Create the tasks of sidelines."""

    def __init__(self, magazines: Magazines, metrics: Metrics) -> None:
        self._magazines = magazines
        self._metrics = metrics

    def task_specs(self) -> Sequence[TaskSpec]:
        """Return the tasks, each with its partition."""
        return (
            TaskSpec(partition="sidelines/loading", every_s=1.0, create=self._loader),
            TaskSpec(partition="sidelines/jobs", every_s=1.0, create=self._jobs),
            TaskSpec(
                partition="sidelines/schedules",
                every_s=5.0,
                create=self._scheduler,
            ),
            TaskSpec(partition="sidelines/audit", every_s=60.0, create=self._audit),
            TaskSpec(partition="sidelines/sweep", every_s=1.0, create=self._sweeper),
        )

    def _open_stores(self, context: TaskContext) -> tuple[SidelineEntries, SidelineMagazineCache]:
        sidelines = SidelineEntries(context.slow_writer)
        return sidelines, SidelineMagazineCache(self._magazines, sidelines)

    def _loader(self, context: TaskContext) -> SidelineLoader:
        return SidelineLoader(*self._open_stores(context))

    def _scheduler(self, context: TaskContext) -> ShovelScheduler:
        return ShovelScheduler(context.engine, context.clock, IdGenerator(secrets.randbits))

    def _audit(self, context: TaskContext) -> SidelineAudit:
        return SidelineAudit(
            *self._open_stores(context), context.clock, on_lost=self._metrics.sideline_lost.inc
        )

    def _sweeper(self, context: TaskContext) -> SidelineSweeper:
        return SidelineSweeper(
            *self._open_stores(context),
            context.job_queue,
            context.clock,
            epoch=context.epoch,
            on_swept=self._metrics.sideline_swept.inc,
            on_sweep_ended=lambda outcome: self._metrics.sideline_sweeps.labels(outcome).inc(),
        )

    def _jobs(self, context: TaskContext) -> SidelineJobRunner:
        def queued(kind: SubscriptionType, subscription: SubscriptionId) -> None:
            context.notifier.notify_queued(subscription if kind is SubscriptionType.PULL else None)

        _, magazine_cache = self._open_stores(context)
        shovel = SidelineShovel(
            context.engine,
            ShovelQueries(context.slow_writer),
            magazine_cache,
            on_queued=queued,
        )
        return SidelineJobRunner(
            context.job_queue,
            shovel,
            context.engine,
            context.clock,
            on_moved=lambda outcome, count: self._metrics.sideline_moved.labels(outcome).inc(count),
        )
