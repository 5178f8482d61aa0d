"""Test creations that arrive together: they share a transaction, and each has its own answer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from rooms.api.subscription_bodies import to_columns
from rooms.api.subscription_creation import MAX_BATCH, SubscriptionCreator
from rooms.api.subscription_locks import lock_room
from rooms.db.journal import append
from rooms.domain.ids import RoomId
from rooms.domain.state_machine import Scope
from rooms.errors import StorageRefusedError
from tests.integration.rooms.api.conftest import Api, make_key

PATIENCE_S = 30
MODULE = "rooms.api.subscription_creation"
RECORDS = """
SELECT s.name, count(DISTINCT h.id), count(DISTINCT j.id) FROM subscriptions s
LEFT JOIN subscription_history h ON h.subscription_id = s.id AND h.action = 'created'
LEFT JOIN journal j ON j.object = '/v1/subscriptions/' || s.id AND j.outcome = 'succeeded'
    AND j.organisation_id = s.organisation_id AND j.after ->> 'name' = s.name
WHERE s.room_id = %s GROUP BY s.room_id, s.id, s.name
"""


@dataclass
class Gate:
    """Hold the first transaction of a room until so many requests have arrived."""

    room: int = 0
    awaited: int = 0
    arrived: int = 0
    held: asyncio.Event = field(default_factory=asyncio.Event)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    opens: bool = True

    def hold(self, room: int, until: int, *, opens: bool = True) -> None:
        """Hold the room's next transaction until so many requests wait, the first included.

        `opens` false: and until the test opens it.
        """
        self.room, self.awaited, self.arrived, self.opens = room, until, 0, opens
        self.held.clear()
        self.complete.clear()
        self.opened.clear()

    async def wait(self, room: RoomId) -> None:
        """Wait until the gate is open, if it is there for this room."""
        if room == self.room:
            self.held.set()
            await self.opened.wait()

    def count(self) -> None:
        """Count a request that arrives."""
        self.arrived += 1
        if self.arrived == self.awaited:
            self.complete.set()
            if self.opens:
                self.opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    create = SubscriptionCreator.create

    async def held_lock(services: Any, connection: Any, principal: Any, room: RoomId) -> Any:
        await gate.wait(room)
        return await lock_room(services, connection, principal, room)

    async def counted_create(self: SubscriptionCreator, room: RoomId, creation: Any) -> Any:
        # What follows in this turn of the loop puts the request into the queue.
        asyncio.get_running_loop().call_soon(gate.count)
        return await create(self, room, creation)

    monkeypatch.setattr(f"{MODULE}.lock_room", held_lock)
    monkeypatch.setattr(SubscriptionCreator, "create", counted_create)
    return gate


@pytest.fixture
async def room(api: Api) -> int:
    made = await api.room()
    await api.made(f"/rooms/{made['id']}/event-types", {"name": "made"})
    return int(made["id"])


def pull(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "type": "PULL", **fields}


async def create_together(
    api: Api, gate: Gate, room: int, bodies: Sequence[dict[str, Any]], key: str = "admin"
) -> list[httpx.Response]:
    """Create `first`, and while its transaction is held all others; return their answers."""
    gate.hold(room, until=len(bodies) + 1)

    def send(body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(api.call("POST", f"/rooms/{room}/subscriptions", key, json=body))

    async with asyncio.timeout(PATIENCE_S):
        first = send(pull("first"))
        await gate.held.wait()
        answers = await asyncio.gather(*map(send, bodies))
        assert (await first).status_code in {201, 403, 404}
    return answers


async def plan_version(api: Api, room: int) -> int:
    ((version,),) = await api.sql("SELECT plan_version FROM rooms WHERE id = %s", room)
    return int(version)


async def recorded(api: Api, room: int) -> set[str]:
    """Return the names of the room's subscriptions; each has one entry in history and journal."""
    rows = await api.sql(RECORDS, room)
    assert [row for row in rows if row[1:] != (1, 1)] == []
    names = {name for name, _, _ in rows}
    assert len(names) == len(rows)
    return names


async def assert_chain_is_whole(api: Api, key: str = "admin") -> None:
    answer = await api.call("GET", "/journal/verify", key)
    assert answer.status_code == 200, answer.text
    assert answer.json()["whole"] is True, answer.text


def statuses(answers: Sequence[httpx.Response]) -> list[int]:
    return [answer.status_code for answer in answers]


async def test_those_that_wait_for_a_room_share_a_transaction(
    api: Api, gate: Gate, room: int
) -> None:
    before = await plan_version(api, room)
    bodies = [pull(f"s{n}") for n in range(20)]
    answers = await create_together(api, gate, room, bodies)
    assert statuses(answers) == [201] * 20
    assert [answer.json()["name"] for answer in answers] == [body["name"] for body in bodies]
    assert await plan_version(api, room) == before + 2  # `first`, and all others
    assert await recorded(api, room) == {"first", *(body["name"] for body in bodies)}
    await assert_chain_is_whole(api)
    for answer in answers[:3]:
        made = answer.json()
        assert answer.headers["Location"] == f"/v1/subscriptions/{made['id']}"
        del made["secret"], made["login"]
        assert (await api.call("GET", answer.headers["Location"][3:])).json() == made


async def test_a_transaction_is_bounded(api: Api, gate: Gate, room: int) -> None:
    before = await plan_version(api, room)
    answers = await create_together(api, gate, room, [pull(f"s{n}") for n in range(MAX_BATCH + 1)])
    assert statuses(answers) == [201] * (MAX_BATCH + 1)
    assert await plan_version(api, room) == before + 3


async def test_each_has_its_own_error(api: Api, gate: Gate, room: int) -> None:
    await api.subscription(room, "taken")
    typed = pull("typed", event_types=[{"name": "made", "versions": [1]}])
    bodies = [
        pull("a"),
        pull("taken"),
        pull("wrong", event_types=[{"name": "nothing"}], filter="payload.a >"),
        typed,
        pull("twice"),
        pull("twice"),
        pull("b", push_url="https://hooks.example.com/in"),
        {"name": "push", "type": "PUSH", "push_url": "https://hooks.example.com/in"},
    ]
    answers = await create_together(api, gate, room, bodies)
    assert statuses(answers) == [201, 409, 422, 201, 201, 409, 422, 201]
    assert [error["field"] for error in answers[2].json()["errors"]] == [
        "event_types[0].name",
        "filter",
    ]
    assert "twice" in answers[5].json()["detail"]
    assert [error["field"] for error in answers[6].json()["errors"]] == ["push_url"]
    assert answers[7].json()["secret"].startswith("whsec_")
    assert answers[3].json()["event_types"] == typed["event_types"]
    assert await recorded(api, room) == {"first", "taken", "a", "typed", "twice", "push"}
    await assert_chain_is_whole(api)


async def test_an_organisation_has_one_operational_subscription(
    api: Api, gate: Gate, room: int
) -> None:
    url = "https://hooks.example.com/in"
    await api.subscription(room, "taken")
    bodies = [
        {"name": "one", "type": "PUSH", "push_url": url, "operational": True},
        {"name": "two", "type": "PUSH", "push_url": url, "operational": True},
        {"name": "taken", "type": "PUSH", "push_url": url, "operational": True},
        pull("taken"),
        pull("plain"),
    ]
    answers = await create_together(api, gate, room, bodies)
    assert statuses(answers) == [201, 409, 409, 409, 201]
    assert "operational subscription in this room already" in answers[1].json()["detail"]
    for answer in answers[2:4]:
        assert "named taken already" in answer.json()["detail"]
    assert answers[0].json()["event_types"] == []
    assert await recorded(api, room) == {"first", "taken", "one", "plain"}


async def test_each_that_waits_for_approval_has_its_event(api: Api, gate: Gate, room: int) -> None:
    changes = {
        "visibility": "listed",
        "subscription_policy": "approval",
        "operational_url": "https://hooks.example.com/operations",
        "operational_events": ["rooms.subscription.pending"],
    }
    answer = await api.call("PATCH", f"/rooms/{room}", json=changes)
    assert answer.status_code == 200, answer.text
    bodies = [pull("a"), pull("b"), pull("a")]
    assert statuses(await create_together(api, gate, room, bodies, "stranger")) == [201, 201, 409]
    events = await api.sql(
        "SELECT event, data ->> 'name' FROM operational_outbox WHERE room_id = %s ORDER BY 2", room
    )
    assert events == [("rooms.subscription.pending", name) for name in ("a", "b", "first")]


async def test_a_batch_of_refused_ones_leaves_the_room_as_it_was(
    api: Api, gate: Gate, room: int
) -> None:
    await api.subscription(room, "taken")
    before = await plan_version(api, room)
    bodies = [pull("taken"), pull("first"), pull("wrong", filter="1 +")]
    assert statuses(await create_together(api, gate, room, bodies)) == [409, 409, 422]
    assert await plan_version(api, room) == before + 1
    assert await recorded(api, room) == {"taken", "first"}


async def test_rooms_do_not_wait_for_each_other(api: Api, gate: Gate, room: int) -> None:
    other = int((await api.room("other"))["id"])
    gate.hold(room, until=1, opens=False)
    async with asyncio.timeout(PATIENCE_S):
        waiting = asyncio.create_task(
            api.call("POST", f"/rooms/{room}/subscriptions", json=pull("s"))
        )
        await gate.held.wait()
        made = await api.made(f"/rooms/{other}/subscriptions", pull("s"))
        assert not waiting.done()
        gate.opened.set()
        assert (await waiting).status_code == 201
    assert made["room_id"] == other
    assert await recorded(api, room) == {"s"}
    assert await recorded(api, other) == {"s"}
    await assert_chain_is_whole(api)


def _bug(columns: dict[str, Any]) -> None:
    raise RuntimeError(f"a bug with {columns['name']}")


def _unstorable(columns: dict[str, Any]) -> None:
    columns["push_url"] = "a\x00b"


@pytest.mark.parametrize("spoil", [_bug, _unstorable])
async def test_an_unexpected_error_is_that_of_one_request(
    api: Api,
    gate: Gate,
    room: int,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[dict[str, Any]], None],
) -> None:
    def spoiled_columns(*arguments: Any, **named: Any) -> dict[str, Any]:
        columns = to_columns(*arguments, **named)
        if columns["name"] == "bad":
            spoil(columns)
        return columns

    monkeypatch.setattr(f"{MODULE}.to_columns", spoiled_columns)
    bodies = [pull("a"), pull("bad"), pull("b"), pull("a"), pull("c", filter="1 +")]
    answers = await create_together(api, gate, room, bodies)
    assert statuses(answers) == [201, 500, 201, 409, 422]
    assert await recorded(api, room) == {"first", "a", "b"}
    await assert_chain_is_whole(api)


async def test_a_refusal_by_postgresql_is_that_of_every_request(
    api: Api, gate: Gate, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused_append(connection: Any, *entries: Any) -> None:
        await append(connection, *entries)
        if len(entries) > 1:
            raise StorageRefusedError("the disk is full")

    monkeypatch.setattr(f"{MODULE}.append", refused_append)
    answers = await create_together(api, gate, room, [pull(f"s{n}") for n in range(3)])
    assert statuses(answers) == [503] * 3
    assert all("Retry-After" in answer.headers for answer in answers)
    assert await recorded(api, room) == {"first"}
    await assert_chain_is_whole(api)


async def test_a_room_that_is_deleted_meanwhile_is_not_there(
    api: Api, gate: Gate, room: int
) -> None:
    gate.hold(room, until=3, opens=False)
    async with asyncio.timeout(PATIENCE_S):
        calls = [
            asyncio.create_task(
                api.call("POST", f"/rooms/{room}/subscriptions", json=pull(f"s{n}"))
            )
            for n in range(3)
        ]
        await gate.held.wait()
        assert (await api.call("DELETE", f"/rooms/{room}?confirm=orders")).status_code == 202
        gate.opened.set()
        assert statuses(await asyncio.gather(*calls)) == [404] * 3


async def test_a_request_that_is_cancelled_stops_no_other(api: Api, gate: Gate, room: int) -> None:
    gate.hold(room, until=4, opens=False)
    async with asyncio.timeout(PATIENCE_S):
        calls = [
            asyncio.create_task(
                api.call("POST", f"/rooms/{room}/subscriptions", json=pull(f"s{n}"))
            )
            for n in range(4)
        ]
        await gate.complete.wait()
        calls[0].cancel()  # its transaction is under way
        calls[2].cancel()  # so is its, or it waits for the next
        gate.opened.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answers[n]) for n in (0, 2)] == [asyncio.CancelledError] * 2
    assert statuses([answers[n] for n in (1, 3)]) == [201] * 2  # type: ignore[misc]
    assert await recorded(api, room) == {"s0", "s1", "s2", "s3"}
    await assert_chain_is_whole(api)


async def test_organisations_have_their_own_answers_and_journals(
    api: Api, gate: Gate, room: int
) -> None:
    for name in ("granted", "asking"):
        api.keys[name] = await make_key(api.services, name, Scope.ADMIN)
    patterns = {"event_types": ["made"]}
    changes = {"visibility": "listed", "subscription_policy": "approval"}
    assert (await api.call("PATCH", f"/rooms/{room}", json=changes)).status_code == 200
    await api.made(
        f"/rooms/{room}/grants", {"organisation_id": "granted", "kind": "subscribe", **patterns}
    )
    keys = ("admin", "granted", "asking") * 4
    gate.hold(room, until=len(keys))
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(
            *(
                api.call("POST", f"/rooms/{room}/subscriptions", key, json=pull(f"s{n}"))
                for n, key in enumerate(keys)
            )
        )
    assert statuses(answers) == [201] * len(keys)
    for key, answer in zip(keys, answers, strict=True):
        made = answer.json()
        assert made["status"] == ("pending" if key == "asking" else "active")
        assert made["event_types"] == ([{"name": "made"}] if key == "granted" else None)
        assert made["organisation"] == ("default" if key == "admin" else key)
    assert len(await recorded(api, room)) == len(keys)
    for key in ("admin", "granted", "asking"):
        await assert_chain_is_whole(api, key)


async def test_those_who_may_not_subscribe_are_refused_together(
    api: Api, gate: Gate, room: int
) -> None:
    bodies = [pull(f"s{n}") for n in range(3)]
    assert statuses(await create_together(api, gate, room, bodies, "stranger")) == [404] * 3
    changes = {"visibility": "listed", "subscription_policy": "owner_only"}
    assert (await api.call("PATCH", f"/rooms/{room}", json=changes)).status_code == 200
    assert statuses(await create_together(api, gate, room, bodies, "stranger")) == [403] * 3
    assert await recorded(api, room) == set()


async def test_a_key_for_other_rooms_does_not_come_in_with_others(
    api: Api, gate: Gate, room: int
) -> None:
    other = int((await api.room("other"))["id"])
    narrow = await api.made("/keys", {"name": "n", "scopes": ["manage"], "rooms": [other]})
    gate.hold(room, until=3)
    async with asyncio.timeout(PATIENCE_S):
        calls = [
            asyncio.create_task(
                api.call("POST", f"/rooms/{room}/subscriptions", json=pull(f"s{n}"))
            )
            for n in range(2)
        ]
        await gate.held.wait()
        path = f"/rooms/{room}/subscriptions"
        refused = await api.call("POST", path, narrow["key"], json=pull("narrow"))
        answers = await asyncio.gather(*calls)
    assert refused.status_code == 404
    assert refused.json()["detail"] == f"there is no room {room}"
    assert statuses(answers) == [201] * 2
    assert await recorded(api, room) == {"s0", "s1"}
