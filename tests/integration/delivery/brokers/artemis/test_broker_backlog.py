"""Send copies that come behind others to a queue of their own, so that no backlog delays others."""

import random
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

import pytest

from delivery.brokers.artemis.broker import ArtemisBroker
from delivery.brokers.artemis.consumer import ArtemisConsumer
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, IdGenerator, MessageId, RoomId, SubscriptionId
from tests.support.broker_client import deliveries, taking
from tests.support.installation import now_ms, until
from tests.support.tasks import make_task

DUE = datetime(2026, 1, 1, tzinfo=UTC)
ROOM, OTHER_ROOM = RoomId(7), RoomId(8)
_IDS = IdGenerator(random.getrandbits)


@pytest.fixture
async def broker(artemis_url: str) -> AsyncIterator[ArtemisBroker]:
    async with ArtemisBroker(artemis_url, farm="farm", client=secrets.token_hex(6)) as broker:
        yield broker


def copies_of(
    count: int, *, room: RoomId = ROOM, behind: bool = False, priority: int = 4
) -> list[DeliveryTask]:
    subscription = SubscriptionId(_IDS.generate(room, now_ms()))
    return [
        replace(
            make_task(subscription, room=room, priority=priority),
            delivery_id=DeliveryId(_IDS.generate(room, now_ms())),
            message_id=MessageId(_IDS.generate(room, now_ms())),
            behind=behind,
        )
        for _ in range(count)
    ]


async def send(broker: ArtemisBroker, copies: list[DeliveryTask]) -> None:
    assert not await broker.send(copies, not_before=[DUE] * len(copies))


@pytest.mark.parametrize("priority", [0, 4, 9])
async def test_each_message_of_others_comes_before_a_backlog_that_fills_the_credit(
    broker: ArtemisBroker, priority: int
) -> None:
    """One queue is not enough: from the second one on they would wait for the whole backlog.

    The broker's iterator starts again at the highest priority only after a message of another
    priority than the last one.
    """
    backlog = copies_of(1000, behind=True, priority=priority)
    await send(broker, backlog)
    async with taking(broker, credit=100) as taker:
        consumer, taken = cast("ArtemisConsumer", taker.consumer), 100
        await taker.has(taken)
        for _ in range(5):
            (one,) = copies_of(1, room=OTHER_ROOM, priority=priority)
            await send(broker, [one])

            async def is_read() -> bool:
                return one.delivery_id in [version[0] for version in consumer._acks]  # noqa: B023

            await until(is_read, "the message to come, although the credit is used")
            await consumer.settle([taker.copies[taken - 100]])
            taken += 1
            assert (await taker.has(taken))[-1].delivery_id == one.delivery_id
    assert len(set(deliveries(taker.copies))) == taken


async def test_a_copy_says_that_it_is_behind_others(broker: ArtemisBroker) -> None:
    backlog, others = copies_of(3, behind=True), copies_of(3)
    await send(broker, [*backlog, *others])
    async with taking(broker) as taker:
        found = await taker.has(6)
    assert {copy.delivery_id: copy.behind for copy in found} == {
        **dict.fromkeys(deliveries(backlog), True),
        **dict.fromkeys(deliveries(others), False),
    }


async def test_both_queues_are_counted_and_purged(broker: ArtemisBroker) -> None:
    backlog, others = copies_of(4, behind=True), copies_of(3)
    of_both = [replace(copy, subscription_id=others[0].subscription_id) for copy in others[:2]]
    await send(broker, [*backlog, *others[2:], *[replace(one, behind=True) for one in of_both]])

    async def is_counted() -> bool:
        return await broker.depth(None) == 7

    await until(is_counted, "all copies to be counted")
    assert await broker.purge(ROOM, others[0].subscription_id) == 3
    assert await broker.depth(None) == 4


async def test_a_queue_that_was_deleted_is_made_again_by_who_sends_to_it(
    broker: ArtemisBroker,
) -> None:
    """A broker that was emptied, or one on which an older version made only the first queue."""
    await broker.create_queues(())
    queue = broker._queue_names.backlog
    assert await broker._with_management(lambda management: management.delete_queue(queue))
    backlog = copies_of(2, behind=True)
    await send(broker, backlog)
    async with taking(broker) as taker:
        assert sorted(deliveries(await taker.has(2))) == sorted(deliveries(backlog))
