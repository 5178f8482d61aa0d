"""Test rooms: what they accept, what they refuse, and their deletion."""

from typing import Any

from rooms.domain.ids import MAX_ROOM
from tests.integration.rooms.api.conftest import Api, room_body

MONTH_MS = 30 * 86_400_000
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "a b"}, "name"),
    ({"name": "ä"}, "name"),
    ({"name": "a\n"}, "name"),
    ({"name": "a" * 129}, "name"),
    ({"name": 5}, "name"),
    ({"name": None}, "name"),
    ({"description": "a" * 1001}, "description"),
    ({"description": "a\x00b"}, "description"),
    ({"message_expiration_ms": -1}, "message_expiration_ms"),
    ({"message_expiration_ms": 10**30}, "message_expiration_ms"),
    ({"message_expiration_ms": 1.5}, "message_expiration_ms"),
    ({"message_expiration_ms": True}, "message_expiration_ms"),
    ({"delivery_delay_ms": -1}, "delivery_delay_ms"),
    ({"delivery_delay_ms": MONTH_MS + 1}, "delivery_delay_ms"),
    ({"delivery_delay_ms": "1000"}, "delivery_delay_ms"),
    ({"delivery_delay_ms": None}, "delivery_delay_ms"),
    ({"delivery_delay_multiplier": 0.99}, "delivery_delay_multiplier"),
    ({"delivery_delay_multiplier": 100.1}, "delivery_delay_multiplier"),
    ({"delivery_attempts": -1}, "delivery_attempts"),
    ({"delivery_attempts": 1001}, "delivery_attempts"),
    ({"delivery_max_delay_ms": MONTH_MS + 1}, "delivery_max_delay_ms"),
    ({"delivery_jitter": 1.01}, "delivery_jitter"),
    ({"delivery_jitter": -0.01}, "delivery_jitter"),
    ({"delay_ms": 5}, "delay_ms"),
]


async def test_a_room_reads_as_it_was_made(api: Api) -> None:
    body = {
        "name": "a.B-c_9",
        "description": "für alle",
        "message_expiration_ms": 0,
        "delivery_delay_ms": MONTH_MS,
        "delivery_delay_multiplier": 1.5,
        "delivery_attempts": 1000,
        "delivery_max_delay_ms": MONTH_MS,
        "delivery_jitter": 0.25,
    }
    answer = await api.call("POST", "/rooms", json=body)
    assert answer.status_code == 201
    made = answer.json()
    assert answer.headers["location"] == f"/v1/rooms/{made['id']}"
    assert {name: made[name] for name in body} == body
    assert 0 < made["id"] < 2**31
    assert made["created_at"].endswith("Z")
    assert (await api.call("GET", f"/rooms/{made['id']}")).json() == made


async def test_a_wrong_field_is_named(api: Api) -> None:
    made = await api.room("kept")
    for change, field in WRONG:
        for method, path, body in (
            ("POST", "/rooms", room_body() | change),
            ("PATCH", f"/rooms/{made['id']}", change),
        ):
            answer = await api.call(method, path, json=body)
            assert answer.status_code == 422, (change, answer.text)
            assert [error["field"] for error in answer.json()["errors"]] == [field], change
    assert [room["name"] for room in (await api.call("GET", "/rooms")).json()["items"]] == ["kept"]


async def test_missing_fields_are_named(api: Api) -> None:
    for field in room_body():
        body = room_body()
        del body[field]
        answer = await api.call("POST", "/rooms", json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"] == [{"field": field, "message": "is missing"}]


async def test_a_name_is_taken_once_in_an_organisation(api: Api) -> None:
    await api.room("one")
    other = await api.room("two")
    assert (await api.call("POST", "/rooms", json=room_body("one"))).status_code == 409
    assert (
        await api.call("PATCH", f"/rooms/{other['id']}", json={"name": "one"})
    ).status_code == 409
    assert (await api.room("one", "stranger"))["name"] == "one"


async def test_a_patch_changes_what_it_names_and_null_clears(api: Api) -> None:
    made = await api.room(description="x", message_expiration_ms=5000, delivery_max_delay_ms=7000)
    path = f"/rooms/{made['id']}"
    changed = (await api.call("PATCH", path, json={"delivery_attempts": 9})).json()
    assert changed == made | {"delivery_attempts": 9, "updated_at": changed["updated_at"]}
    cleared = {"description": None, "message_expiration_ms": None, "delivery_max_delay_ms": None}
    changed = (await api.call("PATCH", path, json=cleared)).json()
    assert {name: changed[name] for name in cleared} == cleared
    assert changed["delivery_attempts"] == 9
    assert (await api.call("PATCH", path, json={})).json() == changed
    assert (await api.call("GET", path)).json() == changed


async def test_every_change_increments_the_plan_version_and_a_policy_its_subscriptions(
    api: Api,
) -> None:
    made = await api.room()
    subscription = await api.subscription(made["id"])

    async def versions() -> tuple[Any, ...]:
        rows = await api.sql(
            "SELECT r.plan_version, s.version FROM rooms r JOIN subscriptions s ON s.room_id = r.id WHERE s.id = %s",
            subscription["id"],
        )
        return rows[0]

    plan, version = await versions()
    await api.call("PATCH", f"/rooms/{made['id']}", json={"description": "other"})
    assert await versions() == (plan + 1, version)
    await api.call("PATCH", f"/rooms/{made['id']}", json={"delivery_delay_ms": 5})
    assert await versions() == (plan + 2, version + 1)
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    assert await versions() == (plan + 3, version + 1)
    await api.call("PATCH", f"/subscriptions/{subscription['id']}", json={"timeout_ms": 500})
    assert await versions() == (plan + 4, version + 2)


async def test_deleting_needs_the_name_and_leaves_a_job(api: Api) -> None:
    made = await api.room("orders")
    subscription = await api.subscription(made["id"])
    path = f"/rooms/{made['id']}"
    for query in ("", "?confirm=", "?confirm=other"):
        answer = await api.call("DELETE", path + query)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "confirm"
    assert (await api.call("GET", path)).status_code == 200

    answer = await api.call("DELETE", f"{path}?confirm=orders")
    assert answer.status_code == 202
    accepted = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{accepted['job_id']}"
    job = (await api.call("GET", f"/jobs/{accepted['job_id']}")).json()
    assert job | {"kind": "delete_room", "state": "queued", "room_id": made["id"]} == job
    assert job["arguments"] == {"room_id": made["id"], "name": "orders"}

    for gone in (
        path,
        f"{path}/subscriptions",
        f"{path}/event-types",
        f"{path}/messages",
        f"/subscriptions/{subscription['id']}",
        f"/subscriptions/{subscription['id']}/deliveries",
    ):
        assert (await api.call("GET", gone)).status_code == 404, gone
    assert (await api.call("DELETE", f"{path}?confirm=orders")).status_code == 404
    assert (await api.call("GET", "/rooms")).json()["items"] == []
    assert (await api.room("orders"))["id"] != made["id"]
    assert len((await api.call("GET", "/jobs")).json()["items"]) == 1


async def test_pages_are_stable_while_rooms_come_and_go(api: Api) -> None:
    made = [(await api.room(f"room-{number}"))["id"] for number in range(7)]
    seen: list[int] = []
    cursor = None
    while True:
        query = f"?limit=2{'' if cursor is None else f'&cursor={cursor}'}"
        page = (await api.call("GET", f"/rooms{query}")).json()
        seen += [room["id"] for room in page["items"]]
        await api.room(f"later-{len(seen)}")
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == list(reversed(made))


async def test_a_room_is_found_by_its_name(api: Api) -> None:
    await api.room("one")
    wanted = await api.room("two")
    assert (await api.call("GET", "/rooms?name=two")).json()["items"] == [wanted]
    assert (await api.call("GET", "/rooms?name=three")).json()["items"] == []


async def test_rooms_and_subscriptions_are_listed_by_their_ids(api: Api) -> None:
    rooms = [(await api.room(name))["id"] for name in ("one", "two", "three")]
    subscriptions = [(await api.subscription(room, "crm"))["id"] for room in rooms]
    for path, ids in (("/rooms", rooms), ("/subscriptions", subscriptions)):
        asked = {"id": f"{ids[0]},{ids[2]},{ids[0]}"}
        found = (await api.call("GET", path, params=asked)).json()
        assert [one["id"] for one in found["items"]] == [ids[2], ids[0]]
        first = (await api.call("GET", path, params=asked | {"limit": 1})).json()
        assert [one["id"] for one in first["items"]] == [ids[2]]
        more = asked | {"limit": 1, "cursor": first["next_cursor"]}
        assert (await api.call("GET", path, params=more)).json()["items"][0]["id"] == ids[0]
        unknown = {"id": str(MAX_ROOM) if path == "/rooms" else "0" * 8 + subscriptions[0][8:]}
        assert (await api.call("GET", path, params=unknown)).json()["items"] == []
        for wrong in (
            "",
            ",",
            f"{ids[0]},",
            "x",
            "0",
            "-1",
            "9" * 10,
            "1" * 8000,
            "1" + ",1" * 200,
        ):
            refused = await api.call("GET", path, params={"id": wrong})
            assert refused.status_code == 422, (path, wrong)
            assert [one["field"] for one in refused.json()["errors"]] == ["id"]


async def test_an_invalid_room_id_is_not_found(api: Api) -> None:
    for room in (
        "0",
        "-1",
        "x",
        "1e3",
        "2147483648",
        "9" * 40,
        "١٢",
        "%00",
        "1%20",
        "01",
        "..%2F",
        "%ff",
    ):
        for method in ("GET", "DELETE"):
            assert (await api.call(method, f"/rooms/{room}")).status_code == 404, room
