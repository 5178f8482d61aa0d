"""Replays in another organisation's room: they show nothing that the subscriber may not see."""

from typing import Any

import pytest

from delivery.maintenance import replay
from delivery.maintenance.usage import count_usage
from tests.integration.delivery.maintenance.test_replay import jobs_of
from tests.integration.delivery.maintenance.test_service import always
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    SENT,
    Member,
    accepted,
    act,
    approve,
    change,
    grant,
    member,
    pulled,
    read,
    revoke,
    shared_room,
    subscribe,
)
from tests.integration.rooms.api.scenarios.test_lost_grants import cancel_ungranted

LONG_AGO = "2020-01-01T00:00:00Z"
MATCHES = "payload.secret in ['a', 'public']"
OTHER = "payload.secret in ['b', 'public']"


async def approved(
    api: Api, owner: Member, subscriber: Member, **fields: Any
) -> tuple[int, dict[str, Any]]:
    """Return a room, and the subscription of another organisation that its owner approved."""
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    made = await subscribe(api, subscriber, room, **fields)
    await approve(api, owner, made["id"])
    return room, made


async def withdrawn(api: Api, owner: Member, room: int, **fields: Any) -> str:
    message = await accepted(api, owner.key, room, **fields)
    answer = await api.call("DELETE", f"/messages/{message}", owner.key)
    assert answer.status_code == 200, answer.text
    return message


async def replayed(api: Api, who: Member, subscription: str) -> tuple[Any, ...]:
    """Replay everything; return what the job and the deliveries show."""
    answer = await act(api, who, subscription, "replay", since=LONG_AGO)
    assert answer.status_code == 202, answer.text
    await jobs_of(api.services.writer).run(always)
    job = (await api.call("GET", f"/jobs/{answer.json()['job_id']}", who.key)).json()
    assert job["state"] == "done", job
    given = await pulled(api, who, subscription)
    listed = await api.call("GET", f"/subscriptions/{subscription}/deliveries?limit=200", who.key)
    messages = {(one["message_id"], one["state"]) for one in listed.json()["items"]}
    return job["done"], job["total"], job["result"], given, messages


async def test_a_replay_does_not_show_what_a_filter_finds_in_a_hidden_message(api: Api) -> None:
    """Replay with a filter that matches a withdrawn and a delayed message, and with another."""
    owner, subscriber = await member(api), await member(api)
    room, made = await approved(api, owner, subscriber, filter="payload.secret == 'public'")
    await subscribe(api, owner, room, "own")
    public = await accepted(api, owner.key, room, payload={"secret": "public"})
    await withdrawn(api, owner, room, payload={"secret": "a"})
    await accepted(api, owner.key, room, payload={"secret": "a"}, delay_ms=3_600_000)
    assert await pulled(api, subscriber, made["id"]) == [public]
    shown = []
    for expression in (MATCHES, OTHER):
        answer = await change(api, subscriber, made["id"], filter=expression)
        assert answer.status_code == 200, answer.text
        shown.append(await replayed(api, subscriber, made["id"]))
    assert shown[0] == shown[1]
    assert shown[0] == (1, 1, {"replayed": 1}, [public], {(public, "delivered")})


async def test_a_delayed_message_is_replayed_once_it_is_due(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room, made = await approved(api, owner, subscriber, filter="payload.secret == 'public'")
    delayed = await accepted(api, owner.key, room, payload={"secret": "a"}, delay_ms=3_600_000)
    await change(api, subscriber, made["id"], filter=MATCHES)
    assert (await replayed(api, subscriber, made["id"]))[3] == []
    await api.sql("UPDATE messages SET due_at = now() - interval '1 s'")
    assert (await replayed(api, subscriber, made["id"]))[3] == [delayed]


async def test_a_backfill_shows_nothing_of_withdrawn_messages_and_gives_delayed_ones(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a delayed message comes, since no publish has given it to the subscription.

    Neither its job nor usage counts that yet, for the filter was evaluated at once.
    """
    monkeypatch.setattr(replay, "BACKFILL_AFTER_S", 0.0)
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    await subscribe(api, owner, room, "own")
    made = await subscribe(api, subscriber, room, backfill=True, filter=MATCHES)
    await withdrawn(api, owner, room, payload={"secret": "a"})
    delayed = await accepted(api, owner.key, room, payload={"secret": "a"}, delay_ms=3_600_000)
    public = await accepted(api, owner.key, room, payload={"secret": "public"})
    await approve(api, owner, made["id"])
    await jobs_of(api.services.writer).run(always)
    (job,) = (await api.call("GET", "/jobs", subscriber.key)).json()["items"]
    assert (job["state"], job["done"], job["result"]) == ("done", 1, {"replayed": 1})
    given = await api.sql(
        "SELECT message_id::text FROM deliveries WHERE subscription_id = %s ORDER BY id", made["id"]
    )
    assert given == [(delayed,), (public,)]
    waits = (
        "SELECT message_id::text, delay_ms > 0 FROM log_entries WHERE kind = 'replayed' ORDER BY 2"
    )
    assert await api.sql(waits) == [(delayed, True), (public, None)], "else it would seem lost"
    await count_usage(api.services.engine, always)
    for who, expected in ((owner, 2), (subscriber, 1)):
        usage = (await api.call("GET", "/usage?by=organisation", who.key)).json()["items"]
        rows = [one for one in usage if one["organisation_id"] == subscriber.id]
        assert [one["deliveries"] for one in rows] == [expected]
    path = f"/subscriptions/{made['id']}/activity"
    minutes = (await api.call("GET", path, subscriber.key)).json()["minutes"]
    assert sum(one["deliveries"] for one in minutes) == 1


async def test_a_backfill_does_not_count_what_a_suspension_holds(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may begin long after the approval, and then reads what was published until then."""
    monkeypatch.setattr(replay, "BACKFILL_AFTER_S", 0.0)
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    await subscribe(api, owner, room, "own")
    made = await subscribe(api, subscriber, room, backfill=True, filter=MATCHES)
    await accepted(api, owner.key, room, payload={"secret": "a"})
    await approve(api, owner, made["id"])
    assert (await act(api, owner, made["id"], "suspend")).status_code == 200
    await accepted(api, owner.key, room, payload={"secret": "a"})
    await jobs_of(api.services.writer).run(always)
    (job,) = (await api.call("GET", "/jobs", subscriber.key)).json()["items"]
    assert (job["state"], job["done"], job["result"]) == ("done", 1, {"replayed": 1})


async def test_a_suspended_subscription_replays_nothing(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    _, made = await approved(api, owner, subscriber)
    assert (await act(api, owner, made["id"], "suspend")).status_code == 200
    answer = await act(api, subscriber, made["id"], "replay", since=LONG_AGO)
    assert answer.status_code == 409, answer.text
    assert "suspended" in answer.json()["detail"]
    assert (await act(api, owner, made["id"], "reinstate")).status_code == 200
    answer = await act(api, subscriber, made["id"], "replay", since=LONG_AGO)
    assert answer.status_code == 202, answer.text


async def test_a_slow_replay_gives_nothing_that_a_narrower_grant_does_not_cover(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow grant and subscription while the rest of a page that was read waits for its rate.

    What the replay gave before is cancelled, so nothing of the other type is left or comes.
    """
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    wide = await grant(api, owner, room, subscriber.id, "subscribe", event_types=["order.*"])
    made = await subscribe(api, subscriber, room)
    sent = [await accepted(api, owner.key, room, event_type=SENT) for _ in range(3)]
    paid = await accepted(api, owner.key, room, event_type=PAID)
    assert await pulled(api, subscriber, made["id"]) == [*sent, paid]
    waits = 0

    async def narrow(_seconds: float, _go_on: Any) -> bool:
        nonlocal waits
        waits += 1
        if waits == 2:
            await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
            await revoke(api, owner, room, wide)
            answer = await change(api, subscriber, made["id"], event_types=[{"name": PAID}])
            assert answer.status_code == 200, answer.text
            await cancel_ungranted(api)
            assert (await read(api, subscriber, made["id"]))["status"] == "active"
        return True

    monkeypatch.setattr(replay, "sleep_unless_stopped", narrow)
    answer = await act(api, subscriber, made["id"], "replay", since=LONG_AGO, rate_per_s=1)
    assert answer.status_code == 202, answer.text
    await jobs_of(api.services.writer).run(always)
    assert waits > 1
    assert await pulled(api, subscriber, made["id"]) == [paid]
