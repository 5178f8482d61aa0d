"""The consumers of one queue in one process: as many as the queue says, raised and lowered while they work (row B9)."""

import asyncio
import inspect
import logging
from collections.abc import Sequence
from typing import Final

from delivery.handlers.hand import Hand
from delivery.handlers.outcome import Outcome, Result, Why, failed, judge, timed_out
from delivery.handlers.pair import Pair
from delivery.handlers.registry import Handler, Message, message_of
from delivery.handlers.settler import Settler
from rooms.domain.magazine import MAX_BATCH, Slot, Stored
from rooms.domain.queue import Queue
from rooms.errors import MagazineMissingError, MagazineUnavailableError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Clock

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""A wake-up may be lost: look so often all the same."""


class Crew:
    """Fires no more than its free consumers can take at once, so that nothing waits in a process that may die.

    `run` until `stop`; then what is in a handler ends, and what waits for a batch to fill is handled as it is.
    """

    def __init__(
        self, queue: Queue, handler: Handler, pair: Pair, clock: Clock, metrics: Metrics, *, poll_s: float = POLL_S
    ) -> None:
        self.queue = queue
        self._handler = handler
        self._pair = pair
        self._clock = clock
        self._metrics = metrics
        self._poll_s = poll_s
        self._settler = Settler(pair)
        self._hands: list[Hand] = []
        self._waiting: list[Stored] = []
        self._first_at = 0.0
        self._busy: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._stopping = False
        self._missing = False
        self._unfired = f"looks into the queue {queue.store_name} failed"

    def follow(self, queue: Queue) -> None:
        """The queue has other settings: more consumers begin at once, fewer as soon as messages end."""
        self.queue = queue
        self._changed.set()

    def wake(self) -> None:
        """There may be something."""
        self._changed.set()

    def stop(self) -> None:
        """Take nothing more."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Until stopped and drained, or cancelled: then what is in hand is left to the sweeper. MagazineMissingError."""
        try:
            while not (self._stopping or self._missing):
                self._changed.clear()
                found = await self._fill()
                rest_s = self._dispatch()
                self._tell()
                if not found and rest_s > 0:
                    await self._rest(rest_s)
            while self._busy or (self._waiting and not self._missing):
                self._dispatch()
                if self._busy:
                    await asyncio.wait(self._busy, return_when=asyncio.FIRST_COMPLETED)
            if self._missing:
                raise MagazineMissingError(f"the magazines of {self.queue.store_name} are gone")
        finally:
            for task in self._busy:
                task.cancel()
            await asyncio.gather(*self._busy, return_exceptions=True)
            for hand in self._hands:
                hand.end()
            self._metrics.queue_busy.labels(self.queue.store_name).set(0)
            self._metrics.queue_consumers.labels(self.queue.store_name).set(0)

    @property
    def _size(self) -> int:
        batching = self.queue.settings.batching
        return batching.max_size if self._handler.batch and batching is not None else 1

    @property
    def _free(self) -> int:
        return self.queue.settings.concurrency - len(self._busy)

    async def _fill(self) -> bool:
        """Fire as many as can be taken; whether there were any."""
        wanted = min(MAX_BATCH, self._free * self._size - len(self._waiting))
        if wanted <= 0:
            return False
        try:
            fired = await self._pair.main.fire(wanted)
        except MagazineUnavailableError as exc:
            OUTAGES.failed(exc, self._unfired)
            return False
        except MagazineMissingError:
            self._missing = True
            return False
        OUTAGES.succeeded(self._unfired)
        if fired and not self._waiting:
            self._first_at = self._clock.monotonic()
        self._waiting += fired
        return bool(fired)

    def _dispatch(self) -> float:
        """Begin what can be begun; how long nothing more is to be done, in seconds."""
        size, batching = self._size, self.queue.settings.batching
        now_s = self._clock.monotonic()
        full_by = self._first_at + (0.0 if batching is None or size == 1 else batching.max_wait_ms / 1000)
        while self._waiting and self._free > 0:
            if len(self._waiting) < size and now_s < full_by and not self._stopping:
                return min(self._poll_s, full_by - now_s)
            group, self._waiting = self._waiting[:size], self._waiting[size:]
            self._first_at = now_s
            task = asyncio.create_task(self._consume(group, self._clock.monotonic()))
            self._busy.add(task)
            task.add_done_callback(self._ended)
        return self._poll_s

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        self._changed.set()
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, MagazineMissingError):
            self._missing = True
        elif error is not None:
            _log.error(
                "a consumer of %s broke; its messages are left to the sweeper", self.queue.store_name, exc_info=error
            )

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _consume(self, stored: Sequence[Stored], fired_at: float) -> None:
        readable, unreadable = self._read(stored)
        hand = None if inspect.iscoroutinefunction(self._handler.call) else self._hand()
        try:
            if unreadable:
                bad = Outcome(result=Result.SIDELINED, why=Why.UNREADABLE, detail="the body is no JSON")
                await self._settle([one for one, _ in unreadable], [bad] * len(unreadable), fired_at)
            if readable:
                await self._handle([one for one, _ in readable], [message for _, message in readable], hand, fired_at)
        finally:
            if hand is not None:
                self._hands.append(hand)

    def _hand(self) -> Hand:
        return self._hands.pop() if self._hands else Hand(f"handler {self.queue.store_name}")

    def _read(self, stored: Sequence[Stored]) -> tuple[list[tuple[Stored, Message]], list[tuple[Stored, None]]]:
        readable: list[tuple[Stored, Message]] = []
        unreadable: list[tuple[Stored, None]] = []
        for one in stored:
            try:
                readable.append((one, message_of(self.queue.name, one)))
            except (ValueError, RecursionError):
                unreadable.append((one, None))
        return readable, unreadable

    async def _handle(
        self, stored: Sequence[Stored], messages: Sequence[Message], hand: Hand | None, fired_at: float
    ) -> None:
        given = messages if self._handler.batch else messages[0]
        call = self._handler.call
        work: asyncio.Future[object] = (
            asyncio.ensure_future(call(given)) if hand is None else hand.do(lambda: call(given))
        )
        # No handler may still have at ease what a sweeper takes for stuck.
        limit_s = min(self._handler.timeout_s, self.queue.stuck_s / 2)
        try:
            await asyncio.wait({work}, timeout=limit_s)
            if work.done():
                await self._settle(stored, self._judge(work, len(stored)), fired_at)
                return
            slots = await self._settle(stored, [timed_out(limit_s)] * len(stored), fired_at)
            if hand is None:
                work.cancel()
            # A thread cannot be ended: its consumer is busy until it returns.
            await asyncio.wait({work})
            await self._late(work, slots)
        finally:
            work.cancel()

    def _judge(self, work: "asyncio.Future[object]", count: int) -> Sequence[Outcome]:
        if work.cancelled():
            return [Outcome(result=Result.SIDELINED, why=Why.RAISED, detail="cancelled")] * count
        error = work.exception()
        if error is not None:
            return [failed(error, self._handler.ignorable)] * count
        return judge(work.result(), count)

    async def _late(self, work: "asyncio.Future[object]", slots: Sequence[Slot | None]) -> None:
        """It was sidelined as timed out. What is handled after all need not come again; a failure changes nothing."""
        if work.cancelled():
            return
        outcomes = self._judge(work, len(slots))
        done = [
            slot
            for slot, outcome in zip(slots, outcomes, strict=True)
            if slot is not None and outcome.result is not Result.SIDELINED
        ]
        if done and (count := await self._settler.withdraw(done)):
            self._metrics.queue_handled.labels(self.queue.store_name, "late").inc(count)

    async def _settle(
        self, stored: Sequence[Stored], outcomes: Sequence[Outcome], fired_at: float
    ) -> Sequence[Slot | None]:
        held_s = self._clock.monotonic() - fired_at
        _, slots = await self._settler.settle(stored, outcomes, held_s=held_s, stuck_s=self.queue.stuck_s)
        for outcome in outcomes:
            self._metrics.queue_handled.labels(self.queue.store_name, outcome.result.value).inc()
        return slots

    def _tell(self) -> None:
        self._metrics.queue_busy.labels(self.queue.store_name).set(len(self._busy))
        self._metrics.queue_consumers.labels(self.queue.store_name).set(self.queue.settings.concurrency)
