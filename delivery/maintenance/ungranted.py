"""Cancel, for a subscription whose grant came back narrower, what the grants do not cover.

The subscription stays suspended meanwhile, so nothing of that is released. As in a deletion, the
walk over the deliveries is repeated until one that began after all publishes by the former routing
were over finds nothing. The last transaction locks the room, compares the grants with those of the
walk, ends the job and lifts the suspension. If the process dies before it, the next one walks
again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.deletions import SETTLE_S
from delivery.maintenance.grants import notify_changed
from delivery.maintenance.jobs import JobHandler
from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.rooms import touch_shared_room
from rooms.db.connection import transaction
from rooms.db.jobs.delete import BATCH, START
from rooms.db.jobs.granted_subscriptions import find_kept_types, finish_cancellation
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.jobs.ungranted import UngrantedQueries
from rooms.db.notify import Notifier
from rooms.domain.ids import JobId, RoomId, SubscriptionId, room_of
from rooms.domain.job import JobKind
from rooms.errors import NotFoundError


@dataclass(slots=True)
class _Walk:
    """Hold how far a walk over the deliveries has come."""

    kept: frozenset[str]
    """The patterns of the grants when it began."""
    is_settled: bool
    """All publishes by the former routing were over when it began."""
    after: str = START
    seen: int = 0
    is_clean: bool = True
    """It has found nothing to cancel or to wait for."""


@dataclass(slots=True)
class _Progress:
    """Hold what this process has done of a job."""

    seen_at: datetime
    """When it found the job."""
    walk: _Walk | None = None
    is_walked: bool = False


class CancelUngrantedJob:
    """Runs the jobs of the kind `cancel_ungranted`."""

    def __init__(
        self,
        engine: AsyncEngine,
        job_queue: JobQueue,
        queries: UngrantedQueries,
        notifier: Notifier,
        new_job_id: Callable[[], str],
        *,
        settle_s: float = SETTLE_S,
        batch: int = BATCH,
    ) -> None:
        """Wait for `settle_s` from the job's creation before the last walk."""
        self._engine = engine
        self._job_queue = job_queue
        self._queries = queries
        self._notifier = notifier
        self._new_job_id = new_job_id
        self._settle_s = settle_s
        self._batch = batch
        self._progress: dict[JobId, _Progress] = {}

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of its kind of job."""
        return {JobKind.CANCEL_UNGRANTED: self._run}

    async def _run(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        subscription = SubscriptionId(job.arguments["subscription_id"])
        room = room_of(subscription)
        progress = self._progress.setdefault(job.id, _Progress(seen_at=job.seen_at))
        if progress.is_walked and job.age_s < self._settle_s:
            return False  # another walk would find nothing new yet
        walk = progress.walk
        if walk is None:
            async with transaction(self._engine) as connection:
                kept = await find_kept_types(connection, room, subscription)
            if kept is None:
                return await self._finish(job, room, subscription, None)
            is_settled = job.age_s >= self._settle_s and not (
                await self._job_queue.has_older_publish(progress.seen_at)
            )
            walk = progress.walk = _Walk(kept=kept, is_settled=is_settled)
        if not await self._cancel(job, room, subscription, walk, should_continue):
            return False
        progress.walk, progress.is_walked = None, True
        if not (walk.is_clean and walk.is_settled):
            return False
        return await self._finish(job, room, subscription, walk.kept)

    async def _cancel(
        self,
        job: OpenJob,
        room: RoomId,
        subscription: SubscriptionId,
        walk: _Walk,
        should_continue: ShouldContinue,
    ) -> bool:
        """Walk on; return whether the walk came to its end."""
        while should_continue():
            page = await self._queries.cancel(
                room, subscription, walk.after, kept=walk.kept, limit=self._batch
            )
            if page.last is None:
                return True
            walk.after, walk.seen = page.last, walk.seen + page.scanned
            walk.is_clean = walk.is_clean and not page.cancelled and not page.skipped
            await self._job_queue.record_progress(job, done=walk.seen)
        return False

    async def _finish(
        self,
        job: OpenJob,
        room: RoomId,
        subscription: SubscriptionId,
        kept: frozenset[str] | None,
    ) -> bool:
        """End the job, unless the grants are narrower than those of the walk."""
        try:
            async with transaction(self._engine) as connection:
                await touch_shared_room(connection, room)
                changed = await finish_cancellation(
                    connection, room, subscription, job.id, self._new_job_id, kept=kept
                )
        except NotFoundError:
            changed = []  # the room is being deleted
        if changed is None:
            return False
        self._progress.pop(job.id, None)
        notify_changed(self._notifier, room, changed)
        return True
