"""The upkeep process."""

import asyncio
from contextlib import AsyncExitStack

from delivery.elections import open_election
from rooms.brokers import open_broker
from rooms.clock import SystemClock
from rooms.composition.process import member_name, run, stopped_by_signals
from rooms.settings import Settings
from rooms.upkeep.service import keep


def run_upkeep(settings: Settings, database_url: str) -> None:
    """Do this process's share of the upkeep until SIGTERM or SIGINT."""
    run(_keep(settings, database_url), settings)


async def _keep(settings: Settings, database_url: str) -> None:
    stop = asyncio.Event()
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        election = await stack.enter_async_context(
            open_election(
                settings.election_url or database_url, client=settings.client, member=member_name(), clock=clock
            )
        )
        broker = None
        if settings.relayed and settings.broker_url is not None:
            broker = await stack.enter_async_context(
                open_broker(settings.broker_url, claim_s=settings.claim_s, farm=settings.farm, client=settings.client)
            )
        with stopped_by_signals(stop.set):
            await keep(
                database_url=database_url,
                election=election,
                clock=clock,
                stop=stop,
                broker=broker,
                shape=settings.shape,
            )
