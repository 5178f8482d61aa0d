"""The relay's process."""

import asyncio

from rooms.brokers import open_broker
from rooms.clock import SystemClock
from rooms.composition.process import run, stopped_by_signals
from rooms.metrics import Metrics
from rooms.relaying.service import relay
from rooms.settings import Settings


def run_relay(settings: Settings, database_url: str) -> None:
    """Take copies from the outbox to the broker until SIGTERM or SIGINT, then let what is under way end."""
    run(_relay(settings, database_url), settings)


async def _relay(settings: Settings, database_url: str) -> None:
    stop = asyncio.Event()
    async with open_broker(
        settings.broker_url or database_url, claim_s=settings.claim_s, farm=settings.farm, client=settings.client
    ) as broker:
        with stopped_by_signals(stop.set):
            await relay(database_url=database_url, broker=broker, clock=SystemClock(), metrics=Metrics(), stop=stop)
