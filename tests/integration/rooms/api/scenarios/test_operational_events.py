"""Operational events of a room: which are sent, to which subscriptions, and what they say."""

from typing import Any

import pytest

from delivery.maintenance.operational_events import OperationalEvents
from rooms.db.connection import open_connection
from rooms.db.queue.endpoints import load_endpoints
from rooms.db.queue.throttle import SharedLaneState
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.operational_event import DEFAULT_OPERATIONAL_EVENTS, OperationalEvent
from tests.integration.rooms.api.conftest import Api

HOOK = "https://hooks.example.com/in?token=1"


async def shared_room(api: Api, **fields: Any) -> int:
    """A listed room that asks for approval, with an operational endpoint."""
    room = await api.room(
        visibility="listed",
        subscription_policy="approval",
        operational_url="https://ops.example.com/a",
        **fields,
    )
    identity: int = room["id"]
    await api.made(f"/rooms/{identity}/event-types", {"name": "made"})
    return identity


async def subscribe(api: Api, room: int, key: str = "stranger", **fields: Any) -> dict[str, Any]:
    body = {"name": "sub", "type": "PUSH", "push_url": HOOK} | fields
    if body["type"] == "PULL":
        del body["push_url"]
    return await api.made(f"/rooms/{room}/subscriptions", body, key)


async def events(api: Api) -> list[tuple[str, dict[str, Any]]]:
    """Return what waits to be sent, oldest first."""
    return [
        (event, data)
        for event, data in await api.sql("SELECT event, data FROM operational_outbox ORDER BY id")
    ]


async def act(api: Api, subscription: str, action: str, key: str = "admin", **body: Any) -> Any:
    answer = await api.call("POST", f"/subscriptions/{subscription}/{action}", key, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_room_says_which_events_it_sends(api: Api) -> None:
    room = await api.room()
    assert set(room["operational_events"]) == DEFAULT_OPERATIONAL_EVENTS
    noisy = {OperationalEvent.DELIVERY_SIDELINED, OperationalEvent.MESSAGE_COMPLETED}
    assert not noisy & DEFAULT_OPERATIONAL_EVENTS
    path = f"/rooms/{room['id']}"
    changed = await api.call("PATCH", path, json={"operational_events": sorted(noisy)})
    assert changed.json()["operational_events"] == sorted(noisy)
    assert (await api.call("GET", path)).json()["operational_events"] == sorted(noisy)
    none = await api.call("PATCH", path, json={"operational_events": []})
    assert none.json()["operational_events"] == []
    wrong = await api.call("PATCH", path, json={"operational_events": ["rooms.made.up"]})
    assert wrong.status_code == 422


async def test_a_room_that_existed_sends_the_same_by_its_column(api: Api) -> None:
    room = await api.room()
    await api.sql("UPDATE rooms SET operational_events = DEFAULT")
    found = (await api.call("GET", f"/rooms/{room['id']}")).json()
    assert set(found["operational_events"]) == DEFAULT_OPERATIONAL_EVENTS


async def test_others_do_not_see_which_events_a_room_sends(api: Api) -> None:
    room = await shared_room(api)
    found = (await api.call("GET", f"/rooms/{room}", "stranger")).json()
    assert (found["operational_events"], found["operational_url"]) == (None, None)


async def test_each_decision_about_a_subscription_of_others_is_an_event(api: Api) -> None:
    room = await shared_room(api)
    made = await subscribe(api, room)
    approved = await act(api, made["id"], "approve", version=made["version"])
    await act(api, made["id"], "suspend", reason="too slow")
    await act(api, made["id"], "reinstate")
    moved = await api.call(
        "PATCH",
        f"/subscriptions/{made['id']}",
        "stranger",
        json={"push_url": "https://elsewhere.example.com/x"},
    )
    assert moved.status_code == 200
    await act(api, made["id"], "reject")
    await act(api, made["id"], "terminate", "stranger", reason="moved away")
    found = await events(api)
    assert [event.removeprefix("rooms.subscription.") for event, _ in found] == [
        "pending",
        "approved",
        "suspended",
        "reinstated",
        "pending",
        "rejected",
        "terminated",
    ]
    (_, first), (_, second), (_, third), _, (_, proposed), _, (_, last) = found
    assert first == {
        "name": "sub",
        "target": "https://hooks.example.com",
        "status": "pending",
        "version": made["version"],
        "proposal": False,
        "reason": None,
    }
    assert second["version"] == approved["version"]
    assert third["reason"] == "too slow"
    assert (proposed["status"], proposed["proposal"]) == ("active", True)
    assert (last["status"], last["reason"]) == ("terminated", "moved away")
    assert "token" not in str(found)


async def test_the_own_subscriptions_of_a_room_cause_no_such_events(api: Api) -> None:
    room = await shared_room(api)
    made = await subscribe(api, room, "admin")
    await act(api, made["id"], "terminate")
    other = await subscribe(api, room, "admin", name="other")
    assert (await api.call("DELETE", f"/subscriptions/{other['id']}")).status_code == 202
    assert await events(api) == []


async def test_a_deletion_by_the_subscriber_is_its_termination(api: Api) -> None:
    room = await shared_room(api)
    made = await subscribe(api, room)
    gone = await api.call("DELETE", f"/subscriptions/{made['id']}", "stranger")
    assert gone.status_code == 202
    (_, (event, data)) = await events(api)
    assert (event, data["status"]) == ("rooms.subscription.terminated", "deleted")


async def test_a_change_that_fails_leaves_no_event(api: Api) -> None:
    room = await shared_room(api)
    made = await subscribe(api, room)
    refused = await api.call(
        "POST", f"/subscriptions/{made['id']}/approve", json={"version": made["version"] + 1}
    )
    assert refused.status_code == 409
    assert [event for event, _ in await events(api)] == ["rooms.subscription.pending"]


async def test_another_organisation_gets_an_operational_subscription_as_any_other(
    api: Api,
) -> None:
    room = await shared_room(api)
    made = await subscribe(api, room, operational=True, type="PULL")
    assert (made["status"], made["operational"], made["event_types"]) == ("pending", True, [])
    ((event, _),) = await events(api)
    assert event == "rooms.subscription.pending", "the owner must know that it waits"
    approved = await act(api, made["id"], "approve", version=made["version"])
    assert approved["status"] == "active"
    published = await api.publish(room, "made", {})
    assert made["destination"] not in published["destinations"]
    assert published["destination_count"] == 0
    terminated = await act(api, made["id"], "terminate", "stranger")
    assert terminated["status"] == "terminated"
    await subscribe(api, room, operational=True, type="PULL")


async def test_each_organisation_has_one_operational_subscription_in_a_room(api: Api) -> None:
    room = await shared_room(api)
    await subscribe(api, room, operational=True)
    for key in ("stranger", "admin"):
        answer = await api.call(
            "POST",
            f"/rooms/{room}/subscriptions",
            key,
            json={"name": "more", "type": "PULL", "operational": True},
        )
        assert answer.status_code == 409
        assert "operational subscription" in answer.json()["detail"]


async def test_the_owner_may_pull_its_events_instead(api: Api) -> None:
    room = await api.room()
    made = await subscribe(api, room["id"], "admin", operational=True, type="PULL")
    path = f"/rooms/{room['id']}"
    refused = await api.call("PATCH", path, json={"operational_url": "https://ops.example.com/a"})
    assert refused.status_code == 409
    assert (await api.call("PATCH", path, json={"operational_url": None})).status_code == 200
    assert (await api.call("GET", f"/subscriptions/{made['id']}")).status_code == 200
    assert (await api.call("DELETE", f"/subscriptions/{made['id']}")).status_code == 202
    answer = await api.call("PATCH", path, json={"operational_url": "https://ops.example.com/a"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("event_types", [{"name": "made"}]),
        ("filter", "true"),
        ("ordered", True),
        ("backfill", True),
    ],
)
async def test_an_operational_subscription_has_nothing_about_messages(
    api: Api, field: str, value: object
) -> None:
    room = await shared_room(api)
    body = {"name": "ops", "type": "PULL", "operational": True}
    answer = await api.call(
        "POST", f"/rooms/{room}/subscriptions", "stranger", json=body | {field: value}
    )
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    if field != "backfill":
        made = await subscribe(api, room, operational=True)
        changed = await api.call(
            "PATCH", f"/subscriptions/{made['id']}", "stranger", json={field: value}
        )
        assert [error["field"] for error in changed.json()["errors"]] == [field]


async def test_a_resumed_endpoint_has_recovered_and_its_circuit_is_closed(api: Api) -> None:
    room = await api.room(
        operational_url="https://ops.example.com/a",
        operational_events=["rooms.endpoint.recovered", "rooms.circuit.closed"],
    )
    made = await subscribe(api, room["id"], "admin")
    await act(api, made["id"], "resume")
    assert await events(api) == [], "nothing was wrong"
    await api.sql("UPDATE subscriptions SET status = 'disabled' WHERE id = %s", made["id"])
    await api.sql(
        "INSERT INTO lanes (room_id, id, circuit_open, circuit_since) VALUES (%s, %s, true, '2020-01-01')",
        room["id"],
        made["id"],
    )
    await act(api, made["id"], "resume")
    assert [event for event, _ in await events(api)] == [
        "rooms.circuit.closed",
        "rooms.endpoint.recovered",
    ]


async def test_only_rooms_that_ask_remember_what_they_published(api: Api) -> None:
    plain = await shared_room(api)
    await api.publish(plain, "made", {})
    assert await api.sql("SELECT id FROM operational_messages") == []
    asked = await api.room(
        "asked",
        operational_url="https://ops.example.com/a",
        operational_events=["rooms.message.completed"],
    )
    room = asked["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    subscription = await subscribe(api, room, "admin")
    published = await api.publish(room, "made", {})
    scheduled = await api.publish(room, "made", {}, delay_ms=60_000, ordering_key="a")
    rows = await api.sql(
        "SELECT t.id::text, s.id::text FROM operational_messages t JOIN deliveries d ON d.message_id = t.id"
        " JOIN subscriptions s ON encode(substr(t.enqueued, 1, 16), 'hex')::uuid = s.id"
        " AND encode(substr(t.enqueued, 17, 16), 'hex')::uuid = d.id ORDER BY t.id"
    )
    assert rows == [
        (published["message_id"], subscription["id"]),
        (scheduled["message_id"], subscription["id"]),
    ]
    await api.call("PATCH", f"/rooms/{room}", json={"operational_events": []})
    await api.publish(room, "made", {})
    assert len(await api.sql("SELECT id FROM operational_messages")) == 2


async def test_what_was_made_for_a_subscriber_is_not_for_the_owner(api: Api) -> None:
    room = await shared_room(api)
    theirs = await subscribe(api, room, operational=True, type="PULL", name="theirs")
    await act(api, theirs["id"], "approve", version=theirs["version"])
    foreign = await subscribe(api, room)
    await act(api, foreign["id"], "approve", version=foreign["version"])
    identity = SubscriptionId(foreign["id"])
    async with open_connection(api.url, name="test") as connection:
        records = await load_endpoints(connection, [(RoomId(room), identity)])
    await api.sql("DELETE FROM operational_outbox")  # of the approvals
    assert await SharedLaneState(api.services.writer).disable(
        records[identity],
        reason="HTTP 410: their answer",
    )
    await OperationalEvents(
        api.services.writer, api.services.clock, api.services.ids, notify_queued=lambda _: None
    ).run(lambda: True)
    made_for = {
        organisation: (message, delivery)
        for message, delivery, organisation in await api.sql(
            "SELECT d.message_id::text, d.id::text, o.name FROM deliveries d"
            " JOIN subscriptions s ON s.id = d.subscription_id JOIN organisations o ON o.id = s.organisation_id"
        )
    }
    (ours, _), (hidden, delivery) = made_for["default"], made_for["other"]

    async def listed(key: str, **query: Any) -> list[str]:
        answer = await api.call("GET", f"/rooms/{room}/messages", key, params=query)
        return [item["id"] for item in answer.json()["items"]]

    for query in ({}, {"event_type": "rooms.endpoint.disabled"}, {"state": "queued"}):
        assert await listed("admin", **query) == [ours]
        assert await listed("stranger", **query) == [hidden]
    assert await listed("admin", subscription_id=theirs["id"]) == []
    assert await listed("stranger", subscription_id=theirs["id"]) == [hidden]
    for path in ("", "/deliveries", "/journey", "/receipt"):
        answer = await api.call("GET", f"/messages/{hidden}{path}")
        assert answer.status_code == 404, path
        assert answer.json()["detail"] == f"there is no message {hidden}"
        for key, message in (("admin", ours), ("stranger", hidden)):
            answer = await api.call("GET", f"/messages/{message}{path}", key)
            assert answer.status_code == 200, (path, answer.text)
    for method, path in (
        ("DELETE", f"/messages/{hidden}"),
        ("POST", f"/messages/{hidden}/restore"),
        ("GET", f"/deliveries/{delivery}"),
    ):
        assert (await api.call(method, path)).status_code == 404, path
    for text in (hidden, delivery):
        found = await api.call("GET", "/search", params={"q": text})
        assert found.json()["items"] == [], text
    whole = (await api.call("GET", f"/messages/{hidden}", "stranger")).json()
    assert whole["payload"]["push_url"] == HOOK
    seen = (await api.call("GET", f"/messages/{ours}")).json()
    assert seen["payload"]["push_url"] == "https://hooks.example.com"
    assert (await api.call("DELETE", f"/messages/{ours}")).status_code == 200

    # Retention may have removed the message, and then its deliveries, but not yet its log.
    for table, column in (("messages", "id"), ("deliveries", "message_id")):
        await api.sql(f"DELETE FROM {table} WHERE {column} = ANY(%s::uuid[])", [ours, hidden])
        for path in ("/deliveries", "/journey"):
            answer = await api.call("GET", f"/messages/{hidden}{path}")
            assert answer.status_code == 404, (table, path)
            assert answer.json()["detail"] == f"there is no message {hidden}"
        answer = await api.call("GET", f"/messages/{ours}/journey")
        assert answer.status_code == 200, (table, answer.text)
