"""Check what PostgreSQL as broker promises beyond the contract of the port."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.brokers import postgres
from delivery.brokers.postgres import PostgresBroker, PostgresConsumer
from rooms.burst_pacing import BurstPacer
from rooms.db.notify import Channel, Notifier
from rooms.db.queue.claims import ClaimedBatch, Outbox
from rooms.db.queue.holds import HeldGroup, Holds
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason, State
from rooms.errors import StorageRefusedError
from tests.support.broker_client import (
    COMES_BACK_S,
    CREDIT,
    Taker,
    deliveries,
    finish,
    sent,
    taking,
)
from tests.support.installation import (
    PATIENCE_S,
    Installation,
    ago,
    installed,
    other_organisation,
    until,
)


@pytest.fixture
async def broker(database: str) -> AsyncIterator[PostgresBroker]:
    async with PostgresBroker(database, claim_s=60.0) as broker:
        yield broker


@asynccontextmanager
async def batches(consumer: PostgresConsumer) -> AsyncIterator[AsyncIterator[list[DeliveryTask]]]:
    """The consumer's batches, each within a time."""

    async def bounded() -> AsyncIterator[list[DeliveryTask]]:
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

    async def seconds_to_next_due(self, after_us: int) -> float | None:
        if self.due is not None:
            await asyncio.sleep(max(0.0, (self.due - datetime.now(UTC)).total_seconds() + 0.01))
        return await super().seconds_to_next_due(after_us)


async def test_a_task_without_an_outcome_keeps_its_credit_until_it_is_forgotten(
    installation: Installation,
) -> None:
    """Its outcome may wait for PostgreSQL, and the memory for such outcomes is bounded by the credit."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await installation.queue(copy)
    open_consumer = functools.partial(PostgresConsumer, installation.url, claim_s=0.3, poll_s=0.1)
    consumer, other = open_consumer(credit=1), open_consumer(credit=100)
    async with batches(consumer) as found, batches(other) as found_by_other:
        first = await anext(found)
        following = asyncio.ensure_future(anext(found))
        for _ in range(4):  # each time, the claim before has ended
            assert deliveries(await anext(found_by_other)) == [copy.delivery_id]
        assert not following.done()
        (another,) = await installation.publish(subscription)
        await installation.queue(another)
        consumer.forget(first)
        assert len(await following) == 1


async def test_a_refused_claim_leaves_the_other_claims_as_they_are(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, say, for a moment: attempts go on, and no other worker begins them."""
    subscription = await installation.subscribe()
    (before,) = await installation.publish(subscription)
    await installation.queue(before)
    consumer = PostgresConsumer(installation.url, credit=10, claim_s=60, poll_s=0.1)
    async with batches(consumer) as found:
        assert deliveries(await anext(found)) == [before.delivery_id]
        worker, real, refusals = consumer.worker_id, Outbox.claim, iter([True, True])

        async def claim(outbox: Outbox, **named: Any) -> ClaimedBatch:
            if next(refusals, False):
                raise StorageRefusedError("no space left on device")
            return await real(outbox, **named)

        monkeypatch.setattr(Outbox, "claim", claim)
        (after,) = await installation.publish(subscription)
        await installation.queue(after)
        assert deliveries(await anext(found)) == [after.delivery_id]
        assert consumer.worker_id == worker
        row = await installation.work("outbox", before)
        assert row is not None
        assert row["worker"] == worker
        assert row["claimed_until"] > datetime.now(UTC)


async def test_a_refused_look_at_the_next_due_time_ends_no_claims(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer polls instead, after a claim with tasks and after one without."""
    subscription = await installation.subscribe()
    (before,) = await installation.publish(subscription)
    await installation.queue(before)
    consumer = PostgresConsumer(installation.url, credit=10, claim_s=60, poll_s=0.1)
    refused = 0

    async def refuse(_outbox: Outbox, _after_us: int) -> float | None:
        nonlocal refused
        refused += 1
        raise StorageRefusedError("out of memory")

    monkeypatch.setattr(Outbox, "seconds_to_next_due", refuse)
    async with batches(consumer) as found:
        assert deliveries(await anext(found)) == [before.delivery_id]
        worker, following = consumer.worker_id, asyncio.ensure_future(anext(found))

        async def refused_after_both() -> bool:
            return refused >= 3

        await until(refused_after_both, "looks after a claim without tasks")
        (after,) = await installation.publish(subscription)
        await installation.queue(after)
        assert deliveries(await following) == [after.delivery_id]
        assert consumer.worker_id == worker


async def test_work_due_between_a_claim_and_the_next_due_query_does_not_wait_for_the_poll(
    installation: Installation,
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    consumer = PostgresConsumer(installation.url, credit=10, claim_s=60, poll_s=600)
    consumer._outbox = outbox = SlowToAsk(consumer._writer)
    async with batches(consumer) as found:
        await asyncio.wait_for(
            consumer._wake.wait(), PATIENCE_S
        )  # it listens, and no notification will come
        outbox.due = datetime.now(UTC) + timedelta(seconds=0.5)
        await installation.queue(copy, due=outbox.due)
        (taken,) = await anext(found)
    assert taken.delivery_id == copy.delivery_id


async def test_what_comes_due_behind_a_batch_is_not_left_to_the_poll(
    installation: Installation,
) -> None:
    """A consumer that took all that was due asks for the next due time before it waits."""
    subscription = await installation.subscribe()
    (first,) = await installation.publish(subscription)
    (second,) = await installation.publish(subscription)
    await installation.queue(first)
    consumer = PostgresConsumer(installation.url, credit=10, claim_s=60, poll_s=600)
    async with batches(consumer) as found:
        await asyncio.wait_for(
            consumer._wake.wait(), PATIENCE_S
        )  # it listens, and no notification will come
        await installation.queue(second, due=datetime.now(UTC) + timedelta(seconds=0.5))
        assert [copy.delivery_id for copy in await anext(found)] == [first.delivery_id]
        assert [copy.delivery_id for copy in await anext(found)] == [second.delivery_id]


class SignallingOutbox(Outbox):
    """Count claims, and signal when the next due time was returned: the consumer waits then."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__(writer)
        self.claims = 0
        self.asked = asyncio.Event()

    async def claim(self, **asked: Any) -> ClaimedBatch:
        self.claims += 1
        return await super().claim(**asked)

    async def seconds_to_next_due(self, after_us: int) -> float | None:
        due_s = await super().seconds_to_next_due(after_us)
        self.asked.set()
        return due_s


async def test_a_consumer_that_took_everything_claims_again_when_notified(
    installation: Installation,
) -> None:
    subscription = await installation.subscribe()
    consumer = PostgresConsumer(installation.url, credit=100, claim_s=60, poll_s=600)
    consumer._outbox = outbox = SignallingOutbox(consumer._writer)
    await installation.publish_many(subscription, 10)
    async with batches(consumer) as found, Notifier(installation.url) as signals:
        await asyncio.wait_for(consumer._wake.wait(), PATIENCE_S)
        assert len(await anext(found)) == 10
        for claims in range(1, 6):
            assert outbox.claims == claims
            outbox.asked.clear()
            following = asyncio.ensure_future(anext(found))
            await asyncio.wait_for(outbox.asked.wait(), PATIENCE_S)
            await installation.publish_many(
                subscription, 10, due=await installation.value("SELECT now()")
            )
            signals.notify(Channel.PUSH)
            assert len(await following) == 10


async def test_a_death_is_noticed_however_seldom_the_whole_queue_is_scanned(
    installation: Installation,
) -> None:
    """If a full scan takes long, it is made seldom; workers that died since are still looked up."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await installation.queue(copy)

    async def claim_once() -> Sequence[DeliveryTask]:
        return (await heir._claim(10, time.monotonic())).tasks

    async with PostgresConsumer(installation.url, credit=10, claim_s=60) as heir:
        async with PostgresConsumer(installation.url, credit=10, claim_s=60) as doomed:
            assert len((await doomed._claim(10, time.monotonic())).tasks) == 1
            assert not await claim_once()
            heir._next_full_scan = float("inf")
            assert not await claim_once()
        (found,) = await until(claim_once, "the copy of the dead")
    assert found.delivery_id == copy.delivery_id


async def test_payloads_in_memory_are_bounded(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many copies the credit allows: no more bytes than that, by one batch."""
    monkeypatch.setattr(postgres, "_BATCH", 4)
    monkeypatch.setattr(postgres, "_MAX_UNSETTLED_BYTES", 100_000)
    subscription = await installation.subscribe()
    for _ in range(40):
        await installation.queue(*await installation.publish(subscription, payload=b"x" * 10_000))
    consumer, taken, most = PostgresConsumer(installation.url, credit=1000, claim_s=60), 0, 0
    held: list[DeliveryTask] = []
    async with LogWriter(installation.url, kind="settler") as writer, batches(consumer) as found:
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
        outcomes = [DeliveryOutcome(task=copy, state=State.DELIVERED) for copy in held]
        await OutcomeQueries(writer).decide(outcomes, worker=consumer.worker_id)
    assert most == 100_000
    assert taken == 10


async def test_settling_what_another_consumer_took_gives_no_credit(
    installation: Installation,
) -> None:
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


async def test_settling_a_copy_again_and_again_gives_its_credit_once(
    installation: Installation,
) -> None:
    subscription = await installation.subscribe()
    await installation.publish_many(subscription, 10)
    consumer = PostgresConsumer(installation.url, credit=3, claim_s=60, poll_s=0.05)
    async with batches(consumer) as found:
        first, *_ = await anext(found)
        await consumer.settle([first] * 3)
        await consumer.settle([first])
        assert len(await anext(found)) == 1


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


async def test_copies_of_a_frozen_consumer_come_back_at_the_deadline(
    installation: Installation,
) -> None:
    """Its session lives, it does nothing more, and takes nothing more because its credit is spent."""
    subscription = await installation.subscribe()
    async with PostgresBroker(installation.url, claim_s=1.0) as broker:
        await sent(installation, broker, subscription, 3)
        async with taking(broker, credit=3) as frozen:
            held = deliveries(await frozen.has(3))
            async with taking(broker) as other:
                again = deliveries(await other.has(3, within_s=COMES_BACK_S))
                assert sorted(again) == sorted(held)
                await frozen.consumer.release(frozen.copies)
                await finish(installation, other, other.copies)
                assert await broker.depth(None) == 0


async def test_a_copy_whose_claim_ran_out_is_not_released_for_its_next_owner(
    installation: Installation,
) -> None:
    subscription = await installation.subscribe()
    async with PostgresBroker(installation.url, claim_s=0.3) as broker:
        await sent(installation, broker, subscription, 1)
        async with taking(broker, credit=2) as taker:
            old, new = (await taker.has(2))[:2]
            assert old.delivery_id == new.delivery_id
            before = await installation.work("outbox", new)
            await taker.consumer.release([old])
            after = await installation.work("outbox", new)
            assert before is not None
            assert after is not None
            assert after["claimed_until"] >= before["claimed_until"]


async def test_excluding_and_admitting_in_turn_loses_nothing(
    installation: Installation, broker: PostgresBroker
) -> None:
    subscriptions = [await installation.subscribe() for _ in range(4)]
    total = 0
    async with taking(broker, credit=50_000) as taker:
        for turn in range(40):
            taker.consumer.exclude(frozenset(subscriptions[turn % 4 : turn % 4 + 2]))
            for subscription in subscriptions:
                await installation.publish_many(subscription, 5, due=datetime.now(UTC))
                total += 5
        taker.consumer.exclude(frozenset())
        found = await taker.has(total)
    assert len(set(deliveries(found))) == total == len(found)


async def test_a_ring_wakes_the_consumer_long_before_its_poll(installation: Installation) -> None:
    subscription = await installation.subscribe()
    async with (
        PostgresBroker(installation.url, claim_s=60.0, poll_s=600.0) as broker,
        Notifier(installation.url) as signals,
        taking(broker) as taker,
    ):
        for count in range(1, 6):
            (copy,) = await installation.publish(subscription)
            await broker.send([copy], not_before=[await installation.value("SELECT now()")])
            signals.notify(Channel.PUSH)
            assert (await taker.has(count))[-1].delivery_id == copy.delivery_id


async def test_a_slow_commit_is_not_left_to_the_poll(installation: Installation) -> None:
    """A due time is fixed when its transaction begins.

    Meanwhile the consumer sees, and takes, younger copies.
    """
    subscription = await installation.subscribe()
    async with (
        PostgresBroker(installation.url, claim_s=60.0, poll_s=600.0) as broker,
        Notifier(installation.url) as signals,
        installed(installation.url) as slow,
        taking(broker) as taker,
    ):
        count = 0

        async def another() -> None:
            nonlocal count
            count += 1
            (copy,) = await installation.publish(subscription)
            await broker.send([copy], not_before=[await installation.value("SELECT now()")])
            signals.notify(Channel.PUSH)
            await taker.has(count)

        await another()
        async with slow.connection.transaction():
            (late,) = await slow.publish(subscription)
            await slow.queue(late, due=await slow.value("SELECT now()"))
            while await slow.value("SELECT clock_timestamp() < now() + interval '0.2 s'"):
                await another()
        signals.notify(Channel.PUSH)
        assert (await taker.has(count + 1))[-1].delivery_id == late.delivery_id


async def test_stopping_in_the_middle_of_a_scan_keeps_the_claims(
    installation: Installation, broker: PostgresBroker
) -> None:
    """A consumer that stops taking may have attempts in progress, whose claims must live until it closes."""
    subscription = await installation.subscribe()
    (copy,) = await sent(installation, broker, subscription, 1)
    async with broker.consume(credit=CREDIT) as other:
        for turns in range(40):
            async with broker.consume(credit=CREDIT) as consumer:
                taker = Taker(consumer)
                task = asyncio.create_task(taker.pump())
                await taker.has(1, within_s=COMES_BACK_S)
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                thief = Taker(other)
                looking = asyncio.create_task(thief.pump())
                with pytest.raises(AssertionError):
                    await thief.has(1, within_s=0.05)
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
                await consumer.release(taker.copies)
    async with taking(broker) as taker:
        assert deliveries(await taker.has(1)) == [copy.delivery_id]


async def test_the_version_of_the_subscription_is_carried(
    installation: Installation, broker: PostgresBroker
) -> None:
    changed, deleted = await installation.subscribe(), await installation.subscribe()
    await installation.change(changed, timeout_ms=1000)
    await installation.change(deleted, status="deleted")
    copies = [*await installation.publish(changed), *await installation.publish(deleted)]
    await broker.send(copies, not_before=[ago(2), ago(1)])
    async with taking(broker) as taker:
        found = await taker.has(2)
    assert [copy.subscription_version for copy in found] == [2, None]


async def abandoned(installation: Installation) -> int | None:
    found: int | None = await installation.value("SELECT abandoned FROM outbox")
    return found


async def test_claims_that_end_with_their_worker_are_counted(installation: Installation) -> None:
    """Given back they are not, nor once the copy was decided; the copy says how many there were."""
    subscription = await installation.subscribe(delivery_attempts=5)
    (copy,) = await installation.publish(subscription)
    await installation.queue(copy)
    for deaths in range(3):
        async with PostgresConsumer(installation.url, credit=10, claim_s=60) as doomed:
            (taken,) = (await doomed._claim(10, time.monotonic())).tasks
            assert taken.crash_count == deaths
            assert await abandoned(installation) == (deaths or None)
        await installation.gone("rooms worker")
    async with PostgresConsumer(installation.url, credit=10, claim_s=60) as consumer:
        (taken,) = (await consumer._claim(10, time.monotonic())).tasks
        consumer._shares.add([taken], {})
        await consumer.release([taken])
        (again,) = (await consumer._claim(10, time.monotonic())).tasks
        assert (taken.crash_count, again.crash_count) == (3, 3)
        async with LogWriter(installation.url, kind="settler") as writer:
            outcomes, holds = OutcomeQueries(writer), Holds(writer)
            await outcomes.decide(
                [DeliveryOutcome(task=again, state=State.HELD, reason=Reason.SATURATED)],
                worker=consumer.worker_id,
            )
            assert await holds.release(HeldGroup(subscription, Reason.SATURATED), limit=10) == 1
            (held,) = (await consumer._claim(10, time.monotonic())).tasks
            assert (held.generation, held.crash_count) == (1, 3)
            await outcomes.decide(
                [DeliveryOutcome(task=held, state=State.QUEUED)], worker=consumer.worker_id
            )
        assert await abandoned(installation) is None
        (later,) = (await consumer._claim(10, time.monotonic())).tasks
        assert (later.attempt, later.crash_count) == (1, 0)


async def test_a_claim_that_ran_out_is_counted_too(installation: Installation) -> None:
    """The worker that had it is suspended: a copy may have had the same effect."""
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.queue(copy)
    async with (
        PostgresConsumer(installation.url, credit=10, claim_s=60) as frozen,
        PostgresConsumer(installation.url, credit=10, claim_s=60) as heir,
    ):
        await frozen._claim(10, time.monotonic())
        await installation.rows("UPDATE outbox SET claimed_until = now() - interval '1 s'")
        (taken,) = (await heir._claim(10, time.monotonic())).tasks
    assert taken.crash_count == 1


@pytest.mark.parametrize("others", [0, 3])
async def test_claims_in_turn_are_as_small_as_their_time_allows(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Another organisation waits for each claim; without one, claims stay large."""
    monkeypatch.setattr("delivery.brokers.postgres._TURN_S", 1e-9)
    large, small = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, small)
    await installation.publish_many(large, 2_000, due=ago(60))
    if others:
        await installation.publish_many(small, others, due=ago(1))
    consumer = PostgresConsumer(installation.url, credit=10_000, claim_s=60, poll_s=0.01)
    sizes: list[int] = []
    async with batches(consumer) as found:
        while sum(sizes) < 2_000 + others:
            batch = [copy.subscription_id for copy in await anext(found)]
            sizes.append(len(batch))
            # More for the other one, so that it is one of several to the end.
            if others and small in batch and sum(sizes) < 2_000:
                await installation.publish_many(small, 1, due=ago(0))
                others += 1
    assert sizes[0] == 500
    if others:
        assert sizes[:3] == [500, 3, 20]
        assert set(sizes[3:]) <= {1, 20, sizes[-1]}
    else:
        assert sizes[:3] == [500, 500, 500]


async def test_a_burst_of_one_organisation_keeps_no_other_waiting(
    installation: Installation,
) -> None:
    """Claim what was published behind it in the second batch, and all of it once."""
    large, small = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, small)
    await installation.publish_many(large, 3_000, due=ago(60))
    await installation.publish_many(small, 3, due=ago(1))
    consumer = PostgresConsumer(installation.url, credit=10_000, claim_s=60, poll_s=600)
    seen: list[list[str]] = []
    async with batches(consumer) as found:
        while sum(map(len, seen)) < 3_005:
            seen.append([copy.subscription_id for copy in await anext(found)])
            if len(seen) == 3:
                await installation.publish_many(small, 2, due=ago(0))
            if len(seen) == 5:
                assert [batch.count(small) for batch in seen] == [0, 3, 0, 2, 0]
    assert sum(batch.count(small) for batch in seen) == 5


async def test_tasks_without_outcomes_leave_credit_to_other_organisations(
    installation: Installation,
) -> None:
    """Two webhooks of an organisation hang in all their slots, and have more than the credit."""
    hanging = [await installation.subscribe() for _ in range(2)]
    free = await installation.subscribe()
    await other_organisation(installation, free)
    for subscription in hanging:
        await installation.publish_many(subscription, 4, due=ago(60))
    consumer = PostgresConsumer(installation.url, credit=8, claim_s=60, poll_s=0.1)
    async with batches(consumer) as found, Notifier(installation.url, listeners={}) as signals:
        taken = await anext(found)
        assert len(taken) == 4
        claiming = asyncio.ensure_future(anext(found))
        await asyncio.sleep(0.3)
        assert not claiming.done(), "no further one of that organisation"
        for _ in range(3):
            await installation.publish_many(free, 1, due=ago(0))
            signals.notify(Channel.PUSH)
            async with asyncio.timeout(1.0):
                batch = await claiming
            assert [task.subscription_id for task in batch] == [free]
            await consumer.settle(batch)
            claiming = asyncio.ensure_future(anext(found))
        assert not claiming.done()
        await installation.rows("DELETE FROM outbox WHERE id = ANY (%s::uuid[])", deliveries(taken))
        await consumer.settle(taken)
        left = list(await claiming)
        while len(left) < 4:
            left += await anext(found)
        assert {task.subscription_id for task in left} <= set(hanging)


async def test_large_tasks_without_outcomes_leave_memory_to_other_organisations(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_MAX_UNSETTLED_BYTES", 100_000)
    monkeypatch.setattr(postgres, "_BATCH", 5)
    large, free = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, free)
    for _ in range(20):
        copies = await installation.publish(large, payload=b'"%b"' % (b"x" * 10_000))
        await installation.queue(*copies)
    consumer = PostgresConsumer(installation.url, credit=10_000, claim_s=60, poll_s=0.1)
    async with batches(consumer) as found, Notifier(installation.url, listeners={}) as signals:
        assert len(await anext(found)) == 5
        claiming = asyncio.ensure_future(anext(found))
        await asyncio.sleep(0.3)
        assert not claiming.done()
        await installation.publish_many(free, 1, due=ago(0))
        signals.notify(Channel.PUSH)
        async with asyncio.timeout(1.0):
            assert [task.subscription_id for task in await claiming] == [free]


async def test_an_organisation_over_its_share_that_takes_turns_is_skipped_without_pause_for_others(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turns are left out, and none of its rows is passed over for good."""
    monkeypatch.setattr(postgres, "_BATCH", 4)
    bulk, free = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, free)
    await installation.publish_many(bulk, 40, due=ago(60))
    consumer = PostgresConsumer(installation.url, credit=32, claim_s=60, poll_s=600)
    claims = 0
    real = consumer._outbox.claim

    async def claim(**options: Any) -> ClaimedBatch:
        nonlocal claims
        claims += 1
        return await real(**options)

    monkeypatch.setattr(consumer._outbox, "claim", claim)
    done: list[str] = []
    async with batches(consumer) as found, Notifier(installation.url, listeners={}) as signals:
        taken: list[DeliveryTask] = []
        while len(taken) < 14:
            taken += await anext(found)
        before = claims
        claiming = asyncio.ensure_future(anext(found))
        await asyncio.sleep(0.3)
        assert not claiming.done()
        assert claims <= before + 3, "it does not claim again and again in vain"
        await installation.publish_many(free, 1, due=ago(0))
        signals.notify(Channel.PUSH)
        async with asyncio.timeout(1.0):
            assert [task.subscription_id for task in await claiming] == [free]
        while len(done) < 40:
            await installation.rows(
                "DELETE FROM outbox WHERE id = ANY (%s::uuid[])", deliveries(taken)
            )
            done += deliveries(taken)
            await consumer.settle(taken)
            if len(done) < 40:
                taken = list(await anext(found))
    assert len(set(done)) == 40


async def test_a_lone_organisation_may_use_all_of_the_credit(installation: Installation) -> None:
    await installation.publish_many(await installation.subscribe(), 10, due=ago(60))
    consumer = PostgresConsumer(installation.url, credit=8, claim_s=60, poll_s=0.1)
    async with batches(consumer) as found:
        assert len(await anext(found)) == 8


@pytest.mark.parametrize("status", ["deleted", "terminated"])
@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
async def test_a_backlog_of_an_ended_subscription_keeps_no_other_waiting(
    installation: Installation, status: str, *, is_known: bool
) -> None:
    """It ends before any claim, or while its organisation takes turns already."""
    large, small = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, small)
    await installation.publish_many(large, 5_000, due=ago(60))
    consumer = PostgresConsumer(installation.url, credit=10_000, claim_s=60, poll_s=600)
    async with batches(consumer) as found:
        if is_known:
            for _ in range(2):
                assert {copy.subscription_id for copy in await anext(found)} == {large}
        await installation.rows(
            "UPDATE subscriptions SET status = %s, version = version + 1 WHERE id = %s",
            status,
            large,
        )
        await installation.publish_many(small, 1, due=ago(1))
        batch = await anext(found) + await anext(found)
    assert [copy.subscription_id for copy in batch].count(small) == 1
    ended = {copy.subscription_version for copy in batch if copy.subscription_id == large}
    assert ended == {None}, "they will be cancelled"


async def test_rows_whose_subscription_is_gone_keep_no_other_organisation_from_taking_turns(
    installation: Installation,
) -> None:
    gone, large, small = [await installation.subscribe() for _ in range(3)]
    await other_organisation(installation, small)
    await installation.publish_many(gone, 10, due=ago(70))
    await installation.publish_many(large, 3_000, due=ago(60))
    await installation.publish_many(small, 3, due=ago(1))
    await installation.rows("DELETE FROM subscriptions WHERE id = %s", gone)
    consumer = PostgresConsumer(installation.url, credit=10_000, claim_s=60, poll_s=600)
    async with batches(consumer) as found:
        first, second = [await anext(found) for _ in range(2)]
    assert [copy.subscription_version for copy in first[:10]] == [None] * 10
    assert [copy.subscription_id for copy in second] == [small] * 3


async def test_claims_are_small_from_the_second_one_of_a_burst_beside_another_organisation(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known yet who is backlogged, and the next message of the other may come now."""
    monkeypatch.setattr(postgres, "_TURN_S", 1e-9)
    large, small = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, small)
    await installation.publish_many(small, 1, due=ago(1))
    consumer = PostgresConsumer(installation.url, credit=10_000, claim_s=60, poll_s=0.01)
    async with batches(consumer) as found:
        sizes = [len(await anext(found))]
        await installation.publish_many(large, 600, due=ago(0))
        while sum(sizes) < 601:
            sizes.append(len(await anext(found)))
    assert sizes == [1, 500, 20, 20, 20, 20, 20]


@pytest.mark.parametrize("organisations", [1, 2])
async def test_work_is_not_gathered_for_long_while_organisations_take_turns(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, organisations: int
) -> None:
    """Let the pause after a claim, which saves claims at a high rate, last for an hour."""
    monkeypatch.setattr(postgres, "_MAX_LINGER_S", 3_600.0)
    monkeypatch.setattr(postgres, "_FULL_LINGER_RATE_PER_S", 1e-6)
    first, second = await installation.subscribe(), await installation.subscribe()
    if organisations > 1:
        await other_organisation(installation, second)
    for subscription in (first, second):
        await installation.publish_many(subscription, 1, due=ago(1))
    consumer = PostgresConsumer(installation.url, credit=100, claim_s=60, poll_s=0.01)
    async with batches(consumer) as found:
        assert len(await anext(found)) == 2
        await installation.publish_many(first, 1, due=ago(0))
        if organisations > 1:
            assert len(await asyncio.wait_for(anext(found), PATIENCE_S)) == 1
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(found), 0.3)


class OfSeveral(BurstPacer):
    """Pace the work of several organisations with rests of this length."""

    has_several_organisations = True
    is_pacing = False

    def __init__(self, rest_s: float = 0.0, *, is_pacing: bool = False) -> None:
        super().__init__(schedule_s=lambda: (0.0, 0.0))
        self.limit_s = rest_s
        self.is_pacing = is_pacing

    def rest_s(self, took_s: float) -> float:
        assert took_s > 0
        return self.limit_s


async def test_claims_of_many_tasks_rest_and_those_of_few_do_not(
    installation: Installation,
) -> None:
    subscription = await installation.subscribe()
    consumer = PostgresConsumer(
        installation.url, credit=1_000, claim_s=60, poll_s=0.01, pacer=OfSeveral(rest_s=3_600.0)
    )
    async with batches(consumer) as found:
        for _ in range(2):
            await installation.publish_many(subscription, 1, due=ago(0))
            assert len(await asyncio.wait_for(anext(found), PATIENCE_S)) == 1
        await installation.publish_many(subscription, 20, due=ago(0))
        assert len(await asyncio.wait_for(anext(found), PATIENCE_S)) == 20
        await installation.publish_many(subscription, 1, due=ago(0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(found), 0.3)


async def test_only_the_claims_of_a_backlog_rest(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of others come at once, and again with each notification."""
    monkeypatch.setattr(postgres, "_BATCH", 30)
    bulk, other = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, other)
    await installation.publish_many(bulk, 100, due=ago(1))
    pacer = OfSeveral(rest_s=3_600.0)
    consumer = PostgresConsumer(installation.url, credit=1_000, claim_s=60, poll_s=600, pacer=pacer)
    async with batches(consumer) as found, Notifier(installation.url, listeners={}) as signals:
        assert len(await asyncio.wait_for(anext(found), PATIENCE_S)) == 30
        for count in (1, 2):
            claiming = asyncio.ensure_future(anext(found))
            await asyncio.sleep(0.3)
            assert not claiming.done(), "the backlog rests"
            await installation.publish_many(other, count, due=ago(0))
            signals.notify(Channel.PUSH)
            tasks = await asyncio.wait_for(claiming, PATIENCE_S)
            assert [task.subscription_id for task in tasks] == [other] * count
        pacer.limit_s = 0.0
        consumer._backlog_rests_until = 0.0
        claiming = asyncio.ensure_future(anext(found))
        signals.notify(Channel.PUSH)
        left = list(await asyncio.wait_for(claiming, PATIENCE_S))
        while len(left) < 70:
            left += await asyncio.wait_for(anext(found), PATIENCE_S)
        assert {task.subscription_id for task in left} == {bulk}


@pytest.mark.parametrize(("is_pacing", "rows"), [(True, 10), (False, 30)])
async def test_a_backlog_takes_fewer_rows_a_turn_while_processors_are_short(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, *, is_pacing: bool, rows: int
) -> None:
    """Those of others are claimed together, however many they are."""
    monkeypatch.setattr(postgres, "_BATCH", 30)
    monkeypatch.setattr(postgres, "_TURN_S", 60.0)
    monkeypatch.setattr(postgres, "_PACED_BATCH", 10)
    bulk, other = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, other)
    await installation.publish_many(bulk, 200, due=ago(1))
    consumer = PostgresConsumer(
        installation.url,
        credit=1_000,
        claim_s=60,
        poll_s=600,
        pacer=OfSeveral(is_pacing=is_pacing),
    )
    async with batches(consumer) as found:
        assert len(await asyncio.wait_for(anext(found), PATIENCE_S)) == 30, "none is backlogged yet"
        await installation.publish_many(other, 15, due=ago(0))
        sizes: dict[SubscriptionId, list[int]] = {bulk: [], other: []}
        while not all(sizes.values()):
            tasks = await asyncio.wait_for(anext(found), PATIENCE_S)
            assert len({task.subscription_id for task in tasks}) == 1
            sizes[tasks[0].subscription_id].append(len(tasks))
    assert sizes[other] == [15]
    assert set(sizes[bulk]) == {rows}


async def test_claims_of_others_do_not_extend_the_rest_of_a_backlog(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would wait for as long as others have many tasks together, each of them few."""
    monkeypatch.setattr(postgres, "_BATCH", 30)
    bulk = await installation.subscribe()
    others = [await installation.subscribe() for _ in range(20)]
    for number, one in enumerate(others):
        await other_organisation(installation, one, name=f"other {number}")
    await installation.publish_many(bulk, 100, due=ago(1))
    pacer = OfSeveral(rest_s=3_600.0)
    consumer = PostgresConsumer(installation.url, credit=1_000, claim_s=60, poll_s=600, pacer=pacer)
    async with batches(consumer) as found, Notifier(installation.url, listeners={}) as signals:
        assert len(await asyncio.wait_for(anext(found), PATIENCE_S)) == 30
        claiming = asyncio.ensure_future(anext(found))
        await asyncio.sleep(0.3)
        assert not claiming.done(), "the backlog rests"
        for one in others:
            await installation.publish_many(one, 1, due=ago(0))
        consumer._backlog_rests_until = time.monotonic() + 0.5
        signals.notify(Channel.PUSH)
        assert len(await asyncio.wait_for(claiming, PATIENCE_S)) == 20
        tasks = await asyncio.wait_for(anext(found), PATIENCE_S)
        assert {task.subscription_id for task in tasks} == {bulk}


async def test_a_release_of_an_earlier_session_frees_no_later_claim(
    installation: Installation,
) -> None:
    """An attempt of the later claim is under way: another worker would make a second one."""
    subscription = await installation.subscribe()
    await installation.publish_many(subscription, 1, due=ago(0))

    def consumer() -> PostgresConsumer:
        return PostgresConsumer(installation.url, credit=10, claim_s=60, poll_s=0.1)

    first, second, others = consumer(), consumer(), consumer()
    async with batches(first) as found:
        (earlier,) = await asyncio.wait_for(anext(found), PATIENCE_S)
    async with batches(second) as found, batches(others) as found_by_others:
        (later,) = await asyncio.wait_for(anext(found), PATIENCE_S)
        assert later.delivery_id == earlier.delivery_id
        await second.release([earlier])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(found_by_others), 0.5)
        await second.release([later])
    async with batches(consumer()) as found:
        (again,) = await asyncio.wait_for(anext(found), PATIENCE_S)
        assert again.delivery_id == earlier.delivery_id


async def test_what_a_small_claim_leaves_is_claimed_at_once(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fill claims with tasks of so many organisations that none is backlogged; nothing wakes."""
    monkeypatch.setattr(postgres, "_TURN_S", 1e-9)
    subscriptions = [await installation.subscribe() for _ in range(40)]
    for number, subscription in enumerate(subscriptions):
        await other_organisation(installation, subscription, name=f"other {number}")
    for minutes in range(5, 0, -1):
        for subscription in subscriptions:
            await installation.publish_many(subscription, 1, due=ago(60 * minutes))
    consumer = PostgresConsumer(
        installation.url, credit=1_000, claim_s=60, poll_s=600, pacer=OfSeveral()
    )
    consumer._rows_of_a_turn = 1
    sizes: list[int] = []
    async with asyncio.timeout(PATIENCE_S), batches(consumer) as found:
        while sum(sizes) < 200:
            sizes.append(len(await anext(found)))
    assert sizes == [20] * 10
