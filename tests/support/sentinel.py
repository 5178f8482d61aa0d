"""A broker's sentinel in tests, and the recovery that its loss leads to."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from delivery.maintenance.resend import BrokerRecovery
from rooms.clock import SystemClock
from rooms.db.queue.resend import ResendQueries
from rooms.db.writer import LogWriter
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker

_PAUSE_S: Final = 0.2


async def put_sentinel(broker: Broker) -> None:
    """Prepare a sentinel and put it there at once."""
    assert await broker.put_sentinel(await broker.prepare_sentinel())


@asynccontextmanager
async def recovering(
    url: str, broker: Broker, notify: Callable[[], None] = lambda: None
) -> AsyncIterator[None]:
    """Send again what the broker loses during the block, as maintenance does."""
    async with LogWriter(url, kind="chores") as writer:
        recovery = BrokerRecovery(ResendQueries(writer), broker, SystemClock(), notify)
        over = asyncio.Event()

        async def run() -> None:
            while not over.is_set():
                with suppress(BrokerUnavailableError):
                    await recovery.run(lambda: not over.is_set())
                await asyncio.sleep(_PAUSE_S)

        running = asyncio.create_task(run())
        try:
            yield
        finally:
            over.set()
            await running
