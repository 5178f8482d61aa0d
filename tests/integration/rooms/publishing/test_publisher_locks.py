"""Check that a publish that waits for another transaction's lock lets no other room wait."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from rooms.db.queue.ordering import key_digest
from rooms.domain.ids import RoomId
from rooms.publishing.service import LOCK_TIMEOUT_MS
from tests.support.publisher import Desk, House, open_desk

SOON_S = 2.5
"""Less than the time for which a publish waits for a lock at last."""
assert SOON_S < LOCK_TIMEOUT_MS / 1000


@pytest.fixture
def house(database: str) -> House:
    return House(database)


@pytest.fixture
async def desk(database: str) -> AsyncIterator[Desk]:
    async with open_desk(database) as desk:
        yield desk


def a_room(house: House, *, ordered: bool = False) -> tuple[RoomId, str]:
    room = house.room()
    house.event_type(room)
    return room, house.subscription(room, "PULL", ordered=ordered)


async def send(
    desk: Desk, house: House, room: RoomId, *, key: str | None = None, **fields: Any
) -> float:
    """Publish, and return how long that took, in seconds."""
    body = json.dumps({"event_type": "order.created", "payload": 1, **fields}).encode()
    begun_s = time.monotonic()
    answer = await desk.publisher.publish(house.principal, room, body, key)
    assert answer.status == 202
    return time.monotonic() - begun_s


@pytest.mark.parametrize("kind", ["ordering key", "idempotency key", "caller id"])
async def test_others_do_not_wait_for_the_lock_of_a_room(
    desk: Desk, house: House, kind: str
) -> None:
    """They do while a process hangs that publishes with this key; its own requests wait for it."""
    (room, subscription), (theirs, _) = a_room(house, ordered=True), a_room(house, ordered=True)
    other = House(house.url)
    (others_room, _) = a_room(other, ordered=True)
    for house_of, one in ((house, room), (house, theirs), (other, others_room)):
        await send(desk, house_of, one)
    fields: dict[str, Any] = {
        "ordering key": {"ordering_key": "k"},
        "idempotency key": {"key": "k"},
        "caller id": {"id": "k"},
    }[kind]
    statement, parameters = {
        "ordering key": (
            (
                "INSERT INTO ordered_keys (room_id, subscription_id, key, tail, head, head_id)"
                " VALUES (%s, %s, %s, 1, 1, gen_random_uuid())"
            ),
            (room, subscription, key_digest("k")),
        ),
        "idempotency key": (
            (
                "INSERT INTO idempotency_keys (room_id, key, message_id, request_hash, answer)"
                " VALUES (%s, 'k', gen_random_uuid(), '', '')"
            ),
            (room,),
        ),
        "caller id": (
            (
                "INSERT INTO message_ids (room_id, caller_id, message_id, content_hash, answer)"
                " VALUES (%s, 'k', gen_random_uuid(), '', '')"
            ),
            (room,),
        ),
    }[kind]
    async with await psycopg.AsyncConnection.connect(house.url) as hanging:
        await hanging.execute(statement, parameters)
        waiting = asyncio.create_task(send(desk, house, room, **fields))
        others = [
            send(desk, other, others_room),
            send(desk, other, others_room, ordering_key="k"),
            send(desk, other, others_room, key="k"),
            send(desk, other, others_room, id="k"),
            send(desk, house, theirs, ordering_key="k"),
            send(desk, house, room, payload=2),
        ]
        assert max(await asyncio.gather(*others)) < SOON_S
        assert max(await asyncio.gather(send(desk, other, others_room, ordering_key="l"))) < SOON_S
        assert not waiting.done()
        await hanging.rollback()
    await waiting
