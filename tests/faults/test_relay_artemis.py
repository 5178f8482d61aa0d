"""The relay on a live Artemis: killed brokers, emptied ones, deleted queues. The oracle is `test_relay`'s."""

import asyncio
import os
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from delivery.brokers import open_broker
from delivery.maintenance.resend import BrokerRecovery
from rooms.clock import SystemClock
from rooms.db.queue.relay import RelayBatch
from rooms.db.queue.resend import ResendQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import State, SubscriptionStatus, SubscriptionType
from rooms.domain.work_location import WorkLocation
from rooms.ports import Broker
from tests.support.broker_client import holds, holds_for_good
from tests.support.installation import Installation, until
from tests.support.local_servers import TestServer
from tests.support.relay import names, places, relaying, to_send, until_sent
from tests.support.sentinel import recovering

PULL = SubscriptionType.PULL
PATIENCE_S = 60.0
_NUMBERS = count(1)


def client() -> str:
    """An installation of the test's own."""
    return f"relay-{os.getpid()}-{next(_NUMBERS)}"


async def received(
    broker: Broker, wanted: int, subscription: SubscriptionId | None = None
) -> list[DeliveryTask]:
    """So many different copies, settled as they come; one that was sent twice may come twice."""
    found: dict[str, DeliveryTask] = {}
    async with (
        asyncio.timeout(PATIENCE_S),
        broker.consume(credit=1000, subscription=subscription) as consumer,
    ):
        async for batch in consumer.batches():
            found |= {copy.dedup_id: copy for copy in batch}
            await consumer.settle(batch)
            if len(found) >= wanted:
                break
    return list(found.values())


async def test_what_is_relayed_is_received_as_it_was_queued(
    installation: Installation, artemis_url: str
) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    copies = await to_send(installation, push, count=40)
    pulled = await to_send(installation, pull, kind=PULL, count=40)
    async with (
        open_broker(artemis_url, claim_s=60, farm="rooms", client=client()) as broker,
        relaying(installation.url, broker, batch=25) as runner,
    ):
        await until_sent(installation)
        assert names(await received(broker, 40)) == names(copies)
        found = await received(broker, 40, pull)
    assert names(found) == names(pulled)
    assert {copy.payload for copy in found} == {pulled[0].payload}
    assert set(runner.arrived) == {pull}
    assert await places(installation) == {
        WorkLocation.PUSH_AT_BROKER: 40,
        WorkLocation.PULL_AT_BROKER: 40,
    }


async def test_a_relay_that_dies_after_the_receipt_sends_the_same_version_again(
    installation: Installation, artemis_url: str
) -> None:
    """So whatever comes twice is one attempt."""
    copies = await to_send(installation, await installation.subscribe(), count=30)
    async with open_broker(artemis_url, claim_s=60, farm="rooms", client=client()) as broker:
        async with relaying(installation.url, broker) as first:
            first.outgoing.dies_before_mark = True
            await first.died.wait()
        await holds_for_good(broker, installation, 30)
        async with relaying(installation.url, broker):
            await until_sent(installation)
        await holds_for_good(broker, installation, 60)
        assert names(await received(broker, 30)) == names(copies)


async def test_a_deleted_subscription_stalls_no_other(
    installation: Installation, artemis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue goes while copies for it are claimed.

    Those of others, sent in the same batch, all arrive.
    """
    alive, gone = await installation.subscribe(PULL), await installation.subscribe(PULL)
    await to_send(installation, alive, gone, kind=PULL)
    async with (
        open_broker(artemis_url, claim_s=60, farm="rooms", client=client()) as broker,
        relaying(installation.url, broker) as runner,
    ):
        await until_sent(installation)
        claim = runner.outgoing.claim
        deleted: list[bool] = []

        async def claim_and_lose(**asked: Any) -> RelayBatch:
            batch = await claim(**asked)
            if not deleted and any(copy.subscription_id == gone for copy in batch.tasks):
                await installation.change(gone, status=SubscriptionStatus.DELETED)
                deleted.append(await broker.delete_queue(gone))
            return batch

        monkeypatch.setattr(runner.outgoing, "claim", claim_and_lose)
        copies = await to_send(installation, alive, gone, kind=PULL, count=10)
        await until_sent(installation)
        assert deleted == [True]
        assert list(await broker.list_queues()) == [alive]
        assert len(await received(broker, 11, alive)) == 11
    assert await installation.states() == {"queued": 12, "cancelled": 10}
    assert len(copies) == 20


async def test_a_broker_killed_under_load_gets_the_rest_when_it_is_back(
    installation: Installation, artemis_server: Callable[..., TestServer]
) -> None:
    """All that it had comes under the next generation, as it lost its sentinel, too."""
    server = artemis_server()
    subscription = await installation.subscribe()
    copies = await to_send(installation, subscription, count=50)
    async with (
        open_broker(server.url, claim_s=60, farm="rooms", client=client()) as broker,
        relaying(installation.url, broker, batch=20) as runner,
    ):
        await until_sent(installation)
        # From here on only: beside the first sends it could see no sentinel, and send them again.
        async with recovering(installation.url, broker):
            await asyncio.to_thread(server.kill)
            copies += await to_send(installation, subscription, count=100)

            async def tried() -> bool:
                return bool(runner.metrics.relay_failures._value.get())

            await until(tried, "the relay to notice", within_s=60)
            await asyncio.to_thread(server.start)
            await until(broker.has_sentinel, "the recovery", within_s=60)
            await until_sent(installation)
            found = await received(broker, 150)
        assert {copy.delivery_id for copy in found} == {copy.delivery_id for copy in copies}
        lost = {copy.delivery_id for copy in copies[:50]}
        assert {copy.generation for copy in found if copy.delivery_id in lost} == {1}


async def test_an_emptied_journal_gets_everything_again(
    installation: Installation, artemis_server: Callable[..., TestServer], database: str
) -> None:
    """All unfinished copies come again, each under the next generation, and none is lost."""
    server = artemis_server()
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    copies = await to_send(installation, push, count=30)
    pulled = await to_send(installation, pull, kind=PULL, count=30)
    async with (
        open_broker(server.url, claim_s=60, farm="rooms", client=client()) as broker,
        relaying(installation.url, broker),
        LogWriter(database, kind="chores") as writer,
    ):
        duty = BrokerRecovery(ResendQueries(writer), broker, SystemClock(), lambda: None)
        await until_sent(installation)
        await duty.run(lambda: True)
        assert await broker.has_sentinel()
        await asyncio.to_thread(server.kill)
        server.erase()
        await asyncio.to_thread(server.start)

        async def back() -> bool:
            try:
                return not await broker.has_sentinel()
            except Exception:  # noqa: BLE001 - it is on its way
                return False

        await until(back, "the broker to be back", within_s=60)
        await duty.run(lambda: True)
        assert await broker.has_sentinel()
        await until_sent(installation)
        expected = sorted(f"{copy.delivery_id}:1:0" for copy in copies)
        assert names(await received(broker, 30)) == expected
        assert names(await received(broker, 30, pull)) == sorted(
            f"{copy.delivery_id}:1:0" for copy in pulled
        )
    assert await installation.states() == {State.QUEUED: 60}


async def test_what_is_due_within_the_lookahead_waits_in_the_broker(
    installation: Installation, artemis_url: str
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    due = await installation.value("SELECT now() + interval '1500 ms'")
    await installation.queue(copy, due=due)
    await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PUSH_TO_RELAY))
    async with (
        open_broker(artemis_url, claim_s=60, farm="rooms", client=client()) as broker,
        relaying(installation.url, broker),
    ):
        await until_sent(installation)
        await holds(broker, 1)
        (found,) = await received(broker, 1)
    assert time.time() >= due.timestamp() - 0.05
    assert found.dedup_id == copy.dedup_id
