"""Maintenance processes that are suspended, killed, and cut off from PostgreSQL.

Oracle: whatever happens to one of them, another does its work soon after, and nothing happens
twice.
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

from delivery.leadership import open_election
from delivery.leadership.postgres import SESSION_NAME
from delivery.maintenance.service import TaskIntervals, all_tasks
from rooms.clock import SystemClock
from rooms.db.connection import open_connection
from rooms.db.schema import migrate
from rooms.domain.cluster import ClusterView
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import JobId, RoomId
from rooms.domain.state_machine import State, SubscriptionType
from rooms.errors import ElectionUnavailableError
from tests.support.installation import Installation, ago, installed, now_ms, until
from tests.support.local_servers import TestServer, temporary_postgres
from tests.support.old_messages import (
    DAY,
    GONE,
    found,
    left_over,
    make_days,
    partitions,
    whole,
    write,
)

ROOT: Final = Path(__file__).parents[2]
TAKES_OVER_S: Final = 120.0
ENDS_S: Final = 60.0
ROWS: Final = 8000
AWAY: Final = "election's store is away"
AT_WORK: Final = "is assigned to this process"
DUTIES: Final = len(all_tasks(TaskIntervals()))
"""Tasks of every installation; the process has more."""


class Start(Protocol):
    """Starts a maintenance process on a database."""

    def __call__(self, url: str, **environment: str) -> subprocess.Popen[bytes]: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start maintenance processes on a database, and end them."""
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
    """Return the log of each process."""
    return [log.read_text() for log in sorted(folder.glob("upkeep-*.log"))]


async def shares(installation: Installation) -> dict[int, int]:
    """Return the number of tasks of each process."""
    found = await installation.rows(
        "SELECT m.pid, count(*) FROM election_partitions p JOIN election_members m ON m.id = p.holder GROUP BY m.pid"
    )
    return {row["pid"]: row["count"] for row in found}


async def work(installation: Installation, *processes: subprocess.Popen[bytes]) -> None:
    """Wait until these processes, and no others, share all tasks."""

    async def at_work() -> bool:
        for process in processes:
            assert process.poll() is None, "the upkeep ended"
        found = await shares(installation)
        waiting = await installation.value(
            "SELECT count(*) FROM election_partitions WHERE holder IS NULL"
        )
        return (
            found.keys() == {process.pid for process in processes}
            and sum(found.values()) >= DUTIES
            and not waiting
        )

    reported = ", ".join(str(process.pid) for process in processes)
    await until(at_work, f"the upkeep to be done by {reported}", within_s=TAKES_OVER_S)


async def expiring(installation: Installation) -> DeliveryTask:
    (copy,) = await installation.publish(await installation.subscribe(), lifetime_s=-1.0)
    await installation.queue(copy)
    return copy


async def expires(installation: Installation, copy: DeliveryTask) -> None:
    async def ended() -> bool:
        return await installation.state(copy) is State.EXPIRED

    await until(ended, "a delivery to expire", within_s=TAKES_OVER_S)
    assert await installation.kinds(copy) == ["expired"]


async def delete_room(installation: Installation, room: RoomId) -> JobId:
    identity = JobId(installation.ids.generate_global(now_ms()))
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


async def test_a_suspended_process_loses_its_tasks(
    installation: Installation, start: Start
) -> None:
    """SIGSTOP: the other runs everything within seconds; SIGCONT: they share; kill: the first runs all."""
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


async def test_maintenance_waits_for_the_schema(empty_database: str, start: Start) -> None:
    """Start on a database without tables: it waits, and starts after the migration."""
    process = start(empty_database)
    async with open_connection(empty_database, name="test") as connection:

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
    """Kill during a room's deletion: another process completes it."""
    room = await installation.make_room(RoomId(8))
    subscription = await installation.subscribe(SubscriptionType.PUSH, room=room)
    await installation.publish_many(subscription, ROWS)
    process = start(installation.url)
    await work(installation, process)
    async with open_connection(installation.url, name="obstacle") as obstacle:
        identity = await delete_room(installation, room)

        async def has_begun() -> bool:
            left = await installation.value("SELECT count(*) FROM deliveries WHERE room_id = 8")
            return int(left) < ROWS

        # Before, an open transaction would delay the count of usage, which a deletion waits for.
        await until(has_begun, "the deletion to begin", within_s=TAKES_OVER_S)
        # The deletion reaches the messages late, and meets a locked one.
        await obstacle.execute("BEGIN")
        await obstacle.execute(
            "SELECT FROM messages WHERE room_id = 8 ORDER BY id DESC LIMIT 1 FOR UPDATE"
        )

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


async def test_retention_deletes_old_days_and_keeps_unfinished_deliveries(
    installation: Installation, start: Start
) -> None:
    """Run the process with its defaults."""
    make_days(installation.url, DAY)
    subscription = await installation.subscribe()
    gone, kept = [
        await write(installation, subscription, state)
        for state in (State.DELIVERED, State.SIDELINED)
    ]
    start(installation.url)

    async def done() -> bool:
        return await partitions(installation) == [
            "deliveries_20200310_kept1"
        ] and not await left_over(installation)

    await until(done, "the old day to go", within_s=TAKES_OVER_S)
    assert await found(installation, gone) == GONE
    assert await found(installation, kept) == whole(State.SIDELINED)


@pytest.mark.parametrize("name", [SESSION_NAME, "rooms upkeep", "rooms chores", "rooms events"])
async def test_a_terminated_connection_stops_no_task(
    installation: Installation, start: Start, name: str
) -> None:
    """Terminate each of its sessions: the same process continues with every task."""
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


async def test_maintenance_waits_for_postgresql(tmp_path: Path, start: Start) -> None:
    """Start before PostgreSQL, and restart it: the process waits for both and never ends by itself."""
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
            async with open_connection(url, name="test") as connection:
                present = dataclasses.replace(installation, connection=connection)
                await work(present, process)
                await expires(present, await expiring(present))
            server.close()
        process.terminate()
        assert await asyncio.to_thread(process.wait, ENDS_S) == 0


async def test_maintenance_stops_on_sigterm(installation: Installation, start: Start) -> None:
    """SIGTERM: the processes end cleanly, and the last one takes over at once."""
    first = start(installation.url)
    await work(installation, first)
    second, third = start(installation.url), start(installation.url)
    await work(installation, first, second, third)
    third.terminate()
    first.terminate()
    for process in (first, third):
        assert await asyncio.to_thread(process.wait, ENDS_S) == 0
    await work(installation, second)


async def test_no_task_runs_while_zookeeper_is_unavailable(
    installation: Installation,
    start: Start,
    zookeeper_server: Callable[[], TestServer],
    tmp_path: Path,
) -> None:
    """Kill ZooKeeper: no task runs until it is back, although PostgreSQL is up; then tasks are shared."""
    server = zookeeper_server()
    url = f"{server.url}?session_s=2"
    processes = [start(installation.url, ELECTION_URL=url, ROOMS_CLIENT="upkeep") for _ in range(2)]
    async with open_election(
        url, client="upkeep", member="observer", clock=SystemClock()
    ) as election:

        async def seen() -> ClusterView | None:
            with suppress(ElectionUnavailableError):
                return await election.view()
            return None

        async def shared() -> bool:
            view = await seen()
            counts = {member.pid: len(member.partitions) for member in view.members} if view else {}
            both = counts.keys() == {process.pid for process in processes}
            return (
                both
                and sum(counts.values()) >= DUTIES
                and max(counts.values()) - min(counts.values()) <= 1
            )

        await until(shared, "both to have a share", within_s=TAKES_OVER_S)
        await expires(installation, await expiring(installation))
        server.kill()

        async def ended() -> bool:
            assert [process.poll() for process in processes] == [None, None]
            return all(
                reported.rfind(AWAY) > reported.rfind(AT_WORK) for reported in logs(tmp_path)
            )

        await until(ended, "both to know that ZooKeeper is away", within_s=TAKES_OVER_S)
        copy = await expiring(installation)
        assert await seen() is None
        back = await installation.value("SELECT clock_timestamp()")
        assert await installation.state(copy) is State.QUEUED
        server.start()
        await expires(installation, copy)
        assert (
            await installation.value(
                "SELECT max(ts) FROM delivery_log WHERE delivery_id = %s", copy.delivery_id
            )
            > back
        )
        await until(shared, "both to have a share again", within_s=TAKES_OVER_S)
