"""Test the last hour by the minute: what it counts, and who sees it."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from delivery.maintenance.usage import count_usage
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    Member,
    accepted,
    grant,
    member,
    pulled,
    shared_room,
    subscribe,
)
from tests.support.log_rows import logging

Found = dict[str, Any]


def total(found: Found, name: str) -> int:
    return sum(one[name] for one in found["minutes"])


async def activity(api: Api, key: str, path: str = "/activity", **params: Any) -> Found:
    answer = await api.call("GET", path, key, params=params)
    assert answer.status_code == 200, answer.text
    found: Found = answer.json()
    return found


@pytest.fixture
async def world(api: Api) -> dict[str, Any]:
    """Let two subscribers share a room, each with its own queue, of which one is pulled."""
    owner, one, two = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    queues = {}
    for subscriber in (one, two):
        await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
        made = await subscribe(api, subscriber, room, event_types=[{"name": PAID}])
        queues[subscriber.id] = made["id"]
    for _ in range(3):
        await accepted(api, owner.key, room, event_type=PAID)
    assert len(await pulled(api, one, queues[one.id])) == 3
    await count_usage(api.services.engine, lambda: True)
    return {"owner": owner, "one": one, "two": two, "room": room, "queues": queues}


async def test_each_sees_its_own(api: Api, world: dict[str, Any]) -> None:
    owner, one, two = (world[name] for name in ("owner", "one", "two"))
    for who, made, delivered in ((one, 3, 3), (two, 3, 0), (owner, 0, 0)):
        found = await activity(api, who.key)
        assert len(found["minutes"]) == 60
        assert (total(found, "deliveries"), total(found, "delivered")) == (made, delivered)
        assert found["latency"] == {"p50_ms": None, "p95_ms": None, "p99_ms": None}
    found = await activity(api, owner.key)
    begins = [datetime.fromisoformat(minute["start"]) for minute in found["minutes"]]
    assert {later - earlier for earlier, later in pairwise(begins)} == {timedelta(minutes=1)}
    assert begins[-1] <= datetime.now(UTC) < begins[-1] + timedelta(minutes=2)


async def test_a_subscription_is_seen_by_both_sides_only(api: Api, world: dict[str, Any]) -> None:
    owner, one, two = (world[name] for name in ("owner", "one", "two"))
    path = f"/subscriptions/{world['queues'][one.id]}/activity"
    for who in (one, owner):
        assert total(await activity(api, who.key, path), "delivered") == 3
    stranger = await member(api)
    for other in (two, stranger):
        assert (await api.call("GET", path, other.key)).status_code == 404


async def test_the_platform_sees_all(api: Api, world: dict[str, Any]) -> None:
    one: Member = world["one"]
    found = await activity(api, "platform", organisation_id="*")
    assert (total(found, "deliveries"), total(found, "delivered")) == (6, 3)
    assert total(await activity(api, "platform", organisation_id=one.id), "deliveries") == 3
    for other in ("*", world["two"].id):
        refused = await api.call("GET", f"/activity?organisation_id={other}", one.key)
        assert refused.status_code == 403
    wrong = await api.call("GET", "/activity?organisation_id=x", "platform")
    assert wrong.status_code == 404


async def test_a_restricted_key_sees_its_subscriptions(api: Api, world: dict[str, Any]) -> None:
    one: Member = world["one"]
    queue = world["queues"][one.id]
    body = {"name": "x", "scopes": ["view"], "subscriptions": [queue]}
    key = (await api.made("/keys", body, one.key))["key"]
    assert total(await activity(api, key, f"/subscriptions/{queue}/activity"), "delivered") == 3
    assert (await api.call("GET", "/activity", key)).status_code == 403


async def test_failures_and_latencies(api: Api) -> None:
    room = (await api.room())["id"]
    hook = (await api.subscription(room))["id"]
    with logging(api.url, 77) as log:
        for latency_ms in (10, 10, 10, 900):
            log.write(room, "attempted", subscription=hook, error="status", latency_ms=latency_ms)
        log.write(room, "delivered", subscription=hook, status=204, latency_ms=12)
        log.write(room, "sidelined", subscription=hook)
        log.commit()
    await count_usage(api.services.engine, lambda: True)
    for path in ("/activity", f"/subscriptions/{hook}/activity"):
        found = await activity(api, "view", path)
        names = ("failed", "delivered", "sidelined", "deliveries", "expired")
        assert [total(found, name) for name in names] == [4, 1, 1, 0, 0]
        assert 8 <= found["latency"]["p50_ms"] <= 16
        assert 724 <= found["latency"]["p99_ms"] <= 1024
        busy = [one for one in found["minutes"] if one["failed"]]
        assert all(8 <= one["p50_ms"] <= 16 for one in busy)
        assert found["complete_until"] is not None
