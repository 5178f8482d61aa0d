"""The claim on copies that another broker handed out, and what becomes of those that have no rows."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest

from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId, MessageId
from rooms.domain.place import Place, Shape, relayed
from rooms.domain.states import Reason, State
from rooms.ports import Unreadable
from rooms.storage.claims import Claims, step_of
from rooms.storage.orphans import adopt, sideline, sideline_unreadable
from rooms.storage.outbox import Outbox
from rooms.storage.writer import Writer
from tests.installation import PAYLOAD, Installation, ago, now_ms, until

CLAIM_S = 60.0
DEADLINE = 1234.5
ROUNDED_MS = 5


@pytest.fixture
def shape() -> Shape:
    return relayed(horizon_ms=3_600_000)


@pytest.fixture
async def writer(installation: Installation) -> AsyncIterator[Writer]:
    async with Writer(installation.url, kind="worker", durable=False) as writer:
        yield writer


@pytest.fixture
async def another(installation: Installation) -> AsyncIterator[Writer]:
    async with Writer(installation.url, kind="worker", durable=False) as writer:
        yield writer


async def take(writer: Writer, *copies: Copy, dead: tuple[int, ...] = (), claim_s: float = CLAIM_S) -> list[int]:
    return await Claims(writer).take(copies, claim_s=claim_s, deadline=DEADLINE, now_ms=now_ms(), dead=dead)


async def sent(installation: Installation, *copies: Copy, place: Place = Place.PUSH_SENT) -> None:
    """Their rows, as a relay leaves them."""
    await installation.queue(*copies, shape=Shape(push=place, pull=place, horizon_ms=0))


async def test_a_claim_says_what_the_row_says(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe(version=7)
    (copy,) = await installation.publish(subscription, lifetime_s=600, attempt=2, delay_ms=250, priority=8)
    await sent(installation, copy)
    carried = replace(copy, delay_ms=1, priority=0, subscription_version=None, expires_ms=None, deadline=float("inf"))
    began = now_ms()
    assert await take(writer, carried, claim_s=3600) == [0]
    took_ms = now_ms() - began
    assert (carried.delay_ms, carried.priority, carried.subscription_version, carried.deadline) == (250, 8, 7, DEADLINE)
    assert carried.expires_ms is not None
    # The row says how long it lives from the statement's moment on, which is counted from when it was asked.
    assert -took_ms - ROUNDED_MS <= carried.expires_ms - (copy.expires_ms or 0) <= ROUNDED_MS
    assert carried.payload == PAYLOAD
    row = await installation.work("outbox", copy)
    assert row is not None
    assert (row["worker"], row["kind"]) == (writer.id, Place.PUSH_SENT)
    left = await installation.value("SELECT claimed_until - now() FROM outbox")
    assert timedelta(seconds=3600 - 600) < left <= timedelta(seconds=3600)


@pytest.mark.parametrize("place", [Place.PUSH_HERE, Place.PUSH_TO_SEND, Place.PUSH_SENT])
async def test_a_copy_is_claimed_wherever_its_row_stands(
    installation: Installation, writer: Writer, place: Place
) -> None:
    """To be sent still: it overtook the mark. Here: the installation had PostgreSQL as broker when it was queued."""
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy, place=place)
    assert await take(writer, copy) == [0]
    assert await installation.value("SELECT kind FROM outbox") == Place.PUSH_SENT


async def test_a_relays_claim_keeps_nobody_from_its_copy(
    installation: Installation, writer: Writer, another: Writer
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy, place=Place.PUSH_TO_SEND)
    await installation.rows("UPDATE outbox SET claimed_until = now() + interval '1 h', worker = %s", another.id)
    assert await take(writer, copy) == [0]
    # And now it is a worker's.
    assert await take(another, copy) == []


@pytest.mark.parametrize("place", [Place.PUSH_LATER, Place.PULL_SENT, Place.PULL_TO_SEND])
async def test_a_row_of_another_kind_is_no_copys(installation: Installation, writer: Writer, place: Place) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy, place=place)
    assert await take(writer, copy) == []


@pytest.mark.parametrize("change", [{"generation": 1}, {"attempt": 1}, {"attempt": -1}, {"generation": -1}])
async def test_another_step_is_over(installation: Installation, writer: Writer, change: dict[str, int]) -> None:
    (copy,) = await installation.publish(await installation.subscribe(), generation=1, attempt=1)
    await sent(installation, copy)
    other = replace(
        copy,
        generation=copy.generation + change.get("generation", 0),
        attempt=copy.attempt + change.get("attempt", 0),
    )
    assert await take(writer, other) == []
    standing = (await Claims(writer).look([other]))[step_of(other)]
    assert (standing.known, standing.wait_s) == (True, None)


@pytest.mark.parametrize("state", [State.HELD, State.CANCELLED, State.EXPIRED, State.DELIVERED, State.SIDELINED])
async def test_without_work_a_step_is_over(installation: Installation, writer: Writer, state: State) -> None:
    (copy,) = await installation.publish(await installation.subscribe(), state=state)
    assert await take(writer, copy) == []
    standing = (await Claims(writer).look([copy]))[step_of(copy)]
    assert (standing.known, standing.wait_s) == (True, None)


async def test_somebody_elses_claim_is_waited_for(installation: Installation, writer: Writer, another: Writer) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy)
    assert await take(another, copy, claim_s=30) == [0]
    assert await take(writer, copy) == []
    standing = (await Claims(writer).look([copy]))[step_of(copy)]
    assert standing.known
    assert standing.worker == another.id
    assert standing.wait_s is not None
    assert 0 < standing.wait_s <= 30
    # Our own is no other than anybody else's: whoever has it attempts it.
    assert await take(another, copy) == []


async def test_a_claim_that_has_run_out_is_nobodys(installation: Installation, writer: Writer, another: Writer) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy)
    assert await take(another, copy, claim_s=-1) == [0]
    assert await take(writer, copy) == [0]


async def test_the_dead_are_told_from_the_living(installation: Installation, writer: Writer, another: Writer) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy)
    await take(another, copy)
    claims, gone = Claims(writer), another.id
    assert await claims.dead([gone, writer.id]) == []
    await another.close()

    async def told() -> bool:
        return await claims.dead([gone, writer.id]) == [gone]

    await until(told, "its death")
    assert await take(writer, copy) == []
    assert await take(writer, copy, dead=(gone,)) == [0]


async def test_what_is_not_due_waits_for_postgresqls_clock(installation: Installation, writer: Writer) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy)
    await installation.rows("UPDATE outbox SET due_at = now() + interval '20 s'")
    assert await take(writer, copy) == []
    standing = (await Claims(writer).look([copy]))[step_of(copy)]
    assert standing.wait_s is not None
    assert 15 < standing.wait_s <= 20
    assert standing.worker is None


async def test_a_locked_row_is_not_waited_for(installation: Installation, writer: Writer) -> None:
    free, locked = [copy for _ in range(2) for copy in await installation.publish(await installation.subscribe())]
    await sent(installation, free, locked)
    async with installation.connection.transaction():
        await installation.rows("SELECT FROM outbox WHERE id = %s FOR UPDATE", locked.delivery_id)
        assert await take(writer, locked, free) == [1]
        standing = (await Claims(writer).look([locked]))[step_of(locked)]
        assert standing.wait_s is not None
        assert standing.wait_s <= 0
        assert (standing.known, standing.worker) == (True, None)
    assert await take(writer, locked) == [0]


async def test_a_copy_is_taken_by_one_of_many(installation: Installation) -> None:
    subscription = await installation.subscribe()
    copies = [copy for _ in range(60) for copy in await installation.publish(subscription)]
    await sent(installation, *copies)

    async def all_of_them(writer: Writer) -> list[str]:
        found: list[str] = []
        for start in range(0, len(copies), 7):
            some = copies[start:] + copies[:start]
            found += [some[index].delivery_id for index in await take(writer, *some[:20])]
        return found

    async with Writer(installation.url, kind="worker") as a, Writer(installation.url, kind="worker") as b:
        first, second = await asyncio.gather(all_of_them(a), all_of_them(b))
    assert sorted(first + second) == sorted(copy.delivery_id for copy in copies)


async def test_claims_are_hot(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    copies = [copy for _ in range(10) for copy in await installation.publish(subscription)]
    await sent(installation, *copies)
    before = await updates(installation)
    assert len(await take(writer, *copies)) == 10

    async def counted() -> bool:
        return (await updates(installation))[0] >= before[0] + 10

    await writer.run("SELECT 0, pg_stat_force_next_flush()::text", {})
    await until(counted, "the statistics")
    after = await updates(installation)
    assert after[1] - before[1] == after[0] - before[0] == 10


async def updates(installation: Installation) -> tuple[int, int]:
    await installation.rows("SELECT pg_stat_clear_snapshot()")
    (row,) = await installation.rows(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox'"
    )
    return row["n_tup_upd"], row["n_tup_hot_upd"]


async def aside(installation: Installation, copy: Copy) -> tuple[int, str]:
    """What the magazine will be told."""
    row = await installation.work("sidelined", copy)
    assert row is not None
    return row["generation"], row["reason"]


async def forget(installation: Installation, *tables: str) -> None:
    for table in tables:
        await installation.rows(f"DELETE FROM {table}")


async def test_an_orphan_gets_its_rows_from_what_it_carries(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(
        subscription, headers={"X-Own": "1"}, lifetime_s=600, generation=2, attempt=1, correlation_id='a "b" {c}'
    )
    await forget(installation, "deliveries", "messages")
    assert await take(writer, copy) == []
    assert not (await Claims(writer).look([copy]))[step_of(copy)].known
    twin, older = replace(copy), replace(copy, generation=1)
    assert await adopt(writer, [older, copy, twin]) == (1, 0)
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["generation"], row["attempt"]) == ("sidelined", Reason.ORPHAN, 2, 1)
    assert await aside(installation, copy) == (2, Reason.ORPHAN)
    assert str(row["message_id"]) == copy.message_id
    (message,) = await installation.rows("SELECT * FROM messages")
    assert bytes(message["payload"]) == PAYLOAD
    assert bytes(message["headers"]) == copy.headers
    assert (message["event_type"], message["event_version"]) == (copy.event_type, copy.event_version)
    assert message["correlation_id"] == copy.correlation_id
    assert round(message["published_at"].timestamp() * 1000) == copy.published_ms
    log = await installation.journey(copy)
    assert [(step["kind"], step["detail"]) for step in log] == [("sidelined", Reason.ORPHAN)]
    assert (await Claims(writer).look([copy]))[step_of(copy)].wait_s is None
    assert await adopt(writer, [copy]) == (0, 0)
    assert len(await installation.journey(copy)) == 1


async def test_an_orphan_keeps_the_message_that_is_there(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await forget(installation, "deliveries")
    assert await adopt(writer, [replace(copy, payload=b"another")]) == (1, 0)
    assert bytes(await installation.value("SELECT payload FROM messages")) == PAYLOAD


async def test_what_an_orphan_says_may_be_nonsense(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    (other,) = await installation.publish(subscription)
    await forget(installation, "deliveries", "messages")
    odd = replace(
        copy,
        priority=1 << 20,
        published_ms=1 << 70,
        expires_ms=-(1 << 70),
        event_type="a\x00b",
        payload=b"",
        headers=None,
    )
    odder = replace(other, priority=-5, published_ms=-1, expires_ms=1 << 62, correlation_id='"}{\\')
    assert await adopt(writer, [odd, odder]) == (2, 0)
    messages = await installation.rows("SELECT priority, payload FROM messages ORDER BY priority")
    assert [(row["priority"], bytes(row["payload"])) for row in messages] == [(0, PAYLOAD), (9, b"")]


@pytest.mark.parametrize("gone", ["subscription deleted", "no subscription", "room deleting"])
async def test_an_orphan_of_nobody_leaves_nothing(installation: Installation, writer: Writer, gone: str) -> None:
    subscription, other = await installation.subscribe(), await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    (kept,) = await installation.publish(other)
    await forget(installation, "deliveries", "messages")
    match gone:
        case "subscription deleted":
            await installation.change(subscription, status="deleted")
        case "no subscription":
            await installation.rows("DELETE FROM subscriptions WHERE id = %s", subscription)
        case _:
            await installation.rows("UPDATE rooms SET deleting = true")
    found = (0, 2) if gone == "room deleting" else (1, 1)
    assert await adopt(writer, [copy, kept]) == found
    assert await installation.value("SELECT count(*) FROM deliveries WHERE id = %s", copy.delivery_id) == 0
    assert await installation.value("SELECT count(*) FROM messages") == found[0]


@pytest.mark.parametrize("lost", [("messages",), ("messages", "deliveries")])
async def test_work_without_its_message_comes_to_rest(
    installation: Installation, writer: Writer, lost: tuple[str, ...]
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, generation=1, attempt=2)
    await sent(installation, copy)
    await forget(installation, *lost)
    (whole,) = await installation.publish(subscription)
    await sent(installation, whole)
    named = [(one.room_id, one.delivery_id) for one in (copy, whole)]
    assert await sideline(writer, named) == 1
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["generation"], row["attempt"]) == ("sidelined", Reason.ORPHAN, 1, 2)
    assert await aside(installation, copy) == (1, Reason.ORPHAN)
    assert await installation.work("outbox", copy) is None
    assert await installation.kinds(copy) == ["sidelined"]
    assert await installation.state(whole) is State.QUEUED
    assert await installation.work("outbox", whole) is not None
    assert await sideline(writer, named) == 0


async def test_a_copy_that_cannot_be_read_sidelines_the_step_it_stands_for(
    installation: Installation, writer: Writer
) -> None:
    subscription = await installation.subscribe()
    broken, moved = [copy for _ in range(2) for copy in await installation.publish(subscription)]
    await sent(installation, broken, moved)
    strange = [
        Unreadable(
            reason=f"no format 7 of {attempt}",
            delivery_id=delivery,
            generation=0,
            attempt=attempt,
            headers={},
            body=b"?",
        )
        for delivery, attempt in (
            (broken.delivery_id, 0),
            (moved.delivery_id, 1),
            (DeliveryId(installation.ids.make(installation.room, now_ms())), 0),
            (None, None),
        )
    ]
    assert await sideline_unreadable(writer, strange) == 1
    row = await installation.delivery(broken)
    assert (row["state"], row["reason"], row["last_error"]) == ("sidelined", Reason.UNREADABLE, "no format 7 of 0")
    assert await aside(installation, broken) == (0, Reason.UNREADABLE)
    assert await installation.kinds(broken) == ["sidelined"]
    assert await installation.work("outbox", broken) is None
    assert await installation.state(moved) is State.QUEUED
    assert await sideline_unreadable(writer, strange[3:]) == 0


async def test_log_rows_of_a_message_that_is_nowhere_name_what_is_known(
    installation: Installation, writer: Writer
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    lonely = replace(copy, message_id=MessageId(installation.ids.make(installation.room, now_ms())))
    await installation.queue(lonely, due=ago())
    assert await sideline(writer, [(copy.room_id, copy.delivery_id)]) == 1
    (row,) = await installation.rows("SELECT * FROM delivery_log WHERE delivery_id = %s", copy.delivery_id)
    assert (row["kind"], row["detail"], row["event_type"]) == ("sidelined", Reason.ORPHAN, None)


async def test_claims_that_end_with_their_worker_are_counted(
    installation: Installation, writer: Writer, another: Writer
) -> None:
    """Dead or frozen; not those that were given back, and not a relay's."""
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy, place=Place.PUSH_TO_SEND)
    await installation.rows("UPDATE outbox SET claimed_until = now() + interval '1 h', worker = %s", another.id)
    assert await take(writer, copy) == [0]
    assert copy.abandoned == 0
    assert await take(another, copy, dead=(writer.id,)) == [0]
    assert copy.abandoned == 1
    await Outbox(another).release([copy])
    assert await take(writer, copy) == [0]
    assert copy.abandoned == 1
    await installation.rows("UPDATE outbox SET claimed_until = now() - interval '1 s'")
    assert await take(another, copy) == [0]
    assert copy.abandoned == 2
