"""Copies that another broker has of messages which were leased from their rows: they are over, and have to go.

A copy of a step that is over hurts nobody, but where a queue is only ever read by selector nobody would take it out.
So the first copies of such a queue are looked at now and then: those that are over are settled, the others go back.
"""

import asyncio
from contextlib import suppress
from typing import Final

from rooms.errors import RoomsError
from rooms.outages import OUTAGES
from rooms.ports import Broker
from rooms.pulling.queue import Key
from rooms.storage.copy_leases import over
from rooms.storage.writer import Writer

_UNDRAINED: Final = "tries to clear ended copies out of the broker failed"
EVERY_S: Final = 5.0
CREDIT: Final = 1000
"""So many copies are looked at: those behind them wait until the first ones are taken, or are over."""
QUIET_S: Final = 0.5
"""When nothing more came for so long, everything has come."""


class Drain:
    """Takes out of queues what is over. Leaving waits for what is under way."""

    def __init__(self, broker: Broker, writer: Writer) -> None:
        self._broker = broker
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Key, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def spent(self, key: Key) -> None:
        """Copies of this queue are over."""
        if key not in self._waiting:
            self._waiting[key] = self._loop.call_later(EVERY_S, self._begin, key)

    async def finish(self) -> None:
        """End what is under way; copies that are over may be left."""
        for timer in self._waiting.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def drain(self, key: Key) -> int:
        """Settle what is over among the first copies of a queue; how many that were."""
        settled = 0
        consumer = self._broker.consume(credit=CREDIT, subscription=key.subscription)
        async with consumer:
            batches = consumer.batches()
            with suppress(TimeoutError, StopAsyncIteration):
                while True:
                    async with asyncio.timeout(QUIET_S):
                        copies = await anext(batches)
                    done = await over(self._writer, copies)
                    await consumer.settle(done)
                    settled += len(done)
        return settled

    def _begin(self, key: Key) -> None:
        del self._waiting[key]
        task = asyncio.create_task(self._told(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _told(self, key: Key) -> None:
        try:
            await self.drain(key)
        except RoomsError as exc:
            OUTAGES.failed(exc, _UNDRAINED)
            self.spent(key)
        else:
            OUTAGES.succeeded(_UNDRAINED)
