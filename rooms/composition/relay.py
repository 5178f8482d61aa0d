"""The relay's process."""

import asyncio

from rooms.brokers import open_broker
from rooms.clock import SystemClock
from rooms.composition.process import Told, run, stopped_by_signals
from rooms.composition.registration import registered
from rooms.metrics import Metrics
from rooms.relaying.service import relay
from rooms.settings import Settings


def run_relay(settings: Settings, database_url: str) -> None:
    """Take copies from the outbox to the broker until SIGTERM or SIGINT, then let what is under way end."""
    run("relay", lambda metrics: relay_copies(settings, database_url, metrics=metrics), settings, database_url)


async def relay_copies(
    settings: Settings, database_url: str, *, told: Told = stopped_by_signals, metrics: Metrics | None = None
) -> None:
    """Relay until `told`; counts go to `metrics`, where several share one process."""
    stop = asyncio.Event()
    async with (
        open_broker(
            settings.broker_url or database_url, claim_s=settings.claim_s, farm=settings.farm, client=settings.client
        ) as broker,
        registered(settings, database_url, "relay"),
    ):
        with told(stop.set):
            await relay(
                database_url=database_url,
                broker=broker,
                clock=SystemClock(),
                metrics=metrics or Metrics(),
                stop=stop,
            )
