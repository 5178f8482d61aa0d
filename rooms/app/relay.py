"""Run the relay's process."""

import asyncio

from delivery.relay.relay import relay_until_stopped
from rooms.app.process import StopHook, run, stop_on_signals
from rooms.app.stores import open_own_broker, process_registration
from rooms.clock import SystemClock
from rooms.metrics import Metrics
from rooms.settings import Settings


def run_relay(settings: Settings, database_url: str) -> None:
    """Move copies from the outbox to the broker until SIGTERM or SIGINT, then complete the rest."""
    run(
        "relay",
        lambda metrics: serve_relay(settings, database_url, metrics=metrics),
        settings,
        database_url,
    )


async def serve_relay(
    settings: Settings,
    database_url: str,
    *,
    stop_hook: StopHook = stop_on_signals,
    metrics: Metrics | None = None,
) -> None:
    """Relay until `stop_hook` stops it; counters go to `metrics`, which several parts may share."""
    stop = asyncio.Event()
    async with (
        open_own_broker(settings, settings.broker_url or database_url) as broker,
        process_registration(settings, database_url, "relay"),
    ):
        with stop_hook(stop.set):
            await relay_until_stopped(
                database_url=database_url,
                broker=broker,
                clock=SystemClock(),
                metrics=metrics or Metrics(),
                stop=stop,
            )
