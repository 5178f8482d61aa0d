"""The contract of `rooms.ports.Broker`, the same for every adapter.

With every adapter a copy is done with when the decision about it is committed and the copy is settled, in this order.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import pytest

from delivery.brokers import open_broker
from delivery.brokers.postgres import PostgresBroker
from rooms.backend_urls import parse_stomp_url
from rooms.db.schema import migrate
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, MessageId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker
from rooms.settings import SCHEMES
from tests.support.broker_client import (
    COMES_BACK_S,
    Taker,
    deliveries,
    finish,
    holds,
    sent,
    taking,
)
from tests.support.installation import Installation, ago, installed, now_ms, until
from tests.support.local_servers import TestServer, temporary_postgres
from tests.support.sentinel import put_sentinel
from tests.support.tcp_proxy import Proxy


class Server(Protocol):
    """Provide a server for one test only."""

    url: str
    records: str
    """Where the deliveries are."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Adapter:
    """One adapter on a server that all tests share, and what a test must be able to do to it."""

    claims = False

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.request = request

    def open(self) -> AbstractAsyncContextManager[Broker]:
        """The adapter; every call within a test opens the same queues."""
        raise AssertionError

    def doomed(self) -> AbstractAsyncContextManager[tuple[Broker, Callable[[], Awaitable[None]]]]:
        """The adapter, and what ends the connection of its one consumer as a crash does."""
        raise AssertionError

    async def fill(
        self, installation: Installation, broker: Broker, subscription: SubscriptionId, count: int
    ) -> None:
        """Many copies that are due."""
        raise AssertionError

    def server(self, folder: Path) -> Server:
        raise AssertionError

    def at(self, url: str) -> AbstractAsyncContextManager[Broker]:
        """The adapter on another server."""
        raise AssertionError


class PostgresServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = ExitStack()
        self.url = ""
        self.start()
        migrate(self.url)
        self.records = self.url

    def start(self) -> None:
        self.url = self._running.enter_context(temporary_postgres(self._folder))

    def stop(self) -> None:
        self._running.close()


class Postgres(Adapter):
    claims = True

    @property
    def url(self) -> str:
        found: str = self.request.getfixturevalue("database")
        return found

    def open(self) -> AbstractAsyncContextManager[Broker]:
        return self.at(self.url)

    def at(self, url: str) -> PostgresBroker:
        return PostgresBroker(url, claim_s=60.0)

    @asynccontextmanager
    async def doomed(self) -> AsyncIterator[tuple[Broker, Callable[[], Awaitable[None]]]]:
        async with self.open() as broker, installed(self.url) as installation:
            before = set(await installation.backends("rooms worker"))

            async def kill() -> None:
                # Its consumer connected first. Process ids say nothing of that: they begin again some day.
                await installation.rows(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rooms worker'"
                    " AND datname = current_database() AND pid <> ALL (%s) ORDER BY backend_start LIMIT 1",
                    list(before),
                )

            yield broker, kill

    async def fill(
        self, installation: Installation, broker: Broker, subscription: SubscriptionId, count: int
    ) -> None:
        await installation.publish_many(subscription, count, due=ago(30))

    def server(self, folder: Path) -> PostgresServer:
        return PostgresServer(folder)


class ArtemisServer:
    def __init__(self, running: TestServer, records: str) -> None:
        self._running = running
        self.url = running.url
        self.records = records
        self.start = running.start
        self.stop = running.stop


class Stomp(Adapter):
    def __init__(self, request: pytest.FixtureRequest) -> None:
        super().__init__(request)
        self._client = f"test-{secrets.token_hex(6)}"
        self._url: str = request.getfixturevalue("artemis_url")

    def open(self) -> AbstractAsyncContextManager[Broker]:
        return self.at(self._url)

    def at(self, url: str) -> AbstractAsyncContextManager[Broker]:
        return open_broker(url, claim_s=60.0, farm="farm", client=self._client)

    @asynccontextmanager
    async def doomed(self) -> AsyncIterator[tuple[Broker, Callable[[], Awaitable[None]]]]:
        parts = parse_stomp_url(self._url)
        (host, port), *_ = parts.hosts

        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(Proxy(host, port))
            url = f"stomp://{parts.user}:{parts.password}@127.0.0.1:{proxy.port}"
            broker = await stack.enter_async_context(self.at(url))

            async def kill() -> None:
                proxy.cut()

            yield broker, kill

    async def fill(
        self, installation: Installation, broker: Broker, subscription: SubscriptionId, count: int
    ) -> None:
        (copy,) = await installation.publish(subscription)
        room, at = installation.room, now_ms()
        copies = [
            replace(
                copy,
                delivery_id=DeliveryId(installation.ids.generate(room, at)),
                message_id=MessageId(installation.ids.generate(room, at)),
            )
            for _ in range(count)
        ]
        assert not await broker.send(copies, not_before=[ago(30)] * count)

    def server(self, folder: Path) -> ArtemisServer:
        start: Callable[[], TestServer] = self.request.getfixturevalue("artemis_server")
        return ArtemisServer(start(), self.request.getfixturevalue("database"))


ADAPTERS: dict[str, type[Adapter]] = {"postgresql": Postgres, "stomp": Stomp}
KEEPERS = {name: adapter for name, adapter in ADAPTERS.items() if not adapter.claims}
"""Those that keep copies of their own, in queues that have to be made."""


@pytest.fixture(params=ADAPTERS.values(), ids=list(ADAPTERS))
def adapter(request: pytest.FixtureRequest) -> Adapter:
    made: Adapter = request.param(request)
    return made


@pytest.fixture(params=KEEPERS.values(), ids=list(KEEPERS))
def keeper(request: pytest.FixtureRequest) -> Adapter:
    made: Adapter = request.param(request)
    return made


@pytest.fixture
async def broker(adapter: Adapter) -> AsyncIterator[Broker]:
    async with adapter.open() as broker:
        yield broker


@pytest.fixture
async def queues(keeper: Adapter) -> AsyncIterator[Broker]:
    async with keeper.open() as broker:
        yield broker


def test_every_scheme_has_its_adapter_here() -> None:
    assert {scheme.removesuffix("s") for scheme in SCHEMES["BROKER_URL"]} == {
        name.removesuffix("s") for name in ADAPTERS
    }


async def test_a_copy_comes_as_it_was_sent(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(
        subscription,
        payload=bytes(range(256)),
        headers={"x-one": "1"},
        priority=7,
        lifetime_s=600,
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
        "priority", "event_type", "event_version", "correlation_id", "headers", "payload",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(copy, name), name
    # If the broker does not claim, the later claim adds the version.
    assert found.subscription_version == (copy.subscription_version if adapter.claims else None)
    assert found.dedup_id == f"{copy.delivery_id}:2:3"
    assert abs(found.published_ms - copy.published_ms) < 60_000


async def test_expiry_is_carried(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    (mortal,) = await installation.publish(subscription, lifetime_s=600)
    (immortal,) = await installation.publish(subscription)
    await broker.send([mortal, immortal], not_before=[ago(2), ago(1)])
    async with taking(broker) as taker:
        first, second = await taker.has(2)
    assert mortal.expires_ms is not None
    assert first.expires_ms is not None
    assert abs(first.expires_ms - mortal.expires_ms) < 2000
    assert second.expires_ms is None


async def test_settled_copies_do_not_come_again(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    copies = await sent(installation, broker, subscription, 3)
    async with taking(broker) as taker:
        taken = list(await taker.has(3))
        await finish(installation, taker, taken)
    await holds(broker, 0)
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


async def test_unsettled_copies_come_back_when_the_consumer_closes(
    installation: Installation, broker: Broker
) -> None:
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
    async with adapter.doomed() as (other, kill), taking(other) as doomed:
        await doomed.has(5)
        async with taking(broker) as heir:
            await kill()
            assert sorted(deliveries(await heir.has(5, within_s=COMES_BACK_S))) == sorted(
                deliveries(copies)
            )


async def test_copies_of_a_dead_consumer_come_to_a_busy_one(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    """However much else waits: every batch of the heir is a full one, for longer than a dead consumer may go unseen."""
    subscription = await installation.subscribe()
    copies = await sent(installation, broker, subscription, 5)
    async with adapter.doomed() as (other, kill), taking(other, credit=5) as doomed:
        await doomed.has(5)
        await adapter.fill(installation, broker, subscription, 5000)
        async with taking(broker, credit=40) as heir:
            await heir.has(40)
            await kill()
            orphans, deadline = set(deliveries(copies)), time.monotonic() + COMES_BACK_S
            done = 0
            while not orphans <= set(deliveries(heir.copies)):
                assert time.monotonic() < deadline
                count = len(heir.copies)
                await finish(installation, heir, heir.copies[done:count])
                done = count
                await heir.has(count + 1)


async def test_the_same_step_sent_twice_is_handed_out_once(
    installation: Installation, broker: Broker
) -> None:
    """And settled once, however many copies there are."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await broker.send([copy], not_before=[ago()])
    await broker.send([copy], not_before=[ago()])
    async with taking(broker) as taker:
        await taker.has(1)
        await broker.send([copy], not_before=[ago()])
        (last,) = await sent(installation, broker, subscription, 1)
        assert deliveries(await taker.has(2)) == [copy.delivery_id, last.delivery_id]
        await finish(installation, taker, taker.copies)
        await holds(broker, 0)


async def test_a_step_that_was_decided_is_not_in_the_outbox_again(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    """A broker beside it has the copy again, which the row's state makes stale."""
    subscription = await installation.subscribe()
    (copy,) = await sent(installation, broker, subscription, 1)
    async with taking(broker) as taker:
        await finish(installation, taker, await taker.has(1))
        await broker.send([copy], not_before=[ago()])
        await holds(broker, 0 if adapter.claims else 1)


async def test_a_copy_is_not_handed_out_before_its_time(
    installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    (late,) = await installation.publish(subscription)
    (soon,) = await installation.publish(subscription)
    (due,) = await installation.publish(subscription)
    now: datetime = await installation.value("SELECT now()")
    times = [now + timedelta(seconds=1.2), now + timedelta(seconds=0.6), now]
    await broker.send([late, soon, due], not_before=times)
    wanted: dict[str, datetime] = dict(zip(deliveries([late, soon, due]), times, strict=True))
    came: list[str] = []
    async with taking(broker) as taker:
        for count in (1, 2, 3):
            came = deliveries(await taker.has(count))
            clock = await installation.value("SELECT clock_timestamp()")
            # Several at once, where it took long to ask for them: their order is then the broker's.
            assert [identity for identity in came if wanted[identity] > clock] == []
    assert sorted(came) == sorted(wanted)


async def test_higher_priorities_come_first_then_what_was_due_first(
    installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    wanted = []
    for priority in (0, 9, 4, 5, 1, 8, 2, 7, 3, 6):
        wanted += [
            (9 - priority, copy.delivery_id)
            for copy in await sent(installation, broker, subscription, 3, priority=priority)
        ]
    async with taking(broker) as taker:
        found = await taker.has(30)
    assert deliveries(found) == [
        identity for _, identity in sorted(wanted, key=lambda pair: pair[0])
    ]
    assert [copy.priority for copy in found] == [
        priority for priority in range(9, -1, -1) for _ in range(3)
    ]


async def test_released_copies_come_again_at_once(
    installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    await sent(installation, broker, subscription, 4)
    async with taking(broker, credit=4) as taker:
        first = list(await taker.has(4))
        await taker.consumer.release(first[:2])
        assert sorted(deliveries((await taker.has(6))[4:])) == sorted(deliveries(first[:2]))


async def test_excluded_subscriptions_are_left_where_they_are(
    installation: Installation, broker: Broker
) -> None:
    """Where the consumer is selective; where not, they come all the same."""
    busy, free = await installation.subscribe(), await installation.subscribe()
    waiting = await sent(installation, broker, busy, 3)
    wanted = await sent(installation, broker, free, 2)
    async with taking(broker, excluded=[busy]) as taker:
        if not taker.consumer.supports_exclude:
            assert sorted(deliveries(await taker.has(5))) == sorted(deliveries([*waiting, *wanted]))
            return
        assert deliveries(await taker.has(2)) == deliveries(wanted)
        more = await sent(installation, broker, free, 2)
        assert deliveries((await taker.has(4))[2:]) == deliveries(more)
        assert await broker.depth(None) == 7
        taker.consumer.exclude(frozenset())
        assert deliveries((await taker.has(7))[4:]) == deliveries(waiting)


async def test_the_credit_is_never_exceeded(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    await adapter.fill(installation, broker, subscription, 60)
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


async def test_two_consumers_never_hold_the_same_copy(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    async with AsyncExitStack() as stack:
        takers = [await stack.enter_async_context(taking(broker, credit=10_000)) for _ in range(3)]
        for _ in range(10):
            await adapter.fill(installation, broker, subscription, 300)
        await until(lambda: all_taken(takers, 3000), "all copies")
        # Now, for what the first gives back when it closes is the others'.
        together = [identity for taker in takers for identity in deliveries(taker.copies)]
    assert len(together) == len(set(together)) == 3000


async def all_taken(takers: Sequence[Taker], count: int) -> bool:
    return sum(len(taker.copies) for taker in takers) >= count


async def test_purge_deletes_tasks_that_no_consumer_has(
    installation: Installation, broker: Broker
) -> None:
    purged, kept = await installation.subscribe(), await installation.subscribe()
    await sent(installation, broker, purged, 3)
    async with taking(broker, credit=1) as taker:
        (taken,) = await taker.has(1)
        other = await sent(installation, broker, kept, 2)
        assert await broker.purge(installation.room, purged) == 2
        await holds(broker, 3)
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
    copies = [
        copy
        for _ in range(4)
        for copy in await installation.publish(pull, kind=SubscriptionType.PULL)
    ]
    await broker.create_queues([pull, idle])
    await broker.send(copies, not_before=[ago()] * 4)
    await holds(broker, 3)
    await holds(broker, 4, pull)
    assert await broker.depth(idle) == 0
    async with taking(broker) as taker:
        found = await taker.has(2)
        assert {copy.kind for copy in found} == {SubscriptionType.PUSH}
        await holds(broker, 3)


async def test_a_broker_that_stops_while_consuming_is_reported(
    adapter: Adapter, installation: Installation, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    async with adapter.doomed() as (other, kill), taking(other) as taker:
        await sent(installation, broker, subscription, 1)
        (copy,) = await taker.has(1)
        await kill()
        assert isinstance(await taker.breaks(), BrokerUnavailableError)
        await taker.consumer.settle([copy])  # late, and harmless
    async with taking(broker) as taker:
        await taker.has(1, within_s=COMES_BACK_S)


async def test_the_broker_restarts(adapter: Adapter, tmp_path: Path) -> None:
    """Consumer and sender get an error, and both work again once re-entered.

    Nothing is lost, or the sentinel is lost with it.
    """
    server = await asyncio.to_thread(adapter.server, tmp_path)
    try:
        async with adapter.at(server.url) as broker:
            async with installed(server.records) as installation:
                subscription = await installation.subscribe()
                (settled, *copies) = await sent(installation, broker, subscription, 4)
                (unsent,) = await installation.publish(subscription)
                await put_sentinel(broker)
                async with taking(broker) as taker:
                    found = {copy.delivery_id: copy for copy in await taker.has(4)}
                    await finish(installation, taker, [found[settled.delivery_id]])
                    if not adapter.claims:
                        await holds(broker, 3)
                    await asyncio.to_thread(server.stop)
                    assert isinstance(await taker.breaks(), BrokerUnavailableError)
            with pytest.raises(BrokerUnavailableError):
                await broker.send([unsent], not_before=[ago()])
            with pytest.raises(BrokerUnavailableError):
                await broker.depth(None)
            with pytest.raises(BrokerUnavailableError):
                async with broker.consume(credit=1):
                    pass
            await asyncio.to_thread(server.start)
            assert await broker.has_sentinel() is adapter.claims
            left = copies if adapter.claims else []
            await broker.send([unsent], not_before=[ago()])
            async with taking(broker) as taker:
                again = await taker.has(len(left) + 1, within_s=COMES_BACK_S)
                assert sorted(deliveries(again)) == sorted(deliveries([*left, unsent]))
    finally:
        await asyncio.to_thread(server.stop)


async def test_what_is_closed_says_so(adapter: Adapter, installation: Installation) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    async with adapter.open() as broker:
        await broker.send([copy], not_before=[ago()])
    with pytest.raises(BrokerUnavailableError):
        await broker.send([copy], not_before=[ago()])
    with pytest.raises(BrokerUnavailableError):
        await broker.depth(None)


async def test_an_expired_copy_is_not_handed_out_as_good(
    installation: Installation, broker: Broker
) -> None:
    """It does not come at all, or it says itself that it is over: the decision is the row's."""
    subscription = await installation.subscribe()
    (mortal,) = await installation.publish(subscription, lifetime_s=0.3)
    await broker.send([mortal], not_before=[ago()])

    async def over() -> bool:
        return now_ms() > (mortal.expires_ms or 0)

    await until(over, "the end of its life")
    (last,) = await sent(installation, broker, subscription, 1)
    async with taking(broker) as taker:
        await until(lambda: came(taker, last), "the copy behind it")
    good = [copy for copy in taker.copies if copy.expires_ms is None or copy.expires_ms > now_ms()]
    assert deliveries(good) == [last.delivery_id]


async def came(taker: Taker, copy: DeliveryTask) -> bool:
    return copy.delivery_id in deliveries(taker.copies)


HOSTILE = [
    'tricky "\\{,} value', "a:b", "back\\slash", "a\nb", "a\rb", " lead", "trail ", "ünï 😀", "\\n", "\\c", "", "\t",
    "receipt:1\nack:2\n\n", "\x01\x7f", "content-length:0", "x" * 500,
]  # fmt: skip


async def test_no_value_of_a_header_breaks_anything(
    installation: Installation, broker: Broker
) -> None:
    """Every header with every value that a publisher may choose arrives as sent, and is settled."""
    subscription = await installation.subscribe()
    copies = [
        copy
        for value in HOSTILE
        for copy in await installation.publish(
            subscription,
            correlation_id=value or None,
            event_type=value or "e",
            headers={"x-name": value, value: "1"},
        )
    ]
    assert not await broker.send(copies, not_before=[ago()] * len(copies))
    async with taking(broker) as taker:
        found = {copy.delivery_id: copy for copy in await taker.has(len(copies))}
        for copy in copies:
            taken = found[copy.delivery_id]
            assert (taken.correlation_id, taken.event_type) == (
                copy.correlation_id,
                copy.event_type,
            )
            assert taken.headers == copy.headers
        await finish(installation, taker, list(found.values()))
        await holds(broker, 0)


async def test_large_payloads_come_whole(installation: Installation, broker: Broker) -> None:
    subscription = await installation.subscribe()
    bodies = [b"\0" * 300_000, bytes(range(256)) * 4096, b"", b"\n\n\0\n"]
    copies = [
        copy for body in bodies for copy in await installation.publish(subscription, payload=body)
    ]
    await broker.send(copies, not_before=[ago()] * len(copies))
    async with taking(broker) as taker:
        found = {copy.delivery_id: copy.payload for copy in await taker.has(len(copies))}
    assert [found[copy.delivery_id] for copy in copies] == bodies


async def test_the_mark_is_remembered(keeper: Adapter, queues: Broker) -> None:
    assert not await queues.has_sentinel()
    await put_sentinel(queues)
    await put_sentinel(queues)
    assert await queues.has_sentinel()
    async with keeper.open() as other:
        assert await other.has_sentinel()


async def test_a_sentinel_that_was_prepared_does_not_count_yet(queues: Broker) -> None:
    first, second = [await queues.prepare_sentinel() for _ in range(2)]
    assert not await queues.has_sentinel()
    assert not await queues.put_sentinel("unknown")
    assert not await queues.has_sentinel()
    assert await queues.put_sentinel(second)
    assert await queues.has_sentinel()
    assert not await queues.put_sentinel(first), "it is not needed any more"
    assert await queues.has_sentinel()


async def test_a_sentinel_can_be_put_as_soon_as_it_is_prepared(queues: Broker) -> None:
    for _ in range(50):
        assert await queues.put_sentinel(await queues.prepare_sentinel())
        assert await queues.has_sentinel()


async def test_a_copy_that_is_refused_does_not_keep_the_mark_away(
    installation: Installation, queues: Broker
) -> None:
    """While the sentinel is put, the relay sends to queues that were lost with the rest."""
    copies = await pulled(installation, await installation.subscribe(SubscriptionType.PULL), 1)
    marking = asyncio.create_task(put_sentinel(queues))

    async def send_on() -> int:
        refused = 0
        while not marking.done():
            refused += len(await queues.send(copies, not_before=[ago()]))
        return refused

    assert sum(await asyncio.gather(*(send_on() for _ in range(5)))) >= 5
    await marking
    assert await queues.has_sentinel()


async def pulled(
    installation: Installation, subscription: SubscriptionId, count: int
) -> list[DeliveryTask]:
    return [
        copy
        for _ in range(count)
        for copy in await installation.publish(subscription, kind=SubscriptionType.PULL)
    ]


async def test_a_missing_queue_rejects_only_its_own_tasks(
    installation: Installation, queues: Broker
) -> None:
    """Two missing queues among good ones: only their copies are refused, and every other is queued.

    Those before the refused one may be there twice: an ERROR leaves them in doubt.
    """
    push = await installation.subscribe()
    good, gone, never = [await installation.subscribe(SubscriptionType.PULL) for _ in range(3)]
    await queues.create_queues([good, gone])
    assert await queues.delete_queue(gone)
    batches = [
        await pulled(installation, good, 3),
        await pulled(installation, gone, 3),
        await pulled(installation, never, 2),
        [copy for _ in range(3) for copy in await installation.publish(push)],
    ]
    mixed = [
        copy for group in zip(*(batch[:2] for batch in batches), strict=True) for copy in group
    ]
    mixed += [copy for batch in batches for copy in batch[2:]]
    refused = await queues.send(mixed, not_before=[ago()] * len(mixed))
    assert {one.task.delivery_id for one in refused} == set(deliveries([*batches[1], *batches[2]]))
    assert all(one.queue_missing and one.reason for one in refused)
    assert len(refused) == 5
    for batch, subscription in ((batches[0], good), (batches[3], None)):
        async with taking(queues, subscription=subscription) as taker:
            assert sorted(deliveries(await taker.has(3))) == sorted(deliveries(batch))
            await taker.consumer.settle(taker.copies)
            await holds(queues, 0, subscription)
            assert len(taker.copies) == 3
    assert await queues.depth(gone) == 0
    with pytest.raises(BrokerUnavailableError):
        async with queues.consume(credit=1, subscription=never):
            pass
    await queues.create_queues([never])
    assert not await queues.send(batches[2], not_before=[ago()] * 2)
    async with taking(queues, subscription=never) as taker:
        assert sorted(deliveries(await taker.has(2))) == sorted(deliveries(batches[2]))
        assert {copy.kind for copy in taker.copies} == {SubscriptionType.PULL}


async def test_queues_are_made_once_and_belong_to_their_installation(
    keeper: Adapter, request: pytest.FixtureRequest, installation: Installation, queues: Broker
) -> None:
    first, second = [await installation.subscribe(SubscriptionType.PULL) for _ in range(2)]
    await queues.create_queues([first])
    await queues.create_queues([first, second])
    assert set(await queues.list_queues()) == {first, second}
    async with type(keeper)(request).open() as stranger:
        assert not await stranger.list_queues()
        assert not await stranger.has_sentinel()
        assert await stranger.depth(None) == 0
    assert await queues.delete_queue(first)
    assert await queues.delete_queue(first)
    assert list(await queues.list_queues()) == [second]


async def deleted(queues: Broker, subscription: SubscriptionId) -> None:
    """Delete a queue whose consumers have closed; they may count for a moment."""
    await until(lambda: queues.delete_queue(subscription), "the queue to have no consumer")


async def test_a_queue_is_not_deleted_under_a_consumer(
    installation: Installation, queues: Broker
) -> None:
    subscription = await installation.subscribe(SubscriptionType.PULL)
    await queues.create_queues([subscription])
    copies = await pulled(installation, subscription, 2)
    await queues.send(copies, not_before=[ago()] * 2)
    async with taking(queues, subscription=subscription) as taker:
        await taker.has(1)
        assert not await queues.delete_queue(subscription)
        await taker.has(2)
        await holds(queues, 2, subscription)
    await deleted(queues, subscription)
    assert subscription not in await queues.list_queues()


async def test_deleting_a_queue_disturbs_no_other_consumer(
    installation: Installation, queues: Broker
) -> None:
    push = await installation.subscribe()
    kept, gone = [await installation.subscribe(SubscriptionType.PULL) for _ in range(2)]
    await queues.create_queues([kept, gone])
    async with taking(queues) as pusher, taking(queues, subscription=kept) as puller:
        async with taking(queues, subscription=gone):
            pass
        await deleted(queues, gone)
        copies = [*await pulled(installation, kept, 1), *await pulled(installation, gone, 1)]
        (refused,) = await queues.send(copies, not_before=[ago()] * 2)
        assert refused.task is copies[1]
        assert deliveries(await puller.has(1)) == [copies[0].delivery_id]
        (copy,) = await sent(installation, queues, push, 1)
        assert deliveries(await pusher.has(1)) == [copy.delivery_id]


async def test_purging_a_pull_queue_leaves_the_others(
    installation: Installation, queues: Broker
) -> None:
    purged, kept = [await installation.subscribe(SubscriptionType.PULL) for _ in range(2)]
    await queues.create_queues([purged, kept])
    copies = [*await pulled(installation, purged, 3), *await pulled(installation, kept, 2)]
    later = [ago(), ago(), datetime.now(UTC) + timedelta(minutes=5), ago(), ago()]
    await queues.send(copies, not_before=later)
    assert await queues.purge(installation.room, purged) == 3
    await holds(queues, 0, purged)
    await holds(queues, 2, kept)
    assert (
        await queues.purge(installation.room, await installation.subscribe(SubscriptionType.PULL))
        == 0
    )


async def test_a_small_credit_leaves_the_rest_to_others(
    installation: Installation, queues: Broker
) -> None:
    """A task that no consumer requested is not pinned: the second consumer gets it at once."""
    subscription = await installation.subscribe(SubscriptionType.PULL)
    await queues.create_queues([subscription])
    copies = await pulled(installation, subscription, 10)
    await queues.send(copies, not_before=[ago()] * 10)
    async with taking(queues, credit=3, subscription=subscription) as first:
        assert len(await first.has(3)) == 3
        async with taking(queues, subscription=subscription) as second:
            assert len(await second.has(7)) == 7
            assert set(deliveries(first.copies)) | set(deliveries(second.copies)) == set(
                deliveries(copies)
            )


async def test_a_large_batch_is_sent_whole(
    installation: Installation, adapter: Adapter, broker: Broker
) -> None:
    subscription = await installation.subscribe()
    await adapter.fill(installation, broker, subscription, 3000)
    async with taking(broker, credit=10_000) as taker:
        assert len(set(deliveries(await taker.has(3000)))) == 3000
