"""Retry what waits: which deliveries become due, both orders of every race, and a break at any step.

Oracle: a retry of the subscription that waited at the request is due, one generation on, at its
attempt and with its expiry; nothing else has changed; each unfinished delivery has one work row.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.waiting_retries import RetryWaitingJob
from rooms.db import bounded_counts
from rooms.db.jobs.jobs import JobQueue
from rooms.db.jobs.waiting_retries import WaitingRetryQueries
from rooms.db.queue.broker_claims import BrokerClaims
from rooms.db.queue.claims import Outbox
from rooms.db.queue.lookahead import stage_due
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.relay import RELAY_WRITER_KIND, RelayOutbox
from rooms.db.queue.withdraw import ChangeOutcome, cancel_message
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import PRIORITIES, DeliveryTask
from rooms.domain.ids import JobId, SubscriptionId
from rooms.domain.state_machine import State, SubscriptionType
from rooms.domain.work_location import BrokerMode, WorkLocation
from tests.integration.delivery.maintenance.test_restore import Rung, misplaced, result
from tests.integration.delivery.maintenance.test_service import (
    Times,
    always,
    ask,
    claim,
    held,
    job,
    leased,
    queued,
)
from tests.support.installation import Installation, ago, installed, now_ms, until
from tests.support.push_worker import answered
from tests.support.relay import IN_BOTH_SHAPES, RELAYED

PUSH, PULL = SubscriptionType.PUSH, SubscriptionType.PULL
HOUR_MS = 3_600_000


@pytest.fixture
async def worker(database: str, shape: BrokerMode) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="worker", broker_mode=shape, isolated=False) as writer:
        yield writer


def jobs_of(
    writer: LogWriter,
    *,
    batch: int = 200,
    read: int = 2000,
    rung: Rung | None = None,
    looks: int = 2,
    look_s: float = 0.01,
) -> JobRunner:
    queue = JobQueue(writer)
    work = RetryWaitingJob(
        queue,
        WaitingRetryQueries(writer),
        on_queued=(Rung() if rung is None else rung).append,
        batch=batch,
        max_read=read,
        max_lock_tries=looks,
    )
    return JobRunner(queue, work.handlers(), poll_s=look_s)


async def request(
    installation: Installation, subscription: SubscriptionId, *, age_s: float = 0.0
) -> JobId:
    return await ask(
        installation,
        "retry_waiting",
        age_s=age_s,
        room_id=installation.room,
        subscription_id=subscription,
        name="sub",
    )


async def waiting(
    installation: Installation,
    subscription: SubscriptionId,
    *,
    kind: SubscriptionType = PUSH,
    attempt: int = 2,
    left_s: float = 1800.0,
    lifetime_s: float | None = None,
) -> DeliveryTask:
    """A retry that waits, of an hour, for so many seconds more: where the shape has it."""
    relayed = installation.shape.is_relayed
    scheduled = relayed and left_s * 1000 > installation.shape.lookahead_ms
    (copy,) = await installation.publish(
        subscription,
        kind=kind,
        attempt=attempt,
        delay_ms=HOUR_MS,
        state=State.SCHEDULED if scheduled else State.QUEUED,
        lifetime_s=lifetime_s,
    )
    due = ago(-left_s)
    await installation.queue(copy, due=due)
    await installation.rows(
        "UPDATE deliveries SET due_at = %s WHERE id = %s", due, copy.delivery_id
    )
    if relayed:
        place = WorkLocation.PUSH_SCHEDULED if scheduled else WorkLocation.PUSH_AT_BROKER
        await installation.rows(
            "UPDATE outbox SET kind = kind %% 2 + %s WHERE id = %s", int(place), copy.delivery_id
        )
    return copy


async def snapshot(installation: Installation, copies: Sequence[DeliveryTask]) -> list[Any]:
    """Return the rows of deliveries, to see that they do not change."""
    return [
        (
            await installation.delivery(copy),
            [await installation.work(table, copy) for table in ("outbox", "held", "leases")],
        )
        for copy in copies
    ]


async def assert_due(
    installation: Installation, copy: DeliveryTask, *, generation: int = 1
) -> None:
    row, work = await installation.delivery(copy), await installation.work("outbox", copy)
    assert work is not None
    place = installation.shape.push if copy.kind is PUSH else installation.shape.pull
    assert (row["state"], row["generation"], row["attempt"]) == (
        State.QUEUED,
        generation,
        copy.attempt,
    )
    assert (work["kind"], work["generation"], work["attempt"], work["worker"]) == (
        place,
        generation,
        copy.attempt,
        None,
    )
    assert row["due_at"] == work["due_at"] <= ago(0)
    assert row["expires_at"] == work["expires_at"]
    expires = row["expires_at"]
    assert (expires and round(expires.timestamp() * 1000)) == copy.expires_ms
    last = (await installation.journey(copy))[-1]
    assert (last["kind"], last["detail"], last["generation"]) == ("restored", "retried", generation)


async def retried(installation: Installation, identity: JobId) -> int:
    found = await result(installation, identity)
    assert found.keys() == {"retried"}
    return found["retried"]


@IN_BOTH_SHAPES
@pytest.mark.parametrize("kind", [PUSH, PULL])
@pytest.mark.parametrize(("batch", "read"), [(1, 3), (2, 100), (200, 2000)])
async def test_waiting_retries_of_the_subscription_become_due(
    installation: Installation, writer: LogWriter, kind: SubscriptionType, batch: int, read: int
) -> None:
    """Check it in pages that end at a row of another subscription, and at one of this one."""
    mine, other = await installation.subscribe(kind), await installation.subscribe(kind)
    copies, kept = [], []
    for left_s, lifetime_s in ((1800.0, None), (20.0, 86_400.0), (3000.0, None)):
        copies.append(
            await waiting(installation, mine, kind=kind, left_s=left_s, lifetime_s=lifetime_s)
        )
        kept.append(await waiting(installation, other, kind=kind))
    kept.append(await waiting(installation, mine, kind=kind, attempt=0))
    kept.append(moved := await waiting(installation, mine, kind=kind))
    await installation.rows(
        "UPDATE messages SET due_at = now() + interval '1 hour' WHERE id = %s", moved.message_id
    )
    kept.append(await queued(installation, mine, kind=kind, attempt=1))
    kept.append(await held(installation, mine))
    if kind is PULL:
        kept.append(await leased(installation, mine, ago(-60)))
    before = await snapshot(installation, kept)
    rung = Rung()
    identity = await request(installation, mine)
    await jobs_of(writer, batch=batch, read=read, rung=rung).run(always)
    assert await retried(installation, identity) == len(copies)
    row = await job(installation, identity)
    assert row["done"] == len(copies)
    assert row["total"] == len(copies) + 1  # that of the message that was moved
    for copy in copies:
        await assert_due(installation, copy)
    assert await snapshot(installation, kept) == before
    assert set(rung) == {None if kind is PUSH else mine}
    assert await misplaced(writer) == []


async def test_the_log_says_how_long_a_retry_has_waited(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copy = await waiting(installation, subscription, left_s=1800.0)
    await request(installation, subscription)
    await jobs_of(writer).run(always)
    work = await installation.work("outbox", copy)
    assert work is not None
    assert work["delay_ms"] == pytest.approx(HOUR_MS - 1_800_000, abs=60_000)


@pytest.mark.parametrize(
    "status", ["paused", "suspended", "disabled", "pending", "terminated", "deleted"]
)
async def test_nothing_becomes_due_while_the_subscription_is_not_active(
    installation: Installation, writer: LogWriter, status: str
) -> None:
    subscription = await installation.subscribe()
    copies = [await waiting(installation, subscription) for _ in range(3)]
    await installation.change(subscription, status=status)
    before = await snapshot(installation, copies)
    identity = await request(installation, subscription)
    await jobs_of(writer, batch=1).run(always)
    assert await retried(installation, identity) == 0
    assert await snapshot(installation, copies) == before


async def test_a_pause_between_two_pages_leaves_the_rest(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    for _ in range(4):
        await waiting(installation, subscription)
    identity = await request(installation, subscription)
    await jobs_of(writer, batch=1, look_s=3600).run(Times(4))
    done = (await job(installation, identity))["done"]
    assert 0 < done < 4
    await installation.change(subscription, status="paused")
    await jobs_of(writer, batch=1).run(always)
    assert await retried(installation, identity) == done


async def test_a_process_that_continues_does_nothing_twice(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copies = [await waiting(installation, subscription) for _ in range(7)]
    identity = await request(installation, subscription)
    breaks = 0
    while (await job(installation, identity))["state"] in {"queued", "running"}:
        assert breaks < 60
        breaks += 1
        await jobs_of(writer, batch=1, look_s=3600).run(Times(3 + breaks % 2))
    assert breaks > 2
    assert await retried(installation, identity) == 7
    for copy in copies:
        assert await installation.kinds(copy) == ["restored"]


async def test_two_processes_at_once_change_nothing_twice(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    subscription = await installation.subscribe()
    copies = [await waiting(installation, subscription) for _ in range(20)]
    identity = await request(installation, subscription)
    async with LogWriter(database, kind="upkeep") as other:
        await asyncio.gather(*(jobs_of(one, batch=1).run(always) for one in (writer, other)))
    assert await retried(installation, identity) == 20
    for copy in copies:
        assert await installation.kinds(copy) == ["restored"]


@pytest.mark.parametrize("most", [3, 4])
async def test_retries_are_counted_where_the_room_has_few_rows(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(bounded_counts, "MAX_COUNTED", most)
    mine, other = [await installation.subscribe() for _ in range(2)]
    for subscription in (mine, mine, other, other):
        await waiting(installation, subscription)
    identity = await request(installation, mine)
    await jobs_of(writer, batch=1, look_s=3600).run(Times(3))
    row = await job(installation, identity)
    assert (row["state"], row["total"]) == ("running", 2 if most == 4 else None)
    await jobs_of(writer).run(always)
    row = await job(installation, identity)
    assert (row["state"], row["done"], row["total"]) == ("done", 2, 2)


# Races, both orders forced


async def taken(worker: LogWriter, copy: DeliveryTask) -> list[DeliveryTask]:
    """Return what the worker may attempt: by the queue, or by the copy from another broker."""
    if worker.broker_mode.is_relayed:
        claims = BrokerClaims(worker)
        return [copy] if await claims.claim([copy], claim_s=60, deadline=0, dead_workers=()) else []
    claimed = await Outbox(worker).claim(
        limit=9,
        claim_s=60,
        deadline=0,
        now_ms=now_ms(),
        watermarks_us=(0,) * PRIORITIES,
        dead_workers=(),
        excluded=frozenset(),
    )
    return list(claimed.tasks)


async def near(installation: Installation, subscription: SubscriptionId) -> DeliveryTask:
    """A retry within the look-ahead: of another broker, its copy is there."""
    return await waiting(installation, subscription, left_s=30.0)


@IN_BOTH_SHAPES
async def test_an_attempt_that_comes_after_is_made_once(
    installation: Installation, writer: LogWriter, worker: LogWriter
) -> None:
    """The copy of the version before is stale; the next one is attempted, and has its outcome."""
    subscription = await installation.subscribe()
    copy = await near(installation, subscription)
    await request(installation, subscription)
    await jobs_of(writer).run(always)
    if installation.shape.is_relayed:
        assert await taken(worker, copy) == []
        await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PUSH_AT_BROKER))
        (sent,) = await installation.rows("SELECT generation, attempt FROM outbox")
        copy.generation = sent["generation"]
    (claimed,) = await taken(worker, copy)
    assert (claimed.generation, claimed.attempt) == (1, 2)
    done = DeliveryOutcome(task=claimed, state=State.DELIVERED, result=answered(200))
    assert await OutcomeQueries(worker).decide([done], worker=worker.id) == 1
    assert await installation.state(copy) is State.DELIVERED
    assert await misplaced(writer) == []


@IN_BOTH_SHAPES
async def test_an_attempt_that_began_first_is_left_alone(
    installation: Installation, writer: LogWriter, worker: LogWriter
) -> None:
    """Its next retry began after the request, and keeps its backoff; a new request makes it due."""
    subscription = await installation.subscribe()
    copy = await near(installation, subscription)
    await claim(installation, copy, ago(-3600))
    await installation.rows("UPDATE outbox SET worker = %s", worker.id)
    first, second = [await request(installation, subscription) for _ in range(2)]
    runner = jobs_of(writer)
    await runner.run(Times(2))
    before = await snapshot(installation, [copy])
    assert before[0][0]["generation"] == 0
    failed = DeliveryOutcome(task=copy, state=State.QUEUED, result=answered(500), delay_ms=HOUR_MS)
    assert await OutcomeQueries(worker).decide([failed], worker=worker.id) == 1
    await runner.run(always)
    assert [await retried(installation, one) for one in (first, second)] == [0, 0]
    assert (await installation.delivery(copy))["generation"] == 0
    third = await request(installation, subscription)
    await runner.run(always)
    assert await retried(installation, third) == 1
    row = await installation.delivery(copy)
    assert (row["generation"], row["attempt"], row["state"]) == (1, 3, State.QUEUED)
    assert await misplaced(writer) == []


@IN_BOTH_SHAPES
async def test_a_claim_that_is_being_made_is_waited_for(
    installation: Installation, writer: LogWriter, worker: LogWriter, database: str
) -> None:
    """The claim is not committed: the walk stops before its row, and leaves it once it is claimed."""
    subscription = await installation.subscribe()
    copies = [await near(installation, subscription) for _ in range(2)]
    locked, free = sorted(copies, key=lambda copy: copy.delivery_id)
    identity = await request(installation, subscription)
    async with installed(database) as other:
        async with other.connection.transaction():
            await other.rows(
                "UPDATE outbox SET claimed_until = now() + interval '60 s', worker = %s WHERE id = %s",
                worker.id,
                locked.delivery_id,
            )
            doing = asyncio.create_task(jobs_of(writer, looks=100_000).run(always))

            async def has_begun() -> bool:
                return bool((await job(installation, identity))["state"] == "running")

            await until(has_begun, "the walk to begin")
            assert (await job(installation, identity))["done"] == 0
        await doing
    assert await retried(installation, identity) == 1
    assert (await installation.delivery(locked))["generation"] == 0
    await assert_due(installation, free)


async def test_a_row_that_is_locked_for_long_is_passed_over(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    subscription = await installation.subscribe()
    copies = sorted(
        [await waiting(installation, subscription) for _ in range(3)],
        key=lambda copy: copy.delivery_id,
    )
    identity = await request(installation, subscription)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("SELECT FROM deliveries WHERE id = %s FOR UPDATE", copies[1].delivery_id)
        await jobs_of(writer).run(always)
    assert await result(installation, identity) == {"retried": 2, "busy": 1}
    assert [(await installation.delivery(copy))["generation"] for copy in copies] == [1, 0, 1]


@pytest.mark.parametrize("shape", [RELAYED])
async def test_what_is_being_given_to_the_relay_becomes_due_too(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    """Maintenance moves a scheduled retry that comes within the look-ahead meanwhile."""
    subscription = await installation.subscribe()
    copy = await waiting(installation, subscription, left_s=61.0)
    identity = await request(installation, subscription)
    await installation.rows(
        "UPDATE outbox SET due_at = due_at - interval '2 s', delay_ms = delay_ms - 2000"
    )
    async with LogWriter(database, kind="upkeep", broker_mode=RELAYED) as other:
        staged = await stage_due(other, shards=range(8), limit=9)
    assert staged.staged == 1
    await jobs_of(writer).run(always)
    assert await retried(installation, identity) == 1
    await assert_due(installation, copy)


@pytest.mark.parametrize("shape", [RELAYED])
async def test_what_a_relay_is_sending_becomes_due_and_is_sent_again(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    """The relay has claimed the retry: its mark finds another version, and the next is sent."""
    subscription = await installation.subscribe()
    copy = await near(installation, subscription)
    await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PUSH_TO_RELAY))
    async with LogWriter(database, kind=RELAY_WRITER_KIND) as relay:
        outgoing = RelayOutbox(relay)

        async def claimed() -> Sequence[DeliveryTask]:
            batch = await outgoing.claim(
                limit=9, claim_s=60, deadline=0, watermarks_us=[0] * PRIORITIES, dead_relays=()
            )
            return batch.tasks

        first = await claimed()
        assert [one.generation for one in first] == [0]
        identity = await request(installation, subscription)
        await jobs_of(writer).run(always)
        assert await retried(installation, identity) == 1
        assert (await outgoing.mark_sent(first))[0] == 0
        second = await claimed()
        assert [(one.generation, one.attempt) for one in second] == [(1, copy.attempt)]
        assert (await outgoing.mark_sent(second))[0] == 1
    work = await installation.work("outbox", copy)
    assert work is not None
    assert (work["kind"], work["generation"]) == (WorkLocation.PUSH_AT_BROKER, 1)
    assert await misplaced(writer) == []


async def test_a_cancelled_message_stays_cancelled(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    first, second = [await waiting(installation, subscription) for _ in range(2)]
    (reported,) = await cancel_message(writer, first.message_id)
    assert reported.outcome is ChangeOutcome.DONE
    identity = await request(installation, subscription)
    await jobs_of(writer).run(always)
    (reported,) = await cancel_message(writer, second.message_id)
    assert reported.outcome is ChangeOutcome.DONE
    assert await retried(installation, identity) == 1
    assert await installation.states() == {"cancelled": 2}
    assert await misplaced(writer) == []


async def test_a_retry_whose_work_row_was_made_again_becomes_due(
    installation: Installation, writer: LogWriter
) -> None:
    """Its row says nothing of how long it waits."""
    subscription = await installation.subscribe()
    copy = await waiting(installation, subscription)
    await installation.rows("UPDATE outbox SET delay_ms = 0")
    identity = await request(installation, subscription)
    await jobs_of(writer).run(always)
    assert await retried(installation, identity) == 1
    work = await installation.work("outbox", copy)
    assert work is not None
    assert work["delay_ms"] == 0


async def test_a_retry_beyond_its_lifetime_expires_when_it_would_have(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copy = await waiting(installation, subscription, lifetime_s=600.0)
    await request(installation, subscription)
    await jobs_of(writer).run(always)
    row = await installation.delivery(copy)
    assert row["expires_at"] - datetime.now(row["expires_at"].tzinfo) < timedelta(seconds=600)
    await assert_due(installation, copy)
