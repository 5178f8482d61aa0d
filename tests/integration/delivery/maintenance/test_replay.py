"""Replays: what is given and what is not, at which pace, and a break at any step.

Oracle: of each message that is meant the subscription has exactly one new delivery, with one work row and one log row.
"""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from delivery.maintenance import replay as replay_module
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.replay import ReplayJob
from rooms.clock import SystemClock
from rooms.db.connection import connect
from rooms.db.jobs.jobs import JobQueue
from rooms.db.jobs.replay import ReplayQueries
from rooms.db.queue.withdraw import cancel_message
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import JobId, MessageId, SubscriptionId, created_ms, replayed_id, room_of
from rooms.domain.state_machine import State, SubscriptionType
from rooms.domain.work_location import WorkLocation
from rooms.ports import Clock
from tests.integration.delivery.maintenance.test_service import NothingDone, Times, always, ask, job
from tests.support.installation import Installation, until
from tests.support.relay import RELAYED
from tests.support.sandboxes import idle_sandbox
from tests.support.time_slices import SlicedClock

PULL = SubscriptionType.PULL
LONG_AGO = "2020-01-01T00:00:00+00:00"


async def replay(installation: Installation, subscription: SubscriptionId, **wanted: Any) -> JobId:
    if "from_message_id" not in wanted:
        wanted.setdefault("since", LONG_AGO)
    return await ask(
        installation,
        "replay",
        age_s=0.0,
        room_id=installation.room,
        subscription_id=subscription,
        **wanted,
    )


def jobs_of(
    writer: LogWriter,
    *,
    batch: int = 200,
    rung: list[SubscriptionId | None] | None = None,
    look_s: float = 0.01,
    clock: Clock | None = None,
) -> JobRunner:
    worklist, reported = JobQueue(writer), [] if rung is None else rung
    duty = ReplayJob(
        worklist,
        ReplayQueries(writer),
        clock or SystemClock(),
        on_queued=reported.append,
        batch=batch,
        sandbox=idle_sandbox(),
    )
    return JobRunner(worklist, duty.handlers(), poll_s=look_s)


async def published(
    installation: Installation, count: int, *, before: SubscriptionId | None = None, **fields: Any
) -> list[DeliveryTask]:
    """Messages that another subscription has had already."""
    before = before or await installation.subscribe()
    copies = []
    for _ in range(count):
        copies += await installation.publish(before, state=State.DELIVERED, **fields)
    return sorted(copies, key=lambda copy: copy.message_id)


async def given(
    installation: Installation, subscription: SubscriptionId
) -> dict[str, dict[str, Any]]:
    """The deliveries of a subscription by message; none has two."""
    rows = await installation.rows(
        "SELECT d.*, o.kind, o.due_at AS work_due, o.generation AS work_generation FROM deliveries d"
        " LEFT JOIN outbox o USING (room_id, id) WHERE d.subscription_id = %s",
        subscription,
    )
    found = {str(row["message_id"]): row for row in rows}
    assert len(found) == len(rows), "a message was given twice"
    return found


async def result(installation: Installation, identity: JobId) -> dict[str, int]:
    row = await job(installation, identity)
    assert (row["state"], row["error"]) == ("done", None)
    assert row["done"] == row["total"]
    found: dict[str, int] = row["result"] or {}
    return found


async def test_a_replay_may_begin_before_every_message(
    installation: Installation, writer: LogWriter
) -> None:
    (copy,) = await published(installation, 1)
    subscription = await installation.subscribe()
    identity = await replay(installation, subscription, since="0001-01-01T00:00:00+00:00")
    await jobs_of(writer).run(always)
    assert await result(installation, identity) == {"replayed": 1}
    assert set(await given(installation, subscription)) == {copy.message_id}


async def test_replays_end_while_more_jobs_are_open_than_are_remembered(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of others that failed or were cancelled are among those that are remembered."""
    monkeypatch.setattr(replay_module, "_MAX_SEEN", 0)
    await published(installation, 3)
    jobs = [await replay(installation, await installation.subscribe()) for _ in range(2)]
    await jobs_of(writer, batch=1).run(always)
    for identity in jobs:
        assert await result(installation, identity) == {"replayed": 3}


@pytest.mark.parametrize("kind", list(SubscriptionType))
async def test_a_new_subscription_gets_what_was_published_before_it(
    installation: Installation, writer: LogWriter, kind: SubscriptionType
) -> None:
    copies = await published(installation, 7, priority=6)
    subscription = await installation.subscribe(kind)
    rung: list[SubscriptionId | None] = []
    identity = await replay(installation, subscription)
    await jobs_of(writer, batch=3, rung=rung).run(always)
    assert await result(installation, identity) == {"replayed": 7}
    found = await given(installation, subscription)
    assert set(found) == {copy.message_id for copy in copies}
    for copy in copies:
        row = found[copy.message_id]
        assert (row["state"], row["generation"], row["attempt"], row["work_generation"]) == (
            "queued",
            0,
            0,
            0,
        )
        assert row["kind"] == (WorkLocation.PULL_LOCAL if kind is PULL else WorkLocation.PUSH_LOCAL)
        assert created_ms(str(row["id"])) == created_ms(copy.message_id)
        assert room_of(str(row["id"])) == installation.room
        (logged,) = await installation.rows(
            "SELECT * FROM delivery_log WHERE delivery_id = %s", row["id"]
        )
        assert (logged["kind"], logged["fanout"], logged["event_type"]) == (
            "replayed",
            1,
            "order.created",
        )
        assert logged["correlation_id"] == copy.correlation_id
    assert set(rung) == {subscription if kind is PULL else None}
    assert await installation.value("SELECT count(*) FROM outbox WHERE priority = 6") == 7


async def test_a_message_that_comes_again_has_its_sequence_number_again(
    installation: Installation, writer: LogWriter
) -> None:
    """So a consumer knows it for a repetition; what the subscription never had has none."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, state=State.DELIVERED)
    await published(installation, 1)
    await installation.rows(
        "WITH m AS (UPDATE messages SET ordering_key = 'k')"
        " UPDATE deliveries SET sequence = CASE subscription_id WHEN %s THEN 7 ELSE 8 END RETURNING 1",
        subscription,
    )
    for times in (2, 3):
        await replay(installation, subscription)
        await jobs_of(writer).run(always)
        rows = await installation.rows(
            "SELECT message_id::text, sequence FROM deliveries WHERE subscription_id = %s",
            subscription,
        )
        assert [row["sequence"] for row in rows if row["message_id"] == copy.message_id] == [
            7
        ] * times
        assert {row["sequence"] for row in rows if row["message_id"] != copy.message_id} == {None}


async def test_the_former_worker_gets_it_again(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, state=State.DELIVERED)
    for number in (2, 3):
        await replay(installation, subscription)
        await jobs_of(writer).run(always)
        assert (
            await installation.value(
                "SELECT count(*) FROM deliveries WHERE message_id = %s", copy.message_id
            )
            == number
        )
    assert await installation.state(copy) == State.DELIVERED


async def test_only_what_is_meant_is_given(installation: Installation, writer: LogWriter) -> None:
    copies = await published(installation, 5)
    other = (await published(installation, 1, event_type="order.paid"))[0]
    first, last = (
        copies[1].message_id,
        datetime.fromtimestamp(copies[3].published_ms / 1000).astimezone(),
    )
    meant = {
        copy.message_id
        for copy in copies
        if copy.message_id >= first and copy.published_ms < copies[3].published_ms
    }
    some = await installation.subscribe()
    identity = await replay(
        installation,
        some,
        from_message_id=first,
        until=last.isoformat(),
        event_types=["order.created"],
    )
    await jobs_of(writer).run(always)
    assert set(await given(installation, some)) == meant
    typed = await installation.subscribe()
    identity = await replay(installation, typed, event_types=["order.paid"])
    await jobs_of(writer, batch=2).run(always)
    assert set(await given(installation, typed)) == {other.message_id}
    assert await result(installation, identity) == {"replayed": 1, "not_wanted": 5}


@pytest.mark.parametrize("batch", [1, 3, 200])
async def test_messages_are_chosen_by_their_keys(
    installation: Installation, writer: LogWriter, batch: int
) -> None:
    """Check both keys, one by one and together, over pages that end within a key."""
    copies = await published(installation, 12)
    for number, copy in enumerate(copies):
        await installation.rows(
            "UPDATE messages SET ordering_key = %s, business_key = %s WHERE id = %s",
            f"o-{number % 3}",
            None if number % 4 == 3 else f"b-{number % 4}",
            copy.message_id,
        )
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"ordering_keys": ["o-1"]}, {1, 4, 7, 10}),
        ({"ordering_keys": ["o-1", "o-2", "b-1"]}, {1, 2, 4, 5, 7, 8, 10, 11}),
        ({"business_keys": ["b-0"]}, {0, 4, 8}),
        ({"business_keys": ["b-2", "b-0", "o-0"]}, {0, 2, 4, 6, 8, 10}),
        ({"business_keys": ["b-0", "b-1"], "ordering_keys": ["o-0"]}, {0, 9}),
        ({"business_keys": ["none"]}, set()),
        (
            {"business_keys": ["b-0"], "from_message_id": copies[1].message_id},
            {4, 8},
        ),
    ]
    for wanted, expected in cases:
        subscription = await installation.subscribe()
        identity = await replay(installation, subscription, **wanted)
        await jobs_of(writer, batch=batch).run(always)
        meant = {copies[number].message_id for number in expected}
        assert set(await given(installation, subscription)) == meant, wanted
        counts = await result(installation, identity)
        assert counts.get("replayed", 0) == len(expected)
        if "business_keys" in wanted and "ordering_keys" not in wanted:
            assert "not_wanted" not in counts, "the walk follows the index"


async def test_a_subscription_gets_what_it_is_there_for(
    installation: Installation, writer: LogWriter
) -> None:
    await published(installation, 2)
    small = await published(installation, 1, event_type="order.paid", payload=b'{"total": 5}')
    large = await published(installation, 1, event_type="order.paid", payload=b'{"total": 50}')
    typed = await installation.subscribe(event_types='[{"name": "order.paid"}]')
    versioned = await installation.subscribe(
        event_types='[{"name": "order.paid", "versions": [2]}]'
    )
    filtered = await installation.subscribe(
        event_types='[{"name": "order.paid"}]', filter="payload.total > 10 && event_version == 3"
    )
    for subscription in (typed, versioned, filtered):
        await replay(installation, subscription)
    await jobs_of(writer).run(always)
    assert set(await given(installation, typed)) == {small[0].message_id, large[0].message_id}
    assert await given(installation, versioned) == {}
    assert set(await given(installation, filtered)) == {large[0].message_id}


async def test_what_expired_is_given_only_if_asked_for_with_a_fresh_lifetime(
    installation: Installation, writer: LogWriter
) -> None:
    await installation.rows("UPDATE rooms SET message_expiration_ms = 60000")
    (over,) = await published(installation, 1, lifetime_s=-5.0)
    (living,) = await published(installation, 1, lifetime_s=500.0)
    without, within = await installation.subscribe(), await installation.subscribe()
    identity = await replay(installation, without)
    await replay(installation, within, include_expired=True)
    await jobs_of(writer).run(always)
    assert set(await given(installation, without)) == {living.message_id}
    assert await result(installation, identity) == {"replayed": 1, "expired": 1}
    found = await given(installation, within)
    fresh, kept = (found[copy.message_id] for copy in (over, living))
    assert fresh["expires_at"] - fresh["due_at"] == timedelta(seconds=60)
    assert (
        kept["expires_at"] == datetime.fromtimestamp((living.expires_ms or 0) / 1000).astimezone()
    )


async def test_a_shorter_lifetime_of_the_subscription_counts(
    installation: Installation, writer: LogWriter
) -> None:
    """Check that it begins when the message was due, and that a fresh one is as short."""
    await installation.rows("UPDATE rooms SET message_expiration_ms = 600000")
    (old,) = await published(installation, 1, lifetime_s=500.0)
    (living,) = await published(installation, 1)
    await installation.rows(
        "UPDATE messages SET published_at = published_at - interval '20 s' WHERE id = %s",
        old.message_id,
    )
    without, within = [await installation.subscribe(message_expiration_ms=10_000) for _ in range(2)]
    identity = await replay(installation, without)
    await replay(installation, within, include_expired=True)
    await jobs_of(writer).run(always)
    found = await given(installation, without)
    assert set(found) == {living.message_id}
    assert await result(installation, identity) == {"replayed": 1, "expired": 1}
    published_at = await installation.value(
        "SELECT published_at FROM messages WHERE id = %s", living.message_id
    )
    row = found[living.message_id]
    assert row["expires_at"] == published_at + timedelta(seconds=10)
    fresh = (await given(installation, within))[old.message_id]
    assert fresh["expires_at"] - fresh["due_at"] == timedelta(seconds=10)


async def test_a_fresh_lifetime_is_at_most_the_quota_of_the_organisation(
    installation: Installation, writer: LogWriter
) -> None:
    (over,) = await published(installation, 1, lifetime_s=-5.0)
    await installation.rows("UPDATE organisations SET quotas = '{\"expiration_ms\": 60000}'")
    subscription = await installation.subscribe()
    await replay(installation, subscription, include_expired=True)
    await jobs_of(writer).run(always)
    row = (await given(installation, subscription))[over.message_id]
    assert row["expires_at"] - row["due_at"] == timedelta(seconds=60)


async def test_a_cancelled_message_is_not_replayed(
    installation: Installation, writer: LogWriter
) -> None:
    before = await installation.subscribe()
    (gone,) = await installation.publish(before)
    await installation.queue(gone)
    await cancel_message(writer, gone.message_id)
    (stays,) = await published(installation, 1)
    subscription = await installation.subscribe()
    identity = await replay(installation, subscription)
    await jobs_of(writer).run(always)
    assert set(await given(installation, subscription)) == {stays.message_id}
    assert await result(installation, identity) == {"replayed": 1, "withdrawn": 1}


async def test_what_is_not_due_yet_comes_when_it_is(
    installation: Installation, database: str
) -> None:
    (copy,) = await published(installation, 1)
    due = await installation.value(
        "UPDATE messages SET due_at = now() + interval '1 hour' RETURNING due_at"
    )
    subscription = await installation.subscribe()
    await replay(installation, subscription)
    async with LogWriter(database, kind="upkeep", broker_mode=RELAYED) as writer:
        await jobs_of(writer).run(always)
    row = (await given(installation, subscription))[copy.message_id]
    assert (row["state"], row["kind"], row["work_due"], row["due_at"]) == (
        "scheduled",
        WorkLocation.PUSH_SCHEDULED,
        due,
        due,
    )


async def test_what_is_published_meanwhile_is_not_given_a_second_time(
    installation: Installation, writer: LogWriter
) -> None:
    early = await published(installation, 4)
    subscription = await installation.subscribe()
    identity = await replay(installation, subscription)
    await jobs_of(writer, batch=2).run(NothingDone(installation.url))
    assert (await job(installation, identity))["state"] == "running"
    (late,) = await installation.publish(subscription)
    await jobs_of(writer, batch=2).run(always)
    assert set(await given(installation, subscription)) == {
        copy.message_id for copy in (*early, late)
    }


async def test_history_waits_for_a_publish_that_does_not_know_of_the_subscription(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for locks, for longer than the job waits in any case."""
    monkeypatch.setattr(replay_module, "BACKFILL_AFTER_S", 0.0)
    before = await installation.subscribe()
    jobs = jobs_of(writer)
    async with await connect(installation.url, name="rooms publisher") as session:
        publisher = replace(installation, connection=session)
        async with session.transaction():
            (copy,) = await published(publisher, 1, before=before)
            subscription = await installation.subscribe()
            identity = await replay(installation, subscription, missing=True)
            await jobs.run(always)
            assert (await job(installation, identity))["state"] == "queued"

    async def done() -> bool:
        await jobs.run(always)
        return bool((await job(installation, identity))["state"] == "done")

    await until(done, "the replay to end", within_s=10)
    assert set(await given(installation, subscription)) == {copy.message_id}


async def test_a_replay_is_continued_after_a_break_anywhere(
    installation: Installation, writer: LogWriter
) -> None:
    """The process that continues knows only what is in the database."""
    copies = await published(installation, 9)
    subscription = await installation.subscribe()
    identity = await replay(installation, subscription, rate_per_s=100_000)
    breaks = 0
    while (await job(installation, identity))["state"] in {"queued", "running"}:
        assert breaks < 60
        breaks += 1
        # Looks that come by the clock would use up turns.
        await jobs_of(writer, batch=1, look_s=3600).run(Times(4 + breaks % 2))
    assert breaks > 2
    assert set(await given(installation, subscription)) == {copy.message_id for copy in copies}
    assert await result(installation, identity) == {"replayed": 9}


async def test_two_that_do_one_replay_give_nothing_twice(
    installation: Installation, writer: LogWriter
) -> None:
    copies = await published(installation, 30)
    subscription = await installation.subscribe()
    identity = await replay(installation, subscription)

    async def until_done(mine: LogWriter) -> None:
        while (await job(installation, identity))["state"] in {"queued", "running"}:
            await jobs_of(mine, batch=3).run(always)

    async with LogWriter(installation.url, kind="upkeep") as other:
        await asyncio.gather(until_done(writer), until_done(other))
    assert set(await given(installation, subscription)) == {copy.message_id for copy in copies}
    assert await result(installation, identity) == {"replayed": 30}


async def test_an_id_that_another_delivery_has_is_not_taken(
    installation: Installation, writer: LogWriter
) -> None:
    (copy,) = await published(installation, 1)
    subscription = await installation.subscribe()
    identity = await replay(installation, subscription)
    taken = replayed_id(copy.message_id, identity, 0)
    await installation.rows("UPDATE deliveries SET id = %s", taken)
    await jobs_of(writer).run(always)
    found = await given(installation, subscription)
    assert str(found[copy.message_id]["id"]) == replayed_id(copy.message_id, identity, 1)
    assert await result(installation, identity) == {"replayed": 1}


async def test_a_replay_to_a_deleted_subscription_fails(
    installation: Installation, writer: LogWriter
) -> None:
    await published(installation, 1)
    subscription = await installation.subscribe(status="deleted")
    identity = await replay(installation, subscription)
    await jobs_of(writer).run(always)
    row = await job(installation, identity)
    assert row["state"] == "failed"
    assert "there is no subscription" in row["error"]
    assert await given(installation, subscription) == {}


async def test_a_replay_keeps_its_pace(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 a second are batches of two, each a tenth of a second after the one before it."""
    await published(installation, 9)
    subscription = await installation.subscribe()
    waits: list[float] = []
    now_s = 100.0

    async def sleep(seconds: float, _go_on: object) -> bool:
        nonlocal now_s
        waits.append(round(seconds, 3))
        now_s += seconds
        return True

    class Still(SystemClock):
        def monotonic(self) -> float:
            return now_s

    monkeypatch.setattr(replay_module, "sleep_unless_stopped", sleep)
    await replay(installation, subscription, rate_per_s=20)
    worklist = JobQueue(writer)
    await JobRunner(
        worklist,
        ReplayJob(
            worklist,
            ReplayQueries(writer),
            Still(),
            on_queued=lambda _: None,
            sandbox=idle_sandbox(),
        ).handlers(),
    ).run(always)
    assert len(await given(installation, subscription)) == 9
    assert waits == [0.0, 0.1, 0.1, 0.1, 0.1]


async def test_a_slow_replay_goes_on_in_short_time_slices(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one every 10 s, ten slices of 5 s deliver five, and leave no debt to the next."""
    await published(installation, 9)
    subscription = await installation.subscribe()
    clock = SlicedClock(slice_s=5.0)
    monkeypatch.setattr(replay_module, "sleep_unless_stopped", clock.sleep_unless_stopped)
    await replay(installation, subscription, rate_per_s=0.1)
    jobs = jobs_of(writer, clock=clock)
    for number in range(1, 13):
        clock.begin_slice()
        await jobs.run(clock.should_continue)
        assert len(await given(installation, subscription)) == (number + 1) // 2


async def test_a_slow_replay_follows_a_change_of_what_the_subscription_wants(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change it while the rest of a page that was read waits for its rate."""
    copies = await published(installation, 5)
    (paid,) = await published(installation, 1, event_type="order.paid")
    subscription = await installation.subscribe()
    waits = 0

    async def wait(_seconds: float, _go_on: Any) -> bool:
        nonlocal waits
        waits += 1
        if waits == 3:
            await installation.rows(
                """UPDATE subscriptions SET event_types = '[{"name": "order.paid"}]',
                version = version + 1 WHERE id = %s RETURNING 1""",
                subscription,
            )
        return True

    monkeypatch.setattr(replay_module, "sleep_unless_stopped", wait)
    identity = await replay(installation, subscription, rate_per_s=1)
    await jobs_of(writer).run(always)
    wanted = [*copies[:2], paid]
    assert set(await given(installation, subscription)) == {copy.message_id for copy in wanted}
    assert await result(installation, identity) == {"replayed": 3, "not_wanted": 3}


def test_a_replayed_id_is_always_the_same_and_of_its_messages_millisecond() -> None:
    message, job_id = (
        MessageId("01900000-1234-7abc-8def-012345670007"),
        JobId("01900000-0000-7000-8000-000000000000"),
    )
    made = replayed_id(message, job_id, 0)
    assert made == replayed_id(message, job_id, 0)
    assert (created_ms(made), room_of(made), made[14], made[19] in "89ab") == (
        created_ms(message),
        0x45670007 & 0x7FFFFFFF,
        "7",
        True,
    )
    assert len({made, replayed_id(message, job_id, 1), replayed_id(message, JobId(made), 0)}) == 3
