"""Cancel, for a subscription whose grant came back narrower, what the grants do not cover.

The subscription stays suspended meanwhile, so nothing of that is released. The walk over the
deliveries begins when all publishes by its former event types are over, and is repeated until one
finds nothing. The last transaction locks the room, compares grants and event types with those of
the walk, ends the job and lifts the suspension. If the process dies before it, the next one walks
again. The job never fails, because the subscription would stay suspended (see `job_retries`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.deletions import SETTLE_S, DeliveryWalk
from delivery.maintenance.grants import notify_changed
from delivery.maintenance.job_retries import JobRetries
from delivery.maintenance.jobs import JobHandler
from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.rooms import lock_shared_room
from rooms.db.catalog.suspensions import ChangedSubscription
from rooms.db.connection import transaction
from rooms.db.jobs.delete import BATCH
from rooms.db.jobs.granted_subscriptions import (
    Cancellation,
    find_cancellation,
    finish_cancellation,
)
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.jobs.ungranted import UngrantedQueries
from rooms.db.notify import Notifier
from rooms.domain.ids import JobId, RoomId, SubscriptionId, room_of
from rooms.domain.job import JobKind
from rooms.errors import NotFoundError


@dataclass(slots=True, kw_only=True)
class _CancellationWalk(DeliveryWalk):
    by: Cancellation
    """As it was when the walk began."""


@dataclass(slots=True)
class _CancellationProgress:
    """Hold what this process has done of a job."""

    since: Cancellation | None = None
    """The first of those that were equal to the present one; None: none was read."""
    walk: _CancellationWalk | None = None


class CancelUngrantedJob:
    """Run the jobs of the kind `cancel_ungranted`."""

    def __init__(
        self,
        engine: AsyncEngine,
        job_queue: JobQueue,
        queries: UngrantedQueries,
        notifier: Notifier,
        *,
        settle_s: float = SETTLE_S,
        batch: int = BATCH,
    ) -> None:
        """Begin the first walk `settle_s` after the last change of grants or event types.

        So an owner who replaces a grant by others has this time to create all of them.
        """
        self._engine = engine
        self._job_queue = job_queue
        self._queries = queries
        self._retries = JobRetries(job_queue)
        self._notifier = notifier
        self._settle_s = settle_s
        self._batch = batch
        self._progress: dict[JobId, _CancellationProgress] = {}

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of its kind of job."""
        return {JobKind.CANCEL_UNGRANTED: self._run}

    async def _run(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        return await self._retries.run(job, self._continue(job, should_continue))

    async def _continue(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        subscription = SubscriptionId(job.arguments["subscription_id"])
        room = room_of(subscription)
        progress = self._progress.setdefault(job.id, _CancellationProgress())
        walk = progress.walk
        if walk is None:
            if progress.since is not None and not self._is_over(progress.since, job.seen_at):
                return await self._wait(job, progress.since, job.seen_at)
            async with transaction(self._engine) as connection:
                found = await find_cancellation(connection, room, subscription)
            if found is None:
                return await self._finish(job, room, subscription, None)
            if progress.since != found:
                # A publish by the event types of before may be under way.
                progress.since = found
            if not self._is_over(progress.since, found.seen_at):
                return await self._wait(job, progress.since, found.seen_at)
            if await self._job_queue.has_older_publish(progress.since.seen_at):
                return False
            walk = progress.walk = _CancellationWalk(by=found)
        if not await self._cancel(job, room, subscription, walk, should_continue):
            return False
        progress.walk = None
        if not walk.is_clean:
            return False
        return await self._finish(job, room, subscription, walk.by)

    def _is_over(self, since: Cancellation, now: datetime) -> bool:
        """Return whether most publishes that began before are over."""
        return (now - since.seen_at).total_seconds() >= self._settle_s

    async def _wait(self, job: OpenJob, since: Cancellation, now: datetime) -> bool:
        """Leave the job until most publishes are over: one grant may have begun ten thousand."""
        left_s = self._settle_s - (now - since.seen_at).total_seconds()
        await self._job_queue.snooze_job(job, left_s)
        return False

    async def _cancel(
        self,
        job: OpenJob,
        room: RoomId,
        subscription: SubscriptionId,
        walk: _CancellationWalk,
        should_continue: ShouldContinue,
    ) -> bool:
        """Walk on; return whether the walk came to its end."""
        while should_continue():
            page = await self._queries.cancel(
                room,
                subscription,
                walk.after,
                job=job.id,
                version=walk.by.version,
                kept=walk.by.kept,
                limit=self._batch,
            )
            if page is None:
                walk.is_clean = False
                return True
            if page.last is None:
                return True
            walk.pass_page(page, page.last)
            await self._job_queue.record_progress(job, done=walk.seen)
        return False

    async def _finish(
        self,
        job: OpenJob,
        room: RoomId,
        subscription: SubscriptionId,
        walked: Cancellation | None,
    ) -> bool:
        """End the job, unless more must be cancelled than the walk has."""
        changed: Sequence[ChangedSubscription] | None = []
        try:
            async with transaction(self._engine) as connection:
                # Routing reads event types, not the status: no table is out of date.
                await lock_shared_room(connection, room)
                changed = await finish_cancellation(connection, room, subscription, job.id, walked)
        except NotFoundError:
            pass  # the room is being deleted
        self._progress.pop(job.id, None)
        if changed is None:
            return False
        notify_changed(self._notifier, room, changed)
        return True
