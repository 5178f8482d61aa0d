"""Sequences: the deliveries of a subscription and ordering key are numbered 1, 2, 3 … in the order of their commits."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from rooms.db.connection import open_connection
from rooms.db.retention.bounded_locks import prepare_session
from rooms.db.retention.cleanup import delete_idle_sequences
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.work_location import POSTGRES_MODE, relayed_mode
from rooms.errors import ConflictError
from tests.support.ordered_deliveries import send
from tests.support.publisher import Desk, House, open_desk

_NUMBERS = """
SELECT convert_from(m.payload, 'UTF8')::int, d.sequence FROM deliveries d
JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id
WHERE d.room_id = %s AND d.subscription_id = %s AND m.ordering_key IS NOT DISTINCT FROM %s ORDER BY d.sequence, 1
"""


@dataclass
class Numbered:
    """Hold a room with an ordered and an unordered subscription."""

    house: House
    desk: Desk
    room: RoomId
    ordered: SubscriptionId
    unordered: SubscriptionId

    async def send(self, key: str | None, *payloads: int) -> None:
        await send(self.desk, self.house, self.room, key, *payloads)

    def numbers(
        self, key: str | None, subscription: SubscriptionId | None = None
    ) -> list[tuple[int, int | None]]:
        """Return (payload, sequence) of a key's deliveries."""
        return [
            (payload, number)
            for payload, number in self.house.run(
                _NUMBERS, self.room, subscription or self.ordered, key
            )
        ]


@pytest.fixture(params=["embedded", "relayed"])
async def numbered(database: str, request: pytest.FixtureRequest) -> AsyncIterator[Numbered]:
    house = House(database)
    room = house.room()
    house.event_type(room)
    ordered = house.subscription(room, "PUSH", ordered=True)
    unordered = house.subscription(room, "PULL")
    shape = POSTGRES_MODE if request.param == "embedded" else relayed_mode(lookahead_ms=60_000)
    async with open_desk(database, shape=shape) as desk:
        yield Numbered(house, desk, room, ordered, unordered)


async def test_each_key_of_an_ordered_subscription_is_numbered(numbered: Numbered) -> None:
    await numbered.send("k", 1, 2, 3)
    await numbered.send("other", 4)
    await numbered.send(None, 5)
    await numbered.send("k", 6)
    assert numbered.numbers("k") == [(1, 1), (2, 2), (3, 3), (6, 4)]
    assert numbered.numbers("other") == [(4, 1)]
    assert numbered.numbers(None) == [(5, None)]
    assert [number for _, number in numbered.numbers("k", numbered.unordered)] == [None] * 4


async def test_each_subscription_has_numbers_of_its_own(numbered: Numbered) -> None:
    await numbered.send("k", 1, 2)
    late = numbered.house.subscription(numbered.room, "PULL", ordered=True)
    await numbered.send("k", 3)
    assert numbered.numbers("k") == [(1, 1), (2, 2), (3, 3)]
    assert numbered.numbers("k", late) == [(3, 1)]


async def test_the_numbers_go_on_when_nothing_of_the_key_is_in_progress(numbered: Numbered) -> None:
    await numbered.send("k", 1, 2)
    numbered.house.run("UPDATE deliveries SET state = 'delivered'")
    for table in ("ordered_keys", "ordered_waiting", "outbox", "held"):
        numbered.house.run(f"DELETE FROM {table}")
    await numbered.send("k", 3)
    assert numbered.numbers("k") == [(1, 1), (2, 2), (3, 3)]


async def test_keys_of_one_request_are_numbered_each(numbered: Numbered) -> None:
    messages = [
        {"event_type": "order.created", "payload": number, "ordering_key": "abc"[number % 3]}
        for number in range(9)
    ]
    body = json.dumps({"messages": messages}).encode()
    answer = await numbered.desk.publisher.publish_batch(
        numbered.house.principal, numbered.room, body, None
    )
    assert answer.status == 202
    assert [numbered.numbers(key) for key in "abc"] == [
        [(first, 1), (first + 3, 2), (first + 6, 3)] for first in range(3)
    ]


async def test_a_request_that_is_not_written_takes_no_number(numbered: Numbered) -> None:
    """A repeated Idempotency-Key, a refused body, and a plan that was out of date."""

    async def publish(payload: int, key: str | None) -> int:
        body = {"event_type": "order.created", "payload": payload, "ordering_key": "k"}
        answer = await numbered.desk.publisher.publish(
            numbered.house.principal, numbered.room, json.dumps(body).encode(), key
        )
        return answer.status

    assert {*await asyncio.gather(publish(1, "same"), publish(1, "same"))} == {202}
    with pytest.raises(ConflictError):
        await publish(2, "same")
    numbered.house.subscription(numbered.room, "PULL", ordered=True)
    assert await publish(3, None) == 202
    assert [number for _, number in numbered.numbers("k")] == [1, 2]


async def test_publishers_at_once_leave_no_gap_and_repeat_no_number(
    numbered: Numbered, database: str
) -> None:
    async with open_desk(database) as second:
        await asyncio.gather(
            *(
                send(desk, numbered.house, numbered.room, "kl"[number % 2], number, number + 1000)
                for number in range(60)
                for desk in (numbered.desk, second)
            )
        )
    for key in "kl":
        found = numbered.numbers(key)
        assert [number for _, number in found] == list(range(1, 121))
        places = numbered.house.run(
            "SELECT d.id::text FROM deliveries d JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id"
            " WHERE d.subscription_id = %s AND m.ordering_key = %s ORDER BY d.sequence",
            numbered.ordered,
            key,
        )
        waiting = numbered.house.run(
            "SELECT w.id::text FROM ordered_waiting w JOIN ordered_keys k USING (room_id, subscription_id, key)"
            " JOIN deliveries d ON d.id = k.head_id JOIN messages m ON m.id = d.message_id"
            " WHERE m.ordering_key = %s ORDER BY w.position",
            key,
        )
        assert places[1:] == waiting, "the numbers are in the order of delivery"


async def test_an_idle_key_is_forgotten_and_begins_again(numbered: Numbered) -> None:
    for key in ("idle", "fresh", "unfinished"):
        await numbered.send(key, 1, 2)
    numbered.house.run(
        "DELETE FROM ordered_keys k USING deliveries d, messages m"
        " WHERE d.id = k.head_id AND m.id = d.message_id AND m.ordering_key <> 'unfinished'"
    )
    numbered.house.run(
        "UPDATE sequences s SET updated_at = now() - interval '40 days' FROM ("
        " SELECT DISTINCT q.key FROM sequences q JOIN ordered_waiting w USING (room_id, subscription_id, key)"
        " JOIN deliveries d ON d.id = w.id JOIN messages m ON m.id = d.message_id WHERE m.ordering_key <> 'fresh'"
        ") x WHERE x.key = s.key"
    )
    before = datetime.now(UTC) - timedelta(days=30)
    async with open_connection(numbered.house.url, name="rooms retention") as connection:
        assert await prepare_session(connection)
        assert await delete_idle_sequences(connection, before, lambda: False) == 0
        assert await delete_idle_sequences(connection, before, lambda: True, limit=1) == 1
        assert await delete_idle_sequences(connection, before, lambda: True, limit=1) == 0
    assert numbered.house.count("sequences") == 2
    for key in ("idle", "fresh", "unfinished"):
        await numbered.send(key, 3)
    assert [number for _, number in numbered.numbers("idle")] == [1, 1, 2]
    assert [number for _, number in numbered.numbers("fresh")] == [1, 2, 3]
    assert [number for _, number in numbered.numbers("unfinished")] == [1, 2, 3]
