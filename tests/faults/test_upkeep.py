"""Upkeep as processes of their own, frozen, killed, and cut off from PostgreSQL.

The oracle of all: whatever happens to one of them, somebody does the upkeep soon after, and nothing happens twice.
"""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import pytest

from delivery.elections import open_election
from delivery.elections.postgres import SESSION
from rooms.clock import SystemClock
from rooms.domain.cluster import ClusterView
from rooms.domain.copy import Copy
from rooms.domain.ids import JobId, RoomId
from rooms.domain.states import State, SubscriptionType
from rooms.embedded import Running, temporary_postgres
from rooms.errors import ElectionUnavailableError
from rooms.storage.engine import connection_for
from rooms.storage.schema import migrate
from rooms.upkeep.service import Pace, chores_of
from tests.installation import Installation, ago, installed, now_ms, until
from tests.past import DAY, GONE, found, left_over, make_days, partitions, whole, write

ROOT: Final = Path(__file__).parents[2]
TAKES_OVER_S: Final = 120.0
ENDS_S: Final = 60.0
ROWS: Final = 2500
AWAY: Final = "election's store is away"
AT_WORK: Final = "is this process's now"
DUTIES: Final = len(chores_of(Pace()))
"""What upkeep does in any case; the process has more."""


class Start(Protocol):
    """Starts an upkeep on a database."""

    def __call__(self, url: str, **environment: str) -> subprocess.Popen[bytes]: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts upkeep processes on a database, and ends them."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(url: str, **environment: str) -> subprocess.Popen[bytes]:
        output = tmp_path / f"upkeep-{len(processes)}.log"
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "rooms", "upkeep"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "DATABASE_URL": url,
                    "ROOMS_DATA": str(tmp_path / "data"),
                    **environment,
                },
            )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(ENDS_S)


def logs(folder: Path) -> list[str]:
    """What each process told."""
    return [log.read_text() for log in sorted(folder.glob("upkeep-*.log"))]


async def shares(installation: Installation) -> dict[int, int]:
    """How many duties each process has."""
    found = await installation.rows(
        "SELECT m.pid, count(*) FROM election_partitions p JOIN election_members m ON m.id = p.holder GROUP BY m.pid"
    )
    return {row["pid"]: row["count"] for row in found}


async def work(installation: Installation, *processes: subprocess.Popen[bytes]) -> None:
    """Until these processes, and no others, share all duties."""

    async def at_work() -> bool:
        for process in processes:
            assert process.poll() is None, "the upkeep ended"
        found = await shares(installation)
        waiting = await installation.value("SELECT count(*) FROM election_partitions WHERE holder IS NULL")
        return found.keys() == {process.pid for process in processes} and sum(found.values()) >= DUTIES and not waiting

    told = ", ".join(str(process.pid) for process in processes)
    await until(at_work, f"the upkeep to be done by {told}", within_s=TAKES_OVER_S)


async def expiring(installation: Installation) -> Copy:
    (copy,) = await installation.publish(await installation.subscribe(), lifetime_s=-1.0)
    await installation.queue(copy)
    return copy


async def expires(installation: Installation, copy: Copy) -> None:
    async def ended() -> bool:
        return await installation.state(copy) is State.EXPIRED

    await until(ended, "a delivery to expire", within_s=TAKES_OVER_S)
    assert await installation.kinds(copy) == ["expired"]


async def delete_room(installation: Installation, room: RoomId) -> JobId:
    identity = JobId(installation.ids.global_id(now_ms()))
    await installation.rows("UPDATE rooms SET deleting = true WHERE id = %s", room)
    await installation.rows(
        "INSERT INTO jobs (id, organisation_id, room_id, kind, arguments, created_at)"
        " VALUES (%s, %s, %s, 'delete_room', jsonb_build_object('room_id', %s::int), %s)",
        identity, installation.organisation, room, room, ago(60),
    )  # fmt: skip
    return identity


async def job(installation: Installation, identity: JobId) -> dict[str, Any]:
    (row,) = await installation.rows("SELECT * FROM jobs WHERE id = %s", identity)
    return row


async def test_a_frozen_upkeep_loses_its_duties(installation: Installation, start: Start) -> None:
    """SIGSTOP: the other does everything within seconds; SIGCONT: they share again; a kill: the first does everything."""
    first = start(installation.url)
    await work(installation, first)
    second = start(installation.url)
    await work(installation, first, second)
    first.send_signal(signal.SIGSTOP)
    copy = await expiring(installation)
    await work(installation, second)
    await expires(installation, copy)

    first.send_signal(signal.SIGCONT)
    await work(installation, first, second)
    await expires(installation, await expiring(installation))

    second.kill()
    await work(installation, first)
    await expires(installation, await expiring(installation))


async def test_upkeep_waits_for_the_schema(empty_database: str, start: Start) -> None:
    """On a database without tables it waits, and begins when somebody has migrated it."""
    process = start(empty_database)
    async with connection_for(empty_database, name="test") as connection:

        async def is_there() -> bool:
            cursor = await connection.execute(
                "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'rooms upkeep'"
            )
            return bool(await cursor.fetchall())

        await until(is_there, "the upkeep to look at the database", within_s=TAKES_OVER_S)
    await asyncio.to_thread(migrate, empty_database)
    async with installed(empty_database) as installation:
        await work(installation, process)
        await expires(installation, await expiring(installation))


async def test_a_job_is_continued_after_a_kill(installation: Installation, start: Start) -> None:
    """`kill -9` in the middle of a room's deletion: another brings it to its end."""
    room = await installation.make_room(RoomId(8))
    subscription = await installation.subscribe(SubscriptionType.PUSH, room=room)
    await installation.publish_many(subscription, ROWS)
    process = start(installation.url)
    await work(installation, process)
    # The deletion comes to the messages late, and meets one that somebody holds.
    async with connection_for(installation.url, name="obstacle") as obstacle, obstacle.transaction():
        await obstacle.execute("SELECT FROM messages WHERE room_id = 8 ORDER BY id DESC LIMIT 1 FOR UPDATE")
        identity = await delete_room(installation, room)

        async def in_the_middle() -> bool:
            left = await installation.value("SELECT count(*) FROM messages WHERE room_id = 8")
            return 0 < int(left) < ROWS

        await until(in_the_middle, "the deletion to be half done", within_s=TAKES_OVER_S)
        process.kill()
        process.wait(ENDS_S)
        row = await job(installation, identity)
        assert row["state"] == "running"
        assert 0 < row["done"] < row["total"]
    await work(installation, start(installation.url))

    async def done() -> bool:
        return bool((await job(installation, identity))["state"] == "done")

    await until(done, "the job to be done", within_s=TAKES_OVER_S)
    for table in ("messages", "deliveries", "delivery_log", "outbox", "subscriptions"):
        assert await installation.value(f"SELECT count(*) FROM {table} WHERE room_id = 8") == 0
    assert await installation.value("SELECT count(*) FROM rooms WHERE id = 8") == 0
    assert await installation.value("SELECT count(*) FROM rooms") == 1
    row = await job(installation, identity)
    assert row["error"] is None
    assert row["done"] <= row["total"]


async def test_old_days_go_and_what_is_unfinished_stays(installation: Installation, start: Start) -> None:
    """The process as it is started and set by default."""
    make_days(installation.url, DAY)
    subscription = await installation.subscribe()
    gone, kept = [await write(installation, subscription, state) for state in (State.DELIVERED, State.SIDELINED)]
    start(installation.url)

    async def done() -> bool:
        return await partitions(installation) == ["deliveries_20200310_kept1"] and not await left_over(installation)

    await until(done, "the old day to go", within_s=TAKES_OVER_S)
    assert await found(installation, gone) == GONE
    assert await found(installation, kept) == whole(State.SIDELINED)


@pytest.mark.parametrize("name", [SESSION, "rooms upkeep", "rooms chores"])
async def test_a_terminated_connection_ends_nothing(installation: Installation, start: Start, name: str) -> None:
    """pg_terminate_backend on each of its sessions: the same process goes on with every duty."""
    process = start(installation.url)
    await work(installation, process)
    await expires(installation, await expiring(installation))
    (lost,) = await installation.backends(name)
    assert await installation.terminate(name) == 1

    async def another() -> bool:
        return any(backend != lost for backend in await installation.backends(name))

    await until(another, "the session to be made anew", within_s=TAKES_OVER_S)
    await work(installation, process)
    await expires(installation, await expiring(installation))
    identity = await delete_room(installation, await installation.make_room(RoomId(8)))

    async def done() -> bool:
        return bool((await job(installation, identity))["state"] == "done")

    await until(done, "the job to be done", within_s=TAKES_OVER_S)


async def test_upkeep_waits_for_postgresql(tmp_path: Path, start: Start) -> None:
    """PostgreSQL that is not there yet, and one that restarts: the process waits for both and never ends by itself."""
    folder = tmp_path / "postgres"
    folder.mkdir()
    with ExitStack() as server:
        url = server.enter_context(temporary_postgres(folder))
        migrate(url)
        async with installed(url) as installation:
            pass
        server.close()
        process = start(url)
        for _ in range(2):
            server.enter_context(temporary_postgres(folder))
            async with connection_for(url, name="test") as connection:
                present = dataclasses.replace(installation, connection=connection)
                await work(present, process)
                await expires(present, await expiring(present))
            server.close()
        process.terminate()
        assert await asyncio.to_thread(process.wait, ENDS_S) == 0


async def test_upkeep_ends_when_it_is_asked_to(installation: Installation, start: Start) -> None:
    """SIGTERM: the processes end cleanly, and what they had is the last one's at once."""
    first = start(installation.url)
    await work(installation, first)
    second, third = start(installation.url), start(installation.url)
    await work(installation, first, second, third)
    third.terminate()
    first.terminate()
    for process in (first, third):
        assert await asyncio.to_thread(process.wait, ENDS_S) == 0
    await work(installation, second)


@pytest.mark.row("B7")
async def test_nothing_is_done_while_zookeeper_is_away(
    installation: Installation, start: Start, zookeeper_server: Callable[[], Running], tmp_path: Path
) -> None:
    """ZooKeeper killed: no duty is done until it is back, although PostgreSQL is there; then the duties are shared again."""
    server = zookeeper_server()
    url = f"{server.url}?session_s=2"
    processes = [start(installation.url, ELECTION_URL=url, ROOMS_CLIENT="upkeep") for _ in range(2)]
    async with open_election(url, client="upkeep", member="nobody", clock=SystemClock()) as election:

        async def seen() -> ClusterView | None:
            with suppress(ElectionUnavailableError):
                return await election.view()
            return None

        async def shared() -> bool:
            view = await seen()
            counts = {member.pid: len(member.partitions) for member in view.members} if view else {}
            both = counts.keys() == {process.pid for process in processes}
            return both and sum(counts.values()) >= DUTIES and max(counts.values()) - min(counts.values()) <= 1

        await until(shared, "both to have a share", within_s=TAKES_OVER_S)
        await expires(installation, await expiring(installation))
        server.kill()

        async def ended() -> bool:
            assert [process.poll() for process in processes] == [None, None]
            return all(told.rfind(AWAY) > told.rfind(AT_WORK) for told in logs(tmp_path))

        await until(ended, "both to know that ZooKeeper is away", within_s=TAKES_OVER_S)
        copy = await expiring(installation)
        assert await seen() is None
        back = await installation.value("SELECT clock_timestamp()")
        assert await installation.state(copy) is State.QUEUED
        server.start()
        await expires(installation, copy)
        assert (
            await installation.value("SELECT max(ts) FROM delivery_log WHERE delivery_id = %s", copy.delivery_id) > back
        )
        await until(shared, "both to have a share again", within_s=TAKES_OVER_S)
