"""A broker's queue, open while polls wait at it.

    opening ──► open ──no poll waits──► idle ──a copy comes, or its time is up──► closed
       │         │ ▲                     │                                          ▲
       │         │ └─────a poll waits────┘                                          │
       └─────────┴───────broker away, subscription paused or gone───────────────────┘

One that is opening is idle, too, while no poll waits: polls that are shorter than a slow broker's opening get something
in the end, instead of one opening after another in vain.

Whatever it holds that nobody has leased goes back to the queue when it closes. A tap is opened once: what closed is
followed by another one.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from rooms.domain.copy import Copy
from rooms.errors import BrokerUnavailableError
from rooms.ports import Consumer, Unreadable
from rooms.pulling.queue import Key

_log = logging.getLogger(__name__)

GATHER_S: Final = 0.02
"""How long copies gather that are known to wait in the queue when it is opened."""
IDLE_S: Final = 1.0
"""How long a tap that holds nothing stays open for the next poll."""
MOST_S: Final = 1.0
"""What is not due yet is asked about again after so long at the latest: its due time may be moved."""
_GOODBYE_S: Final = 2.0


class Owner(Protocol):
    """Who a tap tells what happens. Nothing of it may block."""

    def arrived(self, tap: "Tap") -> None:
        """There are copies to draw."""
        ...

    def strange(self, tap: "Tap", messages: Sequence[Unreadable]) -> None:
        """These are no copies; they are to be discarded when they are recorded elsewhere."""
        ...

    def ended(self, tap: "Tap") -> None:
        """It closes: its broker is away, or nobody has wanted what it holds."""
        ...


class Tap:
    """One queue's copies, as they come."""

    def __init__(
        self,
        key: Key,
        consumer: Consumer,
        owner: Owner,
        *,
        credit: int,
        expected: int,
        after: "asyncio.Task[None] | None",
    ) -> None:
        """`consumer` has so much `credit` and is not entered yet; `expected`: so many copies wait in its queue; `after`:
        what to wait for before it is entered.
        """
        self.key = key
        self.credit = credit
        self.away: BrokerUnavailableError | None = None
        """Why it ended, where the broker was the reason."""
        self._consumer = consumer
        self._owner = owner
        self._expected = expected
        self._copies: list[Copy] = []
        self._drawn = 0
        self._gathering: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._closing = False
        self.task = asyncio.create_task(self._run(after))
        """Ends when everything has been given back."""

    @property
    def holds(self) -> bool:
        """Whether there are copies that nobody has drawn."""
        return bool(self._copies)

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
        self._drawn += count
        return copies[:count]

    def settle(self, copies: Sequence[Copy]) -> None:
        """Drawn copies were leased, or are of steps that are over: they need not come again. If they do, nothing is lost."""
        self._drawn -= len(copies)
        if not self.task.done():
            self._tell(self._consumer.settle(copies))

    def offer_again(self, copies: Sequence[Copy], *, after_s: float) -> None:
        """Drawn copies could not be leased yet: they come again after so long, or to somebody else when this closes."""
        asyncio.get_running_loop().call_later(min(after_s, MOST_S), self._release, copies)

    def _release(self, copies: Sequence[Copy]) -> None:
        self._drawn -= len(copies)
        if not self.task.done():
            self._tell(self._consumer.release(copies))

    def discard(self, messages: Sequence[Unreadable]) -> None:
        """These are recorded elsewhere."""
        if not self.task.done():
            self._tell(self._consumer.discard(messages))

    def use(self) -> None:
        """A poll waits for what comes."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def leave(self) -> None:
        """No poll waits any more: what it holds goes back at once. One that is not open yet goes on with it: where that takes
        longer than a poll, it is open for the next one.
        """
        if self._copies or self._drawn:
            self.close()
        elif self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.close)

    def close(self) -> None:
        """Take no more, and give everything back."""
        if not self._closing:
            self._closing = True
            self.task.cancel()

    def _tell(self, message: Coroutine[Any, Any, None]) -> None:
        async def tell() -> None:
            with suppress(BrokerUnavailableError):
                await message

        task = asyncio.create_task(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _run(self, after: "asyncio.Task[None] | None") -> None:
        try:
            if after is not None:
                await asyncio.wait({after}, timeout=_GOODBYE_S)
            async with self._consumer:
                try:
                    await self._take()
                finally:
                    self._owner.ended(self)
                    self._rest()
                    if self._telling:
                        await asyncio.wait(self._telling, timeout=_GOODBYE_S)
        except BrokerUnavailableError as exc:
            self.away = None if self._closing else exc
        except Exception as exc:  # noqa: BLE001 - polls must not wait for a task that is dead
            _log.exception("a queue's consumer broke")
            self.away = BrokerUnavailableError(str(exc))
        finally:
            self._owner.ended(self)

    async def _take(self) -> None:
        async for batch in self._consumer.batches():
            if strange := self._consumer.unreadable():
                self._owner.strange(self, strange)
            if batch and self._idle is not None:
                return
            self._copies += batch
            if len(self._copies) >= max(1, self._expected):
                self._ring()
            elif self._copies and self._gathering is None:
                self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self._ring)

    def _ring(self) -> None:
        self._expected = 0
        self._stop_gathering()
        self._owner.arrived(self)

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _rest(self) -> None:
        self._copies = []
        self._stop_gathering()
        self.use()
