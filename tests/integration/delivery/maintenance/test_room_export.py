"""Test that rooms deleted between two exports by hand leave no gap in the books."""

import asyncio
from pathlib import Path

import pytest

from delivery.analytics.export.exporter import Exporter
from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.jobs import JobRunner
from rooms.db.jobs.delete import RECENT_EXPORT_S, DeleteQueries
from rooms.db.jobs.jobs import JobQueue
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId
from tests.support.installation import Installation
from tests.support.log_rows import Log, logging

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


async def _run_jobs(writer: LogWriter) -> None:
    """Run the deletions as a service does whose export is off."""
    queue = JobQueue(writer)
    await JobRunner(queue, DeleteJob(queue, DeleteQueries(writer)).handlers()).run(lambda: True)


async def _rows_of(installation: Installation, room: RoomId) -> int:
    found = await installation.value("SELECT count(*) FROM log_entries WHERE room_id = %s", room)
    return int(found)


async def test_a_room_waits_for_the_next_export_by_hand(
    installation: Installation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Exporter(installation.url, str(tmp_path / "segments"))
    await installation.make_room(_OTHER)
    with logging(installation.url) as log:
        _write_in_turns(log, installation.room, _OTHER)
        assert (await asyncio.to_thread(exporter.run)).rows == 6
        _write_in_turns(log, installation.room, _OTHER)
        await _delete_room(installation, installation.room)
        async with LogWriter(installation.url, kind="chores") as writer:
            await _run_jobs(writer)
            assert await _rows_of(installation, installation.room) == 6
            assert str(tmp_path) in caplog.text
            assert (await asyncio.to_thread(exporter.run)).gaps == {}
            await _run_jobs(writer)
        assert await _rows_of(installation, installation.room) == 0
        _write_in_turns(log, _OTHER)
        assert (await asyncio.to_thread(exporter.run)).gaps == {}


async def test_a_room_waits_two_days_at_most_for_an_export_by_hand(
    installation: Installation, tmp_path: Path
) -> None:
    exporter = Exporter(installation.url, str(tmp_path / "segments"))
    with logging(installation.url) as log:
        _write_in_turns(log, installation.room)
        await asyncio.to_thread(exporter.run)
        await installation.rows(
            "UPDATE log_exports SET sealed_at = sealed_at - %s * interval '1 s'", RECENT_EXPORT_S
        )
        _write_in_turns(log, installation.room)
    await _delete_room(installation, installation.room)
    async with LogWriter(installation.url, kind="chores") as writer:
        await _run_jobs(writer)
    assert await _rows_of(installation, installation.room) == 0
