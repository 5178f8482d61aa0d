"""Test that rooms deleted between two exports by hand leave no gap in the books."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest

from delivery.analytics.export.exporter import Exporter
from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.jobs import JobRunner
from rooms.db.jobs import delete
from rooms.db.jobs.delete import LOG_START, RECENT_EXPORT_S, DeleteQueries
from rooms.db.jobs.jobs import JobQueue
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId
from tests.support.installation import Installation
from tests.support.log_rows import Log, logging
from tests.support.query_plans import kept_plans

_OTHER = RoomId(4242)


async def _delete_room(installation: Installation, room: RoomId) -> None:
    await installation.rows("UPDATE rooms SET deleting = true WHERE id = %s", room)
    await installation.rows(
        "INSERT INTO jobs (id, organisation_id, room_id, kind, arguments, created_at)"
        " VALUES (gen_random_uuid(), %s, %s, 'delete_room', jsonb_build_object('room_id', %s::int),"
        " now() - interval '1 hour')",
        installation.organisation,
        room,
        room,
    )


def _write_in_turns(log: Log, *rooms: RoomId) -> None:
    for _ in range(3):
        for room in rooms:
            log.seq -= 1  # No other rows are in between.
            log.write(room, "published")
    log.commit()


async def _wake_jobs(installation: Installation) -> None:
    await installation.rows("UPDATE jobs SET snoozed_until = now()")


async def _run_jobs(installation: Installation, writer: LogWriter) -> None:
    """Run the deletions as a service does whose export is off."""
    await _wake_jobs(installation)
    queue = JobQueue(writer)
    await JobRunner(queue, DeleteJob(queue, DeleteQueries(writer)).handlers()).run(lambda: True)


@pytest.fixture(autouse=True)
async def writer_on_record(installation: Installation) -> None:
    await installation.rows(
        "INSERT INTO writers (id, kind, host, pid) OVERRIDING SYSTEM VALUE VALUES (1001, 'worker', 'h', 1)"
    )


async def _rows_of(installation: Installation, room: RoomId) -> int:
    found = await installation.value("SELECT count(*) FROM log_entries WHERE room_id = %s", room)
    return int(found)


async def test_a_room_waits_for_the_next_export_by_hand(
    installation: Installation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Exporter(installation.url, str(tmp_path / "segments"))
    await installation.make_room(_OTHER)
    with logging(installation.url, 1001) as log:
        _write_in_turns(log, installation.room, _OTHER)
        assert (await asyncio.to_thread(exporter.run)).rows == 6
        _write_in_turns(log, installation.room, _OTHER)
        await _delete_room(installation, installation.room)
        async with LogWriter(installation.url, kind="chores") as writer:
            await _run_jobs(installation, writer)
            assert await _rows_of(installation, installation.room) == 6
            assert str(tmp_path) in caplog.text
            assert (await asyncio.to_thread(exporter.run)).gaps == {}
            await _run_jobs(installation, writer)
        assert await _rows_of(installation, installation.room) == 0
        _write_in_turns(log, _OTHER)
        assert (await asyncio.to_thread(exporter.run)).gaps == {}


async def test_a_room_waits_two_days_at_most_for_an_export_by_hand(
    installation: Installation, tmp_path: Path
) -> None:
    exporter = Exporter(installation.url, str(tmp_path / "segments"))
    with logging(installation.url, 1001) as log:
        _write_in_turns(log, installation.room)
        await asyncio.to_thread(exporter.run)
        await installation.rows(
            "UPDATE log_exports SET sealed_at = sealed_at - %s * interval '1 s'", RECENT_EXPORT_S
        )
        _write_in_turns(log, installation.room)
    await _delete_room(installation, installation.room)
    async with LogWriter(installation.url, kind="chores") as writer:
        await _run_jobs(installation, writer)
    assert await _rows_of(installation, installation.room) == 0


async def test_an_export_that_finds_nothing_shows_that_it_is_in_use(
    installation: Installation, tmp_path: Path
) -> None:
    """After a quiet weekend, its last rows are older than two days."""
    exporter = Exporter(installation.url, str(tmp_path / "segments"))
    with logging(installation.url, 1001) as log:
        _write_in_turns(log, installation.room)
        await asyncio.to_thread(exporter.run)
        await installation.rows(
            "UPDATE log_exports SET sealed_at = sealed_at - %s * interval '1 s'", RECENT_EXPORT_S
        )
        assert (await asyncio.to_thread(exporter.run)).rows == 0
        _write_in_turns(log, installation.room)
    await _delete_room(installation, installation.room)
    async with LogWriter(installation.url, kind="chores") as writer:
        await _run_jobs(installation, writer)
        assert await _rows_of(installation, installation.room) == 6
        assert (await asyncio.to_thread(exporter.run)).rows == 3
        await _run_jobs(installation, writer)
    assert await _rows_of(installation, installation.room) == 0


async def test_a_room_that_waits_reads_its_log_and_removes_its_external_parts_once(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Exporter(installation.url, str(tmp_path / "segments"))
    subscriptions = [await installation.subscribe() for _ in range(3)]
    removed: list[SubscriptionId] = []
    counted: list[None] = []

    async def remove(subscription: SubscriptionId) -> bool:
        removed.append(subscription)
        return len(removed) != 2  # one is in use at first

    async def count(_: object) -> bool:
        counted.append(None)
        return True

    statements: list[str] = []
    run = LogWriter.run

    async def watched(self: LogWriter, statement: str, parameters: Any) -> Any:
        statements.append(statement)
        return await run(self, statement, parameters)

    monkeypatch.setattr(LogWriter, "run", watched)
    with logging(installation.url, 1001) as log:
        _write_in_turns(log, installation.room)
        await asyncio.to_thread(exporter.run)
        _write_in_turns(log, installation.room)
    await _delete_room(installation, installation.room)
    async with LogWriter(installation.url, kind="chores") as writer:
        queue = JobQueue(writer)
        deletion = DeleteJob(
            queue, DeleteQueries(writer), remove_external=remove, count_usage=count
        )
        runner = JobRunner(queue, deletion.handlers(), poll_s=0.01)
        for _ in range(10):
            await _wake_jobs(installation)
            await runner.run(lambda: True)
        assert await _rows_of(installation, installation.room) == 6
        assert len([one for one in statements if "FROM log_entries" in one]) == 2, (
            "a page, and its end"
        )
        assert sorted(removed) == sorted([*subscriptions, removed[1]])
        assert not counted
        assert await queue.fetch_open(deletion.handlers()) == []
        await asyncio.to_thread(exporter.run)
        await _wake_jobs(installation)
        await runner.run(lambda: True)
    assert counted
    assert await _rows_of(installation, installation.room) == 0


async def test_a_room_of_a_restored_log_waits_for_its_export_only(
    installation: Installation, tmp_path: Path
) -> None:
    """Its rows have transactions that this server reaches in years."""
    exporter = Exporter(installation.url, str(tmp_path / "segments"))
    with logging(installation.url, 1001) as log:
        _write_in_turns(log, installation.room)
        await asyncio.to_thread(exporter.run)
        _write_in_turns(log, installation.room)
        await installation.rows(
            "UPDATE log_entries SET xid = (xid::text::int8 + (1::int8 << 40))::text::xid8"
        )
        await _delete_room(installation, installation.room)
        async with LogWriter(installation.url, kind="chores") as writer:
            queue = JobQueue(writer)
            deletion = DeleteJob(
                queue, DeleteQueries(writer), destination=exporter.destination.name
            )
            runner = JobRunner(queue, deletion.handlers())

            async def rows_left() -> int:
                await _wake_jobs(installation)
                await runner.run(lambda: True)
                return await _rows_of(installation, installation.room)

            assert await rows_left() == 6
            exporter = Exporter(installation.url, str(tmp_path / "segments"))
            assert (await asyncio.to_thread(exporter.run)).rows == 6
            assert await rows_left() == 0


async def test_a_long_log_is_read_in_pages_by_its_key(installation: Installation) -> None:
    await installation.make_room(_OTHER)
    with logging(installation.url, 1001) as log:
        _write_in_turns(log, installation.room, _OTHER)
    last = "SELECT max(xid::text::bigint) FROM log_entries WHERE room_id = %s"
    async with LogWriter(installation.url, kind="chores") as writer:
        queries, position, seen = DeleteQueries(writer), LOG_START, []
        while page := await queries.last_transaction(installation.room, position, limit=2):
            xid, position = page
            seen.append(xid)
        assert len(seen) == 2
        assert max(seen) == await installation.value(last, installation.room)


def test_neither_the_whole_log_nor_all_exports_are_read(database: str) -> None:
    statements = {"log": delete._LAST_XID, "exports": delete._EXPORTS_IN_USE}
    with psycopg.connect(database, autocommit=True) as connection:
        plans = dict(kept_plans(connection, statements))
    conditions = [line for line in plans["log"] if "Index Cond" in line]
    assert conditions
    assert all("room_id = " in line and "ROW(message_id, " in line for line in conditions)
    of_exports = "\n".join(plans["exports"])
    assert of_exports.count("using log_exports_range") == 3
    for plan in ("\n".join(plans["log"]), of_exports):
        assert "Seq Scan" not in plan
