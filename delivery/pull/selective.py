"""Lease only the messages that match a selector, and drain their copies from a broker.

A queue is scanned in windows, in its order, without leasing or locking. Then exactly the matching
messages are leased. The others stay for other consumers, and are not scanned again before the next
full scan. A full scan starts at most once a second and takes at most a twentieth of the time. It
finds what was committed behind the previous scan.

With an external broker, leased messages leave outdated copies in its queue. They do no harm, but in
a queue that is only read by selector they would stay. So the first copies are checked now and then:
outdated ones are settled, the others go back.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakValueDictionary

from delivery.brokers.bounded_reads import read_batches
from delivery.pull.target import PullSelection, PullTarget, Selector, access_error
from delivery.pull.wait_queue import LeaseOutcome, LeaseRequest
from rooms.db.leases.acquire import MAX_BYTES, LeasedRow, SubscriptionAccess
from rooms.db.leases.acquire_copies import CopyLeaseRequest, finished_copies, lease_copies
from rooms.db.leases.scan import (
    NIL_ID,
    PRIORITY_LEVELS,
    START,
    DuePosition,
    ScannedMessage,
    ScanWindow,
    scan,
)
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import RoomsError
from rooms.outages import OUTAGES
from rooms.ports import Broker

FULL_SCAN_INTERVAL_S: Final = 1.0
VISIBILITY_LAG_US: Final = 100_000
"""The delay after which a message that is published now may become visible."""
MAX_CURSORS: Final = 1000
PAUSE_BYTES: Final = 256 * 1024
"""Payloads that are matched before others go on: each may be decoded for a selector."""
_FULL_SCAN_SHARE: Final = 20
_DRAIN_OUTAGE: Final = "tries to drain outdated copies from the broker failed"
DRAIN_DELAY_S: Final = 5.0
DRAIN_CREDIT: Final = 1000
"""The number of copies that are checked; others wait until those are leased or drained."""
QUIET_S: Final = 0.5
"""The silence after which all copies have come."""
DRAIN_MAX_S: Final = 2.0
"""The longest time for which copies that can be leased are withheld from other consumers."""
MAX_DRAINS: Final = 8
"""The most queues that are drained at a time, of all organisations: each is a connection."""


class ScanCursor:
    """Track how much of a queue was scanned for a selector. The caller passes times in seconds."""

    def __init__(self, *, visibility_lag_us: int = VISIBILITY_LAG_US, rescan: bool = True) -> None:
        """Scan the last `visibility_lag_us` again; with `rescan`, the whole queue now and then."""
        self._visibility_lag_us = visibility_lag_us
        self._rescan = rescan
        self.positions: dict[int, DuePosition] = {}
        self._in_progress = False
        self._is_full_scan = True
        self._begun_s = 0.0
        self._next_full_scan_s = 0.0

    def begin_window(self, now_s: float) -> None:
        """Begin the next window, or the first one of another scan."""
        if self._in_progress:
            return
        self._in_progress = True
        self._begun_s = now_s
        self._is_full_scan = now_s >= self._next_full_scan_s and (
            self._rescan or not self.positions
        )
        if self._is_full_scan:
            self.positions = {}

    def advance(
        self, found: Sequence[ScannedMessage], *, exhausted: bool, at_us: int, now_s: float
    ) -> None:
        """Record the messages that were considered; `exhausted`: none waits behind them."""
        if exhausted:
            self.positions = dict.fromkeys(
                range(PRIORITY_LEVELS), (at_us - self._visibility_lag_us, NIL_ID)
            )
            self._in_progress = False
            if self._is_full_scan:
                self._next_full_scan_s = now_s + max(
                    FULL_SCAN_INTERVAL_S, _FULL_SCAN_SHARE * (now_s - self._begun_s)
                )
        elif found:
            last = found[-1]
            for level in range(last.level + 1, PRIORITY_LEVELS):
                self.positions[level] = max(
                    self.positions.get(level, START), (at_us - self._visibility_lag_us, NIL_ID)
                )
            self.positions[last.level] = (last.due_us, last.delivery)


class SelectiveLeaser:
    """Lease by selector, one statement at a time."""

    def __init__(self, writer: LogWriter, *, on_stale_copies: Callable[[PullTarget], None]) -> None:
        """Call `on_stale_copies` for queues in which a broker has copies of leased messages."""
        self._writer = writer
        self._on_stale_copies = on_stale_copies
        self._loop = asyncio.get_running_loop()
        self._cursors: dict[PullSelection, ScanCursor] = {}

    async def acquire(
        self, request: LeaseRequest[PullSelection], selector: Selector
    ) -> LeaseOutcome[LeasedRow]:
        """Lease the matches of one window; `has_more`: there may be another window."""
        key = request.key.target
        cursor = self._cursor(request.key)
        cursor.begin_window(self._loop.time())
        queue = (key.room, key.subscription, key.organisation)
        window = await scan(self._writer, queue, selector.event_types, cursor.positions)
        if (
            error := access_error(window.access, key)
        ) is not None or window.access is not SubscriptionAccess.OPEN:
            return LeaseOutcome(error=error)
        chosen, considered = await _select_matches(selector, window, request.max_messages)
        whole = window.is_last and considered == len(window.messages)
        cursor.advance(
            window.messages[:considered],
            exhausted=whole,
            at_us=window.at_us,
            now_s=self._loop.time(),
        )
        if not chosen:
            return LeaseOutcome(has_more=not whole)
        copies = [_as_copy(key, found) for found in chosen]
        (leased,) = await lease_copies(
            self._writer,
            [CopyLeaseRequest(key.to_row(), request.lease_ms, copies, 0, request.holder)],
        )
        if leased.rows and self._writer.broker_mode.is_relayed:
            self._on_stale_copies(key)
        return LeaseOutcome(leased.rows, has_more=not whole, error=access_error(leased.access, key))

    def _cursor(self, selection: PullSelection) -> ScanCursor:
        cursor = self._cursors.pop(selection, None) or ScanCursor()
        self._cursors[selection] = cursor
        if len(self._cursors) > MAX_CURSORS:
            del self._cursors[next(iter(self._cursors))]
        return cursor


async def _select_matches(
    selector: Selector, window: ScanWindow, max_messages: int
) -> tuple[list[ScannedMessage], int]:
    """Return the matching messages, and how many were considered for them."""
    chosen: list[ScannedMessage] = []
    size = 0
    passed = 0
    for considered, found in enumerate(window.messages):
        if passed >= PAUSE_BYTES:
            passed = 0
            await asyncio.sleep(0)
        passed += len(found.payload or b"")
        if found.event_type is None or found.payload is None:
            continue
        if not selector.matches(found.event_type, found.headers, found.payload):
            continue
        size += len(found.payload)
        if len(chosen) == max_messages or (chosen and size > MAX_BYTES):
            return chosen, considered
        chosen.append(found)
    return chosen, len(window.messages)


def _as_copy(key: PullTarget, found: ScannedMessage) -> DeliveryTask:
    # A lease reads only its version and what was published; the rest comes from the rows.
    return DeliveryTask(
        room_id=key.room,
        delivery_id=found.delivery,
        message_id=found.message,
        subscription_id=SubscriptionId(key.subscription),
        kind=SubscriptionType.PULL,
        generation=found.generation,
        attempt=found.attempt,
        delay_ms=0,
        priority=found.priority,
        event_type=found.event_type or "",
        event_version=0,
        correlation_id="",
        published_ms=0,
        expires_ms=None,
        subscription_version=None,
        deadline=float("inf"),
        headers=found.headers,
        payload=found.payload or b"",
    )


class StaleCopyDrain:
    """Drain outdated copies from queues, few at a time, of one organisation one after another."""

    def __init__(self, broker: Broker, writer: LogWriter) -> None:
        self._broker = broker
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._timers: dict[PullTarget, asyncio.TimerHandle] = {}
        self._in_line: set[PullTarget] = set()
        """Queues that wait for their organisation's turn."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: WeakValueDictionary[OrganisationId, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(MAX_DRAINS)

    def schedule(self, key: PullTarget) -> None:
        """Drain this queue after a while, because it has outdated copies."""
        if key not in self._timers and key not in self._in_line:
            self._timers[key] = self._loop.call_later(DRAIN_DELAY_S, self._begin, key)

    async def close(self) -> None:
        """Stop the work under way; outdated copies may be left."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def drain_once(self, key: PullTarget) -> int:
        """Settle outdated copies among the first ones of a queue; return how many there were.

        A queue that is gone has none: it would look as if the broker were away.
        """
        settled = 0
        if not await self._broker.depth(key.subscription):
            return settled
        consumer = self._broker.consume(credit=DRAIN_CREDIT, subscription=key.subscription)
        async with consumer:
            async for copies in read_batches(consumer, quiet_s=QUIET_S, within_s=DRAIN_MAX_S):
                done = await finished_copies(self._writer, copies)
                await consumer.settle(done)
                settled += len(done)
        return settled

    def _begin(self, key: PullTarget) -> None:
        del self._timers[key]
        self._in_line.add(key)
        task = asyncio.create_task(self._drain_and_report(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain_and_report(self, key: PullTarget) -> None:
        # Each drain is a connection to the broker, and withholds copies from other consumers.
        turn = self._turns.setdefault(key.organisation, asyncio.Lock())
        try:
            async with turn, self._slots:
                self._in_line.discard(key)  # copies that come from now on need another drain
                await self.drain_once(key)
        except RoomsError as exc:
            OUTAGES.record_failure(exc, _DRAIN_OUTAGE)
            self.schedule(key)
        else:
            OUTAGES.record_success(_DRAIN_OUTAGE)
