"""Check publishing under faults.

The oracle throughout: a 202 means one message with all its deliveries, work and log. Any other
answer means none of it, or (in doubt) one of the two, and the key shows which.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import Any

import psycopg
import pytest

from rooms.db import pg_arrays
from rooms.db.publish.insert import NO_CONFLICT, InsertConflict, write_group
from rooms.db.publish.request_rows import InsertRows, RouteRows
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import (
    LockTimeoutError,
    RoomsError,
    StorageRefusedError,
    StorageUnavailableError,
)
from rooms.publishing.commit_outcomes import KeyReused
from rooms.publishing.group_commit import GroupCommitter
from rooms.publishing.publisher import PublishResult
from tests.support.publisher import IDS, Desk, House, open_desk

BODY = json.dumps({"event_type": "order.created", "payload": {"amount": 1}}).encode()
TABLES = ("messages", "deliveries", "outbox", "delivery_log")


@pytest.fixture
def house(database: str) -> House:
    return House(database)


@pytest.fixture
def room(house: House) -> RoomId:
    room = house.room()
    house.event_type(room)
    house.subscription(room)
    return room


@pytest.fixture
async def desk(database: str) -> AsyncIterator[Desk]:
    async with open_desk(database) as desk:
        yield desk


def counts(house: House) -> list[int]:
    return [house.count(table) for table in TABLES]


def expected_rows(messages: int) -> list[int]:
    """Return the row counts when so many messages to one subscription are stored completely."""
    return [messages, messages, messages, 2 * messages]


async def until(house: House, statement: str) -> None:
    """Wait for a statement to find something; the bound is the test's own."""

    def check() -> None:
        for _ in range(2000):
            if house.run(statement):
                return
            house.run("SELECT pg_sleep(0.005)")
        raise AssertionError(f"never came: {statement}")

    await asyncio.to_thread(check)


OURS = "FROM pg_stat_activity WHERE application_name = 'rooms publisher' AND datname = current_database()"
CUT = f"SELECT pg_terminate_backend(pid) {OURS}"
WAITING = f"SELECT 1 {OURS} AND wait_event_type = 'Lock'"


async def publish(desk: Desk, house: House, room: RoomId, key: str | None = None) -> PublishResult:
    return await desk.publisher.publish(house.principal, room, BODY, key)


PARTITIONS = "SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'"


@pytest.mark.parametrize("table", ["messages", "deliveries", "log_entries"])
async def test_a_missing_partition_refuses_and_loses_nothing(
    desk: Desk, house: House, room: RoomId, table: str
) -> None:
    """While today has no partition, each publish is refused and leaves nothing.

    Afterwards all is as before.
    """
    await publish(desk, house, room)
    gone = [name for (name,) in house.run(PARTITIONS) if name.rpartition("_")[0] == table]
    for name in gone:
        house.run(f"ALTER TABLE {table} DETACH PARTITION {name}")
    before = [house.count(other) for other in TABLES]
    outcomes = await asyncio.gather(
        *[publish(desk, house, room, f"k{n}") for n in range(5)], return_exceptions=True
    )
    assert all(isinstance(outcome, StorageRefusedError) for outcome in outcomes)
    assert [house.count(other) for other in TABLES] == before
    assert house.count("idempotency_keys") == 0
    house.run(f"CREATE TABLE {table}_again PARTITION OF {table} DEFAULT")
    answers = await asyncio.gather(*[publish(desk, house, room, f"k{n}") for n in range(5)])
    assert not any(answer.replayed for answer in answers)
    house.run(f"ALTER TABLE {table} DETACH PARTITION {table}_again")
    [(kept,)] = house.run(f"SELECT count(*) FROM {table}_again")
    assert kept == 5


@pytest.mark.parametrize("table", [*TABLES[:3], "log_entries"])
async def test_a_full_disk_refuses_and_loses_nothing(
    desk: Desk, house: House, room: RoomId, table: str
) -> None:
    """Whichever table meets the full disk, nothing of the publish is kept, in any of them."""
    house.run(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'no space left on device' USING ERRCODE = 'disk_full'; END $$"
    )
    await publish(desk, house, room)
    house.run(
        f"CREATE TRIGGER full_disk BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION full_disk()"
    )
    outcomes = await asyncio.gather(
        *[publish(desk, house, room, f"k{n}") for n in range(5)], return_exceptions=True
    )
    assert all(isinstance(outcome, StorageRefusedError) for outcome in outcomes)
    assert counts(house) == expected_rows(1)
    assert house.count("idempotency_keys") == 0
    house.run(f"DROP TRIGGER full_disk ON {table}")
    await asyncio.gather(*[publish(desk, house, room, f"k{n}") for n in range(5)])
    assert counts(house) == expected_rows(6)


async def test_a_connection_cut_in_mid_statement_is_no_202(
    desk: Desk, house: House, room: RoomId
) -> None:
    """The commit cannot have happened here, but the publisher cannot know: 503 all the same, one message in the end."""
    await publish(desk, house, room)
    with psycopg.connect(house.url) as holder:
        holder.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        under_way = [asyncio.create_task(publish(desk, house, room, f"k{n}")) for n in range(5)]
        await until(house, WAITING)
        house.run(CUT)
        outcomes = await asyncio.gather(*under_way[:1], return_exceptions=True)
        assert isinstance(outcomes[0], StorageUnavailableError)
    await asyncio.gather(*under_way, return_exceptions=True)
    answers = await asyncio.gather(*[publish(desk, house, room, f"k{n}") for n in range(5)])
    assert len({answer.body for answer in answers}) == 5
    assert counts(house) == expected_rows(6)


async def test_a_connection_cut_after_the_commit_is_no_202_and_no_double(
    desk: Desk, house: House, room: RoomId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of a commit that happened is lost: the repetition with the key finds it, and adds nothing."""
    really = LogWriter.run_packed

    async def cut(self: LogWriter, statement: str, values: Sequence[bytes]) -> Any:
        await really(self, statement, values)
        await self.close()
        raise StorageUnavailableError("the connection was cut")

    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "run_packed", cut)
        outcomes = await asyncio.gather(
            *[publish(desk, house, room, f"k{n}") for n in range(5)], return_exceptions=True
        )
        assert all(isinstance(outcome, StorageUnavailableError) for outcome in outcomes)
    assert counts(house) == expected_rows(5)
    answers = await asyncio.gather(*[publish(desk, house, room, f"k{n}") for n in range(5)])
    assert all(answer.replayed for answer in answers)
    assert counts(house) == expected_rows(5)


async def test_cuts_under_load(desk: Desk, house: House, room: RoomId) -> None:
    """Clients that repeat with their key until they get a 202, connections cut again and again: one message a key."""
    left: list[int] = []

    async def client(number: int) -> bytes:
        while True:
            try:
                return (await publish(desk, house, room, f"k{number}")).body
            except RoomsError:
                left.append(number)
                await asyncio.sleep(0)

    cuts, bodies = 0, set[bytes]()
    for start in range(0, 400, 40):
        clients = [asyncio.create_task(client(number)) for number in range(start, start + 40)]
        for _ in range(2):
            cuts += len(await asyncio.to_thread(house.run, CUT))
        bodies.update(await asyncio.gather(*clients))
    assert cuts
    assert left
    assert len(bodies) == 400
    assert counts(house) == expected_rows(400)


async def test_a_cut_is_seen_in_the_numbers_of_the_log(
    desk: Desk, house: House, room: RoomId
) -> None:
    """After a lost connection the writer is another one and counts from 1: no gap, no number twice."""
    await publish(desk, house, room)
    house.run(CUT)
    with pytest.raises(StorageUnavailableError):
        await publish(desk, house, room)
    await publish(desk, house, room)
    rows = house.run(
        "SELECT array_agg(writer_seq ORDER BY writer_seq) FROM delivery_log GROUP BY writer_id"
    )
    assert rows == [([1, 2],), ([1, 2],)]


async def test_a_client_that_goes_away_undoes_nothing(
    desk: Desk, house: House, room: RoomId
) -> None:
    """Cancelled once the committer had it: the message is there, and the others of its group get their answers."""
    await publish(desk, house, room)
    with psycopg.connect(house.url) as holder:
        holder.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        tasks = [asyncio.create_task(publish(desk, house, room, f"k{n}")) for n in range(6)]
        await until(house, WAITING)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [
        True,
        False,
    ] * 3
    assert all([(await publish(desk, house, room, f"k{n}")).replayed for n in range(6)])
    assert counts(house) == expected_rows(7)


async def test_a_process_that_hangs_with_a_key_blocks_others_only_briefly(
    database: str, house: House, room: RoomId
) -> None:
    """Its group is refused when the lock times out, tried one by one, and only the one with that key fails."""
    with psycopg.connect(house.url) as holder:
        holder.execute(
            "INSERT INTO idempotency_keys (room_id, key, message_id, request_hash, answer)"
            " VALUES (%s, 'held', gen_random_uuid(), '', '')", (room,),
        )  # fmt: skip
        async with (
            LogWriter(database, kind="publisher", lock_timeout_ms=100, isolated=False) as writer,
            committing(writer) as committer,
        ):
            submissions = [a_submission(house, room, key) for key in ("a", "held", "b", None)]
            outcomes = await asyncio.gather(
                *map(committer.submit, submissions), return_exceptions=True
            )
    assert [type(outcome) for outcome in outcomes] == [
        type(None),
        LockTimeoutError,
        type(None),
        type(None),
    ]
    assert counts(house) == expected_rows(3)


async def test_a_key_taken_between_look_up_and_insert_is_found_taken(
    database: str, house: House, room: RoomId
) -> None:
    """Another process commits the key while our statement waits for it: its answer is ours, the rest is published."""
    verdicts: list[InsertConflict] = []
    async with LogWriter(database, kind="publisher", isolated=False) as writer:

        async def write(group: Sequence[InsertRows]) -> InsertConflict:
            verdicts.append(await write_group(writer, group))
            return verdicts[-1]

        async with GroupCommitter(write, on_commit=lambda _: None) as committer:
            submissions = [a_submission(house, room, key) for key in ("a", "raced", None)]
            with psycopg.connect(house.url) as other:
                other.execute(
                    "INSERT INTO idempotency_keys (room_id, key, message_id, request_hash, answer)"
                    " VALUES (%s, 'raced', gen_random_uuid(), 'hash', 'theirs')", (room,),
                )  # fmt: skip
                tasks = [
                    asyncio.create_task(committer.submit(submission)) for submission in submissions
                ]
                await until(house, WAITING)
            outcomes = await asyncio.gather(*tasks)
    assert outcomes == [None, KeyReused(b"hash", b"theirs"), None]
    assert [verdict.raced for verdict in verdicts] == [True, False, False]
    assert counts(house) == expected_rows(2)
    assert house.count("idempotency_keys") == 2


async def test_a_request_that_the_database_cannot_take_fails_alone(
    database: str, house: House, room: RoomId
) -> None:
    """Bytes that are not text where text is required: the group fails, and of its members only this one."""
    async with (
        LogWriter(database, kind="publisher", isolated=False) as writer,
        committing(writer) as committer,
    ):
        submissions = [
            a_submission(house, room, correlation_id=text) for text in (b"a", b"\xff", b"c", b"d")
        ]
        outcomes = await asyncio.gather(*map(committer.submit, submissions), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [
        type(None),
        psycopg.errors.CharacterNotInRepertoire,
    ] + [type(None)] * 2
    assert counts(house) == expected_rows(3)


async def test_leaving_commits_what_was_handed_over(
    database: str, house: House, room: RoomId
) -> None:
    """Nothing handed over is forgotten, nothing is taken any more."""
    async with open_desk(database) as desk:
        await publish(desk, house, room)
        tasks = [asyncio.create_task(publish(desk, house, room)) for _ in range(50)]
        await asyncio.sleep(0)
    answers = await asyncio.gather(*tasks)
    assert len({answer.body for answer in answers}) == 50
    assert counts(house) == expected_rows(51)
    with pytest.raises(StorageRefusedError):
        await publish(desk, house, room)


# --- the committer by itself --------------------------------------------------------------------------------------


def committing(writer: LogWriter) -> GroupCommitter:
    async def write(group: Sequence[InsertRows]) -> InsertConflict:
        return await write_group(writer, group)

    return GroupCommitter(write, on_commit=lambda _: None)


def a_submission(
    house: House,
    room: RoomId,
    key: str | None = None,
    correlation_id: bytes = b"c",
    payload: bytes = b"1",
) -> InsertRows:
    [(plan_version, subscription)] = house.run(
        "SELECT plan_version, s.id::text FROM rooms r JOIN subscriptions s ON s.room_id = r.id WHERE r.id = %s",
        room,
    )
    submission = fake_submission(room, key, plan_version=plan_version)
    identity, delivery = IDS.generate_octets(room, 1_800_000_000_000, 2)
    submission.add(
        RouteRows(room, "order.created", 1, [(subscription, SubscriptionType.PUSH, 1)]),
        identity=pg_arrays.uuid_element(identity), publisher=pg_arrays.NULL_ELEMENT, correlation_id=correlation_id, priority=4, life_ms=None,
        ordering_key=None, headers=None, payload=payload, deliveries=[delivery],
    )  # fmt: skip
    return submission


def fake_submission(
    room: RoomId, key: str | None = None, *, plan_version: int = 1, rows: int = 0, size: int = 0
) -> InsertRows:
    submission = InsertRows(room, plan_version)
    submission.key, submission.row_count, submission.payload_bytes = key, rows, size
    return submission


class Gate:
    """Hold a write until it is let through, and record the groups it was given."""

    def __init__(self, fail: Callable[[Sequence[InsertRows]], None] = lambda _: None) -> None:
        self.groups: list[int] = []
        self.open = asyncio.Event()
        self.begun = asyncio.Event()
        self._fail = fail

    async def __call__(self, group: Sequence[InsertRows]) -> InsertConflict:
        self.groups.append(len(group))
        self.begun.set()
        await self.open.wait()
        self._fail(group)
        return NO_CONFLICT


async def test_what_arrives_during_a_commit_shares_the_next() -> None:
    gate = Gate()
    async with GroupCommitter(gate, on_commit=lambda _: None) as committer:
        first = asyncio.create_task(committer.submit(fake_submission(RoomId(1))))
        await gate.begun.wait()
        others = [
            asyncio.create_task(committer.submit(fake_submission(RoomId(1)))) for _ in range(20)
        ]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *others)
    assert gate.groups == [1, 20]


async def test_a_group_is_bounded_and_a_larger_request_is_a_group_of_its_own() -> None:
    gate = Gate()
    sizes = [(1500, 0), (400, 0), (200, 0), (5000, 0), (1, 3 << 20), (1, 2 << 20)]
    async with GroupCommitter(gate, on_commit=lambda _: None) as committer:
        first = asyncio.create_task(committer.submit(fake_submission(RoomId(1))))
        await gate.begun.wait()
        others = [
            asyncio.create_task(committer.submit(fake_submission(RoomId(1), rows=rows, size=size)))
            for rows, size in sizes
        ]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *others)
    assert gate.groups == [1, 2, 1, 1, 1, 1]


async def test_one_key_is_written_once() -> None:
    gate = Gate()
    async with GroupCommitter(gate, on_commit=lambda _: None) as committer:
        first = asyncio.create_task(committer.submit(fake_submission(RoomId(1))))
        await gate.begun.wait()
        keys = ["a", "b", "a", None, "a", "b"]
        others = [
            asyncio.create_task(committer.submit(fake_submission(RoomId(1), key))) for key in keys
        ]
        others.append(asyncio.create_task(committer.submit(fake_submission(RoomId(2), "a"))))
        await asyncio.sleep(0)
        gate.open.set()
        await first
        outcomes = await asyncio.gather(*others)
    assert gate.groups == [1, 4]
    reused = KeyReused(b"", b"")
    assert outcomes == [None, None, reused, None, reused, reused, None]


async def test_a_database_that_takes_nothing_is_not_asked_by_every_request() -> None:
    def fail(_: Sequence[InsertRows]) -> None:
        raise StorageRefusedError("full")

    gate = Gate(fail)
    async with GroupCommitter(gate, on_commit=lambda _: None) as committer:
        tasks = [
            asyncio.create_task(committer.submit(fake_submission(RoomId(1)))) for _ in range(50)
        ]
        await gate.begun.wait()
        gate.open.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, StorageRefusedError) for outcome in outcomes)
    assert len(gate.groups) <= 10


async def test_what_fails_after_a_commit_does_not_undo_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each request has its answer, and nothing is written again."""

    def fail(_: Sequence[InsertRows]) -> None:
        raise OSError("no space for metrics")

    gate = Gate()
    gate.open.set()
    async with GroupCommitter(gate, on_commit=fail) as committer:
        outcomes = await asyncio.gather(
            *[committer.submit(fake_submission(RoomId(1))) for _ in range(3)],
            return_exceptions=True,
        )
    assert outcomes == [None] * 3
    assert gate.groups == [3]
    assert "no space for metrics" in caplog.text


async def test_in_doubt_is_never_tried_again() -> None:
    def fail(_: Sequence[InsertRows]) -> None:
        raise StorageUnavailableError("cut")

    gate = Gate(fail)
    gate.open.set()
    async with GroupCommitter(gate, on_commit=lambda _: None) as committer:
        outcomes = await asyncio.gather(
            *[committer.submit(fake_submission(RoomId(1))) for _ in range(5)],
            return_exceptions=True,
        )
    assert all(isinstance(outcome, StorageUnavailableError) for outcome in outcomes)
    assert sum(gate.groups) == 5


async def test_a_lone_publisher_never_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop is never asked for a timer, however fast it comes back."""
    gate = Gate()
    gate.open.set()
    timers: list[float] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay_s: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        timers.append(delay_s)
        return later(delay_s, callback)

    monkeypatch.setattr(loop, "call_later", call_later)
    # The linger depends on the time between two arrivals, which here does not depend on this
    # machine's speed.
    began, ticks = loop.time(), count()
    monkeypatch.setattr(loop, "time", lambda: began + next(ticks) / 100_000)
    async with GroupCommitter(gate, on_commit=lambda _: None) as committer:
        for _ in range(200):
            await committer.submit(fake_submission(RoomId(1)))
        assert timers == []
        await asyncio.gather(*[committer.submit(fake_submission(RoomId(1))) for _ in range(10)])
        await asyncio.gather(*[committer.submit(fake_submission(RoomId(1))) for _ in range(3)])
        assert len(timers) == 1
