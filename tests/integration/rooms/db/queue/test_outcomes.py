"""Decisions about deliveries: each is one statement that moves the row, its work and its log together, or nothing."""

import asyncio
from dataclasses import replace

import pytest

from rooms.db.queue.holds import HeldGroup, Holds
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, RoomId, room_of
from rooms.domain.state_machine import (
    TRANSITIONS,
    UNFINISHED,
    Event,
    LogKind,
    Reason,
    State,
    states_allowing,
)
from rooms.errors import StorageRefusedError, StorageUnavailableError
from tests.support.installation import Installation, now_ms, until
from tests.support.push_worker import OK, TIMED_OUT, answered

WORKER = 4711


@pytest.fixture
def outcomes(writer: LogWriter) -> OutcomeQueries:
    return OutcomeQueries(writer)


@pytest.fixture
def holds(writer: LogWriter) -> Holds:
    return Holds(writer)


async def queued(installation: Installation, **message: object) -> DeliveryTask:
    """A delivery that is being attempted: its row, and its work."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, **message)  # type: ignore[arg-type]
    await installation.queue(copy)
    return copy


async def shift(installation: Installation, copy: DeliveryTask, **columns: object) -> None:
    """Other values in the delivery's row, as something else might have decided meanwhile."""
    assignments = ", ".join(f"{name} = %s" for name in columns)
    await installation.rows(
        f"UPDATE deliveries SET {assignments} WHERE id = %s", *columns.values(), copy.delivery_id
    )


async def test_a_success(
    installation: Installation, outcomes: OutcomeQueries, writer: LogWriter
) -> None:
    copy = await queued(installation, delay_ms=250, attempt=2, correlation_id="tricky \"'\\{,}")
    outcome = DeliveryOutcome(
        task=copy, state=State.DELIVERED, result=OK, target_host="example.test", policy_version=9
    )
    assert await outcomes.decide([outcome], worker=WORKER) == 1
    row = await installation.delivery(copy)
    assert (row["state"], row["attempts"], row["attempt"], row["generation"]) == (
        "delivered",
        1,
        2,
        0,
    )
    assert (row["last_status"], row["last_error"], row["reason"], row["due_at"]) == (
        204,
        None,
        None,
        None,
    )
    assert await installation.work("outbox", copy) is None
    attempted, delivered = await installation.journey(copy)
    assert attempted["kind"] == LogKind.ATTEMPTED
    assert attempted["writer_id"] == writer.id
    assert (attempted["http_status"], attempted["latency_ms"], attempted["error_class"]) == (
        204,
        1.5,
        None,
    )
    assert (attempted["delay_ms"], attempted["worker"], attempted["worker_host"]) == (
        250,
        WORKER,
        writer.host,
    )
    assert (attempted["detail"], attempted["answer_head"]) == (None, None)
    assert delivered["kind"] == LogKind.DELIVERED
    for line in (attempted, delivered):
        assert line["room_id"] == copy.room_id
        assert (line["message_id"], line["subscription_id"]) == (
            copy.message_id,
            copy.subscription_id,
        )
        assert (line["generation"], line["attempt"]) == (0, 2)
        assert (line["event_type"], line["event_version"]) == ("order.created", 3)
        assert (line["correlation_id"], line["target_host"]) == ("tricky \"'\\{,}", "example.test")
        assert line["policy_version"] == 9


@pytest.mark.parametrize("before", [State.QUEUED, State.HELD, State.SIDELINED, State.CANCELLED])
async def test_a_success_reads_the_same_alone_and_beside_others(
    installation: Installation, outcomes: OutcomeQueries, before: State
) -> None:
    """A batch of nothing but successes has a statement of its own."""
    found = []
    for others in (0, 1):
        copy = await queued(installation, delay_ms=250, attempt=2, correlation_id="c")
        await shift(installation, copy, state=before.value, last_error="before", reason="before")
        answer = replace(OK, body_head=b"\x00\xff")
        outcome = DeliveryOutcome(
            task=copy, state=State.DELIVERED, result=answer, target_host="h", policy_version=9
        )
        beside = [
            DeliveryOutcome(
                task=await queued(installation), state=State.DROPPED, result=answered(418)
            )
            for _ in range(others)
        ]
        await outcomes.decide([outcome, *beside], worker=WORKER)
        row, *log = await installation.delivery(copy), *await installation.journey(copy)
        own = {
            "id",
            "delivery_id",
            "message_id",
            "subscription_id",
            "updated_at",
            "writer_seq",
            "ts",
            "xid",
        }
        # What was due when is each delivery's own, too.
        row |= {"due_at": row["due_at"] is not None, "expires_at": row["expires_at"] is not None}
        left = await installation.work("outbox", copy) is not None
        found.append(
            (
                row["state"],
                left,
                [{name: of[name] for name in of.keys() - own} for of in (row, *log)],
            )
        )
    assert found[0] == found[1]
    assert found[0][:2] == (
        ("cancelled", True) if before is State.CANCELLED else ("delivered", False)
    )


async def test_an_empty_batch_moves_nothing(outcomes: OutcomeQueries) -> None:
    assert await outcomes.decide([], worker=WORKER) == 0
    assert await outcomes.decide([], worker=WORKER, in_doubt=True) == 0


@pytest.mark.parametrize("to", [State.DELIVERED, State.DROPPED])
async def test_a_batch_may_be_of_any_days_in_any_order(
    installation: Installation, outcomes: OutcomeQueries, to: State
) -> None:
    """The statement opens only the days between its least id and its greatest."""
    batch = []
    for days in (3, 0, -400, 5, 1):
        copy = await queued(installation)
        other = DeliveryId(installation.ids.generate(copy.room_id, now_ms() + days * 86_400_000))
        await shift(installation, copy, id=other)
        await installation.rows("UPDATE outbox SET id = %s WHERE id = %s", other, copy.delivery_id)
        batch.append(DeliveryOutcome(task=replace(copy, delivery_id=other), state=to, result=OK))
    assert await outcomes.decide(batch, worker=WORKER) == len(batch)
    assert await installation.states() == {to: len(batch)}
    assert await installation.value("SELECT count(*) FROM outbox") == 0


async def test_a_failure_that_is_tried_again(
    installation: Installation, outcomes: OutcomeQueries
) -> None:
    copy = await queued(installation, delay_ms=50, attempt=1, lifetime_s=600)
    answer = answered(503, body=b"\x00\xffbusy")
    outcome = DeliveryOutcome(
        task=copy,
        state=State.QUEUED,
        result=answer,
        delay_ms=3000,
        target_host="h",
        policy_version=1,
    )
    assert await outcomes.decide([outcome], worker=WORKER) == 1
    row = await installation.delivery(copy)
    assert (row["state"], row["attempt"], row["attempts"], row["last_status"]) == (
        "queued",
        2,
        1,
        503,
    )
    assert row["last_error"] == "status: answered 503"
    work = await installation.work("outbox", copy)
    assert work is not None
    assert (work["generation"], work["attempt"], work["delay_ms"], work["worker"]) == (
        0,
        2,
        3000,
        None,
    )
    assert work["due_at"] == row["due_at"]
    assert work["expires_at"] == row["expires_at"]
    wait = await installation.value(
        "SELECT extract(epoch FROM due_at - updated_at) FROM deliveries"
    )
    assert wait == 3
    attempted, scheduled = await installation.journey(copy)
    assert (attempted["kind"], attempted["attempt"], attempted["delay_ms"]) == ("attempted", 1, 50)
    assert (attempted["error_class"], attempted["detail"]) == ("status", "answered 503")
    assert attempted["answer_head"] == b"\x00\xffbusy"
    assert (scheduled["kind"], scheduled["attempt"], scheduled["delay_ms"]) == (
        "retry_scheduled",
        2,
        3000,
    )


async def test_a_failure_whose_work_row_is_gone_gets_one(
    installation: Installation, outcomes: OutcomeQueries
) -> None:
    copy = await queued(installation)
    await installation.rows("DELETE FROM outbox")
    await outcomes.decide(
        [DeliveryOutcome(task=copy, state=State.QUEUED, result=TIMED_OUT, delay_ms=1)],
        worker=WORKER,
    )
    work = await installation.work("outbox", copy)
    assert work is not None
    assert (work["attempt"], work["priority"]) == (1, copy.priority)


@pytest.mark.parametrize(
    ("to", "reason", "tried"),
    [
        (State.SIDELINED, Reason.ATTEMPTS_EXHAUSTED, True),
        (State.SIDELINED, Reason.TERMINAL_STATUS, True),
        (State.SIDELINED, Reason.UNREADABLE, False),
        (State.DROPPED, Reason.IGNORABLE_STATUS, True),
        (State.EXPIRED, Reason.TOO_LATE, True),
        (State.EXPIRED, None, False),
        (State.CANCELLED, Reason.SUBSCRIPTION_DELETED, False),
    ],
)
async def test_an_end(
    installation: Installation,
    outcomes: OutcomeQueries,
    to: State,
    reason: Reason | None,
    tried: bool,  # noqa: FBT001 - a parameter of the table above
) -> None:
    copy = await queued(installation)
    answer = answered(500) if tried else None
    assert (
        await outcomes.decide(
            [DeliveryOutcome(task=copy, state=to, result=answer, reason=reason)], worker=WORKER
        )
        == 1
    )
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["attempts"]) == (to, reason, int(tried))
    assert await installation.work("outbox", copy) is None
    assert await installation.work("held", copy) is None
    assert await installation.kinds(copy) == ([LogKind.ATTEMPTED] if tried else []) + [
        LogKind(to.value)
    ]
    assert (await installation.journey(copy))[-1]["detail"] == reason


@pytest.mark.parametrize(
    "reason", [Reason.PAUSED, Reason.SATURATED, Reason.DISABLED, Reason.CIRCUIT_OPEN]
)
async def test_a_hold_and_its_release(
    installation: Installation, outcomes: OutcomeQueries, holds: Holds, reason: Reason
) -> None:
    copy = await queued(installation, priority=8, delay_ms=70, attempt=2, lifetime_s=60)
    assert (
        await outcomes.decide(
            [DeliveryOutcome(task=copy, state=State.HELD, reason=reason)], worker=WORKER
        )
        == 1
    )
    assert await installation.state(copy) is State.HELD
    assert await installation.work("outbox", copy) is None
    held = await installation.work("held", copy)
    assert held is not None
    assert (held["reason"], held["priority"], held["delay_ms"]) == (reason, 8, 70)
    assert (await holds.held()).groups == [HeldGroup(copy.subscription_id, reason)]
    assert await holds.release(HeldGroup(copy.subscription_id, reason), limit=10) == 1
    row, work = await installation.delivery(copy), await installation.work("outbox", copy)
    assert (row["state"], row["generation"], row["attempt"], row["reason"]) == (
        "queued",
        1,
        2,
        None,
    )
    assert work is not None
    assert (work["generation"], work["attempt"], work["priority"], work["delay_ms"]) == (
        1,
        2,
        8,
        70,
    )
    assert work["expires_at"] == row["expires_at"]
    assert await installation.work("held", copy) is None
    assert (await holds.held()).groups == []
    log = await installation.journey(copy)
    assert [(line["kind"], line["generation"], line["attempt"]) for line in log] == [
        ("held", 0, 2),
        ("released", 1, 2),
    ]
    assert (log[1]["event_type"], log[1]["correlation_id"]) == (
        copy.event_type,
        copy.correlation_id,
    )


async def test_what_was_held_twice_is_held_once(
    installation: Installation, outcomes: OutcomeQueries
) -> None:
    """A stray row in `held` must not stop the statement, and with it all outcomes of the batch."""
    copy = await queued(installation)
    await outcomes.decide(
        [DeliveryOutcome(task=copy, state=State.HELD, reason=Reason.PAUSED)], worker=WORKER
    )
    await shift(installation, copy, state="queued")
    await installation.queue(copy)
    assert (
        await outcomes.decide(
            [DeliveryOutcome(task=copy, state=State.HELD, reason=Reason.SATURATED)], worker=WORKER
        )
        == 1
    )
    held = await installation.work("held", copy)
    assert held is not None
    assert held["reason"] == Reason.SATURATED


KINDS = [
    DeliveryOutcome(task=None, state=to, result=answer, delay_ms=5, reason=reason)  # type: ignore[arg-type]
    for to, answer, reason in (
        (State.DELIVERED, OK, None),
        (State.QUEUED, TIMED_OUT, None),
        (State.SIDELINED, TIMED_OUT, Reason.ATTEMPTS_EXHAUSTED),
        (State.DROPPED, answered(409), Reason.IGNORABLE_STATUS),
        (State.EXPIRED, None, None),
        (State.HELD, None, Reason.PAUSED),
        (State.CANCELLED, None, Reason.SUBSCRIPTION_DELETED),
    )
]
EVENTS = {
    State.DELIVERED: Event.SUCCEEDED,
    State.QUEUED: Event.FAILED,
    State.SIDELINED: Event.GAVE_UP,
    State.DROPPED: Event.IGNORED,
    State.EXPIRED: Event.EXPIRE,
    State.HELD: Event.HOLD,
    State.CANCELLED: Event.CANCEL,
}


def of(kind: DeliveryOutcome, copy: DeliveryTask) -> DeliveryOutcome:
    return DeliveryOutcome(
        task=copy, state=kind.state, result=kind.result, delay_ms=kind.delay_ms, reason=kind.reason
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.state.value)
async def test_nothing_moves_but_from_the_states_of_the_table(
    installation: Installation, outcomes: OutcomeQueries, kind: DeliveryOutcome
) -> None:
    """Every state a delivery can be in meets this outcome: what the table allows a worker happens, nothing else."""
    late = states_allowing(Event.LATE_SUCCESS) if kind.state is State.DELIVERED else frozenset()
    for state in State:
        copy = await queued(installation)
        await shift(installation, copy, state=state)
        if state is State.HELD:
            await installation.rows("DELETE FROM outbox WHERE id = %s", copy.delivery_id)
            await installation.rows(
                "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)"
                " SELECT room_id, id, subscription_id, 4, 0, 'paused' FROM deliveries WHERE id = %s",
                copy.delivery_id,
            )
        allowed = state is State.QUEUED or state in late
        assert await outcomes.decide([of(kind, copy)], worker=WORKER) == int(allowed), state
        assert await installation.state(copy) is (kind.state if allowed else state)
        if allowed:
            assert (state, EVENTS[kind.state]) in TRANSITIONS or state in late
        moved = [line for line in await installation.kinds(copy) if line != LogKind.ATTEMPTED]
        assert len(moved) == int(allowed)
        if allowed and kind.state in UNFINISHED - {State.HELD}:
            assert await installation.work("outbox", copy) is not None
        elif allowed:
            assert await installation.work("outbox", copy) is None
        if state is State.HELD:
            assert (await installation.work("held", copy) is None) == allowed


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.state.value)
@pytest.mark.parametrize("column", ["generation", "attempt"])
async def test_a_stale_copy_moves_nothing_but_by_success(
    installation: Installation, outcomes: OutcomeQueries, kind: DeliveryOutcome, column: str
) -> None:
    copy = await queued(installation)
    await shift(installation, copy, **{column: 1})
    before = await installation.work("outbox", copy)
    moved = await outcomes.decide([of(kind, copy)], worker=WORKER)
    assert moved == int(kind.state is State.DELIVERED)
    attempted = [LogKind.ATTEMPTED] if kind.result is not None else []
    assert await installation.kinds(copy) == attempted + ([LogKind.DELIVERED] if moved else [])
    assert await installation.work("outbox", copy) == (None if moved else before)


async def test_another_rooms_delivery_of_the_same_id_is_not_touched(
    installation: Installation, outcomes: OutcomeQueries
) -> None:
    copy = await queued(installation)
    copy.room_id = RoomId(8)
    assert (
        await outcomes.decide(
            [DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK)], worker=WORKER
        )
        == 0
    )
    assert await installation.value("SELECT state::text FROM deliveries") == "queued"


async def test_an_outcome_in_doubt_is_logged_once(
    installation: Installation, outcomes: OutcomeQueries
) -> None:
    """Decided again after an answer that never came: the rows that moved then move no more, and are in the log already."""
    committed, lost = await queued(installation), await queued(installation)
    pair = [
        DeliveryOutcome(task=committed, state=State.QUEUED, result=TIMED_OUT, delay_ms=10),
        DeliveryOutcome(task=lost, state=State.DELIVERED, result=OK),
    ]
    assert await outcomes.decide(pair[:1], worker=WORKER) == 1
    assert await outcomes.decide(pair, worker=WORKER, in_doubt=True) == 1
    assert await outcomes.decide(pair, worker=WORKER, in_doubt=True) == 0
    assert await installation.kinds(committed) == ["attempted", "retry_scheduled"]
    assert await installation.kinds(lost) == ["attempted", "delivered"]
    assert (await installation.delivery(committed))["attempts"] == 1


async def test_successes_of_which_one_was_cancelled_meanwhile_are_logged_correctly(
    installation: Installation, outcomes: OutcomeQueries, writer: LogWriter
) -> None:
    """The decisions of the whole batch are taken back, and the numbers of the log have no gap."""
    first, withdrawn, last = [await queued(installation) for _ in range(3)]
    await shift(installation, withdrawn, state="cancelled")
    batch = [
        DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK)
        for copy in (first, withdrawn, last)
    ]
    assert await outcomes.decide(batch, worker=WORKER) == 2
    for copy in (first, last):
        assert (await installation.delivery(copy))["attempts"] == 1
        assert await installation.kinds(copy) == ["attempted", "delivered"]
        assert await installation.work("outbox", copy) is None
    assert await installation.state(withdrawn) is State.CANCELLED
    assert await installation.kinds(withdrawn) == ["attempted"]
    assert await installation.work("outbox", withdrawn) is not None
    after = await queued(installation)
    assert (
        await outcomes.decide(
            [DeliveryOutcome(task=after, state=State.DELIVERED, result=OK)], worker=WORKER
        )
        == 1
    )
    numbers = await installation.rows(
        "SELECT writer_seq FROM delivery_log WHERE writer_id = %s ORDER BY 1", writer.id
    )
    assert [row["writer_seq"] for row in numbers] == list(range(1, 8))


async def test_the_same_delivery_twice_in_a_batch_moves_once(
    installation: Installation, outcomes: OutcomeQueries
) -> None:
    copy = await queued(installation)
    outcome = DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK)
    assert await outcomes.decide([outcome, outcome], worker=WORKER) == 1
    assert await installation.kinds(copy) == ["attempted", "attempted", "delivered"]


async def test_a_large_batch_over_rooms_and_days(
    installation: Installation, outcomes: OutcomeQueries
) -> None:
    other = await installation.make_room(RoomId(99))
    here, there = await installation.subscribe(), await installation.subscribe(room=other)
    copies = [
        copy
        for turn in range(200)
        for copy in await installation.publish(here if turn % 2 else there)
    ]
    await installation.queue(*copies)
    decided = [DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK) for copy in copies]
    assert await outcomes.decide(decided, worker=WORKER) == 200
    assert await installation.states() == {"delivered": 200}
    assert await installation.value("SELECT count(*) FROM outbox") == 0


async def numbers(installation: Installation) -> dict[int, list[int]]:
    """The numbers of each writer's log rows."""
    found = await installation.rows(
        "SELECT writer_id, array_agg(writer_seq ORDER BY writer_seq) AS numbers FROM delivery_log GROUP BY writer_id"
    )
    return {row["writer_id"]: row["numbers"] for row in found}


async def test_every_writer_counts_its_log_without_gaps(
    installation: Installation, writer: LogWriter, outcomes: OutcomeQueries, holds: Holds
) -> None:
    """Over statements that move something, that move nothing, that are refused, and that lose their connection."""
    for turn in range(4):
        copies = [await queued(installation) for _ in range(3)]
        await outcomes.decide(
            [DeliveryOutcome(task=copy, state=State.HELD, reason=Reason.PAUSED) for copy in copies],
            worker=1,
        )
        await outcomes.decide(
            [DeliveryOutcome(task=copy, state=State.DROPPED) for copy in copies], worker=1
        )
        await installation.rows(
            "ALTER TABLE log_entries ADD CONSTRAINT no_more CHECK (kind <> 'released') NOT VALID"
        )
        with pytest.raises(StorageRefusedError):
            await holds.release(HeldGroup(copies[0].subscription_id, Reason.PAUSED), limit=5)
        await installation.rows("ALTER TABLE log_entries DROP CONSTRAINT no_more")
        assert (
            await holds.release(HeldGroup(copies[0].subscription_id, Reason.PAUSED), limit=5) == 1
        )
        with pytest.raises(Exception, match="int"):
            await holds.release(HeldGroup(copies[1].subscription_id, Reason.PAUSED), limit=1 << 40)
        if turn % 2:
            before = writer.id
            await installation.terminate("rooms test")
            with pytest.raises(StorageUnavailableError):
                await holds.release(HeldGroup(copies[1].subscription_id, Reason.PAUSED), limit=5)
            assert (
                await holds.release(HeldGroup(copies[1].subscription_id, Reason.PAUSED), limit=5)
                == 1
            )
            assert writer.id != before
    counted = await numbers(installation)
    assert len(counted) == 3
    for found in counted.values():
        assert found == list(range(1, len(found) + 1))


async def test_a_statement_that_is_broken_off_leaves_no_gap(
    installation: Installation, writer: LogWriter, outcomes: OutcomeQueries
) -> None:
    copies = [await queued(installation) for _ in range(20)]
    for turn, copy in enumerate(copies):
        task = asyncio.create_task(
            outcomes.decide(
                [DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK)], worker=1
            )
        )
        for _ in range(turn):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await outcomes.decide(
            [DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK)], worker=1, in_doubt=True
        )
        assert await installation.kinds(copy) == ["attempted", "delivered"]
    for found in (await numbers(installation)).values():
        assert found == list(range(1, len(found) + 1))


async def test_release_is_oldest_first_within_its_limit_and_of_one_subscription(
    installation: Installation, outcomes: OutcomeQueries, holds: Holds
) -> None:
    subscription, other = await installation.subscribe(), await installation.subscribe()
    mine = HeldGroup(subscription, Reason.PAUSED)
    copies = [copy for _ in range(5) for copy in await installation.publish(subscription)]
    strangers = await installation.publish(other)
    await installation.queue(*copies, *strangers)
    held = [
        DeliveryOutcome(task=copy, state=State.HELD, reason=Reason.PAUSED)
        for copy in [*copies, *strangers]
    ]
    assert await outcomes.decide(held, worker=WORKER) == 6
    assert set((await holds.held()).groups) == {mine, HeldGroup(other, Reason.PAUSED)}
    assert await holds.release(mine, limit=3) == 3
    assert [await installation.state(copy) for copy in copies] == [State.QUEUED] * 3 + [
        State.HELD
    ] * 2
    assert await holds.release(mine, limit=3) == 2
    assert await holds.release(mine, limit=3) == 0
    assert (await holds.held()).groups == [HeldGroup(other, Reason.PAUSED)]


async def test_what_is_held_is_listed_in_parts_of_active_subscriptions(
    installation: Installation, outcomes: OutcomeQueries, holds: Holds
) -> None:
    subscriptions = sorted([await installation.subscribe() for _ in range(4)])
    copies = [copy for one in subscriptions for copy in await installation.publish(one)]
    await installation.queue(*copies)
    held = [DeliveryOutcome(task=copy, state=State.HELD, reason=Reason.PAUSED) for copy in copies]
    assert await outcomes.decide(held, worker=WORKER) == 4
    paused, broken, tried = subscriptions[1], subscriptions[2], subscriptions[3]
    await installation.rows("UPDATE subscriptions SET status = 'paused' WHERE id = %s", paused)
    for subscription, due in ((broken, "1 min"), (tried, "-1 min")):
        await installation.rows(
            "INSERT INTO lanes (room_id, id, circuit_open, circuit_since, probe_at)"
            " VALUES (%s, %s, true, now(), now() + %s::interval)",
            room_of(subscription),
            subscription,
            due,
        )
    parts = [await holds.held(limit=2)]
    while parts[-1].last is not None:
        parts.append(await holds.held(parts[-1].last, limit=2))
    assert len(parts) == 3
    assert [group.subscription for part in parts for group in part.groups] == [
        subscriptions[0],
        broken,
        tried,
    ]
    assert [part.without_probe for part in parts] == [frozenset(), {broken}, frozenset()]


async def test_what_is_held_no_more_is_not_released(
    installation: Installation, outcomes: OutcomeQueries, holds: Holds
) -> None:
    copy = await queued(installation)
    await outcomes.decide(
        [DeliveryOutcome(task=copy, state=State.HELD, reason=Reason.PAUSED)], worker=WORKER
    )
    await shift(installation, copy, state="cancelled")
    assert await holds.release(HeldGroup(copy.subscription_id, Reason.PAUSED), limit=3) == 1
    assert await installation.state(copy) is State.CANCELLED
    assert await installation.work("outbox", copy) is None
    assert await installation.kinds(copy) == ["held"]


async def test_two_that_release_share_what_there_is(
    installation: Installation, database: str
) -> None:
    subscription = await installation.subscribe()
    await installation.publish_many(subscription, 300)
    await installation.rows("UPDATE deliveries SET state = 'held'")
    await installation.rows(
        "WITH o AS (DELETE FROM outbox RETURNING *) INSERT INTO held (room_id, id, subscription_id, priority, delay_ms,"
        " reason) SELECT room_id, id, subscription_id, priority, 0, 'saturated' FROM o"
    )
    async with (
        LogWriter(database, kind="settler") as one,
        LogWriter(database, kind="settler") as two,
    ):
        moved = 0

        async def release(writer: LogWriter) -> None:
            nonlocal moved
            while more := await Holds(writer).release(
                HeldGroup(subscription, Reason.SATURATED), limit=7
            ):
                moved += more

        await asyncio.gather(release(one), release(two))

        async def empty() -> bool:
            await asyncio.gather(release(one), release(two))
            return moved == 300

        await until(empty, "everything to be released")
    assert await installation.value("SELECT count(*) FROM outbox WHERE generation = 1") == 300
    assert (
        await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'released'") == 300
    )


async def test_two_writers_that_wait_for_each_other_lose_nothing(
    installation: Installation, database: str
) -> None:
    """PostgreSQL resolves a deadlock: the statement it stops wrote nothing, keeps its session and may be tried again."""
    copies = [await queued(installation) for _ in range(40)]
    forward = [
        DeliveryOutcome(task=copy, state=State.QUEUED, result=TIMED_OUT, delay_ms=1)
        for copy in copies
    ]
    backward = [
        DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK) for copy in reversed(copies)
    ]
    async with (
        LogWriter(database, kind="settler") as one,
        LogWriter(database, kind="settler") as two,
    ):
        identities = one.id, two.id

        async def decide(writer: LogWriter, decided: list[DeliveryOutcome]) -> None:
            while True:
                try:
                    await OutcomeQueries(writer).decide(decided, worker=1)
                except StorageRefusedError:
                    continue
                return

        for _ in range(5):
            await asyncio.gather(decide(one, forward), decide(two, backward))
        assert (one.id, two.id) == identities
    assert await installation.states() == {"delivered": 40}
    for found in (await numbers(installation)).values():
        assert found == list(range(1, len(found) + 1))
