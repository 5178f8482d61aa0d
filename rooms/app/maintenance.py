"""Run the maintenance process, and preview what its retention would delete."""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack

from delivery.handlers.tasks import QueueTasks
from delivery.leadership import open_election
from delivery.maintenance.age_limits import (
    journal_retention_specs,
    request_retention_specs,
    usage_retention_specs,
)
from delivery.maintenance.retention import (
    RetentionPreview,
    RetentionRules,
    preview,
    retention_specs,
)
from delivery.maintenance.service import TaskSpec, run_tasks
from delivery.sideline.magazines import sideline_magazine_name
from delivery.sideline.tasks import SidelineTasks
from rooms.app.maintenance_jobs import analysis_tasks, check_tasks
from rooms.app.process import StopHook, member_name, run, stop_on_signals
from rooms.app.stores import open_own_broker, open_own_magazines, process_registration
from rooms.clock import BootTimeClock, SystemClock
from rooms.domain.ids import SubscriptionId
from rooms.metrics import Metrics
from rooms.ports import Clock
from rooms.settings import Settings

_log = logging.getLogger(__name__)


def run_maintenance(settings: Settings, database_url: str) -> None:
    """Run this process's share of maintenance until SIGTERM or SIGINT."""
    run(
        "upkeep",
        lambda metrics: serve_maintenance(settings, database_url, metrics=metrics),
        settings,
        database_url,
    )


async def serve_maintenance(
    settings: Settings,
    database_url: str,
    *,
    stop_hook: StopHook = stop_on_signals,
    metrics: Metrics | None = None,
) -> None:
    """Run this process's share until `stop_hook` stops it; counters go to `metrics`."""
    stop = asyncio.Event()
    clock = SystemClock()
    metrics = metrics or Metrics()
    async with AsyncExitStack() as stack:
        election = await stack.enter_async_context(
            open_election(
                settings.election_url or database_url,
                client=settings.client,
                member=member_name(),
                clock=BootTimeClock(),
            )
        )
        broker = None
        if settings.uses_relay and settings.broker_url is not None:
            broker = await stack.enter_async_context(open_own_broker(settings, settings.broker_url))
        magazines = await stack.enter_async_context(open_own_magazines(settings, database_url))
        await stack.enter_async_context(process_registration(settings, database_url, "upkeep"))

        async def release_subscription(subscription: SubscriptionId) -> bool:
            if broker is not None:
                if broker.users is not None:
                    await broker.users.remove(subscription)  # or its readers would keep the queue
                if not await broker.delete_queue(subscription):
                    return False
            await magazines.drop(sideline_magazine_name(subscription))
            return True

        exporting, destination = export_tasks(settings, database_url, metrics)
        with stop_hook(stop.set):
            await run_tasks(
                database_url=database_url,
                election=election,
                clock=clock,
                stop=stop,
                broker=broker,
                broker_mode=settings.broker_mode,
                remove_external=release_subscription,
                metrics=metrics,
                destination=destination if settings.export_s else None,
                extra_tasks=(
                    *SidelineTasks(magazines, metrics).task_specs(),
                    *QueueTasks(magazines, metrics).task_specs(),
                    *check_tasks(settings, database_url, destination),
                    *analysis_tasks(os.environ, database_url),
                    *exporting,
                    *retention_tasks(settings, database_url, destination, clock, metrics),
                    *journal_retention_specs(settings.journal_retention_days),
                    *usage_retention_specs(settings.usage_retention_days),
                    *request_retention_specs(),
                ),
            )


def retention_tasks(
    settings: Settings, database_url: str, destination: str | None, clock: Clock, metrics: Metrics
) -> Sequence[TaskSpec]:
    """Return retention, unless everything is kept.

    `destination`: the log must have been exported there before it is deleted.
    """
    if not settings.retention_days:
        return ()
    rules = RetentionRules(days=settings.retention_days, destination=destination)
    return retention_specs(database_url, rules, clock, metrics)


def export_tasks(
    settings: Settings, database_url: str, metrics: Metrics
) -> tuple[Sequence[TaskSpec], str | None]:
    """Return the export of the log and the name of its destination, where it is configured.

    Everything else continues where export is impossible; rows that were not exported are kept even
    then.
    """
    if not settings.export_s:
        return (), None
    url = f"{settings.analysis_location}/segments"
    try:
        from delivery.analytics.export.exporter import export_task_specs
        from delivery.analytics.export.segments import Destination, ExportError
    except ImportError as exc:
        _log.error(
            "the log is not exported, and rooms are not deleted: ROOMS_EXPORT_S needs the extra "
            "`spark`, %s",
            exc,
        )
        return (), url
    try:
        tasks = export_task_specs(
            database_url, url, every_s=float(settings.export_s), metrics=metrics
        )
        return tasks, Destination(url).name
    except ExportError as exc:
        _log.error("the log is not exported, and rooms are not deleted: %s", exc)
        return (), url


def preview_retention(
    settings: Settings, database_url: str, *, days: int | None = None
) -> Sequence[RetentionPreview]:
    """Return what is older than `days` (None: by the settings) and what would happen to it.

    Empty where everything is kept. StorageUnavailableError.
    """
    days = settings.retention_days if days is None else days
    if not days:
        return ()
    _, destination = export_tasks(settings, database_url, Metrics())
    return asyncio.run(preview(database_url, days=days, destination=destination))
