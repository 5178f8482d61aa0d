"""Run the push worker's process."""

import asyncio
from contextlib import AsyncExitStack
from typing import Final, cast

from delivery.push.broker_intake import BrokerIntake
from delivery.push.http.client import HttpSender
from delivery.push.http.connection import HttpLimits
from delivery.push.http.ssrf import target_policy
from delivery.push.process import run_push
from delivery.push.sandbox.client import SandboxClient
from delivery.push.sandbox.process import SandboxProcess
from delivery.push.task_source import TaskSource
from rooms.app.file_limit import FileNeed, allot_connections
from rooms.app.process import StopHook, run, stop_on_signals
from rooms.app.stores import open_checked_cipher, open_own_broker, process_registration
from rooms.clock import SystemClock
from rooms.metrics import Metrics
from rooms.settings import Settings

MAX_CONNECTIONS: Final = 8192
"""The webhook connections of one worker, where the system allows as many."""
FILE_NEED: Final = FileNeed(MAX_CONNECTIONS, spare=128)


def run_worker(settings: Settings, database_url: str) -> None:
    """Attempt PUSH deliveries until SIGTERM or SIGINT, then complete and commit the rest."""
    run(
        "worker",
        lambda metrics: serve_worker(settings, database_url, metrics=metrics),
        settings,
        database_url,
    )


async def serve_worker(
    settings: Settings,
    database_url: str,
    *,
    stop_hook: StopHook = stop_on_signals,
    metrics: Metrics | None = None,
    connections: int | None = None,
) -> None:
    """Attempt until `stop_hook` stops it; `metrics` may be shared by several parts.

    `connections`: its share of those of the process; None: it has the process for itself.
    """
    stop = asyncio.Event()
    metrics = metrics or Metrics()
    if connections is None:
        (connections,) = allot_connections(FILE_NEED)
    limits = HttpLimits(
        max_connections=connections,
        max_per_organisation=settings.organisation_connections or max(1, connections // 4),
        max_per_endpoint=settings.endpoint_connections or max(1, connections // 8),
        max_idle_per_host=max(1, connections // 4),
    )

    cipher = await open_checked_cipher(settings, database_url)
    clock = SystemClock()
    policy = target_policy(settings)
    async with AsyncExitStack() as stack:
        guard = stack.enter_context(
            policy.open_guard(observe=metrics.count_name_lookup, on_wait=metrics.count_lookup_wait)
        )
        sender = await stack.enter_async_context(
            HttpSender(
                guard,
                limits=limits,
                on_wait=metrics.count_connection_wait,
                on_shortage=lambda cause: metrics.webhook_shortages.labels(cause).inc(),
            )
        )
        isolated = await stack.enter_async_context(
            SandboxClient(
                create_sandbox=lambda: SandboxProcess(policy, monotonic=clock.monotonic),
                fallback=sender,
                clock=clock,
            )
        )
        broker = await stack.enter_async_context(
            open_own_broker(
                settings,
                settings.broker_url or database_url,
                on_rest=metrics.bulk_rests.labels("claim").inc,
            )
        )
        await stack.enter_async_context(
            process_registration(settings, database_url, "worker", cipher=cipher)
        )
        with stop_hook(stop.set):
            await run_push(
                database_url=database_url,
                task_source=cast("TaskSource", broker)
                if broker.is_outbox
                else BrokerIntake(
                    broker,
                    database_url,
                    claim_s=settings.claim_ttl_s,
                    on_orphans=metrics.count_orphans,
                ),
                sender=sender,
                cipher=cipher,
                clock=clock,
                metrics=metrics,
                slots=settings.lane_concurrency,
                sandbox=isolated if settings.sandbox_after_crashes else None,
                sandbox_after_crashes=settings.sandbox_after_crashes,
                broker_mode=settings.broker_mode,
                stop=stop,
            )
