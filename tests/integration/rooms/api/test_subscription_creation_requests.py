"""Test requests to subscribe that are never approved: strangers cannot fill a room with them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from delivery.maintenance import age_limits
from delivery.maintenance.age_limits import (
    REQUESTS_DAYS,
    delete_old_requests,
    request_retention_specs,
)
from rooms.api import subscription_creation
from rooms.api.deps import GuestChangeLimiter
from rooms.db.catalog import subscription_requests
from tests.integration.delivery.maintenance.test_service import always
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    Member,
    accepted,
    act,
    approve,
    change,
    grant,
    history,
    member,
    pulled,
    read,
    shared_room,
    subscribe,
)


@pytest.fixture
async def parties(api: Api) -> tuple[Member, Member, int]:
    """Return owner and stranger of a room that asks for approval."""
    owner, stranger = await member(api, "owner"), await member(api, "stranger")
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    return owner, stranger, room


async def withdraw(api: Api, who: Member, room: int, name: str = "sub") -> str:
    """Request a subscription and end it before the owner decides; return its id."""
    made = await subscribe(api, who, room, name)
    assert made["status"] == "pending"
    assert (await act(api, who, made["id"], "terminate")).status_code == 200
    return str(made["id"])


async def jobs_of_room(api: Api, room: int) -> list[tuple[str, str]]:
    """Return kind and state of the jobs of a room."""
    rows = await api.sql("SELECT kind, state FROM jobs WHERE room_id = %s ORDER BY id", room)
    return [(kind, state) for kind, state in rows]


async def delete_old(api: Api) -> None:
    await delete_old_requests(api.services.engine, datetime.now(UTC), REQUESTS_DAYS, always)


async def make_old(api: Api, identity: str, days: float) -> None:
    await api.sql(
        "UPDATE subscriptions SET status_since = now() - %s * interval '1 day' WHERE id = %s",
        days,
        identity,
    )


async def test_a_stranger_that_asks_in_a_loop_is_stopped(
    api: Api, parties: tuple[Member, Member, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, stranger, room = parties
    limit, at = api.services.settings.guest_changes_per_s, [1e6]
    limiter = GuestChangeLimiter(limit, lambda: at[0])
    monkeypatch.setattr(api.services.guest_changes, "acquire", limiter.acquire)

    first = (await subscribe(api, stranger, room, "first"))["id"]
    for number in range(limit - 1):
        answer = await change(api, stranger, first, name=f"name-{number}")
        assert answer.status_code == 200, answer.text
    body = {"name": "second", "type": "PULL"}
    refused = [
        await api.call("POST", f"/rooms/{room}/subscriptions", stranger.key, json=body),
        await change(api, stranger, first, event_types=[{"name": PAID}]),
        await act(api, stranger, first, "terminate"),
        await api.call("DELETE", f"/subscriptions/{first}", stranger.key),
    ]
    assert [answer.status_code for answer in refused] == [429] * len(refused)
    assert all("in a room of others" in answer.json()["detail"] for answer in refused)
    assert (await change(api, stranger, first)).status_code == 200, "it changes nothing"
    assert (await read(api, stranger, first))["status"] == "pending"

    # The owner decides as often as it likes.
    for number in range(limit):
        at[0] += 1
        made = await subscribe(api, stranger, room, f"other-{number}")
        action = "reject" if number % 2 else "terminate"
        assert (await act(api, owner, made["id"], action)).status_code == 200


async def test_to_end_a_request_needs_no_job(api: Api, parties: tuple[Member, Member, int]) -> None:
    owner, stranger, room = parties
    await accepted(api, owner.key, room, event_type=PAID)
    ended = await withdraw(api, stranger, room)
    deleted = (await subscribe(api, stranger, room, "deleted"))["id"]
    answer = await api.call("DELETE", f"/subscriptions/{deleted}", stranger.key)
    assert answer.status_code == 202, answer.text
    job = await api.call("GET", f"/jobs/{answer.json()['job_id']}", stranger.key)
    assert (job.json()["state"], job.json()["finished_at"] is None) == ("done", False)
    answer = await api.call("DELETE", f"/subscriptions/{ended}", stranger.key)
    assert answer.status_code == 202, answer.text
    assert await jobs_of_room(api, room) == [("delete_subscription", "done")] * 2
    for identity in (ended, deleted):
        found = await api.sql("SELECT 1 FROM deliveries WHERE subscription_id = %s", identity)
        assert not found

    # One that was approved may have deliveries.
    approved = (await subscribe(api, stranger, room, "approved"))["id"]
    await approve(api, owner, approved)
    await accepted(api, owner.key, room, event_type=PAID)
    assert (await act(api, stranger, approved, "terminate")).status_code == 200
    assert (await jobs_of_room(api, room))[2:] == [("terminate_subscription", "queued")]


async def test_ended_requests_are_deleted_after_a_while(
    api: Api, parties: tuple[Member, Member, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, stranger, room = parties
    monkeypatch.setattr(age_limits, "REQUESTS_BATCH", 2)
    old = [await withdraw(api, stranger, room, f"old-{number}") for number in range(3)]
    rejected = (await subscribe(api, stranger, room, "rejected"))["id"]
    assert (await act(api, owner, rejected, "reject")).status_code == 200
    deleted = (await subscribe(api, stranger, room, "deleted"))["id"]
    await api.call("DELETE", f"/subscriptions/{deleted}", stranger.key)
    recent = await withdraw(api, stranger, room, "recent")
    waiting = (await subscribe(api, stranger, room, "waiting"))["id"]
    approved = (await subscribe(api, stranger, room, "approved"))["id"]
    await approve(api, owner, approved)
    assert (await act(api, owner, approved, "terminate")).status_code == 200
    await grant(api, owner, room, stranger.id, "subscribe")
    granted = (await subscribe(api, stranger, room, "granted"))["id"]
    assert (await act(api, stranger, granted, "terminate")).status_code == 200
    own = (await subscribe(api, owner, room, "own"))["id"]
    assert (await act(api, owner, own, "terminate")).status_code == 200

    gone = [*old, rejected, deleted]
    kept = [waiting, approved, granted, own]
    for identity in (*gone, *kept):
        await make_old(api, identity, REQUESTS_DAYS + 0.1)
    await make_old(api, recent, REQUESTS_DAYS - 0.1)
    await delete_old(api)
    rows = await api.sql("SELECT id::text FROM subscriptions WHERE room_id = %s", room)
    assert {identity for (identity,) in rows} == {recent, *kept}
    rows = await api.sql(
        "SELECT DISTINCT subscription_id::text FROM subscription_history WHERE room_id = %s", room
    )
    assert {identity for (identity,) in rows} == {recent, *kept}
    answer = await api.call("GET", f"/subscriptions/{rejected}", owner.key)
    assert answer.status_code == 404

    # What happened is in the journals.
    for who, path in ((stranger, old[0]), (owner, rejected)):
        found = await api.call("GET", "/journal?limit=200", who.key)
        assert any(path in entry["object"] for entry in found.json()["items"])


async def test_the_task_runs_every_hour() -> None:
    (spec,) = request_retention_specs()
    assert (spec.partition, spec.every_s) == ("upkeep/requests", 3600.0)


async def test_ended_requests_of_a_stranger_are_bounded(
    api: Api, parties: tuple[Member, Member, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, stranger, room = parties
    monkeypatch.setattr(subscription_creation, "MAX_ENDED_REQUESTS", 3)
    other_room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    ended = [await withdraw(api, stranger, room, f"sub-{number}") for number in range(2)]
    await api.call("DELETE", f"/subscriptions/{ended[0]}", stranger.key)
    waiting = (await subscribe(api, stranger, room, "waiting"))["id"]
    assert (await act(api, owner, waiting, "reject")).status_code == 200
    body = {"name": "more", "type": "PULL"}
    path = f"/rooms/{room}/subscriptions"
    answer = await api.call("POST", path, stranger.key, json=body)
    assert answer.status_code == 409, answer.text
    assert "ended without approval" in answer.json()["detail"]

    # Others, other rooms and those that need no approval have nothing to do with it.
    await subscribe(api, await member(api, "another"), room, "another")
    await subscribe(api, stranger, other_room, "other")
    await subscribe(api, owner, room, "own")
    await make_old(api, ended[1], REQUESTS_DAYS + 1)
    await delete_old(api)
    await subscribe(api, stranger, room, "again")
    await grant(api, owner, room, stranger.id, "subscribe")
    made = [await subscribe(api, stranger, room, f"granted-{number}") for number in range(5)]
    assert {one["status"] for one in made} == {"active"}


async def test_only_the_last_changes_of_a_request_are_kept(
    api: Api, parties: tuple[Member, Member, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, stranger, room = parties
    monkeypatch.setattr(subscription_requests, "MAX_CHANGES", 3)
    first = (await subscribe(api, stranger, room, "first"))["id"]
    second = (await subscribe(api, stranger, room, "second"))["id"]
    assert (await change(api, stranger, second, name="third")).status_code == 200
    for number in range(5):
        assert (await change(api, stranger, first, name=f"name-{number}")).status_code == 200

    async def steps(identity: str) -> list[tuple[str, Any]]:
        found = await history(api, owner, identity)
        return [(step["action"], step["snapshot"]["name"]) for step in reversed(found)]

    kept = [("changed", f"name-{number}") for number in (4, 3, 2)]
    assert await steps(first) == [*kept, ("created", "first")]
    assert await steps(second) == [("changed", "third"), ("created", "second")]

    # From the approval on, the history decides what a replay contains: it stays whole.
    await approve(api, owner, first)
    for number in range(5):
        assert (await change(api, stranger, first, name=f"later-{number}")).status_code == 200
    later = [("changed", f"later-{number}") for number in (4, 3, 2, 1, 0)]
    assert await steps(first) == [*later, ("approved", "name-4"), *kept, ("created", "first")]
    assert await pulled(api, stranger, first) == []
