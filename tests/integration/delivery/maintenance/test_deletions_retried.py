"""Deletions whose step fails with an unexpected error: they are tried again until they are done."""

import logging
from typing import Any

import pytest

from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.job_retries import FIRST_PAUSE_S, MAX_PAUSE_S
from delivery.maintenance.jobs import JobRunner
from rooms.db.jobs.delete import CancelPage, DeleteQueries
from rooms.db.jobs.jobs import JobQueue
from rooms.db.writer import LogWriter
from rooms.domain.ids import JobId, RoomId
from rooms.domain.state_machine import State
from tests.integration.delivery.maintenance.test_service import (
    always,
    ask,
    delete_room,
    job,
    jobs_of,
    queued,
)
from tests.support.installation import Installation

KINDS = ["delete_room", "delete_subscription", "terminate_subscription"]


async def request(installation: Installation, kind: str) -> JobId:
    """Request a job of this kind, on an object that has a queued delivery."""
    room = await installation.make_room(RoomId(8))
    subscription = await installation.subscribe(room=room)
    await queued(installation, subscription)
    if kind == "delete_room":
        return await delete_room(installation, room)
    status = "deleted" if kind == "delete_subscription" else "terminated"
    await installation.change(subscription, status=status)
    return await ask(installation, kind, room_id=room, subscription_id=str(subscription))


async def run_twice(jobs: JobRunner) -> None:
    """Run the open jobs until they wait: the first walk cancels, and the second finds nothing."""
    for _ in range(2):
        await jobs.run(always)


async def wake(installation: Installation, identity: JobId) -> float:
    """End the pause of a job, and return how long it would have been."""
    (row,) = await installation.rows(
        "UPDATE jobs j SET snoozed_until = NULL FROM jobs b WHERE b.id = j.id AND j.id = %s"
        " RETURNING extract(epoch FROM b.snoozed_until - now())::float8 AS left_s",
        identity,
    )
    return float(row["left_s"])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deletion_goes_on_after_unexpected_errors(
    installation: Installation,
    writer: LogWriter,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    identity = await request(installation, kind)
    jobs = jobs_of(writer)

    async def breaks(*_: Any, **__: Any) -> CancelPage:
        raise RuntimeError("this statement is wrong")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(DeleteQueries, "cancel", breaks)
        pauses = []
        for _ in range(3):
            await run_twice(jobs)
            row = await job(installation, identity)
            assert row["state"] in {"queued", "running"}
            assert row["error"] == "RuntimeError: this statement is wrong"
            pauses.append(await wake(installation, identity))
    assert pauses == sorted(pauses)
    assert FIRST_PAUSE_S - 5 < pauses[0] <= FIRST_PAUSE_S
    assert 4 * FIRST_PAUSE_S - 5 < pauses[-1] <= MAX_PAUSE_S
    assert len(caplog.records) == 1
    await run_twice(jobs)
    row = await job(installation, identity)
    assert (row["state"], row["error"]) == ("done", None)
    states = await installation.states()
    assert states == ({} if kind == "delete_room" else {State.CANCELLED.value: 1})


async def test_a_deletion_that_waits_for_its_next_try_shows_its_error_to_a_successor(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes over meanwhile leaves the job until the pause is over."""
    identity = await request(installation, "delete_room")

    async def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("this statement is wrong")

    with monkeypatch.context() as patch:
        patch.setattr(DeleteQueries, "delete_room", breaks)
        await run_twice(jobs_of(writer))
    await run_twice(jobs_of(writer))
    row = await job(installation, identity)
    assert (row["state"], row["error"]) == ("running", "RuntimeError: this statement is wrong")
    await wake(installation, identity)
    await run_twice(jobs_of(writer))
    row = await job(installation, identity)
    assert (row["state"], row["error"]) == ("done", None)


@pytest.mark.parametrize("kind", ["delete_room", "delete_subscription"])
async def test_a_deletion_that_must_not_be_done_fails_and_is_forgotten(
    installation: Installation, writer: LogWriter, kind: str
) -> None:
    """Request it of what is not marked as deleted."""
    room = await installation.make_room(RoomId(8))
    subscription = await installation.subscribe(room=room)
    identity = await ask(installation, kind, room_id=room, subscription_id=str(subscription))
    queue = JobQueue(writer)
    deletions = DeleteJob(queue, DeleteQueries(writer))
    await JobRunner(queue, deletions.handlers()).run(always)
    row = await job(installation, identity)
    assert row["state"] == "failed"
    assert row["error"].startswith("InvalidJobError: the ")
    assert deletions._progress == {}
