"""Test subscriptions to rooms of others: their states, history, backfill, and who sees what."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from delivery.maintenance import replay
from rooms.api.deps import GuestChangeLimiter
from rooms.db.connection import open_connection
from rooms.db.queue.endpoints import load_endpoints
from rooms.db.queue.throttle import SharedLaneState
from rooms.domain.ids import RoomId, SubscriptionId
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
    history,
    member,
    pulled,
    read,
    revoke,
    shared_room,
    subscribe,
)
from tests.integration.rooms.api.scenarios.test_lost_grants import cancel_ungranted
from tests.support.installation import until

SECRETS = ("secret-path", "secret-query", "secret-header", "secret-filter")
PUSH = {
    "push_url": "https://hooks.example.com/secret-path?token=secret-query",
    "headers": {"X-Token": "secret-header"},
    "filter": "payload.city == 'secret-filter'",
}


async def pending(api: Api, **fields: Any) -> tuple[Member, Member, int, str]:
    """Return owner and subscriber of a room that asks for approval, and what waits for it."""
    owner, subscriber = await member(api, "owner"), await member(api, "subscriber")
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    made = await subscribe(api, subscriber, room, **fields)
    assert made["status"] == "pending"
    return owner, subscriber, room, made["id"]


class Model:
    """Decide what each action does, as docs/design/sharing.md says, independently of the code."""

    def __init__(self) -> None:
        self.own, self.held, self.ended = "pending", False, ""
        self.steps = ["created"]

    @property
    def status(self) -> str:
        if self.ended or self.own == "pending":
            return self.ended or "pending"
        return "suspended" if self.held else self.own

    def take(self, action: str) -> bool:
        """Return whether the action is possible, and do it."""
        is_pending = self.own == "pending"
        possible = {
            "approve": is_pending,
            "reject": is_pending,
            "suspend": True,
            "reinstate": self.held,
            "terminate": True,
            "pause": not is_pending,
            "resume": not is_pending,
        }[action]
        if self.ended or not possible:
            return False
        before = (self.own, self.held)
        self.own = {"approve": "active", "pause": "paused", "resume": "active"}.get(
            action, self.own
        )
        self.held = {"suspend": True, "reinstate": False}.get(action, self.held)
        self.ended = {"reject": "rejected", "terminate": "terminated"}.get(action, "")
        if action not in {"pause", "resume"} or before != (self.own, self.held):
            self.steps.append(PAST[action])
        return True


PAST = {
    "approve": "approved",
    "reject": "rejected",
    "suspend": "suspended",
    "reinstate": "reinstated",
    "terminate": "terminated",
    "pause": "paused",
    "resume": "resumed",
}
OWNERS = ("approve", "reject", "suspend", "reinstate", "terminate")
SUBSCRIBERS = ("pause", "resume", "terminate")


@pytest.mark.parametrize("seed", range(4))
async def test_every_walk_through_the_states_is_as_described(api: Api, seed: int) -> None:
    owner, subscriber, room, identity = await pending(api)
    draw, model, number = random.Random(seed), Model(), 0
    for _ in range(60):
        theirs = draw.random() < 0.5
        action = draw.choice(SUBSCRIBERS if theirs else OWNERS)
        if action in {"terminate", "reject"} and draw.random() < 0.6:
            continue
        who = subscriber if theirs else owner
        body = {"version": (await read(api, owner, identity))["version"]}
        answer = await act(api, who, identity, action, **(body if action == "approve" else {}))
        assert answer.status_code == (200 if model.take(action) else 409), (model.steps, action)
        for reader in (owner, subscriber):
            assert (await read(api, reader, identity))["status"] == model.status
            steps = await history(api, reader, identity)
            assert [one["action"] for one in steps] == model.steps
            assert steps[-1]["status"] == model.status
        if model.ended and draw.random() < 0.5:
            # Its name is free again, and its own history stays its own.
            number += 1
            identity = (await subscribe(api, subscriber, room))["id"]
            model = Model()
    assert number or len(model.steps) > 5


async def test_the_history_names_actors_and_shows_nothing_secret(api: Api) -> None:
    owner, subscriber, room, identity = await pending(api, **PUSH)
    created = await api.made(
        f"/rooms/{room}/subscriptions", {"name": "x", "type": "PUSH", **PUSH}, subscriber.key
    )
    await approve(api, owner, identity)
    await change(api, subscriber, identity, push_url="https://other.example.com/secret-path")
    await change(api, subscriber, identity, headers={"X-Token": "secret-header"})
    await approve(api, owner, identity)
    await act(api, owner, identity, "suspend", reason="too loud")
    await act(api, subscriber, identity, "pause")
    await act(api, owner, identity, "reinstate", reason="well again")
    await act(api, subscriber, identity, "terminate", reason="moved")
    expected = [
        ("created", "pending", subscriber, None),
        ("approved", "active", owner, None),
        ("proposed", "active", subscriber, None),
        ("changed", "active", subscriber, None),
        ("approved", "active", owner, None),
        ("suspended", "suspended", owner, "too loud"),
        ("paused", "suspended", subscriber, None),
        ("reinstated", "paused", owner, "well again"),
        ("terminated", "terminated", subscriber, "moved"),
    ]
    for reader in (owner, subscriber):
        steps = await history(api, reader, identity)
        assert [(one["action"], one["status"], one["reason"]) for one in steps] == [
            (action, status, reason) for action, status, _, reason in expected
        ]
        for step, (_, _, actor, _) in zip(steps, expected, strict=True):
            assert (step["organisation_id"], step["organisation"]) == (actor.id, actor.name)
            assert (step["key_id"] is not None) == (actor == reader)
            assert (step["key_name"] is not None) == (actor == reader)
        versions = [one["snapshot"]["version"] for one in steps]
        assert versions == sorted(versions)
        assert [one["snapshot"]["target"] for one in steps][3:5] == [
            "https://hooks.example.com",
            "https://other.example.com",
        ]
    seen = [
        str(await history(api, owner, identity)),
        str(await read(api, owner, identity)),
        (await api.call("GET", f"/rooms/{room}/subscriptions", owner.key)).text,
        (await api.call("GET", "/subscriptions?role=owner", owner.key)).text,
        (await api.call("GET", "/journal?limit=200", owner.key)).text,
    ]
    own = [
        str(await history(api, subscriber, identity)),
        (await api.call("GET", "/journal?limit=200", subscriber.key)).text,
    ]
    for secret in (*SECRETS, created["secret"]):
        assert not [text for text in seen if secret in text], secret
        if secret != "secret-filter":
            assert not [text for text in own if secret in text], secret


async def test_a_disabling_by_the_service_is_in_the_history_like_other_steps(api: Api) -> None:
    owner, subscriber, room, identity = await pending(
        api, **PUSH, event_types=[{"name": PAID, "versions": [1]}]
    )
    await approve(api, owner, identity)
    await change(api, subscriber, identity, push_url="https://other.example.com/secret-path")
    found = SubscriptionId(identity)
    async with open_connection(api.url, name="test") as connection:
        records = await load_endpoints(connection, [(RoomId(room), found)])
    assert await SharedLaneState(api.services.writer).disable(records[found], reason="HTTP 410")
    for reader in (owner, subscriber):
        proposed, disabled = [
            one["snapshot"] for one in (await history(api, reader, identity))[-2:]
        ]
        assert (proposed["target"], proposed["proposal"]) == (
            "https://hooks.example.com",
            {"target": "https://other.example.com"},
        )
        assert disabled == {**proposed, "version": proposed["version"] + 1}
        assert "secret-path" not in str(disabled)


@pytest.mark.parametrize("ending", ["terminate", "reject", "delete"])
async def test_a_deletion_by_the_subscriber_leaves_the_history_to_both_sides(
    api: Api, ending: str
) -> None:
    """A guest cannot erase the owner's proof of what was approved and ended."""
    owner, subscriber, room, identity = await pending(api)
    stranger = await member(api)
    if ending != "reject":
        await approve(api, owner, identity)
    if ending != "delete":
        assert (await act(api, owner, identity, ending, reason="over")).status_code == 200
    before = await history(api, owner, identity)
    deleted = await api.call("DELETE", f"/subscriptions/{identity}", subscriber.key)
    assert deleted.status_code == 202, deleted.text
    for reader in (owner, subscriber):
        steps = await history(api, reader, identity)
        assert [one["action"] for one in steps] == [*(one["action"] for one in before), "deleted"]
        assert (steps[-1]["status"], steps[-1]["organisation"]) == ("deleted", subscriber.name)
        for path in ("", "/counts"):
            gone = await api.call("GET", f"/subscriptions/{identity}{path}", reader.key)
            assert gone.status_code == 404, path
    assert (await history(api, owner, identity))[:-1] == before
    path = f"/subscriptions/{identity}/history"
    assert (await api.call("GET", path, stranger.key)).status_code == 404
    confirm = (await api.call("GET", f"/rooms/{room}", owner.key)).json()["name"]
    closed = await api.call("DELETE", f"/rooms/{room}?confirm={confirm}", owner.key)
    assert closed.status_code == 202, closed.text
    assert (await api.call("GET", path, owner.key)).status_code == 404


async def test_what_is_pending_gets_nothing_and_what_is_approved_gets_the_rest(api: Api) -> None:
    owner, subscriber, room, identity = await pending(api)
    await accepted(api, owner.key, room)
    refused = await api.call(
        "POST",
        f"/subscriptions/{identity}/pull",
        subscriber.key,
        json={"max_messages": 1, "wait_ms": 0, "lease_ms": 1000},
    )
    assert refused.json().get("messages", []) == []
    assert await api.sql("SELECT count(*) FROM deliveries") == [(0,)]
    await approve(api, owner, identity)
    later = await accepted(api, owner.key, room)
    assert await pulled(api, subscriber, identity) == [later]


async def test_a_backfill_gives_exactly_what_was_published_since_the_request(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check it with publishes that run while the owner approves: none is lost, none comes twice."""
    owner, early = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    await accepted(api, owner.key, room)
    made = await subscribe(api, early, room, backfill=True, event_types=[{"name": PAID}])
    plain = await subscribe(api, early, room, "plain")
    expected: list[str] = []
    over = asyncio.Event()

    async def publish_on() -> None:
        while not over.is_set() or len(expected) < 20:
            expected.append(await accepted(api, owner.key, room))
            await accepted(api, owner.key, room, event_type=SENT)

    running = [asyncio.create_task(publish_on()) for _ in range(3)]

    async def enough() -> bool:
        return len(expected) >= 10

    await until(enough, "publishes before the approval")
    await approve(api, owner, made["id"])
    over.set()
    await asyncio.gather(*running)
    monkeypatch.setattr(replay, "BACKFILL_AFTER_S", 0.0)  # every publish is over
    await jobs_of(api.services.writer).run(always)
    found = await pulled(api, early, made["id"])
    assert sorted(found) == sorted(expected)
    await approve(api, owner, plain["id"])
    await jobs_of(api.services.writer).run(always)
    assert await pulled(api, early, plain["id"]) == []
    jobs = (await api.call("GET", "/jobs", early.key)).json()["items"]
    assert [(one["kind"], one["state"]) for one in jobs] == [("replay", "done")]
    assert (await api.call("GET", "/jobs", owner.key)).json()["items"] == []


async def test_a_suspension_holds_and_its_end_delivers(api: Api) -> None:
    owner, subscriber, room, identity = await pending(api)
    await approve(api, owner, identity)
    first = await accepted(api, owner.key, room)
    await act(api, owner, identity, "suspend")
    second = await accepted(api, owner.key, room)
    body = {"max_messages": 10, "wait_ms": 0, "lease_ms": 1000}
    waiting = await api.call("POST", f"/subscriptions/{identity}/pull", subscriber.key, json=body)
    assert waiting.json().get("messages", []) == []
    assert (await act(api, subscriber, identity, "resume")).json()["status"] == "suspended"
    await act(api, owner, identity, "reinstate")
    assert sorted(await pulled(api, subscriber, identity)) == sorted([first, second])


Changes = dict[str, Any]
HOST: Changes = {"push_url": "https://other.example.com/in"}
PATH: Changes = {"push_url": "https://hooks.example.com/other"}
TYPES: Changes = {"event_types": [{"name": "invoice"}]}
FILTER: Changes = {"filter": "priority > 3"}


@pytest.mark.parametrize(
    ("reapprove_on", "proposed", "direct"),
    [
        (None, [HOST, TYPES], [PATH, FILTER, {"timeout_ms": 900}]),
        ([], [], [HOST, PATH, TYPES, FILTER]),
        (["filter"], [FILTER], [HOST, PATH, TYPES]),
        (["push_url", "event_types", "filter"], [HOST, TYPES, FILTER], [PATH]),
    ],
)
async def test_reapprove_on_decides_what_waits(
    api: Api, reapprove_on: list[str] | None, proposed: list[Changes], direct: list[Changes]
) -> None:
    owner, subscriber, room, identity = await pending(
        api, push_url="https://hooks.example.com/in", event_types=[{"name": PAID}]
    )
    if reapprove_on is not None:
        body = {"reapprove_on": reapprove_on}
        assert (await api.call("PATCH", f"/rooms/{room}", owner.key, json=body)).is_success
    await approve(api, owner, identity)
    for fields in direct:
        answer = (await change(api, subscriber, identity, **fields)).json()
        assert answer["proposal"] is None
        assert {name: answer[name] for name in fields} == fields
    reset = {"push_url": "https://hooks.example.com/in", "event_types": [{"name": PAID}]}
    await change(api, subscriber, identity, **reset, filter=None)
    if (await read(api, owner, identity))["proposal"] is not None:
        await approve(api, owner, identity)
    for fields in proposed:
        before = await read(api, subscriber, identity)
        answer = (await change(api, subscriber, identity, **fields)).json()
        assert {name: answer[name] for name in fields} == {name: before[name] for name in fields}
        assert answer["proposal"] is not None
        assert answer["status"] == "active"
        approved = await approve(api, owner, identity)
        assert approved["proposal"] is None
        now = await read(api, subscriber, identity)
        assert {name: now[name] for name in fields} == fields


async def test_no_change_waits_for_approval_while_the_room_is_automatic(api: Api) -> None:
    owner, subscriber, room, identity = await pending(
        api, push_url="https://hooks.example.com/in", event_types=[{"name": PAID}]
    )
    await approve(api, owner, identity)
    path = f"/rooms/{room}"
    automatic = {"subscription_policy": "automatic"}
    assert (await api.call("PATCH", path, owner.key, json=automatic)).is_success
    fresh = await subscribe(
        api,
        subscriber,
        room,
        "fresh",
        push_url="https://hooks.example.com/in",
        event_types=[{"name": PAID}],
    )
    assert fresh["status"] == "active"
    for one in (identity, fresh["id"]):
        for fields in (HOST, TYPES):
            answer = (await change(api, subscriber, one, **fields)).json()
            assert answer["proposal"] is None
            assert {name: answer[name] for name in fields} == fields
    approval = {"subscription_policy": "approval"}
    assert (await api.call("PATCH", path, owner.key, json=approval)).is_success
    for one in (identity, fresh["id"]):
        other = (await change(api, subscriber, one, event_types=[{"name": SENT}])).json()
        assert (other["proposal"], other["event_types"]) == (
            {"event_types": [{"name": SENT}]},
            TYPES["event_types"],
        )


async def test_a_proposal_of_before_waits_on_while_the_room_is_automatic(api: Api) -> None:
    owner, subscriber, room, identity = await pending(api, event_types=[{"name": PAID}])
    await approve(api, owner, identity)
    proposed = (await change(api, subscriber, identity, event_types=[{"name": SENT}])).json()
    automatic = {"subscription_policy": "automatic"}
    assert (await api.call("PATCH", f"/rooms/{room}", owner.key, json=automatic)).is_success
    other = (await change(api, subscriber, identity, name="other")).json()
    assert other["proposal"] == proposed["proposal"] == {"event_types": [{"name": SENT}]}
    replaced = (await change(api, subscriber, identity, **TYPES)).json()
    assert (replaced["proposal"], replaced["event_types"]) == (None, TYPES["event_types"])


async def test_the_approved_values_deliver_until_the_proposal_is_approved(api: Api) -> None:
    owner, subscriber, room, identity = await pending(api, event_types=[{"name": PAID}])
    await approve(api, owner, identity)
    await change(api, subscriber, identity, event_types=[{"name": SENT}])
    paid = await accepted(api, owner.key, room, event_type=PAID)
    await accepted(api, owner.key, room, event_type=SENT)
    assert await pulled(api, subscriber, identity) == [paid]
    await approve(api, owner, identity)
    await accepted(api, owner.key, room, event_type=PAID)
    sent = await accepted(api, owner.key, room, event_type=SENT)
    assert await pulled(api, subscriber, identity) == [sent]


async def test_a_proposal_is_rejected_withdrawn_or_taken_back(api: Api) -> None:
    owner, subscriber, _, identity = await pending(api, push_url="https://a.example.com/1")
    await approve(api, owner, identity)

    async def reject() -> Any:
        return await act(api, owner, identity, "reject")

    async def withdraw() -> Any:
        return await api.call("DELETE", f"/subscriptions/{identity}/proposal", subscriber.key)

    async def take_back() -> Any:
        return await change(api, subscriber, identity, push_url="https://a.example.com/2")

    ends: tuple[Callable[[], Any], ...] = (reject, withdraw, take_back)
    for end in ends:
        await change(api, subscriber, identity, push_url="https://b.example.com/1")
        assert (await read(api, owner, identity))["proposal"] == {"target": "https://b.example.com"}
        answer = await end()
        assert answer.status_code == 200, answer.text
        now = await read(api, subscriber, identity)
        assert (now["status"], now["proposal"]) == ("active", None)
        assert now["target"] == "https://a.example.com"
        refused = await act(api, owner, identity, "approve", version=now["version"])
        assert refused.status_code == 409, "nothing waits any more"


async def test_a_lost_grant_suspends_and_a_new_one_continues(api: Api) -> None:
    owner, subscriber = await member(api), await member(api)
    room = await shared_room(api, owner)
    refused = await api.call(
        "POST", f"/rooms/{room}/subscriptions", subscriber.key, json={"name": "a", "type": "PULL"}
    )
    assert refused.status_code == 404
    first = await grant(api, owner, room, subscriber.id, "subscribe", event_types=["order.*"])
    made = await subscribe(api, subscriber, room)
    identity = made["id"]
    assert made["event_types"] == [{"name": "order.*"}]
    paid = await accepted(api, owner.key, room)
    await revoke(api, owner, room, first)
    now = await read(api, subscriber, identity)
    assert (now["status"], now["suspended_by"]) == ("suspended", ["grant"])
    held = await accepted(api, owner.key, room)
    assert (await act(api, subscriber, identity, "resume")).json()["status"] == "suspended"
    narrow = await grant(api, owner, room, subscriber.id, "subscribe", event_types=[PAID])
    assert (await read(api, subscriber, identity))["status"] == "suspended", "it takes more"
    await change(api, subscriber, identity, event_types=[{"name": PAID}])
    await cancel_ungranted(api)
    assert (await read(api, subscriber, identity))["status"] == "active", "now it does not"
    assert sorted(await pulled(api, subscriber, identity)) == sorted([paid, held])
    for wider in (None, [{"name": "order.*"}], [{"name": SENT}]):
        answer = await change(api, subscriber, identity, event_types=wider)
        assert answer.status_code == (200 if wider is None else 422)
        assert (await read(api, subscriber, identity))["event_types"] == [{"name": PAID}]
    await act(api, subscriber, identity, "pause")
    await revoke(api, owner, room, narrow)
    await grant(api, owner, room, "*", "subscribe")
    assert (await read(api, subscriber, identity))["status"] == "paused", (
        "as the subscriber left it"
    )


async def test_names_are_unique_for_each_organisation(api: Api) -> None:
    owner, *others = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
    made = [await subscribe(api, one, room, "same") for one in (owner, *others)]
    for one in (owner, *others):
        body = {"name": "same", "type": "PULL"}
        again = await api.call("POST", f"/rooms/{room}/subscriptions", one.key, json=body)
        assert again.status_code == 409
    for one, own in zip(others, made[1:], strict=True):
        path = f"/rooms/{room}/subscriptions?name=same"
        assert [s["id"] for s in (await api.call("GET", path, one.key)).json()["items"]] == [
            own["id"]
        ]
    spare = await subscribe(api, others[0], room, "spare")
    assert (await change(api, others[0], spare["id"], name="same")).status_code == 409
    await act(api, owner, made[1]["id"], "terminate")
    assert (await change(api, others[0], spare["id"], name="same")).status_code == 200


async def test_a_room_for_all_gives_all_beside_a_narrow_grant(api: Api) -> None:
    owner, other = await member(api), await member(api)
    room = await shared_room(api, owner, subscription_policy="automatic", visibility="listed")
    await grant(api, owner, room, other.id, "subscribe", event_types=[PAID])
    made = await subscribe(api, other, room)
    assert (made["status"], made["event_types"]) == ("active", None)


async def test_few_subscriptions_may_wait_for_the_owner(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.api.subscription_creation.MAX_PENDING", 2)
    owner, asking, other = [await member(api) for _ in range(3)]
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    first = await subscribe(api, asking, room, "first")
    path = f"/rooms/{room}/subscriptions"
    answers = await asyncio.gather(
        *(
            api.call("POST", path, asking.key, json={"name": f"s{n}", "type": "PULL"})
            for n in range(4)
        )
    )
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]
    refused = next(answer for answer in answers if answer.status_code == 409)
    assert "wait for the room's owner" in refused.json()["detail"]
    await subscribe(api, other, room, "theirs")
    body = {"version": first["version"]}
    path = f"/subscriptions/{first['id']}/approve"
    assert (await api.call("POST", path, owner.key, json=body)).is_success
    await subscribe(api, asking, room, "next")


async def test_what_is_not_approved_or_has_ended_replays_nothing(api: Api) -> None:
    owner, subscriber = await member(api, "owner"), await member(api, "subscriber")
    room = await shared_room(api, owner, subscription_policy="approval", visibility="listed")
    former = await grant(api, owner, room, subscriber.id, "subscribe")
    await accepted(api, owner.key, room)
    await revoke(api, owner, room, former)
    made = await subscribe(api, subscriber, room, push_url="https://hooks.example.com/")
    since = {"since": "2020-01-01T00:00:00Z"}
    path = f"/subscriptions/{made['id']}/replay"
    answer = await api.call("POST", path, subscriber.key, json=since)
    assert answer.status_code == 409, "its webhook is not approved"
    assert "pending" in answer.json()["detail"]
    await approve(api, owner, made["id"])
    answer = await api.call("POST", path, subscriber.key, json=since)
    assert answer.status_code == 202, answer.text
    assert (await act(api, owner, made["id"], "terminate")).status_code == 200
    answer = await api.call("POST", path, subscriber.key, json=since)
    assert answer.status_code == 409, answer.text


async def test_a_restricted_key_reads_no_names_of_other_keys_in_a_history(api: Api) -> None:
    room = (await api.room())["id"]
    made = await api.subscription(room)
    body = {"name": "narrow", "scopes": ["view"], "rooms": [room]}
    narrow = (await api.made("/keys", body))["key"]
    for key, name in (("admin", "admin"), (narrow, None)):
        answer = await api.call("GET", f"/subscriptions/{made['id']}/history", key)
        (step,) = answer.json()["items"]
        assert step["key_id"] is not None
        assert step["key_name"] == name


async def test_what_waits_for_approval_disturbs_no_publisher(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a stranger makes no process load the room again, however often it asks."""
    owner, subscriber, room, first = await pending(api)

    async def plan() -> int:
        ((version,),) = await api.sql("SELECT plan_version FROM rooms WHERE id = %s", room)
        return int(version)

    notified: list[tuple[Any, ...]] = []
    monkeypatch.setattr(api.services.notifier, "notify", lambda *what: notified.append(what))
    before = await plan()
    second = (await subscribe(api, subscriber, room, "second", push_url=PUSH["push_url"]))["id"]
    types = [{"name": PAID}]
    for fields in ({}, {"name": "other"}, {"event_types": types}, {"event_types": None}):
        assert (await change(api, subscriber, first, **fields)).status_code == 200
    assert (await act(api, subscriber, second, "rotate-secret")).status_code == 200
    assert (await act(api, subscriber, second, "terminate")).status_code == 200
    deleted = await api.call("DELETE", f"/subscriptions/{first}", subscriber.key)
    assert deleted.status_code == 202
    assert (await plan(), notified) == (before, [])

    third = (await subscribe(api, subscriber, room, "third"))["id"]
    await approve(api, owner, third)
    approved = await plan()
    assert approved > before
    assert notified
    notified.clear()
    assert (await change(api, subscriber, third)).status_code == 200
    assert (await plan(), notified) == (approved, [])
    assert (await change(api, subscriber, third, name="fourth")).status_code == 200
    assert await plan() == approved + 1
    assert notified


async def test_a_guest_that_changes_in_a_loop_is_stopped(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a subscriber cannot make publishers load the room of another all the time."""
    owner, subscriber, room, identity = await pending(api)
    await approve(api, owner, identity)
    second = (await subscribe(api, subscriber, room, "second", push_url=PUSH["push_url"]))["id"]
    limit, at = api.services.settings.guest_changes_per_s, [1e6]
    limiter = GuestChangeLimiter(limit, lambda: at[0])
    monkeypatch.setattr(api.services.guest_changes, "acquire", limiter.acquire)

    async def plan() -> int:
        ((version,),) = await api.sql("SELECT plan_version FROM rooms WHERE id = %s", room)
        return int(version)

    for number in range(limit):
        answer = await change(api, subscriber, identity, name=f"name-{number}")
        assert answer.status_code == 200, answer.text
    before = await plan()
    refused = [
        await change(api, subscriber, identity, name="refused"),
        await act(api, subscriber, identity, "pause"),
        await act(api, subscriber, identity, "rotate-secret"),
        await act(api, subscriber, identity, "terminate"),
        await api.call("DELETE", f"/subscriptions/{identity}", subscriber.key),
        await change(api, subscriber, second, name="waiting"),
    ]
    assert [answer.status_code for answer in refused] == [429] * len(refused)
    assert "in a room of others" in refused[0].json()["detail"]
    assert "retry-after" in refused[0].headers
    found = (await api.call("GET", f"/subscriptions/{identity}", subscriber.key)).json()
    assert (found["name"], found["status"]) == (f"name-{limit - 1}", "active")
    assert await plan() == before

    # The owner has nothing to do with it.
    own = (await subscribe(api, owner, room, "own"))["id"]
    for number in range(2 * limit):
        assert (await change(api, owner, own, name=f"own-{number}")).status_code == 200

    at[0] += 1
    assert (await change(api, subscriber, identity, name="again")).status_code == 200
