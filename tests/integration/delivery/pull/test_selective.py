"""Test what leases by selector leave in a broker: outdated copies, and who drains them when."""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

import pytest

from delivery.pull import selective
from delivery.pull.selective import StaleCopyDrain
from delivery.pull.target import PullTarget
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.outages import OUTAGES
from tests.support.fake_broker import MemoryBroker, MemoryConsumer
from tests.support.pull_service import Counter, open_counter, until


class CountingBroker(MemoryBroker):
    """Count who tries to consume its queues, also those that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.at_once = 0
        self.most_at_once = 0

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> MemoryConsumer:
        """Consume a queue."""
        return CountingConsumer(self, subscription, credit)


class CountingConsumer(MemoryConsumer):
    """Consume its copies."""

    async def __aenter__(self) -> Self:
        broker = self._broker
        assert isinstance(broker, CountingBroker)
        broker.asked += 1
        await super().__aenter__()
        broker.at_once += 1
        broker.most_at_once = max(broker.most_at_once, broker.at_once)
        return self

    async def __aexit__(self, *exc: object) -> None:
        broker = self._broker
        assert isinstance(broker, CountingBroker)
        broker.at_once -= 1
        await super().__aexit__(*exc)


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> CountingBroker:
    monkeypatch.setattr(selective, "DRAIN_DELAY_S", 0.05)
    return CountingBroker()


@pytest.fixture
async def counter(database: str, broker: CountingBroker) -> AsyncIterator[Counter]:
    OUTAGES.reset()
    async with open_counter(database, broker=broker) as opened:
        yield opened
    OUTAGES.reset()


def is_busy(drain: StaleCopyDrain) -> bool:
    """Return whether a queue is drained, or waits for it."""
    return bool(drain._timers or drain._tasks)


async def test_a_queue_that_is_gone_is_not_drained_again_and_again(
    database: str, counter: Counter, broker: CountingBroker
) -> None:
    """A subscription is deleted right after a lease by selector, and its queue with it.

    Oracle: the broker is asked to consume that queue once at most, and is not away.
    """
    await counter.publish({"n": "1"})
    assert len(await counter.pull()) == 1
    counter.house.run("UPDATE subscriptions SET status = 'deleted'")
    await until(lambda: not broker.takers(counter.queue))
    assert await broker.delete_queue(counter.queue)
    asked = broker.asked
    async with LogWriter(database, kind="puller") as writer:
        drain = StaleCopyDrain(broker, writer)
        drain.schedule(
            PullTarget(counter.room, counter.queue, counter.house.principal.organisation_id)
        )
        await until(lambda: broker.asked > asked + 1 or not is_busy(drain))
        await drain.close()
    assert broker.asked <= asked + 1
    assert not OUTAGES.any_failing


async def test_an_organisation_drains_one_queue_at_a_time(
    counter: Counter, broker: CountingBroker
) -> None:
    """Each is a connection to the broker that withholds copies from other consumers."""
    queues = [counter.queue, *(counter.house.subscription(counter.room, "PULL") for _ in range(3))]
    await counter.publish({"n": "1"})
    for queue in queues:
        assert len(await counter.pull(queue=queue, selector={"payload": {"n": "1"}})) == 1
    await until(lambda: len(broker.settled) == len(queues))
    assert broker.most_at_once == 1


async def test_a_queue_that_waits_for_its_turn_waits_once(
    counter: Counter, broker: CountingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases by selector leave copies faster than one queue after another is drained.

    Oracle: what waits does not grow; copies that come during a drain are drained after it.
    """
    first, second = (
        PullTarget(counter.room, queue, counter.house.principal.organisation_id)
        for queue in (counter.queue, counter.house.subscription(counter.room, "PULL"))
    )
    async with LogWriter(counter.house.url, kind="puller") as writer:
        drain, drained, go_on = StaleCopyDrain(broker, writer), list[PullTarget](), asyncio.Event()

        async def drain_once(key: PullTarget) -> int:
            drained.append(key)
            await go_on.wait()
            return 0

        monkeypatch.setattr(drain, "drain_once", drain_once)
        drain.schedule(first)
        await until(lambda: drained == [first])
        for _ in range(5):
            for key in (first, second):
                drain.schedule(key)
            await asyncio.sleep(2 * selective.DRAIN_DELAY_S)
        go_on.set()
        await until(lambda: not is_busy(drain))
        assert (drained.count(first), drained.count(second)) == (2, 1)
        await drain.close()


async def test_few_queues_are_drained_at_a_time_however_many_organisations_have_some(
    counter: Counter, broker: CountingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drain is a connection to the broker, and a file of this process."""
    keys = [
        PullTarget(counter.room, counter.queue, OrganisationId(str(number))) for number in range(20)
    ]
    async with LogWriter(counter.house.url, kind="puller") as writer:
        drain, drained = StaleCopyDrain(broker, writer), list[PullTarget]()
        at_once = most_at_once = 0

        async def drain_once(key: PullTarget) -> int:
            nonlocal at_once, most_at_once
            at_once += 1
            most_at_once = max(most_at_once, at_once)
            await asyncio.sleep(0.01)
            at_once -= 1
            drained.append(key)
            return 0

        monkeypatch.setattr(drain, "drain_once", drain_once)
        for key in keys:
            drain.schedule(key)
        await until(lambda: not is_busy(drain))
        await drain.close()
    assert set(drained) == set(keys)
    assert most_at_once <= selective.MAX_DRAINS
