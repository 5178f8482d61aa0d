"""Test messages before they are due: read, found by their publisher's ids, moved, withdrawn."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rooms.api import message_changes
from rooms.db.queue.claims import Outbox
from rooms.db.writer import LogWriter
from rooms.domain.ids import MessageId
from tests.integration.rooms.api.conftest import Api
from tests.support.installation import until

HOUR_MS = 3_600_000


async def a_room(api: Api, *kinds: str) -> int:
    room: int = (await api.room())["id"]
    await api.made(f"/rooms/{room}/event-types", {"name": "made"})
    for number, kind in enumerate(kinds):
        await api.subscription(room, f"sub-{number}", type=kind)
    return room


async def publish(api: Api, room: int, **fields: Any) -> MessageId:
    return MessageId((await api.publish(room, "made", {"a": 1}, **fields))["message_id"])


async def read(api: Api, message: str) -> dict[str, Any]:
    found: dict[str, Any] = (await api.call("GET", f"/messages/{message}")).json()
    return found


def results(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return sorted(delivery["result"] for delivery in answer.json()["deliveries"])


async def claim(api: Api) -> list[str]:
    """Claim work as a worker; the claim lives until the test ends."""
    async with LogWriter(api.url, kind="worker") as writer:
        found = await Outbox(writer).claim(
            limit=9,
            claim_s=60,
            deadline=0,
            now_ms=0,
            watermarks_us=[0] * 10,
            dead_workers=(),
            excluded=frozenset(),
        )
    return [copy.message_id for copy in found.tasks]


async def test_a_message_is_found_before_it_is_due_by_each_id(api: Api) -> None:
    room = await a_room(api, "PUSH", "PULL")
    message = await publish(api, room, delay_ms=HOUR_MS, id="order/7", business_key="customer 5")
    await publish(api, room)
    found = await read(api, message)
    reported = {name: found[name] for name in ("status", "states", "caller_id", "business_key")}
    assert reported == {
        "status": "waiting",
        "states": {"queued": 2},
        "caller_id": "order/7",
        "business_key": "customer 5",
    }
    due = datetime.fromisoformat(found["due_at"]) - datetime.fromisoformat(found["published_at"])
    assert due == timedelta(hours=1)
    for name, value in (("id", "order/7"), ("business_key", "customer 5")):
        page = (await api.call("GET", f"/rooms/{room}/messages", params={name: value})).json()[
            "items"
        ]
        assert [item["id"] for item in page] == [message]
        assert (await api.call("GET", f"/rooms/{room}/messages", params={name: "none"})).json()[
            "items"
        ] == []
    steps = (await api.call("GET", f"/messages/{message}/journey")).json()["items"]
    assert [
        (step["kind"], step["state"], step["delay_ms"], step["writer_kind"]) for step in steps
    ] == [
        ("published", None, HOUR_MS, "publisher"),
        ("enqueued", "queued", HOUR_MS, "publisher"),
        ("enqueued", "queued", HOUR_MS, "publisher"),
    ]
    assert all(step["worker_host"] and step["ts"] for step in steps)


async def test_a_cancelled_delivery_is_never_attempted(api: Api) -> None:
    """Check that a 200 names every delivery, its work row is gone, and only the other is claimed."""
    room = await a_room(api, "PUSH", "PULL")
    message = await publish(api, room, id="a")
    other = await publish(api, room)
    answer = await api.call("DELETE", f"/messages/{message}", "publish")
    assert results(answer) == ["withdrawn", "withdrawn"]
    assert await claim(api) == [other]
    assert await api.sql("SELECT count(*) FROM outbox WHERE message_id = %s", message) == [(0,)]
    found = await read(api, message)
    assert (found["status"], found["states"]) == ("cancelled", {"cancelled": 2})
    deliveries = (await api.call("GET", f"/messages/{message}/deliveries")).json()["items"]
    assert {(one["state"], one["reason"], one["due_at"]) for one in deliveries} == {
        ("cancelled", "withdrawn", None)
    }
    steps = (await api.call("GET", f"/messages/{message}/journey")).json()["items"]
    assert [(step["kind"], step["detail"]) for step in steps[-2:]] == [
        ("cancelled", "withdrawn")
    ] * 2
    again = await api.call("DELETE", f"/messages/{message}")
    assert again.status_code == 409
    assert "2 cancelled" in again.json()["detail"]
    # Its id stays taken: a repeated request does not publish what was withdrawn.
    assert (await api.publish(room, "made", {"a": 1}, id="a"))["message_id"] == message


async def test_a_message_with_many_deliveries_is_cancelled_page_by_page(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_changes, "PAGE", 2)
    room = await a_room(api, *["PUSH"] * 4, "PULL")
    message, other = [await publish(api, room) for _ in range(2)]
    answer = await api.call("DELETE", f"/messages/{message}")
    assert results(answer) == ["withdrawn"] * 2, "the first of them are listed"
    assert answer.json()["results"] == {"withdrawn": 5}
    assert (await read(api, message))["states"] == {"cancelled": 5}
    assert (await read(api, other))["states"] == {"queued": 5}
    again = await api.call("DELETE", f"/messages/{message}")
    assert "5 cancelled" in again.json()["detail"]


async def test_a_message_with_many_deliveries_moves_to_one_time(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_changes, "PAGE", 2)
    room = await a_room(api, *["PUSH"] * 4)
    message = await publish(api, room, delay_ms=HOUR_MS, ttl_ms=HOUR_MS)
    answer = await api.call("PATCH", f"/messages/{message}", json={"delay_ms": 2 * HOUR_MS})
    assert answer.json()["results"] == {"moved": 4}
    times = await api.sql("SELECT DISTINCT due_at, expires_at FROM outbox")
    moved = answer.json()
    assert times == [
        (datetime.fromisoformat(moved["due_at"]), datetime.fromisoformat(moved["expires_at"]))
    ]


async def gone(api: Api) -> bool:
    return not await api.sql(
        "SELECT 1 FROM pg_stat_activity WHERE application_name = 'rooms worker' AND datname = current_database()"
    )


async def test_each_delivery_is_reported_by_its_state(api: Api) -> None:
    """Check one delivery each: queued, held, leased, claimed, delivered, sidelined."""
    room = await a_room(api, *["PUSH"] * 5, "PULL")
    message = await publish(api, room)
    ids = [
        row[0]
        for row in await api.sql(
            "SELECT id::text FROM deliveries WHERE message_id = %s ORDER BY id", message
        )
    ]
    queued, held, taken, delivered, sidelined, leased = ids
    pulled = (await api.call("GET", f"/rooms/{room}/subscriptions", params={"limit": "1"})).json()[
        "items"
    ][0]
    answer = await api.call("POST", f"/subscriptions/{pulled['id']}/pull")
    assert [one["delivery_id"] for one in answer.json()["messages"]] == [leased]
    for identity, state in ((held, "held"), (delivered, "delivered"), (sidelined, "sidelined")):
        await api.sql("UPDATE deliveries SET state = %s WHERE id = %s RETURNING 1", state, identity)
        await api.sql("DELETE FROM outbox WHERE id = %s RETURNING 1", identity)
    await api.sql(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)"
        " SELECT room_id, id, subscription_id, 4, 0, 'paused' FROM deliveries WHERE id = %s RETURNING 1", held,
    )  # fmt: skip
    async with LogWriter(api.url, kind="worker") as living:
        await api.sql(
            "UPDATE outbox SET worker = %s, claimed_until = now() + interval '1 minute' WHERE id = %s RETURNING 1",
            living.id, taken,
        )  # fmt: skip
        answer = await api.call("DELETE", f"/messages/{message}")
        reported = {one["delivery_id"]: one["result"] for one in answer.json()["deliveries"]}
        assert reported == {
            queued: "withdrawn", held: "withdrawn", taken: "in_flight", leased: "in_flight", delivered: "delivered",
            sidelined: "sidelined",
        }  # fmt: skip
        assert (await api.call("DELETE", f"/messages/{message}")).status_code == 409
        moved = await api.call("PATCH", f"/messages/{message}", json={"delay_ms": 1})
        assert moved.status_code == 409
    # The claim of a dead worker does not count; PostgreSQL ends its session a moment later.
    await until(lambda: gone(api), "the worker's session to end")
    assert "withdrawn" in results(await api.call("DELETE", f"/messages/{message}"))


async def test_a_due_time_is_changed_and_the_lifetime_with_it(api: Api) -> None:
    room = await a_room(api, "PUSH", "PULL")
    message = await publish(api, room, delay_ms=HOUR_MS, ttl_ms=60_000)
    at = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=5)
    answer = await api.call(
        "PATCH", f"/messages/{message}", "publish", json={"deliver_at": at.isoformat()}
    )
    assert results(answer) == ["moved", "moved"]
    body = answer.json()
    assert datetime.fromisoformat(body["due_at"]) == at
    assert datetime.fromisoformat(body["expires_at"]) == at + timedelta(minutes=1)
    rows = await api.sql(
        "SELECT o.due_at, o.expires_at, o.generation, o.kind, d.due_at, d.expires_at, d.generation, d.state::text"
        " FROM outbox o JOIN deliveries d USING (room_id, id) ORDER BY o.kind"
    )
    until = at + timedelta(minutes=1)
    assert rows == [(at, until, 1, kind, at, until, 1, "queued") for kind in (0, 1)]
    assert await claim(api) == []
    steps = (await api.call("GET", f"/messages/{message}/journey")).json()["items"]
    assert [(step["kind"], step["detail"], step["state"]) for step in steps[-2:]] == [
        ("restored", "moved", "queued")
    ] * 2

    await api.call("PATCH", f"/messages/{message}", json={"delay_ms": 0})
    assert await claim(api) == [message]
    assert (await read(api, message))["status"] == "under_way"


async def test_a_reschedule_needs_one_time_and_an_own_message(api: Api) -> None:
    room = await a_room(api)
    message = await publish(api, room)
    neither_or_both: list[dict[str, Any]] = [
        {},
        {"delay_ms": 1, "deliver_at": "2030-01-01T00:00:00Z"},
    ]
    for body in neither_or_both:
        answer = await api.call("PATCH", f"/messages/{message}", json=body)
        assert answer.status_code == 422
        assert {error["field"] for error in answer.json()["errors"]} == {"delay_ms", "deliver_at"}
    for body in (
        {"delay_ms": -1},
        {"deliver_at": "9000-01-01T00:00:00Z"},
        {"deliver_at": "2030-01-01T00:00:00"},
    ):
        assert (await api.call("PATCH", f"/messages/{message}", json=body)).status_code == 422
    calls: list[tuple[str, dict[str, Any]]] = [("DELETE", {}), ("PATCH", {"json": {"delay_ms": 1}})]
    for method, more in calls:
        assert (
            await api.call(method, f"/messages/{message}", "stranger", **more)
        ).status_code == 404
        assert (
            await api.call(method, f"/messages/{message}", "subscribe", **more)
        ).status_code == 403
        answer = await api.call(method, f"/messages/{message}", **more)
        assert answer.status_code == 409
        assert "no deliveries" in answer.json()["detail"]
