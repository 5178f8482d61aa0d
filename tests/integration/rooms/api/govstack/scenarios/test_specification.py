"""Test the statuses and bodies of GovStack's specification, operation by operation."""

import json
import uuid
from typing import Any

from tests.integration.rooms.api.govstack.conftest import (
    MADE,
    OWNER,
    PAID,
    PUBLISHER,
    STRANGER,
    SUBSCRIBER,
    UNKNOWN,
    GovStack,
    member_id,
)


async def test_event_types(gov: GovStack) -> None:
    path = "/api/v1/eventType"
    schema = {"type": "object", "required": ["id"]}
    body = {"eventType": "order.sent", "schema": schema}
    made = await gov.call("POST", path, json=body)
    assert (made.status_code, made.json()) == (200, body)
    again = await gov.call("POST", path, json=body)
    assert again.status_code == 409
    assert again.headers["content-type"] == "application/problem+json"
    wrongs: list[Any] = [
        {"schema": schema},
        {"eventType": "a b"},
        {"eventType": "x", "schema": {"type": 1}},
        {"eventType": "x", "more": 1},
        [],
    ]
    for wrong in wrongs:
        refused = await gov.call("POST", path, json=wrong)
        assert refused.status_code == 400, refused.text
        assert refused.json()["status"] == 400
    listed = await gov.call("GET", path)
    assert (listed.status_code, listed.json()) == (200, ["order.sent", PAID, MADE])
    read = await gov.call("GET", f"{path}/order.sent")
    assert (read.status_code, read.json()) == (200, body)
    plain = await gov.call("GET", f"{path}/{MADE}")
    assert plain.json() == {"eventType": MADE, "schema": None}
    none = await gov.call("GET", f"{path}/unknown")
    assert (none.status_code, none.content) == (204, b"")
    deleted = await gov.call("DELETE", f"{path}/order.sent")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert (await gov.call("DELETE", f"{path}/order.sent")).status_code == 404
    await gov.publish()
    assert (await gov.call("DELETE", f"{path}/{MADE}")).status_code == 409


async def test_a_room_without_event_types_lists_none(gov: GovStack) -> None:
    for name in (MADE, PAID):
        assert (await gov.call("DELETE", f"/api/v1/eventType/{name}")).status_code == 204
    none = await gov.call("GET", "/api/v1/eventType")
    assert (none.status_code, none.content) == (204, b"")


async def test_the_latest_version_is_the_schema(gov: GovStack) -> None:
    versions = f"/rooms/{gov.room}/event-types/{MADE}/versions"
    await gov.api.made(versions, {"schema": {"type": "integer"}}, OWNER)
    read = await gov.call("GET", f"/api/v1/eventType/{MADE}")
    assert read.json()["schema"] == {"type": "integer"}
    refused = await gov.call(
        "POST", f"/pub/v1/{MADE}", PUBLISHER, json={"eventType": MADE, "event": "text"}
    )
    assert refused.status_code == 400
    assert refused.json()["errors"][0]["field"] == "event"


async def test_publishing(gov: GovStack) -> None:
    await gov.subscribe()
    path = f"/pub/v1/{MADE}"
    event = b'{"eventType":"order.made","event":{ "n": 1.0, "text":"\\u0000" }}'
    answer = await gov.call("POST", path, PUBLISHER, content=event)
    assert answer.status_code == 201
    assert answer.json().keys() == {"id"}
    uuid.UUID(answer.json()["id"])
    pulled = await gov.call("GET", f"/pull/v1/{MADE}", SUBSCRIBER)
    assert b'"event":{ "n": 1.0, "text":"\\u0000" }}' in pulled.content
    unknown = {"eventType": "unknown", "event": 1}
    assert (await gov.call("POST", "/pub/v1/unknown", json=unknown)).status_code == 404
    for wrong in (b"", b"{", b"[]", b'{"eventType":"order.made"}', b'{"event":1}', b"\xff"):
        refused = await gov.call("POST", path, PUBLISHER, content=wrong)
        assert refused.status_code == 400, (wrong, refused.text)
    other = {"eventType": PAID, "event": 1}
    refused = await gov.call("POST", path, PUBLISHER, json=other)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (400, "eventType")


async def test_a_schema_that_cannot_be_used_is_no_unknown_event_type(gov: GovStack) -> None:
    """Check that 404 means what it says: a client may give an event type up that is not there."""
    path = f"/rooms/{gov.room}/event-types/{MADE}/versions"
    await gov.api.made(path, {"schema": {"type": "object"}}, OWNER)
    await gov.api.sql(
        'UPDATE event_type_versions SET schema = \'{"$ref": "#/nothing"}\' WHERE version = 2'
    )
    body = {"eventType": MADE, "event": 1}
    refused = await gov.call("POST", f"/pub/v1/{MADE}", PUBLISHER, json=body)
    assert refused.status_code == 400, refused.text
    (problem,) = refused.json()["errors"]
    assert problem["field"] == "eventType"
    assert "its schema cannot be used" in problem["message"]


async def test_a_repeated_publish_is_one_event(gov: GovStack) -> None:
    body = {"eventType": MADE, "event": 1}
    key = {"Idempotency-Key": "k"}
    first = await gov.call("POST", f"/pub/v1/{MADE}", PUBLISHER, json=body, headers=key)
    again = await gov.call("POST", f"/pub/v1/{MADE}", PUBLISHER, json=body, headers=key)
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    other = await gov.call(
        "POST", f"/pub/v1/{MADE}", PUBLISHER, json={**body, "event": 2}, headers=key
    )
    assert other.status_code == 409


async def test_reading_the_status(gov: GovStack) -> None:
    await gov.subscribe()
    event = await gov.publish({"n": 1})
    read = await gov.call("GET", f"/pub/v1/{MADE}/{event}", PUBLISHER)
    assert read.status_code == 200
    instance, member_class, code = member_id(PUBLISHER).split("/")
    publisher = {
        "instanceId": instance,
        "memberClass": member_class,
        "memberCode": code,
        "applicationCode": "app",
    }
    assert read.json() == {
        "id": event,
        "publisherId": publisher,
        "eventType": MADE,
        "status": "under_way",
        "states": {"queued": 1},
        "event": {"n": 1},
    }
    seen = (await gov.call("GET", f"/pub/v1/{MADE}/{event}", SUBSCRIBER)).json()
    assert "publisherId" not in seen  # as /v1, which leaves it to the delivered message
    for path, role in (
        (f"/pub/v1/{PAID}/{event}", PUBLISHER),
        (f"/pub/v1/{MADE}/{UNKNOWN}", PUBLISHER),
        (f"/pub/v1/{MADE}/nothing", PUBLISHER),
        (f"/pub/v1/{MADE}/{event}", STRANGER),
    ):
        assert (await gov.call("GET", path, role)).status_code == 404


async def test_stopping_an_event(gov: GovStack) -> None:
    await gov.subscribe()
    event = await gov.publish()
    path = f"/pub/v1/{MADE}/{event}"
    assert (await gov.call("DELETE", path, SUBSCRIBER)).status_code == 404
    stopped = await gov.call("DELETE", path, PUBLISHER)
    assert (stopped.status_code, stopped.content) == (204, b"")
    assert await gov.pull() is None
    assert (await gov.call("GET", path, PUBLISHER)).json()["states"] == {"cancelled": 1}
    assert (await gov.call("DELETE", path, PUBLISHER)).status_code == 204, "nothing is left to stop"
    assert (await gov.call("DELETE", f"/pub/v1/{MADE}/{UNKNOWN}")).status_code == 404
    leased = await gov.publish()
    assert (await gov.pull() or {})["id"] == leased
    refused = await gov.call("DELETE", f"/pub/v1/{MADE}/{leased}", PUBLISHER)
    assert refused.status_code == 409, "the subscriber has it"


async def test_subscriptions(gov: GovStack) -> None:
    path = f"/api/v1/subs/{MADE}"
    assert (await gov.call("GET", "/api/v1/subs", SUBSCRIBER)).status_code == 404
    assert (await gov.call("GET", path, SUBSCRIBER)).status_code == 404
    body = {"eventType": MADE, "delivery": "PULL"}
    made = await gov.call("POST", path, SUBSCRIBER, json=body)
    assert made.status_code == 200
    instance, member_class, code = member_id(SUBSCRIBER).split("/")
    item = {
        "id": made.json()["id"],
        "subscriberId": {
            "instanceId": instance,
            "memberClass": member_class,
            "memberCode": code,
            "applicationCode": "app",
        },
        "eventType": MADE,
        "delivery": "PULL",
        "options": {"TTL": 3600, "FIFO": False},
        "status": "active",
    }
    assert made.json() == item
    assert (await gov.call("POST", path, SUBSCRIBER, json=body)).status_code == 409
    other = f"{member_id(SUBSCRIBER)}/other"
    assert (await gov.call("POST", path, SUBSCRIBER, client=other, json=body)).status_code == 200
    listed = await gov.call("GET", "/api/v1/subs", SUBSCRIBER)
    assert (listed.status_code, listed.json()) == (200, [item])
    read = await gov.call("GET", path, SUBSCRIBER)
    assert (read.status_code, read.json()) == (200, item)
    change = {"eventType": MADE, "options": {"TTL": 60, "FIFO": True}}
    changed = await gov.call("PATCH", path, SUBSCRIBER, json=change)
    assert changed.status_code == 201, "the specification says so"
    assert changed.json() == {**item, "options": {"TTL": 60, "FIFO": True}}
    kept = await gov.call("PATCH", path, SUBSCRIBER, json={"eventType": MADE})
    assert kept.json()["options"] == {"TTL": 60, "FIFO": True}
    whole = await gov.call("PATCH", path, SUBSCRIBER, json=kept.json())
    assert whole.status_code == 201, "what was read can be sent"
    (stored,) = await gov.api.sql(
        "SELECT message_expiration_ms, ordered, application FROM subscriptions WHERE id = %s",
        item["id"],
    )
    assert stored == (60_000, True, "app")
    gone = await gov.call("DELETE", path, SUBSCRIBER)
    assert (gone.status_code, gone.content) == (204, b"")
    for method in ("GET", "DELETE", "PATCH"):
        again = await gov.call(method, path, SUBSCRIBER, json={"eventType": MADE})
        assert again.status_code == 404, method
    assert (await gov.call("POST", path, SUBSCRIBER, json=body)).status_code == 200


async def test_wrong_subscriptions(gov: GovStack) -> None:
    path = f"/api/v1/subs/{MADE}"
    for field, wrong in (
        ("eventType", {"delivery": "PULL"}),
        ("eventType", {"eventType": PAID, "delivery": "PULL"}),
        ("delivery", {"eventType": MADE, "delivery": "FAX"}),
        ("delivery", {"eventType": MADE}),
        ("options.TTL", {"eventType": MADE, "delivery": "PULL", "options": {"TTL": 0}}),
        ("options.TTL", {"eventType": MADE, "delivery": "PULL", "options": {"TTL": 7201}}),
        ("options.ttl", {"eventType": MADE, "delivery": "PULL", "options": {"ttl": 1}}),
        ("url", {"eventType": MADE, "delivery": "PULL", "url": "https://x"}),
    ):
        refused = await gov.call("POST", path, SUBSCRIBER, json=wrong)
        assert refused.status_code == 400, refused.text
        assert refused.json()["errors"][0]["field"] == field, refused.text
    unknown = {"eventType": "unknown", "delivery": "PULL"}
    refused = await gov.call("POST", "/api/v1/subs/unknown", SUBSCRIBER, json=unknown)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (400, "eventType")
    await gov.subscribe()
    push = {"eventType": MADE, "delivery": "PUSH"}
    refused = await gov.call("PATCH", path, SUBSCRIBER, json=push)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (400, "delivery")


async def test_a_default_lifetime_is_within_that_of_the_room(gov: GovStack) -> None:
    await gov.api.call("PATCH", f"/rooms/{gov.room}", OWNER, json={"message_expiration_ms": 5000})
    assert (await gov.subscribe())["options"]["TTL"] == 5


async def test_a_subscription_may_wait_for_approval(gov: GovStack) -> None:
    policy = {"subscription_policy": "approval", "visibility": "listed"}
    await gov.api.call("PATCH", f"/rooms/{gov.room}", OWNER, json=policy)
    item = await gov.subscribe(role=STRANGER)
    assert item["status"] == "pending"
    await gov.publish()
    assert await gov.pull(STRANGER) is None
    waiting = await gov.api.call("GET", f"/subscriptions/{item['id']}", OWNER)
    assert (waiting.json()["status"], waiting.json()["application"]) == ("pending", "app")


async def test_pulling(gov: GovStack) -> None:
    path = f"/pull/v1/{MADE}"
    assert (await gov.call("GET", path, SUBSCRIBER)).status_code == 404
    await gov.subscribe()
    assert (await gov.call("GET", path, SUBSCRIBER)).status_code == 404
    events = [await gov.publish({"n": n}) for n in range(3)]
    first = await gov.call("GET", path, SUBSCRIBER)
    assert first.status_code == 200
    instance, member_class, code = member_id(PUBLISHER).split("/")
    assert first.json() == {
        "id": events[0],
        "publisherId": {
            "instanceId": instance,
            "memberClass": member_class,
            "memberCode": code,
            "applicationCode": "app",
        },
        "eventType": MADE,
        "event": {"n": 0},
    }
    assert (await gov.call("GET", path, SUBSCRIBER)).content == first.content
    acknowledged = await gov.call("DELETE", f"{path}/{events[0]}", SUBSCRIBER)
    assert (acknowledged.status_code, acknowledged.content) == (204, b"")
    again = await gov.call("DELETE", f"{path}/{events[0]}", SUBSCRIBER)
    assert again.status_code == 204
    not_leased = await gov.call("DELETE", f"{path}/{events[2]}", SUBSCRIBER)
    assert not_leased.status_code == 409
    for unknown in (UNKNOWN, "nothing"):
        assert (await gov.call("DELETE", f"{path}/{unknown}", SUBSCRIBER)).status_code == 404
    for expected in events[1:]:
        found = await gov.pull()
        assert found is not None
        assert found["id"] == expected
        answer = await gov.call("DELETE", f"{path}/{expected}", SUBSCRIBER)
        assert answer.status_code == 204
    assert await gov.pull() is None
    for wrong in ("0", "x", "-1", "43201", "1" * 30, "0" * 30 + "1", "1.5", "²", ""):
        refused = await gov.call("GET", f"{path}?leaseSeconds={wrong}", SUBSCRIBER)
        assert refused.status_code == 400
    assert (await gov.call("GET", f"{path}?more=1", SUBSCRIBER)).status_code == 400


async def test_fifo_gives_events_in_order_with_their_numbers(gov: GovStack) -> None:
    await gov.subscribe(FIFO=True)
    events = [await gov.publish({"n": n}) for n in range(3)]
    for number, event in enumerate(events, 1):
        found = await gov.pull()
        assert found is not None
        assert (found["id"], found["sequence"]) == (event, number)
        assert await gov.pull() == found
        acknowledged = await gov.call("DELETE", f"/pull/v1/{MADE}/{event}", SUBSCRIBER)
        assert acknowledged.status_code == 204
    assert await gov.pull() is None


async def test_a_push_subscription_is_not_pulled(gov: GovStack) -> None:
    await gov.set_template()
    await gov.subscribe("PUSH")
    assert (await gov.call("GET", f"/pull/v1/{MADE}", SUBSCRIBER)).status_code == 409
    event = await gov.publish()
    refused = await gov.call("DELETE", f"/pull/v1/{MADE}/{event}", SUBSCRIBER)
    assert refused.status_code == 409


async def test_a_suspended_subscription_gets_nothing(gov: GovStack) -> None:
    item = await gov.subscribe()
    event = await gov.publish()
    await gov.publish()
    assert (await gov.pull() or {})["id"] == event
    suspend = f"/subscriptions/{item['id']}/suspend"
    assert (await gov.api.call("POST", suspend, OWNER)).is_success
    assert await gov.pull() is None
    acknowledged = await gov.call("DELETE", f"/pull/v1/{MADE}/{event}", SUBSCRIBER)
    assert acknowledged.status_code == 204, "what it has may be acknowledged, as in /v1"
    assert await gov.pull() is None


async def test_an_event_comes_again_when_its_lease_is_over(gov: GovStack) -> None:
    item = await gov.subscribe()
    event = await gov.publish()
    assert (await gov.pull() or {})["id"] == event
    await gov.api.sql(
        "UPDATE leases SET until = now() - interval '1 s' WHERE subscription_id = %s", item["id"]
    )
    late = await gov.call("DELETE", f"/pull/v1/{MADE}/{event}", SUBSCRIBER)
    assert late.status_code == 409
    assert late.json()["type"] == "urn:rooms:problem:late"


async def test_the_endpoint_follows_from_the_template(gov: GovStack) -> None:
    await gov.set_template()
    item = await gov.subscribe("PUSH", kind=PAID)
    path = f"/subscriptions/{item['id']}"
    found = (await gov.api.call("GET", path, SUBSCRIBER)).json()
    assert (
        found["push_url"] == f"https://ss.example.com/r1/{member_id(SUBSCRIBER)}/app/in?type={PAID}"
    )
    assert found["event_item"] is True
    await gov.set_template(template="https://other.example.com/{eventType}")
    assert (await gov.api.call("GET", path, SUBSCRIBER)).json()["push_url"] == found["push_url"]
    body = {"eventType": PAID, "delivery": "PUSH"}
    assert (
        await gov.call("PATCH", f"/api/v1/subs/{PAID}", SUBSCRIBER, json=body)
    ).status_code == 201
    found = (await gov.api.call("GET", path, SUBSCRIBER)).json()
    assert found["push_url"] == f"https://other.example.com/{PAID}"


async def test_only_enabled_rooms_are_there(gov: GovStack) -> None:
    await gov.api.call("PATCH", f"/rooms/{gov.room}", OWNER, json={"govstack": False})
    assert (await gov.call("GET", "/api/v1/eventType")).status_code == 404
    body = {"eventType": MADE, "event": 1}
    assert (await gov.call("POST", f"/pub/v1/{MADE}", json=body)).status_code == 404


async def test_the_document_has_the_operations_of_the_specification(gov: GovStack) -> None:
    document = (await gov.api.http.get("/r1/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    prefix = "/r1/{instanceId}/{memberClass}/{memberCode}/{applicationCode}"
    found = {
        f"{method.upper()} {path.removeprefix(prefix)}": set(operation["responses"])
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }
    common = {"400", "401", "403", "404", "413", "429", "503"}
    assert {name: replies - common for name, replies in found.items()} == {
        "POST /api/v1/eventType": {"200", "409"},
        "GET /api/v1/eventType": {"200", "204"},
        "GET /api/v1/eventType/{eventType}": {"200", "204"},
        "DELETE /api/v1/eventType/{eventType}": {"204", "409"},
        "POST /pub/v1/{eventType}": {"201", "409"},
        "GET /pub/v1/{eventType}/{eventId}": {"200"},
        "DELETE /pub/v1/{eventType}/{eventId}": {"204", "409"},
        "GET /api/v1/subs": {"200"},
        "POST /api/v1/subs/{eventType}": {"200", "409"},
        "GET /api/v1/subs/{eventType}": {"200"},
        "PATCH /api/v1/subs/{eventType}": {"201", "409"},
        "DELETE /api/v1/subs/{eventType}": {"204"},
        "GET /pull/v1/{eventType}": {"200", "409"},
        "DELETE /pull/v1/{eventType}/{eventId}": {"204", "409"},
    }
    assert {"SubscriptionItem", "EventItem", "EventTypeItem"} <= set(
        document["components"]["schemas"]
    )
    assert json.dumps(document).count("[...]") == 0
