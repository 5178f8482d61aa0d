"""Test browsing the queue of a PULL subscription over REST."""

from typing import Any

import pytest

from rooms.db.queries import pull_queue
from tests.integration.rooms.api.conftest import Api


async def queue(api: Api) -> tuple[int, dict[str, Any]]:
    room = await api.room()
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    return room["id"], await api.subscription(room["id"], "queue", type="PULL")


async def listed(api: Api, path: str, **params: Any) -> list[dict[str, Any]]:
    """Return all items of a list, a page of two at a time."""
    found: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    while True:
        answer = await api.call("GET", path, params={"limit": 2, **params, **more})
        assert answer.status_code == 200, answer.text
        found += answer.json()["items"]
        if answer.json()["next_cursor"] is None:
            return found
        more = {"cursor": answer.json()["next_cursor"]}


async def test_it_lists_in_the_order_of_consumers_and_takes_nothing(api: Api) -> None:
    room, subscription = await queue(api)
    sent = [
        (await api.publish(room, "made", n, priority=priority, ordering_key=f"k{n}"))["message_id"]
        for n, priority in enumerate((4, 9, 0, 4, 9))
    ]
    later = (await api.publish(room, "made", 5, delay_ms=60_000))["message_id"]
    path = f"/subscriptions/{subscription['id']}/queue"
    items = await listed(api, path)
    order = [one["message_id"] for one in items]
    assert sorted(order) == sorted([*sent, later])
    assert [one for one in order if one in sent] == [sent[n] for n in (1, 4, 0, 3, 2)]
    assert all(one["leased_until"] is None for one in items)
    assert "payload" not in items[0]
    body = {"max_messages": 10, "lease_ms": 60_000, "wait_ms": 0}
    pull = f"/subscriptions/{subscription['id']}/pull"
    pulled = (await api.call("POST", pull, json=body)).json()["messages"]
    assert [one["message_id"] for one in pulled] == [one for one in order if one in sent]


async def test_leased_messages_are_listed_with_the_end_of_their_lease(api: Api) -> None:
    room, subscription = await queue(api)
    for n in range(3):
        await api.publish(room, "made", n)
    body = {"max_messages": 2, "lease_ms": 60_000, "wait_ms": 0}
    pull = f"/subscriptions/{subscription['id']}/pull"
    pulled = (await api.call("POST", pull, json=body)).json()["messages"]
    path = f"/subscriptions/{subscription['id']}/queue"
    leased = await listed(api, path, state="leased", limit=1)
    assert {one["delivery_id"] for one in leased} == {one["delivery_id"] for one in pulled}
    assert leased[0]["leased_until"] is not None
    assert leased[0]["leased_at"] < leased[0]["leased_until"]
    own = (await api.call("GET", "/whoami")).json()
    assert {one["key_id"] for one in leased} == {own["key_id"]}
    assert len(await listed(api, path)) == 1


async def test_a_call_looks_at_a_bounded_number_of_leases(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, subscription = await queue(api)
    other = await api.subscription(room, "other", type="PULL")
    for n in range(3):
        await api.publish(room, "made", n)
    body = {"max_messages": 10, "lease_ms": 60_000, "wait_ms": 0}
    for one in (subscription, other):
        await api.call("POST", f"/subscriptions/{one['id']}/pull", json=body)
    monkeypatch.setattr(pull_queue.list_leased, "__kwdefaults__", {"max_scanned": 1})
    path = f"/subscriptions/{subscription['id']}/queue"
    first = (await api.call("GET", path, params={"state": "leased"})).json()
    assert len(first["items"]) <= 1
    assert first["next_cursor"] is not None
    assert len(await listed(api, path, state="leased")) == 3


async def test_a_webhook_has_no_queue(api: Api) -> None:
    room, _ = await queue(api)
    hook = await api.subscription(room, "hook")
    answer = await api.call("GET", f"/subscriptions/{hook['id']}/queue")
    assert answer.status_code == 409


async def test_a_consumer_sees_what_is_due(api: Api) -> None:
    room, subscription = await queue(api)
    await api.publish(room, "made", 1, delay_ms=60_000)
    due = (await api.publish(room, "made", 2))["message_id"]
    path = f"/subscriptions/{subscription['id']}/queue"
    items = (await api.call("GET", path, "subscribe")).json()["items"]
    assert [one["message_id"] for one in items] == [due]
    assert len((await api.call("GET", path)).json()["items"]) == 2


async def test_consumers_are_listed_with_what_they_have(api: Api) -> None:
    room, subscription = await queue(api)
    other = await api.subscription(room, "other", type="PULL")
    path = f"/subscriptions/{subscription['id']}"
    none = (await api.call("GET", f"{path}/consumers")).json()
    assert none == {"items": [], "oldest_due_at": None, "complete": True}
    for n in range(6):
        await api.publish(room, "made", n)
    for key, most, lease_ms in (("admin", 3, 60_000), ("subscribe", 1, 30_000)):
        body = {"max_messages": most, "lease_ms": lease_ms, "wait_ms": 0}
        await api.call("POST", f"{path}/pull", key, json=body)
        await api.call("POST", f"/subscriptions/{other['id']}/pull", key, json=body)
    found = (await api.call("GET", f"{path}/consumers", "view")).json()
    leases = {
        (await api.call("GET", "/whoami", key)).json()["key_id"]: n
        for key, n in (("admin", 3), ("subscribe", 1))
    }
    assert {one["key_id"]: one["leases"] for one in found["items"]} == leases
    assert all(one["key_name"] for one in found["items"])
    assert found["complete"]
    assert found["oldest_due_at"] is not None
    for one in found["items"]:
        assert one["oldest_at"] < one["first_end"] == one["last_end"]


async def test_a_restricted_key_reads_no_names_of_others(api: Api) -> None:
    room, subscription = await queue(api)
    await api.publish(room, "made", 1)
    await api.publish(room, "made", 2)
    body = {"name": "own", "scopes": ["subscribe"], "subscriptions": [subscription["id"]]}
    key = (await api.made("/keys", body))["key"]
    path = f"/subscriptions/{subscription['id']}"
    for one in ("admin", key):
        pull = {"max_messages": 1, "lease_ms": 60_000, "wait_ms": 0}
        assert (await api.call("POST", f"{path}/pull", one, json=pull)).json()["messages"]
    found = (await api.call("GET", f"{path}/consumers", key)).json()["items"]
    assert {one["key_name"] for one in found} == {"own", None}
    assert {one["leases"] for one in found} == {1}


async def test_others_see_no_consumers(api: Api) -> None:
    room, subscription = await queue(api)
    path = f"/subscriptions/{subscription['id']}/consumers"
    assert (await api.call("GET", path, "stranger")).status_code == 404
    hook = await api.subscription(room, "hook")
    refused = await api.call("GET", f"/subscriptions/{hook['id']}/consumers")
    assert refused.status_code == 409


async def test_consumers_are_found_among_a_bounded_number_of_leases(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, subscription = await queue(api)
    for n in range(3):
        await api.publish(room, "made", n)
    path = f"/subscriptions/{subscription['id']}"
    body = {"max_messages": 10, "lease_ms": 60_000, "wait_ms": 0}
    await api.call("POST", f"{path}/pull", json=body)
    monkeypatch.setattr(pull_queue.list_consumers, "__kwdefaults__", {"max_scanned": 2})
    found = (await api.call("GET", f"{path}/consumers")).json()
    assert not found["complete"]
    assert [one["leases"] for one in found["items"]] == [2]
