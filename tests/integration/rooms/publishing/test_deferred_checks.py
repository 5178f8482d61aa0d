"""Costly schemas and filters in a publish: clear answers, no loss and no wrong delivery."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from time import perf_counter_ns
from typing import Any

import pytest

from delivery.maintenance.replay import wanted_messages
from rooms.db.jobs.replay import PastMessage
from rooms.domain.ids import MessageId, RoomId
from rooms.errors import InvalidError, TooLargeError
from rooms.publishing import routing
from rooms.publishing.cel_filter import MessageFilter, SandboxedFilter, load_filter
from rooms.publishing.prepare import SLICE_NS
from tests.support.publisher import Desk, House, open_desk
from tests.support.sandboxes import idle_sandbox
from tests.unit.rooms.publishing.test_schema_bounds import doubling

SLOW: dict[str, Any] = {"not": {"pattern": "(?=(a+)+b)c"}}
LONG = "a" * 100_000
"""Takes a minute to match."""


@pytest.fixture
def house(database: str) -> House:
    return House(database)


@pytest.fixture
async def desk(database: str) -> AsyncIterator[Desk]:
    async with open_desk(database, ROOMS_VALIDATION_MS="200") as desk:
        yield desk


def message(payload: Any, **fields: Any) -> bytes:
    return json.dumps({"event_type": "order.created", "payload": payload, **fields}).encode()


def batch(*payloads: Any) -> bytes:
    return json.dumps(
        {"messages": [{"event_type": "order.created", "payload": payload} for payload in payloads]}
    ).encode()


async def test_a_stored_schema_beyond_the_limit_is_refused_unrun(desk: Desk, house: House) -> None:
    """Store the schema as a version without limits did."""
    room = house.room()
    house.event_type(room, schemas=[doubling(22)])
    house.subscription(room)
    for call, body, field in (
        (desk.publisher.publish, message(1), "event_type"),
        (desk.publisher.publish_batch, batch(1, 2), "messages[0].event_type"),
    ):
        with pytest.raises(InvalidError) as caught:
            await call(house.principal, room, body, None)
        assert caught.value.problems[0].field == field
        assert "unfolds to more than" in caught.value.problems[0].message
    assert house.run("SELECT count(*) FROM messages") == [(0,)]
    assert not desk.publisher._preparation._sandbox._processes


async def test_a_slow_validation_is_refused_and_blocks_no_other_publish(
    desk: Desk, house: House
) -> None:
    slow, quick = house.room(), house.room()
    house.event_type(slow, schemas=[SLOW])
    house.event_type(quick, schemas=[{"type": "integer"}])
    done: list[str] = []

    async def publish_slowly() -> None:
        with pytest.raises(InvalidError) as caught:
            await desk.publisher.publish(house.principal, slow, message(LONG), None)
        assert [problem.field for problem in caught.value.problems] == ["payload"]
        assert "more than 200 ms" in caught.value.problems[0].message
        done.append("slow")

    async def publish_quickly() -> None:
        await asyncio.sleep(0)
        for _ in range(5):
            await desk.publisher.publish(house.principal, quick, message(1), None)
        done.append("quick")

    await asyncio.gather(publish_slowly(), publish_quickly())
    assert done == ["quick", "slow"]
    assert house.run("SELECT count(*) FROM messages WHERE room_id = %s", slow) == [(0,)]


async def test_a_sandboxed_schema_accepts_and_refuses_like_any_other(
    desk: Desk, house: House
) -> None:
    room = house.room()
    house.event_type(room, schemas=[{"uniqueItems": True, "items": {"type": "integer"}}])
    house.subscription(room)
    await desk.publisher.publish(house.principal, room, message([1, 2]), None)
    await desk.publisher.publish_batch(house.principal, room, batch([1], [2], [3, 4]), "key")
    replayed = await desk.publisher.publish_batch(
        house.principal, room, batch([1], [2], [3, 4]), "key"
    )
    assert replayed.replayed
    with pytest.raises(InvalidError) as caught:
        await desk.publisher.publish_batch(house.principal, room, batch([1], [1, 1], ["x"]), None)
    assert [problem.field for problem in caught.value.problems] == [
        "messages[1].payload",
        "messages[2].payload[0]",
    ]
    assert house.run("SELECT count(*) FROM messages") == [(4,)]


async def test_a_batch_that_was_accepted_gets_its_answer_where_it_needs_too_many_checks_now(
    desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subscriptions with filters were added meanwhile, say. By its key, or by the ids of its messages."""
    room = house.room()
    house.event_type(room, schemas=[{"uniqueItems": True}])
    house.subscription(room)
    named = json.dumps(
        {
            "messages": [
                {"event_type": "order.created", "payload": [number], "id": f"m-{number}"}
                for number in range(3)
            ]
        }
    ).encode()
    calls = [(batch([1], [2], [3]), "key"), (named, None)]
    first = [
        await desk.publisher.publish_batch(house.principal, room, body, key) for body, key in calls
    ]
    monkeypatch.setattr("rooms.publishing.deferred_checks.MAX_PENDING", 1)
    for (body, key), before in zip(calls, first, strict=True):
        again = await desk.publisher.publish_batch(house.principal, room, body, key)
        assert (again.replayed, again.body) == (True, before.body)
    for body, key in ((batch([1], [2]), None), (batch([1], [2]), "other")):
        with pytest.raises(TooLargeError, match="publish fewer messages at a time"):
            await desk.publisher.publish_batch(house.principal, room, body, key)
    assert house.run("SELECT count(*) FROM messages") == [(6,)]


async def test_a_batch_that_was_accepted_gets_its_answer_where_it_makes_too_many_deliveries_now(
    desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = house.room()
    house.event_type(room)
    house.subscription(room)
    first = await desk.publisher.publish_batch(house.principal, room, batch(1, 2), "key")
    monkeypatch.setattr("rooms.publishing.batch_bounds.MAX_BATCH_DELIVERIES", 1)
    again = await desk.publisher.publish_batch(house.principal, room, batch(1, 2), "key")
    assert (again.replayed, again.body) == (True, first.body)
    with pytest.raises(TooLargeError, match="they make 2 deliveries"):
        await desk.publisher.publish_batch(house.principal, room, batch(1, 2), None)
    await desk.publisher.publish_batch(house.principal, room, batch(1), None)
    assert house.run("SELECT count(*) FROM messages") == [(3,)]


async def test_a_batch_by_a_large_schema_is_accepted(database: str, house: House) -> None:
    """Check that the schema is not copied for each message, which took a second and its memory."""
    room = house.room()
    properties = {f"p{number}": {"type": "integer", "title": "t" * 30} for number in range(3_500)}
    schema = {"properties": properties, "uniqueItems": True}
    assert 200_000 < len(json.dumps(schema)) < 256 * 1024
    house.event_type(room, schemas=[schema])
    async with open_desk(database, ROOMS_VALIDATION_MS="10000") as desk:
        answer = await desk.publisher.publish_batch(
            house.principal, room, batch(*({"p1": number} for number in range(1_000))), None
        )
        assert answer.status == 202
        assert b'rooms_sandbox_checks_total{outcome="done"} 1000.0' in desk.metrics.render()
        with pytest.raises(InvalidError) as caught:
            await desk.publisher.publish_batch(
                house.principal, room, batch(*({"p1": number} for number in range(999)), {"p1": "x"}), None
            )  # fmt: skip
        assert [one.field for one in caught.value.problems] == ["messages[999].payload.p1"]
    assert house.run("SELECT count(*) FROM messages") == [(1_000,)]


async def test_filters_of_several_jobs_match_as_one_would(database: str, house: House) -> None:
    """Check a batch whose messages are too large for one job."""
    room = house.room()
    house.event_type(room)
    wants = [
        house.subscription(
            room, wanted=f"payload.l.filter(x, x > 1).size() == 298 && payload.n % 4 == {number}"
        )
        for number in range(4)
    ]
    messages = [{"n": n, "l": list(range(300)), "pad": "x" * 250_000} for n in range(12)]
    async with open_desk(database, ROOMS_VALIDATION_MS="10000") as desk:
        answer = await desk.publisher.publish_batch(house.principal, room, batch(*messages), None)
        assert answer.status == 202
        assert b"rooms_filter_errors_total 0.0" in desk.metrics.render()
    found = house.run("SELECT subscription_id::text FROM deliveries")
    assert sorted(found) == sorted((one,) for one in wants * 3)


@pytest.mark.parametrize("is_batch", [False, True])
async def test_other_requests_go_on_while_the_filters_of_a_room_are_compiled(
    desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch, *, is_batch: bool
) -> None:
    """A filter may take 10 ms to compile, and a room may have thousands of them."""
    room = house.room()
    house.event_type(room)
    wants = [house.subscription(room, wanted=f"payload % 2 == {number % 2}") for number in range(8)]
    rounds, compiled_in = 0, []

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    def load_slowly(expression: str) -> MessageFilter:
        compiled_in.append(rounds)
        ends_ns = perf_counter_ns() + 2 * SLICE_NS
        while perf_counter_ns() < ends_ns:
            pass
        return load_filter(expression)

    monkeypatch.setattr(routing, "load_filter", load_slowly)
    others = asyncio.create_task(count_rounds())
    publish = desk.publisher.publish_batch if is_batch else desk.publisher.publish
    body = batch(0, 0) if is_batch else message(0)
    for _ in range(2):
        assert (await publish(house.principal, room, body, None)).status == 202
    others.cancel()
    assert len(compiled_in) == len(wants), "each is compiled once"
    assert max(Counter(compiled_in).values()) <= 2, "two at once at most, at the first try"
    found = house.run("SELECT subscription_id::text FROM deliveries")
    assert sorted(found) == sorted((one,) for one in wants[::2] * (4 if is_batch else 2))


async def test_a_filter_beyond_the_budget_runs_in_the_sandbox(desk: Desk, house: House) -> None:
    room = house.room()
    house.event_type(room)
    wants, does_not = (
        house.subscription(room, wanted=f"payload.l.filter(x, x > 1).size() {operator} 298")
        for operator in ("==", "!=")
    )
    await desk.publisher.publish(house.principal, room, message({"l": list(range(300))}), None)
    assert house.run("SELECT subscription_id::text FROM deliveries") == [(wants,)], does_not
    assert b"rooms_filter_errors_total 0.0" in desk.metrics.render()
    assert b'rooms_sandbox_checks_total{outcome="done"} 2.0' in desk.metrics.render()


async def test_filters_beyond_the_memory_of_a_room_run_in_the_sandbox(
    desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiled filter of a thousand characters takes 400 KiB, and a room may have 20,000."""
    room = house.room()
    house.event_type(room)
    wanted = [f"payload.number == {number}" for number in range(8)]
    monkeypatch.setattr(routing, "MAX_COMPILED_CHARACTERS", 3 * len(wanted[0]))
    of = {number: house.subscription(room, wanted=text) for number, text in enumerate(wanted)}
    for number in (1, 6):
        answer = await desk.publisher.publish(
            house.principal, room, message({"number": number}), None
        )
        assert json.loads(answer.body)["destinations"] == [
            f"room-{room}::subscription-{of[number]}"
        ]
    table = await desk.planner.get(RoomId(room), house.principal.organisation_id)
    kinds = Counter(type(one) for one in table.filters.values())
    assert kinds == {MessageFilter: 3, SandboxedFilter: 5}


@pytest.mark.parametrize(
    ("wanted", "payload"),
    [
        ("payload.s.matches(payload.s)", {"s": "a" * 200_000}),
        (
            "timestamp(payload.t).getHours(payload.z) == 5",
            {"t": "2020-01-01T00:00:00Z", "z": "/dev/stdin"},
        ),
        (
            "payload.l.all(x, payload.l.all(y, !payload.s.contains(payload.t)))",
            {"l": [1] * 1000, "s": "a" * 100_000, "t": "a" * 50_000 + "b"},
        ),
    ],
    ids=["pattern", "zone", "loops"],
)
async def test_a_filter_that_times_out_lets_the_message_pass(
    desk: Desk, house: House, wanted: str, payload: Any
) -> None:
    room = house.room()
    house.event_type(room)
    subscription = house.subscription(room, wanted=wanted)
    house.subscription(room, wanted="payload.s == 'none' || payload.z == 'none'")
    await desk.publisher.publish(
        house.principal, room, message({"s": "", "z": "", **payload}), None
    )
    assert house.run("SELECT subscription_id::text FROM deliveries") == [(subscription,)]
    assert b"rooms_filter_errors_total 1.0" in desk.metrics.render()


async def test_a_message_prepared_twice_is_published_once(desk: Desk, house: House) -> None:
    room = house.room()
    house.event_type(room, schemas=[{"uniqueItems": True}])
    house.subscription(room, wanted="payload.nothing == 1")
    await desk.publisher.publish(house.principal, room, message([1, 2], id="mine"), None)
    again = await desk.publisher.publish(house.principal, room, message([1, 2], id="mine"), None)
    assert again.replayed
    assert house.run("SELECT count(*) FROM messages") == [(1,)]
    assert b"rooms_filter_errors_total 2.0" in desk.metrics.render(), "one for each request"


async def test_a_room_that_changes_during_a_check_is_routed_again(desk: Desk, house: House) -> None:
    room = house.room()
    house.event_type(room, schemas=[SLOW])
    publishing = asyncio.create_task(
        desk.publisher.publish(house.principal, room, message(LONG), None)
    )
    await asyncio.sleep(0)
    house.change(room, f"UPDATE event_type_versions SET schema = 'true' WHERE room_id = {room};")
    answer = await publishing
    assert answer.status == 202
    assert house.run("SELECT count(*) FROM messages") == [(1,)]


async def test_a_replay_filters_like_a_publish() -> None:
    def past(number: int, payload: Any) -> PastMessage:
        return PastMessage(
            id=MessageId(f"m{number}"), event_type="e", event_version=1, priority=4, ordering_key=None, newer=False,
            payload=json.dumps(payload).encode(), headers=None,
        )  # fmt: skip

    small, large, other = (
        past(1, {"l": [1, 2]}),
        past(2, {"l": list(range(1000)) * 2}),
        past(3, {"l": [1] * 2000}),
    )
    async with idle_sandbox() as sandbox:
        wanted = await wanted_messages(
            [small, large, other], None, "payload.l.exists_one(x, x == 2)", sandbox
        )
        assert wanted == {small.id}
        assert await wanted_messages([small], None, None, sandbox) == {small.id}
        assert await wanted_messages([small], [], "true", sandbox) == set()
