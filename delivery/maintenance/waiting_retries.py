"""Run the jobs that make the waiting retries of a subscription due now.

A job's arguments: `{"room_id", "subscription_id", "name"}`. Retries that began to wait after it was
created are excluded. It ends early if the subscription is not active any more.
"""

from collections.abc import Mapping
from typing import Final

from delivery.maintenance.job_totals import JobTotals
from delivery.maintenance.jobs import JobHandler, sleep_unless_stopped
from delivery.maintenance.restore import LOCK_RETRY_S, MAX_LOCK_TRIES, SKEW, OnQueued
from delivery.maintenance.task import ShouldContinue
from rooms.db.jobs import waiting_retries
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.jobs.waiting_retries import WaitingRetryQueries
from rooms.domain.ids import SubscriptionId, first_id, id_before, room_of
from rooms.domain.job import JobKind

_BEGIN: Final = id_before(first_id(0))


class RetryWaitingJob:
    """Walk over the work rows of a room in pages, and make the subscription's retries due."""

    def __init__(
        self,
        job_queue: JobQueue,
        queries: WaitingRetryQueries,
        *,
        on_queued: OnQueued,
        batch: int = waiting_retries.BATCH,
        max_read: int = waiting_retries.MAX_READ,
        max_lock_tries: int = MAX_LOCK_TRIES,
    ) -> None:
        self._totals = JobTotals(job_queue)
        self._queries = queries
        self._on_queued = on_queued
        self._batch = batch
        self._max_read = max_read
        self._max_lock_tries = max_lock_tries

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of each kind of job."""
        return {JobKind.RETRY_WAITING: self._retry}

    async def _retry(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        subscription = SubscriptionId(job.arguments["subscription_id"])
        if room_of(subscription) != job.arguments["room_id"]:
            raise ValueError(f"subscription {subscription} is not of this room")
        until = first_id(int((job.created_at + SKEW).timestamp() * 1000))
        position, tries = job.position, 0
        await self._totals.record(
            job, lambda: self._queries.count(subscription, _BEGIN, until), should_continue
        )
        while should_continue():
            page = await self._queries.retry_page(
                job.id,
                position,
                subscription,
                after=_BEGIN if position is None else position["after"],
                until=until,
                requested_at=job.created_at,
                skip_locked=tries >= self._max_lock_tries,
                limit=self._batch,
                max_read=self._max_read,
            )
            if page is None:
                return False
            if page.retried:
                self._on_queued(subscription if page.is_pull else None)
            if page.end:
                return True
            if page.last is not None:
                position, tries = {"after": page.last}, 0
                continue
            tries += 1
            if not await sleep_unless_stopped(LOCK_RETRY_S, should_continue):
                return False
        return False
