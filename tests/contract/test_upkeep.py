"""Every duty of upkeep on a database, and two upkeeps at once."""

import asyncio
import dataclasses
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import psycopg
import pytest

from delivery.elections.postgres import SESSION, PostgresElection, Pulse
from rooms.clock import SystemClock
from rooms.domain.attempt import Answer
from rooms.domain.copy import Copy
from rooms.domain.ids import JobId, RoomId, SubscriptionId
from rooms.domain.states import UNFINISHED, Event, State, SubscriptionType
from rooms.domain.transitions import sources
from rooms.storage.engine import connection_for, open_engine
from rooms.storage.expiry import Expiry
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.outcomes import Outcome, Outcomes
from rooms.storage.removal import Removal
from rooms.storage.signals import Channel, Signals
from rooms.storage.worklist import Worklist
from rooms.storage.writer import Writer
from rooms.upkeep.deletions import Deletions
from rooms.upkeep.expiry import BATCH, ExpiryOfDeliveries
from rooms.upkeep.idempotency import EndOfKeys
from rooms.upkeep.jobs import Jobs
from rooms.upkeep.leases import EndOfLeases
from rooms.upkeep.partitions import PartitionsAhead
from rooms.upkeep.service import Pace, chores_of, keep
from rooms.upkeep.turn import turn_of
from rooms.upkeep.writers import EndOfWriters
from tests.installation import PATIENCE_S, Installation, ago, now_ms, until

LONG_AGO_S = -3600.0


def always() -> bool:
    return True


class Times:
    """A `go_on` that says yes so many times."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> bool:
        self.count -= 1
        return self.count >= 0


class NothingDone:
    """A `go_on` that says yes until some job has done something: what was begun ends after its first step."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self) -> bool:
        with psycopg.connect(self._url) as connection:
            return connection.execute("SELECT FROM jobs WHERE done > 0").fetchone() is None


async def queued(
    installation: Installation, subscription: SubscriptionId, *, lifetime_s: float | None = None, **columns: Any
) -> Copy:
    (copy,) = await installation.publish(subscription, lifetime_s=lifetime_s, **columns)
    await installation.queue(copy)
    return copy


async def held(installation: Installation, subscription: SubscriptionId, *, lifetime_s: float | None = None) -> Copy:
    (copy,) = await installation.publish(subscription, lifetime_s=lifetime_s, state=State.HELD)
    await installation.rows(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason) VALUES (%s, %s, %s, 4, 0, 'paused')",
        copy.room_id, copy.delivery_id, subscription,
    )  # fmt: skip
    return copy


async def leased(
    installation: Installation, subscription: SubscriptionId, until_at: datetime, *, lifetime_s: float | None = None
) -> Copy:
    (copy,) = await installation.publish(
        subscription, kind=SubscriptionType.PULL, lifetime_s=lifetime_s, state=State.LEASED
    )
    await installation.rows(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until) VALUES (%s, %s, %s, %s, %s)",
        copy.room_id, copy.delivery_id, subscription, copy.generation, until_at,
    )  # fmt: skip
    return copy


async def claim(installation: Installation, copy: Copy, until_at: datetime) -> None:
    await installation.rows(
        "UPDATE outbox SET claimed_until = %s, worker = 1 WHERE room_id = %s AND id = %s",
        until_at, copy.room_id, copy.delivery_id,
    )  # fmt: skip


async def in_every_state(installation: Installation, lifetime_s: float | None) -> dict[State, Copy]:
    """A delivery in each state, with the work rows that belong to it; leases are over."""
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


def expiry_of(writer: Writer) -> ExpiryOfDeliveries:
    return ExpiryOfDeliveries(Expiry(writer), SystemClock())


# Expiry


async def test_what_is_unfinished_when_its_lifetime_ends_expires(installation: Installation, writer: Writer) -> None:
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
            assert (step["event_type"], step["event_version"]) == (copy.event_type, copy.event_version)
            assert step["subscription_id"] == copy.subscription_id
    assert await work_rows(installation) == 0


async def test_what_still_lives_or_never_expires_is_left(installation: Installation, writer: Writer) -> None:
    living = await in_every_state(installation, 3600.0)
    forever = await in_every_state(installation, None)
    await expiry_of(writer).run(always)
    for copies in (living, forever):
        assert {state: await installation.state(copy) for state, copy in copies.items()} == {s: s for s in State}
    assert await work_rows(installation) == 6


async def test_attempts_under_way_and_live_leases_expire_when_they_are_over(
    installation: Installation, writer: Writer
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
        "UPDATE deliveries SET state = 'delivered' WHERE room_id = %s AND id = %s", won.room_id, won.delivery_id
    )
    await expiry.run(always)
    assert await installation.states() == {"expired": 3, "delivered": 1}
    assert await installation.kinds(tried) == await installation.kinds(lent) == ["expired"]
    assert await installation.kinds(won) == []


async def test_a_retry_that_was_decided_while_its_row_was_spared_expires_too(
    installation: Installation, writer: Writer
) -> None:
    subscription = await installation.subscribe()
    copy = await queued(installation, subscription, lifetime_s=-10.0)
    await claim(installation, copy, later())
    expiry = expiry_of(writer)
    await expiry.run(always)
    async with Writer(installation.url, kind="settler") as settler:
        answer = Answer(status=500, error=None, detail="", body_head=b"", retry_after=None, latency_ms=1.0)
        outcome = Outcome(copy=copy, to=State.QUEUED, answer=answer, delay_ms=60_000)
        assert await Outcomes(settler).decide([outcome], worker=1) == 1
    await expiry.run(always)
    assert await installation.state(copy) == State.EXPIRED
    assert await installation.kinds(copy) == ["attempted", "retry_scheduled", "expired"]
    assert await work_rows(installation) == 0


async def test_more_than_a_batch_of_one_moment_expires_at_once(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    count = 2 * BATCH + 7
    await installation.publish_many(subscription, count)
    await installation.rows("UPDATE deliveries SET expires_at = %s", ago(5))
    await installation.rows("UPDATE outbox SET expires_at = %s", ago(5))
    # More are under way than fit a batch, and they are the first that any look finds.
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
    assert await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'expired'") == count


async def test_a_successor_finds_what_was_spared(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    copy = await queued(installation, subscription, lifetime_s=LONG_AGO_S)
    await claim(installation, copy, later())
    await expiry_of(writer).run(always)
    await claim(installation, copy, ago())
    await expiry_of(writer).run(always)
    assert await installation.state(copy) == State.EXPIRED


async def test_a_publish_that_commits_after_its_lifetime_is_found(installation: Installation, writer: Writer) -> None:
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
    """Another connection to the same installation."""
    async with connection_for(installation.url, name="another") as connection:
        yield dataclasses.replace(installation, connection=connection)


async def test_a_row_that_somebody_else_holds_is_not_waited_for(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    locked, free = [await queued(installation, subscription, lifetime_s=-10.0) for _ in range(2)]
    expiry = expiry_of(writer)
    for table in ("outbox", "deliveries"):
        async with installed_again(installation) as other, other.connection.transaction():
            await other.rows(
                f"SELECT FROM {table} WHERE room_id = %s AND id = %s FOR UPDATE", locked.room_id, locked.delivery_id
            )
            async with asyncio.timeout(PATIENCE_S):
                await expiry.run(always)
            assert await installation.state(locked) == State.QUEUED
            assert await installation.state(free) == State.EXPIRED
    await expiry.run(always)
    assert await installation.state(locked) == State.EXPIRED


# Leases


async def test_a_lease_that_is_over_ends_and_rings(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe(SubscriptionType.PULL)
    over, live = await leased(installation, subscription, ago()), await leased(installation, subscription, later())
    rung: list[SubscriptionId] = []
    await EndOfLeases(LeaseEnds(writer), rung.append).run(always)
    assert rung == [subscription]
    assert await installation.state(over) == State.QUEUED
    assert await installation.state(live) == State.LEASED
    assert await installation.rows("SELECT id::text, kind, generation, attempt FROM outbox") == [
        {"id": over.delivery_id, "kind": 1, "generation": 1, "attempt": 1}
    ]


# Jobs


async def ask(installation: Installation, kind: str, *, age_s: float = 60.0, **arguments: Any) -> JobId:
    identity = JobId(installation.ids.global_id(now_ms()))
    await installation._insert(
        "jobs",
        {
            "id": identity,
            "organisation_id": installation.organisation,
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
        installation, "delete_subscription", age_s=age_s, room_id=installation.room, subscription_id=str(subscription)
    )


async def delete_room(installation: Installation, room: RoomId) -> JobId:
    await installation.rows("UPDATE rooms SET deleting = true WHERE id = %s", room)
    return await ask(installation, "delete_room", room_id=room)


async def job(installation: Installation, identity: JobId) -> dict[str, Any]:
    (row,) = await installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    return row


def jobs_of(writer: Writer, *, settle_s: float = 5.0, batch: int = 1000) -> Jobs:
    worklist = Worklist(writer)
    return Jobs(worklist, Deletions(worklist, Removal(writer), settle_s=settle_s, batch=batch).works())


async def test_a_deleted_subscription_leaves_nothing_unfinished(installation: Installation, writer: Writer) -> None:
    copies = await in_every_state(installation, None)
    other = await queued(installation, await installation.subscribe())
    identities = [
        await delete_subscription(installation, subscription)
        for subscription in {copy.subscription_id for copy in copies.values()}
    ]
    jobs = jobs_of(writer, batch=3)
    await jobs.run(always)  # cancels
    await jobs.run(always)  # finds nothing
    cancelled = sources(Event.CANCEL)
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


async def test_a_publish_with_an_older_plan_leaves_nothing_behind(installation: Installation, writer: Writer) -> None:
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


async def test_an_attempt_under_way_ends_before_the_deletion(installation: Installation, writer: Writer) -> None:
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
    """Rows in every table that names a room."""
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
    await installation.rows("INSERT INTO lanes (room_id, id) VALUES (%s, %s)", room, push)
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
    """How many rows of each table name a room; every table with a room is counted, whatever it is called."""
    tables = await installation.rows(
        "SELECT c.relname AS name FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'room_id'"
        " WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relname <> 'jobs'"
        " AND c.relnamespace = 'public'::regnamespace"
    )
    counts = {
        row["name"]: await installation.value(f"SELECT count(*) FROM {row['name']} WHERE room_id = %s", room)
        for row in tables
    }
    return counts | {"rooms": await installation.value("SELECT count(*) FROM rooms WHERE id = %s", room)}


@pytest.mark.parametrize("batch", [1000, 3])
async def test_a_deleted_room_leaves_no_row_that_names_it(
    installation: Installation, writer: Writer, batch: int
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


async def test_a_deletion_is_continued_after_a_break_anywhere(installation: Installation, writer: Writer) -> None:
    """Whoever continues knows of nothing but what is in the database."""
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


async def test_a_poison_job_fails_alone(
    installation: Installation, writer: Writer, caplog: pytest.LogCaptureFixture
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


async def test_what_is_gone_already_is_done(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    identities = [
        await ask(installation, "delete_room", room_id=99),
        await delete_subscription(installation, subscription),
    ]
    await installation.rows("DELETE FROM subscriptions")
    await jobs_of(writer).run(always)
    assert [(await job(installation, identity))["state"] for identity in identities] == ["done", "done"]


# Chores


async def test_old_idempotency_keys_go(installation: Installation, writer: Writer) -> None:
    await installation.rows(
        "INSERT INTO idempotency_keys (room_id, key, message_id, request_hash, answer, created_at)"
        " SELECT 7, n::text, gen_random_uuid(), '', '', now() - n * interval '1 hour' FROM generate_series(1, 40) n"
    )
    await EndOfKeys(writer).run(always)
    kept = await installation.rows("SELECT key FROM idempotency_keys ORDER BY key::int")
    assert [row["key"] for row in kept] == [str(n) for n in range(1, 24)]


async def test_dead_writers_go_when_they_are_old_and_claim_nothing(installation: Installation, writer: Writer) -> None:
    async def dead(kind: str) -> int:
        return int(
            await installation.value("INSERT INTO writers (kind, host, pid) VALUES (%s, 'here', 1) RETURNING id", kind)
        )

    gone, claiming = await dead("gone"), await dead("claiming")
    copy = await queued(installation, await installation.subscribe())
    await claim(installation, copy, later())
    await installation.rows("UPDATE outbox SET worker = %s", claiming)
    await installation.rows("UPDATE writers SET started_at = now() - interval '8 days'")
    young = await dead("young")
    await EndOfWriters(writer).run(always)
    kept = {row["id"] for row in await installation.rows("SELECT id FROM writers")}
    assert kept == {writer.id, claiming, young}
    assert gone not in kept


class DayAhead(SystemClock):
    """A moment of tomorrow's."""

    def __init__(self) -> None:
        self._now = super().now() + timedelta(days=1)

    def now(self) -> datetime:
        return self._now


async def test_partitions_are_made_a_week_ahead(installation: Installation) -> None:
    # A day later: the migration may have been run yesterday, and the day must not end in the middle.
    clock = DayAhead()

    def name(days: int) -> str:
        return f"deliveries_{clock.now() + timedelta(days=days):%Y%m%d}"

    async def exists(days: int) -> bool:
        return bool(await installation.value("SELECT to_regclass(%s) IS NOT NULL", name(days)))

    assert not await exists(7)
    engine = open_engine(installation.url, size=1)
    try:
        duty = PartitionsAhead(engine, clock)
        await duty.run(always)
        assert await exists(7)
        await duty.run(always)
    finally:
        await engine.dispose()
    assert not await exists(8)


# All of it

QUICK = Pace(
    leases_s=0.01,
    expiry_s=0.01,
    jobs_s=0.01,
    settle_s=0.0,
    retry_s=0.05,
)
PULSE = Pulse(lease_s=2.0, trust_s=1.5, ping_s=0.2, retry_s=0.05)


class Running:
    """An upkeep in this process."""

    def __init__(self, url: str, member: str) -> None:
        self.member = member
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self._keep(url))

    async def _keep(self, url: str) -> None:
        clock = SystemClock()
        async with PostgresElection(url, member=self.member, clock=clock, pulse=PULSE) as election:
            await keep(database_url=url, election=election, clock=clock, stop=self.stop, pace=QUICK)

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


async def test_upkeep_does_all_its_duties_and_ends(installation: Installation, run: Callable[[], Running]) -> None:
    heard = asyncio.Event()
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)

    async def another_is_heard() -> bool:
        # A ring may come before anybody listens.
        await leased(installation, pull, ago())
        return heard.is_set()

    async with Signals(installation.url, hear={Channel.PULL: lambda names: heard.set() if pull in names else None}):
        lent = await leased(installation, pull, ago())
        expired = await queued(installation, push, lifetime_s=-1.0)
        identity = await delete_subscription(installation, await installation.subscribe())
        running = run()
        await until(lambda: is_in(installation, lent, State.QUEUED), "the lease to end")
        await until(lambda: is_in(installation, expired, State.EXPIRED), "the delivery to expire")
        await until(lambda: is_done(installation, identity), "the job to be done")
        await until(another_is_heard, "a lease's end to be heard")
        await running.end()

    async def nobody_is_left() -> bool:
        return not await installation.backends(SESSION) and not await installation.backends("rooms upkeep")

    await until(nobody_is_left, "the sessions to end")


async def is_in(installation: Installation, copy: Copy, state: State) -> bool:
    return await installation.state(copy) == state


async def is_done(installation: Installation, identity: JobId) -> bool:
    return bool((await job(installation, identity))["state"] == "done")


async def duties(installation: Installation) -> dict[str, list[str]]:
    """Which duties each process has."""
    rows = await installation.rows(
        "SELECT m.name AS member, p.name FROM election_partitions p JOIN election_members m ON m.id = p.holder"
    )
    return {
        name: sorted(row["name"] for row in rows if row["member"] == name) for name in {row["member"] for row in rows}
    }


async def test_two_share_the_duties_and_one_takes_over_from_the_other(
    installation: Installation, run: Callable[[], Running]
) -> None:
    names = sorted(chore.partition for chore in chores_of(QUICK))
    first = run()

    async def has_all(running: Running) -> bool:
        return await duties(installation) == {running.member: names}

    await until(lambda: has_all(first), "the first to do everything")
    second = run()

    async def both_have_half() -> bool:
        found = await duties(installation)
        halves = [len(names) // 2, len(names) - len(names) // 2]
        return set(found) == {first.member, second.member} and sorted(map(len, found.values())) == halves

    await until(both_have_half, "each to have half of the duties")
    copy = await queued(installation, await installation.subscribe(), lifetime_s=0.0)
    await until(lambda: is_in(installation, copy, State.EXPIRED), "the delivery to expire")
    await first.end()
    await until(lambda: has_all(second), "the second to do everything")


async def test_a_duty_that_is_given_up_stops_before_its_next_statement() -> None:
    """The turn of a partition that went to somebody else, or came back in another epoch, is over at once."""
    membership = Shifting({"upkeep/leases": 3})
    stop = asyncio.Event()
    turn = await turn_of(membership, "upkeep/leases", stop)
    assert turn is not None
    assert turn.goes_on()
    resting = asyncio.create_task(turn.rest(3600))
    await asyncio.sleep(0)
    membership.now({"upkeep/leases": 4})
    await asyncio.wait_for(resting, PATIENCE_S)
    assert not turn.goes_on()
    membership.now({})
    following = asyncio.create_task(turn_of(membership, "upkeep/leases", stop))
    await asyncio.sleep(0)
    membership.now({"upkeep/leases": 5})
    turn = await asyncio.wait_for(following, PATIENCE_S)
    assert turn is not None
    assert turn.epoch == 5
    stop.set()
    assert not turn.goes_on()
    assert await turn_of(membership, "upkeep/leases", stop) is None


class Shifting:
    """A membership whose epochs a test sets."""

    member = "one"

    def __init__(self, epochs: dict[str, int]) -> None:
        self._epochs = epochs
        self._change = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def epoch(self, partition: str) -> int | None:
        return self._epochs.get(partition)

    def name(self, partitions: Sequence[str]) -> None:
        self._epochs |= dict.fromkeys(partitions, 1)

    def changed(self) -> Coroutine[Any, Any, object]:
        return self._change.wait()

    def now(self, epochs: dict[str, int]) -> None:
        self._epochs = epochs
        change, self._change = self._change, asyncio.Event()
        change.set()


async def test_upkeep_outlives_its_connections(installation: Installation, run: Callable[[], Running]) -> None:
    subscription = await installation.subscribe()
    run()
    for name in (SESSION, "rooms upkeep", "rooms chores"):
        copy = await queued(installation, subscription, lifetime_s=0.0)
        await until(lambda copy=copy: is_in(installation, copy, State.EXPIRED), "the delivery to expire")  # type: ignore[misc]
        await until(lambda name=name: installation.terminate(name), f"a session {name} to end")  # type: ignore[misc]
    copy = await queued(installation, subscription, lifetime_s=0.0)
    await until(lambda: is_in(installation, copy, State.EXPIRED), "the delivery to expire")
    identity = await delete_subscription(installation, subscription)
    await until(lambda: is_done(installation, identity), "the job to be done")


async def test_two_upkeeps_at_once_change_nothing_twice(installation: Installation) -> None:
    """As if the term had been lost unnoticed: every duty by two writers, as much at the same moment as can be."""
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)
    gone = await installation.subscribe()
    expiring = [await queued(installation, push, lifetime_s=-10.0) for _ in range(60)]
    lent = [await leased(installation, pull, ago()) for _ in range(60)]
    cancelled = [await queued(installation, gone) for _ in range(60)]
    room = await installation.make_room(RoomId(8))
    await furnish(installation, room)
    identities = [await delete_subscription(installation, gone), await delete_room(installation, room)]
    async with AsyncExitStack() as stack:
        writers = [await stack.enter_async_context(Writer(installation.url, kind="upkeep")) for _ in range(4)]

        def duties(quick: Writer, slow: Writer) -> list[Awaitable[None]]:
            jobs = jobs_of(slow, batch=7)

            async def all_jobs() -> None:
                while await installation_open():
                    await jobs.run(always)

            return [
                expiry_of(quick).run(always),
                EndOfLeases(LeaseEnds(quick), lambda _: None).run(always),
                all_jobs(),
                EndOfKeys(slow).run(always),
                EndOfWriters(slow).run(always),
            ]

        turn = asyncio.Lock()

        async def installation_open() -> int:
            async with turn:
                return int(await installation.value("SELECT count(*) FROM jobs WHERE state IN ('queued', 'running')"))

        await asyncio.gather(*duties(writers[0], writers[1]), *duties(writers[2], writers[3]))
        await expiry_of(writers[0]).run(always)  # a row that the one had locked was passed over by the other
    assert {await installation.state(copy) for copy in expiring} == {State.EXPIRED}
    assert {await installation.state(copy) for copy in lent} == {State.QUEUED}
    assert {await installation.state(copy) for copy in cancelled} == {State.CANCELLED}
    for copies, kind in ((expiring, "expired"), (lent, "lease_ended"), (cancelled, "cancelled")):
        assert all([await installation.kinds(copy) == [kind] for copy in copies])
    assert [(await job(installation, identity))["state"] for identity in identities] == ["done", "done"]
    assert not any((await rows_of_room(installation, room)).values())
    gaps = await installation.rows(
        "SELECT writer_id FROM delivery_log WHERE room_id = 7 GROUP BY writer_id HAVING count(*) > max(writer_seq)"
    )
    assert gaps == []
