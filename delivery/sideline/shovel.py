"""Shovel or purge deliveries of a sideline: selected in PostgreSQL, moved in batches.

take the entry (stamped) ──► one statement (`sidelined`, g → `queued`, g + 1) ──► delete the entry

A row that another process has locked, such as the loader for the moment in which it records slots,
is tried again for about a second. Then it stays in the sideline, and is counted as `busy`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Protocol

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance.jobs import sleep_unless_stopped
from delivery.maintenance.restore import LOCK_RETRY_S, MAX_LOCK_TRIES
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
from rooms.db.sideline.shovel import MoveResult, ShovelOutcome, ShovelQueries
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

_MOVED: Final = frozenset({ShovelOutcome.QUEUED, ShovelOutcome.EXPIRED, ShovelOutcome.PURGED})

OnProgress = Callable[[Counter[str]], Awaitable[None]]


class _MoveBatch(Protocol):
    """Move deliveries. Only with `pass_locked` are locked ones counted. None: the run is over."""

    async def __call__(
        self, refs: Sequence[EntryRef], *, pass_locked: bool
    ) -> list[MoveResult] | None: ...


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


@dataclass(frozen=True, slots=True)
class _ShovelBatch:
    """Hold deliveries to move, and how often they were tried in vain because they were locked."""

    refs: Sequence[EntryRef]
    tries: int = 0


@dataclass(slots=True)
class SidelineWalk:
    """Hold how far a request has come in its sideline, to go on there in the next time slice."""

    after: SidelinePosition | None = None
    is_at_end: bool = False
    """All entries were read."""
    locked: list[_ShovelBatch] = field(default_factory=list)
    """Parts of batches that were locked when the time slice ended: not counted yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """Hold what a time slice of a request works with."""

    request: ShovelRequest
    until: datetime
    """Deliveries that were sidelined later are excluded."""
    should_continue: ShouldContinue
    on_progress: OnProgress
    limiter: RateLimiter
    max_shovels: int | None
    move: _MoveBatch
    run: JobRun | None
    walk: SidelineWalk


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
        max_lock_tries: int = MAX_LOCK_TRIES,
    ) -> None:
        """Create it; `on_queued` is called after each commit that queued deliveries."""
        self._engine = engine
        self._shovels = shovels
        self._magazine_cache = magazine_cache
        self._on_queued = on_queued
        self._batch = batch
        self._max_lock_tries = max_lock_tries

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

        async def move(refs: Sequence[EntryRef], *, pass_locked: bool) -> list[MoveResult] | None:
            return await self._shovels.shovel(
                refs, max_shovels=request.max_shovels, pass_locked=pass_locked, run=run
            )

        return await self._move_pages(
            _Slice(
                request=request,
                until=requested_at,
                should_continue=should_continue,
                on_progress=on_progress,
                limiter=limiter,
                max_shovels=request.max_shovels,
                move=move,
                run=run,
                walk=walk or SidelineWalk(),
            )
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

        async def move(refs: Sequence[EntryRef], *, pass_locked: bool) -> list[MoveResult] | None:
            return await self._shovels.purge(refs, pass_locked=pass_locked, run=run)

        return await self._move_pages(
            _Slice(
                request=request,
                until=requested_at,
                should_continue=should_continue,
                on_progress=on_progress,
                limiter=limiter,
                max_shovels=None,
                move=move,
                run=run,
                walk=walk or SidelineWalk(),
            )
        )

    async def _move_pages(self, current: _Slice) -> bool:
        slots = asyncio.Semaphore(current.request.concurrency)
        walk, is_over = current.walk, False

        async def run_batch(batch: _ShovelBatch) -> None:
            nonlocal is_over
            try:
                is_over = not await self._move_batch(current, batch) or is_over
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                locked, walk.locked = walk.locked, []
                for batch in locked:
                    await slots.acquire()
                    group.create_task(run_batch(batch))
                while not walk.is_at_end:
                    if is_over or not current.should_continue():
                        return False
                    scan = await self._scan(current)
                    chosen = await self._choose(current, scan)
                    if chosen is None:
                        return False
                    if chosen:
                        current.limiter.take(len(chosen))
                        await slots.acquire()
                        group.create_task(run_batch(_ShovelBatch(chosen)))
                    walk.after, walk.is_at_end = scan.further, scan.further is None
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        return not is_over and not walk.locked

    async def _choose(self, current: _Slice, scan: SidelineScan) -> list[EntryRef] | None:
        """Return what of a page must be moved, and count the rest; None: the slice is over.

        Nothing of the page is counted in that case: it is read again.
        """
        most, run = current.max_shovels, current.run
        chosen = [one.ref for one in scan.found if most is None or one.shovel_count < most]
        if chosen and not await sleep_unless_stopped(
            current.limiter.delay_s(), current.should_continue
        ):
            return None
        if skipped := len(scan.found) - len(chosen):
            if run is not None and not await self._shovels.record_skipped(run, skipped):
                return None
            await current.on_progress(Counter({ShovelOutcome.TOO_OFTEN.value: skipped}))
        return chosen

    async def _move_batch(self, current: _Slice, batch: _ShovelBatch) -> bool:
        """Move a batch, and try again what of it is locked; return False if the run is over.

        What is still locked when the time slice ends is left to the walk.
        """
        refs, tries = batch.refs, batch.tries
        await self._take_entries(current.request.subscription, refs)
        while refs:
            passes = tries >= self._max_lock_tries
            results = await current.move(refs, pass_locked=passes)
            if results is None:
                return False
            await self._end_batch(current.request.subscription, refs, results)
            busy = [] if passes else _busy(refs, results)
            counts = Counter(result.outcome.value for result in results)
            counts[ShovelOutcome.BUSY.value] -= len(busy)
            await current.on_progress(+counts)
            refs, tries = busy, tries + 1
            if refs and not await sleep_unless_stopped(LOCK_RETRY_S, current.should_continue):
                current.walk.locked.append(_ShovelBatch(refs, tries))
                break
        return True

    async def _scan(self, current: _Slice) -> SidelineScan:
        request, until = current.request, current.request.selection.until
        selection = replace(
            request.selection, until=current.until if until is None else min(until, current.until)
        )
        async with transaction(self._engine) as connection:
            return await scan_sideline(
                connection,
                request.room,
                request.subscription,
                selection,
                after=current.walk.after,
                limit=current.limiter.batch_size(self._batch),
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

    async def _end_batch(
        self,
        subscription: SubscriptionId,
        refs: Sequence[EntryRef],
        results: Sequence[MoveResult],
    ) -> None:
        """Delete the entries of deliveries that were moved, and report those that were queued."""
        moved = [
            replace(ref, slot=result.slot)
            for ref, result in zip(refs, results, strict=True)
            if result.outcome in _MOVED
        ]
        await self._delete_entries(subscription, moved)
        for kind in {
            result.subscription_type
            for result in results
            if result.outcome is ShovelOutcome.QUEUED and result.subscription_type is not None
        }:
            self._on_queued(SubscriptionType(kind), subscription)

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


def _busy(refs: Sequence[EntryRef], results: Sequence[MoveResult]) -> list[EntryRef]:
    return [
        ref
        for ref, result in zip(refs, results, strict=True)
        if result.outcome is ShovelOutcome.BUSY
    ]
