"""Test throttling: settings of rooms and subscriptions, effective values, operational endpoints."""

from typing import Any

import pytest

from tests.integration.rooms.api.conftest import Api

FIELDS: dict[str, Any] = {
    "max_concurrency": 7,
    "timeout_ms": 2500,
    "rate_per_s": 12.5,
    "rate_burst": 3,
    "circuit_failures": 5,
    "circuit_window_ms": 20_000,
    "circuit_open_ms": 1500,
    "drain_per_s": 40.0,
    "disable_after_ms": 86_400_000,
}
NOTHING = dict.fromkeys(FIELDS)
WRONG: list[tuple[str, Any]] = [
    ("max_concurrency", 0),
    ("timeout_ms", 99),
    ("timeout_ms", 30_001),
    ("max_concurrency", 1001),
    ("rate_per_s", -1),
    ("rate_per_s", 0.0001),
    ("rate_per_s", 100_001),
    ("rate_burst", 0),
    ("circuit_failures", -1),
    ("circuit_failures", 1001),
    ("circuit_window_ms", 0),
    ("circuit_open_ms", 99),
    ("drain_per_s", 0.0009),
    ("disable_after_ms", -1),
]


async def lane(api: Api, identity: str) -> dict[str, Any]:
    answer = await api.call("GET", f"/subscriptions/{identity}/lane")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_rooms_and_subscriptions_read_as_they_were_made(api: Api) -> None:
    room = await api.room(**FIELDS)
    assert {name: room[name] for name in FIELDS} == FIELDS
    made = await api.subscription(room["id"])
    assert {name: made[name] for name in FIELDS} == NOTHING
    own = await api.subscription(room["id"], "own", **FIELDS)
    assert {name: own[name] for name in FIELDS} == FIELDS
    changed = await api.call("PATCH", f"/subscriptions/{own['id']}", json=NOTHING)
    assert {name: changed.json()[name] for name in FIELDS} == NOTHING
    cleared = await api.call("PATCH", f"/rooms/{room['id']}", json=NOTHING)
    assert {name: cleared.json()[name] for name in FIELDS} == NOTHING


@pytest.mark.parametrize(("name", "value"), WRONG)
async def test_what_is_out_of_bounds_is_refused_by_both(api: Api, name: str, value: Any) -> None:
    room = await api.room()
    body = {"name": "s", "type": "PUSH", "push_url": "https://hooks.example.com/in", name: value}
    for method, path, fields in (
        ("POST", f"/rooms/{room['id']}/subscriptions", body),
        ("PATCH", f"/rooms/{room['id']}", {name: value}),
    ):
        answer = await api.call(method, path, json=fields)
        assert answer.status_code == 422, answer.text
        assert [error["field"] for error in answer.json()["errors"]] == [name]


async def test_pull_has_no_lane(api: Api) -> None:
    room = await api.room()
    queue = await api.subscription(room["id"], "queue", type="PULL")
    assert (await api.call("GET", f"/subscriptions/{queue['id']}/lane")).status_code == 409
    answer = await api.call("PATCH", f"/subscriptions/{queue['id']}", json={"rate_per_s": 5})
    assert [error["field"] for error in answer.json()["errors"]] == ["rate_per_s"]


async def test_a_lane_without_settings_has_the_defaults_of_the_installation(api: Api) -> None:
    made = await api.subscription((await api.room())["id"])
    assert await lane(api, made["id"]) == {
        "max_concurrency": 32,
        "rate_per_s": None,
        "rate_burst": None,
        "timeout_ms": 15_000,
        "circuit_failures": None,
        "circuit_window_ms": 60_000,
        "circuit_open_ms": 30_000,
        "drain_per_s": None,
        "disable_after_ms": None,
        "ordered": False,
        "circuit": {"state": "off", "since": None, "next_probe_at": None, "probes": 0},
        "failing_since": None,
        "concurrency": None,
        "concurrency_at": None,
        "held": {},
    }


async def test_a_lane_inherits_settings_of_its_room_and_can_turn_them_off(
    api: Api,
) -> None:
    room = await api.room(**FIELDS)
    made = await api.subscription(room["id"], circuit_failures=0, max_concurrency=2, rate_per_s=0)
    found = await lane(api, made["id"])
    assert (found["circuit_failures"], found["circuit"]["state"]) == (None, "off")
    assert (found["max_concurrency"], found["rate_per_s"], found["rate_burst"]) == (2, None, None)
    assert found["timeout_ms"] == 2500
    assert (found["drain_per_s"], found["disable_after_ms"], found["circuit_open_ms"]) == (
        40.0,
        86_400_000,
        1500,
    )


async def test_a_changed_room_increments_the_versions_of_its_subscriptions(api: Api) -> None:
    room = await api.room()
    made = await api.subscription(room["id"])
    before = await api.sql("SELECT version FROM subscriptions WHERE id = %s", made["id"])
    await api.call("PATCH", f"/rooms/{room['id']}", json={"rate_per_s": 5})
    assert (
        await api.sql("SELECT version - 1 FROM subscriptions WHERE id = %s", made["id"]) == before
    )


async def test_an_open_circuit_reads_so_and_resume_closes_it(api: Api) -> None:
    room = await api.room(circuit_failures=3)
    made = await api.subscription(room["id"])
    assert (await lane(api, made["id"]))["circuit"]["state"] == "closed"
    await api.sql(
        "INSERT INTO lanes (room_id, id, circuit_open, circuit_since, probe_at, probes, failing_since, concurrency,"
        " concurrency_at) VALUES (%s, %s, true, now(), now() + interval '1 h', 4, now(), 5, now())",
        room["id"], made["id"],
    )  # fmt: skip
    await api.sql(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)"
        " SELECT %s, gen_random_uuid(), %s, 4, 0, 'circuit_open' FROM generate_series(1, 3)",
        room["id"], made["id"],
    )  # fmt: skip
    found = await lane(api, made["id"])
    assert (found["circuit"]["state"], found["circuit"]["probes"]) == ("open", 4)
    assert "rooms_circuits_open 1.0" in (await api.http.get("/metrics")).text
    assert found["circuit"]["since"] < found["circuit"]["next_probe_at"]
    assert (found["held"], found["concurrency"]) == ({"circuit_open": 3}, 5)
    assert found["failing_since"] is not None
    before = await api.sql("SELECT version FROM subscriptions WHERE id = %s", made["id"])
    assert (await api.call("POST", f"/subscriptions/{made['id']}/resume")).json()[
        "status"
    ] == "active"
    closed = await lane(api, made["id"])
    assert (closed["circuit"]["state"], closed["circuit"]["next_probe_at"], closed["failing_since"]) == (
        "closed", None, None,
    )  # fmt: skip
    assert (
        await api.sql("SELECT version - 1 FROM subscriptions WHERE id = %s", made["id"]) == before
    )


async def test_a_circuit_with_a_probe_under_way_is_half_open(api: Api) -> None:
    room = await api.room(circuit_failures=3)
    made = await api.subscription(room["id"])
    await api.sql(
        "WITH o AS (INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)"
        " VALUES (%s, gen_random_uuid(), gen_random_uuid(), %s, 0, 4, 2, 1, now()) RETURNING *)"
        " INSERT INTO lanes (room_id, id, circuit_open, circuit_since, probe_at, probe, probe_generation, probe_attempt)"
        " SELECT room_id, subscription_id, true, now(), now(), id, 2, 1 FROM o",
        room["id"], made["id"],
    )  # fmt: skip
    assert (await lane(api, made["id"]))["circuit"]["state"] == "half_open"
    await api.sql("UPDATE outbox SET attempt = 2 WHERE room_id = %s", room["id"])
    assert (await lane(api, made["id"]))["circuit"]["state"] == "open"


async def test_a_room_makes_and_keeps_its_operational_subscription(api: Api) -> None:
    room = await api.room(operational_url="https://ops.example.com/a")
    assert room["operational_url"] == "https://ops.example.com/a"
    (found,) = (await api.call("GET", f"/rooms/{room['id']}/subscriptions")).json()["items"]
    assert (found["name"], found["type"], found["operational"]) == ("~operational", "PUSH", True)
    assert (found["push_url"], found["event_types"]) == ("https://ops.example.com/a", [])
    at = f"/subscriptions/{found['id']}"
    assert (await api.call("POST", f"{at}/rotate-secret")).json()["secret"].startswith("whsec_")
    for fields in (
        {"push_url": "https://else.example.com/"},
        {"event_types": None},
        {"name": "mine"},
    ):
        assert (await api.call("PATCH", at, json=fields)).status_code == 409
    assert (await api.call("PATCH", at, json={"timeout_ms": 500})).json()["timeout_ms"] == 500
    assert (await api.call("DELETE", at)).status_code == 409
    await api.call(
        "PATCH", f"/rooms/{room['id']}", json={"operational_url": "https://ops.example.com/b"}
    )
    assert (await api.call("GET", at)).json()["push_url"] == "https://ops.example.com/b"
    cleared = await api.call("PATCH", f"/rooms/{room['id']}", json={"operational_url": None})
    assert cleared.json()["operational_url"] is None
    assert (await api.call("GET", at)).status_code == 404
    await api.call(
        "PATCH", f"/rooms/{room['id']}", json={"operational_url": "https://ops.example.com/c"}
    )
    (again,) = (await api.call("GET", f"/rooms/{room['id']}/subscriptions")).json()["items"]
    assert again["id"] != found["id"]


async def test_an_operational_subscription_gets_nothing_that_is_published(api: Api) -> None:
    room = await api.room(operational_url="https://ops.example.com/a")
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "rooms.endpoint.disabled"})
    answer = await api.publish(room["id"], "rooms.endpoint.disabled", {"forged": True})
    assert answer["destinations"] == []


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/",
        "https://blocked.example.com/",
        "",
        "https://u:p@example.com/",
        "https://example.com:5432/",
    ],
)
async def test_an_operational_url_is_checked_like_any_webhook(api: Api, url: str) -> None:
    room = await api.room()
    answer = await api.call("PATCH", f"/rooms/{room['id']}", json={"operational_url": url})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["operational_url"]
