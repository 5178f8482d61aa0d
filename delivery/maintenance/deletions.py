"""Delete subscriptions and rooms, a batch at a time; another process can continue it.

A deletion walks over the deliveries and cancels unfinished and sidelined ones; attempts under way
are left to end. A publish that was under way when the deletion was marked may still add deliveries.
So the walk is repeated until one that began after all such publishes were over finds nothing. Then
the subscription's external parts are removed: its sideline magazine and, once it has no consumer,
its broker queue.

A job whose arguments are invalid, or whose object is not marked as deleted, fails. After any other
error it is tried again, because its object is hidden from the API: see `job_retries`.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from delivery.maintenance.export_wait import ExportWait
from delivery.maintenance.job_retries import InvalidJobError, JobRetries
from delivery.maintenance.job_totals import JobTotals
from delivery.maintenance.jobs import JobHandler
from delivery.maintenance.task import ShouldContinue
from delivery.maintenance.usage import CountUsage
from rooms.db.jobs.delete import BATCH, COUNTED_TABLES, START, CancelPage, DeleteQueries
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import JobId, RoomId, SubscriptionId, room_of
from rooms.domain.job import JobKind
from rooms.errors import BrokerUnavailableError, MagazineUnavailableError
from rooms.outages import OUTAGES

_REMOVE_OUTAGE: Final = "external cleanup of deleted subscriptions failed"
SETTLE_S: Final = 5.0
"""Time in which publishes that do not know of the deletion usually end; then it is looked up."""

RemoveExternal = Callable[[SubscriptionId], Awaitable[bool]]
"""Remove a deleted subscription's external parts. False: one is in use, to be removed later."""


@dataclass(slots=True, kw_only=True)
class DeliveryWalk:
    """Hold how far a walk over the deliveries has come."""

    after: str = START
    seen: int = 0
    is_clean: bool = True
    """It has found nothing to cancel or to wait for."""

    def pass_page(self, page: CancelPage, last: str) -> None:
        """Go on behind a page, up to its `last` delivery."""
        self.after, self.seen = last, self.seen + page.scanned
        self.is_clean = self.is_clean and not page.cancelled and not page.skipped


@dataclass(slots=True, kw_only=True)
class _DeletionWalk(DeliveryWalk):
    is_settled: bool
    """All publishes that do not know of the deletion were over when it began."""


@dataclass(slots=True)
class _DeletionProgress:
    """Hold what this process has done of a job."""

    seen_at: datetime
    """When it found the job."""
    walk: _DeletionWalk | None = None
    """The walk that the last time slice did not end: begun anew, it might not end in a slice."""
    is_walked: bool = False
    is_empty: bool = False
    """No delivery is left, and no more can arrive."""
    removed: set[SubscriptionId] = field(default_factory=set)
    """Subscriptions without external parts."""
    all_removed: bool = False


class DeleteJob:
    """Run deletion jobs, and keep in memory how far it has come with each."""

    def __init__(
        self,
        job_queue: JobQueue,
        queries: DeleteQueries,
        *,
        settle_s: float = SETTLE_S,
        batch: int = BATCH,
        remove_external: RemoveExternal | None = None,
        count_usage: CountUsage | None = None,
        destination: str | None = None,
    ) -> None:
        """`count_usage`: count what a room's log still has, before the log is deleted.

        `destination`: of the configured export, which a room's log must have reached before, as
        it must every destination in use.
        """
        self._job_queue = job_queue
        self._totals = JobTotals(job_queue)
        self._retries = JobRetries(job_queue)
        self._queries = queries
        self._remove_external = remove_external
        self._count_usage = count_usage
        self._settle_s = settle_s
        self._batch = batch
        self._export_wait = ExportWait(job_queue, queries, destination)
        self._progress: dict[JobId, _DeletionProgress] = {}

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of each kind of job."""
        return {
            JobKind.DELETE_SUBSCRIPTION: self._run_subscription,
            JobKind.TERMINATE_SUBSCRIPTION: self._run_subscription,
            JobKind.DELETE_ROOM: self._run_room,
        }

    async def _run_subscription(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        room, subscription = _subscription_of(job.arguments)
        return await self._unless_too_early(
            job, self._delete_subscription(job, room, subscription, should_continue)
        )

    async def _run_room(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        return await self._unless_too_early(
            job, self._delete_room(job, _room_of(job.arguments), should_continue)
        )

    async def _unless_too_early(self, job: OpenJob, deletion: Coroutine[Any, Any, bool]) -> bool:
        """Run the deletion, unless it would find nothing new yet."""
        if self._progress_of(job).is_walked and job.age_s < self._settle_s:
            deletion.close()
            return False
        try:
            done = await self._retries.run(job, deletion)
        except InvalidJobError:
            self._forget(job.id)
            raise
        if done:
            self._forget(job.id)
        return done

    def _forget(self, job: JobId) -> None:
        self._progress.pop(job, None)
        self._export_wait.forget(job)

    def _progress_of(self, job: OpenJob) -> _DeletionProgress:
        return self._progress.setdefault(job.id, _DeletionProgress(seen_at=job.seen_at))

    async def _delete_subscription(
        self,
        job: OpenJob,
        room: RoomId,
        subscription: SubscriptionId,
        should_continue: ShouldContinue,
    ) -> bool:
        deleted = await self._queries.subscription_deleted(room, subscription)
        if deleted is None:
            return True  # it went with its room
        if not deleted:
            raise InvalidJobError("the subscription is neither deleted nor terminated")
        await self._totals.record(
            job, lambda: self._queries.count(room, subscription), should_continue
        )
        return await self._cancel_all(
            job, room, subscription, should_continue
        ) and await self._external_removed(job, [subscription], should_continue)

    async def _delete_room(
        self, job: OpenJob, room: RoomId, should_continue: ShouldContinue
    ) -> bool:
        deleting = await self._queries.room_deleting(room)
        if deleting is None:
            return True  # an earlier run deleted it and died before it finished the job
        if not deleting:
            raise InvalidJobError("the room is not marked as deleted")
        if not await self._cancel_all(job, room, None, should_continue):
            return False
        if not self._progress_of(job).all_removed and not await self._external_removed(
            job, await self._queries.subscriptions(room), should_continue
        ):
            return False
        if not await self._export_wait.is_over(job, room, should_continue):
            return False
        if self._count_usage is not None and not await self._count_usage(should_continue):
            return False
        if not await self._delete_rows(job, room, should_continue):
            return False
        await self._queries.delete_room(room)
        return True

    async def _delete_rows(
        self, job: OpenJob, room: RoomId, should_continue: ShouldContinue
    ) -> bool:
        """Delete the room's rows in every table; return whether all are deleted."""
        done = job.done

        async def count_all() -> int | None:
            # An earlier process may have deleted rows, and had too many to count them all.
            left = await self._queries.count(room, None)
            return None if left is None else done + left

        await self._totals.record(job, count_all, should_continue)
        for table, start in self._queries.tables():
            after: str | None = start
            while after is not None:
                if not should_continue():
                    return False
                count, after = await self._queries.delete(table, room, after, limit=self._batch)
                if count and table in COUNTED_TABLES:
                    done += count
                    await self._job_queue.record_progress(job, done=done)
        return should_continue()

    async def _cancel_all(
        self,
        job: OpenJob,
        room: RoomId,
        subscription: SubscriptionId | None,
        should_continue: ShouldContinue,
    ) -> bool:
        """Cancel every delivery; return whether none is left and no more can arrive."""
        progress = self._progress_of(job)
        if progress.is_empty:
            return True
        walk = progress.walk
        if walk is None:
            walk = progress.walk = _DeletionWalk(is_settled=await self._is_settled(job, progress))
        while True:
            if not should_continue():
                return False
            page = await self._queries.cancel(
                room,
                subscription,
                walk.after,
                terminated=job.kind == JobKind.TERMINATE_SUBSCRIPTION,
                limit=self._batch,
            )
            if page.last is None:
                break
            walk.pass_page(page, page.last)
            if not progress.is_walked:
                await self._job_queue.record_progress(
                    job, done=None if subscription is None else walk.seen
                )
        progress.walk = None
        progress.is_walked = True
        progress.is_empty = walk.is_clean and walk.is_settled
        return progress.is_empty

    async def _is_settled(self, job: OpenJob, progress: _DeletionProgress) -> bool:
        return job.age_s >= self._settle_s and not await self._job_queue.has_older_publish(
            progress.seen_at
        )

    async def _external_removed(
        self,
        job: OpenJob,
        subscriptions: Sequence[SubscriptionId],
        should_continue: ShouldContinue,
    ) -> bool:
        """Remove external parts, once each; return whether all are removed. Those in use wait."""
        progress = self._progress_of(job)
        if self._remove_external is None:
            progress.all_removed = True
            return True
        all_removed = True
        for subscription in subscriptions:
            if subscription in progress.removed:
                continue
            if not should_continue():
                return False
            try:
                if await self._remove_external(subscription):
                    progress.removed.add(subscription)
                else:
                    all_removed = False
            except (BrokerUnavailableError, MagazineUnavailableError) as exc:
                OUTAGES.record_failure(exc, _REMOVE_OUTAGE)
                return False
            OUTAGES.record_success(_REMOVE_OUTAGE)
        progress.all_removed = all_removed
        return all_removed


def _room_of(arguments: Mapping[str, Any]) -> RoomId:
    return RoomId(int(arguments["room_id"]))


def _subscription_of(arguments: Mapping[str, Any]) -> tuple[RoomId, SubscriptionId]:
    subscription = SubscriptionId(arguments["subscription_id"])
    room = _room_of(arguments)
    if room_of(subscription) != room:
        raise ValueError(f"subscription {subscription} is not of room {room}")
    return room, subscription
