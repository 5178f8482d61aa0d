"""Batch lease statements: each serves all wait queues that are ready, and few run at a time.

While a statement is under way, requests that arrive share the next one. After a statement that
served several consumers, the next one waits a moment for as many. Exclusive queues share no
statement. One statement for them runs at a time, beside the others, so neither wait for the other
kind. Tenants take turns, among the exclusive queues and among all others.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
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

MAX_QUEUES: Final = 16
"""The most queues in one statement."""

LeaseBatch = list[tuple[WaitQueue[Key, Message], LeaseRequest[Key]]]
"""The queues of one statement, and what it requests for each."""


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
    """Choose the queues that share a statement, call `acquire`, and share out its results.

    At most `max_in_flight` statements run at a time, and one for exclusive queues. While a queue
    must wait for others of its group, it is not leased for.
    """

    def __init__(self, acquire: Acquire[Key, Message], *, max_in_flight: int) -> None:
        self._acquire = acquire
        self._max_in_flight = max_in_flight
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._queued: _QueuesInTurn[Key, Message] = _QueuesInTurn()
        self._exclusive: _QueuesInTurn[Key, Message] = _QueuesInTurn()
        self._in_flight = 0
        self._exclusive_in_flight = False
        """One more."""
        self._arrived = 0
        self._last_served = 1

    def __bool__(self) -> bool:
        return bool(self._queued or self._exclusive)

    def clear(self) -> None:
        """Forget the queues that wait for a statement."""
        self._queued.clear()
        self._exclusive.clear()

    def arrive(self) -> int:
        """Count a consumer that came; return its number in the order of arrival."""
        self._arrived += 1
        return next(self._numbers)

    def add(self, queue: WaitQueue[Key, Message]) -> None:
        """Queue a statement for this queue, which needs one."""
        self._waiting_with(queue).add(queue)

    def is_queued(self, queue: WaitQueue[Key, Message]) -> bool:
        """Return whether it waits for a statement."""
        return queue in self._waiting_with(queue)

    def discard(self, queue: WaitQueue[Key, Message]) -> bool:
        """Remove it if it waits for a statement; return whether it did."""
        if not self.is_queued(queue):
            return False
        self._waiting_with(queue).remove(queue)
        return True

    def _waiting_with(self, queue: WaitQueue[Key, Message]) -> _QueuesInTurn[Key, Message]:
        return self._exclusive if queue.exclusive else self._queued

    @property
    def should_linger(self) -> bool:
        """Return whether more consumers are likely: fewer came than the last statement served."""
        return self._arrived < self._last_served

    def next_batches(self) -> Iterator[LeaseBatch[Key, Message]]:
        """Begin the statements that may run now; `run`, `distribute` and `end` each."""
        if not self._exclusive_in_flight and (queue := self._next_exclusive()) is not None:
            self._exclusive_in_flight = True
            self._arrived = 0
            yield [self._begin_queue(queue, queue.select_consumers())]
        while (
            self._queued and self._in_flight < self._max_in_flight and (batch := self._next_batch())
        ):
            self._in_flight += 1
            self._arrived = 0
            yield batch

    def end(self, batch: LeaseBatch[Key, Message]) -> None:
        """Let another statement begin in the place of this one."""
        if batch[0][0].exclusive:
            self._exclusive_in_flight = False
        else:
            self._in_flight -= 1

    def _next_exclusive(self) -> WaitQueue[Key, Message] | None:
        for queue in self._exclusive.in_turn():
            if not queue.group.must_wait(queue):
                self._exclusive.take(queue)
                return queue
        return None

    def _next_batch(self) -> LeaseBatch[Key, Message]:
        batch: LeaseBatch[Key, Message] = []
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
    ) -> tuple[WaitQueue[Key, Message], LeaseRequest[Key]]:
        return queue, queue.begin(max_messages, next(self._numbers))

    async def run(self, batch: LeaseBatch[Key, Message]) -> Sequence[LeaseOutcome[Message]]:
        """Run a statement, and return what it leased for each queue, or why it did not."""
        try:
            return await self._acquire([request for _, request in batch])
        except Exception as exc:  # noqa: BLE001 - the waiting consumers get any error
            return [LeaseOutcome(error=exc)] * len(batch)

    def distribute(
        self, batch: LeaseBatch[Key, Message], outcomes: Sequence[LeaseOutcome[Message]]
    ) -> Iterator[tuple[WaitQueue[Key, Message], BatchOutcome[Message]]]:
        """Share out what a statement leased, and yield each queue with the result."""
        self._last_served = 0
        for (queue, _), outcome in zip(batch, outcomes, strict=True):
            batch_outcome = queue.distribute(outcome, self._loop.time())
            self._last_served += batch_outcome.served
            yield queue, batch_outcome
