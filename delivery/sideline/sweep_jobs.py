"""Run jobs that sweep single magazines, in turns of organisations.

Jobs of the same magazine have one sweep. An organisation may create a thousand of them, so a run
begins none after `MAX_RUN_S`: the sweep of all magazines comes then, and the next run goes on. A
magazine that fails may take all of that time, so it comes last for a while.
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
FAILED_LAST_S: Final = 60.0
"""Time in which a magazine that failed is swept after all others, if a run has time left."""
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


class SweepJobs:
    """Run sweep jobs, and remember between runs which organisations had turns, and what failed.

    The organisation that had the last turn comes behind the others, and a magazine that failed
    comes behind all others for `FAILED_LAST_S`.
    """

    def __init__(self, job_queue: JobQueue, clock: Clock) -> None:
        self._job_queue = job_queue
        self._clock = clock
        self._turns: dict[OrganisationId, None] = {}
        """Organisations with open jobs, the one that had the last turn at the end."""
        self._last_until: dict[Hashable, float] = {}
        """Times of the clock until which magazines come last, the oldest failure first."""

    async def run(
        self,
        jobs: Sequence[OpenJob],
        magazine_of: Callable[[OpenJob], Hashable],
        sweep: SweepForJob,
        should_continue: ShouldContinue,
    ) -> None:
        """Sweep the magazines of open jobs for as long as a run may take, and finish the jobs.

        A job fails by NotFoundError, KeyError and ValueError of `sweep`.
        """
        until_s = self._clock.monotonic() + MAX_RUN_S
        for group in self._in_order(jobs, magazine_of):
            if not should_continue() or self._clock.monotonic() >= until_s:
                return
            self._turns.pop(group[0].organisation, None)
            self._turns[group[0].organisation] = None
            magazine = magazine_of(group[0])
            self._last_until.pop(magazine, None)
            try:
                swept = await sweep(group[0])
            except (NotFoundError, KeyError, ValueError) as exc:
                is_known = isinstance(exc, NotFoundError)
                error = str(exc) if is_known else f"{type(exc).__name__}: {exc}"
                for job in group:
                    await self._job_queue.fail_job(job, error)
                continue
            if swept is None:
                self._last_until[magazine] = self._clock.monotonic() + FAILED_LAST_S
                continue
            if not should_continue():
                return
            for job in group:
                await self._job_queue.record_progress(
                    job, done=swept, total=swept, result={"swept": swept}
                )
                await self._job_queue.finish_job(job)

    def _in_order(
        self, jobs: Sequence[OpenJob], magazine_of: Callable[[OpenJob], Hashable]
    ) -> list[list[OpenJob]]:
        """Return the jobs of each magazine, and forget organisations and magazines without any."""
        present = dict.fromkeys(job.organisation for job in jobs)
        kept = [organisation for organisation in self._turns if organisation in present]
        self._turns = dict.fromkeys((*kept, *present))
        now_s = self._clock.monotonic()
        magazines = {magazine_of(job) for job in jobs}
        self._last_until = {
            magazine: until_s
            for magazine, until_s in self._last_until.items()
            if until_s > now_s and magazine in magazines
        }
        places = {organisation: place for place, organisation in enumerate(self._turns)}
        others = [job for job in jobs if magazine_of(job) not in self._last_until]
        others.sort(key=lambda job: places[job.organisation])
        failed: dict[Hashable, list[OpenJob]] = {magazine: [] for magazine in self._last_until}
        for job in jobs:
            if magazine_of(job) in failed:
                failed[magazine_of(job)].append(job)
        return [*group_jobs(others, magazine_of), *failed.values()]
