"""Test jobs that sweep single magazines: in turns, each magazine once, and not for too long."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from delivery.sideline.sweep_jobs import (
    FAILED_LAST_S,
    MAX_RUN_S,
    SweepForJob,
    SweepJobs,
    group_jobs,
)
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


def magazine_of(job: OpenJob) -> Hashable:
    return str(job.arguments["queue"])


def groups(jobs: Sequence[OpenJob]) -> list[list[OpenJob]]:
    return group_jobs(jobs, magazine_of)


def test_organisations_take_turns_and_a_magazine_has_one_group() -> None:
    jobs = [a_job(f"a{number}", "a", f"queue {number % 3}") for number in range(6)]
    jobs += [a_job("b0", "b", "theirs"), a_job("b1", "b", "theirs too")]
    found = [[job.id for job in group] for group in groups(jobs)]
    assert found == [["a0", "a3"], ["b0"], ["a1", "a4"], ["b1"], ["a2", "a5"]]


def sweep_jobs(recorded: Jobs, clock: ManualClock) -> SweepJobs:
    return SweepJobs(cast("JobQueue", recorded), clock)


async def run(jobs: Sequence[OpenJob], *, took_s: float, errors: dict[str, Any]) -> Jobs:
    clock, recorded = ManualClock(), Jobs()

    async def sweep(job: OpenJob) -> int | None:
        clock.now_s += took_s
        if job.id in errors:
            if errors[job.id] is None:
                return None
            raise errors[job.id]
        return 7

    await sweep_jobs(recorded, clock).run(jobs, magazine_of, sweep, lambda: True)
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

    await sweep_jobs(recorded, ManualClock()).run(
        [a_job("a0", "a", "queue")], magazine_of, sweep, lambda: next(left, False)
    )
    assert recorded.finished == []


@dataclass
class Runs:
    """Run open jobs again and again; those on the magazines in `bad` fail after their time."""

    bad: dict[str, float]
    clock: ManualClock = field(default_factory=ManualClock)
    recorded: Jobs = field(default_factory=Jobs)
    begun: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.jobs = sweep_jobs(self.recorded, self.clock)

    def sweep(self, took_s: float) -> SweepForJob:
        async def sweep(job: OpenJob) -> int | None:
            self.begun.append(job.id)
            self.clock.now_s += self.bad.get(job.arguments["queue"], took_s)
            return None if job.arguments["queue"] in self.bad else 3

        return sweep

    async def run(self, jobs: Sequence[OpenJob], *, took_s: float = 0.0) -> list[str]:
        """Run those that are open; return which sweeps were begun."""
        self.begun.clear()
        left = [job for job in jobs if job.id not in self.recorded.finished]
        await self.jobs.run(left, magazine_of, self.sweep(took_s), lambda: True)
        return list(self.begun)


async def test_a_magazine_that_fails_slowly_lets_others_have_turns() -> None:
    at = Runs({"bad": MAX_RUN_S})
    jobs = [a_job("a0", "a", "bad"), a_job("a1", "a", "good"), a_job("b0", "b", "theirs")]
    assert await at.run(jobs) == ["a0"]
    assert await at.run(jobs) == ["b0", "a1", "a0"], "what failed has the time that is left"
    assert at.recorded.finished == ["b0", "a1"]


async def test_many_magazines_that_fail_slowly_delay_others_by_one_turn() -> None:
    bad = [a_job(f"a{number}", "a", f"bad {number}") for number in range(50)]
    at = Runs({f"bad {number}": MAX_RUN_S for number in range(50)})
    assert await at.run(bad) == ["a0"]
    later = [a_job(f"b{number}", "b", f"theirs {number}") for number in range(2)]
    assert await at.run([*bad, *later]) == ["a1"], "who comes later waits for one turn"
    assert await at.run([*bad, *later]) == ["b0", "a2"]
    assert await at.run([*bad, *later]) == ["b1", "a3"]


async def test_magazines_that_failed_take_turns() -> None:
    """Also where failures last longer than such a magazine is last."""
    names = [f"o{number}" for number in range(20)]
    jobs = [a_job(name, name, name) for name in names]
    at = Runs(dict.fromkeys(names, MAX_RUN_S))
    assert [begun for _ in range(60) for begun in await at.run(jobs)] == names * 3
    at.bad.clear()
    assert set(await at.run(jobs)) == set(names)


async def test_what_failed_is_not_last_for_ever() -> None:
    """Let another organisation request sweeps without end, each for the time of a run."""
    at = Runs({"bad": 0.0})
    stream = [a_job(f"b{number}", "b", f"theirs {number}") for number in range(100)]
    jobs = [a_job("a0", "a", "bad"), *stream]
    assert await at.run(jobs, took_s=MAX_RUN_S) == ["a0", "b0"]
    at.bad.clear()
    runs = 0
    while "a0" not in at.recorded.finished:
        await at.run(jobs, took_s=MAX_RUN_S)
        runs += 1
    assert runs * MAX_RUN_S <= FAILED_LAST_S + MAX_RUN_S
