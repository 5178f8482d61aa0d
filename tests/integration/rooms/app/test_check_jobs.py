"""Test the jobs of the maintenance process that check the stores and preview retention.

Oracle: a check reports what the doctor reports and changes nothing; a repair leaves nothing; a job
that is cancelled ends before its check does.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from rooms.app import check_jobs
from rooms.app.check_jobs import CheckJobs
from rooms.backends import DATABASE, Backends, ProcessRecord
from rooms.db.connection import open_connection
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.processes import heartbeat
from rooms.db.writer import LogWriter
from rooms.domain.ids import JobId
from rooms.domain.job import JobKind
from rooms.domain.state_machine import State
from rooms.settings import Settings, read_settings
from tests.integration.delivery.maintenance.test_service import always, ask, job
from tests.support.installation import Installation
from tests.support.old_messages import DAY, make_days, write


@pytest.fixture
async def queue(database: str) -> AsyncIterator[JobQueue]:
    async with LogWriter(database, kind="upkeep") as writer:
        yield JobQueue(writer)


async def opened(queue: JobQueue) -> OpenJob:
    """Return the only open job."""
    (found,) = await queue.fetch_open([JobKind.CHECK_STORES, JobKind.PREVIEW_RETENTION])
    return found


def checks(installation: Installation, queue: JobQueue, **settings: str) -> CheckJobs:
    """Return the jobs of a process with these settings."""
    found: Settings = read_settings(settings)
    return CheckJobs(queue, found, installation.url, None)


async def result(installation: Installation, identity: JobId) -> dict[str, Any]:
    found: dict[str, Any] = (await job(installation, identity))["result"]
    return found


async def lost_one(installation: Installation) -> Any:
    """Create a delivery without work, which a repair queues again."""
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.rows("DELETE FROM outbox WHERE id = %s", copy.delivery_id)
    return copy


async def test_a_check_reports_and_changes_nothing_and_a_repair_repairs(
    installation: Installation, queue: JobQueue
) -> None:
    copy = await lost_one(installation)
    identity = await ask(installation, "check_stores", repair=False)
    assert await checks(installation, queue).check(await opened(queue), always)
    found = await result(installation, identity)
    assert (found["open"], found["refused"], found["mixed"]) == (1, False, [])
    (finding,) = found["findings"]
    assert (finding["part"], finding["count"], finding["repaired"]) == ("deliveries", 1, 0)
    assert finding["examples"] == [copy.delivery_id]
    assert await installation.work("outbox", copy) is None
    await queue.finish_job(await opened(queue))

    identity = await ask(installation, "check_stores", repair=True)
    assert await checks(installation, queue).check(await opened(queue), always)
    found = await result(installation, identity)
    assert (found["open"], found["findings"][0]["repaired"]) == (0, 1)
    assert await installation.work("outbox", copy) is not None


async def test_processes_on_other_stores_refuse_a_repair(
    installation: Installation, queue: JobQueue
) -> None:
    copy = await lost_one(installation)
    embedded = Backends(
        broker=DATABASE, election=DATABASE, magazines=DATABASE, farm="rooms", client="default"
    )
    process = ProcessRecord(
        name="other", kind="worker", host="h", pid=7, seen_s=0, running=True,
        backends=dataclasses.replace(embedded, broker="stomp://127.0.0.1:1"),
    )  # fmt: skip
    async with open_connection(installation.url, name="test") as connection:
        await heartbeat(connection, process)
    identity = await ask(installation, "check_stores", repair=True)
    assert await checks(installation, queue).check(await opened(queue), always)
    found = await result(installation, identity)
    assert found["refused"]
    assert "worker 7 on h" in found["mixed"][0]
    assert await installation.work("outbox", copy) is None


async def test_a_cancelled_check_ends(
    installation: Installation, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def endless(*_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(check_jobs, "check_stores", endless)
    identity = await ask(installation, "check_stores", repair=False)
    looks = iter([True, True, False])
    checked = checks(installation, queue).check(await opened(queue), lambda: next(looks))
    assert not await asyncio.wait_for(checked, 10)
    assert ended.is_set()
    assert (await job(installation, identity))["result"] is None


async def test_a_preview_counts_what_is_old(installation: Installation, queue: JobQueue) -> None:
    make_days(installation.url, DAY, DAY + timedelta(days=1))
    subscription = await installation.subscribe()
    for state in (State.DELIVERED, State.DELIVERED, State.SIDELINED):
        await write(installation, subscription, state, born=DAY)
    identity = await ask(installation, "preview_retention", days=30)
    assert await checks(installation, queue).preview(await opened(queue), always)
    found = await result(installation, identity)
    assert (found["days"], found["total"]) == (30, 2)
    assert found["ranges"][0] == {
        "label": f"{DAY:%Y%m%d}", "kept": False, "deliveries": 3, "stay": 1, "fate": "shrinks"
    }  # fmt: skip
    await queue.finish_job(await opened(queue))

    identity = await ask(installation, "preview_retention", days=None)
    off = checks(installation, queue, ROOMS_RETENTION_DAYS="0")
    assert await off.preview(await opened(queue), always)
    assert await result(installation, identity) == {"days": 0, "total": 0, "ranges": []}
