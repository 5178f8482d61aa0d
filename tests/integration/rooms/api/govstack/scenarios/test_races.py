"""Test GovStack's interfaces under calls at the same moment, in one process and in two."""

import asyncio
from typing import Any

import httpx
import pytest

from rooms.api.govstack import subscriptions
from rooms.api.subscription_bodies import CreatedSubscription
from rooms.api.subscription_creation import subscribe
from rooms.domain.room import Subscription
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.govstack.conftest import (
    MADE,
    PAID,
    SUBSCRIBER,
    GovStack,
    member_id,
)

CALLS = 8


async def test_a_caller_gets_one_subscription(gov: GovStack, elsewhere: Api) -> None:
    """Check that of many requests for the same event type one succeeds, and the others are 409."""
    second = GovStack(api=elsewhere, room=gov.room, organisations=gov.organisations)
    elsewhere.keys.update(gov.api.keys)

    async def request(number: int) -> httpx.Response:
        one = gov if number % 2 else second
        kind = MADE if number < CALLS else PAID
        client = f"{member_id(SUBSCRIBER)}/{'app' if number % 4 < 2 else 'other'}"
        body = {"eventType": kind, "delivery": "PULL"}
        return await one.call("POST", f"/api/v1/subs/{kind}", SUBSCRIBER, client=client, json=body)

    answers = await asyncio.gather(*map(request, range(2 * CALLS)))
    statuses = [answer.status_code for answer in answers]
    assert sorted(statuses) == [200] * 4 + [409] * (2 * CALLS - 4)
    rows = await gov.api.sql(
        "SELECT application, event_types->0->>'name', count(*) FROM subscriptions GROUP BY 1, 2"
        " ORDER BY 1, 2"
    )
    assert rows == [(app, kind, 1) for app in ("app", "other") for kind in (MADE, PAID)]


async def test_a_subscription_of_v1_counts(gov: GovStack) -> None:
    body = {"name": "bound", "scopes": ["admin"], "application": "app"}
    gov.api.keys["bound"] = (await gov.api.made("/keys", body, SUBSCRIBER))["key"]
    mine = {"name": "mine", "type": "PULL", "event_types": [{"name": MADE}]}
    made = await gov.api.made(f"/rooms/{gov.room}/subscriptions", mine, "bound")
    item = {"eventType": MADE, "delivery": "PULL"}
    refused = await gov.call("POST", f"/api/v1/subs/{MADE}", SUBSCRIBER, json=item)
    assert refused.status_code == 409
    found = await gov.call("GET", f"/api/v1/subs/{MADE}", SUBSCRIBER)
    assert found.json()["id"] == made["id"]
    await gov.api.call("POST", f"/subscriptions/{made['id']}/terminate", SUBSCRIBER)
    assert (await gov.call("GET", f"/api/v1/subs/{MADE}", SUBSCRIBER)).status_code == 404
    assert (
        await gov.call("POST", f"/api/v1/subs/{MADE}", SUBSCRIBER, json=item)
    ).status_code == 200


async def test_a_change_by_v1_at_the_same_moment_is_a_conflict(
    gov: GovStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no option of a subscription is changed that is for other events by then."""
    item = await gov.subscribe()
    find = subscriptions.find_callers_subscription

    async def find_and_widen(*args: Any) -> Subscription:
        found = await find(*args)
        await widen(gov, found.id)
        return found

    monkeypatch.setattr(subscriptions, "find_callers_subscription", find_and_widen)
    body = {"eventType": MADE, "options": {"TTL": 60}}
    refused = await gov.call("PATCH", f"/api/v1/subs/{MADE}", SUBSCRIBER, json=body)
    assert refused.status_code == 409, refused.text
    read = await gov.api.call("GET", f"/subscriptions/{item['id']}", SUBSCRIBER)
    assert read.json()["message_expiration_ms"] == 3_600_000


async def test_a_new_subscription_is_answered_as_it_was_made(
    gov: GovStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def subscribe_and_widen(*args: Any, **more: Any) -> CreatedSubscription:
        made = await subscribe(*args, **more)
        await widen(gov, made.id)
        return made

    monkeypatch.setattr(subscriptions, "subscribe", subscribe_and_widen)
    item = await gov.subscribe(TTL=60, FIFO=True)
    assert (item["eventType"], item["options"]) == (MADE, {"TTL": 60, "FIFO": True})


async def widen(gov: GovStack, subscription: str) -> None:
    """Let a subscription of the interface take another event type, too."""
    body = {"event_types": [{"name": MADE}, {"name": PAID}]}
    widened = await gov.api.call("PATCH", f"/subscriptions/{subscription}", SUBSCRIBER, json=body)
    assert widened.status_code == 200, widened.text


async def test_other_kinds_of_subscriptions_are_not_listed(gov: GovStack) -> None:
    body = {"name": "bound", "scopes": ["admin"], "application": "app"}
    gov.api.keys["bound"] = (await gov.api.made("/keys", body, SUBSCRIBER))["key"]
    for number, interests in enumerate(
        (
            None,
            [{"name": "order.*"}],
            [{"name": MADE}, {"name": PAID}],
            [{"name": MADE, "versions": [1]}],
        )
    ):
        made = {"name": f"v{number}", "type": "PULL", "event_types": interests}
        await gov.api.made(f"/rooms/{gov.room}/subscriptions", made, "bound")
    operational = {"name": "op", "type": "PULL", "operational": True}
    await gov.api.made(f"/rooms/{gov.room}/subscriptions", operational, "bound")
    assert (await gov.call("GET", "/api/v1/subs", SUBSCRIBER)).status_code == 404
    await gov.subscribe()
    listed = (await gov.call("GET", "/api/v1/subs", SUBSCRIBER)).json()
    assert [one["eventType"] for one in listed] == [MADE]


async def test_every_event_is_acknowledged_once_by_many_consumers(gov: GovStack) -> None:
    """Check that consumers of one client lose nothing, whatever they pull at the same moment."""
    await gov.subscribe()
    events = {await gov.publish(number) for number in range(20)}
    seen: list[str] = []

    async def consume() -> None:
        while (found := await gov.pull()) is not None:
            path = f"/pull/v1/{MADE}/{found['id']}"
            answer = await gov.call("DELETE", path, SUBSCRIBER)
            assert answer.status_code in {204, 409}, answer.text
            seen.append(found["id"])

    await asyncio.gather(*(consume() for _ in range(4)))
    assert set(seen) == events
    assert await gov.api.sql("SELECT DISTINCT state::text FROM deliveries") == [("delivered",)]
