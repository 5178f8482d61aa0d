"""PULL from a broker that takes longer to open a queue than a poll lasts."""

import asyncio
from typing import Self

import pytest

from rooms.domain.ids import SubscriptionId
from rooms.pulling import tap
from tests.copies import MemoryBroker, MemoryConsumer
from tests.pulling import open_counter

LONG_MS = 25_000


class SlowBroker(MemoryBroker):
    """Opens a queue for the first who asked, as soon as it may, and for nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.may_open = asyncio.Event()

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> MemoryConsumer:
        """Take copies of a queue."""
        return SlowConsumer(self, subscription, credit)


class SlowConsumer(MemoryConsumer):
    """One taker of it."""

    async def __aenter__(self) -> Self:
        broker = self._broker
        assert isinstance(broker, SlowBroker)
        broker.asked += 1
        await (broker.may_open if broker.asked == 1 else asyncio.Event()).wait()
        await super().__aenter__()
        return self


async def test_what_one_poll_began_to_open_is_open_for_the_next(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first poll ends while its queue is being opened. Oracle: the next one gets the message from there, not from an
    opening of its own, which it would end before as well.
    """
    monkeypatch.setattr(tap, "IDLE_S", 60.0)
    broker = SlowBroker()
    async with open_counter(database, broker=broker) as counter:
        await counter.publish("patience")
        assert await counter.pull() == []
        poll = asyncio.create_task(counter.pull(wait_ms=LONG_MS))
        await counter.someone_waits()
        broker.may_open.set()
        (message,) = await poll
        assert message["payload"] == "patience"
        assert broker.asked == 1
