"""Run each task of maintenance in the terms in which this process has its partition."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import psycopg

from delivery.maintenance.broker_users import BrokerUserSync
from delivery.maintenance.cleanup import (
    clean_dead_writers,
    clean_idempotency_keys,
    clean_sessions,
    create_partitions_ahead,
    delete_orphan_queues,
)
from delivery.maintenance.deletions import SETTLE_S, RemoveExternal
from delivery.maintenance.due import DueScheduler
from delivery.maintenance.expiry import DeliveryExpirer, OrderingRepair, expire_leases
from delivery.maintenance.grants import apply_due_grants
from delivery.maintenance.job_handlers import job_handlers
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.native_queues import DeadLetterReader, update_broker_metrics
from delivery.maintenance.operational_events import OperationalEvents
from delivery.maintenance.resend import SHORT_QUEUE_S, BrokerMigration, BrokerRecovery
from delivery.maintenance.task import (
    Always,
    FunctionTask,
    PeriodicTask,
    ShouldContinue,
    next_term,
    run_periodically,
    wait_first,
)
from delivery.maintenance.task_context import TaskContext
from delivery.maintenance.usage import update_quotas, update_usage
from rooms.db.connection import open_engine
from rooms.db.jobs.jobs import JobQueue
from rooms.db.leases.release import LeaseQueries
from rooms.db.notify import Notifier
from rooms.db.queue.expire import ExpiryQueries
from rooms.db.queue.ordering import OrderingQueries
from rooms.db.queue.resend import ResendQueries
from rooms.db.retention.log_index import LogIndex
from rooms.db.writer import LogWriter
from rooms.domain.ids import IdGenerator
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from rooms.errors import TransientError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Broker, BrokerUsers, Clock, Election, Membership
from rooms.publishing.sandbox.client import CheckSandbox

_log = logging.getLogger(__name__)

_START_OUTAGE: Final = "starts of maintenance failed"
OPEN_KINDS_MEMORY_S: Final = 0.5
"""Time for which the tasks of a process believe that there are no other kinds of open jobs."""
SHUTDOWN_GRACE_S: Final = 0.8
"""Time that statements under way may take when the process stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskIntervals:
    """Define the seconds between two runs of each task.

    `settle_s`, `short_queue_s`: see `DeleteJob` and `BrokerRecovery`; `retry_s`: between two
    attempts to open the connections.
    """

    leases_s: float = 0.5
    expiry_s: float = 1.0
    jobs_s: float = 1.0
    migration_s: float = 1.0
    ordering_s: float = 1.0
    grants_s: float = 1.0
    events_s: float = 1.0
    usage_s: float = 10.0
    quotas_s: float = 30.0
    idempotency_s: float = 60.0
    partitions_s: float = 3600.0
    writers_s: float = 3600.0
    sessions_s: float = 3600.0
    due_s: float = 0.5
    recovery_s: float = 2.0
    broker_queues_s: float = 60.0
    broker_users_s: float = 2.0
    dead_letters_s: float = 5.0
    broker_metrics_s: float = 10.0
    settle_s: float = SETTLE_S
    short_queue_s: float = SHORT_QUEUE_S
    retry_s: float = 0.5


_DEFAULT_INTERVALS: Final = TaskIntervals()
_FILTER_CPU_MS: Final = 1_000
_FILTER_MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Limits of a filter in a replay; the defaults of a publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """Define a task by the name of its partition; `create` makes a new one for each term."""

    partition: str
    every_s: float
    create: Callable[[TaskContext], PeriodicTask]


_TaskFunction = Callable[[TaskContext, ShouldContinue], Awaitable[None]]


def all_tasks(
    intervals: TaskIntervals,
    broker: Broker | None = None,
    remove_external: RemoveExternal | None = None,
) -> Sequence[TaskSpec]:
    """Return every task. `broker`: the external one, if any; `remove_external`: see `DeleteJob`."""
    return (
        *_stateless_tasks(intervals),
        *_stateful_tasks(intervals, broker, remove_external),
        *(() if broker is None else _broker_tasks(intervals, broker)),
    )


def _function_task(partition: str, name: str, every_s: float, function: _TaskFunction) -> TaskSpec:
    return TaskSpec(
        partition=partition,
        every_s=every_s,
        create=lambda context: FunctionTask(name, partial(function, context)),
    )


def _stateless_tasks(intervals: TaskIntervals) -> Sequence[TaskSpec]:
    table: Sequence[tuple[str, str, float, _TaskFunction]] = (
        (
            "upkeep/keys",
            "cleanup of idempotency keys",
            intervals.idempotency_s,
            lambda context, go_on: clean_idempotency_keys(context.slow_writer, go_on),
        ),
        (
            "upkeep/partitions",
            "creation of partitions",
            intervals.partitions_s,
            lambda context, go_on: create_partitions_ahead(context.engine, context.clock, go_on),
        ),
        (
            "upkeep/writers",
            "cleanup of dead writers",
            intervals.writers_s,
            lambda context, go_on: clean_dead_writers(context.slow_writer, go_on),
        ),
        (
            "upkeep/sessions",
            "cleanup of ended sessions and expired links",
            intervals.sessions_s,
            lambda context, go_on: clean_sessions(context.engine, go_on),
        ),
        (
            "upkeep/grants",
            "application of due grants",
            intervals.grants_s,
            lambda context, go_on: apply_due_grants(
                context.engine, context.notifier, context.new_job_id, go_on
            ),
        ),
        (
            "upkeep/quotas",
            "the estimate of stored messages",
            intervals.quotas_s,
            lambda context, go_on: update_quotas(context.engine, go_on),
        ),
    )
    return [_function_task(*row) for row in table]


def _stateful_tasks(
    intervals: TaskIntervals, broker: Broker | None, remove_external: RemoveExternal | None
) -> Sequence[TaskSpec]:
    return (
        TaskSpec(
            partition="upkeep/leases",
            every_s=intervals.leases_s,
            create=lambda context: FunctionTask(
                "lease expiry",
                partial(
                    expire_leases,
                    LeaseQueries(context.fast_writer),  # remembers where its last scan ended
                    context.notifier.notify_queued,
                ),
            ),
        ),
        TaskSpec(
            partition="upkeep/expiry",
            every_s=intervals.expiry_s,
            create=lambda context: DeliveryExpirer(
                ExpiryQueries(context.fast_writer), context.clock
            ),
        ),
        TaskSpec(
            partition="upkeep/jobs",
            every_s=intervals.jobs_s,
            create=lambda context: JobRunner(
                context.job_queue,
                job_handlers(context, intervals.settle_s, broker, remove_external),
            ),
        ),
        TaskSpec(
            partition="upkeep/changeover",
            every_s=intervals.migration_s,
            create=lambda context: BrokerMigration(
                context.slow_writer, context.notifier.notify_queued, context.clock
            ),
        ),
        TaskSpec(
            partition="upkeep/order",
            every_s=intervals.ordering_s,
            create=lambda context: OrderingRepair(
                OrderingQueries(context.fast_writer),
                context.notifier.notify_queued,
                context.metrics.ordering_repaired.inc,
            ),
        ),
        TaskSpec(
            partition="upkeep/usage",
            every_s=intervals.usage_s,
            create=lambda context: FunctionTask(
                "the count of usage",
                partial(update_usage, context.engine, context.metrics, LogIndex()),
            ),
        ),
        TaskSpec(
            partition="upkeep/events",
            every_s=intervals.events_s,
            create=lambda context: OperationalEvents(
                context.events_writer,
                context.clock,
                IdGenerator(secrets.randbits),
                notify_queued=context.notifier.notify_queued,
            ),
        ),
    )


def _broker_tasks(intervals: TaskIntervals, broker: Broker) -> Sequence[TaskSpec]:
    return (
        TaskSpec(
            partition="upkeep/recovery",
            every_s=intervals.recovery_s,
            create=lambda context: BrokerRecovery(
                ResendQueries(context.slow_writer),
                broker,
                context.clock,
                context.notifier.notify_queued,
                job_queue=context.job_queue,
                short_queue_s=intervals.short_queue_s,
            ),
        ),
        _function_task(
            "upkeep/queues",
            "cleanup of broker queues",
            intervals.broker_queues_s,
            lambda context, go_on: delete_orphan_queues(context.slow_writer, broker, go_on),
        ),
        _function_task(
            "upkeep/broker",
            "broker metrics",
            intervals.broker_metrics_s,
            lambda context, go_on: update_broker_metrics(
                context.slow_writer, broker, context.metrics, go_on
            ),
        ),
        *(() if broker.users is None else _native_tasks(intervals, broker.users)),
    )


def _native_tasks(intervals: TaskIntervals, users: BrokerUsers) -> Sequence[TaskSpec]:
    return (
        TaskSpec(
            partition="upkeep/gates",
            every_s=intervals.broker_users_s,
            create=lambda context: BrokerUserSync(context.slow_writer, users, context.clock),
        ),
        TaskSpec(
            partition="upkeep/dead-letters",
            every_s=intervals.dead_letters_s,
            create=lambda context: DeadLetterReader(
                context.slow_writer, users, context.metrics.count_native_dead_letters
            ),
        ),
    )


async def run_tasks(
    *,
    database_url: str,
    election: Election,
    clock: Clock,
    stop: asyncio.Event,
    broker: Broker | None = None,
    broker_mode: BrokerMode = POSTGRES_MODE,
    remove_external: RemoveExternal | None = None,
    extra_tasks: Sequence[TaskSpec] = (),
    intervals: TaskIntervals = _DEFAULT_INTERVALS,
    metrics: Metrics | None = None,
    destination: str | None = None,
) -> None:
    """Run the tasks of the partitions that this process is assigned, until `stop` is set.

    Outages of PostgreSQL, the election and the broker are waited out. `broker`: the external one,
    if any; `remove_external`: see `DeleteJob`; `extra_tasks`: tasks of other packages;
    `destination`: the log is exported there before it is deleted with its room.
    """
    specs = (*all_tasks(intervals, broker, remove_external), *extra_tasks)
    schema_logged = False
    async with election.join([spec.partition for spec in specs]) as membership:
        while not stop.is_set():
            try:
                async with _task_context(
                    database_url, clock, broker_mode, metrics or Metrics(), destination
                ) as context:
                    schema_logged = False
                    OUTAGES.record_success(_START_OUTAGE)
                    await _run_all(
                        specs,
                        context,
                        membership,
                        stop,
                        due_s=None if broker is None else intervals.due_s,
                    )
            except TransientError as exc:
                OUTAGES.record_failure(exc, _START_OUTAGE)
                await wait_first(stop.wait(), timeout_s=intervals.retry_s)
            # Another process runs the migration that creates the missing tables.
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as exc:
                if not schema_logged:
                    _log.warning(
                        "maintenance waits for this version's schema; run `rooms migrate`: %s", exc
                    )
                    schema_logged = True
                await wait_first(stop.wait(), timeout_s=intervals.retry_s)


@asynccontextmanager
async def _task_context(
    url: str,
    clock: Clock,
    broker_mode: BrokerMode,
    metrics: Metrics,
    destination: str | None,
) -> AsyncIterator[TaskContext]:
    async with AsyncExitStack() as stack:
        fast = await stack.enter_async_context(
            LogWriter(url, kind="upkeep", broker_mode=broker_mode)
        )
        slow = await stack.enter_async_context(
            LogWriter(url, kind="chores", broker_mode=broker_mode)
        )
        events = await stack.enter_async_context(
            LogWriter(url, kind="events", broker_mode=broker_mode)
        )
        notifier = await stack.enter_async_context(Notifier(url, broker_mode=broker_mode))
        engine = open_engine(url, name="rooms upkeep queries", size=2, lock_timeout_s=5)
        stack.push_async_callback(engine.dispose)
        sandbox = await stack.enter_async_context(
            CheckSandbox(
                processes=1,
                cpu_ms=_FILTER_CPU_MS,
                memory_bytes=_FILTER_MEMORY_BYTES,
                metrics=metrics,
            )
        )
        yield TaskContext(
            fast_writer=fast,
            slow_writer=slow,
            events_writer=events,
            job_queue=JobQueue(slow, memory_s=OPEN_KINDS_MEMORY_S),
            destination=destination,
            notifier=notifier,
            engine=engine,
            clock=clock,
            metrics=metrics,
            sandbox=sandbox,
        )


async def _run_all(
    specs: Sequence[TaskSpec],
    context: TaskContext,
    membership: Membership,
    stop: asyncio.Event,
    *,
    due_s: float | None,
) -> None:
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(_run_terms(spec, context, membership, stop)) for spec in specs]
        if due_s is not None:
            others = [spec.partition for spec in specs]
            scheduler = DueScheduler(
                context.fast_writer, context.notifier.notify_queued, membership, others
            )
            loops.append(
                group.create_task(run_periodically(scheduler, every_s=due_s, window=Always(stop)))
            )
        await stop.wait()
        _, late = await asyncio.wait(loops, timeout=SHUTDOWN_GRACE_S)
        for task in late:
            task.cancel()


async def _run_terms(
    spec: TaskSpec, context: TaskContext, membership: Membership, stop: asyncio.Event
) -> None:
    while (term := await next_term(membership, spec.partition, stop)) is not None:
        _log.info("%s is assigned to this process, epoch %d", spec.partition, term.epoch)
        async with term:
            await run_periodically(
                spec.create(replace(context, epoch=term.epoch)), every_s=spec.every_s, window=term
            )
