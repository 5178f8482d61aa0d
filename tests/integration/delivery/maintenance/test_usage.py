"""Test that usage equals the log to the last row, whatever runs, commits late or dies.

Each check compares the counts by the minute, too.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.age_limits import delete_old_usage, usage_retention_specs
from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.retention import RetentionRules, retention_specs
from delivery.maintenance.service import TaskIntervals, all_tasks
from delivery.maintenance.usage import count_usage, is_counted_until, update_usage, usage_counter
from rooms.clock import SystemClock
from rooms.db.connection import open_engine, transaction
from rooms.db.jobs.delete import DeleteQueries
from rooms.db.jobs.jobs import JobQueue
from rooms.db.retention.log_index import LogIndex
from rooms.db.usage import count as records
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.metrics import Metrics
from tests.support.installation import Installation, until
from tests.support.log_rows import Log, logging
from tests.support.usage_counts import (
    counts_of_log,
    counts_of_table,
    minutes_of_log,
    minutes_of_table,
)

HOUR: Final = timedelta(hours=1)
MINUTE: Final = timedelta(minutes=1)
LATENCIES: Final = (None, 0.25, 1.0, 1.5, 40.0, 250.0, 7_000_000.0)
KINDS: Final = (
    "attempted", "delivered", "pull_acked", "handed_over", "sidelined", "expired", "cancelled", "dropped", "purged",
    "held", "released", "leased", "replayed", "enqueued", "retry_scheduled", "nacked", "lease_ended",
)  # fmt: skip


def always() -> bool:
    return True


@pytest.fixture
async def engine(installation: Installation) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(installation.url, size=2)
    yield engine
    await engine.dispose()


# No row of these tests is about an attempt, a later time or a suspension.
_MISCOUNTED = """
SELECT count(*) FROM usage_hours WHERE kept_deliveries <> 0 OR kept_expired <> 0
    OR kept_cancelled <> CASE WHEN organisation_id = owner_id THEN 0 ELSE cancelled END
"""


async def check(installation: Installation) -> int:
    """Compare the counts with the log; return the number of messages."""
    expected = await counts_of_log(lambda statement: tuples(installation, statement))
    found = await counts_of_table(lambda statement: tuples(installation, statement))
    assert found == expected
    assert await installation.value(_MISCOUNTED) == 0
    by_minute = await minutes_of_log(lambda statement: tuples(installation, statement))
    counted = await minutes_of_table(lambda statement: tuples(installation, statement))
    assert counted == by_minute
    return sum(count for key, count in found.items() if key[-1] == "messages")


async def tuples(installation: Installation, statement: str) -> list[tuple[Any, ...]]:
    cursor = await installation.connection.execute(statement.encode())
    return await cursor.fetchall()


async def complete(engine: AsyncEngine) -> datetime:
    async with transaction(engine) as connection:
        found = await records.complete_until(connection)
    return found or datetime.min.replace(tzinfo=UTC)


async def becomes_complete(engine: AsyncEngine, at: datetime) -> None:
    """Count until everything before that time is complete."""

    async def is_complete() -> bool:
        await count_usage(engine, always)
        return await complete(engine) > at

    await until(is_complete, "completeness")


async def other_organisation(installation: Installation, name: str) -> str:
    found = await installation.value(
        "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), %s) RETURNING id::text",
        name,
    )
    return str(found)


class Workload:
    """Write random rows about several rooms, organisations and hours."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.subscriptions: dict[int, list[SubscriptionId]] = {}
        self.messages: list[tuple[int, str]] = []

    async def furnish(self, installation: Installation) -> None:
        await installation.make_room(8)  # type: ignore[arg-type]
        guest = await other_organisation(installation, "guest")
        for room in (installation.room, 8):
            of_room = [
                await installation.subscribe(room=room, organisation_id=organisation, application=name)  # type: ignore[arg-type]
                for organisation, name in (
                    (installation.organisation, None), (installation.organisation, "intake"),
                    (guest, None), (guest, "billing"),
                )
            ]  # fmt: skip
            self.subscriptions[room] = of_room
            for publisher in (None, guest):
                for application in (None, "registry", "billing"):
                    (copy,) = await installation.publish(of_room[0])
                    await installation.rows(
                        "UPDATE messages SET publisher_organisation_id = %s, application = %s WHERE id = %s",
                        publisher, application, copy.message_id,
                    )  # fmt: skip
                    self.messages.append((room, copy.message_id))

    def write(self, log: Log) -> None:
        room, message = self.dice.choice(self.messages)
        of_room = self.subscriptions[room]
        at = datetime.now(UTC) - self.dice.choice((0, 1, 3, 30)) * HOUR
        at -= self.dice.randrange(20) * MINUTE
        event_type = self.dice.choice(("order.created", "order.paid", None))
        if self.dice.random() < 0.4:
            enqueued = self.dice.choices(of_room, k=self.dice.randrange(4))
            log.write(
                room, "published", at=at, message=message, event_type=event_type, enqueued=enqueued
            )
            return
        kind = self.dice.choice(KINDS)
        failed = self.dice.random() < 0.5
        log.write(
            room,
            kind,
            at=at,
            message=message,
            event_type=event_type,
            subscription=self.dice.choice(of_room),
            error="status" if kind == "attempted" and failed else None,
            status=200 if kind == "delivered" and failed else None,
            latency_ms=self.dice.choice(LATENCIES) if kind in {"attempted", "delivered"} else None,
        )


@pytest.mark.parametrize("seed", range(4))
async def test_usage_equals_the_log(
    installation: Installation, engine: AsyncEngine, seed: int
) -> None:
    workload = Workload(seed)
    await workload.furnish(installation)
    with logging(installation.url) as log, logging(installation.url, 2) as late:
        for _ in range(20):
            for _ in range(workload.dice.randrange(1, 20)):
                workload.write(log)
            log.commit()
            workload.write(late)
            if workload.dice.random() < 0.3:
                late.commit()
            most = workload.dice.choice((1, 3, 2000))
            await count_usage(engine, always, max_transactions=most)
        late.commit()
        await count_usage(engine, always)
    assert await check(installation) > 50
    assert await installation.value("SELECT count(*) FROM activity_minutes") > 50


async def test_real_publishes_are_counted(installation: Installation, engine: AsyncEngine) -> None:
    subscription = await installation.subscribe()
    with logging(installation.url) as log:
        log.write(installation.room, "published", enqueued=[subscription, subscription])
        log.write(installation.room, "delivered", subscription=subscription, status=204)
        log.commit()
    await count_usage(engine, always)
    assert await check(installation) == 1
    (found,) = await installation.rows("SELECT * FROM usage_hours")
    expected = {"messages": 1, "bytes": 100, "deliveries": 2, "attempts": 1, "delivered": 1}
    assert {name: found[name] for name in expected} == expected
    assert (found["failed_attempts"], found["sidelined"]) == (0, 0)
    before = await installation.rows("SELECT * FROM usage_hours")
    await count_usage(engine, always)
    assert await installation.rows("SELECT * FROM usage_hours") == before


async def test_a_late_transaction_is_added_to_its_hour(
    installation: Installation, engine: AsyncEngine
) -> None:
    """Check that an hour is not closed while a transaction of it is open, and grows afterwards."""
    subscription = await installation.subscribe()
    early = datetime.now(UTC).replace(minute=59, second=59) - 2 * HOUR
    with logging(installation.url) as log, logging(installation.url, 2) as late:
        late.write(installation.room, "published", at=early)
        began = datetime.now(UTC)
        log.write(installation.room, "published", at=early + timedelta(seconds=2))
        log.write(installation.room, "delivered", subscription=subscription)
        log.commit()
        for _ in range(3):
            await count_usage(engine, always)
        assert await complete(engine) < began
        assert not await usage_counter(engine)(always), "a transaction is open"
        late.commit()
        assert await usage_counter(engine)(always)
    await becomes_complete(engine, began)
    assert await check(installation) == 2
    hours = await installation.rows("SELECT DISTINCT hour FROM usage_hours WHERE messages > 0")
    assert len(hours) == 2


async def test_a_transaction_that_has_not_written_yet_keeps_its_hour_open(
    installation: Installation, engine: AsyncEngine
) -> None:
    """Its rows will have the time of its begin, although it has no id yet."""
    with logging(installation.url) as late:
        late.connection.execute("SELECT now()")
        began = datetime.now(UTC)
        for _ in range(3):
            await count_usage(engine, always)
        assert await complete(engine) < began
        late.write(installation.room, "published")
        late.commit()
    await becomes_complete(engine, began)
    assert await check(installation) == 1


async def test_completeness_waits_for_older_ids_under_constant_load(
    installation: Installation, engine: AsyncEngine
) -> None:
    """A transaction that is over is not counted while one with an older id is open."""
    with logging(installation.url) as first, logging(installation.url, 2) as second:
        first.write(installation.room, "published")
        with logging(installation.url, 3) as done:
            done.write(installation.room, "published")
            done.commit()
        middle = datetime.now(UTC)
        await count_usage(engine, always)
        assert await complete(engine) < middle
        second.write(installation.room, "published")
        first.commit()
        await count_usage(engine, always)
        second.commit()
        await count_usage(engine, always)
    await becomes_complete(engine, middle)
    assert await check(installation) == 3


class KilledError(BaseException):
    """The process is gone."""


def die_at(engine: AsyncEngine, moment: str, number: int) -> None:
    """Let the process die `before` or `after` its statement of that number."""
    left = [number]

    def die(*_: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise KilledError

    event.listen(engine.sync_engine, f"{moment}_cursor_execute", die)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_no_row_is_lost_or_doubled_wherever_it_dies(
    installation: Installation, moment: str
) -> None:
    """Die at each statement in turn, with new rows each time, until a run completes."""
    workload = Workload(77)
    await workload.furnish(installation)
    with logging(installation.url) as log:
        for number in range(1, 1000):
            for _ in range(3):
                workload.write(log)
                log.commit()
            engine = open_engine(installation.url, size=1)
            die_at(engine, moment, number)
            try:
                await count_usage(engine, always, max_transactions=2)
                break
            except KilledError:
                continue
            finally:
                await engine.dispose()
    assert number > 10
    assert await check(installation) > 0


async def test_two_processes_count_each_row_once(
    installation: Installation, engine: AsyncEngine
) -> None:
    workload = Workload(5)
    await workload.furnish(installation)
    other = open_engine(installation.url, size=2)
    try:
        with logging(installation.url) as log:
            for _ in range(60):
                workload.write(log)
                log.commit()
                if workload.dice.random() < 0.2:
                    await asyncio.gather(
                        count_usage(engine, always, max_transactions=3),
                        count_usage(other, always, max_transactions=3),
                    )
        await asyncio.gather(count_usage(engine, always), count_usage(other, always))
    finally:
        await other.dispose()
    assert await check(installation) > 10


async def test_a_count_that_another_one_overtook_is_not_the_last(
    installation: Installation, engine: AsyncEngine
) -> None:
    """Jobs that delete the log wait for the last one; the other process knows of fewer rows."""
    await count_usage(engine, always)
    with logging(installation.url) as log:
        log.write(installation.room, "published")
        log.commit()
        earlier = await records.read_horizon(engine)
        log.write(installation.room, "published")
        log.commit()
    horizon = await records.read_horizon(engine)
    async with engine.connect() as other, other.begin():
        move = text("UPDATE usage_mark SET counted_xid = :end RETURNING 1")
        assert await other.scalar(move, {"end": earlier.settled_xid})
        count = asyncio.create_task(records.count_next(engine, horizon))
        await until(lambda: _waits_for_lock(installation), "the count to wait for the mark")
    assert await count
    await count_usage(engine, always)
    assert await installation.value("SELECT sum(messages)::int FROM usage_hours") == 1, "the second"


async def _waits_for_lock(installation: Installation) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'usage_mark'"
    return bool(await installation.value(waiting))


async def test_a_gap_of_transactions_is_skipped(
    installation: Installation, engine: AsyncEngine
) -> None:
    """Most transactions write no log; a range is not walked in small steps."""
    with logging(installation.url) as log:
        for burst in range(3):
            for _ in range(5):
                log.write(installation.room, "published")
                log.commit()
            for _ in range(300 * (burst + 1)):
                await installation.rows("SELECT pg_current_xact_id()")
    steps = 0

    def counting() -> bool:
        nonlocal steps
        steps += 1
        return True

    await count_usage(engine, counting, max_transactions=4)
    assert await check(installation) == 15
    assert steps < 40


async def test_a_database_restored_elsewhere_is_counted_on(
    installation: Installation, engine: AsyncEngine
) -> None:
    """There the ids of transactions begin anew: old rows keep theirs, which are in the future."""
    with logging(installation.url) as log:
        log.write(installation.room, "published")
        log.commit()
        for _ in range(2):
            await count_usage(engine, always)
        await installation.rows("UPDATE log_entries SET xid = '5000000000'::xid8")
        await installation.rows(
            "UPDATE usage_mark SET system = 'another', counted_xid = 5000000001, since = '-infinity'"
        )
        log.write(installation.room, "published")
        log.commit()
        # The old server had not counted this one.
        log.write(installation.room, "published")
        log.commit()
        await installation.rows(
            "UPDATE log_entries SET xid = '5000000002'::xid8 WHERE writer_seq = %s", log.seq
        )
        await count_usage(engine, always)
        assert await check(installation) == 3
        log.write(installation.room, "published")
        log.commit()
    await count_usage(engine, always)
    assert await check(installation) == 4


async def test_time_is_that_of_postgresql(installation: Installation, engine: AsyncEngine) -> None:
    """A row's hour is its time in the log, whatever clock the counting process has."""
    at = datetime(2026, 3, 1, 23, 59, 59, 999_999, tzinfo=UTC)
    with logging(installation.url) as log:
        log.connection.execute("SET TimeZone = 'Asia/Kathmandu'")
        log.write(installation.room, "published", at=at)
        log.write(installation.room, "published", at=at + timedelta(microseconds=1))
        log.commit()
    async with transaction(engine) as connection:
        await connection.exec_driver_sql("SET TimeZone = 'Asia/Kathmandu'")
    await count_usage(engine, always)
    found = [
        row["hour"] for row in await installation.rows("SELECT hour FROM usage_hours ORDER BY 1")
    ]
    assert found == [at.replace(minute=0, second=0, microsecond=0), at + timedelta(microseconds=1)]


async def test_old_usage_is_deleted_by_the_slower_clock(
    installation: Installation, engine: AsyncEngine
) -> None:
    now = datetime.now(UTC)
    with logging(installation.url) as log:
        for days in (50, 41, 39, 0):
            log.write(installation.room, "published", at=now - timedelta(days=days))
        log.commit()
    await count_usage(engine, always)
    await delete_old_usage(engine, now + timedelta(days=1000), 40, always)
    kept = await installation.value("SELECT count(*) FROM usage_hours")
    assert kept == 2
    await delete_old_usage(engine, now, 40, lambda: False)
    assert usage_retention_specs(0) == ()
    (spec,) = usage_retention_specs(400)
    assert spec.partition == "upkeep/usage-retention"


async def test_old_minutes_are_deleted(installation: Installation, engine: AsyncEngine) -> None:
    await installation.rows(
        "INSERT INTO activity_minutes SELECT gen_random_uuid(), now() - m * interval '1 minute', 1, 1, 0, 0, 0, '{}'"
        " FROM generate_series(0, 15000, 100) m, generate_series(1, 100)"
    )
    await update_usage(engine, Metrics(), LogIndex(), always)
    assert await installation.value("SELECT count(*) FROM activity_minutes") == 100


async def test_the_delay_is_reported(installation: Installation, engine: AsyncEngine) -> None:
    metrics = Metrics()
    await update_usage(engine, metrics, LogIndex(), always)
    assert 0 <= metrics.usage_delay._value.get() < 60
    assert "upkeep/usage" in {spec.partition for spec in all_tasks(TaskIntervals())}


async def test_retention_waits_until_the_log_is_counted(
    installation: Installation, engine: AsyncEngine
) -> None:
    with logging(installation.url) as late:
        late.connection.execute("SELECT pg_current_xact_id()")
        now = datetime.now(UTC)
        assert not await is_counted_until(engine, now, always)
        assert await is_counted_until(engine, now - timedelta(days=1), always)
    (spec,) = retention_specs(installation.url, RetentionRules(days=30), SystemClock(), Metrics())
    assert spec.partition == "upkeep/retention"


async def test_a_room_is_counted_before_its_log_is_deleted(
    installation: Installation, engine: AsyncEngine
) -> None:
    """A transaction that may still write about it delays the deletion."""
    await installation.subscribe()
    with logging(installation.url) as log, logging(installation.url, 2) as late:
        log.write(installation.room, "published")
        log.commit()
        late.write(installation.room, "published")
        await installation.rows("UPDATE rooms SET deleting = true")
        job = await installation.value(
            "INSERT INTO jobs (id, organisation_id, room_id, kind, arguments, created_at) VALUES (gen_random_uuid(), %s, %s,"
            " 'delete_room', jsonb_build_object('room_id', %s), now() - interval '1 hour') RETURNING id::text",
            installation.organisation, installation.room, installation.room,
        )  # fmt: skip
        async with LogWriter(installation.url, kind="chores") as writer:
            worklist = JobQueue(writer)
            handlers = DeleteJob(
                worklist, DeleteQueries(writer), count_usage=usage_counter(engine)
            ).handlers()
            runner = JobRunner(worklist, handlers)
            await runner.run(always)
            assert await installation.value("SELECT count(*) FROM log_entries") == 1
            late.commit()
            await runner.run(always)
    (done,) = await installation.rows("SELECT state FROM jobs WHERE id = %s", job)
    assert done["state"] == "done"
    assert await installation.value("SELECT count(*) FROM rooms") == 0
    (counted,) = await installation.rows(
        "SELECT messages, owner_id::text AS owner FROM usage_hours"
    )
    assert counted == {"messages": 2, "owner": installation.organisation}


async def test_a_room_is_exported_before_its_log_is_deleted(
    installation: Installation, engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the log is exported, deleted rows would be reported as missing."""
    await installation.subscribe()
    with logging(installation.url) as log:
        log.write(installation.room, "published")
        log.commit()
    await installation.rows("UPDATE rooms SET deleting = true")
    await installation.value(
        "INSERT INTO jobs (id, organisation_id, room_id, kind, arguments, created_at) VALUES (gen_random_uuid(), %s, %s,"
        " 'delete_room', jsonb_build_object('room_id', %s), now() - interval '1 hour') RETURNING id::text",
        installation.organisation, installation.room, installation.room,
    )  # fmt: skip
    async with LogWriter(installation.url, kind="chores") as writer:
        worklist = JobQueue(writer)
        handlers = DeleteJob(worklist, DeleteQueries(writer), destination="there").handlers()
        runner = JobRunner(worklist, handlers)
        exported = (
            "INSERT INTO log_exports (destination, system, first_xid, end_xid, sealed_at, rows, bytes, files)"
            " SELECT %s, system_identifier::text, %s, (SELECT max(xid::text::bigint) FROM log_entries) + %s, now(), 1, 1, 1"
            " FROM pg_control_system()"
        )
        for destination, beyond in (("elsewhere", 1), ("there", 0)):
            await installation.rows(exported, destination, beyond, beyond)
            await installation.rows("UPDATE jobs SET snoozed_until = now()")
            await runner.run(always)
            assert await installation.value("SELECT count(*) FROM log_entries") == 1
        (said,) = [one.getMessage() for one in caplog.records if "is exported" in one.getMessage()]
        assert said.startswith(f"room {installation.room} ")
        assert said.endswith("as soon as its log is exported to there")
        await installation.rows(exported, "there", 1, 1)
        await installation.rows("UPDATE jobs SET snoozed_until = now()")
        await runner.run(always)
    assert await installation.value("SELECT count(*) FROM log_entries") == 0
    assert await installation.value("SELECT count(*) FROM rooms") == 0


async def test_the_rows_are_found_by_the_index_of_transactions(
    installation: Installation, engine: AsyncEngine
) -> None:
    """No plan may read whole days, nor join messages by anything but their key."""
    async with transaction(engine) as connection:
        await connection.execute(records._PLAN_SETTINGS)
        plan = "\n".join(
            row[0]
            for row in await connection.execute(
                text("EXPLAIN " + records._COUNT.text),
                {"first": 1, "end": 2, "system": "x"},
            )
        )
    assert "Bitmap Index Scan" in plan or "log_entries" not in plan, plan
    assert "Seq Scan on log_entries" not in plan
    assert "Seq Scan on messages" not in plan
    assert "Seq Scan on subscriptions" not in plan
    assert not re.search(
        r"Nested Loop\n\s+(Join Filter.*\n\s+)?->  CTE Scan.*\n(\s+Filter.*\n)?\s+->  CTE Scan",
        plan,
    )
