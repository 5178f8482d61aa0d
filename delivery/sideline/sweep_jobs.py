"""Run jobs that sweep single magazines, in turns of organisations.

Jobs of the same magazine have one sweep. An organisation may create a thousand of them, so a run
begins none after `MAX_RUN_S`: the sweep of all magazines comes then, and the next run goes on.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Final

from delivery.maintenance.task import ShouldContinue
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import OrganisationId
from rooms.errors import (
    MagazineMissingError,
    MagazineUnavailableError,
    NotFoundError,
    StaleEpochError,
    TooLargeError,
)
from rooms.ports import Clock

MAX_RUN_S: Final = 5.0
MAGAZINE_ERRORS: Final = (
    MagazineUnavailableError,
    MagazineMissingError,
    StaleEpochError,
    TooLargeError,
)
"""Errors of one magazine that do not stop the sweep of the others."""

SweepForJob = Callable[[OpenJob], Awaitable[int | None]]
"""Sweep the magazine of a job; return the number of stuck entries. None: the job waits."""


def group_jobs(
    jobs: Sequence[OpenJob], magazine_of: Callable[[OpenJob], Hashable]
) -> list[list[OpenJob]]:
    """Return the jobs of each magazine: the first of each organisation, then its second."""
    groups: dict[Hashable, list[OpenJob]] = {}
    for job in jobs:
        groups.setdefault(magazine_of(job), []).append(job)
    counts: Counter[OrganisationId] = Counter()
    ranked = []
    for group in groups.values():
        organisation = group[0].organisation
        ranked.append((counts[organisation], group))
        counts[organisation] += 1
    ranked.sort(key=lambda one: one[0])
    return [group for _, group in ranked]


async def run_sweep_jobs(
    groups: Sequence[Sequence[OpenJob]],
    sweep: SweepForJob,
    should_continue: ShouldContinue,
    *,
    job_queue: JobQueue,
    clock: Clock,
) -> None:
    """Sweep the magazine of each group for as long as a run may take, and finish its jobs.

    A job fails by NotFoundError, KeyError and ValueError of `sweep`.
    """
    until_s = clock.monotonic() + MAX_RUN_S
    for group in groups:
        if not should_continue() or clock.monotonic() >= until_s:
            return
        try:
            swept = await sweep(group[0])
        except (NotFoundError, KeyError, ValueError) as exc:
            error = str(exc) if isinstance(exc, NotFoundError) else f"{type(exc).__name__}: {exc}"
            for job in group:
                await job_queue.fail_job(job, error)
            continue
        if swept is None:
            continue
        if not should_continue():
            return
        for job in group:
            await job_queue.record_progress(job, done=swept, total=swept, result={"swept": swept})
            await job_queue.finish_job(job)
