"""Test that a message for some destinations reaches no other subscriber later."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.maintenance import replay
from tests.integration.delivery.maintenance.test_replay import jobs_of
from tests.integration.delivery.maintenance.test_service import always
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    SENT,
    Member,
    accepted,
    approve,
    grant,
    member,
    pulled,
    shared_room,
    subscribe,
)


async def replayed(api: Api, who: Member, subscription: dict[str, Any]) -> list[str]:
    """Replay everything, and return what came."""
    since = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    path = f"/subscriptions/{subscription['id']}/replay"
    answer = await api.call("POST", path, who.key, json={"since": since})
    assert answer.status_code == 202, answer.text
    await jobs_of(api.services.writer).run(always)
    return sorted(await pulled(api, who, subscription["id"]))


async def test_a_replay_gives_no_message_for_others(api: Api) -> None:
    owner, one, other = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    since = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
    for who in (one, other):
        await grant(api, owner, room, who.id, "subscribe", starts_at=since)
    first, second = await subscribe(api, one, room), await subscribe(api, other, room)
    public = await accepted(api, owner.key, room)
    private = await accepted(api, owner.key, room, destinations=[first["destination"]])
    scheduled = await accepted(
        api, owner.key, room, destinations=[first["destination"]], business_key="b"
    )
    every = [public, private, scheduled]
    assert sorted(await pulled(api, one, first["id"])) == sorted(every)
    assert await pulled(api, other, second["id"]) == [public]
    assert await replayed(api, one, first) == sorted(every), "it had them before"
    assert await replayed(api, other, second) == [public]
    later = await subscribe(api, other, room, "later")
    assert await replayed(api, other, later) == [public]
    own = await subscribe(api, owner, room, "own")
    assert await replayed(api, owner, own) == sorted(every), "the room's messages are the owner's"


async def test_a_backfill_gives_no_message_for_others(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "BACKFILL_AFTER_S", 0.0)
    owner, one, other = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    first = await subscribe(api, one, room)
    await approve(api, owner, first["id"])
    second = await subscribe(api, other, room, backfill=True)
    public = await accepted(api, owner.key, room)
    private = await accepted(api, owner.key, room, destinations=[first["destination"]])
    await approve(api, owner, second["id"])
    await jobs_of(api.services.writer).run(always)
    assert await pulled(api, other, second["id"]) == [public]
    assert sorted(await pulled(api, one, first["id"])) == sorted([public, private])


async def test_a_batch_may_have_messages_for_some(api: Api) -> None:
    owner, one, other = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner)
    await grant(api, owner, room, "*", "subscribe")
    first, second = await subscribe(api, one, room), await subscribe(api, other, room)
    chosen = ([first["destination"]], None, [second["destination"]], None)
    body = {
        "messages": [
            {"event_type": "order", "payload": 1, "destinations": destinations}
            for destinations in chosen
        ]
    }
    answer = await api.call("POST", f"/rooms/{room}/messages/batch", owner.key, json=body)
    found = [message["message_id"] for message in answer.json()["messages"]]
    assert await replayed(api, one, first) == sorted([*found[:2], found[3]] * 2)
    assert await replayed(api, other, second) == sorted(found[1:] * 2)


async def test_a_replay_shows_nothing_about_messages_for_others(api: Api) -> None:
    owner, other = [await member(api) for _ in range(2)]
    room = await shared_room(api, owner)
    since = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
    await grant(api, owner, room, other.id, "subscribe", event_types=[PAID], starts_at=since)
    for event_type in (PAID, SENT, SENT, SENT):
        await accepted(api, owner.key, room, event_type=event_type)
    made = await subscribe(api, other, room)
    assert len(await replayed(api, other, made)) == 1
    (job,) = (await api.call("GET", "/jobs", other.key)).json()["items"]
    assert (job["state"], job["done"], job["total"]) == ("done", 1, 1)
    assert job["result"] == {"replayed": 1}
