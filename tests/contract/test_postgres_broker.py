"""What PostgreSQL as broker promises of its own, beyond the contract of the port."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from rooms.brokers import postgres
from rooms.brokers.postgres import PostgresConsumer
from rooms.domain.copy import Copy
from rooms.domain.states import State
from rooms.storage.outbox import Outbox
from rooms.storage.outcomes import Outcome, Outcomes
from rooms.storage.writer import Writer
from tests.installation import PATIENCE_S, Installation, installed, until


@pytest.fixture
async def installation(database: str) -> AsyncIterator[Installation]:
    async with installed(database) as installation:
        yield installation


@asynccontextmanager
async def batches(consumer: PostgresConsumer) -> AsyncIterator[AsyncIterator[list[Copy]]]:
    """The consumer's batches, each within a time."""

    async def bounded() -> AsyncIterator[list[Copy]]:
        source = consumer.batches()
        while True:
            async with asyncio.timeout(PATIENCE_S):
                found = list(await anext(aiter(source)))
            yield found

    async with consumer:
        yield bounded()


class SlowToAsk(Outbox):
    """Asks what comes due next only once it is due."""

    due: datetime | None = None

    async def next_due_s(self, after_us: int) -> float | None:
        if self.due is not None:
            await asyncio.sleep(max(0.0, (self.due - datetime.now(UTC)).total_seconds() + 0.01))
        return await super().next_due_s(after_us)


async def test_what_comes_due_between_a_look_and_the_question_for_the_next_is_not_left_to_the_poll(
    installation: Installation,
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    consumer = PostgresConsumer(installation.url, credit=10, claim_s=60, poll_s=600)
    consumer._outbox = outbox = SlowToAsk(consumer._writer)
    async with batches(consumer) as found:
        await asyncio.wait_for(consumer._wake.wait(), PATIENCE_S)  # it hears, and nobody will ring
        outbox.due = datetime.now(UTC) + timedelta(seconds=0.5)
        await installation.queue(copy, due=outbox.due)
        (taken,) = await anext(found)
    assert taken.delivery_id == copy.delivery_id


async def test_a_death_is_noticed_however_seldom_the_whole_queue_is_looked_at(installation: Installation) -> None:
    """Where a look at everything takes long it is made seldom; whoever died since is looked for all the same."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await installation.queue(copy)

    async def look() -> Sequence[Copy]:
        return (await heir._claim(10, time.monotonic())).copies

    async with PostgresConsumer(installation.url, credit=10, claim_s=60) as heir:
        async with PostgresConsumer(installation.url, credit=10, claim_s=60) as doomed:
            assert len((await doomed._claim(10, time.monotonic())).copies) == 1
            assert not await look()
            heir._next_look = float("inf")
            assert not await look()
        (found,) = await until(look, "the copy of the dead", within_s=2.0)
    assert found.delivery_id == copy.delivery_id


async def test_payloads_in_memory_are_bounded(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many copies the credit allows: no more bytes than that, by one batch."""
    monkeypatch.setattr(postgres, "_BATCH", 4)
    monkeypatch.setattr(postgres, "_MOST_BYTES", 100_000)
    subscription = await installation.subscribe()
    for _ in range(40):
        await installation.queue(*await installation.publish(subscription, payload=b"x" * 10_000))
    consumer, taken, most = PostgresConsumer(installation.url, credit=1000, claim_s=60), 0, 0
    held: list[Copy] = []
    async with Writer(installation.url, kind="settler") as writer, batches(consumer) as found:
        while taken < 40:
            if sum(len(copy.payload) for copy in held) >= 100_000:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await anext(found)
                break
            batch = await anext(found)
            taken += len(batch)
            held += batch
            most = max(most, sum(len(copy.payload) for copy in held))
        outcomes = [Outcome(copy=copy, to=State.DELIVERED) for copy in held]
        await Outcomes(writer).decide(outcomes, worker=consumer.worker)
    assert most == 100_000
    assert taken == 10


async def test_settling_what_another_consumer_took_gives_no_credit(installation: Installation) -> None:
    subscription = await installation.subscribe()
    strangers = await installation.publish(subscription)
    await installation.publish_many(subscription, 10)
    consumer = PostgresConsumer(installation.url, credit=3, claim_s=60, poll_s=0.05)
    async with batches(consumer) as found:
        assert len(await anext(found)) == 3
        await consumer.settle(strangers * 3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await anext(found)


async def test_an_idle_consumer_asks_little(installation: Installation) -> None:
    """Two statements a poll, and one for dead workers: what the idle machine is charged for."""
    consumer = PostgresConsumer(installation.url, credit=10, claim_s=60, poll_s=0.2)
    statements = 0
    original = consumer._writer.run

    async def counting(*arguments: object) -> object:
        nonlocal statements
        statements += 1
        return await original(*arguments)  # type: ignore[arg-type]

    consumer._writer.run = counting  # type: ignore[method-assign, assignment]
    async with batches(consumer) as found:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await anext(found)
    assert statements <= 3 * (2.0 / 0.2 + 3)
