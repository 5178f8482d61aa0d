"""Test searching over REST: ids, names and keys, and what other callers must not find."""

from typing import Any

import pytest

from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.sharing_world import build_world


async def search(api: Api, text: str, key: str = "admin") -> list[dict[str, Any]]:
    answer = await api.call("GET", "/search", key, params={"q": text})
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


async def kinds(api: Api, text: str, key: str = "admin") -> list[tuple[str, str, str]]:
    return [(one["kind"], one["field"], one["id"]) for one in await search(api, text, key)]


@pytest.fixture
async def world(api: Api) -> dict[str, Any]:
    """Create one of everything that can be found."""
    room = (await api.room("shop-orders"))["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "order.paid"})
    subscription = await api.subscription(room, "billing-hook")
    message = (
        await api.publish(
            room,
            "order.paid",
            {},
            id="caller-1",
            business_key="case-1",
            correlation_id="trace-1",
            ordering_key="customer-1",
        )
    )["message_id"]
    await api.made("/queues", {"name": "mails", "shards": 1})
    deliveries = (await api.call("GET", f"/messages/{message}/deliveries")).json()["items"]
    job = (await api.call("POST", f"/rooms/{room}/restore")).json()["job_id"]
    return {
        "room": str(room),
        "subscription": subscription["id"],
        "message": message,
        "delivery": deliveries[0]["id"],
        "job": job,
        "key": (await api.call("GET", "/keys")).json()["items"][0]["id"],
    }


async def test_each_id_finds_its_resource_and_nothing_else(api: Api, world: dict[str, str]) -> None:
    for kind, identity in world.items():
        assert await kinds(api, identity.upper()) == [(kind, "id", identity)]


@pytest.mark.parametrize(
    ("text", "kind", "field"),
    [
        ("SHOP", "room", "name"),
        ("lling", "subscription", "name"),
        ("order.p", "event_type", "name"),
        ("mails", "queue", "name"),
        ("caller-1", "message", "caller_id"),
        ("case-1", "message", "business_key"),
        ("trace-1", "message", "correlation_id"),
        ("customer-1", "message", "ordering_key"),
        (" case-1 ", "message", "business_key"),
    ],
)
async def test_names_and_keys_are_found(
    api: Api, world: dict[str, str], text: str, kind: str, field: str
) -> None:
    expected = {"event_type": "order.paid", "queue": "mails"}
    assert await kinds(api, text) == [(kind, field, world.get(kind, expected.get(kind)))]


async def test_the_exact_name_comes_first(api: Api) -> None:
    rooms = {name: (await api.room(name))["id"] for name in ("orders-old", "orders", "my-orders")}
    found = await search(api, "orders")
    assert [one["id"] for one in found] == [
        str(rooms[name]) for name in ("orders", "my-orders", "orders-old")
    ]


async def test_at_most_ten_of_a_kind_are_returned(api: Api) -> None:
    for n in range(12):
        await api.room(f"room-{n}")
    assert len(await search(api, "room-")) == 10


async def test_another_organisation_finds_nothing(api: Api, world: dict[str, str]) -> None:
    names = ("shop", "billing-hook", "order.paid", "mails", "caller-1", "case-1", "trace-1")
    for text in (*world.values(), *names):
        assert await search(api, text, "other-admin") == []


async def test_a_scope_finds_what_it_may_read(api: Api, world: dict[str, str]) -> None:
    assert await search(api, world["message"], "publish") == []
    assert await search(api, world["delivery"], "publish") == []
    assert await search(api, world["key"], "operate") == []
    assert await kinds(api, "case-1", "subscribe") == []
    assert await kinds(api, "case-1", "operate") == [("message", "business_key", world["message"])]


async def test_a_restricted_key_finds_its_part(api: Api, world: dict[str, str]) -> None:
    other = (await api.room("shop-other"))["id"]
    body: dict[str, Any] = {"name": "part", "scopes": ["operate"], "rooms": [other]}
    key = (await api.made("/keys", body))["key"]
    assert await kinds(api, "shop", key) == [("room", "name", str(other))]
    for text in (*world.values(), "billing-hook", "case-1", "trace-1", "caller-1", "mails"):
        assert await search(api, text, key) == []
    body = {"name": "types", "scopes": ["operate"], "event_types": ["another"]}
    key = (await api.made("/keys", body))["key"]
    for text in (world["message"], world["subscription"], "case-1", "order.paid", "billing-hook"):
        assert await search(api, text, key) == []


async def test_a_subscriber_learns_no_keys_of_a_publisher(api: Api) -> None:
    world = await build_world(api)
    room = world.paths["room_id"]["owner"]
    body = {"event_type": "made", "payload": {}, "business_key": "secret-1", "id": "secret-2"}
    for role, expected in (("owner", ["owner"]), ("publisher", ["owner", "publisher"])):
        sent = await api.call("POST", f"/rooms/{room}/messages", world.keys[role], json=body)
        assert sent.status_code == 202, sent.text
        identity = sent.json()["message_id"]
        for text, readers in (("secret-1", expected), ("secret-2", [role]), (identity, expected)):
            for reader in readers:
                assert identity in {one[2] for one in await kinds(api, text, world.keys[reader])}
        assert await kinds(api, "secret-1", world.keys["subscriber"]) == []
        assert await kinds(api, "secret-2", world.keys["subscriber"]) == []
        assert await kinds(api, identity, world.keys["stranger"]) == []


async def test_rooms_of_others_are_found_by_those_who_take_part(api: Api) -> None:
    world = await build_world(api)
    room = world.paths["room_id"]["owner"]
    for role, count in (("owner", 1), ("publisher", 1), ("subscriber", 1), ("stranger", 0)):
        found = await kinds(api, "shared", world.keys[role])
        assert found == [("room", "name", room)] * count


@pytest.mark.parametrize("text", ["%", "_", "'", "\\", "\u202e", "x" * 256, "0", "99999999999"])
async def test_odd_text_is_only_text(api: Api, world: dict[str, str], text: str) -> None:
    assert await search(api, text) == []
    assert world


@pytest.mark.parametrize("text", ["", "x" * 257])
async def test_the_text_is_bounded(api: Api, text: str) -> None:
    assert (await api.call("GET", "/search", params={"q": text})).status_code == 422
