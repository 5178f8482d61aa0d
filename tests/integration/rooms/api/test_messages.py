"""Test reading messages, their deliveries and their timelines."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rooms.domain.ids import RoomId
from tests.integration.rooms.api.conftest import Api


async def items(api: Api, path: str, key: str = "admin", **query: Any) -> list[dict[str, Any]]:
    answer = await api.call("GET", path, key, params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


@pytest.fixture
async def room(api: Api) -> int:
    made = await api.room(message_expiration_ms=60_000)
    for name in ("made", "paid"):
        await api.made(f"/rooms/{made['id']}/event-types", {"name": name})
    return int(made["id"])


async def test_a_message_reads_as_it_was_published(api: Api, room: int) -> None:
    push = await api.subscription(room, "push")
    pull = await api.subscription(room, "pull", type="PULL")
    payload = {"amount": 1.50, "text": "ä\u0000😀", "big": 2**70, "list": [None, True]}
    answer = await api.publish(
        room,
        "made",
        payload,
        correlation_id="c-1",
        priority=7,
        headers={"X-A": "b"},
        ordering_key="k",
    )
    found = (await api.call("GET", f"/messages/{answer['message_id']}")).json()
    assert found["payload"] == payload
    assert found["headers"] == {"X-A": "b"}
    expected = {
        "id": answer["message_id"],
        "room_id": room,
        "event_type": "made",
        "version": 1,
        "priority": 7,
        "fanout": 2,
        "correlation_id": "c-1",
        "ordering_key": "k",
    }
    assert {name: found[name] for name in expected} == expected
    lifetime = datetime.fromisoformat(found["expires_at"]) - datetime.fromisoformat(
        found["published_at"]
    )
    assert lifetime == timedelta(seconds=60)
    keys = {key["id"] for key in (await api.call("GET", "/keys")).json()["items"]}
    assert found["publisher_id"] in keys
    listed = (await items(api, f"/rooms/{room}/messages"))[0]
    assert listed == {
        name: value
        for name, value in found.items()
        if name not in {"payload", "headers", "status", "states"}
    }

    deliveries = await items(api, f"/messages/{answer['message_id']}/deliveries")
    assert {delivery["subscription_id"] for delivery in deliveries} == {push["id"], pull["id"]}
    assert {delivery["destination"] for delivery in deliveries} == set(answer["destinations"])
    for delivery in deliveries:
        assert delivery == (await api.call("GET", f"/deliveries/{delivery['id']}")).json()
        same = {
            "state": "queued",
            "attempt": 0,
            "attempts": 0,
            "generation": 0,
            "correlation_id": "c-1",
        }
        assert {name: delivery[name] for name in same} == same
        assert delivery["next_attempt_at"] == delivery["due_at"] is not None


async def test_the_payload_comes_back_byte_for_byte(api: Api, room: int) -> None:
    principal = await api.services.keys.authenticate(f"Bearer {api.keys['admin']}".encode())
    payload = b'{ "a" : 1.50, "b":1e2, "a" : [ ] }'
    body = b'{"event_type":"made","payload":' + payload + b"}"
    published = json.loads(
        (await api.services.publisher.publish(principal, RoomId(room), body, None)).body
    )
    answer = await api.call("GET", f"/messages/{published['message_id']}")
    assert b'"payload":' + payload + b"}" in answer.content


async def test_lists_are_filtered_by_every_parameter(api: Api, room: int) -> None:
    subscription = await api.subscription(room)
    await api.made(f"/rooms/{room}/event-types/made/versions", {"schema": None})
    first = (await api.publish(room, "made", 1, version=1, correlation_id="one"))["message_id"]
    second = (await api.publish(room, "made", 2, correlation_id="two"))["message_id"]
    third = (await api.publish(room, "paid", 3, correlation_id="two"))["message_id"]
    await api.sql(
        "UPDATE deliveries SET state = 'delivered' WHERE room_id = %s AND message_id = %s RETURNING 1",
        room,
        second,
    )
    later = datetime.now(UTC) + timedelta(seconds=5)
    for query, expected in (
        ({}, [third, second, first]),
        ({"event_type": "made"}, [second, first]),
        ({"event_type": "made", "version": 1}, [first]),
        ({"version": 2}, [second]),
        ({"correlation_id": "two"}, [third, second]),
        ({"state": "delivered"}, [second]),
        ({"state": "queued", "event_type": "made"}, [first]),
        ({"state": "held"}, []),
        ({"since": later.isoformat()}, []),
        ({"until": later.isoformat()}, [third, second, first]),
        ({"since": "2020-01-01T00:00:00Z", "until": "2020-01-02T00:00:00+02:00"}, []),
        (
            {"since": "0001-01-01T00:00:00Z", "until": "9999-12-31T23:59:59Z"},
            [third, second, first],
        ),
        ({"event_type": "nothing' OR 1=1 --"}, []),
    ):
        found = await items(api, f"/rooms/{room}/messages", **query)
        assert [message["id"] for message in found] == expected, query
        found = await items(api, f"/subscriptions/{subscription['id']}/deliveries", **query)
        assert [delivery["message_id"] for delivery in found] == expected, query


async def test_wrong_query_parameters_are_named(api: Api, room: int) -> None:
    subscription = await api.subscription(room)
    cursor = (await api.call("GET", "/keys?limit=1")).json()["next_cursor"]
    for path in (f"/rooms/{room}/messages", f"/subscriptions/{subscription['id']}/deliveries"):
        for query, field in (
            ("limit=0", "limit"),
            ("limit=201", "limit"),
            ("limit=x", "limit"),
            ("limit=99999999999999999999", "limit"),
            ("limit=1&limit=2", "limit"),
            ("limit=", "limit"),
            ("since=yesterday", "since"),
            ("since=2026-01-01", "since"),
            ("since=2026-01-01T00:00:00", "since"),
            ("since=5", "since"),
            ("until=2026-13-01T00:00:00Z", "until"),
            ("until=0001-01-01T00:00:00%2B23:59", "until"),
            ("version=0", "version"),
            ("version=2147483648", "version"),
            ("version=x", "version"),
            ("state=lost", "state"),
            ("event_type=a%00b", "event_type"),
            ("correlation_id=%00", "correlation_id"),
            ("page=2", "page"),
            ("in_state=queued", "in_state"),
            ("cursor=x", "cursor"),
            ("cursor=" + "a" * 5000, "cursor"),
            ("cursor=%C3%A4", "cursor"),
            (f"cursor={cursor}", "cursor"),
            (f"cursor={cursor[:-1]}", "cursor"),
        ):
            answer = await api.call("GET", f"{path}?{query}")
            assert answer.status_code == 422, (query, answer.text)
            assert [error["field"] for error in answer.json()["errors"]] == [field], query


async def test_pages_neither_skip_nor_repeat(api: Api, room: int) -> None:
    subscription = await api.subscription(room)
    published = [(await api.publish(room, "made", number))["message_id"] for number in range(9)]
    for path, name in (
        (f"/rooms/{room}/messages", "id"),
        (f"/subscriptions/{subscription['id']}/deliveries", "message_id"),
    ):
        seen: list[str] = []
        query: dict[str, Any] = {"limit": 4, "event_type": "made"}
        while True:
            page = (await api.call("GET", path, params=query)).json()
            seen += [item[name] for item in page["items"]]
            await api.publish(room, "made", "later")
            if page["next_cursor"] is None:
                break
            query["cursor"] = page["next_cursor"]
        assert (
            seen == list(reversed(published))
            if name == "id"
            else seen[-9:] == list(reversed(published))
        )


async def test_the_deliveries_of_a_message_go_by_pages(api: Api, room: int) -> None:
    subscriptions = {(await api.subscription(room, f"sub-{number}"))["id"] for number in range(5)}
    message = (await api.publish(room, "made", {}))["message_id"]
    await api.publish(room, "made", {})
    path = f"/messages/{message}/deliveries"
    first = (await api.call("GET", f"{path}?limit=3")).json()
    rest = (await api.call("GET", f"{path}?limit=3&cursor={first['next_cursor']}")).json()
    found = first["items"] + rest["items"]
    assert len(found) == 5
    assert {delivery["subscription_id"] for delivery in found} == subscriptions
    assert {delivery["message_id"] for delivery in found} == {message}
    assert rest["next_cursor"] is None


async def test_a_timeline_is_the_log_in_its_order(api: Api, room: int) -> None:
    await api.subscription(room)
    message = (await api.publish(room, "made", {}, correlation_id="c-1"))["message_id"]
    await api.sql(
        "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, ts, kind, attempt, http_status, latency_ms,"
        " error_class, detail, worker, worker_host, answer_head)"
        " SELECT %s, %s, 0, n, now() + n * interval '1 s', kind, n, 500, 1.5, 'status', 'HTTP 500', 9, 'host', '\\xff41'"
        " FROM unnest(ARRAY['attempted', 'retry_scheduled', 'sidelined']) WITH ORDINALITY AS x (kind, n) RETURNING 1",
        room,
        message,
    )
    steps = await items(api, f"/messages/{message}/journey")
    assert [(step["kind"], step["state"]) for step in steps] == [
        ("published", None),
        ("enqueued", "queued"),
        ("attempted", None),
        ("retry_scheduled", "queued"),
        ("sidelined", "sidelined"),
    ]
    attempted = steps[2]
    reported = {
        "http_status": 500,
        "latency_ms": 1.5,
        "error_class": "status",
        "detail": "HTTP 500",
        "worker": 9,
    }
    assert {name: attempted[name] for name in reported} == reported
    assert attempted["answer"] == "\ufffdA"
    assert steps[0]["correlation_id"] == "c-1"
    assert [step["ts"] for step in steps] == sorted(step["ts"] for step in steps)
    first = (await api.call("GET", f"/messages/{message}/journey?limit=2")).json()
    second = (
        await api.call("GET", f"/messages/{message}/journey?limit=3&cursor={first['next_cursor']}")
    ).json()
    assert first["items"] + second["items"] == steps
    assert second["next_cursor"] is None


async def test_an_unknown_message_is_not_found(api: Api, room: int) -> None:
    message = (await api.publish(room, "made", {}))["message_id"]
    other = f"{message[:14]}{int(message[14:18], 16) ^ 0xFFF:04x}{message[18:]}"
    for place in ("", "/deliveries", "/journey"):
        assert (await api.call("GET", f"/messages/{other}{place}")).status_code == 404
    assert await items(api, f"/messages/{message}/deliveries") == []


async def test_a_subscriber_sees_no_delivery_before_it_is_due(api: Api, room: int) -> None:
    subscription = await api.subscription(room, type="PULL")
    await api.publish(room, "made", 1)
    await api.publish(room, "made", 2)
    path = f"/subscriptions/{subscription['id']}/deliveries"
    later, due = await items(api, path, "subscribe")
    for state in ("queued", "scheduled"):
        await api.sql(
            "UPDATE deliveries SET due_at = now() + interval '1 h', state = %s WHERE id = %s RETURNING 1",
            state,
            later["id"],
        )
        assert [delivery["id"] for delivery in await items(api, path, "subscribe")] == [due["id"]]
        assert (await api.call("GET", f"/deliveries/{later['id']}", "subscribe")).status_code == 404
        for key in ("manage", "operate", "admin"):
            assert len(await items(api, path, key)) == 2
            assert (await api.call("GET", f"/deliveries/{later['id']}", key)).status_code == 200
    await api.sql(
        "UPDATE deliveries SET due_at = NULL, state = 'delivered' WHERE id = %s RETURNING 1",
        later["id"],
    )
    assert (await api.call("GET", f"/deliveries/{later['id']}", "subscribe")).json()[
        "next_attempt_at"
    ] is None
