"""The contract of `rooms.ports.Broker`, the same for every adapter.

With every adapter a copy is done with when the decision about it is committed and the copy is settled, in this order.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import pytest

from rooms.brokers.postgres import PostgresBroker
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import State, SubscriptionType
from rooms.embedded import temporary_postgres
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker, Consumer
from rooms.storage.outcomes import Outcome, Outcomes
from rooms.storage.schema import migrate
from rooms.storage.signals import Channel, Signals
from rooms.storage.writer import Writer
from tests.installation import PATIENCE_S, Installation, ago, installed, until

COMES_BACK_S = 2.0
CREDIT = 1000


class Opener(Protocol):
    """Opens an adapter on an installation's database."""

    def __call__(
        self, url: str, *, claim_s: float = 60.0, poll_s: float = 1.0
    ) -> AbstractAsyncContextManager[Broker]: ...


@dataclass(frozen=True)
class Adapter:
    """One adapter and what a test must know of it: `session` names the server's sessions of its consumers."""

    name: str
    open: Opener
    session: str


def open_postgres(url: str, *, claim_s: float = 60.0, poll_s: float = 1.0) -> PostgresBroker:
    return PostgresBroker(url, claim_s=claim_s, poll_s=poll_s)


ADAPTERS = [Adapter(name="postgres", open=open_postgres, session="rooms worker")]


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.name)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    found: Adapter = request.param
    return found


@pytest.fixture
async def installation(database: str) -> AsyncIterator[Installation]:
    async with installed(database) as installation:
        yield installation


@pytest.fixture
async def broker(adapter: Adapter, database: str) -> AsyncIterator[Broker]:
    async with adapter.open(database) as broker:
        yield broker


class Taker:
    """A consumer and the copies it has brought so far."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.copies: list[Copy] = []
        self.error: BaseException | None = None
        self._came = asyncio.Condition()

    async def pump(self) -> None:
        try:
            async for batch in self.consumer.batches():
                async with self._came:
                    self.copies.extend(batch)
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

    async def breaks(self) -> BaseException:
        """The error that ended the batches."""
        async with asyncio.timeout(PATIENCE_S), self._came:
            await self._came.wait_for(lambda: self.error is not None)
        assert self.error is not None
        return self.error


@asynccontextmanager
async def taking(
    broker: Broker, *, credit: int = CREDIT, excluded: Sequence[SubscriptionId] = ()
) -> AsyncIterator[Taker]:
    async with broker.consume(credit=credit) as consumer:
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


async def test_a_copy_comes_as_it_was_sent(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(
        subscription,
        payload=bytes(range(256)),
        headers={"x-one": "1"},
        priority=7,
        lifetime_s=60,
        generation=2,
        attempt=3,
        delay_ms=400,
        correlation_id='tricky "\\{,} value',
    )
    await broker.send([copy], not_before=[ago()])
    async with taking(broker) as taker:
        (found,) = await taker.has(1)
    for name in (
        "room_id", "delivery_id", "message_id", "subscription_id", "kind", "generation", "attempt", "delay_ms",
        "priority", "event_type", "event_version", "correlation_id", "subscription_version", "headers", "payload",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(copy, name), name
    assert found.dedup_id == f"{copy.delivery_id}:2:3"
    assert abs(found.published_ms - copy.published_ms) < 5000


@pytest.mark.row("A8")
async def test_expiry_is_carried(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    (mortal,) = await installation.publish(subscription, lifetime_s=30)
    (immortal,) = await installation.publish(subscription)
    await broker.send([mortal, immortal], not_before=[ago(2), ago(1)])
    async with taking(broker) as taker:
        first, second = await taker.has(2)
    assert mortal.expires_ms is not None
    assert first.expires_ms is not None
    assert abs(first.expires_ms - mortal.expires_ms) < 2000
    assert second.expires_ms is None


async def test_the_version_of_the_subscription_is_carried(installation: Installation, broker: Broker) -> None:
    changed, deleted = await installation.subscribe(), await installation.subscribe()
    await installation.change(changed, timeout_ms=1000)
    await installation.change(deleted, status="deleted")
    copies = [*await installation.publish(changed), *await installation.publish(deleted)]
    await broker.send(copies, not_before=[ago(2), ago(1)])
    async with taking(broker) as taker:
        found = await taker.has(2)
    assert [copy.subscription_version for copy in found] == [2, None]


async def test_settled_copies_do_not_come_again(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    copies = await sent(installation, broker, subscription, 3)
    async with taking(broker) as taker:
        taken = list(await taker.has(3))
        await finish(installation, taker, taken)
    assert await broker.depth(None) == 0
    (last,) = await sent(installation, broker, subscription, 1)
    async with taking(broker) as taker:
        assert deliveries(await taker.has(1)) == [last.delivery_id]
    assert sorted(deliveries(taken)) == sorted(deliveries(copies))


async def test_settling_twice_is_harmless(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    await sent(installation, broker, subscription, 9)
    async with taking(broker, credit=3) as taker:
        first = list(await taker.has(3))
        await finish(installation, taker, first)
        await taker.consumer.settle(first)
        await taker.consumer.settle(first)
        await taker.has(6)
        with pytest.raises(AssertionError):
            await taker.has(7, within_s=0.3)  # the credit was given back once
        await finish(installation, taker, taker.copies[3:])
        assert len(set(deliveries(await taker.has(9)))) == 9


async def test_unsettled_copies_come_back_when_the_consumer_closes(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    copies = await sent(installation, broker, subscription, 5)
    async with taking(broker) as taker:
        first = list(await taker.has(5))
        await finish(installation, taker, first[:2])
    async with taking(broker) as taker:
        again = await taker.has(3, within_s=COMES_BACK_S)
    assert sorted(deliveries(again)) == sorted(set(deliveries(copies)) - set(deliveries(first[:2])))


async def test_copies_of_a_dead_consumer_come_to_another(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    copies = await sent(installation, broker, subscription, 5)
    async with taking(broker) as doomed:
        await doomed.has(5)
        async with taking(broker) as heir:
            victim = (await installation.backends(adapter.session))[0]
            await installation.rows("SELECT pg_terminate_backend(%s)", victim)
            assert sorted(deliveries(await heir.has(5, within_s=COMES_BACK_S))) == sorted(deliveries(copies))


async def test_copies_of_a_dead_consumer_come_to_a_busy_one(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    """However much else waits: every batch of the heir is a full one, for longer than a dead consumer may go unseen."""
    subscription = await installation.subscribe()
    copies = await sent(installation, broker, subscription, 5)
    async with taking(broker) as doomed:
        await doomed.has(5)
        await installation.publish_many(subscription, 5000, due=ago(30))
        async with taking(broker, credit=40) as heir:
            await heir.has(40)
            victim = (await installation.backends(adapter.session))[0]
            await installation.rows("SELECT pg_terminate_backend(%s)", victim)
            orphans, deadline = set(deliveries(copies)), time.monotonic() + COMES_BACK_S
            while not orphans <= set(deliveries(heir.copies)):
                assert time.monotonic() < deadline
                count = len(heir.copies)
                await finish(installation, heir, heir.copies[-40:])
                await heir.has(count + 1)


async def test_copies_of_a_frozen_consumer_come_back_at_the_deadline(
    adapter: Adapter, installation: Installation
) -> None:
    """Its session lives, it does nothing more, and takes nothing more because its credit is spent."""
    subscription = await installation.subscribe()
    async with adapter.open(installation.url, claim_s=1.0) as broker:
        await sent(installation, broker, subscription, 3)
        async with taking(broker, credit=3) as frozen:
            held = deliveries(await frozen.has(3))
            async with taking(broker) as other:
                again = deliveries(await other.has(3, within_s=1.0 + COMES_BACK_S))
                assert sorted(again) == sorted(held)
                await frozen.consumer.release(frozen.copies)
                await finish(installation, other, other.copies)
                assert await broker.depth(None) == 0


async def test_the_same_step_sent_twice_is_one_copy(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await broker.send([copy], not_before=[ago()])
    await broker.send([copy], not_before=[ago()])
    assert await broker.depth(None) == 1
    async with taking(broker) as taker:
        await taker.has(1)
        await broker.send([copy], not_before=[ago()])
        (last,) = await sent(installation, broker, subscription, 1)
        assert deliveries(await taker.has(2)) == [copy.delivery_id, last.delivery_id]


async def test_a_step_that_was_decided_is_not_queued_again(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    (copy,) = await sent(installation, broker, subscription, 1)
    async with taking(broker) as taker:
        await finish(installation, taker, await taker.has(1))
        await broker.send([copy], not_before=[ago()])
        assert await broker.depth(None) == 0


@pytest.mark.row("A9")
async def test_a_copy_is_not_handed_out_before_its_time(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    (late,) = await installation.publish(subscription)
    (soon,) = await installation.publish(subscription)
    (due,) = await installation.publish(subscription)
    now: datetime = await installation.value("SELECT now()")
    times = [now + timedelta(seconds=1.2), now + timedelta(seconds=0.6), now]
    await broker.send([late, soon, due], not_before=times)
    came: list[datetime] = []
    async with taking(broker) as taker:
        for count in (1, 2, 3):
            await taker.has(count)
            came.append(await installation.value("SELECT clock_timestamp()"))
    assert deliveries(taker.copies) == deliveries([due, soon, late])
    assert came[1] >= times[1]
    assert came[2] >= times[0]


async def test_higher_priorities_come_first_then_what_was_due_first(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    wanted = []
    for priority in (0, 9, 4, 5, 1, 8, 2, 7, 3, 6):
        wanted += [
            (9 - priority, copy.delivery_id)
            for copy in await sent(installation, broker, subscription, 3, priority=priority)
        ]
    async with taking(broker) as taker:
        found = await taker.has(30)
    assert deliveries(found) == [identity for _, identity in sorted(wanted, key=lambda pair: pair[0])]
    assert [copy.priority for copy in found] == [priority for priority in range(9, -1, -1) for _ in range(3)]


async def test_released_copies_come_again_at_once(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    await sent(installation, broker, subscription, 4)
    async with taking(broker, credit=4) as taker:
        first = list(await taker.has(4))
        await taker.consumer.release(first[:2])
        assert sorted(deliveries((await taker.has(6))[4:])) == sorted(deliveries(first[:2]))


async def test_a_copy_whose_claim_ran_out_is_not_released_for_its_next_owner(
    adapter: Adapter, installation: Installation
) -> None:
    subscription = await installation.subscribe()
    async with adapter.open(installation.url, claim_s=0.3) as broker:
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


async def test_excluded_subscriptions_are_left_where_they_are(installation: Installation, broker: Broker) -> None:
    busy, free = await installation.subscribe(), await installation.subscribe()
    waiting = await sent(installation, broker, busy, 3)
    wanted = await sent(installation, broker, free, 2)
    async with taking(broker, excluded=[busy]) as taker:
        assert deliveries(await taker.has(2)) == deliveries(wanted)
        more = await sent(installation, broker, free, 2)
        assert deliveries((await taker.has(4))[2:]) == deliveries(more)
        assert await broker.depth(None) == 7
        taker.consumer.exclude(frozenset())
        assert deliveries((await taker.has(7, within_s=0.5))[4:]) == deliveries(waiting)


async def test_excluding_and_admitting_in_turn_loses_nothing(installation: Installation, broker: Broker) -> None:
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


async def test_the_credit_is_never_exceeded(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    await installation.publish_many(subscription, 60)
    async with taking(broker, credit=7) as taker:
        done = 0
        while done < 60:
            await taker.has(done + 1)
            assert len(taker.copies) - done <= 7
            part = taker.copies[done : done + 3]
            await finish(installation, taker, part)
            done += len(part)
            assert len(taker.copies) - done <= 7
    assert len(set(deliveries(taker.copies))) == 60


async def test_two_consumers_never_hold_the_same_copy(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    async with AsyncExitStack() as stack:
        takers = [await stack.enter_async_context(taking(broker, credit=10_000)) for _ in range(3)]
        for _ in range(10):
            await installation.publish_many(subscription, 300)
        await until(lambda: all_taken(takers, 3000), "all copies")
    together = [identity for taker in takers for identity in deliveries(taker.copies)]
    assert len(together) == len(set(together)) == 3000


async def all_taken(takers: Sequence[Taker], count: int) -> bool:
    return sum(len(taker.copies) for taker in takers) >= count


async def test_purge_forgets_what_nobody_took(installation: Installation, broker: Broker) -> None:
    purged, kept = await installation.subscribe(), await installation.subscribe()
    await sent(installation, broker, purged, 3)
    async with taking(broker, credit=1) as taker:
        (taken,) = await taker.has(1)
        other = await sent(installation, broker, kept, 2)
        assert await broker.purge(installation.room, purged) == 2
        assert await broker.depth(None) == 3
        await finish(installation, taker, [taken])
        await taker.has(2)
        await finish(installation, taker, taker.copies[1:])
        assert deliveries((await taker.has(3))[1:]) == deliveries(other)


async def test_depth_counts_what_waits(installation: Installation, broker: Broker) -> None:
    push = await installation.subscribe()
    pull, idle = [await installation.subscribe(SubscriptionType.PULL) for _ in range(2)]
    (future,) = await installation.publish(push)
    await broker.send([future], not_before=[datetime.now(UTC) + timedelta(hours=1)])
    await sent(installation, broker, push, 2)
    copies = [copy for _ in range(4) for copy in await installation.publish(pull, kind=SubscriptionType.PULL)]
    await broker.send(copies, not_before=[ago()] * 4)
    assert await broker.depth(None) == 3
    assert await broker.depth(pull) == 4
    assert await broker.depth(idle) == 0
    async with taking(broker) as taker:
        found = await taker.has(2)
        assert {copy.kind for copy in found} == {SubscriptionType.PUSH}
        assert await broker.depth(None) == 3


async def test_a_ring_wakes_the_consumer_long_before_its_poll(adapter: Adapter, installation: Installation) -> None:
    subscription = await installation.subscribe()
    async with (
        adapter.open(installation.url, poll_s=600.0) as broker,
        Signals(installation.url) as signals,
        taking(broker) as taker,
    ):
        for count in range(1, 6):
            (copy,) = await installation.publish(subscription)
            await broker.send([copy], not_before=[await installation.value("SELECT now()")])
            signals.ring(Channel.PUSH)
            assert (await taker.has(count))[-1].delivery_id == copy.delivery_id


async def test_a_slow_commit_is_not_left_to_the_poll(adapter: Adapter, installation: Installation) -> None:
    """A due time is fixed when its transaction begins; meanwhile the consumer sees, and takes, younger copies."""
    subscription = await installation.subscribe()
    async with (
        adapter.open(installation.url, poll_s=600.0) as broker,
        Signals(installation.url) as signals,
        installed(installation.url) as slow,
        taking(broker) as taker,
    ):
        count = 0

        async def another() -> None:
            nonlocal count
            count += 1
            (copy,) = await installation.publish(subscription)
            await broker.send([copy], not_before=[await installation.value("SELECT now()")])
            signals.ring(Channel.PUSH)
            await taker.has(count)

        await another()
        async with slow.connection.transaction():
            (late,) = await slow.publish(subscription)
            await slow.queue(late, due=await slow.value("SELECT now()"))
            while await slow.value("SELECT clock_timestamp() < now() + interval '0.2 s'"):
                await another()
        signals.ring(Channel.PUSH)
        assert (await taker.has(count + 1))[-1].delivery_id == late.delivery_id


async def test_what_the_broker_loses_while_consuming_is_told(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    async with taking(broker) as taker:
        await sent(installation, broker, subscription, 1)
        await taker.has(1)
        await installation.terminate(adapter.session)
        assert isinstance(await taker.breaks(), BrokerUnavailableError)
    async with taking(broker) as taker:
        await taker.has(1, within_s=COMES_BACK_S)


async def test_stopping_in_the_middle_of_a_look_keeps_the_claims(installation: Installation, broker: Broker) -> None:
    """Whoever stops taking may have attempts under way, whose claims must live until the consumer closes."""
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


async def test_the_broker_restarts(adapter: Adapter, tmp_path: Path) -> None:
    """Under a consumer and a sender: both are told, nothing is lost, and both work again when entered anew."""
    with ExitStack() as server:
        url = server.enter_context(temporary_postgres(tmp_path))
        migrate(url)
        async with adapter.open(url) as broker:
            async with installed(url) as installation:
                subscription = await installation.subscribe()
                (settled, *copies) = await sent(installation, broker, subscription, 4)
                (unsent,) = await installation.publish(subscription)
            async with taking(broker) as taker:
                found = {copy.delivery_id: copy for copy in await taker.has(4)}
                await finish(installation, taker, [found[settled.delivery_id]])
                server.close()
                assert isinstance(await taker.breaks(), BrokerUnavailableError)
                with pytest.raises(BrokerUnavailableError):
                    await broker.send([unsent], not_before=[ago()])
                with pytest.raises(BrokerUnavailableError):
                    await broker.depth(None)
                with pytest.raises(BrokerUnavailableError):
                    async with broker.consume(credit=1):
                        pass
            server.enter_context(temporary_postgres(tmp_path))
            await broker.send([unsent], not_before=[ago()])
            async with taking(broker) as taker:
                again = await taker.has(4, within_s=COMES_BACK_S)
                assert sorted(deliveries(again)) == sorted(deliveries([*copies, unsent]))
