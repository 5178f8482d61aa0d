"""Taking copies from a broker, whichever it is, and deciding about them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import State
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker, Consumer, MalformedMessage
from tests.support.installation import PATIENCE_S, Installation, ago, now_ms, until

COMES_BACK_S: Final = 30.0
"""Seconds after which another process gets the tasks of a dead one: long before a claim of a minute ends."""
CREDIT: Final = 1000


class Taker:
    """A consumer and the copies it has brought so far."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.copies: list[DeliveryTask] = []
        self.unreadable: list[MalformedMessage] = []
        self.error: BaseException | None = None
        self._came = asyncio.Condition()

    async def pump(self) -> None:
        try:
            async for batch in self.consumer.batches():
                async with self._came:
                    self.copies.extend(batch)
                    self.unreadable.extend(self.consumer.take_malformed())
                    self._came.notify_all()
        except BrokerUnavailableError as exc:
            async with self._came:
                self.error = exc
                self._came.notify_all()

    async def has(self, count: int, *, within_s: float = PATIENCE_S) -> list[DeliveryTask]:
        """All copies, once there are `count`."""
        try:
            async with asyncio.timeout(within_s), self._came:
                await self._came.wait_for(lambda: len(self.copies) >= count or self.error)
        except TimeoutError:
            raise AssertionError(f"{count} copies wanted, {len(self.copies)} came") from None
        assert self.error is None, self.error
        return self.copies

    async def puzzles(self, count: int) -> list[MalformedMessage]:
        """All unreadable messages, once there are `count`."""
        async with asyncio.timeout(PATIENCE_S), self._came:
            await self._came.wait_for(lambda: len(self.unreadable) >= count or self.error)
        assert self.error is None, self.error
        return self.unreadable

    async def breaks(self) -> BaseException:
        """The error that ended the batches."""
        async with asyncio.timeout(PATIENCE_S), self._came:
            await self._came.wait_for(lambda: self.error is not None)
        assert self.error is not None
        return self.error


@asynccontextmanager
async def taking(
    broker: Broker,
    *,
    credit: int = CREDIT,
    excluded: Sequence[SubscriptionId] = (),
    subscription: SubscriptionId | None = None,
) -> AsyncIterator[Taker]:
    async with broker.consume(credit=credit, subscription=subscription) as consumer:
        consumer.exclude(frozenset(excluded))
        taker = Taker(consumer)
        task = asyncio.create_task(taker.pump())
        try:
            yield taker
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def finish(
    installation: Installation,
    taker: Taker,
    copies: Sequence[DeliveryTask],
    *,
    to: State = State.DELIVERED,
) -> None:
    """Decide copies and settle them."""
    async with LogWriter(installation.url, kind="settler") as writer:
        outcomes = [DeliveryOutcome(task=copy, state=to, delay_ms=0) for copy in copies]
        await OutcomeQueries(writer).decide(outcomes, worker=taker.consumer.worker_id)
    await taker.consumer.settle(copies)


async def holds(broker: Broker, count: int, subscription: SubscriptionId | None = None) -> None:
    """Until a queue holds so many copies: what was sent, and what was settled, may count a moment late."""

    async def counted() -> bool:
        return await broker.depth(subscription) == count

    await until(counted, f"{count} copies in the queue")


async def holds_for_good(broker: Broker, installation: Installation, count: int) -> None:
    """That the PUSH queue holds so many and not more: nothing that was sent is still to be counted."""
    missing = SubscriptionId(installation.ids.generate(installation.room, now_ms()))
    await broker.purge(installation.room, missing)  # which looks at every copy
    assert await broker.depth(None) == count


def deliveries(copies: Sequence[DeliveryTask]) -> list[str]:
    return [copy.delivery_id for copy in copies]


async def sent(
    installation: Installation,
    broker: Broker,
    subscription: SubscriptionId,
    count: int,
    *,
    priority: int = 4,
) -> list[DeliveryTask]:
    """So many copies, queued and due, the first one first."""
    copies = [
        copy
        for _ in range(count)
        for copy in await installation.publish(subscription, priority=priority)
    ]
    start = ago(60)
    await broker.send(copies, not_before=[start + timedelta(milliseconds=n) for n in range(count)])
    return copies
