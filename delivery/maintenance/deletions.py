"""Deletion of subscriptions and rooms, a batch at a time; another process can continue it.

A deletion walks over the deliveries and cancels unfinished and sidelined ones; attempts under way
are left to end. A publish that was under way when the deletion was marked may still add deliveries.
So the walk is repeated until one that began after all such publishes were over finds nothing. Then
the subscription's external parts are removed: its sideline magazine and, once it has no consumer,
its broker queue.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from delivery.maintenance.jobs import JobHandler
from delivery.maintenance.task import ShouldContinue
from delivery.maintenance.usage import CountUsage
from rooms.db.jobs.delete import BATCH, COUNTED_TABLES, START, DeleteQueries
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import JobId, RoomId, SubscriptionId, room_of
from rooms.domain.job import JobKind
from rooms.errors import BrokerUnavailableError, MagazineUnavailableError
from rooms.outages import OUTAGES

_log = logging.getLogger(__name__)

_REMOVE_OUTAGE: Final = "external cleanup of deleted subscriptions failed"
SETTLE_S: Final = 5.0
"""Time in which publishes that do not know of the deletion usually end; then it is looked up."""

RemoveExternal = Callable[[SubscriptionId], Awaitable[bool]]
"""Remove a deleted subscription's external parts. False: one is in use, to be removed later."""


class DeleteJob:
    """Runs deletion jobs, and keeps in memory which ones it has walked through."""

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
        self._queries = queries
        self._remove_external = remove_external
        self._count_usage = count_usage
        self._destination = destination
        self._settle_s = settle_s
        self._batch = batch
        self._first_seen: dict[JobId, datetime] = {}
        self._walked_once: set[JobId] = set()
        self._confirmed_empty: set[JobId] = set()
        self._waiting_for_export: set[JobId] = set()

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
        if job.id in self._walked_once and job.age_s < self._settle_s:
            deletion.close()
            return False
        done = await deletion
        if done:
            self._first_seen.pop(job.id, None)
            self._walked_once.discard(job.id)
            self._confirmed_empty.discard(job.id)
        return done

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
            raise ValueError("the subscription is neither deleted nor terminated")
        if job.id not in self._walked_once and should_continue():
            await self._job_queue.record_progress(
                job, done=0, total=await self._queries.count(room, subscription)
            )
        return await self._cancel_all(
            job, room, subscription, should_continue
        ) and await self._external_removed([subscription], should_continue)

    async def _delete_room(
        self, job: OpenJob, room: RoomId, should_continue: ShouldContinue
    ) -> bool:
        deleting = await self._queries.room_deleting(room)
        if deleting is None:
            return True  # an earlier run deleted it and died before it finished the job
        if not deleting:
            raise ValueError("the room is not marked as deleted")
        if not await self._cancel_all(job, room, None, should_continue):
            return False
        if self._remove_external is not None and not await self._external_removed(
            await self._queries.subscriptions(room), should_continue
        ):
            return False
        if self._count_usage is not None and not await self._count_usage(should_continue):
            return False
        # The export would report the rows as missing, also one that is run by hand.
        if awaited := await self._queries.awaited_exports(room, self._destination):
            self._log_wait(job, room, awaited)
            return False
        self._waiting_for_export.discard(job.id)
        if not await self._delete_rows(job, room, should_continue):
            return False
        await self._queries.delete_room(room)
        return True

    def _log_wait(self, job: OpenJob, room: RoomId, destinations: Sequence[str]) -> None:
        """Log once why the deletion does not go on."""
        if job.id not in self._waiting_for_export:
            self._waiting_for_export.add(job.id)
            _log.warning(
                "room %s is deleted (job %s) as soon as its log is exported to %s",
                room,
                job.id,
                ", ".join(destinations),
            )

    async def _delete_rows(
        self, job: OpenJob, room: RoomId, should_continue: ShouldContinue
    ) -> bool:
        """Delete the room's rows in every table; return whether all are deleted."""
        done, total = job.done, job.total
        if total is None and should_continue():
            total = await self._queries.count(room, None)
            await self._job_queue.record_progress(job, total=total)
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
        if job.id in self._confirmed_empty:
            return True
        seen_at = self._first_seen.setdefault(job.id, job.seen_at)
        is_settled = job.age_s >= self._settle_s and not await self._job_queue.has_older_publish(
            seen_at
        )
        first = job.id not in self._walked_once
        after, seen, clean = START, 0, True
        while True:
            if not should_continue():
                return False
            page = await self._queries.cancel(
                room,
                subscription,
                after,
                terminated=job.kind == JobKind.TERMINATE_SUBSCRIPTION,
                limit=self._batch,
            )
            if page.last is None:
                break
            after, seen = page.last, seen + page.scanned
            clean = clean and not page.cancelled and not page.skipped
            if first:
                await self._job_queue.record_progress(
                    job, done=None if subscription is None else seen
                )
        self._walked_once.add(job.id)
        if clean and is_settled:
            self._confirmed_empty.add(job.id)
        return job.id in self._confirmed_empty

    async def _external_removed(
        self, subscriptions: Sequence[SubscriptionId], should_continue: ShouldContinue
    ) -> bool:
        """Remove external parts; return whether all are removed. Those in use wait."""
        removed = True
        if self._remove_external is None:
            return True
        for subscription in subscriptions:
            if not should_continue():
                return False
            try:
                removed = await self._remove_external(subscription) and removed
            except (BrokerUnavailableError, MagazineUnavailableError) as exc:
                OUTAGES.record_failure(exc, _REMOVE_OUTAGE)
                return False
            OUTAGES.record_success(_REMOVE_OUTAGE)
        return removed


def _room_of(arguments: Mapping[str, Any]) -> RoomId:
    return RoomId(int(arguments["room_id"]))


def _subscription_of(arguments: Mapping[str, Any]) -> tuple[RoomId, SubscriptionId]:
    subscription = SubscriptionId(arguments["subscription_id"])
    room = _room_of(arguments)
    if room_of(subscription) != room:
        raise ValueError(f"subscription {subscription} is not of room {room}")
    return room, subscription
