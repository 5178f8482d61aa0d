"""The relay's statements, each by itself: what they claim, mark, give back and refuse, and what they leave alone."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from delivery.brokers.claim_order import COMMIT_SLACK_US, ClaimWatermarks
from delivery.relay.claims import relay_watermarks
from delivery.relay.relay import linger_s
from rooms.db.queue import relay as records
from rooms.db.queue.relay import RELAY_WRITER_KIND, EndedTask, RelayBatch, RelayOutbox
from rooms.db.writer import LogWriter
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import RoomId
from rooms.domain.state_machine import Reason, State, SubscriptionStatus, SubscriptionType
from rooms.domain.work_location import WorkLocation
from rooms.errors import StorageRefusedError
from tests.support.installation import Installation, ago, until
from tests.support.relay import RELAYED, names, places, to_send

ROUNDED_MS = 5


@pytest.fixture
async def writer(database: str) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind=RELAY_WRITER_KIND) as writer:
        yield writer


@pytest.fixture
def outgoing(writer: LogWriter) -> RelayOutbox:
    return RelayOutbox(writer)


async def claim(
    outgoing: RelayOutbox, *, limit: int = 100, claim_s: float = 60, dead: tuple[int, ...] = ()
) -> RelayBatch:
    return await outgoing.claim(
        limit=limit,
        claim_s=claim_s,
        deadline=time.monotonic() + claim_s,
        watermarks_us=[0] * 10,
        dead_relays=dead,
    )


async def test_a_claim_brings_the_copy_as_it_is(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)
    (first,) = await installation.publish(
        push, generation=2, attempt=1, delay_ms=250, priority=9, lifetime_s=3600
    )
    (second,) = await installation.publish(pull, kind=SubscriptionType.PULL)
    due = datetime.now(UTC) + timedelta(seconds=60)
    await installation.queue(first, due=ago(5), shape=RELAYED)
    await installation.queue(second, due=due, shape=RELAYED)
    batch = await claim(outgoing)
    one, two = batch.tasks
    # However long the statement takes, and whatever the time of day of this process.
    assert abs((one.expires_ms or 0) - (first.expires_ms or 0)) <= ROUNDED_MS
    one.expires_ms = first.expires_ms
    for found, expected in ((one, first), (two, second)):
        expected.deadline, expected.published_ms = batch.deadline, found.published_ms
        assert found == expected
    assert batch.not_before[1] == due
    assert (batch.row_count, batch.without_message) == (2, [])
    assert (await claim(outgoing)).row_count == 0


async def test_rows_whose_sequence_numbers_cannot_be_read_are_released_at_once(
    installation: Installation, outgoing: RelayOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent without its number, a message would look like a gap."""
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.rows("UPDATE messages SET ordering_key = 'k'")
    await installation.rows("UPDATE deliveries SET sequence = 12")
    await installation.queue(copy, shape=RELAYED)

    async def refuse(*_: object) -> None:
        raise StorageRefusedError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(records, "add_sequences", refuse)
        with pytest.raises(StorageRefusedError):
            await claim(outgoing)
    (task,) = (await claim(outgoing)).tasks
    assert task.properties == DeliveryProperties(ordering_key="k", sequence=12)


async def test_only_what_is_to_be_sent_is_claimed(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    subscription = await installation.subscribe()
    for place in WorkLocation:
        (copy,) = await installation.publish(subscription)
        await installation.queue(copy, shape=RELAYED)
        await installation.rows(
            "UPDATE outbox SET kind = %s WHERE id = %s", int(place), copy.delivery_id
        )
    assert {copy.kind for copy in (await claim(outgoing)).tasks} == {
        SubscriptionType.PUSH,
        SubscriptionType.PULL,
    }
    assert (await claim(outgoing)).row_count == 0
    assert await places(installation) == dict.fromkeys(map(int, WorkLocation), 1)


async def test_the_oldest_first_and_no_more_than_asked_for(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    subscription = await installation.subscribe()
    copies = await installation.publish(subscription, subscription, subscription)
    for age, copy in enumerate(copies):
        await installation.queue(copy, due=ago(age + 1), shape=RELAYED)
    batch = await claim(outgoing, limit=2)
    assert [copy.delivery_id for copy in batch.tasks] == [
        copies[2].delivery_id,
        copies[1].delivery_id,
    ]


async def test_payloads_are_bounded(
    installation: Installation, outgoing: RelayOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_CLAIM_BYTES", 25_000)
    subscription = await installation.subscribe()
    for age in range(4):
        (copy,) = await installation.publish(subscription, payload=bytes(10_000))
        await installation.queue(copy, due=ago(10 - age), shape=RELAYED)
    batch = await claim(outgoing)
    assert (len(batch.tasks), batch.row_count) == (3, 4)
    assert len((await claim(outgoing)).tasks) == 1


async def test_a_claim_keeps_others_out_until_it_ends(
    installation: Installation, outgoing: RelayOutbox, database: str
) -> None:
    await to_send(installation, await installation.subscribe())
    async with LogWriter(database, kind=RELAY_WRITER_KIND) as writer:
        other = RelayOutbox(writer)
        (copy,) = (await claim(other, claim_s=3600)).tasks
        assert (await claim(outgoing)).row_count == 0
        await installation.rows(
            "UPDATE outbox SET claimed_until = claimed_until - interval '1 hour 1 ms'"
        )
        assert len((await claim(outgoing)).tasks) == 1
        assert (await other.mark_sent([copy]))[0] == 0, "a claim that has run out marks nothing"
    assert await places(installation) == {WorkLocation.PUSH_TO_RELAY: 1}


async def test_the_claims_of_a_dead_relay_are_free(
    installation: Installation, outgoing: RelayOutbox, database: str
) -> None:
    (copy,) = await to_send(installation, await installation.subscribe())
    async with LogWriter(database, kind=RELAY_WRITER_KIND) as writer:
        await claim(RelayOutbox(writer))
        assert await outgoing.dead_relays() == []
        dead = writer.id
    await until(outgoing.dead_relays, "the session to end")
    assert await outgoing.dead_relays() == [dead]
    assert names((await claim(outgoing, dead=(dead,))).tasks) == names([copy])


async def test_what_was_sent_is_marked(installation: Installation, outgoing: RelayOutbox) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)
    await to_send(installation, push)
    await to_send(installation, pull, kind=SubscriptionType.PULL)
    copies = (await claim(outgoing)).tasks
    assert await outgoing.mark_sent(copies) == (2, [pull])
    assert await places(installation) == {
        WorkLocation.PUSH_AT_BROKER: 1,
        WorkLocation.PULL_AT_BROKER: 1,
    }
    for row in await installation.rows("SELECT claimed_until < now() AS free, worker FROM outbox"):
        assert row == {"free": True, "worker": None}
    assert await outgoing.mark_sent(copies) == (0, [])


@pytest.mark.parametrize(
    "meanwhile",
    [
        "generation = generation + 1",
        "attempt = attempt + 1",
        "worker = 0",
        "kind = 4, worker = 77",
        "kind = 6",
    ],
)
async def test_a_row_that_moved_on_is_not_marked(
    installation: Installation, outgoing: RelayOutbox, meanwhile: str
) -> None:
    (copy,) = await to_send(installation, await installation.subscribe())
    copies = (await claim(outgoing)).tasks
    await installation.rows(f"UPDATE outbox SET {meanwhile}")
    before = await installation.work("outbox", copy)
    assert (await outgoing.mark_sent(copies))[0] == 0
    await outgoing.release(copies)
    assert await outgoing.end_deliveries([refusal(copies[0])]) == 0
    assert await installation.work("outbox", copy) == before
    assert await installation.state(copy) is State.QUEUED


async def test_what_is_given_back_is_claimed_again(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    copies = await to_send(installation, await installation.subscribe(), count=3)
    await outgoing.release((await claim(outgoing)).tasks[:2])
    assert len((await claim(outgoing)).tasks) == 2
    assert len(copies) == 3


def refusal(copy: DeliveryTask) -> EndedTask:
    return EndedTask(
        task=copy, state=State.SIDELINED, reason=Reason.UNREADABLE, error="AMQ219\"'\\{,}: header"
    )


async def test_a_refused_copy_is_sidelined_with_its_reason(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    (copy,) = await to_send(installation, await installation.subscribe())
    assert (
        await outgoing.end_deliveries([refusal(one) for one in (await claim(outgoing)).tasks]) == 1
    )
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["due_at"]) == ("sidelined", "unreadable", None)
    assert row["last_error"] == "AMQ219\"'\\{,}: header"
    assert await places(installation) == {}
    assert (
        await installation.value("SELECT reason FROM sidelined WHERE id = %s", copy.delivery_id)
        == "unreadable"
    )
    (logged,) = await installation.journey(copy)
    assert (logged["kind"], logged["detail"]) == ("sidelined", "unreadable: AMQ219\"'\\{,}: header")


async def test_a_refusal_of_a_delivery_that_ended_changes_nothing(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    (copy,) = await to_send(installation, await installation.subscribe())
    batch = await claim(outgoing)
    await installation.rows("UPDATE deliveries SET state = 'delivered'")
    assert await outgoing.end_deliveries([refusal(one) for one in batch.tasks]) == 0
    assert await installation.state(copy) is State.DELIVERED
    assert await installation.journey(copy) == []


async def test_living_and_dead_workers(installation: Installation, outgoing: RelayOutbox) -> None:
    here = await installation.subscribe()
    deleted = await installation.subscribe(status=SubscriptionStatus.DELETED)
    paused = await installation.subscribe(status=SubscriptionStatus.PAUSED)
    gone = await installation.subscribe()
    await installation.rows("DELETE FROM subscriptions WHERE id = %s", gone)
    assert await outgoing.existing_subscriptions([here, deleted, paused, gone]) == {here, paused}
    copies = await to_send(installation, here, deleted, paused, gone)
    versions = {
        copy.subscription_id: copy.subscription_version for copy in (await claim(outgoing)).tasks
    }
    assert versions == {here: 1, deleted: None, paused: 1, gone: None}
    assert len(copies) == 4


async def test_whether_anything_was_sent(
    installation: Installation, outgoing: RelayOutbox, database: str
) -> None:
    assert await outgoing.is_nothing_sent()
    await to_send(installation, await installation.subscribe(), count=2)
    assert await outgoing.is_nothing_sent()
    batch = await claim(outgoing, limit=1)
    assert await outgoing.is_nothing_sent(), "its own claims are not sent yet"
    async with LogWriter(database, kind=RELAY_WRITER_KIND) as writer:
        other = RelayOutbox(writer)
        assert not await other.is_nothing_sent()
    await outgoing.mark_sent(batch.tasks)
    assert not await outgoing.is_nothing_sent()


async def test_what_is_due_is_sent_by_priority_and_what_is_due_later_by_time(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    """A backlog: what is due goes first, the highest priority before all others, then what the broker must delay."""
    push = await installation.subscribe()
    wanted = [(9, 1), (9, -20), (4, 60), (4, 3), (0, 90), (0, -5), (7, -10)]
    copies = {}
    for priority, age_s in wanted:
        (copy,) = await installation.publish(push, priority=priority)
        await installation.queue(copy, due=ago(age_s), shape=RELAYED)
        copies[copy.delivery_id] = (priority, age_s)
    found: list[tuple[int, int]] = []
    while (batch := await claim(outgoing, limit=2)).row_count:
        assert batch.row_count == len(batch.tasks) <= 2
        found += [copies[copy.delivery_id] for copy in batch.tasks]
    assert found == [(9, 1), (4, 60), (4, 3), (0, 90), (0, -5), (7, -10), (9, -20)]


async def test_deliveries_without_their_message_are_named(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    (copy, other) = await to_send(installation, await installation.subscribe(), count=2)
    await installation.rows("DELETE FROM messages WHERE id = %s", copy.message_id)
    batch = await claim(outgoing)
    assert batch.without_message == [copy.delivery_id]
    assert names(batch.tasks) == names([other])


async def test_claims_and_marks_do_not_deadlock(installation: Installation, database: str) -> None:
    """Several relays that claim and mark the same rows at once: each row is sent by one of them."""
    subscriptions = [await installation.subscribe(SubscriptionType.PULL) for _ in range(3)]
    await to_send(installation, *subscriptions, kind=SubscriptionType.PULL, count=30)
    async with AsyncExitStack() as stack:
        writers = [
            await stack.enter_async_context(LogWriter(database, kind=RELAY_WRITER_KIND))
            for _ in range(3)
        ]
        relays = [RelayOutbox(writer) for writer in writers]
        total = 0
        while (await places(installation)).get(WorkLocation.PULL_TO_RELAY):
            for one in relays:
                batch = await claim(one, limit=7)
                total += (await one.mark_sent(list(reversed(batch.tasks))))[0] if batch.tasks else 0
    assert total == 90
    assert await places(installation) == {WorkLocation.PULL_AT_BROKER: 90}


async def test_marks_lock_rows_of_several_rooms_by_their_ids(
    installation: Installation, outgoing: RelayOutbox, database: str
) -> None:
    """As leases do, whose statements serve queues of several rooms, too."""
    earlier = await installation.subscribe(SubscriptionType.PULL)
    lower = await installation.make_room(RoomId(installation.room - 1))
    later = await installation.subscribe(SubscriptionType.PULL, room=lower)
    for subscription in (earlier, later):
        await to_send(installation, subscription, kind=SubscriptionType.PULL)
    tasks = (await claim(outgoing)).tasks
    first, second = sorted(tasks, key=lambda task: task.delivery_id)
    assert first.room_id > second.room_id
    lock = "SELECT FROM outbox WHERE id = %s FOR UPDATE"
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with await psycopg.AsyncConnection.connect(database) as lease:
        await lease.execute(lock, (first.delivery_id,))
        marking = asyncio.create_task(outgoing.mark_sent(tasks))

        async def waits() -> bool:
            return bool(await installation.rows(waiting))

        await until(waits, "the mark to wait for the first row")
        await lease.execute("SET LOCAL lock_timeout = '1s'")
        await lease.execute(lock, (second.delivery_id,))
    assert (await marking)[0] == 2


def seen(
    *, found: int, taken: int = 0, at_us: int = 10_000_000, beyond: bool = False, **highest_us: int
) -> RelayBatch:
    """`highest_us`: by priority, as `p4`."""
    return RelayBatch(
        tasks=[None] * taken,  # type: ignore[list-item]
        not_before=[],
        without_message=[],
        row_count=found,
        at_us=at_us,
        highest_due_us={int(name[1:]): due_us for name, due_us in highest_us.items()},
        has_future=beyond,
        deadline=0.0,
    )


async def test_a_claim_skips_subscriptions_and_organisations_and_names_the_owners_of_the_rest(
    installation: Installation, outgoing: RelayOutbox
) -> None:
    first, second = await installation.subscribe(), await installation.subscribe()
    await to_send(installation, first, count=2)
    await to_send(installation, second, count=3)
    at_most_nine = functools.partial(
        outgoing.claim,
        limit=9,
        claim_s=60.0,
        deadline=time.monotonic() + 60.0,
        watermarks_us=[0] * 10,
        dead_relays=(),
    )
    batch = await at_most_nine(with_owners=True)
    assert set(batch.organisations) == {first, second}
    (owner,) = set(batch.organisations.values())
    assert batch.count_by_organisation() == {owner: 5}
    await outgoing.release(batch.tasks)
    batch = await at_most_nine(excluded_subscriptions=[first])
    assert [task.subscription_id for task in batch.tasks] == [second] * 3
    assert batch.organisations == {}, "the claim was not asked for them, and is not full"
    await outgoing.release(batch.tasks)
    batch = await at_most_nine(excluded_organisations=[owner])
    assert batch.row_count == 0


def advance(
    watermarks: ClaimWatermarks[RelayBatch], batch: RelayBatch, *, limit: int
) -> tuple[int, ...]:
    watermarks.advance(batch, exhausted=batch.left_nothing_due(limit))
    return watermarks.marks.bounds


def test_the_marks_rise_by_what_was_left_nothing_of() -> None:
    low, most = relay_watermarks(), 10_000_000 - COMMIT_SLACK_US
    assert low.marks.bounds == (0,) * 10
    four = 4_000_000 - COMMIT_SLACK_US
    full = seen(found=10, taken=10, p9=8_000_000, p4=4_000_000)
    assert advance(low, full, limit=10) == (*(most,) * 5, four, *(0,) * 4), (
        "those above had no more, those below were not looked at"
    )
    large = seen(found=10, taken=4, p4=5_000_000)
    assert advance(low, large, limit=100)[5] == 5_000_000 - COMMIT_SLACK_US, (
        "payloads were too much: there is more"
    )
    own = low.copy()
    last = seen(found=3, taken=3, p4=6_000_000)
    assert advance(low, last, limit=100) == (most,) * 10, "it took all there was"
    later = seen(found=1, taken=1, at_us=11_000_000, beyond=True)
    assert advance(low, later, limit=1) == (11_000_000 - COMMIT_SLACK_US,) * 10, (
        "what is due later comes after all that is due"
    )
    low.absorb(own)
    assert low.marks.bounds == own.marks.bounds, "claims with the other marks left these"
    low.reset()
    assert low.marks.bounds == (0,) * 10


def test_copies_gather_the_longer_the_more_there_are() -> None:
    assert linger_s(1, 0.001) == 0.0
    assert 0 < linger_s(5, 0.05) < linger_s(50, 0.05) <= linger_s(5000, 0.05) <= 0.03
