"""A broker's queue, open while polls wait at it.

    closed ──a poll waits──► opening ◄──broker away, queue not made yet──┐
       ▲                        └──────► open ───────────────────────────┘
       └──────── no poll waits, subscription paused or gone ────┘

Whatever it holds that nobody has leased goes back to the queue when it closes.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from rooms.domain.copy import Copy
from rooms.errors import BrokerUnavailableError
from rooms.ports import Consumer

_log = logging.getLogger(__name__)

GATHER_S: Final = 0.02
"""How long copies gather that are known to wait in the queue when it is opened."""
SHORTEST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
_GOODBYE_S: Final = 2.0


class Tap:
    """One queue's copies, as they come. `arrived` is called whenever there are some to draw."""

    def __init__(
        self,
        consume: Callable[[], Consumer],
        *,
        credit: int,
        expected: int,
        arrived: Callable[[], None],
        after: "asyncio.Task[None] | None",
    ) -> None:
        """`consume` gives a new consumer of `credit`; `expected`: so many copies wait there; `after`: what to wait for
        before it opens.
        """
        self.credit = credit
        self.away: BrokerUnavailableError | None = None
        """Why nothing comes just now."""
        self._consume = consume
        self._expected = expected
        self._arrived = arrived
        self._copies: list[Copy] = []
        self._consumer: Consumer | None = None
        self._gathering: asyncio.TimerHandle | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self._poked = asyncio.Event()
        self._task = asyncio.create_task(self._run(after))

    def draw(self, most: int, most_bytes: int) -> list[Copy]:
        """Up to so many copies, the highest priority first; one at least, however large, if there is any."""
        copies = sorted(self._copies, key=lambda copy: -copy.priority)
        size = count = 0
        for copy in copies[:most]:
            size += len(copy.payload)
            if count and size > most_bytes:
                break
            count += 1
        self._copies = copies[count:]
        return copies[:count]

    def settle(self, copies: Sequence[Copy]) -> None:
        """They were leased, or are of steps that are over: they need not come again. If they do, nothing is lost."""
        if (consumer := self._consumer) is None:
            return

        async def settle() -> None:
            with suppress(BrokerUnavailableError):
                await consumer.settle(copies)

        task = asyncio.create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def poke(self) -> None:
        """There is something in the queue: if it could not be opened, try again."""
        self._poked.set()

    def close(self) -> "asyncio.Task[None]":
        """Take no more; the task ends when everything has been given back."""
        self._task.cancel()
        return self._task

    async def _run(self, after: "asyncio.Task[None] | None") -> None:
        if after is not None:
            await asyncio.wait({after}, timeout=_GOODBYE_S)
        pause_s = SHORTEST_PAUSE_S
        while True:
            begun = asyncio.get_running_loop().time()
            try:
                await self._take()
            except BrokerUnavailableError as exc:
                self.away = exc
            except Exception as exc:  # noqa: BLE001 - polls must not wait for a task that is dead
                _log.exception("a queue's consumer broke")
                self.away = BrokerUnavailableError(str(exc))
            self._poked.clear()
            if asyncio.get_running_loop().time() - begun > LONGEST_PAUSE_S:
                pause_s = SHORTEST_PAUSE_S
            await asyncio.sleep(SHORTEST_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._poked.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _take(self) -> None:
        async with self._consume() as consumer:
            self._consumer, self.away = consumer, None
            try:
                async for batch in consumer.batches():
                    self._copies += batch
                    self._gather()
            finally:
                self._consumer = None
                self._copies.clear()
                self._stop_gathering()
                if self._settling:
                    await asyncio.wait(self._settling, timeout=_GOODBYE_S)

    def _gather(self) -> None:
        if len(self._copies) >= self._expected:
            self._ring()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self._ring)

    def _ring(self) -> None:
        self._expected = 0
        self._stop_gathering()
        self._arrived()

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
