"""Test ordered subscriptions over REST: PULL in order, blocked keys, and skipping a head."""

from typing import Any

import pytest

from rooms.db.queue.ordering import OrderingQueries
from rooms.domain.ids import SubscriptionId
from tests.integration.rooms.api.conftest import Api


@pytest.fixture
async def queue(api: Api) -> dict[str, Any]:
    room = await api.room()
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    return await api.subscription(room["id"], "queue", type="PULL", ordered=True, max_receives=1)


async def pull(api: Api, queue: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await api.call("POST", f"/subscriptions/{queue['id']}/pull", json={"max_messages": 10})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


async def say(api: Api, queue: dict[str, Any], word: str, messages: list[dict[str, Any]]) -> None:
    body = {"ack_ids": [message["ack_id"] for message in messages]}
    answer = await api.call("POST", f"/subscriptions/{queue['id']}/{word}", json=body)
    assert answer.status_code == 200, answer.text


async def keys(api: Api, queue: dict[str, Any], **query: Any) -> list[tuple[Any, ...]]:
    answer = await api.call("GET", f"/subscriptions/{queue['id']}/ordering-keys", params=query)
    assert answer.status_code == 200, answer.text
    return [
        (item["ordering_key"], item["state"], item["waiting"]) for item in answer.json()["items"]
    ]


async def test_a_queue_hands_out_one_of_a_key_at_a_time(api: Api, queue: dict[str, Any]) -> None:
    assert queue["ordered"]
    for number in range(4):
        await api.publish(queue["room_id"], "made", number, ordering_key="k")
    await api.publish(queue["room_id"], "made", 9)
    first = await pull(api, queue)
    assert [message["payload"] for message in first] == [0, 9], "what has no key flows freely"
    assert await pull(api, queue) == []
    assert await keys(api, queue) == [("k", "leased", 3)]
    await say(api, queue, "ack", first)
    second = await pull(api, queue)
    assert [message["payload"] for message in second] == [1]
    await say(api, queue, "ack", second)
    third = await pull(api, queue)
    assert [message["payload"] for message in third] == [2]

    assert await keys(api, queue, parked="true") == []
    await say(api, queue, "nack", third)
    assert await pull(api, queue) == []
    assert await keys(api, queue, parked="true") == [("k", "sidelined", 1)]
    at = f"/subscriptions/{queue['id']}/ordering-keys/skip"
    answer = await api.call("POST", at, json={"ordering_key": "k"})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"skipped": third[0]["delivery_id"], "called": True}
    fourth = await pull(api, queue)
    assert [message["payload"] for message in fourth] == [3]
    assert (await api.call("POST", at, json={"ordering_key": "k"})).status_code == 409
    await say(api, queue, "ack", fourth)
    assert await keys(api, queue) == []


async def test_ordering_is_set_and_cleared(api: Api, queue: dict[str, Any]) -> None:
    at = f"/subscriptions/{queue['id']}"
    for number in range(3):
        await api.publish(queue["room_id"], "made", number, ordering_key="k")
    assert (await api.call("PATCH", at, json={"ordered": False})).json()["ordered"] is False
    await api.publish(queue["room_id"], "made", 3, ordering_key="k")
    found = await pull(api, queue)
    assert [message["payload"] for message in found] == [0, 3]
    order = OrderingQueries(api.services.writer)
    assert await order.release(SubscriptionId(queue["id"]), limit=10) == (3, True), (
        "two that waited, and their key"
    )
    assert [message["payload"] for message in await pull(api, queue)] == [1, 2]


async def test_a_subscription_without_ordering_follows_the_room(
    api: Api, queue: dict[str, Any]
) -> None:
    room, at = queue["room_id"], f"/subscriptions/{queue['id']}"
    assert (await api.call("PATCH", at, json={"ordered": None})).json()["ordered"] is None
    hook = await api.subscription(room)
    for ordered in (True, False):
        changed = await api.call("PATCH", f"/rooms/{room}", json={"ordered": ordered})
        assert changed.json()["ordered"] is ordered
        assert (await api.call("GET", f"/subscriptions/{hook['id']}/lane")).json()[
            "ordered"
        ] is ordered
        for number in range(2):
            await api.publish(room, "made", number, ordering_key=f"k{ordered}")
        found = await pull(api, queue)
        assert [message["payload"] for message in found] == ([0] if ordered else [0, 1])
    assert (await api.call("PATCH", f"/rooms/{room}", json={"ordered": None})).status_code == 422
