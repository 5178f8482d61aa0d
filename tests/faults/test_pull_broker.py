"""Test PULL from a live Artemis under kills, restarts and hangs: nothing is lost or leased twice."""

import asyncio
import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from delivery.brokers import open_broker
from delivery.pull.requests import StreamRequest
from delivery.relay.relay import relay_until_stopped
from rooms.clock import SystemClock
from rooms.db.notify import Channel
from rooms.domain.ids import SubscriptionId
from rooms.errors import NotFoundError, TransientError
from rooms.metrics import Metrics
from rooms.ports import Broker
from tests.support.local_servers import TestServer
from tests.support.pull_service import EVENT_TYPE, PATIENCE_S, Counter, open_counter, until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LONG_MS = 25_000
LEASE_MS = 600_000
"""Longer than a broker takes to come back, on any machine."""


@asynccontextmanager
async def adapter(url: str, client: str) -> AsyncIterator[Broker]:
    async with open_broker(url, claim_s=60, farm="rooms", client=client) as opened:
        yield opened


@asynccontextmanager
async def counters(
    database: str, url: str, client: str, count: int = 1
) -> AsyncIterator[list[Counter]]:
    """Run API processes over one room, each with an adapter of its own, and a relay."""
    stop = asyncio.Event()
    async with adapter(url, client) as relaying, adapter(url, client) as first:
        running = asyncio.create_task(
            relay_until_stopped(
                database_url=database,
                broker=relaying,
                clock=SystemClock(),
                metrics=Metrics(),
                stop=stop,
            )
        )
        try:
            async with open_counter(database, broker=first) as here:
                if count == 1:
                    yield [here]
                else:
                    async with (
                        adapter(url, client) as second,
                        open_counter(database, house=here.house, broker=second) as there,
                    ):
                        there.queue = here.queue
                        yield [here, there]
        finally:
            stop.set()
            await running


@pytest.fixture
def client() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def counter(database: str, artemis_url: str, client: str) -> AsyncIterator[Counter]:
    async with counters(database, artemis_url, client) as (opened,):
        yield opened


async def patiently(counter: Counter, **fields: Any) -> list[dict[str, Any]]:
    """Return what a consumer gets that pulls again after errors."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if messages := await counter.pull(
                    **{"wait_ms": 2000, "lease_ms": LEASE_MS} | fields
                ):
                    return messages
            except TransientError:
                await asyncio.sleep(0)


async def drained(counter: Counter) -> None:
    """Wait until the queue is empty."""
    broker = counter.broker
    assert broker is not None
    async with asyncio.timeout(PATIENCE_S):
        while await broker.depth(counter.queue):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def test_messages_are_pulled_acked_nacked_and_redelivered(counter: Counter) -> None:
    for number in range(20):
        await counter.publish(number, priority=9 if number == 19 else 4)
    first = await patiently(counter, max_messages=5)
    assert first[0]["payload"] == 19
    rest: list[dict[str, Any]] = []
    while len(first) + len(rest) < 20:
        rest += await patiently(counter, max_messages=100)
    assert sorted(message["payload"] for message in first + rest) == list(range(20))
    assert await counter.settle("nack", first[0]["ack_id"]) == ["nacked"]
    (again,) = await patiently(counter)
    assert (again["delivery_id"], again["attempt"]) == (first[0]["delivery_id"], 1)
    counter.run_out(again["delivery_id"])
    await counter.ends.expire(limit=10)
    (third,) = await patiently(counter)
    assert third["attempt"] == 2
    everything = [message["ack_id"] for message in [third, *first[1:], *rest]]
    assert await counter.settle("ack", *everything) == ["acked"] * 20
    await drained(counter)


async def test_two_processes_on_one_queue_share_it(
    database: str, artemis_url: str, client: str
) -> None:
    """Oracle: each message is leased once, by any process; nothing is left behind."""
    async with counters(database, artemis_url, client, 2) as both:
        here, _ = both
        got: list[int] = []

        async def consume(counter: Counter) -> None:
            while len(got) < 300:
                got.extend(
                    message["payload"]
                    for message in await counter.pull(max_messages=7, wait_ms=500)
                )

        batch = {
            "messages": [{"event_type": EVENT_TYPE, "payload": number} for number in range(300)]
        }
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for counter in both * 2:
                group.create_task(consume(counter))
            await here.desk.publisher.publish_batch(
                here.house.principal, here.room, json.dumps(batch).encode(), None
            )
        assert sorted(got) == list(range(300))
        assert here.house.count("delivery_log WHERE kind = 'leased'") == 300
        await drained(here)


@pytest.mark.parametrize("browses", [False, True])
async def test_a_stream_that_takes_nothing_keeps_nothing_from_other_processes(
    database: str, artemis_url: str, client: str, *, browses: bool
) -> None:
    """Its client works on a message, or only browses, while consumers of another process wait."""
    async with counters(database, artemis_url, client, 2) as (here, there):
        request = StreamRequest(browse=browses) if browses else StreamRequest(credit=1)
        streams = here.puller.streams
        stream = await streams.open(
            here.house.principal, [here.queue], request, renews_credit=False
        )
        taking = asyncio.create_task(
            here.pull(wait_ms=20_000) if browses else stream.next(PATIENCE_S)
        )
        await here.publish("first")
        await taking
        for number in range(20):
            await here.publish(number)
        got: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(got) < 20:
                messages = await there.pull(max_messages=20, wait_ms=2000, lease_ms=600_000)
                got += [message["payload"] for message in messages]
        assert sorted(got) == list(range(20))
        streams.close(stream)


@pytest.mark.parametrize("point", ["received", "leased", "settled"])
async def test_a_process_killed_on_its_way_to_an_answer_loses_nothing(
    counter: Counter, database: str, artemis_url: str, client: str, point: str
) -> None:
    """Oracle: what it had only received goes to other processes at once, unchanged.

    What it had leased comes as another attempt when its lease has ended, and an ack of the first
    lease is late. Nothing comes twice.
    """
    published = await counter.publish("precious")
    principal = counter.house.principal
    arguments = [
        database,
        principal.key_id,
        principal.organisation_id,
        counter.queue,
        artemis_url,
        client,
        point,
    ]
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [sys.executable, str(HERE / "hanging_consumer.py"), *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdout is not None
            readable, _, _ = await asyncio.to_thread(
                select.select, [process.stdout], [], [], PATIENCE_S
            )
            assert readable
            assert process.stdout.readline() == b"taken 1\n"
            leases = counter.house.count("leases")
        finally:
            process.kill()
    assert leases == (0 if point == "received" else 1)
    if leases:
        await until(lambda: bool(counter.house.count("leases WHERE until < now()")))
        assert await counter.ends.expire(limit=10) == (1, [counter.queue])
    (message,) = await patiently(counter)
    assert (message["message_id"], message["payload"], message["attempt"]) == (
        published,
        "precious",
        leases,
    )
    assert await counter.settle("ack", message["ack_id"]) == ["acked"]
    assert await counter.pull() == []
    assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_the_broker_is_unavailable_while_polls_wait(
    database: str, artemis_server: Callable[..., TestServer], client: str, how: str
) -> None:
    """Oracle: every message accepted before, meanwhile and after is pulled and acked once."""
    server = artemis_server()
    async with counters(database, server.url, client) as (counter,):
        await counter.publish(0)
        got = await patiently(counter)
        counter.carried = accepted  # type: ignore[method-assign]  # the relay cannot have carried it while all is away
        polls = [
            asyncio.create_task(patiently(counter, wait_ms=LONG_MS, max_messages=3))
            for _ in range(3)
        ]
        await counter.a_client_waits()
        if how == "killed":
            await asyncio.to_thread(server.kill)
        else:
            await asyncio.to_thread(server.suspend)
        for number in range(1, 10):
            await counter.publish(number)
        await asyncio.to_thread(server.start if how == "killed" else server.resume)
        for poll in polls:
            got += await poll
        while len(got) < 10:
            got += await patiently(counter)
        assert sorted(message["payload"] for message in got) == list(range(10))
        assert (
            await counter.settle("ack", *(message["ack_id"] for message in got)) == ["acked"] * 10
        )
        assert counter.work() == {"outbox": 0, "held": 0, "leases": 0}
        assert counter.house.count("delivery_log WHERE kind = 'pull_acked'") == 10


async def accepted() -> None:
    """Return at once."""


async def test_a_queue_that_is_deleted_under_a_poll_disturbs_no_other(counter: Counter) -> None:
    """Oracle: its poll gets the error, the queue is deleted for good, and the other poll goes on."""
    broker = counter.broker
    assert broker is not None
    other = counter.house.subscription(counter.room, "PULL")
    await counter.publish("first")
    assert len(await patiently(counter)) == len(await patiently(counter, queue=other)) == 1
    doomed = asyncio.create_task(counter.pull(wait_ms=LONG_MS))
    going_on = asyncio.create_task(counter.pull(queue=other, wait_ms=LONG_MS))
    await until(lambda: len(counter.puller._waiters.waiting_keys()) == 2)
    counter.house.run("UPDATE subscriptions SET status = 'deleted' WHERE id = %s", counter.queue)
    counter.signals.notify(Channel.CONFIG, str(counter.room))
    with pytest.raises(NotFoundError):
        await doomed
    async with asyncio.timeout(PATIENCE_S):
        while not await broker.delete_queue(counter.queue):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    with pytest.raises(NotFoundError):
        await counter.pull()
    assert list(await broker.list_queues()) == [SubscriptionId(other)]
    assert not going_on.done()
    counter.desk.planner.invalidate(None)
    await counter.publish("second")
    assert [message["payload"] for message in await going_on] == ["second"]
