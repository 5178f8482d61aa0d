"""Test requests for restore, clear, replay and resend: their jobs, and what is refused."""

from typing import Any

import pytest

from rooms.domain.state_machine import Scope
from tests.integration.rooms.api.conftest import Api, make_key

SINCE = "2026-01-02T03:04:05+00:00"


async def asked(
    api: Api, path: str, body: dict[str, Any] | None = None, *, key: str = "operate", **query: str
) -> dict[str, Any]:
    """Return the job of a request."""
    answer = await api.call("POST", path, key, json=body, params=query)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['job_id']}"
    found: dict[str, Any] = (await api.call("GET", f"/jobs/{answer.json()['job_id']}", key)).json()
    assert (found["state"], found["done"], found["total"]) == ("queued", 0, None)
    return found


async def operator(api: Api) -> str:
    """Return a key with the scope `platform`."""
    return await make_key(api.services, "default", Scope.OPERATE, Scope.PLATFORM)


async def refused(
    api: Api, path: str, body: dict[str, Any] | None = None, **query: str
) -> list[str]:
    """Return the wrong fields."""
    answer = await api.call("POST", path, "operate", json=body, params=query)
    assert answer.status_code == 422, answer.text
    return [error["field"] for error in answer.json()["errors"]]


@pytest.fixture
async def room(api: Api) -> int:
    made = await api.room()
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    return int(made["id"])


async def test_a_restore_is_a_job(api: Api, room: int) -> None:
    unfinished = ["held", "leased", "queued", "scheduled"]
    plain = await asked(api, f"/rooms/{room}/restore")
    assert (plain["kind"], plain["room_id"]) == ("restore", room)
    assert plain["arguments"] == {"room_id": room, "states": unfinished}
    whole = await asked(api, f"/rooms/{room}/restore", {"include_expired": True, "since": SINCE})
    assert whole["arguments"] == {
        "room_id": room,
        "states": sorted([*unfinished, "expired"]),
        "since": SINCE,
    }
    some = await asked(api, f"/rooms/{room}/restore", {"states": ["cancelled", "dropped"]})
    assert some["arguments"] == {"room_id": room, "states": ["cancelled", "dropped"]}
    assert await refused(
        api, f"/rooms/{room}/restore", {"states": ["queued", "delivered", "sidelined"]}
    ) == [
        "states[1]",
        "states[2]",
    ]
    assert await refused(api, f"/rooms/{room}/restore", {"since": "yesterday"}) == ["since"]


async def test_only_the_organisations_own_message_is_restored(api: Api, room: int) -> None:
    await api.subscription(room)
    message = (await api.publish(room, "made", {}))["message_id"]
    job = await asked(api, f"/messages/{message}/restore", {"states": ["expired"]})
    assert job["arguments"] == {"room_id": room, "message_id": message, "states": ["expired"]}
    missing = message[:-1] + ("1" if message[-1] == "0" else "0")
    assert (await api.call("POST", f"/messages/{missing}/restore", "operate")).status_code == 404
    assert (await api.call("POST", f"/messages/{message}/restore", "stranger")).status_code == 404
    assert await refused(api, f"/messages/{message}/restore", {"since": SINCE}) == ["since"]


async def test_a_clear_needs_the_rooms_name(api: Api, room: int) -> None:
    assert await refused(api, f"/rooms/{room}/clear") == ["confirm"]
    assert await refused(api, f"/rooms/{room}/clear", confirm="another") == ["confirm"]
    job = await asked(api, f"/rooms/{room}/clear", confirm="orders")
    assert (job["kind"], job["arguments"]) == ("clear_room", {"room_id": room, "name": "orders"})


async def test_a_replay_needs_one_start(api: Api, room: int) -> None:
    subscription = (await api.subscription(room))["id"]
    message = (await api.publish(room, "made", {}))["message_id"]
    path = f"/subscriptions/{subscription}/replay"
    body = {
        "since": SINCE,
        "until": SINCE,
        "event_types": ["made"],
        "rate_per_s": 2.5,
        "include_expired": True,
    }
    assert (await asked(api, path, body))["arguments"] == {
        "room_id": room,
        "subscription_id": subscription,
        **body,
    }
    from_one = await asked(api, path, {"from_message_id": message})
    assert from_one["arguments"] == {
        "room_id": room,
        "subscription_id": subscription,
        "from_message_id": message,
    }
    elsewhere = "01900000-0000-7000-8000-000000000001"
    assert await refused(api, path, {}) == ["since"]
    assert await refused(api, path, {"since": SINCE, "from_message_id": message}) == ["since"]
    assert await refused(api, path, {"from_message_id": elsewhere}) == ["from_message_id"]
    assert await refused(api, path, {"since": SINCE, "rate_per_s": 0}) == ["rate_per_s"]


async def test_a_broker_resend_is_a_job_without_a_room(api: Api) -> None:
    job = await asked(api, "/recover", key=await operator(api))
    assert (job["kind"], job["room_id"], job["arguments"]) == ("recover", None, {})
    assert (await api.call("POST", "/recover", "manage")).status_code == 403


async def test_a_job_is_cancelled_unless_it_is_over_or_a_deletion(api: Api, room: int) -> None:
    job = await asked(api, f"/rooms/{room}/restore")
    path = f"/jobs/{job['id']}/cancel"
    assert (await api.call("POST", path, "stranger")).status_code == 404
    for _ in range(2):
        answer = await api.call("POST", path, "operate")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    listed = (await api.call("GET", "/jobs", params={"state": "cancelled"})).json()["items"]
    assert [one["id"] for one in listed] == [job["id"]]
    over = await asked(api, f"/rooms/{room}/restore")
    await api.sql("UPDATE jobs SET state = 'done' WHERE id = %s RETURNING 1", over["id"])
    refusal = await api.call("POST", f"/jobs/{over['id']}/cancel", "operate")
    assert (refusal.status_code, refusal.json()["detail"]) == (409, "the job is over: it is done")
    deletion = (await api.call("DELETE", f"/rooms/{room}", params={"confirm": "orders"})).json()
    refusal = await api.call("POST", f"/jobs/{deletion['job_id']}/cancel", "operate")
    assert refusal.status_code == 409
    assert "cannot be cancelled" in refusal.json()["detail"]


async def test_jobs_are_listed_by_kind_state_and_room(api: Api, room: int) -> None:
    other = (await api.room("other"))["id"]
    restores = [await asked(api, f"/rooms/{one}/restore") for one in (room, other)]
    key = await operator(api)
    recovery = await asked(api, "/recover", key=key)
    await api.sql("UPDATE jobs SET state = 'failed' WHERE id = %s RETURNING 1", recovery["id"])

    async def listed(**query: str) -> list[str]:
        answer = await api.call("GET", "/jobs", key, params=query)
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["items"]]

    assert await listed() == [recovery["id"], restores[1]["id"], restores[0]["id"]]
    assert await listed(kind="restore", room_id=str(room)) == [restores[0]["id"]]
    assert await listed(state="failed") == [recovery["id"]]
    assert await listed(kind="replay") == []
    assert (await api.call("GET", "/jobs", params={"kind": "paint"})).status_code == 422
