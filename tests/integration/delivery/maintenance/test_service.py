"""Every maintenance task on a database, and two processes at once."""

import asyncio
import dataclasses
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from delivery.leadership.postgres import SESSION_NAME, HeartbeatConfig, PostgresElection
from delivery.maintenance.cleanup import (
    clean_dead_writers,
    clean_idempotency_keys,
    create_partitions_ahead,
)
from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.expiry import BATCH, DeliveryExpirer, expire_leases
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.service import TaskIntervals, TaskSpec, all_tasks, run_tasks
from delivery.maintenance.task_context import TaskContext
from rooms.clock import SystemClock
from rooms.db.connection import connect, open_connection, open_engine
from rooms.db.jobs.delete import DeleteQueries
from rooms.db.jobs.jobs import JobQueue
from rooms.db.leases.release import LeaseQueries
from rooms.db.notify import Channel, Notifier
from rooms.db.queue.expire import ExpiryQueries
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.writer import LogWriter
from rooms.domain.attempt import AttemptResult
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import JobId, RoomId, SubscriptionId
from rooms.domain.state_machine import UNFINISHED, Event, State, SubscriptionType, states_allowing
from rooms.metrics import Metrics
from tests.support.installation import PATIENCE_S, Installation, ago, now_ms, until
from tests.support.sandboxes import idle_sandbox

LONG_AGO_S = -3600.0


def always() -> bool:
    return True


class Times:
    """A `should_continue` that says yes this many times."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> bool:
        self.count -= 1
        return self.count >= 0


class NothingDone:
    """A `should_continue` that says yes until a job has made progress, to end it after a step."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self) -> bool:
        with psycopg.connect(self._url) as connection:
            return connection.execute("SELECT FROM jobs WHERE done > 0").fetchone() is None


async def queued(
    installation: Installation,
    subscription: SubscriptionId,
    *,
    lifetime_s: float | None = None,
    **columns: Any,
) -> DeliveryTask:
    (copy,) = await installation.publish(subscription, lifetime_s=lifetime_s, **columns)
    await installation.queue(copy)
    return copy


async def held(
    installation: Installation, subscription: SubscriptionId, *, lifetime_s: float | None = None
) -> DeliveryTask:
    (copy,) = await installation.publish(subscription, lifetime_s=lifetime_s, state=State.HELD)
    await installation.rows(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason) VALUES (%s, %s, %s, 4, 0, 'paused')",
        copy.room_id, copy.delivery_id, subscription,
    )  # fmt: skip
    return copy


async def leased(
    installation: Installation,
    subscription: SubscriptionId,
    until_at: datetime,
    *,
    lifetime_s: float | None = None,
) -> DeliveryTask:
    (copy,) = await installation.publish(
        subscription, kind=SubscriptionType.PULL, lifetime_s=lifetime_s, state=State.LEASED
    )
    await installation.rows(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until) VALUES (%s, %s, %s, %s, %s)",
        copy.room_id, copy.delivery_id, subscription, copy.generation, until_at,
    )  # fmt: skip
    return copy


async def claim(installation: Installation, copy: DeliveryTask, until_at: datetime) -> None:
    await installation.rows(
        "UPDATE outbox SET claimed_until = %s, worker = 1 WHERE room_id = %s AND id = %s",
        until_at, copy.room_id, copy.delivery_id,
    )  # fmt: skip


async def in_every_state(
    installation: Installation, lifetime_s: float | None
) -> dict[State, DeliveryTask]:
    """Create a delivery in each state, with its work rows and expired leases."""
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)
    special = {
        State.QUEUED: await queued(installation, push, lifetime_s=lifetime_s),
        State.HELD: await held(installation, push, lifetime_s=lifetime_s),
        State.LEASED: await leased(installation, pull, ago(), lifetime_s=lifetime_s),
    }
    for state in set(State) - special.keys():
        (special[state],) = await installation.publish(push, lifetime_s=lifetime_s, state=state)
    return special


async def work_rows(installation: Installation) -> int:
    found = await installation.value(
        "SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM held) + (SELECT count(*) FROM leases)"
    )
    return int(found)


def later(seconds: float = 60.0) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def expiry_of(writer: LogWriter) -> DeliveryExpirer:
    return DeliveryExpirer(ExpiryQueries(writer), SystemClock())


# Expiry


async def test_an_unfinished_delivery_expires_at_the_end_of_its_lifetime(
    installation: Installation, writer: LogWriter
) -> None:
    copies = await in_every_state(installation, LONG_AGO_S)
    await expiry_of(writer).run(always)
    for state, copy in copies.items():
        row = await installation.delivery(copy)
        ends = state in UNFINISHED
        assert row["state"] == (State.EXPIRED if ends else state)
        journey = await installation.journey(copy)
        assert [step["kind"] for step in journey] == (["expired"] if ends else [])
        if ends:
            assert (row["generation"], row["attempt"], row["due_at"]) == (0, 0, None)
            (step,) = journey
            assert step["correlation_id"] == copy.correlation_id
            assert (step["event_type"], step["event_version"]) == (
                copy.event_type,
                copy.event_version,
            )
            assert step["subscription_id"] == copy.subscription_id
    assert await work_rows(installation) == 0


async def test_deliveries_before_or_without_expiry_are_left(
    installation: Installation, writer: LogWriter
) -> None:
    living = await in_every_state(installation, 3600.0)
    forever = await in_every_state(installation, None)
    await expiry_of(writer).run(always)
    for copies in (living, forever):
        assert {state: await installation.state(copy) for state, copy in copies.items()} == {
            s: s for s in State
        }
    assert await work_rows(installation) == 6


async def test_attempts_under_way_and_leases_expire_after_they_end(
    installation: Installation, writer: LogWriter
) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)
    tried = await queued(installation, push, lifetime_s=LONG_AGO_S)
    await claim(installation, tried, later())
    lent = await leased(installation, pull, later(), lifetime_s=-10.0)
    won = await queued(installation, push, lifetime_s=-10.0)
    await claim(installation, won, later())
    free = await queued(installation, push, lifetime_s=LONG_AGO_S + 1)
    expiry = expiry_of(writer)
    await expiry.run(always)
    assert await installation.states() == {"queued": 2, "leased": 1, "expired": 1}
    assert await installation.state(free) == State.EXPIRED
    mark = await installation.value("SELECT at FROM upkeep_marks WHERE name = 'expiry'")
    assert mark <= (await installation.delivery(tried))["expires_at"]

    await claim(installation, tried, ago())
    await installation.rows("UPDATE leases SET until = now()")
    await installation.rows(
        "UPDATE deliveries SET state = 'delivered' WHERE room_id = %s AND id = %s",
        won.room_id,
        won.delivery_id,
    )
    await expiry.run(always)
    assert await installation.states() == {"expired": 2, "leased": 1, "delivered": 1}
    await expire_leases(LeaseQueries(writer), list[SubscriptionId]().append, always)
    assert await installation.states() == {"expired": 3, "delivered": 1}
    assert await installation.kinds(tried) == await installation.kinds(lent) == ["expired"]
    assert await installation.kinds(won) == []


async def test_a_retry_decided_while_its_row_was_skipped_expires(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copy = await queued(installation, subscription, lifetime_s=-10.0)
    await claim(installation, copy, later())
    expiry = expiry_of(writer)
    await expiry.run(always)
    async with LogWriter(installation.url, kind="settler") as settler:
        answer = AttemptResult(
            status=500, error=None, detail="", body_head=b"", retry_after=None, latency_ms=1.0
        )
        outcome = DeliveryOutcome(task=copy, state=State.QUEUED, result=answer, delay_ms=60_000)
        assert await OutcomeQueries(settler).decide([outcome], worker=1) == 1
    await expiry.run(always)
    assert await installation.state(copy) == State.EXPIRED
    assert await installation.kinds(copy) == ["attempted", "retry_scheduled", "expired"]
    assert await work_rows(installation) == 0


async def test_more_than_a_batch_of_one_time_expires(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    count = 2 * BATCH + 7
    await installation.publish_many(subscription, count)
    await installation.rows("UPDATE deliveries SET expires_at = %s", ago(5))
    await installation.rows("UPDATE outbox SET expires_at = %s", ago(5))
    # More than a batch are under way, and every scan finds them first.
    await installation.rows(
        "UPDATE outbox SET claimed_until = now() + interval '1 hour' WHERE id IN (SELECT id FROM outbox ORDER BY id LIMIT %s)",
        BATCH + 3,
    )
    expiry = expiry_of(writer)
    await expiry.run(always)
    assert await installation.states() == {"queued": BATCH + 3, "expired": BATCH + 4}
    await installation.rows("UPDATE outbox SET claimed_until = '-infinity'")
    await expiry.run(always)
    assert await installation.states() == {"expired": count}
    assert (
        await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'expired'")
        == count
    )


async def test_a_successor_finds_skipped_rows(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copy = await queued(installation, subscription, lifetime_s=LONG_AGO_S)
    await claim(installation, copy, later())
    await expiry_of(writer).run(always)
    await claim(installation, copy, ago())
    await expiry_of(writer).run(always)
    assert await installation.state(copy) == State.EXPIRED


async def test_a_publish_that_commits_after_its_lifetime_is_found(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    expiry = expiry_of(writer)
    async with installed_again(installation) as slow:
        async with slow.connection.transaction():
            copy = await queued(slow, subscription, lifetime_s=0.0)
            await expiry.run(always)
        assert await installation.state(copy) == State.QUEUED
    await expiry.run(always)
    assert await installation.state(copy) == State.EXPIRED


@asynccontextmanager
async def installed_again(installation: Installation) -> AsyncIterator[Installation]:
    """Open another connection to the same installation."""
    async with open_connection(installation.url, name="another") as connection:
        yield dataclasses.replace(installation, connection=connection)


async def test_a_locked_row_is_not_waited_for(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    locked, free = [await queued(installation, subscription, lifetime_s=-10.0) for _ in range(2)]
    expiry = expiry_of(writer)
    for table in ("outbox", "deliveries"):
        async with installed_again(installation) as other, other.connection.transaction():
            await other.rows(
                f"SELECT FROM {table} WHERE room_id = %s AND id = %s FOR UPDATE",
                locked.room_id,
                locked.delivery_id,
            )
            async with asyncio.timeout(PATIENCE_S):
                await expiry.run(always)
            assert await installation.state(locked) == State.QUEUED
            assert await installation.state(free) == State.EXPIRED
    await expiry.run(always)
    assert await installation.state(locked) == State.EXPIRED


# Leases


async def test_an_expired_lease_ends_and_notifies(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe(SubscriptionType.PULL)
    over, live = (
        await leased(installation, subscription, ago()),
        await leased(installation, subscription, later()),
    )
    rung: list[SubscriptionId] = []
    await expire_leases(LeaseQueries(writer), rung.append, always)
    assert rung == [subscription]
    assert await installation.state(over) == State.QUEUED
    assert await installation.state(live) == State.LEASED
    assert await installation.rows("SELECT id::text, kind, generation, attempt FROM outbox") == [
        {"id": over.delivery_id, "kind": 1, "generation": 1, "attempt": 1}
    ]


class LowBounds(LogWriter):
    """Record from which time on each statement looks for leases."""

    def __init__(self, url: str) -> None:
        super().__init__(url, kind="upkeep")
        self.lows: list[object] = []

    async def run(
        self, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        assert isinstance(parameters, dict)
        self.lows.append(parameters["low"])
        return await super().run(statement, parameters)


@asynccontextmanager
async def context_of(
    database: str, writer: LogWriter, *, events_writer: LogWriter
) -> AsyncIterator[TaskContext]:
    """Open what tasks share; `writer` is both the fast and the slow one."""
    engine = open_engine(database)
    async with Notifier(database) as notifier:
        yield TaskContext(
            fast_writer=writer,
            slow_writer=writer,
            events_writer=events_writer,
            job_queue=JobQueue(writer),
            notifier=notifier,
            engine=engine,
            clock=SystemClock(),
            metrics=Metrics(),
            sandbox=idle_sandbox(),
        )
    await engine.dispose()


def spec_of(partition: str) -> TaskSpec:
    (spec,) = [one for one in all_tasks(TaskIntervals()) if one.partition == partition]
    return spec


async def test_a_run_looks_for_expired_leases_where_the_last_one_ended(database: str) -> None:
    """Leases that are over stay in the index while an old snapshot may see them."""
    async with (
        LowBounds(database) as writer,
        context_of(database, writer, events_writer=writer) as context,
    ):
        task = spec_of("upkeep/leases").create(context)
        for _ in range(3):
            await task.run(always)
    first, *later_lows = writer.lows
    assert first == "-infinity"
    assert len(later_lows) == 2
    assert all(isinstance(low, datetime) for low in later_lows)


async def test_a_look_at_awaited_messages_keeps_no_other_task_waiting(database: str) -> None:
    """A writer runs one statement at a time."""
    shared = LogWriter(database, kind="upkeep")
    async with (
        LogWriter(database, kind="events") as writer,
        context_of(database, shared, events_writer=writer) as context,
    ):
        await spec_of("upkeep/events").create(context).run(always)
    assert shared.id == 0, "it has run no statement"


# Jobs


async def ask(
    installation: Installation,
    kind: str,
    *,
    age_s: float = 60.0,
    organisation: str | None = None,
    **arguments: Any,
) -> JobId:
    identity = JobId(installation.ids.generate_global(now_ms()))
    await installation._insert(
        "jobs",
        {
            "id": identity,
            "organisation_id": organisation or installation.organisation,
            "room_id": arguments.get("room_id"),
            "kind": kind,
            "arguments": json.dumps(arguments),
            "created_at": ago(age_s),
        },
    )
    return identity


async def delete_subscription(
    installation: Installation, subscription: SubscriptionId, *, age_s: float = 60.0
) -> JobId:
    await installation.change(subscription, status="deleted")
    return await ask(
        installation,
        "delete_subscription",
        age_s=age_s,
        room_id=installation.room,
        subscription_id=str(subscription),
    )


async def delete_room(installation: Installation, room: RoomId) -> JobId:
    await installation.rows("UPDATE rooms SET deleting = true WHERE id = %s", room)
    return await ask(installation, "delete_room", room_id=room)


async def job(installation: Installation, identity: JobId) -> dict[str, Any]:
    (row,) = await installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    return row


def jobs_of(writer: LogWriter, *, settle_s: float = 5.0, batch: int = 1000) -> JobRunner:
    worklist = JobQueue(writer)
    return JobRunner(
        worklist,
        DeleteJob(worklist, DeleteQueries(writer), settle_s=settle_s, batch=batch).handlers(),
    )


async def test_a_deletion_waits_for_a_publish_that_does_not_know_of_it(
    installation: Installation, writer: LogWriter
) -> None:
    """It waits for locks, longer than is usual, and its delivery must not stay for ever."""
    subscription = await installation.subscribe(SubscriptionType.PULL)
    jobs = jobs_of(writer)
    async with await connect(installation.url, name="rooms publisher") as session:
        publisher = dataclasses.replace(installation, connection=session)
        async with session.transaction():
            copy = await queued(publisher, subscription, kind=SubscriptionType.PULL)
            identity = await delete_subscription(installation, subscription)
            for _ in range(2):
                await jobs.run(always)
            assert (await job(installation, identity))["state"] == "running"

    async def done() -> bool:
        await jobs.run(always)
        return bool((await job(installation, identity))["state"] == "done")

    await until(done, "the deletion to end", within_s=10)
    assert await installation.state(copy) == State.CANCELLED


async def test_a_deleted_subscription_leaves_nothing_unfinished(
    installation: Installation, writer: LogWriter
) -> None:
    copies = await in_every_state(installation, None)
    other = await queued(installation, await installation.subscribe())
    identities = [
        await delete_subscription(installation, subscription)
        for subscription in {copy.subscription_id for copy in copies.values()}
    ]
    jobs = jobs_of(writer, batch=3)
    await jobs.run(always)  # cancels
    await jobs.run(always)  # finds nothing
    cancelled = states_allowing(Event.CANCEL)
    for state, copy in copies.items():
        row = await installation.delivery(copy)
        assert row["state"] == (State.CANCELLED if state in cancelled else state)
        assert row["reason"] == ("subscription_deleted" if state in cancelled else None)
        assert await installation.kinds(copy) == (["cancelled"] if state in cancelled else [])
    assert await work_rows(installation) == 1
    assert await installation.state(other) == State.QUEUED
    for identity in identities:
        row = await job(installation, identity)
        assert (row["state"], row["error"]) == ("done", None)
        assert row["done"] == row["total"] > 0
        assert row["finished_at"] is not None


async def test_a_publish_with_an_older_routing_table_leaves_nothing_behind(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    early = await queued(installation, subscription)
    identity = await delete_subscription(installation, subscription, age_s=0.0)
    jobs = jobs_of(writer, settle_s=3600)
    await jobs.run(always)
    assert await installation.state(early) == State.CANCELLED
    late = await queued(installation, subscription)
    await jobs.run(always)
    assert (await job(installation, identity))["state"] == "running"
    assert await installation.state(late) == State.QUEUED
    await installation.rows("UPDATE jobs SET created_at = %s", ago(3601))
    await jobs.run(always)
    assert await installation.state(late) == State.CANCELLED
    assert (await job(installation, identity))["state"] == "running"
    await jobs.run(always)
    assert (await job(installation, identity))["state"] == "done"


async def test_an_attempt_under_way_ends_before_the_deletion(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copy = await queued(installation, subscription)
    await claim(installation, copy, later())
    identity = await delete_subscription(installation, subscription)
    jobs = jobs_of(writer)
    await jobs.run(always)
    await jobs.run(always)
    assert await installation.state(copy) == State.QUEUED
    assert (await job(installation, identity))["state"] == "running"
    await claim(installation, copy, ago())
    await jobs.run(always)
    await jobs.run(always)
    assert await installation.state(copy) == State.CANCELLED
    assert (await job(installation, identity))["state"] == "done"


async def furnish(installation: Installation, room: RoomId) -> None:
    """Write rows to every table with a room."""
    push = await installation.subscribe(room=room)
    pull = await installation.subscribe(SubscriptionType.PULL, room=room)
    for number in range(4):
        await queued(installation, push)
        await held(installation, push)
        await leased(installation, pull, later())
        (copy,) = await installation.publish(push, state=State.DELIVERED)
        await installation.rows(
            "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason) VALUES (%s, %s, %s, 0, 'stuck')",
            room, copy.delivery_id, push,
        )  # fmt: skip
        await installation.rows(
            "INSERT INTO idempotency_keys (room_id, key, message_id, request_hash, answer) VALUES (%s, %s, %s, '', '')",
            room, f"key-{number}", copy.message_id,
        )  # fmt: skip
        await installation.rows(
            "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind)"
            " SELECT %s, %s, 1, n, 'attempted' FROM generate_series(1, 5) n",
            room, copy.message_id,
        )  # fmt: skip
        await installation.rows(
            "INSERT INTO message_ids (room_id, caller_id, message_id, content_hash, answer) VALUES (%s, %s, %s, '', '')",
            room, f"id-{number}", copy.message_id,
        )  # fmt: skip
        await installation.rows(
            "WITH k AS (INSERT INTO ordered_keys (room_id, subscription_id, key, tail, head, head_id)"
            " VALUES (%s, %s, convert_to(%s, 'UTF8'), 2, 1, %s) RETURNING *)"
            " INSERT INTO ordered_waiting (room_id, subscription_id, key, position, id)"
            " SELECT room_id, subscription_id, key, n, gen_random_uuid() FROM k, generate_series(2, 3) n",
            room, push, f"key-{number}", copy.delivery_id,
        )  # fmt: skip
        await installation.rows(
            "INSERT INTO sequences (room_id, subscription_id, key, last) VALUES (%s, %s, convert_to(%s, 'UTF8'), 2)",
            room, push, f"key-{number}",
        )  # fmt: skip
    await installation.rows("INSERT INTO lanes (room_id, id) VALUES (%s, %s)", room, push)
    await installation.rows(
        "INSERT INTO grants (room_id, id, kind) VALUES (%s, gen_random_uuid(), 'publish')", room
    )
    await installation.rows(
        "INSERT INTO subscription_history (room_id, subscription_id, action, status, snapshot)"
        " VALUES (%s, %s, 'created', 'active', '{}')",
        room, push,
    )  # fmt: skip
    for event in ("rooms.circuit.opened", "rooms.circuit.closed"):
        await installation.rows(
            "WITH o AS (INSERT INTO operational_outbox (room_id, event, organisation_id, data)"
            " SELECT %s, %s, gen_random_uuid(), '{}' FROM generate_series(1, 5) RETURNING *),"
            " w AS (INSERT INTO operational_overflow SELECT room_id, event, organisation_id, 0, 1 FROM o),"
            " p AS (INSERT INTO operational_pace SELECT DISTINCT room_id, event, 1, now() FROM o)"
            " INSERT INTO operational_messages (room_id, id, enqueued) SELECT room_id, organisation_id, '' FROM o",
            room, event,
        )  # fmt: skip
    await installation.rows(
        "INSERT INTO shovel_schedules (room_id, subscription_id, interval_s, concurrency, max_shovels) VALUES (%s, %s, 1, 1, 1)",
        room, push,
    )  # fmt: skip
    await installation.rows(
        "WITH t AS (INSERT INTO event_types (room_id, id, name) VALUES (%s, gen_random_uuid(), 'a') RETURNING *)"
        " INSERT INTO event_type_versions (room_id, id, event_type_id, version) SELECT room_id, gen_random_uuid(), id, 1 FROM t",
        room,
    )


async def rows_of_room(installation: Installation, room: RoomId) -> dict[str, int]:
    """Return the room's rows by table, for every table that has a room column.

    Jobs and usage stay when a room is deleted.
    """
    tables = await installation.rows(
        "SELECT c.relname AS name FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'room_id'"
        " WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relname NOT IN ('jobs', 'usage_hours')"
        " AND c.relnamespace = 'public'::regnamespace"
    )
    counts = {
        row["name"]: await installation.value(
            f"SELECT count(*) FROM {row['name']} WHERE room_id = %s", room
        )
        for row in tables
    }
    return counts | {
        "rooms": await installation.value("SELECT count(*) FROM rooms WHERE id = %s", room)
    }


@pytest.mark.parametrize("batch", [1000, 3])
async def test_a_deleted_room_leaves_no_row_that_names_it(
    installation: Installation, writer: LogWriter, batch: int
) -> None:
    room = await installation.make_room(RoomId(8))
    await furnish(installation, installation.room)
    await furnish(installation, room)
    kept = await rows_of_room(installation, installation.room)
    assert set((await rows_of_room(installation, room)).values()) - {0} == set(kept.values()) - {0}
    assert all(kept.values()), kept
    identity = await delete_room(installation, room)
    jobs = jobs_of(writer, batch=batch)
    await jobs.run(always)
    await jobs.run(always)
    assert not any((await rows_of_room(installation, room)).values())
    assert await rows_of_room(installation, installation.room) == kept
    row = await job(installation, identity)
    assert (row["state"], row["error"]) == ("done", None)
    assert row["done"] == row["total"] > 0


async def test_an_interrupted_deletion_is_continued(
    installation: Installation, writer: LogWriter
) -> None:
    """Continue with what is in the database only."""
    room = await installation.make_room(RoomId(8))
    await furnish(installation, room)
    identity = await delete_room(installation, room)
    await jobs_of(writer, batch=3).run(always)
    breaks = 0
    while not await is_done(installation, identity):
        assert (await job(installation, identity))["state"] == "running"
        assert breaks < 200
        breaks += 1
        await jobs_of(writer, batch=3).run(Times(breaks // 2 + 9))
    assert breaks > 10
    assert not any((await rows_of_room(installation, room)).values())


async def test_an_invalid_job_fails_and_others_run(
    installation: Installation, writer: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    used, deleted = await installation.subscribe(), await installation.subscribe()
    room = installation.room
    poison = [
        await ask(installation, "delete_subscription", room_id=room),
        await ask(installation, "delete_subscription", room_id=room, subscription_id="nonsense"),
        await ask(installation, "delete_subscription", room_id=9, subscription_id=str(deleted)),
        await ask(installation, "delete_subscription", room_id=room, subscription_id=str(used)),
        await ask(installation, "delete_room", room_id=room),
    ]
    others = await ask(installation, "paint_the_room")  # a later version's, or another duty's
    good = await delete_subscription(installation, deleted)
    with caplog.at_level(logging.CRITICAL):
        await jobs_of(writer).run(always)
    for identity in poison:
        row = await job(installation, identity)
        assert row["state"] == "failed"
        assert row["error"]
        assert row["finished_at"] is not None
    assert (await job(installation, good))["state"] == "done"
    assert (await job(installation, others))["state"] == "queued"
    assert await installation.value("SELECT count(*) FROM rooms") == 1


async def test_a_deletion_of_a_deleted_object_is_done(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    identities = [
        await ask(installation, "delete_room", room_id=99),
        await delete_subscription(installation, subscription),
    ]
    await installation.rows("DELETE FROM subscriptions")
    await jobs_of(writer).run(always)
    assert [(await job(installation, identity))["state"] for identity in identities] == [
        "done",
        "done",
    ]


# Chores


async def test_old_idempotency_keys_are_deleted(
    installation: Installation, writer: LogWriter
) -> None:
    await installation.rows(
        "INSERT INTO idempotency_keys (room_id, key, message_id, request_hash, answer, created_at)"
        " SELECT 7, n::text, gen_random_uuid(), '', '', now() - n * interval '1 hour' FROM generate_series(1, 40) n"
    )
    await clean_idempotency_keys(writer, always)
    kept = await installation.rows("SELECT key FROM idempotency_keys ORDER BY key::int")
    assert [row["key"] for row in kept] == [str(n) for n in range(1, 24)]


async def test_dead_writers_are_deleted_when_old_and_without_claims(
    installation: Installation, writer: LogWriter
) -> None:
    async def dead(kind: str) -> int:
        return int(
            await installation.value(
                "INSERT INTO writers (kind, host, pid) VALUES (%s, 'here', 1) RETURNING id", kind
            )
        )

    gone, claiming = await dead("gone"), await dead("claiming")
    copy = await queued(installation, await installation.subscribe())
    await claim(installation, copy, later())
    await installation.rows("UPDATE outbox SET worker = %s", claiming)
    await installation.rows("UPDATE writers SET started_at = now() - interval '8 days'")
    young = await dead("young")
    await clean_dead_writers(writer, always)
    kept = {row["id"] for row in await installation.rows("SELECT id FROM writers")}
    assert kept == {writer.id, claiming, young}
    assert gone not in kept


class DayAhead(SystemClock):
    """A clock that is a day ahead."""

    def __init__(self) -> None:
        self._now = super().now() + timedelta(days=1)

    def now(self) -> datetime:
        return self._now


async def test_partitions_are_created_a_week_ahead(installation: Installation) -> None:
    # A day later: the migration may have been run yesterday, and the day must not end in the middle.
    clock = DayAhead()

    def name(days: int) -> str:
        return f"deliveries_{clock.now() + timedelta(days=days):%Y%m%d}"

    async def exists(days: int) -> bool:
        return bool(await installation.value("SELECT to_regclass(%s) IS NOT NULL", name(days)))

    assert not await exists(7)
    engine = open_engine(installation.url, size=1)
    try:
        await create_partitions_ahead(engine, clock, always)
        assert await exists(7)
        await create_partitions_ahead(engine, clock, always)
    finally:
        await engine.dispose()
    assert not await exists(8)


# All of it

QUICK = TaskIntervals(
    leases_s=0.01,
    expiry_s=0.01,
    jobs_s=0.01,
    settle_s=0.0,
    retry_s=0.05,
)
PULSE = HeartbeatConfig(lease_s=2.0, trust_s=1.5, ping_s=0.2, retry_s=0.05)


class Running:
    """A maintenance service in this process."""

    def __init__(self, url: str, member: str) -> None:
        self.member = member
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self._keep(url))

    async def _keep(self, url: str) -> None:
        clock = SystemClock()
        async with PostgresElection(
            url, member=self.member, clock=clock, heartbeat=PULSE
        ) as election:
            await run_tasks(
                database_url=url, election=election, clock=clock, stop=self.stop, intervals=QUICK
            )

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await self.task


@pytest.fixture
async def run(database: str) -> AsyncIterator[Callable[[], Running]]:
    async with AsyncExitStack() as stack:
        numbers = itertools.count(1)

        def start() -> Running:
            running = Running(database, f"upkeep-{next(numbers)}")
            stack.push_async_callback(running.end)
            return running

        yield start


async def test_maintenance_runs_every_task_and_stops(
    installation: Installation, run: Callable[[], Running]
) -> None:
    heard = asyncio.Event()
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)

    async def another_is_heard() -> bool:
        # A notification may come before the listener.
        await leased(installation, pull, ago())
        return heard.is_set()

    async with Notifier(
        installation.url,
        listeners={Channel.PULL: lambda names: heard.set() if pull in names else None},
    ):
        lent = await leased(installation, pull, ago())
        expired = await queued(installation, push, lifetime_s=-1.0)
        identity = await delete_subscription(installation, await installation.subscribe())
        running = run()
        await until(lambda: is_in(installation, lent, State.QUEUED), "the lease to end")
        await until(lambda: is_in(installation, expired, State.EXPIRED), "the delivery to expire")
        await until(lambda: is_done(installation, identity), "the job to be done")
        await until(another_is_heard, "a lease's end to be heard")
        await running.end()

    async def none_is_left() -> bool:
        return not await installation.backends(SESSION_NAME) and not await installation.backends(
            "rooms upkeep"
        )

    await until(none_is_left, "the sessions to end")


async def is_in(installation: Installation, copy: DeliveryTask, state: State) -> bool:
    return await installation.state(copy) == state


async def is_done(installation: Installation, identity: JobId) -> bool:
    return bool((await job(installation, identity))["state"] == "done")


async def duties(installation: Installation) -> dict[str, list[str]]:
    """Return the tasks of each process."""
    rows = await installation.rows(
        "SELECT m.name AS member, p.name FROM election_partitions p JOIN election_members m ON m.id = p.holder"
    )
    return {
        name: sorted(row["name"] for row in rows if row["member"] == name)
        for name in {row["member"] for row in rows}
    }


async def test_two_processes_share_the_tasks_and_take_over(
    installation: Installation, run: Callable[[], Running]
) -> None:
    names = sorted(chore.partition for chore in all_tasks(QUICK))
    first = run()

    async def has_all(running: Running) -> bool:
        return await duties(installation) == {running.member: names}

    await until(lambda: has_all(first), "the first to do everything")
    second = run()

    async def both_have_half() -> bool:
        found = await duties(installation)
        halves = [len(names) // 2, len(names) - len(names) // 2]
        return (
            set(found) == {first.member, second.member}
            and sorted(map(len, found.values())) == halves
        )

    await until(both_have_half, "each to have half of the duties")
    copy = await queued(installation, await installation.subscribe(), lifetime_s=0.0)
    await until(lambda: is_in(installation, copy, State.EXPIRED), "the delivery to expire")
    await first.end()
    await until(lambda: has_all(second), "the second to do everything")


async def test_maintenance_survives_lost_connections(
    installation: Installation, run: Callable[[], Running]
) -> None:
    subscription = await installation.subscribe()
    run()
    for name in (SESSION_NAME, "rooms upkeep", "rooms chores", "rooms events"):
        copy = await queued(installation, subscription, lifetime_s=0.0)
        await until(
            lambda copy=copy: is_in(installation, copy, State.EXPIRED),  # type: ignore[misc]
            "the delivery to expire",
        )
        await until(lambda name=name: installation.terminate(name), f"a session {name} to end")  # type: ignore[misc]
    copy = await queued(installation, subscription, lifetime_s=0.0)
    await until(lambda: is_in(installation, copy, State.EXPIRED), "the delivery to expire")
    identity = await delete_subscription(installation, subscription)
    await until(lambda: is_done(installation, identity), "the job to be done")


async def test_two_processes_at_once_change_nothing_twice(installation: Installation) -> None:
    """Run every task by two writers at the same time, as if a lost term went unnoticed."""
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)
    gone = await installation.subscribe()
    expiring = [await queued(installation, push, lifetime_s=-10.0) for _ in range(60)]
    lent = [await leased(installation, pull, ago()) for _ in range(60)]
    cancelled = [await queued(installation, gone) for _ in range(60)]
    room = await installation.make_room(RoomId(8))
    await furnish(installation, room)
    identities = [
        await delete_subscription(installation, gone),
        await delete_room(installation, room),
    ]
    async with AsyncExitStack() as stack:
        writers = [
            await stack.enter_async_context(LogWriter(installation.url, kind="upkeep"))
            for _ in range(4)
        ]

        def duties(quick: LogWriter, slow: LogWriter) -> list[Awaitable[None]]:
            jobs = jobs_of(slow, batch=7)

            async def all_jobs() -> None:
                while await installation_open():
                    await jobs.run(always)

            return [
                expiry_of(quick).run(always),
                expire_leases(LeaseQueries(quick), lambda _: None, always),
                all_jobs(),
                clean_idempotency_keys(slow, always),
                clean_dead_writers(slow, always),
            ]

        turn = asyncio.Lock()

        async def installation_open() -> int:
            async with turn:
                return int(
                    await installation.value(
                        "SELECT count(*) FROM jobs WHERE state IN ('queued', 'running')"
                    )
                )

        await asyncio.gather(*duties(writers[0], writers[1]), *duties(writers[2], writers[3]))
        await expiry_of(writers[0]).run(
            always
        )  # a row that the one had locked was passed over by the other
    assert {await installation.state(copy) for copy in expiring} == {State.EXPIRED}
    assert {await installation.state(copy) for copy in lent} == {State.QUEUED}
    assert {await installation.state(copy) for copy in cancelled} == {State.CANCELLED}
    for copies, kind in ((expiring, "expired"), (lent, "lease_ended"), (cancelled, "cancelled")):
        assert all([await installation.kinds(copy) == [kind] for copy in copies])
    assert [(await job(installation, identity))["state"] for identity in identities] == [
        "done",
        "done",
    ]
    assert not any((await rows_of_room(installation, room)).values())
    gaps = await installation.rows(
        "SELECT writer_id FROM delivery_log WHERE room_id = 7 GROUP BY writer_id HAVING count(*) > max(writer_seq)"
    )
    assert gaps == []
