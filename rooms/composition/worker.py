"""The push worker's process."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Final

from delivery.connections import Limits
from delivery.intake import Intake
from delivery.isolation.sender import IsolatedSender
from delivery.isolation.ward import Ward
from delivery.sender import HttpSender
from delivery.service import push
from rooms.brokers import open_broker
from rooms.clock import SystemClock
from rooms.composition.process import Told, raise_file_limit, run, stopped_by_signals
from rooms.composition.registration import registered
from rooms.composition.targets import target_policy
from rooms.domain.ids import IdMaker
from rooms.metrics import Metrics
from rooms.settings import Settings
from rooms.storage.sealing import Seal, read_key

MAX_CONNECTIONS: Final = 8192
"""Webhook connections of one worker, where the system lets it have as many."""
SPARE_FILES: Final = 128


def run_worker(settings: Settings, database_url: str) -> None:
    """Attempt PUSH deliveries until SIGTERM or SIGINT, then let what is under way end and commit it."""
    run("worker", lambda metrics: work(settings, database_url, metrics=metrics), settings, database_url)


async def work(
    settings: Settings, database_url: str, *, told: Told = stopped_by_signals, metrics: Metrics | None = None
) -> None:
    """Attempt until `told`; counts go to `metrics`, where several share one process."""
    stop = asyncio.Event()
    metrics = metrics or Metrics()
    connections = min(MAX_CONNECTIONS, raise_file_limit(MAX_CONNECTIONS + SPARE_FILES) - SPARE_FILES)
    limits = Limits(
        max_connections=connections,
        max_per_organisation=settings.organisation_connections or connections // 4,
        max_per_endpoint=settings.endpoint_connections or connections // 8,
        max_idle_per_host=connections // 4,
    )

    clock = SystemClock()
    policy = target_policy(settings)
    async with AsyncExitStack() as stack:
        guard = stack.enter_context(policy.open_guard(observe=metrics.looked_up, waited=metrics.waited_for_lookup))
        sender = await stack.enter_async_context(HttpSender(guard, limits=limits, waited=metrics.waited_for_connection))
        isolated = await stack.enter_async_context(
            IsolatedSender(start=lambda: Ward(policy), otherwise=sender, clock=clock)
        )
        broker = await stack.enter_async_context(
            open_broker(
                settings.broker_url or database_url,
                claim_s=settings.claim_s,
                farm=settings.farm,
                client=settings.client,
            )
        )
        await stack.enter_async_context(registered(settings, database_url, "worker"))
        with told(stop.set):
            await push(
                database_url=database_url,
                queue=broker
                if broker.claims
                else Intake(broker, database_url, claim_s=settings.claim_s, orphaned=metrics.orphaned),
                sender=sender,
                seal=Seal(read_key(settings.secret_key, settings.data)),
                clock=clock,
                ids=IdMaker(secrets.randbits),
                metrics=metrics,
                slots=settings.lane_concurrency,
                isolated=isolated if settings.isolate_after else None,
                isolate_after=settings.isolate_after,
                shape=settings.shape,
                stop=stop,
            )
