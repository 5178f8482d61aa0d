"""Batch lease statements: each serves all wait queues that are ready, and few run at a time.

While a statement is under way, requests that arrive share the next one. After a statement that
served several consumers, the next one waits a moment for as many.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Final, Generic

from delivery.pull.wait_queue import (
    MAX_BATCH_MESSAGES,
    Acquire,
    BatchOutcome,
    Key,
    LeaseOutcome,
    LeaseRequest,
    Message,
    WaitQueue,
)

LINGER_S: Final = 0.001
"""The time a statement waits for more consumers when they are likely."""
MAX_QUEUES: Final = 16
"""The most queues in one statement."""

_BatchItem = tuple[WaitQueue[Key, Message], LeaseRequest[Key]]


class LeaseBatcher(Generic[Key, Message]):
    """Call `acquire`, share out its results, and pass each queue's outcome to `on_outcome`.

    An `exclusive` queue shares no statement. A `blocked` one is not leased for now, even if it is
    ready.
    """

    def __init__(
        self,
        acquire: Acquire[Key, Message],
        *,
        max_in_flight: int,
        exclusive: Callable[[Key], bool],
        blocked: Callable[[WaitQueue[Key, Message]], bool],
        on_outcome: Callable[[WaitQueue[Key, Message], BatchOutcome[Message]], None],
    ) -> None:
        self._acquire = acquire
        self._max_in_flight = max_in_flight
        self._exclusive = exclusive
        self._blocked = blocked
        self._on_outcome = on_outcome
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._queued: dict[WaitQueue[Key, Message], None] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._start_timer: asyncio.Handle | None = None
        self._arrived = 0
        self._last_served = 1
        self.closing = False
        """Set when no statement may begin any more."""

    async def close(self) -> None:
        """Begin nothing more, and wait until the statements under way have ended."""
        self.closing = True
        self._queued.clear()
        while self._running:
            await asyncio.wait(self._running)

    def arrive(self) -> int:
        """Count a consumer that came; return its number in the order of arrival."""
        self._arrived += 1
        return next(self._numbers)

    def add(self, queue: WaitQueue[Key, Message]) -> None:
        """Queue a statement for this queue."""
        self._queued[queue] = None
        self._schedule_start()

    def is_queued(self, queue: WaitQueue[Key, Message]) -> bool:
        """Return whether it waits for a statement."""
        return queue in self._queued

    def discard(self, queue: WaitQueue[Key, Message]) -> None:
        """Remove it from those that wait for a statement."""
        self._queued.pop(queue, None)

    def _schedule_start(self) -> None:
        if self._arrived >= self._last_served:
            if self._start_timer is not None:
                self._start_timer.cancel()
            # What arrives in the same turn of the loop shares the statement.
            self._start_timer = self._loop.call_soon(self._start)
        elif self._start_timer is None:
            self._start_timer = self._loop.call_later(LINGER_S, self._start)

    def _start(self) -> None:
        self._start_timer = None
        while self._queued and len(self._running) < self._max_in_flight and not self.closing:
            batch = self._next_batch()
            if not batch:
                return
            self._arrived = 0
            task = self._loop.create_task(self._run_batch(batch))
            self._running.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if self._queued:
            self._schedule_start()

    def _next_batch(self) -> list[_BatchItem[Key, Message]]:
        batch: list[_BatchItem[Key, Message]] = []
        total = 0
        for queue in list(self._queued):
            if not queue.needs_lease():
                del self._queued[queue]
                continue
            exclusive = self._exclusive(queue.key)
            if (batch and exclusive) or self._blocked(queue):
                continue
            max_messages = queue.select_consumers()
            if batch and total + max_messages > MAX_BATCH_MESSAGES:
                break
            del self._queued[queue]
            batch.append((queue, queue.begin(max_messages, next(self._numbers))))
            total += max_messages
            if len(batch) == MAX_QUEUES or exclusive:
                break
        return batch

    async def _run_batch(self, batch: list[_BatchItem[Key, Message]]) -> None:
        outcomes: Sequence[LeaseOutcome[Message]]
        try:
            outcomes = await self._acquire([request for _, request in batch])
        except Exception as exc:  # noqa: BLE001 - the waiting consumers get any error
            outcomes = [LeaseOutcome(error=exc)] * len(batch)
        self._last_served = 0
        for (queue, _), outcome in zip(batch, outcomes, strict=True):
            batch_outcome = queue.distribute(outcome, self._loop.time())
            self._last_served += batch_outcome.served
            self._on_outcome(queue, batch_outcome)
