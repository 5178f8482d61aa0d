"""Test jobs that sweep single magazines: in turns, each magazine once, and not for too long."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from delivery.sideline.sweep_jobs import MAX_RUN_S, group_jobs, run_sweep_jobs
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import JobId, OrganisationId
from rooms.domain.job import JobKind
from tests.support.manual_clock import ManualClock


def a_job(name: str, organisation: str, magazine: str) -> OpenJob:
    return OpenJob(
        id=JobId(name),
        organisation=OrganisationId(organisation),
        kind=JobKind.SWEEP_QUEUE,
        arguments={"queue": magazine},
        done=0,
        total=None,
        result={},
        position=None,
        created_at=datetime(2026, 11, 29, tzinfo=UTC),
        age_s=0.0,
    )


@dataclass
class Jobs:
    """Record what became of jobs."""

    finished: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def record_progress(self, job: OpenJob, **found: Any) -> None:
        assert found["result"] == {"swept": found["done"]}

    async def finish_job(self, job: OpenJob) -> None:
        self.finished.append(job.id)

    async def fail_job(self, job: OpenJob, error: str) -> None:
        self.failed.append(f"{job.id} {error}")


def groups(jobs: Sequence[OpenJob]) -> list[list[OpenJob]]:
    return group_jobs(jobs, lambda job: job.arguments["queue"])


def test_organisations_take_turns_and_a_magazine_has_one_group() -> None:
    jobs = [a_job(f"a{number}", "a", f"queue {number % 3}") for number in range(6)]
    jobs += [a_job("b0", "b", "theirs"), a_job("b1", "b", "theirs too")]
    found = [[job.id for job in group] for group in groups(jobs)]
    assert found == [["a0", "a3"], ["b0"], ["a1", "a4"], ["b1"], ["a2", "a5"]]


async def run(jobs: Sequence[OpenJob], *, took_s: float, errors: dict[str, Any]) -> Jobs:
    clock, recorded = ManualClock(), Jobs()

    async def sweep(job: OpenJob) -> int | None:
        clock.now_s += took_s
        if job.id in errors:
            if errors[job.id] is None:
                return None
            raise errors[job.id]
        return 7

    await run_sweep_jobs(
        groups(jobs), sweep, lambda: True, job_queue=cast("JobQueue", recorded), clock=clock
    )
    return recorded


async def test_a_run_begins_no_sweep_after_its_time() -> None:
    jobs = [a_job(f"a{number}", "a", f"queue {number}") for number in range(10)]
    found = await run([*jobs, a_job("b0", "b", "theirs")], took_s=MAX_RUN_S / 2.5, errors={})
    assert found.finished == ["a0", "b0", "a1"]


async def test_invalid_jobs_fail_and_others_go_on() -> None:
    jobs = [a_job(name, "a", magazine) for name, magazine in (("x", "gone"), ("y", "gone"))]
    jobs += [a_job("waits", "a", "away"), a_job("good", "a", "there")]
    found = await run(jobs, took_s=0.1, errors={"x": ValueError("no queue"), "waits": None})
    assert found.failed == ["x ValueError: no queue", "y ValueError: no queue"]
    assert found.finished == ["good"]


@pytest.mark.parametrize("stops_after", [0, 1])
async def test_a_term_that_ends_finishes_no_job(stops_after: int) -> None:
    recorded, left = Jobs(), iter([True] * stops_after)

    async def sweep(_job: OpenJob) -> int:
        return 1

    await run_sweep_jobs(
        groups([a_job("a0", "a", "queue")]),
        sweep,
        lambda: next(left, False),
        job_queue=cast("JobQueue", recorded),
        clock=ManualClock(),
    )
    assert recorded.finished == []
