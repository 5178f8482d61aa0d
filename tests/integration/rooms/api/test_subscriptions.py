"""Test subscriptions: what they accept, their secrets, their life."""

import asyncio
from typing import Any

import pytest

from rooms.db.connection import open_connection
from rooms.db.queue.endpoints import load_endpoints
from rooms.db.secret_rotation import prepare_secrets
from rooms.db.secrets import Cipher
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import RoomId, SubscriptionId
from tests.integration.rooms.api.conftest import BLOCKED, SEAL_KEY, Api

URL = "https://hooks.example.com/in"
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"name": "a b"}, ["name"]),
    ({"type": "push"}, ["type"]),
    ({"push_url": "ftp://example.com/"}, ["push_url"]),
    ({"push_url": "https://user:secret@example.com/"}, ["push_url"]),
    ({"push_url": "https://example.com/#x"}, ["push_url"]),
    ({"push_url": "https://0x7f.1/"}, ["push_url"]),
    ({"push_url": f"https://{BLOCKED}/"}, ["push_url"]),
    ({"push_url": "https://example.com:6379/"}, ["push_url"]),
    ({"push_url": "https://example.com/\x00"}, ["push_url"]),
    ({"push_url": "https://example.com/" + "a" * 3000}, ["push_url"]),
    ({"delivery_delay_ms": -1}, ["delivery_delay_ms"]),
    ({"delivery_max_delay_ms": -1}, ["delivery_max_delay_ms"]),
    ({"delivery_jitter": 1.1}, ["delivery_jitter"]),
    ({"timeout_ms": 99}, ["timeout_ms"]),
    ({"timeout_ms": 30_001}, ["timeout_ms"]),
    ({"max_receives": 3}, ["max_receives"]),
    ({"max_receives": 0}, ["max_receives"]),
    ({"terminal_statuses": [99]}, ["terminal_statuses[0]"]),
    ({"ignorable_statuses": [200, 600]}, ["ignorable_statuses[1]"]),
    ({"terminal_statuses": [404, 500], "ignorable_statuses": [500]}, ["ignorable_statuses"]),
    ({"ignorable_statuses": [410]}, ["ignorable_statuses"]),
    ({"cloud_events": "yes"}, ["cloud_events"]),
    ({"event_types": []}, ["event_types"]),
    ({"event_types": [{"name": "made"}, {"name": "nothing"}]}, ["event_types[1].name"]),
    ({"event_types": [{"name": "made"}, {"name": "made"}]}, ["event_types[1].name"]),
    ({"event_types": [{"name": "made", "versions": [1, 2]}]}, ["event_types[0].versions[1]"]),
    ({"event_types": [{"name": "made", "versions": []}]}, ["event_types[0].versions"]),
    ({"event_types": [{"name": "made", "extra": 1}]}, ["event_types[0].extra"]),
    ({"event_types": [{}]}, ["event_types[0].name"]),
    ({"headers": {"Host": "x"}}, ["headers.Host"]),
    ({"headers": {"content-type": "x"}}, ["headers.content-type"]),
    (
        {"headers": {"Webhook-Id": "x", "rooms-x": "y", "CE-Id": "z"}},
        ["headers.Webhook-Id", "headers.rooms-x", "headers.CE-Id"],
    ),
    ({"headers": {"a b": "x"}}, ["headers.a b"]),
    ({"headers": {"": "x"}}, ["headers"]),
    ({"headers": {"x": "a\r\nb: c"}}, ["headers.x"]),
    ({"headers": {"x": " a"}}, ["headers.x"]),
    ({"headers": {"x": "ä"}}, ["headers.x"]),
    ({"headers": {"x-a": "1", "X-A": "2"}}, ["headers.X-A"]),
    ({"headers": {"x": 5}}, ["headers"]),
    ({"headers": {f"x-{number}": "" for number in range(51)}}, ["headers"]),
    ({"headers": {"x": "a" * 8200}}, ["headers"]),
    ({"filter": ""}, ["filter"]),
    ({"filter": "payload.a >"}, ["filter"]),
    ({"filter": "1 + 1"}, ["filter"]),
    ({"filter": "true ||" * 150 + "true"}, ["filter"]),
    ({"secret": "whsec_mine"}, ["secret"]),
    ({"status": "paused"}, ["status"]),
]


@pytest.fixture
async def room(api: Api) -> int:
    made = await api.room()
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    return int(made["id"])


async def refused(api: Api, room: int, body: dict[str, Any]) -> list[str]:
    """Return the fields that a POST reports as wrong."""
    answer = await api.call("POST", f"/rooms/{room}/subscriptions", json=body)
    assert answer.status_code == 422, answer.text
    return [error["field"] for error in answer.json()["errors"]]


async def test_failures_of_the_former_address_do_not_count_for_a_new_one(
    api: Api, room: int
) -> None:
    body = {"name": "crm", "type": "PUSH", "push_url": "https://old.example/hook"}
    made = await api.made(f"/rooms/{room}/subscriptions", body)
    await api.sql(
        "INSERT INTO lanes (room_id, id, failing_since) VALUES (%s, %s, now() - interval '1 hour') RETURNING 1",
        room,
        made["id"],
    )

    async def is_failing() -> bool:
        ((found,),) = await api.sql("SELECT failing_since IS NOT NULL FROM lanes")
        return bool(found)

    path = f"/subscriptions/{made['id']}"
    same = {"push_url": body["push_url"], "name": "billing"}
    assert (await api.call("PATCH", path, json=same)).status_code == 200
    assert await is_failing()
    new = {"push_url": "https://new.example/hook"}
    assert (await api.call("PATCH", path, json=new)).status_code == 200
    assert not await is_failing()


async def test_push_needs_a_url_and_pull_may_not_have_one(api: Api, room: int) -> None:
    assert await refused(api, room, {"name": "s", "type": "PUSH"}) == ["push_url"]
    assert await refused(api, room, {"name": "s", "type": "PUSH", "push_url": None}) == ["push_url"]
    assert await refused(api, room, {"name": "s", "type": "PULL", "push_url": URL}) == ["push_url"]
    push = await api.subscription(room, "push", push_url=URL)
    assert (push["push_url"], push["type"]) == (URL, "PUSH")
    pull = await api.subscription(room, "pull", type="PULL")
    assert (pull["push_url"], pull["secret"]) == (None, None)
    answer = await api.call("PATCH", f"/subscriptions/{push['id']}", json={"push_url": None})
    assert answer.json()["errors"][0]["field"] == "push_url"
    answer = await api.call("PATCH", f"/subscriptions/{pull['id']}", json={"push_url": URL})
    assert answer.json()["errors"][0]["field"] == "push_url"


async def test_each_override_is_independent_and_cleared_by_null(api: Api, room: int) -> None:
    overrides = {
        "delivery_delay_ms": 5,
        "delivery_delay_multiplier": 3.0,
        "delivery_attempts": 7,
        "delivery_max_delay_ms": 60_000,
        "delivery_jitter": 0.5,
    }
    made = await api.subscription(room, delivery_attempts=7)
    assert {name: made[name] for name in overrides} == {
        **dict.fromkeys(overrides),
        "delivery_attempts": 7,
    }
    path = f"/subscriptions/{made['id']}"
    changed = (await api.call("PATCH", path, json=overrides)).json()
    assert {name: changed[name] for name in overrides} == overrides
    changed = (await api.call("PATCH", path, json={"delivery_delay_ms": None})).json()
    assert {name: changed[name] for name in overrides} == overrides | {"delivery_delay_ms": None}


async def test_pull_has_no_overrides(api: Api, room: int) -> None:
    made = await api.subscription(room, type="PULL")
    for name, value in (
        ("delivery_delay_ms", 5),
        ("delivery_delay_multiplier", 2),
        ("delivery_attempts", 1),
        ("delivery_max_delay_ms", 1),
        ("delivery_jitter", 0.5),
    ):
        assert await refused(api, room, {"name": "s", "type": "PULL", name: value}) == [name]
        answer = await api.call("PATCH", f"/subscriptions/{made['id']}", json={name: value})
        assert answer.json()["errors"][0]["field"] == name


@pytest.mark.parametrize("kind", ["PUSH", "PULL"])
async def test_a_lifetime_only_shortens_that_of_the_room(api: Api, kind: str) -> None:
    room = (await api.room("short", message_expiration_ms=60_000))["id"]
    body = {"name": "s", "type": kind} | ({"push_url": URL} if kind == "PUSH" else {})
    for wrong in (60_001, 0, -1):
        found = await refused(api, room, body | {"message_expiration_ms": wrong})
        assert found == ["message_expiration_ms"], wrong
    made = await api.made(f"/rooms/{room}/subscriptions", body | {"message_expiration_ms": 60_000})
    path = f"/subscriptions/{made['id']}"
    for value in (5, None, 60_000):
        changed = await api.call("PATCH", path, json={"message_expiration_ms": value})
        assert changed.json()["message_expiration_ms"] == value
    answer = await api.call("PATCH", path, json={"message_expiration_ms": 60_001})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "message_expiration_ms"
    assert "60000 ms" in error["message"]
    # A shorter room does not refuse later changes, and counts itself.
    assert (await api.call("PATCH", f"/rooms/{room}", json={"message_expiration_ms": 5})).is_success
    assert (await api.call("PATCH", path, json={"name": "t"})).is_success
    assert (await api.call("GET", path)).json()["message_expiration_ms"] == 60_000


async def test_any_lifetime_is_shorter_than_an_unlimited_one(api: Api, room: int) -> None:
    made = await api.subscription(room, message_expiration_ms=3_000_000_000_000)
    assert made["message_expiration_ms"] == 3_000_000_000_000


async def test_wrong_fields_are_named(api: Api, room: int) -> None:
    for change, fields in WRONG:
        found = await refused(api, room, {"name": "s", "type": "PUSH", "push_url": URL, **change})
        assert found == fields, change
    assert (await api.call("GET", f"/rooms/{room}/subscriptions")).json()["items"] == []


async def test_a_subscription_reads_as_it_was_made(api: Api, room: int) -> None:
    body = {
        "name": "all",
        "type": "PUSH",
        "push_url": "http://example.com:8080/a?b=c",
        "event_types": [{"name": "made", "versions": [1]}],
        "delivery_delay_ms": 10,
        "delivery_delay_multiplier": 1.0,
        "delivery_attempts": 0,
        "delivery_max_delay_ms": 0,
        "delivery_jitter": 0.0,
        "headers": {"Authorization": "Bearer x", "X-Team": "a b"},
        "terminal_statuses": [400, 404],
        "ignorable_statuses": [409],
        "timeout_ms": 30_000,
        "cloud_events": True,
    }
    answer = await api.call("POST", f"/rooms/{room}/subscriptions", json=body)
    assert answer.status_code == 201
    made = answer.json()
    shown = {**body, "headers": {"Authorization": "***", "X-Team": "***"}}
    assert {name: made[name] for name in body} == shown
    assert answer.headers["location"] == f"/v1/subscriptions/{made['id']}"
    assert made["destination"] == f"room-{room}::subscription-{made['id']}"
    assert made["secret"].startswith("whsec_")
    assert made["status"] == "active"
    del made["secret"], made["login"]
    assert (await api.call("GET", f"/subscriptions/{made['id']}")).json() == made
    assert (await api.call("GET", f"/rooms/{room}/subscriptions?name=all")).json()["items"] == [
        made
    ]


async def test_null_in_a_patch_restores_the_default(api: Api, room: int) -> None:
    made = await api.subscription(
        room,
        event_types=[{"name": "made"}],
        headers={"x": "y"},
        terminal_statuses=[404],
        ignorable_statuses=[409],
        timeout_ms=200,
        cloud_events=True,
    )
    new = await api.subscription(room, "new")
    names = (
        "event_types",
        "headers",
        "terminal_statuses",
        "ignorable_statuses",
        "timeout_ms",
        "cloud_events",
    )
    answer = await api.call("PATCH", f"/subscriptions/{made['id']}", json=dict.fromkeys(names))
    changed = answer.json()
    assert {name: changed[name] for name in names} == {name: new[name] for name in names}
    pull = await api.subscription(room, "pull", type="PULL", max_receives=2)
    changed = (
        await api.call("PATCH", f"/subscriptions/{pull['id']}", json={"max_receives": None})
    ).json()
    assert (pull["max_receives"], changed["max_receives"]) == (2, None)


async def test_a_patch_is_validated_with_the_unchanged_fields(api: Api, room: int) -> None:
    made = await api.subscription(room, terminal_statuses=[404])
    answer = await api.call(
        "PATCH", f"/subscriptions/{made['id']}", json={"ignorable_statuses": [404]}
    )
    assert answer.json()["errors"][0]["field"] == "ignorable_statuses"
    both = {"terminal_statuses": [], "ignorable_statuses": [404]}
    assert (await api.call("PATCH", f"/subscriptions/{made['id']}", json=both)).status_code == 200


async def test_a_name_is_taken_once_in_a_room_until_it_is_deleted(api: Api, room: int) -> None:
    made = await api.subscription(room, "one")
    other = await api.subscription(room, "two")
    body = {"name": "one", "type": "PULL"}
    assert (await api.call("POST", f"/rooms/{room}/subscriptions", json=body)).status_code == 409
    assert (
        await api.call("PATCH", f"/subscriptions/{other['id']}", json={"name": "one"})
    ).status_code == 409
    await api.call("DELETE", f"/subscriptions/{made['id']}")
    assert (
        await api.call("PATCH", f"/subscriptions/{other['id']}", json={"name": "one"})
    ).status_code == 200


async def test_a_deleted_subscription_is_not_found_and_leaves_a_job(api: Api, room: int) -> None:
    made = await api.subscription(room)
    answer = await api.call("DELETE", f"/subscriptions/{made['id']}")
    assert answer.status_code == 202
    job = (await api.call("GET", answer.headers["location"].removeprefix("/v1"))).json()
    assert job["kind"] == "delete_subscription"
    assert job["arguments"] == {"room_id": room, "subscription_id": made["id"], "name": "sub"}
    for method, place in (
        ("GET", ""),
        ("PATCH", ""),
        ("DELETE", ""),
        ("GET", "/deliveries"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/rotate-secret"),
        ("POST", "/test"),
    ):
        body = {"timeout_ms": 500} if method == "PATCH" else None
        assert (
            await api.call(method, f"/subscriptions/{made['id']}{place}", json=body)
        ).status_code == 404, place
    assert (await api.call("GET", f"/rooms/{room}/subscriptions")).json()["items"] == []


async def test_pause_and_resume(api: Api, room: int) -> None:
    made = await api.subscription(room)
    path = f"/subscriptions/{made['id']}"
    paused = (await api.call("POST", f"{path}/pause", "operate")).json()
    assert paused["status"] == "paused"
    assert paused["status_since"] > made["status_since"]
    assert (await api.call("POST", f"{path}/pause")).json() == paused
    assert (await api.call("POST", f"{path}/resume")).json()["status"] == "active"
    await api.sql(
        "UPDATE subscriptions SET status = 'disabled', status_reason = '410' WHERE room_id = %s RETURNING 1",
        room,
    )
    answer = await api.call("POST", f"{path}/pause")
    assert answer.status_code == 409
    assert "disabled" in answer.json()["detail"]
    resumed = (await api.call("POST", f"{path}/resume")).json()
    assert (resumed["status"], resumed["status_reason"]) == ("active", None)


async def test_secrets_are_encrypted_in_the_database(api: Api, room: int) -> None:
    made = await api.subscription(room)
    rotated = (await api.call("POST", f"/subscriptions/{made['id']}/rotate-secret")).json()
    assert rotated["secret"] != made["secret"]
    assert rotated["previous_secret_until"] is not None
    rows = await api.sql(
        "SELECT secret, previous_secret, previous_secret_until - now() BETWEEN interval '23:59' AND interval '24:00',"
        " to_jsonb(s)::text FROM subscriptions s"
    )
    secret, previous, a_day, text = rows[0]
    seal = Cipher(SEAL_KEY)
    assert seal.decrypt(secret).decode() == rotated["secret"]
    assert seal.decrypt(previous).decode() == made["secret"]
    assert a_day
    for raw in (made["secret"], rotated["secret"]):
        bare = raw.removeprefix("whsec_").encode()
        assert bare not in secret + previous
        assert bare.hex() not in text
    for path in (f"/subscriptions/{made['id']}", f"/rooms/{room}/subscriptions"):
        answer = await api.call("GET", path)
        assert "secret" not in answer.text


async def test_a_rotation_shows_how_long_the_old_secret_is_valid(api: Api, room: int) -> None:
    made = await api.subscription(room)
    path = f"/subscriptions/{made['id']}/rotate-secret"
    assert (await api.call("POST", path, json={"overlap_s": 0})).json()[
        "previous_secret_until"
    ] is None
    assert await api.sql("SELECT previous_secret, previous_secret_until FROM subscriptions") == [
        (None, None)
    ]
    assert (await api.call("POST", path, json={"overlap_s": 60})).json()[
        "previous_secret_until"
    ] is not None
    for overlap in (-1, 30 * 86_400 + 1, "1", 10**30):
        assert (await api.call("POST", path, json={"overlap_s": overlap})).status_code == 422
    pull = await api.subscription(room, "pull", type="PULL")
    assert (await api.call("POST", f"/subscriptions/{pull['id']}/rotate-secret")).status_code == 409


async def test_a_rotation_gives_up_a_secret_whose_key_is_lost(api: Api, room: int) -> None:
    """One rotation is enough: calls can be signed, and processes start."""
    made = await api.subscription(room)
    await api.sql(
        "UPDATE subscriptions SET secret = %s", Cipher(b"x" * 32).encrypt(made["secret"].encode())
    )
    path = f"/subscriptions/{made['id']}/rotate-secret"
    rotated = (await api.call("POST", path)).json()
    assert rotated["previous_secret_until"] is None
    identity, seal = SubscriptionId(made["id"]), Cipher(SEAL_KEY)
    async with open_connection(api.url, name="test") as connection:
        await prepare_secrets(connection, seal, refuse_unknown=True)
        records = await load_endpoints(connection, [(RoomId(room), identity)])
    (sealed,) = records[identity].encrypted_secrets
    assert seal.decrypt(sealed).decode() == rotated["secret"]


async def test_a_test_call_shows_the_answer(api: Api, room: int) -> None:
    made = await api.subscription(room)
    api.pings.answer = AttemptResult(
        status=500,
        error=ErrorClass.STATUS,
        detail="HTTP 500",
        body_head=b"oh \xff no",
        retry_after=None,
        latency_ms=12.3456,
    )
    answer = await api.call("POST", f"/subscriptions/{made['id']}/test")
    assert answer.json() == {
        "status": 500,
        "error": "status",
        "detail": "HTTP 500",
        "latency_ms": 12.346,
        "body": "oh \ufffd no",
    }
    assert [subscription.id for subscription in api.pings.seen] == [made["id"]]
    pull = await api.subscription(room, "pull", type="PULL")
    assert (await api.call("POST", f"/subscriptions/{pull['id']}/test")).status_code == 409


async def test_changes_at_the_same_time_all_count(api: Api, room: int) -> None:
    made = await api.subscription(room)
    path = f"/subscriptions/{made['id']}"
    before = (await api.sql("SELECT version FROM subscriptions"))[0][0]
    answers = await asyncio.gather(
        *(api.call("PATCH", path, json={"timeout_ms": 200 + number}) for number in range(10))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert (await api.sql("SELECT version FROM subscriptions"))[0][0] == before + 10


NO_IDS = [
    "x",
    "%00",
    "01900000-0000-7000-8000-00000000000",
    "01900000-0000-7000-8000-00000000000G",
    "01900000-0000-7000-8000-000000000000%0A",
    "0190000_-0000-7000-8000-000000000000",
    "01900000-0000-7000-8000-0000000000001",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
    "00000000-0000-0000-0000-000000000000",
]
OF_IDS = [
    ("GET", "/subscriptions/{}"),
    ("DELETE", "/subscriptions/{}"),
    ("POST", "/subscriptions/{}/pause"),
    ("GET", "/subscriptions/{}/deliveries"),
    ("GET", "/messages/{}"),
    ("GET", "/messages/{}/deliveries"),
    ("GET", "/messages/{}/journey"),
    ("GET", "/deliveries/{}"),
    ("POST", "/deliveries/{}/redeliver"),
    ("GET", "/jobs/{}"),
    ("GET", "/keys/{}"),
    ("DELETE", "/keys/{}"),
]


async def test_an_invalid_id_is_not_found(api: Api) -> None:
    for identity in NO_IDS:
        for method, path in OF_IDS:
            answer = await api.call(method, path.format(identity))
            assert answer.status_code == 404, (method, path, answer.text)
            assert answer.headers["content-type"].startswith("application/problem+json")


async def test_a_filter_is_set_tested_and_cleared(api: Api, room: int) -> None:
    made = await api.subscription(room, "queue", filter="payload.amount > 10")
    at = f"/subscriptions/{made['id']}"
    assert made["filter"] == "payload.amount > 10"

    async def tried(**fields: Any) -> dict[str, Any]:
        answer = await api.call("POST", f"{at}/filter/test", json=fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    assert await tried(payload={"amount": 11}) == {"matches": True, "error": None}
    assert await tried(payload={"amount": 1}) == {"matches": False, "error": None}
    without = await tried(payload={})
    assert without["matches"]
    assert "amount" in without["error"]
    asked = {
        "payload": None,
        "headers": {"X-Tenant": "a"},
        "event_type": "made",
        "ordering_key": "k",
        "priority": 9,
    }
    wanted = (
        "headers['x-tenant'] == 'a' && event_type == 'made' && ordering_key == 'k' && priority == 9"
    )
    assert await tried(**asked, filter=wanted) == {"matches": True, "error": None}
    answer = await api.call(
        "POST", f"{at}/filter/test", json={"payload": 1, "filter": "payload =="}
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "filter"
    assert "line 1, column 11" in answer.json()["errors"][0]["message"]

    answer = await api.call("PATCH", at, json={"filter": "nothing.like == this"})
    assert answer.status_code == 422
    answer = await api.call("PATCH", at, json={"filter": None})
    assert answer.json()["filter"] is None
    assert await tried(payload={"amount": 1}) == {"matches": True, "error": None}


async def test_a_change_names_the_version_that_was_read(api: Api) -> None:
    made = await api.subscription((await api.room())["id"], "crm")
    path = f"/subscriptions/{made['id']}"
    first = {"version": made["version"], "delivery_attempts": 3, "delivery_jitter": 0.5}
    changed = (await api.call("PATCH", path, json=first)).json()
    assert changed["version"] > made["version"]
    stale = await api.call("PATCH", path, json={**first, "delivery_attempts": 4})
    assert stale.status_code == 409
    assert "it was changed meanwhile" in stale.json()["detail"]
    found = (await api.call("GET", path)).json()
    assert (found["delivery_attempts"], found["version"]) == (3, changed["version"])
    refused = await api.call("PATCH", path, json={"version": 0})
    assert refused.status_code == 422
