"""Serve one client's stream: consumers of several queues, served in turn under one credit.

A browsing stream reads what waits in a queue, and what comes later, without leasing it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, Protocol

from delivery.pull.dispatch import ConsumerHandle, ConsumerState
from delivery.pull.lease_quota import MAX_STREAM_LEASES, LeaseQuota
from delivery.pull.requests import Lease, StreamRequest
from delivery.pull.responses import message_json, peeked_json
from delivery.pull.selective import PAUSE_BYTES, ScanCursor
from delivery.pull.target import PullSelection, PullTarget, access_error
from delivery.pull.wait_queue import Consumer
from delivery.pull.waiters import Waiters
from rooms.db.leases.acquire import LeasedRow
from rooms.db.leases.scan import ScannedMessage, scan
from rooms.db.queue.delivery_properties import read_sequences
from rooms.db.writer import LogWriter
from rooms.domain.ids import KeyId

BATCH_SIZE: Final = 100
"""The most messages leased at a time, so that consumers of one queue share what comes."""
STALL_TIMEOUT_S: Final = 0.05
"""A client that does not read for this long is not interested until it does."""
SEND_TIMEOUT_S: Final = 60.0
"""A client that does not read for this long is disconnected."""
_END_TIMEOUT_S: Final = 1.0
MAX_CREDIT: Final = 1_000_000
MAX_UNSETTLED: Final = 1000
"""The number of leases above which a stream forgets those that are over."""
VISIBILITY_LAG_US: Final = 5_000_000
"""The oldest published message that may become visible only now."""
MAX_SEEN: Final = 20_000

StreamWaiters = Waiters[PullSelection, LeasedRow]


class EndReason(StrEnum):
    """Name why a stream ended."""

    GONE = "gone"
    """The client has disconnected."""
    OVER = "over"
    """Its requested duration is over."""
    SHUTDOWN = "shutdown"
    REVOKED = "revoked"
    DELETED = "deleted"
    SUSPENDED = "suspended"
    UNAVAILABLE = "unavailable"


class StreamBatch(NamedTuple):
    """Hold messages of one queue as JSON; `rows` are their leases, in the same order.

    `send_by_s`: when half of a lease is over, by the loop's time. What was not sent must go back.
    """

    target: PullTarget
    messages: Sequence[bytes]
    rows: Sequence[LeasedRow] = ()
    send_by_s: float = math.inf

    def head(self, count: int) -> "StreamBatch":
        """Return the batch with its first messages only."""
        return self._replace(messages=self.messages[:count], rows=self.rows[:count])


class PeekSource(Protocol):
    """Read messages without leasing them."""

    async def read_new(self) -> tuple[Sequence[bytes], bool]:
        """Return new messages as JSON, and whether there may be more right now."""
        ...


class Stream:
    """Serve one client: `start`, then `next` and `send` in turn, then `close`.

    The caller passes leases that are over to `on_settled`, and credit to `grant`. `close` returns
    what was leased and not sent.
    """

    def __init__(
        self,
        waiters: StreamWaiters,
        selections: Sequence[PullSelection],
        request: StreamRequest,
        *,
        credit: int,
        renews_credit: bool,
        peeks: Sequence[PeekSource],
        quota: LeaseQuota,
        holder: KeyId | None = None,
    ) -> None:
        """Lease for `selections`, or read from `peeks`, one per selection, if the stream browses.

        `renews_credit`: each settled message allows another one. `quota`: its organisation's.
        `holder`: the client's API key.
        """
        self.targets = [selection.target for selection in selections]
        self.request = request
        self.renews_credit = renews_credit
        self.tracks_leases = renews_credit or len(selections) > 1
        """Set if it must know its leases: to renew credit, or to find their subscriptions."""
        self.unsettled: dict[Lease, PullTarget] = {}
        """Leases that were sent and are not known to be over, if it tracks them."""
        self.end_reason: EndReason | None = None
        self._waiters = waiters
        self._selections = selections
        self._peeks = peeks
        self._quota = quota
        self._holder = holder
        self._credit = MAX_CREDIT if peeks else credit
        self._loop = asyncio.get_running_loop()
        self._handles: list[ConsumerHandle[Consumer[LeasedRow]]] = []
        self._notified: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._max_unsettled = MAX_UNSETTLED
        self._stalled = False
        self._lacks_room = False
        """It, or its organisation, tracks as many leases as it may."""
        self._send_timeout: asyncio.Timeout | None = None

    @property
    def needs_inspection(self) -> bool:
        """Return whether those of its leases that are over must be found.

        They would give it credit, of which it has none left, or they fill the memory, or their
        places are wanted: by itself, or by another stream of its organisation.
        """
        is_starved = self.renews_credit and self._credit <= 0
        are_wanted = is_starved or self._lacks_room or self._quota.has_waiting
        return (are_wanted and bool(self.unsettled)) or len(self.unsettled) > self._max_unsettled

    def on_inspected(self) -> None:
        """Record that the leases left are live: the next inspection is when they have doubled."""
        self._max_unsettled = max(MAX_UNSETTLED, 2 * len(self.unsettled))

    @property
    def is_gone(self) -> bool:
        """Return whether the client has disconnected."""
        return self.end_reason is EndReason.GONE

    def start(self) -> None:
        """Join the wait queues."""
        for index, selection in enumerate(self._selections):
            self._handles.append(
                self._waiters.add_reader(
                    selection,
                    lease_ms=self.request.lease_ms,
                    wake=partial(self._on_work, index),
                    priority=self.request.priority,
                    acquiring=not self._peeks,
                    holder=self._holder,
                )
            )
        self._update_interest()

    def close(self) -> None:
        """Leave the wait queues. The caller removes the leases."""
        self._quota.stop_waiting(self._on_room)
        for selection, handle in zip(self._selections, self._handles, strict=True):
            self._waiters.remove_reader(selection, handle)
        self._selections, self._handles = [], []

    def remove_leases(self, count: int) -> list[Lease]:
        """Remove so many of the leases that it tracks, which may be all, and return them."""
        removed = [self.unsettled.popitem()[0] for _ in range(min(count, len(self.unsettled)))]
        self._quota.release(len(removed))
        return removed

    def grant(self, credit: int) -> None:
        """Add credit for so many messages."""
        self._credit = min(self._credit + credit, MAX_CREDIT)
        self._update_interest()
        self._wake.set()

    def on_settled(self, leases: Sequence[Lease]) -> None:
        """Record that these leases are over."""
        done = sum(self.unsettled.pop(lease, None) is not None for lease in leases)
        if not done:
            return
        self._quota.release(done)
        if self._lacks_room and len(self.unsettled) < MAX_STREAM_LEASES:
            self._on_room()
        if self.renews_credit:
            self.grant(done)

    def on_unsent(self, leases: Sequence[Lease]) -> None:
        """Record that these leases went back, and their messages were not sent."""
        self.on_settled(leases)
        if not self.renews_credit:
            self.grant(len(leases))

    def end(self, reason: EndReason) -> None:
        """End as soon as the send under way has ended."""
        if self.end_reason is None:
            self.end_reason = reason
            self._wake.set()
            if self._send_timeout is not None:
                self._send_timeout.reschedule(self._loop.time() + _END_TIMEOUT_S)

    def on_client_gone(self) -> None:
        """End at once: the client has disconnected, or does not read."""
        self.end(EndReason.GONE)
        self.end_reason = EndReason.GONE

    async def next(self, wait_s: float) -> StreamBatch | None:
        """Return what comes next; None: nothing came in time, or it ended. Errors as for a pull."""
        deadline = self._loop.time() + wait_s
        while self.end_reason is None:
            self._wake.clear()  # first, so that a notification during the lease is not lost
            while self._notified and self._can_lease and self.end_reason is None:
                index = next(iter(self._notified))
                del self._notified[index]
                if (batch := await self._read_from(index)) is not None:
                    return batch
            try:
                async with asyncio.timeout_at(deadline):
                    await self._wake.wait()
            except TimeoutError:
                return None
        return None

    async def send(self, sending: Awaitable[None]) -> None:
        """Send something. TimeoutError: the client does not read."""
        timer = self._loop.call_later(STALL_TIMEOUT_S, self._on_stall)
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S) as self._send_timeout:
                await sending
        finally:
            self._send_timeout = None
            timer.cancel()
            if self._stalled:
                self._stalled = False
                self._update_interest()

    async def _read_from(self, index: int) -> StreamBatch | None:
        handle, selection = self._handles[index], self._selections[index]
        if self._peeks:
            messages, more = await self._peeks[index].read_new()
            if more:
                self._notified[index] = None
            return StreamBatch(selection.target, messages) if messages else None
        if handle.state is not ConsumerState.NOTIFIED:
            # It pulled too late and was passed over: it is interested again.
            self._waiters.set_interest(selection, handle, interested=self._is_interested)
            return None
        rows = await self._lease(selection, handle)
        if handle.state is ConsumerState.NOTIFIED:
            self._notified[index] = None  # at the end, so that the other queues have their turn
        if not rows:
            return None
        self._credit -= len(rows)
        if self._credit <= 0:
            self._update_interest()
        send_by_s = self._loop.time() + self.request.lease_ms / 1000 / 2
        return StreamBatch(selection.target, [message_json(row) for row in rows], rows, send_by_s)

    async def _lease(
        self, selection: PullSelection, handle: ConsumerHandle[Consumer[LeasedRow]]
    ) -> Sequence[LeasedRow]:
        """Lease what comes next, as far as it may track the leases."""
        limit = min(self._credit, BATCH_SIZE)
        if not self.tracks_leases:
            return await self._waiters.pull(selection, handle, limit)
        limit = min(limit, MAX_STREAM_LEASES - len(self.unsettled))
        reserved = self._quota.reserve(limit)
        if not reserved:
            # What waits is for other consumers, until leases are settled or end.
            self._lacks_room = True
            if limit > 0:
                self._quota.wait(self._on_room)
            self._update_interest()
            return ()
        unused = reserved
        try:
            rows = await self._waiters.pull(selection, handle, reserved)
            unused -= len(rows)
        finally:
            self._quota.release(unused)
        for row in rows:
            self.unsettled[row[0], row[1]] = selection.target
        return rows

    def _on_room(self) -> None:
        self._lacks_room = False
        self._quota.stop_waiting(self._on_room)
        self._update_interest()
        self._wake.set()

    def _on_work(self, index: int) -> None:
        self._notified[index] = None
        self._wake.set()

    def _on_stall(self) -> None:
        self._stalled = True
        self._update_interest()

    @property
    def _can_lease(self) -> bool:
        return self._credit > 0 and not self._lacks_room

    @property
    def _is_interested(self) -> bool:
        return self._can_lease and not self._stalled

    def _update_interest(self) -> None:
        """Report to the wait queues whether it can take something."""
        for selection, handle in zip(self._selections, self._handles, strict=True):
            self._waiters.set_interest(selection, handle, interested=self._is_interested)


class Peek:
    """Read one queue without leasing.

    It returns each message once, and again each time it is redelivered.
    """

    def __init__(
        self,
        writer: LogWriter,
        selection: PullSelection,
        now_s: Callable[[], float],
        turn: asyncio.Lock,
    ) -> None:
        """Read only while `turn` is held, which all readers of one organisation share."""
        self._writer = writer
        self._turn = turn
        self._selection = selection
        self._now_s = now_s
        self._cursor = ScanCursor(visibility_lag_us=VISIBILITY_LAG_US, rescan=False)
        self._seen: dict[tuple[str, int], None] = {}

    async def read_new(self) -> tuple[Sequence[bytes], bool]:
        """Return new messages as JSON, and whether there may be more now.

        NotFoundError, ConflictError.
        """
        # The writer serves its callers in order: so no organisation waits for all that another has.
        async with self._turn:
            return await self._read_new()

    async def _read_new(self) -> tuple[Sequence[bytes], bool]:
        key, selector = self._selection.target, self._selection.selector
        self._cursor.begin_window(self._now_s())
        types = frozenset[str]() if selector is None else selector.event_types
        window = await scan(
            self._writer,
            (key.room, key.subscription, key.organisation),
            types,
            self._cursor.positions,
        )
        if (error := access_error(window.access, key)) is not None:
            raise error
        self._cursor.advance(
            window.messages, exhausted=window.is_last, at_us=window.at_us, now_s=self._now_s()
        )
        new: list[ScannedMessage] = []
        passed = 0
        for found in window.messages:
            if passed >= PAUSE_BYTES:
                passed = 0
                await asyncio.sleep(0)
            passed += len(found.payload or b"")
            if self._is_new(found):
                new.append(found)
        sequences = await read_sequences(
            self._writer,
            [(key.room, found.delivery) for found in new if found.ordering_key is not None],
        )
        return [
            peeked_json(found, sequences.get(found.delivery)) for found in new
        ], not window.is_last

    def _is_new(self, found: ScannedMessage) -> bool:
        version = (found.delivery, found.generation)
        if found.event_type is None or found.payload is None or version in self._seen:
            return False
        selector = self._selection.selector
        if selector is not None and not selector.matches(
            found.event_type, found.headers, found.payload
        ):
            return False
        self._seen[version] = None
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return True
