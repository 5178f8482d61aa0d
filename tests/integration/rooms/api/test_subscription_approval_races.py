"""Test approvals that meet other changes: what the owner saw is what is active, always."""

import asyncio
import random
from typing import Any

import pytest

from rooms.db.connection import open_connection
from rooms.db.queue.endpoints import EndpointRecord, load_endpoints
from rooms.db.queue.throttle import SharedLaneState
from rooms.domain.ids import RoomId, SubscriptionId
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.members import (
    PAID,
    Member,
    accepted,
    act,
    approve,
    change,
    history,
    member,
    pulled,
    read,
    shared_room,
    subscribe,
)
from tests.support.installation import until

HOSTS = [f"https://h{number}.example.com" for number in range(4)]
TYPES = [[{"name": name}] for name in ("order", PAID, "invoice", "order.*")]
SEEN = ("target", "event_types", "filtered")


async def waiting(api: Api, **fields: Any) -> tuple[Member, Member, int, str]:
    owner, subscriber = await member(api, "owner"), await member(api, "subscriber")
    policy = {"subscription_policy": "approval", "visibility": "listed"}
    reapprove_on = ["push_url", "event_types", "filter"]
    room = await shared_room(api, owner, **policy, reapprove_on=reapprove_on)
    made = await subscribe(api, subscriber, room, **fields)
    return owner, subscriber, room, made["id"]


def some_change(draw: random.Random) -> dict[str, Any]:
    everything: dict[str, Any] = {
        "push_url": f"{draw.choice(HOSTS)}/{draw.random()}",
        "event_types": draw.choice([*TYPES, None]),
        "filter": draw.choice(["priority > 3", "priority < 3", None]),
    }
    names = draw.sample(sorted(everything), draw.randint(1, 3))
    return {name: everything[name] for name in names}


def active_values(seen: dict[str, Any]) -> dict[str, Any]:
    """Return what would be active if the owner approved what it sees."""
    proposal = seen["proposal"] or {}
    return {
        "target": proposal.get("target", seen["target"]),
        "event_types": proposal.get("event_types", seen["event_types"]),
        "filtered": (proposal["filter"] is not None) if "filter" in proposal else seen["filtered"],
    }


class Race:
    """Change a subscription and approve it at once, and note what was seen and approved."""

    def __init__(
        self, api: Api, seed: int, owner: Member, subscriber: Member, identity: str
    ) -> None:
        self.api, self.draw, self.identity = api, random.Random(seed), identity
        self.owner, self.subscriber = owner, subscriber
        self.approved: dict[int, dict[str, Any]] = {}
        self.looked: list[dict[str, Any]] = []
        self.over = asyncio.Event()

    async def change_on(self) -> None:
        for _ in range(25):
            answer = await change(
                self.api, self.subscriber, self.identity, **some_change(self.draw)
            )
            assert answer.status_code == 200, answer.text
            if self.draw.random() < 0.1:
                path = f"/subscriptions/{self.identity}/proposal"
                await self.api.call("DELETE", path, self.subscriber.key)
        self.over.set()

    async def approve_on(self) -> None:
        while not self.over.is_set():
            seen = await read(self.api, self.owner, self.identity)
            version = seen["version"]
            answer = await act(self.api, self.owner, self.identity, "approve", version=version)
            assert answer.status_code in {200, 409}
            if answer.status_code == 200:
                assert {name: answer.json()[name] for name in SEEN} == active_values(seen)
                assert answer.json()["version"] == version + 1
                assert version not in self.approved, "each version only once"
                self.approved[version] = active_values(seen)

    async def look_on(self) -> None:
        while not self.over.is_set():
            self.looked.append(await read(self.api, self.owner, self.identity))


@pytest.mark.parametrize("seed", range(3))
async def test_what_is_active_is_what_the_owner_saw(api: Api, seed: int) -> None:
    """Check it through many changes and approvals at once, from the first request on."""
    owner, subscriber, _, identity = await waiting(api, push_url=f"{HOSTS[0]}/first")
    race = Race(api, seed, owner, subscriber, identity)
    await asyncio.gather(race.change_on(), race.approve_on(), race.approve_on(), race.look_on())
    for seen in race.looked:
        if seen["status"] != "pending":
            version = max(one for one in race.approved if one < seen["version"])
            assert {name: seen[name] for name in SEEN} == race.approved[version]
    steps = await history(api, owner, identity)
    assert [one["action"] for one in steps].count("approved") == len(race.approved)
    versions = [one["snapshot"]["version"] for one in steps]
    assert versions == sorted(set(versions)), "one entry for each version"


async def test_two_approvals_are_one(api: Api) -> None:
    owner, _, _, identity = await waiting(api, backfill=True)
    version = (await read(api, owner, identity))["version"]
    answers = await asyncio.gather(
        *(act(api, owner, identity, "approve", version=version) for _ in range(6))
    )
    assert sorted(one.status_code for one in answers) == [200, *[409] * 5]
    assert await api.sql("SELECT count(*) FROM jobs") == [(1,)]
    steps = await history(api, owner, identity)
    assert [one["action"] for one in steps] == ["created", "approved"]


@pytest.mark.parametrize("ending", ["terminate", "reject"])
async def test_an_approval_and_an_end_have_one_outcome(api: Api, ending: str) -> None:
    outcomes = set()
    for round_number in range(8):
        owner, subscriber, room, identity = await waiting(api)
        version = (await read(api, owner, identity))["version"]
        who = subscriber if ending == "terminate" and round_number % 2 else owner
        calls = [
            act(api, owner, identity, "approve", version=version),
            act(api, who, identity, ending),
        ]
        if round_number % 4 < 2:
            calls.reverse()
        answers = await asyncio.gather(*calls)
        if round_number % 4 < 2:
            answers.reverse()
        approval, end = (one.status_code for one in answers)
        status = (await read(api, owner, identity))["status"]
        actions = [one["action"] for one in await history(api, owner, identity)]
        if end == 200:
            assert status == {"terminate": "terminated", "reject": "rejected"}[ending]
        else:
            assert (ending, approval, status) == ("reject", 200, "active")
        assert actions[0] == "created"
        assert len(actions) == 1 + (approval == 200) + (end == 200)
        await accepted(api, owner.key, room)
        delivered = await api.sql(
            "SELECT count(*) FROM deliveries WHERE subscription_id = %s", identity
        )
        assert delivered == [(int(status == "active"),)]
        outcomes.add((approval, end))
    assert outcomes <= {(200, 200), (409, 200), (200, 409)}


async def test_an_approval_and_the_end_of_its_room_have_an_order(api: Api) -> None:
    for _ in range(4):
        owner, subscriber, room, identity = await waiting(api)
        version = (await read(api, owner, identity))["version"]
        name = (await api.call("GET", f"/rooms/{room}", owner.key)).json()["name"]
        approval, deletion, later = await asyncio.gather(
            act(api, owner, identity, "approve", version=version),
            api.call("DELETE", f"/rooms/{room}?confirm={name}", owner.key),
            change(api, subscriber, identity, event_types=TYPES[1]),
        )
        assert deletion.status_code == 202
        assert {approval.status_code, later.status_code} <= {200, 404, 409}
        for who in (owner, subscriber):
            for path in (f"/subscriptions/{identity}", f"/subscriptions/{identity}/history"):
                assert (await api.call("GET", path, who.key)).status_code == 404
        assert (await act(api, owner, identity, "approve", version=version)).status_code == 404


async def test_an_old_or_future_version_is_never_approved(api: Api) -> None:
    owner, subscriber, _, identity = await waiting(api)
    for _ in range(3):
        old = (await read(api, owner, identity))["version"]
        await change(api, subscriber, identity, event_types=TYPES[0])
        for version in (old, old + 2, 1 + 2**30):
            refused = await act(api, owner, identity, "approve", version=version)
            assert refused.status_code == 409
            assert (await read(api, owner, identity))["status"] == "pending"
    missing = await api.call("POST", f"/subscriptions/{identity}/approve", owner.key, json={})
    assert missing.status_code == 422
    await approve(api, owner, identity)


async def test_an_approval_meets_an_endpoint_that_fails(api: Api) -> None:
    """Check that the owner need not look again because of what workers write."""
    owner, subscriber, room, identity = await waiting(
        api, type="PUSH", push_url=HOSTS[0], circuit_failures=1
    )
    await approve(api, owner, identity)
    await change(api, subscriber, identity, push_url=HOSTS[1])
    seen = await read(api, owner, identity)

    async def record() -> EndpointRecord:
        found = SubscriptionId(identity)
        async with open_connection(api.url, name="test") as connection:
            return (await load_endpoints(connection, [(RoomId(room), found)]))[found]

    lanes = SharedLaneState(api.services.writer)
    before = await record()
    assert await lanes.mark_failing(before)
    assert await lanes.open_circuit(await record(), open_ms=1)
    assert await lanes.close_circuit(await record())
    assert await lanes.clear_failing(await record())
    assert (await record()).version == before.version + 4, "workers notice each"
    assert await read(api, owner, identity) == seen

    await change(api, subscriber, identity, push_url=HOSTS[2])
    refused = await act(api, owner, identity, "approve", version=seen["version"])
    assert refused.status_code == 409, "the proposal is another one"
    now = await read(api, owner, identity)
    assert f"its version is {now['version']} now" in refused.json()["detail"]
    assert await lanes.open_circuit(await record(), open_ms=1)
    approved = await act(api, owner, identity, "approve", version=now["version"])
    assert approved.status_code == 200, approved.text
    assert (approved.json()["target"], approved.json()["version"]) == (
        HOSTS[2],
        now["version"] + 1,
    )
    assert await lanes.disable(await record(), reason="gone")
    versions = [one["snapshot"]["version"] for one in await history(api, owner, identity)]
    assert versions == list(range(1, now["version"] + 3)), "also where a worker disables it"


async def test_an_approval_during_publishes_routes_from_its_commit_on(api: Api) -> None:
    """Check that every publish that begins after the approval was answered is delivered."""
    owner, subscriber, room, identity = await waiting(api)
    over, after = asyncio.Event(), asyncio.Event()
    expected, possible = set(), set()

    async def publish_on() -> None:
        while not over.is_set():
            late = after.is_set()
            message = await accepted(api, owner.key, room)
            possible.add(message)
            if late:
                expected.add(message)
            if len(expected) >= 5:
                over.set()

    running = [asyncio.create_task(publish_on()) for _ in range(3)]

    async def enough() -> bool:
        return len(possible) >= 5

    await until(enough, "publishes before the approval")
    await approve(api, owner, identity)
    after.set()
    await asyncio.gather(*running)
    found = await pulled(api, subscriber, identity)
    assert len(found) == len(set(found))
    assert expected <= set(found) <= possible
