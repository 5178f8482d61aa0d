"""A broker in memory that keeps copies of its own: what another one does, with its faults in a test's hands."""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Self

from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.errors import BrokerUnavailableError
from rooms.ports import BrokerUsers, MalformedMessage, RejectedTask


@dataclass(order=True)
class _Kept:
    rank: tuple[int, datetime, int]
    copy: DeliveryTask = field(compare=False)
    times: int = field(compare=False, default=0)
    """Times that it was handed out."""


@dataclass
class _Queue:
    waiting: list[_Kept] = field(default_factory=list)
    later: set[asyncio.TimerHandle] = field(default_factory=set)
    takers: deque["MemoryConsumer"] = field(default_factory=deque)

    def size(self) -> int:
        return (
            len(self.waiting) + len(self.later) + sum(len(taker.unsettled) for taker in self.takers)
        )


class MemoryConsumer:
    """One taker of a queue of `MemoryBroker`."""

    worker_id = 0
    supports_exclude = False

    def __init__(
        self, broker: "MemoryBroker", subscription: SubscriptionId | None, credit: int
    ) -> None:
        self._broker = broker
        self._subscription = subscription
        self._credit = credit
        self._came = asyncio.Event()
        self._inbox: list[DeliveryTask] = []
        self._broken = False
        self.unsettled: dict[str, list[_Kept]] = {}

    async def __aenter__(self) -> Self:
        await self._broker.answers()
        queue = self._broker.kept.get(self._subscription)
        if queue is None:
            raise BrokerUnavailableError(f"there is no queue of {self._subscription}")
        queue.takers.append(self)
        self._broker.opened += 1
        self._broker.hand_out(queue)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Take no more; what is unsettled goes back."""
        queue = self._broker.kept.get(self._subscription)
        if queue is not None and self in queue.takers:
            queue.takers.remove(self)
            self._broker.put_back(queue, self.unsettled.values())
        self.unsettled = {}
        self._inbox = []

    def cut(self) -> None:
        """The broker goes away under it."""
        self.end()
        self._broken = True
        self._came.set()

    def room(self) -> int:
        """Return the remaining credit."""
        return min(self._credit, self._broker.window) - sum(map(len, self.unsettled.values()))

    def give(self, kept: _Kept) -> None:
        """Hand a copy out."""
        kept.times += 1
        self.unsettled.setdefault(kept.copy.dedup_id, []).append(kept)
        self._inbox.append(replace(kept.copy))
        self._came.set()

    async def batches(self) -> AsyncIterator[Sequence[DeliveryTask]]:
        """Batches as they come, for ever."""
        while True:
            await self._came.wait()
            self._came.clear()
            if self._broken:
                raise BrokerUnavailableError("the broker is away")
            batch, self._inbox = self._inbox, []
            if batch:
                yield batch

    def take_malformed(self) -> Sequence[MalformedMessage]:
        """Return the stored tasks of a test."""
        found, self._broker.strange = self._broker.strange, []
        return found

    async def discard(self, messages: Sequence[MalformedMessage]) -> None:
        """They need not come again."""
        self._broker.discarded += messages

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Nothing: copies come all the same."""

    async def settle(self, copies: Sequence[DeliveryTask]) -> None:
        """They need not come again."""
        if self._broker.deaf:
            raise BrokerUnavailableError("the broker did not hear it")
        self._take_off(copies)
        self._broker.settled += [copy.dedup_id for copy in copies]
        self._go_on()

    async def release(self, copies: Sequence[DeliveryTask]) -> None:
        """Offer the same objects again here, as a consumer over STOMP does."""
        self._inbox += [copy for copy in copies if copy.dedup_id in self.unsettled]
        self._came.set()

    def _take_off(self, copies: Iterable[DeliveryTask]) -> list[_Kept]:
        found = []
        for copy in copies:
            if own := self.unsettled.get(copy.dedup_id):
                found.append(own.pop())
                if not own:
                    del self.unsettled[copy.dedup_id]
        return found

    def _go_on(self) -> None:
        if (queue := self._broker.kept.get(self._subscription)) is not None:
            self._broker.hand_out(queue)


class MemoryBroker:
    """`rooms.ports.Broker` in memory, shared by all who are given it; its copies are not claimed."""

    is_outbox = False
    users: BrokerUsers | None = None

    def __init__(self, *, window: int = 1_000_000) -> None:
        """Hand out at most `window` messages that are not acknowledged, whatever the credit."""
        self.window = window
        self.kept: dict[SubscriptionId | None, _Queue] = {None: _Queue()}
        self.opened = 0
        """Return the number of consumers ever opened."""
        self.settled: list[str] = []
        """Steps in the order of their settling, doubles and all."""
        self.strange: list[MalformedMessage] = []
        """Report this message as malformed with the next batch."""
        self.discarded: list[MalformedMessage] = []
        self.refusals: dict[str, str] = {}
        """Reasons why tasks of these versions are rejected permanently."""
        self.deaf = False
        """True: settlements are lost on their way to the broker."""
        self._numbers = 0
        self._marked = False
        self._prepared: set[str] = set()
        self._away = False
        self._thawed = asyncio.Event()
        self._thawed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for queue in self.kept.values():
            for handle in queue.later:
                handle.cancel()

    async def answers(self) -> None:
        """Return once it answers; BrokerUnavailableError while it is away."""
        await self._thawed.wait()
        if self._away:
            raise BrokerUnavailableError("the broker is away")

    def away(self) -> None:
        """It is gone, and every consumer notices."""
        self._away = True
        for queue in self.kept.values():
            for taker in list(queue.takers):
                taker.cut()

    def back(self) -> None:
        """It is there again, with what it kept."""
        self._away = False

    def freeze(self) -> None:
        """Stop answering and handing out, without notice to clients."""
        self._thawed.clear()

    def thaw(self) -> None:
        """It goes on."""
        self._thawed.set()
        for queue in self.kept.values():
            self.hand_out(queue)

    def wipe(self) -> None:
        """Its disk was lost: it comes back empty."""
        self.away()
        self.kept = {None: _Queue()}
        self._marked = False
        self._prepared.clear()
        self.back()

    async def create_queues(self, subscriptions: Sequence[SubscriptionId]) -> None:
        """Make queues."""
        await self.answers()
        for subscription in subscriptions:
            self.kept.setdefault(subscription, _Queue())

    async def delete_queue(self, subscription: SubscriptionId) -> bool:
        """Delete a queue without consumers."""
        await self.answers()
        queue = self.kept.get(subscription)
        if queue is not None and queue.takers:
            return False
        self.kept.pop(subscription, None)
        return True

    async def list_queues(self) -> Sequence[SubscriptionId]:
        """Subscriptions with a queue."""
        await self.answers()
        return [subscription for subscription in self.kept if subscription is not None]

    async def send(
        self, copies: Sequence[DeliveryTask], *, not_before: Sequence[datetime]
    ) -> Sequence[RejectedTask]:
        """Queue copies; a step that is sent twice is there twice."""
        await self.answers()
        refused = []
        for copy, due in zip(copies, not_before, strict=True):
            name = copy.subscription_id if copy.kind == "PULL" else None
            queue = self.kept.get(name)
            if (reason := self.refusals.get(copy.dedup_id)) is not None:
                refused.append(RejectedTask(task=copy, reason=reason, queue_missing=False))
            elif queue is None:
                refused.append(
                    RejectedTask(
                        task=copy, reason=f"there is no queue of {name}", queue_missing=True
                    )
                )
            else:
                self._put(queue, copy, due)
        return refused

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Copies that wait."""
        await self.answers()
        queue = self.kept.get(subscription)
        return 0 if queue is None else queue.size()

    async def disk_usage(self) -> float | None:
        """It has no disk."""
        return None

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Discard tasks that were not consumed."""
        await self.answers()
        queue = self.kept.get(subscription, _Queue())
        count, queue.waiting = len(queue.waiting), []
        return count

    async def has_sentinel(self) -> bool:
        """Return whether the sentinel is there."""
        await self.answers()
        return self._marked

    async def prepare_sentinel(self) -> str:
        """Keep a name until the broker is wiped."""
        await self.answers()
        self._numbers += 1
        self._prepared.add(name := str(self._numbers))
        return name

    async def put_sentinel(self, prepared: str) -> bool:
        """Put the mark there, unless the name is lost."""
        await self.answers()
        if prepared not in self._prepared:
            return False
        self._prepared.clear()
        self._marked = True
        return True

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> MemoryConsumer:
        """Take copies of a queue."""
        return MemoryConsumer(self, subscription, credit)

    def double(self, subscription: SubscriptionId | None) -> None:
        """Every copy that waits in a queue is there once more."""
        queue = self.kept[subscription]
        for kept in list(queue.waiting):
            self._put(queue, kept.copy, kept.rank[1])

    def takers(self, subscription: SubscriptionId | None) -> int:
        """Return the number of consumers of a queue."""
        return len(self.kept[subscription].takers) if subscription in self.kept else 0

    def put_back(self, queue: _Queue, unsettled: Iterable[Iterable[_Kept]]) -> None:
        """Requeue what was handed out, in its old position."""
        for kept in unsettled:
            for one in kept:
                heapq.heappush(queue.waiting, one)
        self.hand_out(queue)

    def hand_out(self, queue: _Queue) -> None:
        """Give what waits to those who may have more, in turn."""
        while queue.waiting and self._thawed.is_set() and not self._away:
            taker = next((taker for taker in queue.takers if taker.room() > 0), None)
            if taker is None:
                return
            queue.takers.remove(taker)
            queue.takers.append(taker)
            kept = heapq.heappop(queue.waiting)
            expires = kept.copy.expires_ms
            if expires is None or expires > datetime.now(UTC).timestamp() * 1000:
                taker.give(kept)

    def _put(self, queue: _Queue, copy: DeliveryTask, due: datetime) -> None:
        self._numbers += 1
        kept = _Kept((-copy.priority, due, self._numbers), copy)
        wait_s = (due - datetime.now(UTC)).total_seconds()
        if wait_s <= 0:
            heapq.heappush(queue.waiting, kept)
            self.hand_out(queue)
            return

        def come_due() -> None:
            queue.later.discard(handle)
            heapq.heappush(queue.waiting, kept)
            self.hand_out(queue)

        handle = asyncio.get_running_loop().call_later(wait_s, come_due)
        queue.later.add(handle)
