"""The upkeep process."""

import asyncio

from rooms.clock import SystemClock
from rooms.composition.process import run, stopped_by_signals
from rooms.settings import Settings
from rooms.upkeep.service import keep


def run_upkeep(settings: Settings, database_url: str) -> None:
    """Do the upkeep, or stand by while another process does, until SIGTERM or SIGINT."""
    run(_keep(database_url), settings)


async def _keep(database_url: str) -> None:
    stop = asyncio.Event()
    with stopped_by_signals(stop.set):
        await keep(database_url=database_url, clock=SystemClock(), stop=stop)
