"""Test what the streams of one process have in common: their leases, and their readers' turns."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from delivery.pull import stream as stream_module
from delivery.pull.consumer_limit import ConsumerLimit
from delivery.pull.requests import AckRequest, NackRequest
from delivery.pull.stream import EndReason
from delivery.pull.target import PullTarget
from rooms.db.leases.acquire import SubscriptionAccess
from rooms.db.leases.scan import ScanWindow, scan
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.errors import ConflictError, RateLimitedError, StorageUnavailableError
from tests.integration.delivery.pull.test_stream import batch, closing, opened
from tests.support.publisher import House
from tests.support.pull_service import PATIENCE_S, Counter, open_counter, until

BLOCKED = "pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@pytest.fixture
async def counter(database: str) -> AsyncIterator[Counter]:
    async with open_counter(database) as opened:
        yield opened


@pytest.fixture
def stranger(counter: Counter) -> Counter:
    """Return another organisation, with a subscription in the same room."""
    house = House(counter.house.url)
    queue = house.subscription(counter.room, "PULL")
    house.change(
        counter.room,
        f"UPDATE subscriptions SET organisation_id = '{house.organisation}' WHERE id = '{queue}'",
    )
    return replace(counter, house=house, queue=queue)


async def test_an_ack_at_another_subscription_renews_no_credit(
    counter: Counter, stranger: Counter
) -> None:
    """Only the own acks, and the ends of leases, make room for more messages."""
    for number in range(2):
        await counter.publish(number)
    stream = await opened(counter, credit=1)
    with closing(counter, stream):
        found = await batch(stream)
        counter.puller.streams.on_sent(stream, found)
        (ack_id,) = [json.loads(message)["ack_id"] for message in found.messages]
        assert await stranger.settle("ack", ack_id) == ["unknown"]
        assert await stream.next(0.2) is None
        assert len(stream.unsettled) == 1
        assert await counter.settle("ack", ack_id) == ["acked"]
        assert len((await batch(stream)).messages) == 1


async def test_leases_of_a_socket_are_forgotten_when_they_are_over(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a client which acknowledges by HTTP, or never, does not fill the memory."""
    monkeypatch.setattr(stream_module, "MAX_UNSETTLED", 2)
    other = counter.house.subscription(counter.room, "PULL")
    for number in range(3):
        await counter.publish(number)
    stream = await opened(counter, counter.queue, other, credit=10, refills=False)
    streams = counter.puller.streams
    with closing(counter, stream):
        sent: list[tuple[str, Any]] = []
        while len(sent) < 6:
            found = await batch(stream)
            streams.on_sent(stream, found)
            sent += [(found.target.subscription, json.loads(one)) for one in found.messages]
        own = [one for queue, one in sent if queue == counter.queue]
        await counter.settle("ack", own[0]["ack_id"])
        await counter.settle("nack", own[1]["ack_id"], delay_ms=60_000)
        assert len(stream.unsettled) == len(streams._stream_by_lease) == 4
        counter.run_out(*[one["delivery_id"] for queue, one in sent if queue == other][:2])
        await until(lambda: len(stream.unsettled) == 2)
        results, _ = await streams.settle(stream, AckRequest([own[2]["ack_id"]]))
        assert [status for _, status in results] == ["acked"]
        assert len(stream.unsettled) == len(streams._stream_by_lease) == 1


async def test_a_forgotten_lease_of_a_socket_is_settled_as_over_http(
    counter: Counter, stranger: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ack leases again that have ended, were acked, or are another subscription's."""
    monkeypatch.setattr(stream_module, "MAX_UNSETTLED", 2)
    other = counter.house.subscription(counter.room, "PULL")
    for number in range(3):
        await counter.publish(number)
    foreign = (await stranger.pull())[0]["ack_id"]
    stream = await opened(counter, counter.queue, other, credit=10, refills=False)
    streams = counter.puller.streams
    with closing(counter, stream):
        sent: list[dict[str, Any]] = []
        while len(sent) < 6:
            found = await batch(stream)
            streams.on_sent(stream, found)
            sent += [json.loads(one) for one in found.messages]
        ids = [one["ack_id"] for one in sent]

        async def ack(*wanted: str) -> list[str]:
            results, _ = await streams.settle(stream, AckRequest(list(wanted)))
            return [str(status) for _, status in results]

        assert await ack(ids[0]) == ["acked"]
        counter.run_out(sent[1]["delivery_id"], sent[4]["delivery_id"])
        await until(lambda: len(stream.unsettled) == 3)
        assert await ack(*ids[:3], ids[4], foreign, ids[1]) == [
            "acked",
            "late",
            "acked",
            "late",
            "unknown",
            "late",
        ]
        assert await stranger.settle("ack", foreign) == ["acked"]
        results, _ = await streams.settle(stream, NackRequest([ids[4], ids[3]]))
        assert [status for _, status in results] == ["late", "nacked"]


async def test_a_socket_of_one_subscription_keeps_no_leases(counter: Counter) -> None:
    for number in range(2):
        await counter.publish(number)
    stream = await opened(counter, credit=10, refills=False)
    with closing(counter, stream):
        found = await batch(stream)
        counter.puller.streams.on_sent(stream, found)
        assert not stream.unsettled
        assert not counter.puller.streams._stream_by_lease
        ids = [json.loads(message)["ack_id"] for message in found.messages]
        results, queued = await counter.puller.streams.settle(stream, NackRequest(ids))
        assert [status for _, status in results] == ["nacked"] * 2
        assert queued == {counter.queue}


async def test_an_ack_over_one_stream_renews_the_credit_of_another(counter: Counter) -> None:
    for number in range(2):
        await counter.publish(number)
    events = await opened(counter, credit=1)
    with closing(counter, events):
        found = await batch(events)
        counter.puller.streams.on_sent(events, found)
        (ack_id,) = [json.loads(message)["ack_id"] for message in found.messages]
        socket = await opened(counter, credit=0, refills=False)
        with closing(counter, socket):
            await counter.puller.streams.settle(socket, AckRequest([ack_id]))
        assert len((await batch(events)).messages) == 1


async def test_ended_leases_of_many_streams_are_found_together(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = [counter.queue, counter.house.subscription(counter.room, "PULL")]
    streams = [await opened(counter, queue, credit=2) for queue in queues]
    store, sizes = counter.puller.streams._lease_store, list[int]()
    inspect = store.inspect

    async def count(deliveries: Any) -> Any:
        sizes.append(len(deliveries))
        return await inspect(deliveries)

    with closing(counter, *streams):
        for number in range(2):
            await counter.publish(number)
        for stream in streams:
            while len(stream.unsettled) < 2:
                counter.puller.streams.on_sent(stream, await batch(stream))
        monkeypatch.setattr(store, "inspect", count)
        await until(lambda: 4 in sizes)
        assert [len(stream.unsettled) for stream in streams] == [2, 2]
        counter.house.run("UPDATE leases SET until = now() - interval '1 ms'")
        await until(lambda: not any(stream.unsettled for stream in streams))
        assert set(sizes) == {4}


@pytest.mark.parametrize("stuck", [True, False])
async def test_a_starved_stream_keeps_no_other_from_its_end(
    counter: Counter, monkeypatch: pytest.MonkeyPatch, *, stuck: bool
) -> None:
    """Let every look for ended leases hang, or fail, while a subscription is deleted."""
    never = asyncio.Event()

    async def fail(_: Any) -> Any:
        if stuck:
            await never.wait()
        raise StorageUnavailableError("away")

    other = counter.house.subscription(counter.room, "PULL")
    await counter.publish()
    monkeypatch.setattr(counter.puller.streams._lease_store, "inspect", fail)
    starved = await opened(counter, credit=1)
    later = await opened(counter, other, credit=1)
    with closing(counter, starved, later):
        counter.puller.streams.on_sent(starved, await batch(starved))
        assert starved.needs_inspection
        counter.house.run("UPDATE subscriptions SET status = 'deleted' WHERE id = %s", other)
        async with asyncio.timeout(5):
            while later.end_reason is None:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.02)
        assert later.end_reason is EndReason.DELETED
        assert starved.end_reason is None


async def test_browsing_delays_no_pull_and_no_end_of_another_organisation(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each scan of 50 browsers take until the test ends: one of them has the connection."""
    scans, go_on = 0, asyncio.Event()

    async def slow(writer: Any, *arguments: Any) -> ScanWindow:
        nonlocal scans
        scans += 1
        async with writer._lock:
            await go_on.wait()
        return await scan(writer, *arguments)

    monkeypatch.setattr(stream_module, "scan", slow)
    streams = [await opened(counter, browse=True) for _ in range(50)]
    with closing(counter, *streams):
        reading = [asyncio.create_task(stream.next(PATIENCE_S)) for stream in streams]
        await until(lambda: scans == 1)
        await counter.publish(1)
        other = counter.house.subscription(counter.room, "PULL")
        async with asyncio.timeout(5):
            assert len(await counter.pull()) == 1
            watched = await opened(counter, other, credit=1)
            with closing(counter, watched):
                counter.house.run(
                    "UPDATE subscriptions SET status = 'deleted' WHERE id = %s", other
                )
                while watched.end_reason is None:  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.02)
        assert scans == 1
        go_on.set()
        for stream in streams:
            stream.end(EndReason.SHUTDOWN)
        await asyncio.gather(*reading)


async def test_browsers_of_two_organisations_take_turns(
    counter: Counter, stranger: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    async def record(writer: Any, target: Any, *arguments: Any) -> ScanWindow:
        order.append(target[2])
        return await scan(writer, target, *arguments)

    monkeypatch.setattr(stream_module, "scan", record)
    streams = [await opened(counter, browse=True) for _ in range(20)]
    streams.append(await opened(stranger, browse=True))
    with closing(counter, *streams):
        reading = [asyncio.create_task(stream.next(PATIENCE_S)) for stream in streams]
        await until(lambda: len(order) >= len(streams))
        assert order.index(stranger.house.organisation) <= 2
        for stream in streams:
            stream.end(EndReason.SHUTDOWN)
        await asyncio.gather(*reading)


async def test_a_stream_that_ends_while_it_nacks_ends_the_connection_of_no_other(
    counter: Counter,
) -> None:
    """A socket's client sends a nack and leaves, so that its listener is cancelled.

    Oracle: the nack is written, and the process goes on with the same session of PostgreSQL.
    """
    await counter.publish()
    (message,) = await counter.pull()
    stream = await opened(counter, credit=0, refills=False)
    with closing(counter, stream):
        writer = counter.puller._lease_store._writer
        session = writer.id
        with psycopg.connect(counter.house.url) as holding:
            holding.execute("SELECT FROM leases FOR UPDATE")
            listening = asyncio.create_task(
                counter.puller.handle_stream_ack(stream, NackRequest([message["ack_id"]]))
            )
            await until(lambda: bool(counter.house.count(BLOCKED)))
            listening.cancel()
            await asyncio.wait([listening])
        await until(lambda: not counter.house.count("leases"))
        assert counter.row(message["delivery_id"])[:3] == ("queued", 1, 1)
        assert await counter.settle("nack", message["ack_id"]) == ["late"]
        assert writer.id == session


async def test_a_refused_stream_costs_no_statement_and_a_failed_one_keeps_no_place(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream names up to a hundred subscriptions, each of which is looked up."""
    streams, looks = counter.puller.streams, list[PullTarget]()
    limit = streams._consumer_limit = ConsumerLimit(1, lambda: None)
    access = streams._lease_store.access

    async def count(
        room: RoomId, subscription: SubscriptionId, organisation: OrganisationId
    ) -> SubscriptionAccess:
        looks.append(PullTarget(room, subscription, organisation))
        return await access(room, subscription, organisation)

    monkeypatch.setattr(streams._lease_store, "access", count)
    push = counter.house.subscription(counter.room, "PUSH")
    with pytest.raises(ConflictError):
        await opened(counter, counter.queue, push)
    assert not limit._waiting
    stream = await opened(counter)
    with closing(counter, stream):
        looks.clear()
        with pytest.raises(RateLimitedError):
            await opened(counter)
        assert not looks
    assert not limit._waiting
