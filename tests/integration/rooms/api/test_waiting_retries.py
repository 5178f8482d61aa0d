"""Test the request that makes waiting retries due: who may, when it is refused, what it changes."""

from datetime import datetime
from typing import Any

import pytest

from rooms.db.queue.holds import HeldGroup, Holds
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason, SubscriptionType
from tests.integration.delivery.maintenance.test_service import always
from tests.integration.delivery.maintenance.test_waiting_retries import jobs_of
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    Member,
    accepted,
    act,
    grant,
    member,
    pulled,
    shared_room,
    subscribe,
)
from tests.integration.rooms.api.sign_in import follow

HOUR_MS = 3_600_000
HOOK = "https://receiver.example.com/hook"


async def nacked(api: Api, who: Member, subscription: dict[str, Any], *, delay_ms: int) -> None:
    """Lease what waits, and give it back for later."""
    path = f"/subscriptions/{subscription['id']}"
    body = {"max_messages": 100, "wait_ms": 0, "lease_ms": 10_000}
    leased = (await api.call("POST", f"{path}/pull", who.key, json=body)).json()["messages"]
    given_back = {"ack_ids": [one["ack_id"] for one in leased], "delay_ms": delay_ms}
    assert (await api.call("POST", f"{path}/nack", who.key, json=given_back)).status_code == 200


async def retried(api: Api, who: Member, subscription: dict[str, Any]) -> dict[str, Any]:
    """Request it, run the job, and return it."""
    answer = await act(api, who, subscription["id"], "retry")
    assert answer.status_code == 202, answer.text
    assert answer.json()["kind"] == "retry_waiting"
    await jobs_of(api.services.writer).run(always)
    job: dict[str, Any] = (await api.call("GET", answer.headers["location"][3:], who.key)).json()
    assert job["state"] == "done"
    return job


async def counts(api: Api, who: Member, subscription: dict[str, Any]) -> tuple[int, int]:
    found = (await api.call("GET", f"/subscriptions/{subscription['id']}/counts", who.key)).json()
    return found["waiting"], found["retries"]


async def test_what_was_nacked_for_later_comes_now_and_what_is_scheduled_does_not(
    api: Api,
) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    subscription = await subscribe(api, owner, room)
    messages = [await accepted(api, owner.key, room) for _ in range(3)]
    await nacked(api, owner, subscription, delay_ms=HOUR_MS)
    await accepted(api, owner.key, room, delay_ms=HOUR_MS)
    assert await counts(api, owner, subscription) == (4, 3)
    assert await pulled(api, owner, subscription["id"]) == []
    job = await retried(api, owner, subscription)
    assert job["result"] == {"retried": 3}
    assert (job["done"], job["total"]) == (3, 3)
    assert job["arguments"] == {
        "room_id": room,
        "subscription_id": subscription["id"],
        "name": "sub",
    }
    assert await counts(api, owner, subscription) == (4, 0)
    assert sorted(await pulled(api, owner, subscription["id"])) == sorted(messages)
    assert (await retried(api, owner, subscription))["result"] == {"retried": 0}


async def test_both_sides_may_and_each_sees_its_own_job(api: Api) -> None:
    """The room's owner restores its rooms, too, and sees how much waits for each subscription."""
    owner, subscriber, stranger = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    await grant(api, owner, room, subscriber.id, "subscribe")
    subscription = await subscribe(api, subscriber, room)
    own = await subscribe(api, owner, room, "own")
    for who in (subscriber, owner):
        message = await accepted(api, owner.key, room)
        for of, whose in ((subscription, subscriber), (own, owner)):
            await nacked(api, whose, of, delay_ms=HOUR_MS)
        job = await retried(api, who, subscription)
        # Rows of other subscriptions are read, and not counted.
        assert (job["result"], job["done"], job["total"]) == ({"retried": 1}, 1, 1)
        assert await pulled(api, subscriber, subscription["id"]) == [message]
        other = owner if who is subscriber else subscriber
        assert (await api.call("GET", f"/jobs/{job['id']}", other.key)).status_code == 404
    assert await pulled(api, owner, own["id"]) == []
    assert (await act(api, stranger, subscription["id"], "retry")).status_code == 404
    assert (await act(api, subscriber, own["id"], "retry")).status_code == 404


@pytest.mark.parametrize("status", ["paused", "disabled", "suspended", "terminated"])
async def test_a_subscription_that_is_not_active_is_refused(api: Api, status: str) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    subscription = await subscribe(api, owner, room, push_url=HOOK)
    await api.sql(
        "UPDATE subscriptions SET status = %s WHERE id = %s RETURNING 1", status, subscription["id"]
    )
    answer = await act(api, owner, subscription["id"], "retry")
    assert answer.status_code == 409
    detail = answer.json()["detail"]
    assert f"it is {status}" in detail
    assert ("resume it first" in detail) == (status in {"paused", "disabled"})
    assert await api.sql("SELECT FROM jobs WHERE kind = 'retry_waiting'") == []


@pytest.mark.parametrize("is_open", [True, False])
async def test_the_next_probe_of_an_open_circuit_is_due_at_once(api: Api, *, is_open: bool) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    subscription = await subscribe(api, owner, room, push_url=HOOK, circuit_failures=3)
    await accepted(api, owner.key, room)
    await api.sql(
        "WITH o AS (DELETE FROM outbox RETURNING *), d AS ("
        " UPDATE deliveries SET state = 'held', reason = 'circuit_open' FROM o WHERE deliveries.id = o.id)"
        " INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)"
        " SELECT room_id, id, subscription_id, priority, 0, 'circuit_open' FROM o RETURNING 1"
    )
    held = HeldGroup(SubscriptionId(subscription["id"]), Reason.CIRCUIT_OPEN)
    holds = Holds(api.services.writer)
    ((at,),) = await api.sql(
        "INSERT INTO lanes (room_id, id, circuit_open, circuit_since, probe_at)"
        " VALUES (%s, %s, %s, now(), CASE WHEN %s THEN now() + interval '1 hour' END)"
        " RETURNING now()",
        room,
        subscription["id"],
        is_open,
        is_open,
    )
    assert await holds.probe(held, open_ms=HOUR_MS) == 0
    await retried(api, owner, subscription)
    path = f"/subscriptions/{subscription['id']}/lane"
    circuit = (await api.call("GET", path, owner.key)).json()["circuit"]
    assert circuit["state"] == ("open" if is_open else "closed")
    if is_open:
        left = datetime.fromisoformat(circuit["next_probe_at"]) - at
        assert 0 <= left.total_seconds() < HOUR_MS / 2000
    else:
        assert circuit["next_probe_at"] is None
    assert [await holds.probe(held, open_ms=HOUR_MS) for _ in range(2)] == [int(is_open), 0]


@pytest.mark.parametrize(("access", "status"), [("read", 403), ("operate", 202), ("manage", 202)])
async def test_a_portal_retries_what_it_shows(api: Api, access: str, status: int) -> None:
    room = (await api.room())["id"]
    shown, hidden = [
        await api.subscription(room, name, type=SubscriptionType.PULL) for name in ("a", "b")
    ]
    body = {"name": "a person", "subscription_ids": [shown["id"]], "access": access}
    begun = await follow(api, await api.made("/portal-links", body))
    assert begun is not None
    _, text = begun
    answer = await api.call("POST", f"/subscriptions/{shown['id']}/retry", text)
    assert answer.status_code == status, answer.text
    if status == 202:
        location = answer.headers["location"][3:]
        assert (await api.call("GET", location, text)).status_code == 200
        answer = await api.call("POST", f"/subscriptions/{hidden['id']}/retry", text)
        assert answer.status_code == 404
