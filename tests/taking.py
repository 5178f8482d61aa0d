"""Taking copies from a broker, whichever it is, and deciding about them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import State
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker, Consumer, Unreadable
from rooms.storage.outcomes import Outcome, Outcomes
from rooms.storage.writer import Writer
from tests.installation import PATIENCE_S, Installation, ago, now_ms, until

COMES_BACK_S: Final = 30.0
"""Within which copies of somebody who died are somebody else's: long before a claim of a minute ends."""
CREDIT: Final = 1000


class Taker:
    """A consumer and the copies it has brought so far."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.copies: list[Copy] = []
        self.unreadable: list[Unreadable] = []
        self.error: BaseException | None = None
        self._came = asyncio.Condition()

    async def pump(self) -> None:
        try:
            async for batch in self.consumer.batches():
                async with self._came:
                    self.copies.extend(batch)
                    self.unreadable.extend(self.consumer.unreadable())
                    self._came.notify_all()
        except BrokerUnavailableError as exc:
            async with self._came:
                self.error = exc
                self._came.notify_all()

    async def has(self, count: int, *, within_s: float = PATIENCE_S) -> list[Copy]:
        """All copies, once there are `count`."""
        try:
            async with asyncio.timeout(within_s), self._came:
                await self._came.wait_for(lambda: len(self.copies) >= count or self.error)
        except TimeoutError:
            raise AssertionError(f"{count} copies wanted, {len(self.copies)} came") from None
        assert self.error is None, self.error
        return self.copies

    async def puzzles(self, count: int) -> list[Unreadable]:
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
    installation: Installation, taker: Taker, copies: Sequence[Copy], *, to: State = State.DELIVERED
) -> None:
    """Decide copies and settle them."""
    async with Writer(installation.url, kind="settler") as writer:
        outcomes = [Outcome(copy=copy, to=to, delay_ms=0) for copy in copies]
        await Outcomes(writer).decide(outcomes, worker=taker.consumer.worker)
    await taker.consumer.settle(copies)


async def holds(broker: Broker, count: int, subscription: SubscriptionId | None = None) -> None:
    """Until a queue holds so many copies: what was sent, and what was settled, may count a moment late."""

    async def counted() -> bool:
        return await broker.depth(subscription) == count

    await until(counted, f"{count} copies in the queue")


async def holds_for_good(broker: Broker, installation: Installation, count: int) -> None:
    """That the PUSH queue holds so many and not more: nothing that was sent is still to be counted."""
    nobody = SubscriptionId(installation.ids.make(installation.room, now_ms()))
    await broker.purge(installation.room, nobody)  # which looks at every copy
    assert await broker.depth(None) == count


def deliveries(copies: Sequence[Copy]) -> list[str]:
    return [copy.delivery_id for copy in copies]


async def sent(
    installation: Installation, broker: Broker, subscription: SubscriptionId, count: int, *, priority: int = 4
) -> list[Copy]:
    """So many copies, queued and due, the first one first."""
    copies = [copy for _ in range(count) for copy in await installation.publish(subscription, priority=priority)]
    start = ago(60)
    await broker.send(copies, not_before=[start + timedelta(milliseconds=n) for n in range(count)])
    return copies
