"""Keep one queue of an external broker open while polls wait at it.

    opening ──► open ──no poll waits──► idle ──a copy comes, or the time is up──► closed
       │         │ ▲                     │                                          ▲
       │         │ └─────a poll waits────┘                                          │
       └─────────┴─broker unavailable, subscription paused or deleted───────────────┘

A consumer that is still opening is idle, too, while no poll waits. Otherwise polls shorter than a
slow broker's opening would get nothing, however often they come.

When it closes, all copies that were not leased go back to the queue. A consumer is opened once; a
closed one is replaced.
"""

import asyncio
import logging
import math
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from delivery.pull.target import PullTarget
from rooms.domain.delivery_task import DeliveryTask
from rooms.errors import BrokerUnavailableError
from rooms.ports import Consumer, MalformedMessage

_log = logging.getLogger(__name__)

LINGER_S: Final = 0.02
"""The time to collect copies that are known to wait in the queue when it is opened."""
IDLE_TIMEOUT_S: Final = 1.0
"""The time for which a consumer that holds nothing stays open for the next poll."""
MAX_RELEASE_DELAY_S: Final = 1.0
"""The longest time until copies that are not due yet are checked again; that may change."""
AWAIT_COPIES_S: Final = 1.0
"""The time after opening in which copies that are known to wait may still come."""
_CLOSE_TIMEOUT_S: Final = 2.0


class ConsumerOwner(Protocol):
    """Receive the events of a consumer. No method may block."""

    def on_copies(self, consumer: "BrokerConsumer") -> None:
        """Lease the copies that have come."""
        ...

    def on_malformed(
        self, consumer: "BrokerConsumer", messages: Sequence[MalformedMessage]
    ) -> None:
        """Record these messages elsewhere, then discard them; they are not copies."""
        ...

    def on_end(self, consumer: "BrokerConsumer") -> None:
        """Forget the consumer: its broker is unavailable, or no poll wanted what it holds."""
        ...


class BrokerConsumer:
    """Hold the copies of one queue as they come."""

    def __init__(
        self,
        key: PullTarget,
        consumer: Consumer,
        owner: ConsumerOwner,
        *,
        credit: int,
        expected: int,
        after: "Collection[asyncio.Task[None]]",
    ) -> None:
        """Open a consumer that has `credit` and is not entered yet.

        `expected` copies wait in its queue. It is entered when all of `after` have ended.
        """
        self.key = key
        self.credit = credit
        self.broker_error: BrokerUnavailableError | None = None
        """The broker's error, if that ended it."""
        self._consumer = consumer
        self._owner = owner
        self._expected = expected
        self._await_until = math.inf
        self._copies: list[DeliveryTask] = []
        self._taken_count = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._sends: set[asyncio.Task[None]] = set()
        self._closing = False
        self.task = asyncio.create_task(self._run(after))
        """Ends when everything was given back."""

    @property
    def has_copies(self) -> bool:
        """Return whether there are copies that were not taken."""
        return bool(self._copies)

    @property
    def holds_copies(self) -> bool:
        """Return whether copies are here that are not settled, taken or not."""
        return bool(self._copies or self._taken_count)

    @property
    def is_idle(self) -> bool:
        """Return whether it holds nothing, and nothing is known to be on its way to it."""
        awaits = self._expected and asyncio.get_running_loop().time() < self._await_until
        return not (self.holds_copies or awaits)

    def take(self, max_copies: int, max_bytes: int) -> list[DeliveryTask]:
        """Return up to so many copies, the highest priority first; at least one, however large."""
        copies = sorted(self._copies, key=lambda copy: -copy.priority)
        size = count = 0
        for copy in copies[:max_copies]:
            size += len(copy.payload)
            if count and size > max_bytes:
                break
            count += 1
        self._copies = copies[count:]
        self._taken_count += count
        return copies[:count]

    def settle(self, copies: Sequence[DeliveryTask]) -> None:
        """Settle taken copies that were leased or are outdated.

        If the broker does not learn of it they come again, which does no harm.
        """
        self._taken_count -= len(copies)
        if not self.task.done():
            self._send(self._consumer.settle(copies))

    def release_later(self, copies: Sequence[DeliveryTask], *, after_s: float) -> None:
        """Give taken copies back after a while, because they could not be leased yet.

        They go to another process if this consumer closes first.
        """
        asyncio.get_running_loop().call_later(
            min(after_s, MAX_RELEASE_DELAY_S), self._release, copies
        )

    def _release(self, copies: Sequence[DeliveryTask]) -> None:
        self._taken_count -= len(copies)
        if not self.task.done():
            self._send(self._consumer.release(copies))

    def discard(self, messages: Sequence[MalformedMessage]) -> None:
        """Discard messages that are recorded elsewhere."""
        if not self.task.done():
            self._send(self._consumer.discard(messages))

    def on_poll(self) -> None:
        """Stay open, because a poll waits."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def on_no_polls(self) -> None:
        """Give back what it holds, because no poll waits any more.

        A consumer that is still opening goes on, so that it is open for the next poll.
        """
        if self.holds_copies:
            self.close()
        elif self._idle_timer is None:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_TIMEOUT_S, self.close)

    def close(self) -> None:
        """Take no more, and give everything back."""
        if not self._closing:
            self._closing = True
            self.task.cancel()

    def give_back(self) -> None:
        """Close at once: its copies go back, and come again to the next consumer of the queue."""
        if not self.task.done():
            self.close()
            self._owner.on_end(self)

    def _send(self, message: Coroutine[Any, Any, None]) -> None:
        async def send() -> None:
            with suppress(BrokerUnavailableError):
                await message

        task = asyncio.create_task(send())
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _run(self, after: "Collection[asyncio.Task[None]]") -> None:
        try:
            if after:
                await asyncio.wait(after, timeout=_CLOSE_TIMEOUT_S)
            async with self._consumer:
                self._await_until = asyncio.get_running_loop().time() + AWAIT_COPIES_S
                try:
                    await self._receive()
                finally:
                    self._owner.on_end(self)
                    self._discard_state()
                    if self._sends:
                        await asyncio.wait(self._sends, timeout=_CLOSE_TIMEOUT_S)
        except BrokerUnavailableError as exc:
            self.broker_error = None if self._closing else exc
        except Exception as exc:  # noqa: BLE001 - polls must not wait for a task that is dead
            _log.exception("the consumer of a queue failed")
            self.broker_error = BrokerUnavailableError(str(exc))
        finally:
            self._owner.on_end(self)

    async def _receive(self) -> None:
        async for batch in self._consumer.batches():
            if malformed := self._consumer.take_malformed():
                self._owner.on_malformed(self, malformed)
            if batch and self._idle_timer is not None:
                return
            self._copies += batch
            if len(self._copies) >= max(1, self._expected):
                self._notify_owner()
            elif self._copies and self._linger_timer is None:
                self._linger_timer = asyncio.get_running_loop().call_later(
                    LINGER_S, self._notify_owner
                )

    def _notify_owner(self) -> None:
        self._expected = 0
        self._stop_linger()
        self._owner.on_copies(self)

    def _stop_linger(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _discard_state(self) -> None:
        self._copies = []
        self._stop_linger()
        self.on_poll()
