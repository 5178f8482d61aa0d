"""Batch lease statements: each serves all wait queues that are ready, and few run at a time.

While a statement is under way, requests that arrive share the next one. After a statement that
served several consumers, the next one waits a moment for as many. Exclusive queues share no
statement. One statement for them runs at a time, beside the others, so neither wait for the other
kind. Tenants take turns, among the exclusive queues and among all others.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
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


class _QueuesInTurn(Generic[Key, Message]):
    """Hold queues that wait for a statement, each tenant's in their order; tenants take turns."""

    def __init__(self) -> None:
        self._by_tenant: dict[Hashable, dict[WaitQueue[Key, Message], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def __contains__(self, queue: WaitQueue[Key, Message]) -> bool:
        return queue in self._by_tenant.get(queue.tenant, ())

    def in_turn(self) -> Iterator[WaitQueue[Key, Message]]:
        """Yield the first queue of each tenant, then the second, …; each may be taken meanwhile."""
        waiting = deque(iter(list(own)) for own in self._by_tenant.values())
        while waiting:
            queue = next(own := waiting.popleft(), None)
            if queue is not None:
                yield queue
                waiting.append(own)

    def add(self, queue: WaitQueue[Key, Message]) -> None:
        self._by_tenant.setdefault(queue.tenant, {})[queue] = None

    def remove(self, queue: WaitQueue[Key, Message]) -> None:
        own = self._by_tenant[queue.tenant]
        del own[queue]
        if not own:
            del self._by_tenant[queue.tenant]

    def take(self, queue: WaitQueue[Key, Message]) -> None:
        """Remove a queue whose turn it is; that of its tenant's next one is after all others."""
        own = self._by_tenant.pop(queue.tenant)
        del own[queue]
        if own:
            self._by_tenant[queue.tenant] = own

    def clear(self) -> None:
        self._by_tenant.clear()


class LeaseBatcher(Generic[Key, Message]):
    """Call `acquire`, share out its results, and pass each queue's outcome to `on_outcome`.

    At most `max_in_flight` statements run at a time, and one for exclusive queues. While a queue
    must wait for others of its group, it is not leased for.
    """

    def __init__(
        self,
        acquire: Acquire[Key, Message],
        *,
        max_in_flight: int,
        on_outcome: Callable[[WaitQueue[Key, Message], BatchOutcome[Message]], None],
    ) -> None:
        self._acquire = acquire
        self._max_in_flight = max_in_flight
        self._on_outcome = on_outcome
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._queued: _QueuesInTurn[Key, Message] = _QueuesInTurn()
        self._exclusive: _QueuesInTurn[Key, Message] = _QueuesInTurn()
        self._running: set[asyncio.Task[None]] = set()
        self._exclusive_task: asyncio.Task[None] | None = None
        """One of those running."""
        self._start_timer: asyncio.Handle | None = None
        self._arrived = 0
        self._last_served = 1
        self.closing = False
        """Set when no statement may begin any more."""

    async def close(self) -> None:
        """Begin nothing more, and wait until the statements under way have ended."""
        self.closing = True
        self._queued.clear()
        self._exclusive.clear()
        while self._running:
            await asyncio.wait(self._running)

    def arrive(self) -> int:
        """Count a consumer that came; return its number in the order of arrival."""
        self._arrived += 1
        return next(self._numbers)

    def add(self, queue: WaitQueue[Key, Message]) -> None:
        """Queue a statement for this queue, which needs one."""
        self._waiting_with(queue).add(queue)
        self._schedule_start()

    def is_queued(self, queue: WaitQueue[Key, Message]) -> bool:
        """Return whether it waits for a statement."""
        return queue in self._waiting_with(queue)

    def discard(self, queue: WaitQueue[Key, Message]) -> None:
        """Remove it from those that wait for a statement, as it needs none any more."""
        if not self.is_queued(queue):
            return
        self._waiting_with(queue).remove(queue)
        self._schedule_start()  # another one may have had to wait for it

    def _waiting_with(self, queue: WaitQueue[Key, Message]) -> _QueuesInTurn[Key, Message]:
        return self._exclusive if queue.exclusive else self._queued

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
        if self.closing:
            return
        if self._exclusive_task is None and (queue := self._next_exclusive()) is not None:
            self._exclusive_task = self._begin([self._begin_queue(queue, queue.select_consumers())])
        most = self._max_in_flight + (self._exclusive_task is not None)
        while self._queued and len(self._running) < most and (batch := self._next_batch()):
            self._begin(batch)

    def _begin(self, batch: list[_BatchItem[Key, Message]]) -> "asyncio.Task[None]":
        self._arrived = 0
        task = self._loop.create_task(self._run_batch(batch))
        self._running.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if task is self._exclusive_task:
            self._exclusive_task = None
        if self._queued or self._exclusive:
            self._schedule_start()

    def _next_exclusive(self) -> WaitQueue[Key, Message] | None:
        for queue in self._exclusive.in_turn():
            if not queue.group.must_wait(queue):
                self._exclusive.take(queue)
                return queue
        return None

    def _next_batch(self) -> list[_BatchItem[Key, Message]]:
        batch: list[_BatchItem[Key, Message]] = []
        total = 0
        for queue in self._queued.in_turn():
            if queue.group.must_wait(queue):
                continue
            max_messages = queue.select_consumers()
            if batch and total + max_messages > MAX_BATCH_MESSAGES:
                break
            self._queued.take(queue)
            batch.append(self._begin_queue(queue, max_messages))
            total += max_messages
            if len(batch) == MAX_QUEUES:
                break
        return batch

    def _begin_queue(
        self, queue: WaitQueue[Key, Message], max_messages: int
    ) -> _BatchItem[Key, Message]:
        return queue, queue.begin(max_messages, next(self._numbers))

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
