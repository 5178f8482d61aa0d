"""Test PULL from a broker that takes longer to open a queue than a poll lasts."""

import asyncio
from typing import Self

import pytest

from delivery.pull import broker_consumer
from rooms.domain.ids import SubscriptionId
from tests.support.fake_broker import MemoryBroker, MemoryConsumer
from tests.support.pull_service import open_counter

LONG_MS = 25_000


class SlowBroker(MemoryBroker):
    """Open a queue for the first consumer, when the test allows it, and for no other."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.may_open = asyncio.Event()

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> MemoryConsumer:
        """Consume a queue."""
        return SlowConsumer(self, subscription, credit)


class SlowConsumer(MemoryConsumer):
    """Consume its copies."""

    async def __aenter__(self) -> Self:
        broker = self._broker
        assert isinstance(broker, SlowBroker)
        broker.asked += 1
        await (broker.may_open if broker.asked == 1 else asyncio.Event()).wait()
        await super().__aenter__()
        return self


async def test_a_queue_that_one_poll_began_to_open_is_open_for_the_next(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first poll ends while its queue is being opened.

    Oracle: the next poll gets the message from that queue. An opening of its own would end too
    early as well.
    """
    monkeypatch.setattr(broker_consumer, "IDLE_TIMEOUT_S", 60.0)
    broker = SlowBroker()
    async with open_counter(database, broker=broker) as counter:
        await counter.publish("patience")
        assert await counter.pull() == []
        poll = asyncio.create_task(counter.pull(wait_ms=LONG_MS))
        await counter.a_client_waits()
        broker.may_open.set()
        (message,) = await poll
        assert message["payload"] == "patience"
        assert broker.asked == 1
