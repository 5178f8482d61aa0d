"""Count once how much each job has to do."""

from collections.abc import Awaitable, Callable
from typing import Final

from delivery.maintenance.task import ShouldContinue
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import JobId

_MAX_KEPT: Final = 10_000
"""Jobs that have ended are among them. Of one that is forgotten the rows are counted again."""


class JobTotals:
    """Record the totals of jobs, and remember those that have too many rows to be counted.

    Of more than 10,000 the one that was counted first is forgotten.
    """

    def __init__(self, job_queue: JobQueue) -> None:
        self._job_queue = job_queue
        self._uncounted: dict[JobId, None] = {}

    async def record(
        self,
        job: OpenJob,
        count: Callable[[], Awaitable[int | None]],
        should_continue: ShouldContinue,
    ) -> None:
        """Record what `count` returns as the job's total, unless it was counted before.

        None: there are too many, so the job has no total until it is done.
        """
        if job.total is not None or job.id in self._uncounted or not should_continue():
            return
        total = await count()
        if total is not None:
            await self._job_queue.record_progress(job, total=total)
            return
        if len(self._uncounted) >= _MAX_KEPT:
            del self._uncounted[next(iter(self._uncounted))]
        self._uncounted[job.id] = None
