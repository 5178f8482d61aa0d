"""Test the interface of GovStack's first implementation: publish, pull and management."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

import pytest

from tests.integration.rooms.api.govstack.conftest import (
    MADE,
    OWNER,
    PUBLISHER,
    ROOM,
    STRANGER,
    SUBSCRIBER,
    UNKNOWN,
    GovStack,
    member_id,
)

AT: Final = f"/rooms/{quote(member_id(OWNER), safe='')}/{ROOM}"


async def publish(gov: GovStack, content: object = 1) -> str:
    """Publish, and return the event's id."""
    body = {"eventType": MADE, "content": content}
    answer = await gov.send("POST", f"{AT}/publish", PUBLISHER, client=None, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"eventId"}
    return str(answer.json()["eventId"])


async def subscribe(gov: GovStack, **fields: Any) -> str:
    """Create a PULL subscription by this interface, and return its id."""
    body = {"name": "pulling", "type": "PULL", **fields}
    answer = await gov.send("POST", f"{AT}/subscriptions", SUBSCRIBER, json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


@pytest.mark.parametrize("client", [None, ""])
async def test_a_pull_acknowledges_the_one_before(gov: GovStack, client: str | None) -> None:
    identity = await subscribe(gov)
    path = f"{AT}/pull?subscriptionId={identity}"
    assert (await gov.send("GET", path, SUBSCRIBER, client=client)).status_code == 404
    events = [await publish(gov, {"n": n}) for n in range(2)]
    first = await gov.send("GET", path, SUBSCRIBER, client=client)
    assert (first.status_code, first.content) == (200, b'{"n":0}')
    assert first.headers["another-event-in-queue"] == "true"
    assert first.headers["event-id"] == events[0]
    states = f"/messages/{events[0]}/deliveries"
    assert (await gov.api.call("GET", states, OWNER)).json()["items"][0]["state"] == "leased"
    second = await gov.send("GET", path, SUBSCRIBER, client=client)
    assert (second.status_code, second.content) == (200, b'{"n":1}')
    assert second.headers["another-event-in-queue"] == "false"
    assert (await gov.api.call("GET", states, OWNER)).json()["items"][0]["state"] == "delivered"
    assert (await gov.send("GET", path, SUBSCRIBER, client=client)).status_code == 404
    counts = await gov.send("GET", f"{AT}/subscriptions/{identity}/queue", SUBSCRIBER)
    assert (counts.json()["waiting"], counts.json()["leased"]) == (0, 0)


@pytest.mark.parametrize("is_acknowledged", [True, False])
async def test_an_event_that_waits_in_order_is_another_one(
    gov: GovStack, *, is_acknowledged: bool
) -> None:
    """Check that a client which pulls while another event waits gets all of an ordered queue."""
    identity = await subscribe(gov, ordered=True, ack_by_next_pull=is_acknowledged)
    path = f"{AT}/pull?subscriptionId={identity}"
    events = [await publish(gov, n) for n in (None, 1, 2)]
    found = []
    for _ in events:
        answer = await gov.send("GET", path, SUBSCRIBER)
        event = answer.headers["event-id"]
        found.append((answer.status_code, event, answer.headers["another-event-in-queue"]))
        if not is_acknowledged:
            at = f"{AT}/pull/{event}?subscriptionId={identity}"
            assert (await gov.send("DELETE", at, SUBSCRIBER)).status_code == 204
    assert found == [(204, events[0], "true"), (200, events[1], "true"), (200, events[2], "false")]


async def test_an_event_behind_another_one_may_not_be_due_yet(gov: GovStack) -> None:
    identity = await subscribe(gov, ordered=True)
    path = f"{AT}/pull?subscriptionId={identity}"
    await publish(gov, 1)
    later = {"event_type": MADE, "ordering_key": MADE, "payload": 2, "delay_ms": 60_000}
    made = await gov.api.call("POST", f"/rooms/{gov.room}/messages", PUBLISHER, json=later)
    assert made.status_code == 202
    answer = await gov.send("GET", path, SUBSCRIBER)
    assert (answer.json(), answer.headers["another-event-in-queue"]) == (1, "false")


async def test_an_event_is_not_lost_when_no_pull_follows(gov: GovStack) -> None:
    identity = await subscribe(gov)
    event = await publish(gov)
    path = f"{AT}/pull?subscriptionId={identity}&leaseSeconds=60"
    assert (await gov.send("GET", path, SUBSCRIBER)).status_code == 200
    (lease,) = await gov.api.sql("SELECT until > now() + interval '50 s' FROM leases")
    assert lease == (True,)
    await gov.api.sql("UPDATE leases SET until = now() - interval '1 s'")
    found = await gov.api.call("GET", f"/messages/{event}/deliveries", OWNER)
    assert found.json()["items"][0]["state"] == "leased", "it is queued again, and not delivered"
    assert (await gov.send("GET", path, SUBSCRIBER)).status_code == 404
    assert (await gov.api.sql("SELECT count(*) FROM leases")) == [(1,)], "no pull acknowledged it"


async def test_an_explicit_acknowledgement(gov: GovStack) -> None:
    identity = await subscribe(gov, ack_by_next_pull=False)
    events = [await publish(gov, n) for n in range(2)]
    path = f"{AT}/pull?subscriptionId={identity}"
    for event in events:
        for _ in range(2):
            found = await gov.send("GET", path, SUBSCRIBER)
            assert found.headers["event-id"] == event
        at = f"{AT}/pull/{event}?subscriptionId={identity}"
        for _ in range(2):
            assert (await gov.send("DELETE", at, SUBSCRIBER)).status_code == 204
    assert (await gov.send("GET", path, SUBSCRIBER)).status_code == 404
    unknown = f"{AT}/pull/{UNKNOWN}?subscriptionId={identity}"
    assert (await gov.send("DELETE", unknown, SUBSCRIBER)).status_code == 404


async def test_a_pull_of_v1_is_never_acknowledged_by_another(gov: GovStack) -> None:
    """Check that the setting is the subscription's: a plain one is only acknowledged explicitly."""
    body = {"name": "plain", "type": "PULL"}
    made = await gov.api.made(f"/rooms/{gov.room}/subscriptions", body, SUBSCRIBER)
    await publish(gov)
    await publish(gov)
    pull = f"/subscriptions/{made['id']}/pull"
    leased = (await gov.api.call("POST", pull, SUBSCRIBER, json={"max_messages": 1})).json()
    for _ in range(3):
        found = await gov.send("GET", f"{AT}/pull?subscriptionId={made['id']}", SUBSCRIBER)
        assert found.headers["event-id"] == leased["messages"][0]["message_id"]
    assert await gov.api.sql("SELECT count(*) FROM deliveries WHERE state = 'delivered'") == [(0,)]


async def test_an_event_without_payload(gov: GovStack) -> None:
    identity = await subscribe(gov)
    event = await publish(gov, None)
    await publish(gov, 1)
    path = f"{AT}/pull?subscriptionId={identity}"
    empty = await gov.send("GET", path, SUBSCRIBER)
    assert (empty.status_code, empty.content) == (204, b"")
    assert empty.headers["another-event-in-queue"] == "true"
    assert empty.headers["event-id"] == event
    assert (await gov.send("GET", path, SUBSCRIBER)).json() == 1


async def test_publishing_says_what_is_wrong(gov: GovStack) -> None:
    path = f"{AT}/publish"
    schema = {"schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    await gov.api.made(f"/rooms/{gov.room}/event-types/{MADE}/versions", schema, OWNER)
    for status, field, body in (
        (404, None, {"eventType": "unknown", "content": 1}),
        (400, "content", {"eventType": MADE}),
        (400, "content.n", {"eventType": MADE, "content": {"n": "text"}}),
        (400, "event", {"eventType": MADE, "content": 1, "event": 1}),
    ):
        refused = await gov.send("POST", path, PUBLISHER, json=body)
        assert refused.status_code == status, refused.text
        if field is not None:
            assert refused.json()["errors"][0]["field"] == field
    assert (await gov.send("POST", path, STRANGER, json={"eventType": MADE, "content": 1})
            ).status_code == 404  # fmt: skip


async def test_pulling_says_what_is_wrong(gov: GovStack) -> None:
    identity = await subscribe(gov)
    missing = await gov.send("GET", f"{AT}/pull", SUBSCRIBER)
    assert (missing.status_code, missing.json()["errors"][0]["field"]) == (400, "subscriptionId")
    for wrong in (UNKNOWN, "x", "%00", "x" * 500):
        answer = await gov.send("GET", f"{AT}/pull?subscriptionId={wrong}", SUBSCRIBER)
        assert answer.status_code in {400, 404}, answer.text
    for role in (OWNER, PUBLISHER, STRANGER):
        other = await gov.send("GET", f"{AT}/pull?subscriptionId={identity}", role)
        assert other.status_code == 404
    elsewhere = f"/rooms/{quote(member_id(OWNER), safe='')}/unknown/pull?subscriptionId={identity}"
    assert (await gov.send("GET", elsewhere, SUBSCRIBER)).status_code == 404


async def test_rooms_of_the_caller(gov: GovStack) -> None:
    at = f"/rooms/{quote(member_id(STRANGER), safe='')}"
    body = {
        "name": "new",
        "delivery_delay_ms": 1000,
        "delivery_delay_multiplier": 2,
        "delivery_attempts": 3,
    }
    made = await gov.send("POST", at, STRANGER, json=body)
    assert (made.status_code, made.json()["govstack"]) == (201, True)
    assert (await gov.send("POST", at, STRANGER, json=body)).status_code == 409
    assert (await gov.send("POST", at, STRANGER, json={"name": "x"})).status_code == 400
    listed = await gov.send("GET", at, STRANGER)
    assert [one["name"] for one in listed.json()["items"]] == ["new"]
    for method in ("GET", "POST"):
        refused = await gov.send(method, at, OWNER, json=body)
        assert refused.status_code == 403, "a member speaks for itself"
    assert (await gov.send("GET", f"{at}/new", STRANGER)).json()["id"] == made.json()["id"]
    assert (await gov.send("GET", f"{at}/new", OWNER)).status_code == 404


async def test_event_types_and_versions(gov: GovStack) -> None:
    made = await gov.send("POST", f"{AT}/event-types", json={"name": "x", "schema": True})
    assert made.status_code == 201
    listed = (await gov.send("GET", f"{AT}/event-types")).json()["items"]
    assert listed[0]["name"] == "x"
    versions = f"{AT}/event-types/x/versions"
    added = await gov.send("POST", versions, json={"schema": {"type": "object"}})
    assert (added.status_code, added.json()["version"]) == (201, 2)
    found = (await gov.send("GET", versions)).json()["items"]
    assert [one["version"] for one in found] == [2, 1]
    page = await gov.send("GET", f"{AT}/event-types?limit=1")
    cursor = page.json()["next_cursor"]
    after = await gov.send("GET", f"{AT}/event-types?limit=200&cursor={cursor}")
    assert len(after.json()["items"]) == 2
    assert (await gov.send("DELETE", f"{AT}/event-types/x")).status_code == 204
    assert (await gov.send("DELETE", f"{AT}/event-types/x")).status_code == 404


async def test_publishers(gov: GovStack) -> None:
    at = f"{AT}/publishers"
    body = {"organisation_id": member_id(STRANGER), "event_types": ["order.*"]}
    made = await gov.send("POST", at, json=body)
    assert (made.status_code, made.json()["kind"]) == (201, "publish")
    assert (await gov.send("POST", f"{AT}/publish", STRANGER,
            json={"eventType": MADE, "content": 1})).status_code == 200  # fmt: skip
    changed = await gov.send("PUT", f"{at}/{made.json()['id']}", json={"event_types": ["other"]})
    assert (changed.status_code, changed.json()["event_types"]) == (200, ["other"])
    refused = await gov.send(
        "POST", f"{AT}/publish", STRANGER, json={"eventType": MADE, "content": 1}
    )
    assert refused.status_code == 403
    listed = (await gov.send("GET", at)).json()["items"]
    assert {one["organisation"] for one in listed} == {STRANGER, PUBLISHER}
    assert (await gov.send("DELETE", f"{at}/{made.json()['id']}")).status_code == 404, "it is over"
    assert (await gov.send("DELETE", f"{at}/{changed.json()['id']}")).status_code == 204
    subscribing = (
        await gov.api.call("GET", f"/rooms/{gov.room}/grants?kind=subscribe", OWNER)
    ).json()
    grant = subscribing["items"][0]["id"]
    for method in ("PUT", "DELETE"):
        other = await gov.send(method, f"{at}/{grant}", json={"event_types": None})
        assert other.status_code == 404, "that is no publisher"
    actions = await gov.api.sql(
        "SELECT action FROM journal WHERE outcome = 'succeeded' AND object LIKE '%%/publishers%%'"
        " ORDER BY id"
    )
    assert [row[0] for row in actions] == [
        "add_publisher",
        "change_publisher",
        "remove_publisher",
    ]


async def test_a_full_grant_is_changed_at_once(gov: GovStack) -> None:
    """Check that the former event types count for no bound, and the journal has what they were."""

    def names(prefix: str) -> list[str]:
        return [f"{prefix}.{number}" for number in range(600)]

    body = {"organisation_id": STRANGER, "event_types": names("a")}
    first = (await gov.send("POST", f"{AT}/publishers", json=body)).json()
    await gov.api.sql(
        "INSERT INTO grants (room_id, id, organisation_id, kind) SELECT %s, gen_random_uuid(),"
        " organisation_id, 'publish' FROM rooms, generate_series(1, 1000 - (SELECT count(*)"
        " FROM grants WHERE room_id = %s)) WHERE id = %s",
        gov.room, gov.room, gov.room,
    )  # fmt: skip
    at = f"{AT}/publishers/{first['id']}"
    answer = await gov.send("PUT", at, json={"event_types": names("b")})
    assert answer.status_code == 200, answer.text
    live = (
        "SELECT id::text, starts_at FROM grants WHERE organisation_id = %s AND revoked_at IS NULL"
    )
    stranger = gov.organisations[STRANGER]
    ((identity, begin),) = await gov.api.sql(live, stranger)
    assert identity == answer.json()["id"]
    ((revoked_at,),) = await gov.api.sql("SELECT revoked_at FROM grants WHERE id = %s", first["id"])
    assert revoked_at == begin, "the publisher is never without"
    ((before, after),) = await gov.api.sql(
        "SELECT entry->'before', entry->'after' FROM (SELECT to_jsonb(j) AS entry FROM journal j"
        " WHERE action = 'change_publisher') e"
    )
    assert before == {
        "organisation_id": stranger,
        "kind": "publish",
        "event_types": names("a"),
    }
    assert after == {"event_types": names("b")}

    malformed = await gov.send("PUT", f"{AT}/publishers/{identity}", json={"event_types": ["a b"]})
    assert malformed.status_code == 400
    ((still, _),) = await gov.api.sql(live, stranger)
    assert still == identity


@pytest.mark.parametrize(("begin_h", "end_h"), [(1, 2), (None, 2), (1, None)])
async def test_a_changed_publisher_keeps_its_times(
    gov: GovStack, begin_h: int | None, end_h: int | None
) -> None:
    now = datetime.now(UTC)
    times = {
        name: (now + timedelta(hours=hours)).isoformat()
        for name, hours in (("starts_at", begin_h), ("until", end_h))
        if hours is not None
    }
    body = {"organisation_id": member_id(STRANGER), "kind": "publish", **times}
    made = await gov.api.made(f"/rooms/{gov.room}/grants", body, OWNER)
    at = f"{AT}/publishers/{made['id']}"
    changed = (await gov.send("PUT", at, json={"event_types": ["order.*"]})).json()
    assert changed["until"] == made["until"]
    if begin_h is not None:
        assert changed["starts_at"] == made["starts_at"]
    event = {"eventType": MADE, "content": 1}
    answer = await gov.send("POST", f"{AT}/publish", STRANGER, json=event)
    assert answer.status_code == (200 if begin_h is None else 404)


async def test_subscriptions_are_approved_rejected_and_terminated(gov: GovStack) -> None:
    policy = {"subscription_policy": "approval", "visibility": "listed"}
    await gov.api.call("PATCH", f"/rooms/{gov.room}", OWNER, json=policy)
    at = f"{AT}/subscriptions"
    ids = []
    for name in ("one", "two"):
        made = await gov.send("POST", at, STRANGER, json={"name": name, "type": "PULL"})
        assert (made.status_code, made.json()["status"]) == (201, "pending")
        assert made.json()["ack_by_next_pull"] is True
        ids.append(made.json()["id"])
    listed = (await gov.send("GET", at)).json()["items"]
    assert {one["id"] for one in listed} == set(ids)
    assert (await gov.send("POST", f"{at}/{ids[0]}", json={"approved": True})).status_code == 400
    stale = await gov.send("POST", f"{at}/{ids[0]}", json={"approved": True, "version": 9})
    assert stale.status_code == 409
    body = {"approved": True, "version": listed[0]["version"]}
    for role in (STRANGER, PUBLISHER):
        assert (await gov.send("POST", f"{at}/{ids[0]}", role, json=body)).status_code == 404
    approved = await gov.send("POST", f"{at}/{ids[0]}", json=body)
    assert (approved.status_code, approved.json()["status"]) == (200, "active")
    rejected = await gov.send("POST", f"{at}/{ids[1]}", json={"approved": False, "reason": "no"})
    assert rejected.json()["status"] == "rejected"
    assert (await gov.send("GET", f"{at}/{ids[0]}", STRANGER)).json()["status"] == "active"
    assert (await gov.send("DELETE", f"{at}/{ids[0]}", STRANGER)).status_code == 204
    assert (await gov.send("DELETE", f"{at}/{ids[0]}", STRANGER)).status_code == 409
    assert (await gov.send("GET", f"{at}/{UNKNOWN}")).status_code == 404


async def test_events(gov: GovStack) -> None:
    await subscribe(gov)
    event = await publish(gov, {"n": 1})
    listed = (await gov.send("GET", f"{AT}/events")).json()["items"]
    assert [one["id"] for one in listed] == [event]
    read = await gov.send("GET", f"{AT}/events/{event}")
    assert (read.json()["states"], read.json()["event"]) == ({"queued": 1}, {"n": 1})
    assert (await gov.send("GET", f"{AT}/events", STRANGER)).status_code == 404
    assert (await gov.send("GET", f"{AT}/events/{event}", STRANGER)).status_code == 404


async def test_the_document_names_member_and_room_as_one_part_each(gov: GovStack) -> None:
    document = (await gov.api.http.get("/rooms/openapi.json")).json()
    assert "/rooms/{memberId}/{roomId}/publish" in document["paths"]
    assert "/rooms/{memberId}" in document["paths"]
    replies = document["paths"]["/rooms/{memberId}/{roomId}/pull"]["get"]["responses"]
    assert set(replies) >= {"200", "204", "404"}
    assert set(replies["200"]["headers"]) == {"Another-Event-In-Queue", "Event-Id"}
