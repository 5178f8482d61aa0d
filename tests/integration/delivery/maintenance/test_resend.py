"""Check scheduled work, resending of what a broker has lost, and orphan queues: statements and periodic tasks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from delivery.leadership.postgres import PostgresElection
from delivery.maintenance.cleanup import delete_orphan_queues
from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.due import DueScheduler
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.resend import BrokerRecovery
from delivery.maintenance.service import TaskIntervals, run_tasks
from rooms.clock import SystemClock
from rooms.db.jobs.delete import DeleteQueries
from rooms.db.jobs.jobs import JobQueue
from rooms.db.leases.release import LeaseQueries
from rooms.db.queue.holds import HeldGroup, Holds
from rooms.db.queue.lookahead import StageResult as Due
from rooms.db.queue.lookahead import stage_due
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.resend import BATCH, START, ResendPage, ResendQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason, State, SubscriptionStatus, SubscriptionType
from rooms.domain.work_location import AT_BROKER, TO_RELAY, WorkLocation
from rooms.errors import BrokerUnavailableError
from tests.integration.delivery.maintenance.test_service import ask, job
from tests.support.fake_broker import MemoryBroker
from tests.support.installation import PATIENCE_S, Installation, ago, installed, until
from tests.support.manual_clock import ManualClock
from tests.support.pull_service import open_counter
from tests.support.push_worker import answered
from tests.support.relay import RELAYED, Counting, places, relaying, to_send, until_sent
from tests.support.sentinel import put_sentinel
from tests.support.shifting_membership import ShiftingMembership

PULL = SubscriptionType.PULL
LONG_MS = 25_000
EVERYTHING = (*AT_BROKER, *TO_RELAY)


def always() -> bool:
    return True


@pytest.fixture
async def writer(database: str) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="upkeep", broker_mode=RELAYED) as writer:
        yield writer


@pytest.fixture
async def broker() -> AsyncIterator[Counting]:
    async with Counting() as broker:
        yield broker


async def scheduled(
    installation: Installation, due: datetime, *, kind: SubscriptionType = SubscriptionType.PUSH
) -> DeliveryTask:
    subscription = await installation.subscribe(kind)
    (copy,) = await installation.publish(
        subscription, kind=kind, state=State.SCHEDULED, attempt=2, delay_ms=90_000
    )
    await installation.queue(copy, due=due, shape=RELAYED)
    await installation.rows("UPDATE outbox SET kind = kind + 4 WHERE id = %s", copy.delivery_id)
    return copy


async def test_what_the_lookahead_reaches_is_to_be_sent(
    installation: Installation, writer: LogWriter
) -> None:
    due = await scheduled(installation, ago(5))
    near = await scheduled(installation, ago(-50), kind=PULL)
    far = await scheduled(installation, ago(-3600))
    rung: list[bool] = []
    await DueScheduler(writer, lambda: rung.append(True), ShiftingMembership({})).run(always)
    assert rung == [True]
    assert await places(installation) == {
        WorkLocation.PUSH_TO_RELAY: 1,
        WorkLocation.PULL_TO_RELAY: 1,
        WorkLocation.PUSH_SCHEDULED: 1,
    }
    assert [await installation.state(copy) for copy in (due, near, far)] == [
        "queued",
        "queued",
        "scheduled",
    ]
    row, (logged,) = await installation.delivery(near), await installation.journey(near)
    assert (row["generation"], row["attempt"]) == (0, 2), "no copy of this step was ever sent"
    assert (logged["kind"], logged["generation"], logged["attempt"]) == ("coming_due", 0, 2)
    assert await stage_due(writer, shards=range(8), limit=10) == Due(staged=0, has_more=False)


async def test_a_retry_beyond_the_lookahead_is_scheduled(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    near, far = await to_send(installation, subscription, count=2)
    outcomes = [
        DeliveryOutcome(task=copy, state=State.QUEUED, result=answered(500), delay_ms=delay_ms)
        for copy, delay_ms in ((near, 60_000), (far, 60_001))
    ]
    assert await OutcomeQueries(writer).decide(outcomes, worker=1) == 2
    assert await places(installation) == {
        WorkLocation.PUSH_TO_RELAY: 1,
        WorkLocation.PUSH_SCHEDULED: 1,
    }
    rows = [await installation.delivery(copy) for copy in (near, far)]
    assert [row["state"] for row in rows] == ["queued", "scheduled"]
    assert [row["attempt"] for row in rows] == [1, 1]
    assert rows[1]["due_at"] - rows[0]["due_at"] < timedelta(seconds=1)
    assert [await installation.kinds(copy) for copy in (near, far)] == [
        ["attempted", "retry_scheduled"]
    ] * 2
    late = DeliveryOutcome(task=far, state=State.DELIVERED)
    assert await OutcomeQueries(writer).decide([late], worker=1) == 1, "a late success counts"
    assert await places(installation) == {WorkLocation.PUSH_TO_RELAY: 1}


async def test_a_nack_beyond_the_lookahead_is_scheduled_and_a_release_goes_to_the_relay(
    installation: Installation, writer: LogWriter
) -> None:
    queue, push = await installation.subscribe(PULL), await installation.subscribe()
    copies = []
    for delay_ms in (60_000, 60_001):
        (copy,) = await installation.publish(queue, kind=PULL, state=State.LEASED)
        await installation.rows(
            "INSERT INTO leases (room_id, id, subscription_id, generation, until) VALUES (%s, %s, %s, 0, %s)",
            copy.room_id, copy.delivery_id, queue, ago(-60),
        )  # fmt: skip
        lease = (bytes.fromhex(copy.delivery_id.replace("-", "")), bytes(4))
        await LeaseQueries(writer).nack(
            copy.room_id, queue, installation.organisation, [lease], delay_ms=delay_ms
        )
        copies.append(copy)
    assert [await installation.state(copy) for copy in copies] == ["queued", "scheduled"]
    assert await places(installation) == {
        WorkLocation.PULL_TO_RELAY: 1,
        WorkLocation.PULL_SCHEDULED: 1,
    }
    assert [await installation.kinds(copy) for copy in copies] == [["nacked"]] * 2
    (held,) = await installation.publish(push, state=State.HELD)
    await installation.rows(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason) VALUES (%s, %s, %s, 4, 0, 'saturated')",
        held.room_id, held.delivery_id, push,
    )  # fmt: skip
    assert await Holds(writer).release(HeldGroup(push, Reason.SATURATED), limit=5) == 1
    work = await installation.work("outbox", held)
    assert work is not None
    assert (work["kind"], work["generation"]) == (WorkLocation.PUSH_TO_RELAY, 1)


async def sent(
    installation: Installation, *subscriptions: SubscriptionId, count: int = 1
) -> list[DeliveryTask]:
    """Deliveries whose rows say that the broker has a copy."""
    kinds = {
        subscription: await installation.value(
            "SELECT type FROM subscriptions WHERE id = %s", subscription
        )
        for subscription in subscriptions
    }
    copies = []
    for subscription in subscriptions:
        copies += await to_send(
            installation, subscription, kind=SubscriptionType(kinds[subscription]), count=count
        )
    await installation.rows(
        "UPDATE outbox SET kind = kind + 2 WHERE kind IN (2, 3) AND id = ANY (%s::uuid[])",
        [copy.delivery_id for copy in copies],
    )
    return copies


async def test_what_was_sent_is_to_be_sent_again_under_a_new_generation(
    installation: Installation, writer: LogWriter
) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    copies = await sent(installation, push, pull)
    (waiting,) = await to_send(installation, push)
    later = await scheduled(installation, ago(-500))
    look = await ResendQueries(writer).resend(
        START, locations=EVERYTHING, subscription=None, dead_writers=[]
    )
    assert (look.resent, look.scanned, look.skipped) == (2, 4, [])
    for copy in copies:
        row, work = await installation.delivery(copy), await installation.work("outbox", copy)
        assert work is not None
        assert (row["state"], row["generation"], row["attempt"]) == ("queued", 1, 0)
        assert (work["generation"], work["attempt"], work["worker"]) == (1, 0, None)
        (logged,) = await installation.journey(copy)
        assert (logged["kind"], logged["generation"], logged["detail"]) == (
            "restored",
            1,
            "lost_by_broker",
        )
    assert await places(installation) == {
        WorkLocation.PUSH_TO_RELAY: 2,
        WorkLocation.PULL_TO_RELAY: 1,
        WorkLocation.PUSH_SCHEDULED: 1,
    }
    assert [(await installation.delivery(copy))["generation"] for copy in (waiting, later)] == [
        0,
        0,
    ]
    assert look.last is not None
    assert (
        await ResendQueries(writer).resend(
            look.last, locations=EVERYTHING, subscription=None, dead_writers=[]
        )
    ).last is None


async def test_a_walk_goes_page_by_page(installation: Installation, writer: LogWriter) -> None:
    await sent(installation, await installation.subscribe(), count=7)
    other = await installation.make_room(type(installation.room)(5))
    await sent(installation, await installation.subscribe(room=other), count=2)
    after, restored, pages = START, 0, 0
    while True:
        look = await ResendQueries(writer).resend(
            after, locations=EVERYTHING, subscription=None, dead_writers=[], limit=4
        )
        if look.last is None:
            break
        after, restored, pages = look.last, restored + look.resent, pages + 1
    assert (restored, pages) == (9, 3)


async def test_rows_in_use_are_skipped_and_tried_again(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    attempted, relayed_now, dead, locked, fine = await sent(
        installation, await installation.subscribe(), count=5
    )
    await installation.rows("UPDATE outbox SET kind = 2 WHERE id = %s", relayed_now.delivery_id)
    for copy, worker in ((attempted, 11), (relayed_now, 12), (dead, 13)):
        await installation.rows(
            "UPDATE outbox SET worker = %s, claimed_until = now() + interval '1 min' WHERE id = %s",
            worker, copy.delivery_id,
        )  # fmt: skip
    recovery = ResendQueries(writer)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("SELECT FROM outbox WHERE id = %s FOR UPDATE", locked.delivery_id)
        look = await recovery.resend(
            START, locations=EVERYTHING, subscription=None, dead_writers=[13]
        )
    assert look.resent == 2
    assert {row[1] for row in look.skipped} == {
        copy.delivery_id for copy in (attempted, relayed_now, locked)
    }
    assert [
        (await installation.delivery(copy))["generation"] for copy in (dead, fine, attempted)
    ] == [1, 1, 0]
    # The relay marks what it had sent before, and the attempt goes on.
    await installation.rows(
        "UPDATE outbox SET kind = 4, worker = NULL, claimed_until = '-infinity' WHERE id = %s",
        relayed_now.delivery_id,
    )
    again = await recovery.resend_skipped(look.skipped, locations=EVERYTHING, dead_writers=[])
    assert again.resent == 2
    assert [row[1] for row in again.skipped] == [attempted.delivery_id]
    # Its decision moves it on: then there is nothing to wait for.
    await installation.rows(
        "UPDATE outbox SET attempt = 1, kind = 2, worker = NULL WHERE id = %s",
        attempted.delivery_id,
    )
    assert (
        await recovery.resend_skipped(again.skipped, locations=EVERYTHING, dead_writers=[])
    ).skipped == []


async def test_held_leased_and_finished_deliveries_are_left(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    for state in (State.HELD, State.LEASED, State.SIDELINED, State.DELIVERED):
        await installation.publish(subscription, state=state)
    (odd,) = await sent(installation, subscription)
    await installation.rows(
        "UPDATE deliveries SET state = 'delivered' WHERE id = %s", odd.delivery_id
    )
    look = await ResendQueries(writer).resend(
        START, locations=EVERYTHING, subscription=None, dead_writers=[]
    )
    assert (look.resent, look.skipped) == (0, [])
    assert await installation.value("SELECT max(generation) FROM deliveries") == 0


async def test_the_rows_of_one_queue_alone(installation: Installation, writer: LogWriter) -> None:
    push, one, two = [
        await installation.subscribe(kind) for kind in (SubscriptionType.PUSH, PULL, PULL)
    ]
    copies = await sent(installation, push, one, two)
    recovery = ResendQueries(writer)
    assert await recovery.count_sent() == {None: 1, one: 1, two: 1}
    places_of = (WorkLocation.PULL_AT_BROKER, WorkLocation.PULL_TO_RELAY)
    assert (
        await recovery.resend(START, locations=places_of, subscription=two, dead_writers=[])
    ).resent == 1
    places_of = (WorkLocation.PUSH_AT_BROKER, WorkLocation.PUSH_TO_RELAY)
    assert (
        await recovery.resend(START, locations=places_of, subscription=None, dead_writers=[])
    ).resent == 1
    assert [(await installation.delivery(copy))["generation"] for copy in copies] == [1, 0, 1]
    assert await recovery.count_sent() == {one: 1}


def recovering(
    writer: LogWriter, broker: MemoryBroker, clock: ManualClock, *, batch: int = BATCH
) -> BrokerRecovery:
    return BrokerRecovery(ResendQueries(writer), broker, clock, lambda: None, batch=batch)


async def test_a_wiped_broker_gets_everything_again(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    """All unfinished copies come again, each under the next generation, none is lost, and the mark is put there."""
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    await put_sentinel(broker)
    copies = await to_send(installation, push, count=30)
    copies += await to_send(installation, pull, kind=PULL, count=30)
    duty = recovering(writer, broker, ManualClock())
    async with relaying(installation.url, broker):
        await until_sent(installation)
        await duty.run(always)
        assert len(broker.sent) == 60, "nothing was lost, nothing is sent again"
        broker.wipe()
        await duty.run(always)
        assert await broker.has_sentinel()
        await until_sent(installation)
    expected = sorted(f"{copy.delivery_id}:1:0" for copy in copies)
    assert sorted([*broker.holds(), *broker.holds(pull)]) == expected
    assert await places(installation) == {
        WorkLocation.PUSH_AT_BROKER: 30,
        WorkLocation.PULL_AT_BROKER: 30,
    }
    assert await installation.states() == {"queued": 60}


class Paused(ResendQueries):
    """Does something between two steps of a walk."""

    between: Callable[[], Awaitable[None]] | None = None

    async def resend(self, *arguments: Any, **named: Any) -> ResendPage:
        look = await super().resend(*arguments, **named)
        if self.between is not None:
            await self.between()
        return look


async def carried(installation: Installation) -> list[str]:
    """Return the versions that a relay would send now."""
    rows = await installation.rows(
        "UPDATE outbox SET kind = kind + 2 WHERE kind IN (2, 3) RETURNING id, generation, attempt"
    )
    return [f"{row['id']}:{row['generation']}:{row['attempt']}" for row in rows]


async def test_copies_sent_during_the_walk_are_not_sent_again(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    """Copies that the walk sent are not sent again when it passes once more, nor is what is published before it ends.

    The walk ends even if a message is published with each of its steps.
    """
    push = await installation.subscribe()
    copies = await sent(installation, push, count=6)
    published: list[DeliveryTask] = []
    steps: list[str] = []

    async def between() -> None:
        published.extend(await to_send(installation, push))
        steps.extend(await carried(installation))

    records = Paused(writer)
    records.between = between
    duty = BrokerRecovery(records, broker, ManualClock(), lambda: None, batch=2)
    turns = iter([True] * 3)
    await duty.run(lambda: next(turns, False))
    assert not await broker.has_sentinel()
    assert len(published) == 2
    await duty.run(always)
    assert await broker.has_sentinel()
    assert sorted(steps) == sorted(
        [f"{copy.delivery_id}:1:0" for copy in copies] + [copy.dedup_id for copy in published]
    )


async def test_a_broker_that_was_away_meanwhile_may_have_been_emptied_again(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    copies = await sent(installation, await installation.subscribe(), count=3)
    duty = recovering(writer, broker, ManualClock(), batch=2)
    left = iter([True, True])
    await duty.run(lambda: next(left, False))
    assert len(await carried(installation)) == 2
    broker.away()
    with pytest.raises(BrokerUnavailableError):
        await duty.run(always)
    broker.back()
    await duty.run(always)
    found = [(await installation.delivery(copy))["generation"] for copy in copies]
    assert sorted(found) == [1, 2, 2]
    assert await broker.has_sentinel()


async def test_a_broker_that_restarts_during_the_walk_gets_everything_once_more(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    """The walk speaks to PostgreSQL only, so nothing but the prepared sentinel shows it."""
    copies = await sent(installation, await installation.subscribe(), count=6)
    steps: list[str] = []

    async def between() -> None:
        steps.extend(await carried(installation))
        if len(steps) == 4:
            broker.wipe()

    queries = Paused(writer)
    queries.between = between
    duty = BrokerRecovery(queries, broker, ManualClock(), lambda: None, batch=2)
    await duty.run(always)
    assert not await broker.has_sentinel()
    await duty.run(always)
    assert await broker.has_sentinel()
    steps += await carried(installation)
    assert sorted(steps) == sorted(
        f"{copy.delivery_id}:{generation}:0" for copy in copies for generation in (1, 2)
    )


async def test_a_requested_resend_that_is_due_anyway_runs_once(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    copies = await sent(installation, await installation.subscribe(), count=5)
    identity = await ask(installation, "recover", age_s=0.0)
    duty = BrokerRecovery(
        ResendQueries(writer),
        broker,
        ManualClock(),
        lambda: None,
        job_queue=JobQueue(writer),
        batch=2,
    )
    steps: list[str] = []
    for _ in range(2):
        await duty.run(always)
        steps += await carried(installation)
    assert sorted(steps) == sorted(f"{copy.delivery_id}:1:0" for copy in copies)
    row = await job(installation, identity)
    assert (row["state"], row["done"], row["total"], row["result"]) == (
        "done",
        5,
        5,
        {"sent_again": 5},
    )
    assert await broker.has_sentinel()


async def test_a_broker_emptied_after_a_recovery_was_asked_for_lacks_what_was_sent_in_between(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    """Asked for while the broker was well, done when it was not: nothing is left out, or the mark would be a lie."""
    push = await installation.subscribe()
    await put_sentinel(broker)
    identity = await ask(installation, "recover", age_s=1.0)
    copies = await sent(installation, push, count=3)
    broker.wipe()
    duty = BrokerRecovery(
        ResendQueries(writer), broker, ManualClock(), lambda: None, job_queue=JobQueue(writer)
    )
    await duty.run(always)
    assert {(await installation.delivery(copy))["generation"] for copy in copies} == {1}
    assert (await job(installation, identity))["result"] == {"sent_again": 3}
    assert await broker.has_sentinel()


async def test_what_is_pulled_while_it_is_sent_again_comes_once(
    database: str, broker: Counting
) -> None:
    """The broker lost only its sentinel: old copies exist beside the new ones, and polls go on."""
    async with (
        open_counter(database, broker=broker) as counter,
        LogWriter(database, kind="chores", broker_mode=RELAYED) as writer,
    ):
        for number in range(20):
            await counter.publish(number)
        duty = BrokerRecovery(
            ResendQueries(writer), broker, ManualClock(), counter.signals.notify_queued, batch=3
        )
        walking = asyncio.create_task(duty.run(always))
        found: list[object] = []
        while len(found) < 20:
            found += [one["payload"] for one in await counter.pull(max_messages=4, wait_ms=LONG_MS)]
        await asyncio.wait_for(walking, PATIENCE_S)
        assert sorted(found, key=str) == sorted(range(20), key=str)
        assert await counter.pull() == []
        assert counter.work() == {"outbox": 0, "held": 0, "leases": 20}


async def test_a_recovery_that_breaks_off_leaves_no_mark_and_is_begun_anew(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    await sent(installation, await installation.subscribe(), count=3)
    left = iter([True, True])
    await recovering(writer, broker, ManualClock(), batch=2).run(lambda: next(left, False))
    assert not await broker.has_sentinel()
    await recovering(writer, broker, ManualClock()).run(always)
    assert await broker.has_sentinel()
    assert await places(installation) == {WorkLocation.PUSH_TO_RELAY: 3}


async def test_an_unreachable_broker_reports_nothing(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    (copy,) = await sent(installation, await installation.subscribe())
    broker.away()
    with pytest.raises(BrokerUnavailableError):
        await recovering(writer, broker, ManualClock()).run(always)
    assert (await installation.delivery(copy))["generation"] == 0


async def test_the_mark_waits_for_a_locked_row(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    """An attempt was under way when the broker was wiped.

    Its worker dies without a word after the walk came by.
    """
    (copy,) = await sent(installation, await installation.subscribe())
    await installation.rows(
        "UPDATE outbox SET worker = 77, claimed_until = now() + interval '1 min'"
    )
    looks = 0

    def go_on() -> bool:
        nonlocal looks
        looks += 1
        return looks < 5

    duty = recovering(writer, broker, ManualClock())
    await duty.run(go_on)
    assert not await broker.has_sentinel()
    await installation.rows("UPDATE outbox SET claimed_until = now()")
    await duty.run(always)
    assert await broker.has_sentinel()
    assert (await installation.delivery(copy))["generation"] == 1


async def test_a_queue_that_holds_too_little_for_two_minutes_is_filled_again(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    await put_sentinel(broker)
    lost = await to_send(installation, pull, kind=PULL, count=3)
    kept = await to_send(installation, push, count=3)
    clock = ManualClock()
    duty = recovering(writer, broker, clock)
    async with relaying(installation.url, broker):
        await until_sent(installation)
        broker.kept[pull].waiting.pop()
        for _ in range(12):
            await duty.run(always)
            clock.now_s += 10.0
        assert len(broker.sent) == 6, "two minutes are not over"
        await duty.run(always)
        await until_sent(installation)
    assert sorted(broker.sent[6:]) == sorted(f"{copy.delivery_id}:1:0" for copy in lost)
    assert [(await installation.delivery(copy))["generation"] for copy in kept] == [0, 0, 0]


async def test_a_queue_that_is_short_now_and_then_is_left(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    await put_sentinel(broker)
    (copy,) = await sent(installation, await installation.subscribe())
    clock = ManualClock()
    duty = recovering(writer, broker, clock)
    for _ in range(3):
        await duty.run(always)
        clock.now_s += 110.0
        await broker.send([copy], not_before=[ago()])
        await duty.run(always)
        clock.now_s += 110.0
        broker.wipe()
        await put_sentinel(broker)
    assert (await installation.delivery(copy))["generation"] == 0


async def test_few_comparisons_show_no_loss_however_far_apart(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    """Where counting takes long, two of them may both meet a busy queue between two messages."""
    (copy,) = await sent(installation, await installation.subscribe())
    broker.wipe()
    await put_sentinel(broker)
    clock = ManualClock()
    duty = recovering(writer, broker, clock)
    for _ in range(11):
        await duty.run(always)
        clock.now_s += 120.0
    assert (await installation.delivery(copy))["generation"] == 0
    await duty.run(always)
    assert (await installation.delivery(copy))["generation"] == 1


async def test_expired_rows_are_not_missing_at_the_broker(
    installation: Installation, writer: LogWriter
) -> None:
    """It drops what has expired, while its row may wait for its end."""
    subscription = await installation.subscribe()
    await sent(installation, subscription)
    await sent(installation, subscription)
    queries = ResendQueries(writer)
    assert await queries.count_sent() == {None: 2}
    await installation.rows(
        "UPDATE outbox SET expires_at = now() - interval '1 s' WHERE id = (SELECT min(id::text)::uuid FROM outbox)"
    )
    assert await queries.count_sent() == {None: 1}


def deleting(writer: LogWriter, broker: MemoryBroker) -> JobRunner:
    worklist = JobQueue(writer)
    return JobRunner(
        worklist,
        DeleteJob(worklist, DeleteQueries(writer), remove_external=broker.delete_queue).handlers(),
    )


async def test_a_deleted_subscriptions_queue_is_deleted_without_consumers(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    gone, stays = await installation.subscribe(PULL), await installation.subscribe(PULL)
    await broker.create_queues([gone, stays])
    await installation.change(gone, status=SubscriptionStatus.DELETED)
    asked = await ask(
        installation, "delete_subscription", room_id=installation.room, subscription_id=gone
    )
    jobs = deleting(writer, broker)
    async with broker.consume(credit=1, subscription=gone):
        await jobs.run(always)
        await jobs.run(always)
        assert (await job(installation, asked))["state"] == "running"
        assert set(await broker.list_queues()) == {gone, stays}
    broker.away()
    await jobs.run(always)
    assert (await job(installation, asked))["state"] == "running"
    broker.back()
    await jobs.run(always)
    assert (await job(installation, asked))["state"] == "done"
    assert list(await broker.list_queues()) == [stays]


async def test_a_deleted_rooms_queues_go_before_its_rows(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    room = await installation.make_room(type(installation.room)(99), deleting=True)
    queues = [await installation.subscribe(PULL, room=room) for _ in range(3)]
    stays = await installation.subscribe(PULL)
    await broker.create_queues([*queues, stays])
    asked = await ask(installation, "delete_room", room_id=room)
    jobs = deleting(writer, broker)
    async with broker.consume(credit=1, subscription=queues[1]):
        await jobs.run(always)
        assert (
            await installation.value("SELECT count(*) FROM subscriptions WHERE room_id = %s", room)
            == 3
        )
    await jobs.run(always)
    assert (await job(installation, asked))["state"] == "done"
    assert list(await broker.list_queues()) == [stays]


async def test_orphan_queues_are_deleted(
    installation: Installation, writer: LogWriter, broker: Counting
) -> None:
    alive, deleted, never = [await installation.subscribe(PULL) for _ in range(3)]
    await installation.change(deleted, status=SubscriptionStatus.DELETED)
    await installation.rows("DELETE FROM subscriptions WHERE id = %s", never)
    await broker.create_queues([alive, deleted, never])
    async with broker.consume(credit=1, subscription=never):
        await delete_orphan_queues(writer, broker, always)
        assert set(await broker.list_queues()) == {alive, never}
    await delete_orphan_queues(writer, broker, always)
    assert list(await broker.list_queues()) == [alive]


async def test_upkeep_does_all_this_where_there_is_another_broker(
    installation: Installation, broker: Counting
) -> None:
    """Run the whole way: staging, a lost journal, a deletion with its queue, an orphan queue, an expired lease."""
    clock, stop = SystemClock(), asyncio.Event()
    later = await scheduled(installation, ago())
    pull, gone, never = [await installation.subscribe(PULL) for _ in range(3)]
    await broker.create_queues([pull, gone, never])
    await installation.rows("DELETE FROM subscriptions WHERE id = %s", never)
    lost = await sent(installation, pull, await installation.subscribe())
    (lent,) = await installation.publish(pull, kind=PULL, state=State.LEASED)
    await installation.rows(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until) VALUES (%s, %s, %s, 0, %s)",
        lent.room_id, lent.delivery_id, pull, ago(),
    )  # fmt: skip
    await installation.change(gone, status=SubscriptionStatus.DELETED)
    asked = await ask(
        installation, "delete_subscription", room_id=installation.room, subscription_id=gone
    )
    pace = TaskIntervals(
        leases_s=0.01,
        jobs_s=0.01,
        due_s=0.01,
        recovery_s=0.01,
        broker_queues_s=0.01,
        settle_s=0.0,
        retry_s=0.05,
    )
    async with PostgresElection(installation.url, member="all", clock=clock) as election:
        keeping = asyncio.create_task(
            run_tasks(
                database_url=installation.url,
                election=election,
                clock=clock,
                stop=stop,
                broker=broker,
                broker_mode=RELAYED,
                intervals=pace,
            )
        )

        async def done() -> bool:
            rows = [await installation.work("outbox", copy) for copy in (later, lent, *lost)]
            return (
                [row and row["kind"] & ~1 for row in rows] == [WorkLocation.PUSH_TO_RELAY] * 4
                and (await job(installation, asked))["state"] == "done"
                and list(await broker.list_queues()) == [pull]
                and await broker.has_sentinel()
            )

        await until(done, "all duties to be done")
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await keeping
    assert [(await installation.delivery(copy))["generation"] for copy in lost] == [1, 1]
