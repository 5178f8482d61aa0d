"""Jobs that must not fail: pauses, what operators see, and errors that are left to the runner."""

import logging
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from delivery.maintenance.job_retries import (
    FIRST_PAUSE_S,
    LOG_EVERY_S,
    MAX_PAUSE_S,
    InvalidJobError,
    JobRetries,
)
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import JobId, OrganisationId
from rooms.errors import StorageUnavailableError
from tests.support.manual_clock import ManualClock


def open_job(name: str = "1") -> OpenJob:
    return OpenJob(
        id=JobId(name),
        organisation=OrganisationId("2"),
        kind="delete_room",
        arguments={},
        done=0,
        total=None,
        result={},
        position=None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        age_s=0.0,
    )


@dataclass
class Recorded:
    """Stand for the queue of jobs."""

    snoozes: list[tuple[float, str | None]] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    """Each value of the error in the job's record."""

    async def snooze_job(self, _: OpenJob, seconds: float, *, error: str | None = None) -> None:
        self.snoozes.append((seconds, error))
        self.errors.append(error)

    async def record_progress(self, _: OpenJob, **__: Any) -> None:
        self.errors.append(None)


async def answers(done: bool) -> bool:  # noqa: FBT001 - a step returns it
    return done


async def fails(error: Exception) -> bool:
    raise error


def retries_of(queue: Recorded) -> JobRetries:
    return JobRetries(cast("JobQueue", queue))


async def test_pauses_grow_up_to_a_bound() -> None:
    queue = Recorded()
    retries = retries_of(queue)
    for _ in range(8):
        assert not await retries.run(open_job(), fails(RuntimeError("broken")))
    pauses = [pause for pause, _ in queue.snoozes]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-2:] == [MAX_PAUSE_S, MAX_PAUSE_S]
    assert {error for _, error in queue.snoozes} == {"RuntimeError: broken"}
    assert not await retries.run(open_job("other"), fails(RuntimeError("broken")))
    assert queue.snoozes[-1][0] == FIRST_PAUSE_S


async def test_a_failure_is_logged_once_until_its_kind_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    retries = retries_of(Recorded())
    with caplog.at_level(logging.INFO):
        for number in range(3):
            await retries.run(open_job(), fails(RuntimeError(f"broken {number}")))
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert caplog.records[0].exc_info is not None
        await retries.run(open_job(), fails(KeyError("missing")))
        assert await retries.run(open_job(), answers(True))
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO"]
    assert "after 4 failures" in caplog.records[-1].getMessage()


async def test_a_kind_of_error_is_logged_once_for_all_jobs_and_again_after_an_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    retries = JobRetries(cast("JobQueue", Recorded()), clock.monotonic)
    for number in range(100):
        await retries.run(open_job(str(number)), fails(RuntimeError("broken")))
    assert len(caplog.records) == 1
    await retries.run(open_job("other"), fails(KeyError("missing")))
    await retries.run(
        replace(open_job("room"), kind="delete_subscription"), fails(KeyError("missing"))
    )
    assert len(caplog.records) == 3, "another error, and an error of another kind of job"
    clock.now_s += LOG_EVERY_S - 1
    await retries.run(open_job("1"), fails(RuntimeError("broken")))
    assert len(caplog.records) == 3
    clock.now_s += 1
    await retries.run(open_job("2"), fails(RuntimeError("broken")))
    assert len(caplog.records) == 4
    assert "100 such failures since" in caplog.records[-1].getMessage()


async def test_the_error_is_shown_until_a_step_succeeds() -> None:
    queue = Recorded()
    retries = retries_of(queue)
    await retries.run(open_job(), fails(RuntimeError("broken")))
    for _ in range(2):
        assert not await retries.run(open_job(), answers(False))
    assert queue.errors == ["RuntimeError: broken", None]
    await retries.run(open_job(), fails(RuntimeError("broken")))
    assert queue.snoozes[-1][0] == 2 * FIRST_PAUSE_S, "an earlier step of the same run succeeded"


@pytest.mark.parametrize("error", [StorageUnavailableError("away"), InvalidJobError("wrong")])
async def test_other_errors_are_left_to_the_runner(error: Exception) -> None:
    queue = Recorded()
    with pytest.raises(type(error)):
        await retries_of(queue).run(open_job(), fails(error))
    assert queue.snoozes == []


async def test_a_job_that_fails_for_good_is_forgotten() -> None:
    queue = Recorded()
    retries = retries_of(queue)
    await retries.run(open_job(), fails(RuntimeError("broken")))
    with pytest.raises(InvalidJobError):
        await retries.run(open_job(), fails(InvalidJobError("wrong")))
    assert retries._failures == {}
