"""Restore and clear jobs: walk over the deliveries of a room, a message or a subscription.

A restore's arguments: `{"room_id", "states"}`, and `"message_id"` or `"since"`; a clear's:
`{"room_id", "name"}`, and `"subscription_id"` for one subscription. A skip to now has the same as
the latter, and unblocks ordering keys after its walk. Messages that were published after the job
was created are excluded.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from delivery.maintenance.job_totals import JobTotals
from delivery.maintenance.jobs import JobHandler, sleep_unless_stopped
from delivery.maintenance.task import ShouldContinue
from rooms.db.jobs import restore
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.jobs.restore import ClearQueries, DeliveryRange, RestoreQueries
from rooms.db.queue.ordering import OrderingQueries
from rooms.domain.ids import (
    JobId,
    MessageId,
    RoomId,
    SubscriptionId,
    created_ms,
    first_id,
    id_after,
    id_before,
    room_of,
)
from rooms.domain.job import JobKind
from rooms.domain.state_machine import State

SKEW: Final = timedelta(minutes=1)
"""Largest lead of an id's time, from its publisher's machine, over PostgreSQL's."""
MAX_LOCK_TRIES: Final = 20
LOCK_RETRY_S: Final = 0.05
"""Pause between attempts at a locked row; after `MAX_LOCK_TRIES` a restore skips it."""
ROUND_PAUSE_S: Final = 0.5
"""Pause between two rounds of a clear over deliveries that were under way."""
_MAX_KEPT: Final = 10_000
"""Skips whose ordering key is remembered; one that is forgotten begins again with the first key."""

OnQueued = Callable[[SubscriptionId | None], None]
"""Called after a commit that queued work for PUSH (None) or a PULL subscription."""


class RestoreJob:
    """Run restore jobs."""

    def __init__(
        self,
        job_queue: JobQueue,
        queries: RestoreQueries,
        *,
        on_queued: OnQueued,
        batch: int = restore.BATCH,
        max_lock_tries: int = MAX_LOCK_TRIES,
    ) -> None:
        self._totals = JobTotals(job_queue)
        self._queries = queries
        self._on_queued = on_queued
        self._batch = batch
        self._max_lock_tries = max_lock_tries

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of each kind of job."""
        return {JobKind.RESTORE: self._restore}

    async def _restore(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        arguments, position, tries = job.arguments, job.position, 0
        states = frozenset(State(state) for state in arguments["states"])
        full_range = _range_of(arguments, job.created_at)
        await self._totals.record(job, lambda: self._queries.count(full_range), should_continue)
        while should_continue():
            remaining = _remaining(full_range, position)
            page = await self._queries.restore_page(
                job.id,
                position,
                remaining,
                states,
                requested_at=job.created_at,
                skip_locked=tries >= self._max_lock_tries,
                limit=self._batch,
            )
            if page is None:
                return False
            if page.push_queued:
                self._on_queued(None)
            for subscription in page.pull_queued:
                self._on_queued(subscription)
            if page.end:
                return True
            if page.last is not None:
                position, tries = {"after": page.last}, 0
                continue
            tries += 1
            if not await sleep_unless_stopped(LOCK_RETRY_S, should_continue):
                return False
        return False


class ClearJob:
    """Cancel unfinished deliveries of a room or subscription. An attempt under way ends first."""

    def __init__(
        self,
        job_queue: JobQueue,
        queries: ClearQueries,
        restore_queries: RestoreQueries,
        ordering: OrderingQueries,
        *,
        on_queued: OnQueued,
        batch: int = restore.BATCH,
        round_pause_s: float = ROUND_PAUSE_S,
    ) -> None:
        self._totals = JobTotals(job_queue)
        self._queries = queries
        self._restore_queries = restore_queries
        self._ordering = ordering
        self._on_queued = on_queued
        self._batch = batch
        self._round_pause_s = round_pause_s
        self._last_keys: dict[JobId, bytes] = {}
        """Of skips: the ordering key at which the last time slice ended."""

    def handlers(self) -> Mapping[JobKind, JobHandler]:
        """Return the handler of each kind of job."""
        return {
            JobKind.CLEAR_ROOM: self._clear,
            JobKind.CLEAR_SUBSCRIPTION: self._clear,
            JobKind.SKIP_TO_NOW: self._skip_to_now,
        }

    async def _skip_to_now(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        if not await self._clear(job, should_continue):
            return False
        # What waited behind a sidelined head is cancelled now, and what was published later comes.
        subscription = SubscriptionId(job.arguments["subscription_id"])
        after: bytes | None = self._last_keys.get(job.id, b"")
        while after is not None:
            if not should_continue():
                self._keep_key(job.id, after)
                return False
            queued, after = await self._ordering.skip_old(
                subscription, after, before=job.created_at, limit=self._batch
            )
            if queued:
                self._on_queued(None)
                self._on_queued(subscription)
        self._last_keys.pop(job.id, None)
        return True

    def _keep_key(self, job: JobId, key: bytes) -> None:
        self._last_keys.pop(job, None)
        if len(self._last_keys) >= _MAX_KEPT:  # jobs that were cancelled or failed are among them
            del self._last_keys[next(iter(self._last_keys))]
        self._last_keys[job] = key

    async def _clear(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        position = job.position
        full_range = _range_of(job.arguments, job.created_at)
        await self._totals.record(
            job, lambda: self._restore_queries.count(full_range), should_continue
        )
        while should_continue():
            remaining = _remaining(full_range, position)
            step = await self._queries.clear_page(
                job.id,
                position,
                remaining,
                requested_at=job.created_at,
                keeps_later=job.kind == JobKind.SKIP_TO_NOW,
                limit=self._batch,
            )
            if step is None:
                return False
            position = step.position
            if not step.end:
                continue
            if position is None or "first" not in position:
                return True
            if not await sleep_unless_stopped(self._round_pause_s, should_continue):
                return False
            after, until = id_before(position["first"]), id_after(position["final"])
            if not await self._queries.start_round(job.id, position, after=after, until=until):
                return False
            position = {"after": after, "until": until}
        return False


def _range_of(arguments: Mapping[str, Any], requested_at: datetime) -> DeliveryRange:
    room = RoomId(int(arguments["room_id"]))
    if (message := arguments.get("message_id")) is not None:
        if room_of(message) != room:
            raise ValueError(f"message {message} is not of room {room}")
        at_ms = created_ms(message)
        return DeliveryRange(
            room=room,
            after=id_before(first_id(at_ms)),
            until=first_id(at_ms + 1),
            message=MessageId(message),
        )
    since = arguments.get("since")
    after_ms = 0 if since is None else _ms(datetime.fromisoformat(since))
    of = arguments.get("subscription_id")
    if of is not None and room_of(of) != room:
        raise ValueError(f"subscription {of} is not of room {room}")
    return DeliveryRange(
        room=room,
        after=id_before(first_id(after_ms)),
        until=first_id(_ms(requested_at + SKEW)),
        subscription=None if of is None else SubscriptionId(of),
    )


def _remaining(full_range: DeliveryRange, position: Mapping[str, Any] | None) -> DeliveryRange:
    if position is None:
        return full_range
    return DeliveryRange(
        room=full_range.room,
        after=position["after"],
        until=position.get("until", full_range.until),
        message=full_range.message,
        subscription=full_range.subscription,
    )


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
