"""The claim on copies that another broker handed out, and what becomes of those that have no rows."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest

from rooms.db.queue.broker_claims import BrokerClaims, version_of
from rooms.db.queue.claims import Outbox
from rooms.db.queue.orphans import create_orphan_rows, sideline_unreadable, sideline_without_message
from rooms.db.writer import LogWriter
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, MessageId
from rooms.domain.state_machine import Reason, State
from rooms.domain.work_location import BrokerMode, WorkLocation, relayed_mode
from rooms.ports import MalformedMessage
from tests.support.installation import PAYLOAD, Installation, ago, now_ms, until

CLAIM_S = 60.0
DEADLINE = 1234.5
ROUNDED_MS = 5


@pytest.fixture
def shape() -> BrokerMode:
    return relayed_mode(lookahead_ms=3_600_000)


@pytest.fixture
async def writer(installation: Installation) -> AsyncIterator[LogWriter]:
    async with LogWriter(installation.url, kind="worker", durable=False) as writer:
        yield writer


@pytest.fixture
async def another(installation: Installation) -> AsyncIterator[LogWriter]:
    async with LogWriter(installation.url, kind="worker", durable=False) as writer:
        yield writer


async def take(
    writer: LogWriter, *copies: DeliveryTask, dead: tuple[int, ...] = (), claim_s: float = CLAIM_S
) -> list[int]:
    return await BrokerClaims(writer).claim(
        copies, claim_s=claim_s, deadline=DEADLINE, dead_workers=dead
    )


async def sent(
    installation: Installation,
    *copies: DeliveryTask,
    place: WorkLocation = WorkLocation.PUSH_AT_BROKER,
) -> None:
    """Their rows, as a relay leaves them."""
    await installation.queue(*copies, shape=BrokerMode(push=place, pull=place, lookahead_ms=0))


async def test_a_claim_says_what_the_row_says(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe(version=7)
    (copy,) = await installation.publish(
        subscription, lifetime_s=600, attempt=2, delay_ms=250, priority=8
    )
    await sent(installation, copy)
    carried = replace(
        copy,
        delay_ms=1,
        priority=0,
        subscription_version=None,
        expires_ms=None,
        deadline=float("inf"),
    )
    assert await take(writer, carried, claim_s=3600) == [0]
    assert (carried.delay_ms, carried.priority, carried.subscription_version, carried.deadline) == (
        250,
        8,
        7,
        DEADLINE,
    )
    assert carried.expires_ms is not None
    assert abs(carried.expires_ms - (copy.expires_ms or 0)) <= ROUNDED_MS
    left_s = await installation.value(
        "SELECT extract(epoch FROM expires_at - now())::float8 FROM outbox"
    )
    assert abs(carried.expires_at - time.monotonic() - left_s) < 5
    assert carried.payload == PAYLOAD
    row = await installation.work("outbox", copy)
    assert row is not None
    assert (row["worker"], row["kind"]) == (writer.id, WorkLocation.PUSH_AT_BROKER)
    left = await installation.value("SELECT claimed_until - now() FROM outbox")
    assert timedelta(seconds=3600 - 600) < left <= timedelta(seconds=3600)


@pytest.mark.parametrize(
    "place", [WorkLocation.PUSH_LOCAL, WorkLocation.PUSH_TO_RELAY, WorkLocation.PUSH_AT_BROKER]
)
async def test_a_copy_is_claimed_in_every_location_of_its_row(
    installation: Installation, writer: LogWriter, place: WorkLocation
) -> None:
    """To be sent still: it overtook the mark. Here: the installation had PostgreSQL as broker when it was queued."""
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy, place=place)
    assert await take(writer, copy) == [0]
    assert await installation.value("SELECT kind FROM outbox") == WorkLocation.PUSH_AT_BROKER


async def test_a_relays_claim_does_not_block_its_copy(
    installation: Installation, writer: LogWriter, another: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy, place=WorkLocation.PUSH_TO_RELAY)
    await installation.rows(
        "UPDATE outbox SET claimed_until = now() + interval '1 h', worker = %s", another.id
    )
    assert await take(writer, copy) == [0]
    # And now it is a worker's.
    assert await take(another, copy) == []


@pytest.mark.parametrize(
    "place", [WorkLocation.PUSH_SCHEDULED, WorkLocation.PULL_AT_BROKER, WorkLocation.PULL_TO_RELAY]
)
async def test_a_row_of_another_kind_is_no_copys(
    installation: Installation, writer: LogWriter, place: WorkLocation
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy, place=place)
    assert await take(writer, copy) == []


@pytest.mark.parametrize(
    "change", [{"generation": 1}, {"attempt": 1}, {"attempt": -1}, {"generation": -1}]
)
async def test_another_step_is_over(
    installation: Installation, writer: LogWriter, change: dict[str, int]
) -> None:
    (copy,) = await installation.publish(await installation.subscribe(), generation=1, attempt=1)
    await sent(installation, copy)
    other = replace(
        copy,
        generation=copy.generation + change.get("generation", 0),
        attempt=copy.attempt + change.get("attempt", 0),
    )
    assert await take(writer, other) == []
    standing = (await BrokerClaims(writer).inspect([other]))[version_of(other)]
    assert (standing.exists, standing.wait_s) == (True, None)


@pytest.mark.parametrize(
    "state", [State.HELD, State.CANCELLED, State.EXPIRED, State.DELIVERED, State.SIDELINED]
)
async def test_without_work_a_step_is_over(
    installation: Installation, writer: LogWriter, state: State
) -> None:
    (copy,) = await installation.publish(await installation.subscribe(), state=state)
    assert await take(writer, copy) == []
    standing = (await BrokerClaims(writer).inspect([copy]))[version_of(copy)]
    assert (standing.exists, standing.wait_s) == (True, None)


async def test_a_claim_of_another_worker_is_waited_for(
    installation: Installation, writer: LogWriter, another: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy)
    assert await take(another, copy, claim_s=30) == [0]
    assert await take(writer, copy) == []
    standing = (await BrokerClaims(writer).inspect([copy]))[version_of(copy)]
    assert standing.exists
    assert standing.claimed_by == another.id
    assert standing.wait_s is not None
    assert 0 < standing.wait_s <= 30
    # An own claim counts like any other: the worker that has it makes the attempt.
    assert await take(another, copy) == []


async def test_an_expired_claim_belongs_to_no_worker(
    installation: Installation, writer: LogWriter, another: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy)
    assert await take(another, copy, claim_s=-1) == [0]
    assert await take(writer, copy) == [0]


async def test_dead_workers_are_distinguished_from_living_ones(
    installation: Installation, writer: LogWriter, another: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy)
    await take(another, copy)
    claims, gone = BrokerClaims(writer), another.id
    assert await claims.dead_workers([gone, writer.id]) == []
    await another.close()

    async def is_recorded() -> bool:
        return await claims.dead_workers([gone, writer.id]) == [gone]

    await until(is_recorded, "its death")
    assert await take(writer, copy) == []
    assert await take(writer, copy, dead=(gone,)) == [0]


async def test_what_is_not_due_waits_for_postgresqls_clock(
    installation: Installation, writer: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy)
    await installation.rows("UPDATE outbox SET due_at = now() + interval '20 s'")
    assert await take(writer, copy) == []
    standing = (await BrokerClaims(writer).inspect([copy]))[version_of(copy)]
    assert standing.wait_s is not None
    assert 15 < standing.wait_s <= 20
    assert standing.claimed_by is None


async def test_a_locked_row_is_not_waited_for(
    installation: Installation, writer: LogWriter
) -> None:
    free, locked = [
        copy
        for _ in range(2)
        for copy in await installation.publish(await installation.subscribe())
    ]
    await sent(installation, free, locked)
    async with installation.connection.transaction():
        await installation.rows("SELECT FROM outbox WHERE id = %s FOR UPDATE", locked.delivery_id)
        assert await take(writer, locked, free) == [1]
        standing = (await BrokerClaims(writer).inspect([locked]))[version_of(locked)]
        assert standing.wait_s is not None
        assert standing.wait_s <= 0
        assert (standing.exists, standing.claimed_by) == (True, None)
    assert await take(writer, locked) == [0]


async def test_a_copy_is_taken_by_one_of_many(installation: Installation) -> None:
    subscription = await installation.subscribe()
    copies = [copy for _ in range(60) for copy in await installation.publish(subscription)]
    await sent(installation, *copies)

    async def all_of_them(writer: LogWriter) -> list[str]:
        found: list[str] = []
        for start in range(0, len(copies), 7):
            some = copies[start:] + copies[:start]
            found += [some[index].delivery_id for index in await take(writer, *some[:20])]
        return found

    async with (
        LogWriter(installation.url, kind="worker") as a,
        LogWriter(installation.url, kind="worker") as b,
    ):
        first, second = await asyncio.gather(all_of_them(a), all_of_them(b))
    assert sorted(first + second) == sorted(copy.delivery_id for copy in copies)


async def test_claims_are_hot(installation: Installation, writer: LogWriter) -> None:
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


async def aside(installation: Installation, copy: DeliveryTask) -> tuple[int, str]:
    """Return what the magazine will get."""
    row = await installation.work("sidelined", copy)
    assert row is not None
    return row["generation"], row["reason"]


async def forget(installation: Installation, *tables: str) -> None:
    for table in tables:
        await installation.rows(f"DELETE FROM {table}")


async def test_an_orphan_gets_its_rows_from_what_it_carries(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(
        subscription,
        headers={"X-Own": "1"},
        lifetime_s=600,
        generation=2,
        attempt=1,
        correlation_id='a "b" {c}',
    )
    copy.properties = DeliveryProperties(ordering_key='k "{"', sequence=41, business_key="order, 9")
    await forget(installation, "deliveries", "messages")
    assert await take(writer, copy) == []
    assert not (await BrokerClaims(writer).inspect([copy]))[version_of(copy)].exists
    twin, older = replace(copy), replace(copy, generation=1)
    assert await create_orphan_rows(writer, [older, copy, twin]) == (1, 0)
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["generation"], row["attempt"]) == (
        "sidelined",
        Reason.ORPHAN,
        2,
        1,
    )
    assert await aside(installation, copy) == (2, Reason.ORPHAN)
    assert str(row["message_id"]) == copy.message_id
    (message,) = await installation.rows("SELECT * FROM messages")
    assert bytes(message["payload"]) == PAYLOAD
    assert bytes(message["headers"]) == copy.headers
    assert (message["event_type"], message["event_version"]) == (
        copy.event_type,
        copy.event_version,
    )
    assert message["correlation_id"] == copy.correlation_id
    assert round(message["published_at"].timestamp() * 1000) == copy.published_ms
    # Without its number a consumer would take it for lost.
    assert row["sequence"] == 41
    assert (message["ordering_key"], message["business_key"]) == ('k "{"', "order, 9")
    log = await installation.journey(copy)
    assert [(step["kind"], step["detail"]) for step in log] == [("sidelined", Reason.ORPHAN)]
    assert (await BrokerClaims(writer).inspect([copy]))[version_of(copy)].wait_s is None
    assert await create_orphan_rows(writer, [copy]) == (0, 0)
    assert len(await installation.journey(copy)) == 1


async def test_an_orphan_keeps_the_message_that_is_there(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await forget(installation, "deliveries")
    assert await create_orphan_rows(writer, [replace(copy, payload=b"another")]) == (1, 0)
    assert bytes(await installation.value("SELECT payload FROM messages")) == PAYLOAD


async def test_what_an_orphan_says_may_be_nonsense(
    installation: Installation, writer: LogWriter
) -> None:
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
        properties=DeliveryProperties(
            ordering_key="k" * 10_000, sequence=1 << 63, business_key="b" * 10_000
        ),
    )
    odder = replace(
        other,
        priority=-5,
        published_ms=-1,
        expires_ms=1 << 62,
        correlation_id='"}{\\',
        properties=DeliveryProperties(ordering_key="", sequence=0, business_key="a\x00b"),
    )
    assert await create_orphan_rows(writer, [odd, odder]) == (2, 0)
    keys = await installation.rows(
        "SELECT m.ordering_key, d.sequence, m.business_key FROM deliveries d"
        " JOIN messages m ON m.id = d.message_id ORDER BY m.priority"
    )
    assert [tuple(row.values()) for row in keys] == [(None, None, "a\ufffdb"), (None, None, None)]
    messages = await installation.rows("SELECT priority, payload FROM messages ORDER BY priority")
    assert [(row["priority"], bytes(row["payload"])) for row in messages] == [
        (0, PAYLOAD),
        (9, b""),
    ]


@pytest.mark.parametrize("gone", ["subscription deleted", "no subscription", "room deleting"])
async def test_an_orphan_without_a_subscription_leaves_nothing(
    installation: Installation, writer: LogWriter, gone: str
) -> None:
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
    assert await create_orphan_rows(writer, [copy, kept]) == found
    assert (
        await installation.value("SELECT count(*) FROM deliveries WHERE id = %s", copy.delivery_id)
        == 0
    )
    assert await installation.value("SELECT count(*) FROM messages") == found[0]


@pytest.mark.parametrize("lost", [("messages",), ("messages", "deliveries")])
async def test_work_without_its_message_is_sidelined(
    installation: Installation, writer: LogWriter, lost: tuple[str, ...]
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, generation=1, attempt=2)
    await sent(installation, copy)
    await forget(installation, *lost)
    (whole,) = await installation.publish(subscription)
    await sent(installation, whole)
    named = [(one.room_id, one.delivery_id) for one in (copy, whole)]
    assert await sideline_without_message(writer, named) == 1
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["generation"], row["attempt"]) == (
        "sidelined",
        Reason.ORPHAN,
        1,
        2,
    )
    assert await aside(installation, copy) == (1, Reason.ORPHAN)
    assert await installation.work("outbox", copy) is None
    assert await installation.kinds(copy) == ["sidelined"]
    assert await installation.state(whole) is State.QUEUED
    assert await installation.work("outbox", whole) is not None
    assert await sideline_without_message(writer, named) == 0


async def test_a_copy_that_cannot_be_read_sidelines_its_delivery(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    broken, moved = [copy for _ in range(2) for copy in await installation.publish(subscription)]
    await sent(installation, broken, moved)
    strange = [
        MalformedMessage(
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
            (DeliveryId(installation.ids.generate(installation.room, now_ms())), 0),
            (None, None),
        )
    ]
    assert await sideline_unreadable(writer, strange) == 1
    row = await installation.delivery(broken)
    assert (row["state"], row["reason"], row["last_error"]) == (
        "sidelined",
        Reason.UNREADABLE,
        "no format 7 of 0",
    )
    assert await aside(installation, broken) == (0, Reason.UNREADABLE)
    assert await installation.kinds(broken) == ["sidelined"]
    assert await installation.work("outbox", broken) is None
    assert await installation.state(moved) is State.QUEUED
    assert await sideline_unreadable(writer, strange[3:]) == 0


async def test_log_rows_of_a_message_that_is_nowhere_name_what_is_known(
    installation: Installation, writer: LogWriter
) -> None:
    (copy,) = await installation.publish(await installation.subscribe())
    lonely = replace(
        copy, message_id=MessageId(installation.ids.generate(installation.room, now_ms()))
    )
    await installation.queue(lonely, due=ago())
    assert await sideline_without_message(writer, [(copy.room_id, copy.delivery_id)]) == 1
    (row,) = await installation.rows(
        "SELECT * FROM delivery_log WHERE delivery_id = %s", copy.delivery_id
    )
    assert (row["kind"], row["detail"], row["event_type"]) == ("sidelined", Reason.ORPHAN, None)


async def test_claims_that_end_with_their_worker_are_counted(
    installation: Installation, writer: LogWriter, another: LogWriter
) -> None:
    """Dead or frozen; not those that were given back, and not a relay's."""
    (copy,) = await installation.publish(await installation.subscribe())
    await sent(installation, copy, place=WorkLocation.PUSH_TO_RELAY)
    await installation.rows(
        "UPDATE outbox SET claimed_until = now() + interval '1 h', worker = %s", another.id
    )
    assert await take(writer, copy) == [0]
    assert copy.crash_count == 0
    assert await take(another, copy, dead=(writer.id,)) == [0]
    assert copy.crash_count == 1
    await Outbox(another).release([copy])
    assert await take(writer, copy) == [0]
    assert copy.crash_count == 1
    await installation.rows("UPDATE outbox SET claimed_until = now() - interval '1 s'")
    assert await take(another, copy) == [0]
    assert copy.crash_count == 2
