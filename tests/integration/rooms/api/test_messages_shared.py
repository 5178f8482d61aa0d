"""Test who sees which messages of a shared room, in bodies, lists, counts and filters."""

from typing import Any

import pytest

from rooms.db.queries import message_list
from rooms.domain.ids import RoomId
from tests.integration.rooms.api.conftest import (
    MADE,
    PAID,
    UNKNOWN,
    Shared,
    hidden_from,
)


async def test_each_organisation_lists_only_its_messages(shared: Shared) -> None:
    own_made = await shared.publish("admin")
    own_paid = await shared.publish("admin", PAID)
    foreign_made = await shared.publish("publisher")
    foreign_paid = await shared.publish("publisher", PAID)
    everything = [foreign_paid, foreign_made, own_paid, own_made]
    assert await shared.listed("admin") == everything
    assert await shared.listed("publisher") == [foreign_paid, foreign_made]
    assert await shared.listed("first") == everything
    assert await shared.listed("second") == [foreign_paid, own_paid]

    missing = RoomId(shared.room + 1)
    for path in (f"/rooms/{shared.room}/messages", f"/rooms/{missing}/messages"):
        answer = await shared.api.call("GET", path, "stranger")
        assert answer.status_code == 404
        assert answer.json()["detail"] == f"there is no room {path.split('/')[2]}"


async def test_a_body_shows_owner_and_publisher_the_counts_and_a_subscriber_its_own(
    shared: Shared,
) -> None:
    await shared.key("publisher", "till", ["publish"], application="till-4")
    message = await shared.publish(
        "till", PAID, id="mine-1", business_key="business-1", correlation_id="c-1"
    )
    await shared.api.sql(
        "UPDATE deliveries SET state = 'delivered', attempts = 1 WHERE subscription_id = %s RETURNING 1",
        shared.subscriptions["first"],
    )
    publisher = {
        "publisher_organisation_id": shared.organisations["publisher"],
        "publisher_organisation": "publisher",
        "application": "till-4",
        "caller_id": "mine-1",
        "business_key": "business-1",
    }
    for key in ("admin", "publisher"):
        body = await shared.read(f"/messages/{message}", key)
        assert body["fanout"] == 3
        assert body["states"] == {"delivered": 1, "queued": 2}
        assert {name: body[name] for name in publisher} == publisher
        assert body["publisher_id"] is not None
        assert body["payload"] == {"n": 1}
        (item,) = (await shared.read(f"/rooms/{shared.room}/messages", key))["items"]
        assert item == {name: body[name] for name in item}
        assert not {"states", "status"} & item.keys()
    for key, states in (("first", {"delivered": 1}), ("second", {"queued": 1})):
        body = await shared.read(f"/messages/{message}", key)
        assert (body["fanout"], body["states"]) == (1, states)
        assert body["payload"] == {"n": 1}
        assert body["correlation_id"] == "c-1"
        hidden_from(body, "mine-1", "business-1", "till-4", shared.organisations["publisher"])
        assert body["publisher_id"] is body["publisher_organisation"] is None
        (item,) = (await shared.read(f"/rooms/{shared.room}/messages", key))["items"]
        assert item == {name: body[name] for name in item}


async def test_a_list_counts_by_state_as_each_message_does(shared: Shared) -> None:
    sent = [await shared.publish("publisher", PAID, delay_ms=delay) for delay in (0, 60_000, 0)]
    await shared.api.sql(
        "UPDATE deliveries SET state = 'sidelined' WHERE subscription_id = %s AND message_id = %s",
        shared.subscriptions["second"],
        sent[2],
    )
    await shared.api.sql(
        "UPDATE deliveries SET state = 'delivered' WHERE message_id = %s AND state <> 'sidelined'",
        sent[2],
    )
    statuses = {}
    for key in ("admin", "publisher", "first", "second"):
        found = await shared.read(f"/rooms/{shared.room}/messages", key, with_states="true")
        is_subscriber = key in ("first", "second")
        expected = [sent[2], sent[0]] if is_subscriber else sent[::-1]
        assert [item["id"] for item in found["items"]] == expected
        for item in found["items"]:
            body = await shared.read(f"/messages/{item['id']}", key)
            assert item == {name: body[name] for name in item}, key
            assert {"states", "status"} <= item.keys()
        statuses[key] = [item["status"] for item in found["items"]]
    assert statuses == {
        "admin": ["sidelined", "waiting", "under_way"],
        "publisher": ["sidelined", "waiting", "under_way"],
        "first": ["done", "under_way"],
        "second": ["sidelined", "under_way"],
    }


async def test_a_list_counts_no_more_deliveries_than_its_bound(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await shared.publish("publisher", PAID)
    monkeypatch.setattr(message_list, "MAX_COUNTED", 6)
    for key, counted in (("admin", 2), ("first", 3)):
        found = await shared.read(f"/rooms/{shared.room}/messages", key, with_states="true")
        assert ["states" in item for item in found["items"]] == [n < counted for n in range(3)]
    # Replays make more deliveries than a message was published to.
    await shared.api.sql("UPDATE messages SET fanout = 0")
    for most, counted in ((5, 3), (4, 0)):
        monkeypatch.setattr(message_list, "MAX_COUNTED", most)
        found = await shared.read(f"/rooms/{shared.room}/messages", "admin", with_states="true")
        assert sum("states" in item for item in found["items"]) == counted


async def test_what_is_not_theirs_is_a_missing_message(shared: Shared) -> None:
    own = await shared.publish("admin")
    foreign = await shared.publish("publisher")
    unseen = {
        "stranger": [own, foreign],
        "publisher": [own],
        "second": [own, foreign],
    }
    for key, identities in unseen.items():
        for identity in identities:
            for method, path, more in (
                ("GET", "", {}),
                ("GET", "/deliveries", {}),
                ("GET", "/journey", {}),
                ("DELETE", "", {}),
                ("PATCH", "", {"json": {"delay_ms": 60_000}}),
                ("POST", "/restore", {}),
            ):
                answer = await shared.api.call(method, f"/messages/{identity}{path}", key, **more)
                other = identity[:14] + "0000" + identity[18:]
                missing = await shared.api.call(method, f"/messages/{other}{path}", key, **more)
                assert answer.status_code == missing.status_code == 404, (key, method, path)
                reported, expected = answer.json(), missing.json()
                assert reported["detail"] == f"there is no message {identity}"
                assert expected["detail"] == f"there is no message {other}"
                for body in (reported, expected):
                    del body["detail"], body["instance"]
                assert reported == expected
    states = await shared.api.sql("SELECT DISTINCT state::text FROM deliveries")
    assert states == [("queued",)]


async def test_pages_of_deliveries_and_messages_count_only_what_is_seen(shared: Shared) -> None:
    for number in range(4):
        await shared.publish("admin", PAID if number % 2 else MADE)
        await shared.publish("publisher", PAID if number % 2 else MADE)
    for key, expected in (("admin", 8), ("publisher", 4), ("first", 8), ("second", 4)):
        for limit in (1, 2, 3, 4, 8):
            seen: list[str] = []
            query: dict[str, Any] = {"limit": limit}
            pages = 0
            while True:
                page = await shared.read(f"/rooms/{shared.room}/messages", key, **query)
                pages += 1
                seen += [item["id"] for item in page["items"]]
                if page["next_cursor"] is None:
                    break
                assert len(page["items"]) == limit
                query["cursor"] = page["next_cursor"]
            assert len(seen) == len(set(seen)) == expected
            assert pages == -(-expected // limit), (key, limit)
    message = (await shared.listed("second"))[0]
    page = await shared.read(f"/messages/{message}/deliveries", "second", limit=1)
    assert len(page["items"]) == 1
    assert page["next_cursor"] is None
    steps = await shared.read(f"/messages/{message}/journey", "second", limit=1)
    assert len(steps["items"]) == 1
    assert steps["next_cursor"] is None


async def test_a_replayed_message_is_listed_once(shared: Shared) -> None:
    messages = [await shared.publish("admin") for _ in range(3)]
    # Another delivery of the same millisecond, as a replay makes it.
    await shared.api.sql(
        "INSERT INTO deliveries (room_id, id, message_id, subscription_id, state)"
        " SELECT room_id, (left(id::text, 13) || '-7fff-bfff-ff00' || right(id::text, 8))::uuid,"
        " message_id, subscription_id, 'delivered' FROM deliveries WHERE message_id = %s"
        " AND subscription_id = %s RETURNING 1",
        messages[1],
        shared.subscriptions["first"],
    )
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 1}
    while True:
        page = await shared.read(f"/rooms/{shared.room}/messages", "first", **query)
        seen += [item["id"] for item in page["items"]]
        assert {item["fanout"] for item in page["items"]} == {1}
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert sorted(seen) == sorted(messages)
    assert await shared.listed("first", state="delivered") == [messages[1]]
    assert (await shared.read(f"/messages/{messages[1]}", "first"))["fanout"] == 1


async def test_a_filter_for_what_is_hidden_finds_what_an_unknown_one_finds(
    shared: Shared,
) -> None:
    await shared.key("publisher", "till", ["publish"], application="till-4")
    await shared.key("admin", "desk", ["publish"], application="desk")
    own = await shared.publish("desk", id="same", business_key="key")
    foreign = await shared.publish("till", id="same", business_key="key")
    both = [foreign, own]
    organisations, subscriptions = shared.organisations, shared.subscriptions
    expected: dict[str, list[tuple[dict[str, str], list[str]]]] = {
        "admin": [
            ({"publisher_organisation_id": organisations["publisher"]}, [foreign]),
            ({"publisher_organisation_id": organisations["admin"]}, [own]),
            ({"publisher_organisation_id": organisations["first"]}, []),
            ({"publisher_organisation_id": UNKNOWN}, []),
            ({"application": "till-4"}, [foreign]),
            ({"application": "desk"}, [own]),
            ({"application": "other"}, []),
            ({"id": "same"}, [own]),
            ({"id": "same", "publisher_organisation_id": organisations["publisher"]}, [foreign]),
            ({"id": f"{organisations['publisher']} same"}, [foreign]),
            ({"business_key": "key"}, both),
            ({"subscription_id": subscriptions["first"]}, both),
            ({"subscription_id": subscriptions["admin"]}, both),
            ({"subscription_id": subscriptions["second"]}, []),
            ({"subscription_id": subscriptions["first"], "application": "desk"}, [own]),
        ],
        "publisher": [
            ({"publisher_organisation_id": organisations["publisher"]}, [foreign]),
            ({"publisher_organisation_id": organisations["admin"]}, []),
            ({"publisher_organisation_id": UNKNOWN}, []),
            ({"application": "till-4"}, [foreign]),
            ({"application": "desk"}, []),
            ({"id": "same"}, [foreign]),
            ({"id": "same", "publisher_organisation_id": organisations["admin"]}, []),
            ({"business_key": "key"}, [foreign]),
            ({"subscription_id": subscriptions["first"]}, []),
            ({"subscription_id": UNKNOWN}, []),
        ],
        "first": [
            ({"publisher_organisation_id": organisations["publisher"]}, []),
            ({"publisher_organisation_id": organisations["admin"]}, []),
            ({"application": "till-4"}, []),
            ({"id": "same"}, []),
            ({"business_key": "key"}, []),
            ({"subscription_id": subscriptions["first"]}, both),
            ({"subscription_id": subscriptions["admin"]}, []),
            ({"subscription_id": UNKNOWN}, []),
            ({"subscription_id": subscriptions["first"], "application": "till-4"}, []),
            ({"event_type": MADE}, both),
            ({"since": "2100-01-01T00:00:00Z"}, []),
            ({"until": "2100-01-01T00:00:00Z"}, both),
        ],
    }
    for key, cases in expected.items():
        for query, found in cases:
            assert await shared.listed(key, **query) == found, (key, query)
    for name in ("publisher_organisation_id", "subscription_id"):
        for text in ("x", UNKNOWN.upper()):
            answer = await shared.api.call(
                "GET", f"/rooms/{shared.room}/messages", params={name: text + "a"}
            )
            assert answer.status_code == 422
            assert [one["field"] for one in answer.json()["errors"]] == [name]


async def test_a_state_filter_looks_only_at_visible_deliveries(shared: Shared) -> None:
    message = await shared.publish("publisher", PAID)
    await shared.api.sql(
        "UPDATE deliveries SET state = 'sidelined' WHERE subscription_id = %s RETURNING 1",
        shared.subscriptions["first"],
    )
    for key, found in (
        ("admin", [message]),
        ("publisher", [message]),
        ("first", [message]),
        ("second", []),
    ):
        assert await shared.listed(key, state="sidelined") == found, key


async def test_a_subscriber_reads_no_payload_before_it_may_have_it(shared: Shared) -> None:
    async def is_there(message: str) -> bool:
        return await shared.status("GET", f"/messages/{message}", "first") == 200

    async def shown(message: str, key: str = "first") -> bool:
        body = await shared.read(f"/messages/{message}", key)
        assert ("payload" in body) == ("headers" in body)
        return "payload" in body

    later = await shared.publish("admin", delay_ms=3_600_000)
    assert await shown(later, "admin")
    assert not await is_there(later)
    withdrawn = await shared.publish("admin", delay_ms=3_600_000)
    assert (await shared.api.call("DELETE", f"/messages/{withdrawn}")).status_code == 200
    assert not await is_there(withdrawn)
    due, sent = await shared.publish("admin"), await shared.publish("admin")
    assert await shown(due)
    await shared.api.sql(
        "UPDATE deliveries SET state = 'delivered', attempts = 1 WHERE message_id = %s RETURNING 1",
        sent,
    )
    suspended = await shared.api.call(
        "POST", f"/subscriptions/{shared.subscriptions['first']}/suspend", json={}
    )
    assert suspended.status_code == 200, suspended.text
    assert not await shown(due)
    assert await shown(sent)


async def test_a_restricted_key_sees_only_what_its_restrictions_allow(shared: Shared) -> None:
    made, paid = await shared.publish("admin"), await shared.publish("admin", PAID)
    scopes = ["operate", "manage", "subscribe"]
    second = await shared.api.subscription(shared.room, "paid-only", event_types=[{"name": PAID}])
    latest = await shared.publish("admin", PAID)
    other = int((await shared.api.room("other"))["id"])
    await shared.key("admin", "paid", scopes, event_types=[PAID])
    await shared.key("admin", "orders", scopes, event_types=["order.*"])
    await shared.key("admin", "alerts", scopes, event_types=["alert.*", "order"])
    await shared.key("admin", "elsewhere", scopes, rooms=[other])
    await shared.key("admin", "queue", scopes, subscriptions=[second["id"]])
    assert await shared.listed("paid") == [latest, paid]
    assert await shared.listed("orders") == [latest, paid, made]
    assert await shared.listed("alerts") == []
    assert await shared.listed("queue") == [latest]
    answer = await shared.api.call("GET", f"/rooms/{shared.room}/messages", "elsewhere")
    assert answer.status_code == 404
    for key, message in (
        ("paid", made),
        ("alerts", paid),
        ("elsewhere", paid),
        ("queue", paid),
        ("queue", made),
    ):
        for path in ("", "/deliveries", "/journey"):
            answer = await shared.api.call("GET", f"/messages/{message}{path}", key)
            assert answer.status_code == 404, (key, path)
            assert answer.json()["detail"] == f"there is no message {message}"
        refused = 403 if key == "queue" else 404
        assert await shared.status("DELETE", f"/messages/{message}", key) == refused
        refused = 404 if key == "elsewhere" else 403
        assert await shared.status("POST", f"/messages/{message}/restore", key) == refused
    body = await shared.read(f"/messages/{latest}", "queue")
    assert (body["fanout"], body["states"]) == (1, {"queued": 1})
    assert body["payload"] == {"n": 1}
    (delivery,) = (await shared.read(f"/messages/{latest}/deliveries", "queue"))["items"]
    assert delivery["subscription_id"] == second["id"]
    assert await shared.listed("queue", subscription_id=shared.subscriptions["admin"]) == []

    mine = f"/subscriptions/{shared.subscriptions['admin']}/deliveries"
    everything = (await shared.read(mine, "admin"))["items"]
    by_message = {one["message_id"]: one["id"] for one in everything}
    # A key for event types reads events, and nothing of a subscription.
    assert await shared.status("GET", mine, "paid") == 403
    assert await shared.status("GET", f"/deliveries/{by_message[paid]}", "paid") == 403


async def test_a_key_of_a_publisher_with_own_subscriptions_sees_both(shared: Shared) -> None:
    await shared.api.made(
        f"/rooms/{shared.room}/grants", {"organisation_id": "publisher", "kind": "subscribe"}
    )
    made = await shared.api.made(
        f"/rooms/{shared.room}/subscriptions",
        {"name": "echo", "type": "PULL", "event_types": [{"name": PAID}]},
        key="publisher",
    )
    own = await shared.publish("publisher")
    own_paid = await shared.publish("publisher", PAID)
    others_paid = await shared.publish("admin", PAID)
    await shared.publish("admin")
    assert await shared.listed("publisher") == [others_paid, own_paid, own]
    assert await shared.listed("publisher", subscription_id=made["id"]) == [others_paid, own_paid]
    fanouts = {
        one["id"]: one["fanout"]
        for one in (await shared.read(f"/rooms/{shared.room}/messages", "publisher"))["items"]
    }
    assert fanouts == {others_paid: 1, own_paid: 4, own: 2}
    deliveries = (await shared.read(f"/messages/{own_paid}/deliveries", "publisher"))["items"]
    assert [one["subscription_id"] for one in deliveries] == [made["id"]]
    moved = await shared.api.call(
        "PATCH", f"/messages/{own_paid}", "publisher", json={"delay_ms": 60_000}
    )
    assert [one["subscription_id"] for one in moved.json()["deliveries"]] == [made["id"]]
    assert moved.json()["results"] == {"moved": 4}


async def test_the_id_of_a_message_is_apart_from_those_of_others(shared: Shared) -> None:
    own = await shared.publish("admin", id="one")
    foreign = await shared.publish("publisher", id="one")
    assert own != foreign
    assert await shared.publish("publisher", id="one") == foreign
    for key, message in (("admin", own), ("publisher", foreign)):
        (found,) = (await shared.read(f"/rooms/{shared.room}/messages", key, id="one"))["items"]
        assert (found["id"], found["caller_id"]) == (message, "one")
    stored = await shared.api.sql(
        "SELECT m.id::text FROM messages m JOIN message_ids i ON i.room_id = m.room_id"
        " AND i.caller_id = m.caller_id AND i.message_id = m.id"
    )
    assert {identity for (identity,) in stored} == {own, foreign}
