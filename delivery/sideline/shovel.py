"""Shovel or purge deliveries of a sideline: selected in PostgreSQL, moved in batches.

take the entry (stamped) ──► one statement (`sidelined`, g → `queued`, g + 1) ──► delete the entry
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.jobs import sleep_unless_stopped
from delivery.maintenance.task import ShouldContinue
from delivery.sideline.magazines import SidelineMagazineCache
from rooms.db.connection import transaction
from rooms.db.job_progress import JobRun
from rooms.db.sideline.entries import EntryRef
from rooms.db.sideline.queries import (
    SidelineFilter,
    SidelinePosition,
    SidelineScan,
    scan_sideline,
)
from rooms.db.sideline.shovel import ShovelOutcome, ShovelQueries
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, room_of
from rooms.domain.magazine import Slot
from rooms.domain.rate_limiter import RateLimiter
from rooms.domain.state_machine import Reason, SubscriptionType
from rooms.errors import MagazineMissingError

MAX_CONCURRENCY: Final = 16
MAX_RATE_PER_S: Final = 100_000
MAX_SHOVELS: Final = 3
"""Number of scheduled shovels of a delivery; after that only a request shovels it."""
SHOVEL_BATCH: Final = 500

MoveBatch = Callable[[Sequence[EntryRef]], Awaitable[Counter[str] | None]]
OnProgress = Callable[[Counter[str]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShovelRequest:
    """Select deliveries of a sideline to shovel or purge, and how fast; the arguments of a job."""

    subscription: SubscriptionId
    selection: SidelineFilter
    rate_per_s: float | None = None
    """None: without a limit."""
    concurrency: int = 4
    """Batches moved at a time."""
    max_shovels: int = MAX_SHOVELS
    """Deliveries that were shoveled this many times stay."""

    @property
    def room(self) -> RoomId:
        """Return the subscription's room."""
        return room_of(self.subscription)

    def to_arguments(self) -> dict[str, Any]:
        """Return the job's arguments, as JSON."""
        selection = self.selection
        arguments = {
            "room_id": self.room,
            "subscription_id": self.subscription,
            "since": selection.since and selection.since.isoformat(),
            "until": selection.until and selection.until.isoformat(),
            "reason": selection.reason,
            "event_type": selection.event_type,
            "error": selection.error,
            "correlation_ids": list(selection.correlation_ids) or None,
            "ordering_keys": list(selection.ordering_keys) or None,
            "business_keys": list(selection.business_keys) or None,
            "delivery_ids": list(selection.deliveries) or None,
            "rate_per_s": self.rate_per_s,
            "concurrency": self.concurrency,
            "max_shovels": self.max_shovels,
        }
        return {name: value for name, value in arguments.items() if value is not None}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "ShovelRequest":
        """Parse a job's arguments. ValueError, KeyError: they are invalid."""
        reason = arguments.get("reason")
        return cls(
            subscription=SubscriptionId(arguments["subscription_id"]),
            selection=SidelineFilter(
                since=_parse_time(arguments.get("since")),
                until=_parse_time(arguments.get("until")),
                reason=None if reason is None else Reason(reason),
                event_type=arguments.get("event_type"),
                error=arguments.get("error"),
                correlation_ids=tuple(arguments.get("correlation_ids") or ()),
                ordering_keys=tuple(arguments.get("ordering_keys") or ()),
                business_keys=tuple(arguments.get("business_keys") or ()),
                deliveries=tuple(DeliveryId(one) for one in arguments.get("delivery_ids") or ()),
            ),
            rate_per_s=arguments.get("rate_per_s"),
            concurrency=int(arguments.get("concurrency", 4)),
            max_shovels=int(arguments.get("max_shovels", MAX_SHOVELS)),
        )


def _parse_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


@dataclass(slots=True)
class SidelineWalk:
    """Hold how far a request has come in its sideline, to go on there in the next time slice."""

    after: SidelinePosition | None = None


class SidelineShovel:
    """Run shovel requests. Errors are those of PostgreSQL and the magazine; moved rows stay moved.

    A run after a crash starts at the front: deliveries that were moved are not there any more.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        shovels: ShovelQueries,
        magazine_cache: SidelineMagazineCache,
        *,
        on_queued: Callable[[SubscriptionType, SubscriptionId], None],
        batch: int = SHOVEL_BATCH,
    ) -> None:
        """Create it; `on_queued` is called after each commit that queued deliveries."""
        self._engine = engine
        self._shovels = shovels
        self._magazine_cache = magazine_cache
        self._on_queued = on_queued
        self._batch = batch

    async def shovel(
        self,
        request: ShovelRequest,
        should_continue: ShouldContinue,
        on_progress: OnProgress,
        *,
        limiter: RateLimiter,
        requested_at: datetime,
        run: JobRun | None = None,
        walk: SidelineWalk | None = None,
    ) -> bool:
        """Queue the selected deliveries again; return whether the request is finished.

        Deliveries sidelined after `requested_at` are excluded, or one that fails at once would be
        shoveled for ever. Reports each batch to `on_progress`; the job of `run` has counted it
        before. `limiter` has the request's rate, and is the same one when the request is continued.
        So is `walk`, unless a step of it has failed.
        """

        async def move(refs: Sequence[EntryRef]) -> Counter[str] | None:
            results = await self._shovels.shovel(refs, max_shovels=request.max_shovels, run=run)
            if results is None:
                return None
            moved = [
                ref
                for ref, (outcome, _) in zip(refs, results, strict=True)
                if outcome in {ShovelOutcome.QUEUED, ShovelOutcome.EXPIRED}
            ]
            await self._delete_entries(request.subscription, moved)
            for kind in {
                kind
                for outcome, kind in results
                if outcome is ShovelOutcome.QUEUED and kind is not None
            }:
                self._on_queued(SubscriptionType(kind), request.subscription)
            return Counter(outcome.value for outcome, _ in results)

        return await self._move_pages(
            request,
            should_continue,
            on_progress,
            limiter=limiter,
            requested_at=requested_at,
            max_shovels=request.max_shovels,
            move=move,
            run=run,
            walk=walk or SidelineWalk(),
        )

    async def purge(
        self,
        request: ShovelRequest,
        should_continue: ShouldContinue,
        on_progress: OnProgress,
        *,
        limiter: RateLimiter,
        requested_at: datetime,
        run: JobRun | None = None,
        walk: SidelineWalk | None = None,
    ) -> bool:
        """End the selected deliveries as `purged`; otherwise as `shovel`."""

        async def move(refs: Sequence[EntryRef]) -> Counter[str] | None:
            purged = await self._shovels.purge(refs, run=run)
            if purged is None:
                return None
            await self._delete_entries(request.subscription, purged)
            return Counter({"purged": len(purged), "stale": len(refs) - len(purged)})

        return await self._move_pages(
            request,
            should_continue,
            on_progress,
            limiter=limiter,
            requested_at=requested_at,
            max_shovels=None,
            move=move,
            run=run,
            walk=walk or SidelineWalk(),
        )

    async def _move_pages(
        self,
        request: ShovelRequest,
        should_continue: ShouldContinue,
        on_progress: OnProgress,
        *,
        limiter: RateLimiter,
        requested_at: datetime,
        max_shovels: int | None,
        move: MoveBatch,
        run: JobRun | None,
        walk: SidelineWalk,
    ) -> bool:
        until = request.selection.until
        selection = replace(
            request.selection, until=requested_at if until is None else min(until, requested_at)
        )
        slots = asyncio.Semaphore(request.concurrency)
        is_over = False

        async def move_batch(refs: Sequence[EntryRef]) -> None:
            nonlocal is_over
            try:
                await self._take_entries(request.subscription, refs)
                counts = await move(refs)
                if counts is None:
                    is_over = True
                else:
                    await on_progress(counts)
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                while should_continue() and not is_over:
                    scan = await self._scan(
                        request, selection, walk.after, limiter.batch_size(self._batch)
                    )
                    page = scan.found
                    chosen = [
                        one.ref
                        for one in page
                        if max_shovels is None or one.shovel_count < max_shovels
                    ]
                    # Before anything of the page is counted: it is read again if this ends here.
                    if chosen and not await sleep_unless_stopped(
                        limiter.delay_s(), should_continue
                    ):
                        return False
                    if skipped := len(page) - len(chosen):
                        if run is not None and not await self._shovels.record_skipped(run, skipped):
                            return False
                        await on_progress(Counter({ShovelOutcome.TOO_OFTEN.value: skipped}))
                    if chosen:
                        limiter.take(len(chosen))
                        await slots.acquire()
                        group.create_task(move_batch(chosen))
                    if scan.further is None:
                        break
                    walk.after = scan.further
                else:
                    return False
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        return not is_over

    async def _scan(
        self,
        request: ShovelRequest,
        selection: SidelineFilter,
        after: SidelinePosition | None,
        limit: int,
    ) -> SidelineScan:
        async with transaction(self._engine) as connection:
            return await scan_sideline(
                connection, request.room, request.subscription, selection, after=after, limit=limit
            )

    async def _take_entries(self, subscription: SubscriptionId, refs: Sequence[EntryRef]) -> None:
        # The row decides, whether its entry exists or not. The stamp lets a sweeper find entries of
        # a shovel that died.
        magazine = await self._magazine_cache.get(subscription)
        slots = _slots(refs)
        if magazine is not None and slots:
            try:
                await magazine.take(slots)
            except MagazineMissingError:
                self._magazine_cache.invalidate(subscription)

    async def _delete_entries(self, subscription: SubscriptionId, refs: Sequence[EntryRef]) -> None:
        magazine = await self._magazine_cache.get(subscription)
        slots = _slots(refs)
        if magazine is not None and slots:
            try:
                await magazine.delete(slots)
            except MagazineMissingError:
                self._magazine_cache.invalidate(subscription)


def _slots(refs: Sequence[EntryRef]) -> list[Slot]:
    return [ref.slot for ref in refs if ref.slot is not None]
