"""Define the port to lease messages from, and lease them from PostgreSQL: the outbox itself.

Rows that were leased stay in the index while a snapshot may see them. While a queue has more than a
request asks for, each lease statement starts where the one before ended. A scan of the whole queue
once a second finds what was committed late. No consumer is answered that its queue is empty before
such a scan.
"""

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Final, Generic, Protocol, Self, TypeVar

from delivery.pull.target import PullTarget, access_error
from delivery.pull.wait_queue import LeaseOutcome, LeaseRequest
from rooms.db.leases.acquire import AcquireRequest, AcquireResult, LeasedRow, acquire
from rooms.db.leases.release import LeaseQueries
from rooms.db.queue.orphans import sideline_without_message
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.watermarks import NO_WATERMARKS, DueWatermarks, Watermarks
from rooms.errors import TransientError
from rooms.outages import OUTAGES

FULL_SCAN_INTERVAL_US: Final = 1_000_000
VISIBILITY_LAG_US: Final = 100_000
"""The delay after which a message of higher priority that is published now may become visible."""
MAX_QUEUES: Final = 1000
_ORPHANS_OUTAGE: Final = "sidelining deliveries without a message failed"
LOOKAHEAD_S: Final = 2.0
"""The time by which a poll looks ahead for what comes due: longer than to the next poll."""
_TIMER_SLACK_S: Final = 0.001
"""A poll that comes a moment too early finds nothing, and is not notified before the next one."""

TargetT = TypeVar("TargetT", bound=Hashable)


class LeaseWatermarks(Generic[TargetT]):
    """Keep the low-water marks of the queues that one process leases from."""

    def __init__(self) -> None:
        self._marks: dict[TargetT, tuple[Watermarks, int]] = {}

    def lower_bounds(self, key: TargetT) -> DueWatermarks:
        """Return the due time, per priority, at which the next scan of this queue starts."""
        found = self._marks.get(key)
        return NO_WATERMARKS if found is None else found[0].bounds

    def advance(self, key: TargetT, bounds: DueWatermarks, result: AcquireResult) -> bool:
        """Record a scan that started at `bounds`; return whether there may be more than it saw."""
        found = self._marks.pop(key, None)
        if not result.has_more or result.last is None:
            return result.has_more or bounds is not NO_WATERMARKS
        full_scan_us = result.at_us if found is None or bounds is NO_WATERMARKS else found[1]
        if result.at_us - full_scan_us < FULL_SCAN_INTERVAL_US:
            priority, due_us = result.last
            marks = Watermarks(bounds)
            marks.advance(result.at_us - VISIBILITY_LAG_US, reached=priority, reached_us=due_us)
            marks.raise_to(bounds)
            self._marks[key] = marks, full_scan_us
            if len(self._marks) > MAX_QUEUES:
                del self._marks[next(iter(self._marks))]
        return True


Notify = Callable[[Iterable[SubscriptionId]], None]
"""Notifies consumers that these subscriptions may have messages, or never will."""


class LeaseSource(Protocol):
    """Lease messages of PULL subscriptions. Leaving the context leaves nothing with the process."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def acquire(
        self, requests: Sequence[LeaseRequest[PullTarget]]
    ) -> list[LeaseOutcome[LeasedRow]]:
        """Lease what is there. StorageUnavailableError, StorageRefusedError: as for a pull."""
        ...

    async def find_due(self, keys: Collection[PullTarget]) -> Collection[SubscriptionId]:
        """Return the subscriptions among these whose consumers must be notified."""
        ...

    def on_no_polls(self, key: PullTarget) -> None:
        """Record that no poll waits there any more."""
        ...

    def on_config_change(self, rooms: frozenset[RoomId]) -> None:
        """Record that settings of these rooms (empty: any) changed.

        Subscriptions may be paused or deleted.
        """
        ...


class PostgresSource:
    """Lease from the outbox; a `LeaseSource`."""

    def __init__(
        self, lease_writers: Sequence[LogWriter], lease_store: LeaseQueries, notify: Notify
    ) -> None:
        """Use each of `lease_writers` for one statement at a time.

        `notify` is called when something becomes due that a poll has seen coming.
        """
        self._lease_writers = list(lease_writers)
        self._lease_store = lease_store
        self._notify = notify
        self._due_timers: dict[SubscriptionId, asyncio.TimerHandle] = {}
        self._watermarks: LeaseWatermarks[PullTarget] = LeaseWatermarks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Cancel the timers; a process holds nothing but its leases."""
        for timer in self._due_timers.values():
            timer.cancel()

    async def acquire(
        self, requests: Sequence[LeaseRequest[PullTarget]]
    ) -> list[LeaseOutcome[LeasedRow]]:
        """Lease what is due, all in one statement."""
        lows = [self._watermarks.lower_bounds(request.key) for request in requests]
        writer = self._lease_writers.pop()
        try:
            taken = await acquire(
                writer,
                [
                    AcquireRequest(
                        request.key.to_row(),
                        request.max_messages,
                        request.lease_ms,
                        low,
                        request.holder,
                    )
                    for request, low in zip(requests, lows, strict=True)
                ],
            )
            orphans = [
                (request.key.room, one)
                for found, request in zip(taken, requests, strict=True)
                for one in found.orphans
            ]
            if orphans:
                try:
                    await sideline_without_message(writer, orphans)
                except TransientError as exc:
                    # What was leased must reach its consumers; the next call finds the orphans.
                    OUTAGES.record_failure(exc, _ORPHANS_OUTAGE)
                else:
                    OUTAGES.record_success(_ORPHANS_OUTAGE)
        finally:
            self._lease_writers.append(writer)
        return [
            LeaseOutcome(
                found.rows,
                self._watermarks.advance(request.key, low, found),
                access_error(found.access, request.key),
            )
            for found, low, request in zip(taken, lows, requests, strict=True)
        ]

    async def find_due(self, keys: Collection[PullTarget]) -> Collection[SubscriptionId]:
        """Return the subscriptions with something due.

        Subscriptions with something due soon are notified when it is.
        """
        found = await self._lease_store.due_in(
            {(key.room, key.subscription) for key in keys}, ahead_s=LOOKAHEAD_S
        )
        loop = asyncio.get_running_loop()
        for subscription, wait_s in found.items():
            if wait_s > 0:
                if (before := self._due_timers.get(subscription)) is not None:
                    before.cancel()
                self._due_timers[subscription] = loop.call_later(
                    wait_s + _TIMER_SLACK_S, self._on_due, subscription
                )
        return [subscription for subscription, wait_s in found.items() if wait_s <= 0]

    def _on_due(self, subscription: SubscriptionId) -> None:
        del self._due_timers[subscription]
        self._notify([subscription])

    def on_no_polls(self, key: PullTarget) -> None:
        """Do nothing: nothing is held for polls."""

    def on_config_change(self, rooms: frozenset[RoomId]) -> None:
        """Do nothing: every lease statement checks the settings."""
