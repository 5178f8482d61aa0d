"""Test the stored reason of a status: none of what is active, which would count as failing."""

from typing import Any

import pytest

from rooms.db.catalog.subscription_states import SubscriptionAction
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    Member,
    act,
    grant,
    history,
    member,
    read,
    revoke,
    shared_room,
    subscribe,
)
from tests.support.installation import until

WHY = "agreement 17/2026"
GONE = "410 for a day"


async def failing(api: Api, who: Member) -> list[dict[str, Any]]:
    """Return what the overview shows to a member."""
    answer = await api.call("GET", "/status", who.key)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["subscriptions"]
    return found


async def done(api: Api, who: Member, subscription: str, action: str, **body: Any) -> None:
    answer = await act(api, who, subscription, action, **body)
    assert answer.status_code == 200, answer.text


async def test_an_approval_with_a_reason_leaves_a_subscription_well(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    made = await subscribe(api, subscriber, room)
    await done(api, owner, made["id"], "approve", version=made["version"], reason=WHY)
    assert (await read(api, subscriber, made["id"]))["status_reason"] is None
    assert await failing(api, subscriber) == []
    assert (await history(api, subscriber, made["id"]))[-1]["reason"] == WHY


async def test_a_reinstatement_with_a_reason_leaves_a_subscription_well(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
    made = await subscribe(api, subscriber, room)
    await done(api, owner, made["id"], "suspend", reason="too loud")
    assert (await read(api, subscriber, made["id"]))["status_reason"] == "too loud"
    await done(api, owner, made["id"], "reinstate", reason=WHY)
    assert (await read(api, subscriber, made["id"]))["status_reason"] is None
    assert await failing(api, subscriber) == []
    assert (await history(api, subscriber, made["id"]))[-1]["reason"] == WHY


@pytest.mark.parametrize("suspended", ["owner", "subscriber"])
async def test_a_resumed_organisation_leaves_subscriptions_well(api: Api, suspended: str) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
    made = await subscribe(api, subscriber, room)
    who = {"owner": owner, "subscriber": subscriber}[suspended]
    for action in ("suspend", "resume"):
        answer = await api.call("POST", f"/organisations/{who.id}/{action}", "platform")
        assert answer.status_code == 200, answer.text
        api.services.keys.forget()
    now = await read(api, subscriber, made["id"])
    assert (now["status"], now["status_reason"]) == ("active", None)
    assert await failing(api, subscriber) == []


async def test_a_grant_that_is_back_leaves_subscriptions_well(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    granted = await grant(api, owner, room, subscriber.id, "subscribe")
    made = await subscribe(api, subscriber, room)

    async def has(status: str) -> bool:
        return bool((await read(api, subscriber, made["id"]))["status"] == status)

    await revoke(api, owner, room, granted)
    await until(lambda: has("suspended"), "the revocation")
    await grant(api, owner, room, subscriber.id, "subscribe")
    await until(lambda: has("active"), "the new grant")
    assert (await read(api, subscriber, made["id"]))["status_reason"] is None
    assert await failing(api, subscriber) == []


async def test_a_reinstated_subscription_has_the_reason_why_it_was_disabled(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
    made = await subscribe(api, subscriber, room, push_url="https://example.com/in")
    await api.sql(
        "WITH s AS (UPDATE subscriptions SET status = 'disabled', status_reason = %s"
        " WHERE id = %s RETURNING room_id, id)"
        " INSERT INTO subscription_history (room_id, subscription_id, action, status, reason,"
        " snapshot) SELECT room_id, id, %s, 'disabled', %s, '{}' FROM s",
        GONE,
        made["id"],
        SubscriptionAction.DISABLED.value,
        GONE,
    )
    await done(api, owner, made["id"], "suspend", reason="too loud")
    await done(api, owner, made["id"], "reinstate", reason=WHY)
    now = await read(api, subscriber, made["id"])
    assert (now["status"], now["status_reason"]) == ("disabled", GONE)
