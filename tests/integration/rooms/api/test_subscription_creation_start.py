"""Test subscriptions that start at a past time: which history they get, and the seam to live ones.

Oracle: of each message that the subscription would have received since its start, as far as its
organisation was entitled to it, it has exactly one delivery; of others none.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from delivery.maintenance import replay
from rooms.db.jobs import requests
from rooms.domain.ids import created_ms
from rooms.domain.job import JobKind
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
    publish,
    pulled,
    read,
    revoke,
    shared_room,
    subscribe,
)
from tests.support.installation import until
from tests.support.push_worker import ShiftedClock

LONG_AGO = "2020-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the replay at once: each test sees to it that earlier publishes are over."""
    monkeypatch.setattr(replay, "BACKFILL_AFTER_S", 0.0)


async def history(api: Api, who: Member, subscription: dict[str, Any]) -> list[str]:
    """Run the jobs, and return what the subscription has."""
    await jobs_of(api.services.writer).run(always)
    return await pulled(api, who, subscription["id"])


async def test_an_owners_subscription_gets_what_was_published_since_its_start(api: Api) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    messages = [await accepted(api, owner.key, room) for _ in range(5)]
    others = await accepted(api, owner.key, room, event_type=SENT)
    start = datetime.fromtimestamp(created_ms(messages[2]) / 1000, UTC).isoformat()
    fields: dict[str, Any] = {"event_types": [{"name": PAID}]}
    made = await subscribe(api, owner, room, start_at=start, **fields)
    assert datetime.fromisoformat(made["start_at"]) == datetime.fromisoformat(start)
    plain = await subscribe(api, owner, room, "plain")
    # Ids of messages begin with whole milliseconds, so one of the same millisecond may come, too.
    found = await history(api, owner, made)
    assert set(messages[2:]) <= set(found) <= set(messages)
    assert others not in found
    assert len(found) == len(set(found))
    assert await pulled(api, owner, plain["id"]) == []
    (job,) = (await api.call("GET", "/jobs", owner.key)).json()["items"]
    assert (job["kind"], job["state"]) == (JobKind.REPLAY, "done")


async def test_there_is_neither_a_gap_nor_a_double_to_what_is_published_live(api: Api) -> None:
    """Check it with publishers that go on while the subscription is created and replayed."""
    owner = await member(api)
    room = await shared_room(api, owner)
    expected: list[str] = []
    created = asyncio.Event()

    async def publish_on() -> None:
        count = 0
        while not created.is_set() or count < 5:
            count += created.is_set()
            expected.append(await accepted(api, owner.key, room))

    running = [asyncio.create_task(publish_on()) for _ in range(3)]

    async def enough() -> bool:
        return len(expected) >= 10

    await until(enough, "publishes before the subscription")
    made = await subscribe(api, owner, room, start_at=LONG_AGO)
    created.set()
    await asyncio.gather(*running)
    found = await history(api, owner, made)
    assert sorted(found) == sorted(expected)
    assert await history(api, owner, made) == []


async def test_a_start_in_the_past_needs_a_place_for_its_job(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_OPEN_JOBS", 1)
    owner = await member(api)
    room = await shared_room(api, owner)
    path = f"/rooms/{room}/subscriptions"

    async def create(name: str, **fields: Any) -> httpx.Response:
        return await api.call(
            "POST", path, owner.key, json={"name": name, "type": "PULL", **fields}
        )

    answers = await asyncio.gather(*[create(f"s{n}", start_at=LONG_AGO) for n in range(5)])
    assert sorted(answer.status_code for answer in answers) == [201, 429, 429, 429, 429]
    (refused, *_) = [answer for answer in answers if answer.status_code == 429]
    assert refused.json()["limit"] == "open_jobs"
    assert (await create("now")).status_code == 201


async def test_the_replay_waits_for_publishes_that_do_not_know_of_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    owner = await member(api)
    room = await shared_room(api, owner)
    message = await accepted(api, owner.key, room)
    made = await subscribe(api, owner, room, start_at=LONG_AGO)
    clock = ShiftedClock()
    jobs = jobs_of(api.services.writer, clock=clock)
    await jobs.run(always)
    # What counts is when its transaction was over, not when it began.
    await api.sql("UPDATE jobs SET created_at = created_at - interval '15 s'")
    await jobs.run(always)
    assert await pulled(api, owner, made["id"]) == []
    clock.ahead_s = 15.0
    await jobs.run(always)
    assert await pulled(api, owner, made["id"]) == [message]


async def test_a_slow_creation_has_no_gap_to_what_is_published_live(api: Api) -> None:
    """Its transaction began 90 s before its end. Until then publishes did not know of it."""
    owner = await member(api)
    room = await shared_room(api, owner)
    message = await accepted(api, owner.key, room)
    made = await subscribe(api, owner, room, start_at=LONG_AGO)
    await api.sql("UPDATE jobs SET created_at = created_at - interval '90 s'")
    assert await history(api, owner, made) == [message]


@pytest.mark.parametrize("behind_ms", [1, 30_000])
async def test_the_time_of_a_publish_counts_and_not_that_of_its_id(
    api: Api, behind_ms: int
) -> None:
    """An id is drawn before the publish is written, by another machine's clock."""
    owner = await member(api)
    room = await shared_room(api, owner)
    before, message = [await accepted(api, owner.key, room) for _ in range(2)]
    start = datetime.fromtimestamp((created_ms(message) + behind_ms) / 1000, UTC)
    one = timedelta(microseconds=1)
    for each, at in ((before, start - one), (message, start)):
        await api.sql("UPDATE messages SET published_at = %s WHERE id = %s", at, each)
    made = await subscribe(api, owner, room, start_at=LONG_AGO)
    await api.sql(
        "UPDATE jobs SET arguments = arguments || jsonb_build_object('since', %s::text)",
        start.isoformat(),
    )
    assert await history(api, owner, made) == [message]


async def test_a_grant_entitles_from_its_start_on(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    await accepted(api, owner.key, room)
    first = await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
    within = await accepted(api, owner.key, room)
    await accepted(api, owner.key, room, event_type=SENT)
    await revoke(api, owner, room, first)
    await accepted(api, owner.key, room)
    await grant(api, owner, room, subscriber.id, "subscribe")
    later = await accepted(api, owner.key, room, event_type=SENT)
    made = await subscribe(api, subscriber, room, start_at=LONG_AGO)
    assert made["status"] == "active"
    assert sorted(await history(api, subscriber, made)) == sorted([within, later])
    (job,) = (await api.call("GET", "/jobs", subscriber.key)).json()["items"]
    assert (job["result"], job["total"]) == ({"replayed": 2}, 2), "it counts no others"
    assert (await api.call("GET", "/jobs", owner.key)).json()["items"] == []


async def test_a_period_of_a_grant_is_exact_to_the_microsecond(api: Api) -> None:
    """Check a message right before the end of a grant, one at its end, and those of its begin."""
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    former = await grant(api, owner, room, subscriber.id, "subscribe")
    messages = [await accepted(api, owner.key, room) for _ in range(4)]
    await revoke(api, owner, room, former)
    await grant(api, owner, room, subscriber.id, "subscribe")
    begin = datetime(2026, 5, 1, 12, 0, 0, 1700, tzinfo=UTC)
    end = begin + timedelta(microseconds=900)
    await api.sql(
        "UPDATE grants SET starts_at = %s, revoked_at = %s WHERE id = %s", begin, end, former
    )
    one = timedelta(microseconds=1)
    for message, at in zip(messages, (begin - one, begin, end - one, end), strict=True):
        await api.sql("UPDATE messages SET published_at = %s WHERE id = %s", at, message)
    made = await subscribe(api, subscriber, room, start_at=LONG_AGO)
    assert sorted(await history(api, subscriber, made)) == sorted(messages[1:3])


async def test_an_automatic_room_gives_no_history(api: Api) -> None:
    """Check that without a grant an organisation is entitled from its subscription on only."""
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
    await accepted(api, owner.key, room)
    made = await subscribe(api, subscriber, room, start_at=LONG_AGO)
    later = await accepted(api, owner.key, room)
    assert await history(api, subscriber, made) == [later]


async def test_history_comes_on_approval_from_the_request_and_former_grants(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    await accepted(api, owner.key, room)
    former = await grant(api, owner, room, subscriber.id, "subscribe")
    granted = await accepted(api, owner.key, room)
    await revoke(api, owner, room, former)
    await accepted(api, owner.key, room)
    made = await subscribe(api, subscriber, room, start_at=LONG_AGO)
    assert made["status"] == "pending"
    requested = await accepted(api, owner.key, room)
    await jobs_of(api.services.writer).run(always)
    assert await api.sql("SELECT count(*) FROM deliveries") == [(0,)]
    assert (await read(api, owner, made["id"]))["start_at"] is not None, "the owner approves it"
    await approve(api, owner, made["id"])
    live = await accepted(api, owner.key, room)
    assert sorted(await history(api, subscriber, made)) == sorted([granted, requested, live])


async def test_messages_for_chosen_destinations_are_no_history(api: Api) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    other = await subscribe(api, owner, room, "other")
    chosen = await publish(api, owner.key, room, destinations=[other["destination"]])
    assert chosen.status_code == 202
    all_messages = await accepted(api, owner.key, room)
    made = await subscribe(api, owner, room, start_at=LONG_AGO)
    assert await history(api, owner, made) == [all_messages]


async def test_history_ends_where_the_lifetime_of_the_subscription_ended(api: Api) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    old, fresh = await accepted(api, owner.key, room), await accepted(api, owner.key, room)
    await api.sql(
        "UPDATE messages SET published_at = published_at - interval '1 h' WHERE id = %s", old
    )
    fields: dict[str, Any] = {"start_at": LONG_AGO, "message_expiration_ms": 600_000}
    made = await subscribe(api, owner, room, **fields)
    assert await history(api, owner, made) == [fresh]


async def test_a_start_in_the_future_is_refused(api: Api) -> None:
    owner = await member(api)
    room = await shared_room(api, owner)
    soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    path = f"/rooms/{room}/subscriptions"
    body: dict[str, Any] = {"name": "a", "type": "PULL"}
    before_year_1 = "0001-01-01T00:00:00+14:00"
    for wrong in (soon, "2020-01-01T00:00:00", "yesterday", before_year_1):
        started = body | {"start_at": wrong}
        answer = await api.call("POST", path, owner.key, json=started)
        assert answer.status_code == 422
        assert [one["field"] for one in answer.json()["errors"]] == ["start_at"]
    operational = body | {"operational": True, "start_at": LONG_AGO}
    answer = await api.call("POST", path, owner.key, json=operational)
    assert answer.status_code == 422
    made = await subscribe(api, owner, room, start_at="0001-01-01T00:00:00Z")
    assert await history(api, owner, made) == []
    changed = await api.call(
        "PATCH", f"/subscriptions/{made['id']}", owner.key, json={"start_at": LONG_AGO}
    )
    assert changed.status_code == 422


async def replayed(api: Api, who: Member, subscription: str) -> set[str]:
    """Replay everything, and return the messages that it gives."""
    answer = await act(api, who, subscription, "replay", since=LONG_AGO)
    assert answer.status_code == 202, answer.text
    await jobs_of(api.services.writer).run(always)
    return set(await pulled(api, who, subscription))


@pytest.mark.parametrize("policy", ["approval", "automatic"])
async def test_what_is_approved_later_is_replayed_from_then_on_only(api: Api, policy: str) -> None:
    """In an automatic room a change is approved by itself, and so bounds replays all the same."""

    async def approved() -> None:
        if policy == "approval":
            await approve(api, owner, made["id"])

    owner, subscriber = await member(api, "owner"), await member(api, "other")
    room = await shared_room(api, owner, visibility="listed", subscription_policy=policy)
    made = await subscribe(api, subscriber, room, event_types=[{"name": PAID}])
    first = await accepted(api, owner.key, room)
    await approved()
    await accepted(api, owner.key, room, event_type=SENT)
    paid = {first, await accepted(api, owner.key, room)}
    both = [{"name": PAID}, {"name": SENT}]
    assert (await change(api, subscriber, made["id"], event_types=both)).status_code == 200
    assert await replayed(api, subscriber, made["id"]) == paid
    await approved()
    assert await replayed(api, subscriber, made["id"]) == paid
    later = {await accepted(api, owner.key, room, event_type=name) for name in (PAID, SENT)}
    assert await replayed(api, subscriber, made["id"]) == paid | later
    # What it has no more, it does not get for the time since.
    only_sent = [{"name": SENT}]
    assert (await change(api, subscriber, made["id"], event_types=only_sent)).status_code == 200
    await approved()
    await accepted(api, owner.key, room)
    assert (await change(api, subscriber, made["id"], event_types=both)).status_code == 200
    await approved()
    assert await replayed(api, subscriber, made["id"]) == paid | later


async def test_a_room_that_approves_no_event_types_replays_all_since_the_request(api: Api) -> None:
    owner, subscriber = await member(api, "owner"), await member(api, "other")
    room = await shared_room(
        api, owner, visibility="listed", subscription_policy="approval", reapprove_on=["push_url"]
    )
    before = await accepted(api, owner.key, room)
    made = await subscribe(api, subscriber, room, event_types=[{"name": PAID}])
    await approve(api, owner, made["id"])
    sent = await accepted(api, owner.key, room, event_type=SENT)
    await change(api, subscriber, made["id"], event_types=[{"name": PAID}, {"name": SENT}])
    assert await replayed(api, subscriber, made["id"]) == {sent}
    assert before != sent


async def policy(api: Api, owner: Member, room: int, *fields: str) -> None:
    """Ask for the approval of changes of these fields from now on."""
    body = {"reapprove_on": list(fields)}
    answer = await api.call("PATCH", f"/rooms/{room}", owner.key, json=body)
    assert answer.status_code == 200, answer.text


async def test_versions_that_were_approved_later_are_replayed_from_then_on_only(api: Api) -> None:
    owner, subscriber = await member(api, "owner"), await member(api, "other")
    room = await shared_room(api, owner, visibility="listed", subscription_policy="approval")
    types = (await api.call("GET", f"/rooms/{room}/event-types", owner.key)).json()["items"]
    (paid,) = [one["name"] for one in types if one["name"] == PAID]
    path = f"/rooms/{room}/event-types/{paid}/versions"
    assert (await api.call("POST", path, owner.key, json={"schema": {}})).status_code == 201
    first = [{"name": PAID, "versions": [1]}]
    made = await subscribe(api, subscriber, room, event_types=first)
    await approve(api, owner, made["id"])

    async def both() -> dict[int, str]:
        return {number: await accepted(api, owner.key, room, version=number) for number in (1, 2)}

    early = await both()
    await change(api, subscriber, made["id"], event_types=[{"name": PAID}])
    await approve(api, owner, made["id"])
    late = await both()
    assert len(await pulled(api, subscriber, made["id"])) == 3
    given = await replayed(api, subscriber, made["id"])
    assert given == {early[1], *late.values()}, "version 2 from its approval on"


async def test_an_approved_filter_bounds_the_replay_of_its_time(api: Api) -> None:
    """Check that an approved change of the filter opens nothing that it did not match before."""
    owner, subscriber = await member(api, "owner"), await member(api, "other")
    fields = {"visibility": "listed", "subscription_policy": "approval"}
    room = await shared_room(api, owner, **fields, reapprove_on=["event_types", "filter"])
    narrow = "payload.rate < 5"
    made = await subscribe(api, subscriber, room, filter=narrow)
    await approve(api, owner, made["id"])

    async def rates() -> dict[int, str]:
        return {
            rate: await accepted(api, owner.key, room, payload={"rate": rate}) for rate in (1, 9)
        }

    early = await rates()
    await change(api, subscriber, made["id"], filter=None)
    await approve(api, owner, made["id"])
    late = await rates()
    assert len(await pulled(api, subscriber, made["id"])) == 3
    assert await replayed(api, subscriber, made["id"]) == set(late.values())
    await change(api, subscriber, made["id"], filter=narrow)
    await approve(api, owner, made["id"])
    assert await replayed(api, subscriber, made["id"]) == {early[1], late[1]}


@pytest.mark.parametrize("asked", [["event_types"], ["event_types", "filter"]])
async def test_a_policy_that_asks_no_more_opens_nothing_of_the_time_before(
    api: Api, asked: list[str]
) -> None:
    owner, subscriber = await member(api, "owner"), await member(api, "other")
    fields = {"visibility": "listed", "subscription_policy": "approval"}
    room = await shared_room(api, owner, **fields, reapprove_on=asked)
    chosen: dict[str, Any] = {"event_types": [{"name": PAID}], "filter": "payload.rate < 5"}
    made = await subscribe(api, subscriber, room, **chosen)
    await approve(api, owner, made["id"])

    async def some() -> dict[tuple[str, int], str]:
        return {
            (name, rate): await accepted(
                api, owner.key, room, event_type=name, payload={"rate": rate}
            )
            for name in (PAID, SENT)
            for rate in (1, 9)
        }

    early = await some()
    await policy(api, owner, room)
    wide = await change(api, subscriber, made["id"], event_types=None, filter=None)
    assert (wide.json()["proposal"], wide.json()["event_types"]) == (None, None)
    await api.sql(
        "UPDATE subscription_history SET at = at + interval '1 h' WHERE action = 'changed'"
    )
    late = await some()
    await policy(api, owner, room, "push_url")
    assert len(await pulled(api, subscriber, made["id"])) == 5
    given = await replayed(api, subscriber, made["id"])
    paid = {one[PAID, rate] for one in (early, late) for rate in (1, 9)}
    paid = paid if asked == ["event_types"] else set()
    assert given == {*late.values(), *paid}
    await policy(api, owner, room, "push_url", *asked)
    await policy(api, owner, room)
    assert await replayed(api, subscriber, made["id"]) == paid, "free from now on only"
