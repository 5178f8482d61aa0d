"""Test that status and sideline of a shared room are only the subscriber's."""

from typing import Any

import pytest

from rooms.db.queries import failures
from tests.integration.rooms.api.conftest import MADE, PAID, Shared

_SIDELINED = """
    WITH d AS (
        UPDATE deliveries SET state = 'sidelined', reason = 'attempts_exhausted', attempts = 4, last_error = 'status: busy'
        WHERE subscription_id = %s RETURNING room_id, id, subscription_id, generation
    ), o AS (DELETE FROM outbox WHERE id IN (SELECT id FROM d))
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, 'attempts_exhausted' FROM d
"""
_HELD = """
    WITH o AS (DELETE FROM outbox WHERE subscription_id = %s RETURNING room_id, id, subscription_id, priority),
    d AS (UPDATE deliveries SET state = 'held', reason = 'paused' WHERE id IN (SELECT id FROM o))
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, 0, 'paused' FROM o
"""


async def backlog(shared: Shared, key: str) -> dict[str, Any]:
    found: dict[str, Any] = (await shared.read("/status", key))["backlog"]
    return {
        "due": found["push"]["due"],
        "held": found["held"],
        "sidelined": found["sidelined"],
        "leased": found["leased"],
    }


@pytest.fixture(autouse=True, params=["each subscription", "by symptoms"])
def statement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with both statements: that of few subscriptions, and that of many."""
    if request.param == "by symptoms":
        monkeypatch.setattr(failures, "MANY_SUBSCRIPTIONS", -1)


async def test_the_backlog_is_that_of_the_own_subscriptions(shared: Shared) -> None:
    for event_type in (MADE, PAID, PAID):
        await shared.publish("publisher", event_type)
    await shared.api.sql(_SIDELINED, shared.subscriptions["first"])
    await shared.api.sql(_HELD, shared.subscriptions["second"])
    await shared.api.sql(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until)"
        " SELECT room_id, id, subscription_id, 0, now() FROM deliveries WHERE subscription_id = %s",
        shared.subscriptions["first"],
    )
    nothing = {"due": 0, "held": {}, "sidelined": {}, "leased": 0}
    for key, expected in (
        ("admin", {"due": 3}),
        ("first", {"sidelined": {"attempts_exhausted": 3}, "leased": 3}),
        ("second", {"held": {"paused": 2}}),
        ("publisher", {}),
        ("stranger", {}),
    ):
        assert await backlog(shared, key) == nothing | expected, key
    await shared.key("first", "narrow", ["operate"], rooms=[shared.room + 1])
    assert await backlog(shared, "narrow") == nothing


async def test_only_the_subscriber_sees_that_its_subscription_fails(shared: Shared) -> None:
    await shared.publish("publisher")
    await shared.api.sql(_SIDELINED, shared.subscriptions["first"])
    for key, names in (("first", ["of-first"]), ("admin", []), ("second", []), ("publisher", [])):
        found = await shared.read("/status", key)
        assert [one["name"] for one in found["subscriptions"]] == names
        assert found["subscriptions_total"] == len(names)
    await shared.key("first", "narrow", ["operate"], rooms=[shared.room + 1])
    assert (await shared.read("/status", "narrow"))["subscriptions_total"] == 0
