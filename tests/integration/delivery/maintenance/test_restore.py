"""Restores and clears: every state, every place, both orders of every race, and a break at any step.

Oracle: an unfinished delivery has exactly one work row, at its generation and attempt, and nothing that a living process
has claimed is moved.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.restore import ClearJob, RestoreJob
from rooms.db.jobs.jobs import JobQueue
from rooms.db.jobs.restore import ClearQueries, RestoreQueries
from rooms.db.queue.claims import Outbox
from rooms.db.queue.integrity import START, IntegrityCheck
from rooms.db.queue.ordering import OrderingQueries
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.withdraw import ChangeOutcome, cancel_message
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import JobId, SubscriptionId
from rooms.domain.state_machine import UNFINISHED, State, SubscriptionType
from rooms.domain.work_location import WorkLocation
from tests.integration.delivery.maintenance.test_service import (
    NothingDone,
    Times,
    always,
    ask,
    claim,
    in_every_state,
    job,
    leased,
    queued,
)
from tests.support.installation import Installation, ago, installed, now_ms, until
from tests.support.push_worker import answered
from tests.support.relay import RELAYED

PULL = SubscriptionType.PULL
ENDED = (State.EXPIRED, State.CANCELLED, State.DROPPED)
BACK = (State.SCHEDULED, State.QUEUED, State.HELD)


async def restore(
    installation: Installation,
    states: Iterable[State] = UNFINISHED,
    *,
    age_s: float = 0.0,
    **arguments: Any,
) -> JobId:
    return await ask(
        installation,
        "restore",
        age_s=age_s,
        room_id=installation.room,
        states=sorted(states),
        **arguments,
    )


async def clear(installation: Installation, *, age_s: float = 0.0) -> JobId:
    return await ask(installation, "clear_room", age_s=age_s, room_id=installation.room)


async def _claimed(worker: LogWriter) -> Sequence[DeliveryTask]:
    """Return what a worker claims of PUSH."""
    outbox = Outbox(worker)
    claim = await outbox.claim(
        limit=10,
        claim_s=60,
        deadline=0,
        now_ms=now_ms(),
        watermarks_us=[0] * 10,
        dead_workers=[],
        excluded=frozenset(),
    )
    return claim.tasks


class Rung(list[SubscriptionId | None]):
    """Return the notified subscriptions."""


def jobs_of(
    writer: LogWriter,
    *,
    batch: int = 500,
    rung: Rung | None = None,
    looks: int = 2,
    look_s: float = 0.01,
) -> JobRunner:
    worklist, restores = JobQueue(writer), RestoreQueries(writer)
    queued = (Rung() if rung is None else rung).append
    return JobRunner(
        worklist,
        {
            **RestoreJob(
                worklist, restores, on_queued=queued, batch=batch, max_lock_tries=looks
            ).handlers(),
            **ClearJob(
                worklist,
                ClearQueries(writer),
                restores,
                OrderingQueries(writer),
                on_queued=queued,
                batch=batch,
                round_pause_s=0.01,
            ).handlers(),
        },
        poll_s=look_s,
    )


async def misplaced(writer: LogWriter) -> list[str]:
    """Return what the doctor would find."""
    found, _, _ = await IntegrityCheck(writer).scan(START)
    return [f"{one.state} {one.kind}" for one in found]


async def result(installation: Installation, identity: JobId) -> dict[str, int]:
    row = await job(installation, identity)
    assert (row["state"], row["error"]) == ("done", None)
    found: dict[str, int] = row["result"] or {}
    return found


async def test_what_is_unfinished_is_restored_and_keeps_attempt_and_due_time(
    installation: Installation, writer: LogWriter
) -> None:
    copies = await in_every_state(installation, None)
    due = datetime.now().astimezone() + timedelta(hours=1)
    (retried,) = await installation.publish(
        await installation.subscribe(), attempt=2, delay_ms=4000
    )
    await installation.queue(retried, due=due)
    rung = Rung()
    identity = await restore(installation)
    await jobs_of(writer, rung=rung).run(always)
    for state, copy in copies.items():
        row = await installation.delivery(copy)
        moves = state in BACK
        after = State.QUEUED if state is State.SCHEDULED else state
        assert (row["state"], row["generation"], row["attempt"]) == (after, int(moves), 0), state
        assert await installation.kinds(copy) == (["restored"] if moves else [])
    row, work = await installation.delivery(retried), await installation.work("outbox", retried)
    assert work is not None
    assert (row["generation"], row["attempt"], row["due_at"]) == (1, 2, due)
    assert (work["generation"], work["attempt"], work["due_at"], work["delay_ms"]) == (
        1,
        2,
        due,
        4000,
    )
    found = await result(installation, identity)
    assert found == {"restored": 4, "leased": 1}
    row = await job(installation, identity)
    assert row["done"] == row["total"] == len(copies) + 1
    assert None in rung
    lease = await installation.work("leases", copies[State.LEASED])
    assert lease is not None
    assert lease["generation"] == 0
    assert await misplaced(writer) == ["sidelined missing"]  # made without its row by the test


async def ended(
    installation: Installation,
    state: State,
    *,
    subscription: SubscriptionId | None = None,
    attempt: int = 3,
) -> DeliveryTask:
    (copy,) = await installation.publish(
        subscription or await installation.subscribe(),
        state=state,
        attempt=attempt,
        lifetime_s=-60.0,
    )
    return copy


async def test_what_ended_is_restored_if_asked_for_with_a_fresh_lifetime(
    installation: Installation, writer: LogWriter
) -> None:
    await installation.rows("UPDATE rooms SET message_expiration_ms = 60000")
    kinds = (SubscriptionType.PUSH, PULL)
    subscriptions = [await installation.subscribe(kind) for kind in kinds]
    copies = [
        await ended(installation, state, subscription=one)
        for state in ENDED
        for one in subscriptions
    ]
    gone = await installation.subscribe(status="deleted")
    left = await ended(installation, State.CANCELLED, subscription=gone)
    none = await restore(installation)
    rung = Rung()
    jobs = jobs_of(writer, rung=rung)
    await jobs.run(always)
    assert await result(installation, none) == {"restored": 0}
    some = await restore(installation, [State.EXPIRED])
    await jobs.run(always)
    assert await result(installation, some) == {"renewed": 2, "restored": 0}
    rest = await restore(installation, ENDED)
    await jobs.run(always)
    assert await result(installation, rest) == {
        "renewed": 4,
        "subscription_gone": 1,
        "restored": 0,
    }
    for copy in copies:
        row, work = await installation.delivery(copy), await installation.work("outbox", copy)
        assert work is not None
        assert (row["state"], row["generation"], row["attempt"], row["reason"]) == (
            State.QUEUED,
            1,
            0,
            None,
        )
        assert row["expires_at"] - row["due_at"] == timedelta(seconds=60)
        assert (work["generation"], work["attempt"], work["expires_at"]) == (
            1,
            0,
            row["expires_at"],
        )
        assert work["kind"] == (
            WorkLocation.PUSH_LOCAL
            if copy.subscription_id == subscriptions[0]
            else WorkLocation.PULL_LOCAL
        )
        assert await installation.kinds(copy) == ["restored"]
    assert set(rung) == {None, subscriptions[1]}
    assert await installation.state(left) == State.CANCELLED
    assert await misplaced(writer) == []


@pytest.mark.parametrize(("own_ms", "life_s"), [(10_000, 10), (900_000, 60)])
async def test_a_fresh_lifetime_is_the_shorter_one_of_room_and_subscription(
    installation: Installation, writer: LogWriter, own_ms: int, life_s: int
) -> None:
    await installation.rows("UPDATE rooms SET message_expiration_ms = 60000")
    subscription = await installation.subscribe(message_expiration_ms=own_ms)
    copy = await ended(installation, State.EXPIRED, subscription=subscription)
    await restore(installation, [State.EXPIRED])
    await jobs_of(writer).run(always)
    row = await installation.delivery(copy)
    assert row["expires_at"] - row["due_at"] == timedelta(seconds=life_s)


@pytest.mark.parametrize(("room_ms", "life_s"), [(None, 60), (0, 60), (10_000, 10), (900_000, 60)])
async def test_a_fresh_lifetime_is_at_most_the_quota_of_the_organisation(
    installation: Installation, writer: LogWriter, room_ms: int | None, life_s: int
) -> None:
    await installation.rows("UPDATE organisations SET quotas = '{\"expiration_ms\": 60000}'")
    await installation.rows("UPDATE rooms SET message_expiration_ms = %s", room_ms)
    copy = await ended(installation, State.EXPIRED)
    await restore(installation, [State.EXPIRED])
    await jobs_of(writer).run(always)
    row = await installation.delivery(copy)
    assert row["expires_at"] - row["due_at"] == timedelta(seconds=life_s)


async def test_what_is_over_but_not_yet_expired_counts_as_expired(
    installation: Installation, writer: LogWriter
) -> None:
    copy = await queued(installation, await installation.subscribe(), lifetime_s=-1.0)
    without = await restore(installation)
    await jobs_of(writer).run(always)
    assert await result(installation, without) == {"expiring": 1, "restored": 0}
    assert (await installation.delivery(copy))["generation"] == 0
    within = await restore(installation, UNFINISHED | {State.EXPIRED})
    await jobs_of(writer).run(always)
    assert await result(installation, within) == {"renewed": 1, "restored": 0}
    assert (await installation.delivery(copy))["expires_at"] is None


async def test_what_was_withdrawn_before_it_was_due_comes_when_it_is_due(
    installation: Installation, database: str
) -> None:
    copy = await ended(installation, State.CANCELLED)
    due = await installation.value(
        "UPDATE messages SET due_at = now() + interval '1 hour' WHERE id = %s RETURNING due_at",
        copy.message_id,
    )
    await restore(installation, [State.CANCELLED])
    async with LogWriter(database, kind="upkeep", broker_mode=RELAYED) as writer:
        await jobs_of(writer).run(always)
    row, work = await installation.delivery(copy), await installation.work("outbox", copy)
    assert work is not None
    assert (row["state"], row["due_at"]) == (State.SCHEDULED, due)
    assert (work["kind"], work["due_at"]) == (WorkLocation.PUSH_SCHEDULED, due)


async def test_with_another_broker_what_was_sent_is_to_be_sent_again(
    installation: Installation, database: str
) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    near, far = ago(-10), ago(-3600)
    copies = {}
    for subscription, kind in ((push, SubscriptionType.PUSH), (pull, PULL)):
        (sent,) = await installation.publish(subscription, kind=kind, attempt=1)
        await installation.queue(sent, due=near, shape=RELAYED)
        (later,) = await installation.publish(
            subscription, kind=kind, state=State.SCHEDULED, attempt=2
        )
        await installation.queue(later, due=far, shape=RELAYED)
        copies[kind] = (sent, later)
    await installation.rows(
        "UPDATE outbox SET kind = kind + CASE WHEN due_at > now() + interval '60 s' THEN 4 ELSE 2 END"
    )
    identity = await restore(installation)
    async with LogWriter(database, kind="upkeep", broker_mode=RELAYED) as writer:
        await jobs_of(writer).run(always)
        assert await misplaced(writer) == []
    assert await result(installation, identity) == {"restored": 4}
    for kind, (sent, later) in copies.items():
        one = int(kind is PULL)
        rows = [await installation.work("outbox", copy) for copy in (sent, later)]
        assert [row and row["kind"] for row in rows] == [
            WorkLocation.PUSH_TO_RELAY + one,
            WorkLocation.PUSH_SCHEDULED + one,
        ]
        assert [row and (row["generation"], row["attempt"]) for row in rows] == [(1, 1), (1, 2)]
        assert [await installation.state(copy) for copy in (sent, later)] == [
            State.QUEUED,
            State.SCHEDULED,
        ]
        assert [row and row["due_at"] for row in rows] == [near, far]


async def test_a_missing_work_row_is_made_again(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    (lost,) = await installation.publish(push, attempt=2)
    (unheld,) = await installation.publish(push, state=State.HELD)
    assert sorted(await misplaced(writer)) == ["held missing", "queued missing"]
    await restore(installation)
    await jobs_of(writer).run(always)
    assert await misplaced(writer) == []
    work = await installation.work("outbox", lost)
    assert work is not None
    assert (work["generation"], work["attempt"]) == (1, 2)
    assert await installation.work("held", unheld) is not None


async def test_of_one_message_only_its_deliveries_are_restored(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    one, other = [await queued(installation, push) for _ in range(2)]
    identity = await restore(installation, message_id=one.message_id)
    await jobs_of(writer).run(always)
    assert [(await installation.delivery(copy))["generation"] for copy in (one, other)] == [1, 0]
    row = await job(installation, identity)
    assert (row["done"], row["total"]) == (1, 1)


async def test_since_leaves_what_is_older(installation: Installation, writer: LogWriter) -> None:
    push = await installation.subscribe()
    copies = [await queued(installation, push) for _ in range(2)]
    since = datetime.fromtimestamp(copies[1].published_ms / 1000).astimezone()
    moved = copies[0].published_ms != copies[1].published_ms
    await restore(installation, since=since.isoformat())
    await jobs_of(writer).run(always)
    assert [(await installation.delivery(copy))["generation"] for copy in copies] == [
        int(not moved),
        1,
    ]


async def test_a_room_that_is_being_deleted_is_left(
    installation: Installation, writer: LogWriter
) -> None:
    copy = await queued(installation, await installation.subscribe())
    identity = await restore(installation)
    await installation.rows("UPDATE rooms SET deleting = true")
    await jobs_of(writer).run(always)
    assert await result(installation, identity) == {"restored": 0}
    assert (await installation.delivery(copy))["generation"] == 0


# Races, both orders forced


async def test_an_attempt_that_began_first_is_left_alone(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    copy = await queued(installation, push)
    async with LogWriter(installation.url, kind="worker") as worker:
        (claimed,) = await _claimed(worker)
        identity = await restore(installation)
        await jobs_of(writer).run(always)
        assert await result(installation, identity) == {"in_flight": 1, "restored": 0}
        assert (await installation.delivery(copy))["generation"] == 0
        failed = DeliveryOutcome(task=claimed, state=State.QUEUED, result=answered(500), delay_ms=0)
        assert await OutcomeQueries(worker).decide([failed], worker=worker.id) == 1
    assert await misplaced(writer) == []
    assert await installation.kinds(copy) == ["attempted", "retry_scheduled"]


async def test_an_attempt_that_comes_after_is_made_once(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    copy = await queued(installation, push)
    await restore(installation)
    await jobs_of(writer).run(always)
    async with LogWriter(installation.url, kind="worker") as worker:
        (claimed,) = await _claimed(worker)
        assert (claimed.generation, claimed.attempt) == (1, 0)
        assert await _claimed(worker) == []
        stale = DeliveryOutcome(task=copy, state=State.QUEUED, result=answered(500), delay_ms=0)
        assert await OutcomeQueries(worker).decide([stale], worker=worker.id) == 0, (
            "the copy of the step before is stale"
        )
        assert (
            await OutcomeQueries(worker).decide(
                [DeliveryOutcome(task=claimed, state=State.DELIVERED)], worker=worker.id
            )
            == 1
        )
    assert await installation.state(copy) == State.DELIVERED
    assert await misplaced(writer) == []


async def test_a_claim_that_is_being_made_is_waited_for(
    installation: Installation, writer: LogWriter
) -> None:
    """The row is locked by a claim that is not committed: the walk stops before it, and leaves it once it is claimed."""
    push = await installation.subscribe()
    first, second = [await queued(installation, push) for _ in range(2)]
    locked = min((first, second), key=lambda copy: copy.delivery_id)
    identity = await restore(installation)
    async with installed(installation.url) as other:
        async with other.connection.transaction():
            await other.rows(
                "UPDATE outbox SET claimed_until = now() + interval '60 s', worker = 1 WHERE id = %s",
                locked.delivery_id,
            )
            doing = asyncio.create_task(jobs_of(writer, looks=100_000).run(always))

            async def has_begun() -> bool:
                return bool((await job(installation, identity))["state"] == "running")

            await until(has_begun, "the walk to begin")
            assert (await job(installation, identity))["done"] == 0
        await doing
    assert await result(installation, identity) == {"in_flight": 1, "restored": 1}
    assert (await installation.delivery(locked))["generation"] == 0


async def test_a_row_that_is_locked_for_long_is_passed_over(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    copies = sorted(
        [await queued(installation, push) for _ in range(3)], key=lambda copy: copy.delivery_id
    )
    identity = await restore(installation)
    async with installed(installation.url) as other, other.connection.transaction():
        await other.rows("SELECT FROM deliveries WHERE id = %s FOR UPDATE", copies[1].delivery_id)
        await jobs_of(writer).run(always)
    assert await result(installation, identity) == {"restored": 2, "busy": 1}
    assert [(await installation.delivery(copy))["generation"] for copy in copies] == [1, 0, 1]


async def test_what_is_published_meanwhile_is_not_restored(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    early = [await queued(installation, push) for _ in range(4)]
    identity = await restore(installation)
    await jobs_of(writer, batch=2).run(NothingDone(installation.url))
    assert (await job(installation, identity))["state"] == "running"
    late = await queued(installation, push)
    await jobs_of(writer, batch=2).run(always)
    assert [(await installation.delivery(copy))["generation"] for copy in early] == [1] * 4
    assert (await installation.delivery(late))["generation"] == 0
    assert await installation.kinds(late) == []
    assert await result(installation, identity) == {"restored": 4, "newer": 1}


async def test_a_publish_committed_after_the_walk_is_sent(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    async with installed(installation.url) as other, other.connection.transaction():
        (copy,) = await other.publish(push)
        await other.queue(copy)
        identity = await restore(installation)
        await jobs_of(writer).run(always)
        assert await result(installation, identity) == {"restored": 0}
    assert await misplaced(writer) == []
    async with LogWriter(installation.url, kind="worker") as worker:
        assert [claimed.delivery_id for claimed in await _claimed(worker)] == [copy.delivery_id]


async def test_a_restore_and_a_withdrawal_end_as_the_later_one_says(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    first, second = [await queued(installation, push) for _ in range(2)]
    assert [one.outcome for one in await cancel_message(writer, first.message_id)] == [
        ChangeOutcome.DONE
    ]
    await restore(installation)
    await jobs_of(writer).run(always)
    assert [one.outcome for one in await cancel_message(writer, second.message_id)] == [
        ChangeOutcome.DONE
    ]
    assert [await installation.state(copy) for copy in (first, second)] == [State.CANCELLED] * 2
    assert [(await installation.delivery(copy))["generation"] for copy in (first, second)] == [0, 1]
    await restore(installation, [State.CANCELLED])
    await jobs_of(writer).run(always)
    assert [await installation.state(copy) for copy in (first, second)] == [State.QUEUED] * 2
    assert await misplaced(writer) == []


async def test_a_withdrawal_under_way_is_waited_for(
    installation: Installation, writer: LogWriter
) -> None:
    """Not committed when the walk comes by: the delivery is judged anew once it is."""
    copy = await queued(installation, await installation.subscribe())
    identity = await restore(installation)
    async with installed(installation.url) as other:
        async with other.connection.transaction():
            await other.rows("DELETE FROM outbox WHERE id = %s", copy.delivery_id)
            await other.rows(
                "UPDATE deliveries SET state = 'cancelled' WHERE id = %s", copy.delivery_id
            )
            doing = asyncio.create_task(jobs_of(writer, looks=100_000).run(always))

            async def has_begun() -> bool:
                return bool((await job(installation, identity))["state"] == "running")

            await until(has_begun, "the walk to begin")
        await doing
    assert await result(installation, identity) == {"restored": 0}
    assert await installation.state(copy) == State.CANCELLED
    assert await misplaced(writer) == []


@pytest.mark.parametrize("clears_first", [True, False])
async def test_a_clear_and_a_restore_are_done_in_their_order(
    installation: Installation, writer: LogWriter, *, clears_first: bool
) -> None:
    push = await installation.subscribe()
    copies = [await queued(installation, push) for _ in range(5)]
    asked: list[Callable[[Installation], Awaitable[JobId]]] = [
        clear,
        lambda one: restore(one, [State.CANCELLED]),
    ]
    for ask_for in asked if clears_first else reversed(asked):
        await ask_for(installation)
    await jobs_of(writer, batch=2).run(always)
    states = {await installation.state(copy) for copy in copies}
    assert states == {State.QUEUED if clears_first else State.CANCELLED}
    assert await misplaced(writer) == []


async def test_a_clear_and_a_restore_at_the_same_time_leave_no_mismatch(
    installation: Installation, writer: LogWriter
) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    copies = [await queued(installation, push) for _ in range(30)]
    copies += [await leased(installation, pull, ago(-60)) for _ in range(10)]
    identities = [
        await clear(installation),
        await restore(installation, UNFINISHED | {State.CANCELLED}),
    ]
    async with LogWriter(installation.url, kind="upkeep") as other:
        worklist = JobQueue(writer)
        clearing = JobRunner(
            worklist,
            ClearJob(
                worklist,
                ClearQueries(writer),
                RestoreQueries(writer),
                OrderingQueries(writer),
                on_queued=Rung().append,
                batch=3,
                round_pause_s=0.01,
            ).handlers(),
        )
        worklist = JobQueue(other)
        restoring = JobRunner(
            worklist,
            RestoreJob(
                worklist, RestoreQueries(other), on_queued=Rung().append, batch=4
            ).handlers(),
        )
        await asyncio.gather(clearing.run(always), restoring.run(always))
    for identity in identities:
        await result(installation, identity)
    assert {await installation.state(copy) for copy in copies} <= {
        State.QUEUED,
        State.CANCELLED,
        State.LEASED,
    }
    assert await misplaced(writer) == []
    for copy in copies:
        generations = [
            row["generation"]
            for row in await installation.journey(copy)
            if row["kind"] == "restored"
        ]
        assert generations == sorted(set(generations)), "no step was made twice"


# Clearing


@pytest.mark.parametrize("kind", ["restore", "clear_room"])
async def test_a_job_that_changed_nothing_says_so(
    installation: Installation, writer: LogWriter, kind: str
) -> None:
    """`done` counts what was examined, so that it does not say what was changed."""
    delivered = (await in_every_state(installation, None))[State.DELIVERED]
    await installation.rows("DELETE FROM deliveries WHERE id <> %s", delivered.delivery_id)
    identity = await (restore if kind == "restore" else clear)(installation)
    await jobs_of(writer).run(always)
    row = await job(installation, identity)
    changed = "restored" if kind == "restore" else "cancelled"
    assert (row["state"], row["done"], row["result"]) == ("done", 1, {changed: 0})


async def test_a_clear_cancels_all_that_is_unfinished(
    installation: Installation, writer: LogWriter
) -> None:
    copies = await in_every_state(installation, None)
    identity = await clear(installation)
    await jobs_of(writer, batch=2).run(always)
    for state, copy in copies.items():
        row = await installation.delivery(copy)
        over = state in UNFINISHED
        assert (row["state"], row["reason"]) == (
            (State.CANCELLED, "cleared") if over else (state, None)
        )
        assert await installation.kinds(copy) == (["cancelled"] if over else [])
        assert row["generation"] == 0
    row = await job(installation, identity)
    assert (row["result"], row["done"]) == ({"cancelled": len(UNFINISHED)}, row["total"])
    for table in ("outbox", "held", "leases"):
        assert await installation.value(f"SELECT count(*) FROM {table}") == 0


async def test_a_clear_waits_for_what_is_under_way(
    installation: Installation, writer: LogWriter
) -> None:
    push = await installation.subscribe()
    copies = sorted(
        [await queued(installation, push) for _ in range(5)], key=lambda copy: copy.delivery_id
    )
    taken = copies[1:4:2]
    for copy in taken:
        await claim(installation, copy, ago(-3600))
    identity = await clear(installation)
    doing = asyncio.create_task(jobs_of(writer, batch=2).run(always))

    async def only_taken() -> bool:
        return await installation.states() == {"queued": 2, "cancelled": 3}

    await until(only_taken, "the rest to be cancelled")
    late = await queued(installation, push)
    assert (await job(installation, identity))["state"] == "running"
    async with LogWriter(installation.url, kind="worker") as worker:
        delivered = DeliveryOutcome(task=taken[0], state=State.DELIVERED, result=None)
        failed = DeliveryOutcome(
            task=taken[1], state=State.QUEUED, result=answered(500), delay_ms=60_000
        )
        assert await OutcomeQueries(worker).decide([delivered, failed], worker=1) == 2
    await doing
    assert await result(installation, identity) == {"cancelled": 4}
    assert [await installation.state(copy) for copy in (*taken, late)] == [
        "delivered",
        "cancelled",
        "queued",
    ]
    row = await job(installation, identity)
    assert row["done"] == row["total"] == 5


# Breaks


@pytest.mark.parametrize("kind", ["restore", "clear"])
async def test_a_walk_is_continued_after_a_break_anywhere(
    installation: Installation, writer: LogWriter, kind: str
) -> None:
    """The process that continues knows only what is in the database, and does nothing twice."""
    push = await installation.subscribe()
    copies = [await queued(installation, push) for _ in range(9)]
    identity = await (restore(installation) if kind == "restore" else clear(installation))
    breaks = 0
    while (await job(installation, identity))["state"] in {"queued", "running"}:
        assert breaks < 60
        breaks += 1
        # Looks that come by the clock would use up turns.
        await jobs_of(writer, batch=1, look_s=3600).run(Times(3 + breaks % 2))
    assert breaks > 2
    done = await job(installation, identity)
    assert done["done"] == done["total"] == 9
    assert done["result"] == {"restored" if kind == "restore" else "cancelled": 9}
    for copy in copies:
        row = await installation.delivery(copy)
        assert (row["state"], row["generation"]) == (
            ("queued", 1) if kind == "restore" else ("cancelled", 0)
        )
        assert await installation.kinds(copy) == ["restored" if kind == "restore" else "cancelled"]


async def test_two_that_do_one_job_do_nothing_twice(
    installation: Installation, writer: LogWriter
) -> None:
    """As if a term had been lost unnoticed."""
    push = await installation.subscribe()
    copies = [await queued(installation, push) for _ in range(30)]
    identity = await restore(installation)
    async with LogWriter(installation.url, kind="upkeep") as other:

        async def until_done(mine: LogWriter) -> None:
            while (await job(installation, identity))["state"] in {"queued", "running"}:
                await jobs_of(mine, batch=3).run(always)

        await asyncio.gather(until_done(writer), until_done(other))
    assert await result(installation, identity) == {"restored": 30}
    assert (await job(installation, identity))["done"] == 30
    assert {(await installation.delivery(copy))["generation"] for copy in copies} == {1}
