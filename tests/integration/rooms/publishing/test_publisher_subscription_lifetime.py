"""Test the lifetime of a subscription's deliveries at publish, on PostgreSQL and on a broker.

Oracle: a delivery lives for the shortest of the room's, the message's and the subscription's
lifetime, from when its message is due; its work row says the same.
"""

import itertools
import json
from datetime import timedelta

import pytest

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode, relayed_mode
from tests.support.publisher import House, open_desk

HOUR_MS = 3_600_000
LIFETIMES = (None, 60_000, HOUR_MS)


def shortest(*lifetimes_ms: int | None) -> timedelta | None:
    given = [one for one in lifetimes_ms if one is not None]
    return timedelta(milliseconds=min(given)) if given else None


def limit(house: House, room: RoomId, subscription: SubscriptionId, life_ms: int | None) -> None:
    value = "NULL" if life_ms is None else str(life_ms)
    statement = "UPDATE subscriptions SET message_expiration_ms = {} WHERE id = '{}'"
    house.change(room, statement.format(value, subscription))


@pytest.mark.parametrize("mode", [POSTGRES_MODE, relayed_mode(lookahead_ms=60_000)])
@pytest.mark.parametrize("kind", ["PUSH", "PULL"])
async def test_the_shortest_of_three_lifetimes_counts(
    database: str, kind: str, mode: BrokerMode
) -> None:
    house = House(database)
    async with open_desk(database, shape=mode) as desk:
        for room_ms, ttl_ms, delay_ms in itertools.product(LIFETIMES, LIFETIMES, (None, 1000)):
            room = house.room(expiration_ms=room_ms)
            house.event_type(room)
            expected = {}
            for own_ms in LIFETIMES:
                subscription = house.subscription(room, kind)
                limit(house, room, subscription, own_ms)
                expected[subscription] = shortest(room_ms, ttl_ms, own_ms)
            body = {"event_type": "order.created", "payload": 1}
            body |= {} if ttl_ms is None else {"ttl_ms": ttl_ms}
            body |= {} if delay_ms is None else {"delay_ms": delay_ms}
            sent = json.dumps(body).encode()
            await desk.publisher.publish(house.principal, room, sent, None)
            rows = house.run(
                "SELECT d.subscription_id::text, d.expires_at - d.due_at, o.expires_at - o.due_at"
                " FROM deliveries d JOIN outbox o USING (room_id, id) WHERE d.room_id = %s",
                room,
            )
            assert {one: life for one, life, _ in rows} == expected
            assert all(life == work for _, life, work in rows)
            (message,) = house.run(
                "SELECT expires_at - coalesce(due_at, published_at) FROM messages"
                " WHERE room_id = %s",
                room,
            )
            assert message == (shortest(room_ms, ttl_ms),)


async def test_a_changed_lifetime_counts_from_the_next_publish(database: str) -> None:
    """Check that a shorter room counts although a subscription's lifetime was allowed before."""
    house = House(database)
    room = house.room(expiration_ms=HOUR_MS)
    house.event_type(room)
    subscription = house.subscription(room, "PULL")
    body = b'{"event_type":"order.created","payload":1}'
    found = []
    async with open_desk(database) as desk:
        for own_ms, room_ms in ((None, HOUR_MS), (60_000, HOUR_MS), (60_000, 1000)):
            limit(house, room, subscription, own_ms)
            house.change(room, f"UPDATE rooms SET message_expiration_ms = {room_ms}")
            await desk.publisher.publish(house.principal, room, body, None)
            found = house.run("SELECT expires_at - due_at FROM deliveries ORDER BY id")
    assert sorted(life for (life,) in found) == [
        timedelta(seconds=1),
        timedelta(minutes=1),
        timedelta(hours=1),
    ]
