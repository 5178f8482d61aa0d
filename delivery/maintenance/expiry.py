"""Expire deliveries and leases, and repair ordering keys.

An expiry scan follows the index from the end of the previous scan. Two kinds of rows may be behind
that position. A publish may take longer to commit than its messages live: each scan starts a little
earlier, and one in a while a whole minute earlier. Skipped rows (under way, or leased) are kept by
id until they end, and tried again every second. The saved watermark, where a successor starts,
never passes either kind. Beyond one batch, organisations take turns (`backlog_turns.py`).

A statement that ends the head of an ordering key advances the key. The repair covers two cases: the
worker did not know yet that its subscription is ordered, or an operator changed rows by hand. It
also releases the keys of subscriptions that are no longer ordered.
"""

import itertools
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from delivery.maintenance.backlog_turns import BacklogTurns
from delivery.maintenance.task import ShouldContinue
from rooms.db.leases.release import LeaseQueries
from rooms.db.queue.expire import ExpiryBatch, ExpiryQueries
from rooms.db.queue.ordering import KeyPosition, OrderingQueries
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.ports import Clock

_log = logging.getLogger(__name__)

BATCH: Final = 1000
OVERLAP: Final = timedelta(seconds=2)
LONG_SCAN_OVERLAP: Final = timedelta(minutes=1)
LONG_SCAN_EVERY_S: Final = 15.0
SAVE_WATERMARK_EVERY_S: Final = 10.0
RETRY_SKIPPED_EVERY_S: Final = 1.0
"""Within a run, which lasts as long as a backlog does."""
_EARLIEST: Final = datetime(2000, 1, 1, tzinfo=UTC)
PAGE_SIZE: Final = 1000
MAX_PAGES: Final = 5
"""Pages of a repair run: with very many keys the walk takes longer, and costs no more a second."""


class DeliveryExpirer:
    """Expire deliveries. It keeps its position, so each term needs a new one."""

    name = "delivery expiry"

    def __init__(self, queries: ExpiryQueries, clock: Clock) -> None:
        self._queries = queries
        self._clock = clock
        self._scanned_to: datetime | None = None
        self._skipped: dict[DeliveryId, datetime] = {}
        self._next_retry_s = 0.0
        self._next_long_scan_s = 0.0
        self._next_save_s = 0.0

    async def run(self, should_continue: ShouldContinue) -> None:
        """Expire every due delivery that is neither under way nor leased."""
        now = self._clock.monotonic()
        await self._retry_skipped(should_continue)
        long_scan = self._scanned_to is None or now >= self._next_long_scan_s
        if self._scanned_to is None:
            self._scanned_to = await self._queries.read_watermark() or _EARLIEST
        low = self._scanned_to - (LONG_SCAN_OVERLAP if long_scan else OVERLAP)
        scanned_to = await self._expire_from(low, should_continue)
        if scanned_to is not None:
            self._scanned_to = scanned_to
            if long_scan:
                self._next_long_scan_s = now + LONG_SCAN_EVERY_S
        if should_continue() and now >= self._next_save_s:
            await self._queries.save_watermark(min([self._scanned_to, *self._skipped.values()]))
            self._next_save_s = now + SAVE_WATERMARK_EVERY_S

    async def _expire_from(self, low: datetime, should_continue: ShouldContinue) -> datetime | None:
        """Expire what is due; return the time up to which it is done, None if the term ended."""
        if not should_continue():
            return None
        limit = BATCH + len(self._skipped)
        batch = await self._queries.expire(low, limit=limit)
        self._skipped |= batch.skipped
        if batch.found < limit or batch.latest_expiry is None:
            return batch.scanned_at
        turns = BacklogTurns(batch.latest_expiry)
        while should_continue() and not turns.is_done:
            if self._clock.monotonic() >= self._next_retry_s:
                await self._retry_skipped(should_continue)
            turn = turns.next()
            limit = BATCH + len(self._skipped)
            batch = await self._queries.expire_in_turn(
                turn.low, limit=limit, excluded=turn.excluded
            )
            self._skipped |= batch.skipped
            turns.record(
                turn,
                reached=batch.latest_expiry if batch.found >= limit else None,
                largest=batch.largest,
                at=batch.scanned_at,
            )
        return batch.scanned_at if turns.is_done else None

    async def _retry_skipped(self, should_continue: ShouldContinue) -> None:
        ids = iter(list(self._skipped))
        while should_continue() and (some := list(itertools.islice(ids, BATCH))):
            batch: ExpiryBatch = await self._queries.retry_skipped(some)
            for delivery_id in some:
                del self._skipped[delivery_id]
            self._skipped |= batch.skipped
        self._next_retry_s = self._clock.monotonic() + RETRY_SKIPPED_EVERY_S


async def expire_leases(
    queries: LeaseQueries,
    notify: Callable[[SubscriptionId], None],
    should_continue: ShouldContinue,
) -> None:
    """End every expired lease, the oldest first, and notify polls of the subscriptions.

    Where a batch is not enough, organisations take turns.
    """
    if not should_continue():
        return
    ended, subscriptions = await queries.expire(limit=BATCH)
    for subscription in subscriptions:
        notify(subscription)
    turns = BacklogTurns(_EARLIEST)
    while ended >= BATCH and should_continue() and not turns.is_done:
        turn = turns.next()
        batch = await queries.expire_in_turn(turn.low, limit=BATCH, excluded=turn.excluded)
        for subscription in batch.queued_in:
            notify(subscription)
        turns.record(
            turn,
            reached=batch.latest_until if batch.ended >= BATCH else None,
            largest=batch.largest,
            at=batch.ended_at,
        )


class OrderingRepair:
    """Advance ordering keys whose head has ended; walk over all keys, a few pages a run."""

    name = "ordering repair"

    def __init__(
        self,
        queries: OrderingQueries,
        on_queued: Callable[[SubscriptionId | None], None],
        on_repaired: Callable[[int], None],
    ) -> None:
        """Report queued work to `on_queued` (None: PUSH), and advanced keys to `on_repaired`."""
        self._queries = queries
        self._on_queued = on_queued
        self._on_repaired = on_repaired
        self._after: KeyPosition | None = None

    async def run(self, should_continue: ShouldContinue) -> None:
        """Repair the next pages of keys."""
        for _ in range(MAX_PAGES):
            if not should_continue():
                return
            page = await self._queries.repair(self._after, limit=PAGE_SIZE)
            self._after = page.last
            if page.repaired:
                _log.warning("advanced %d ordering keys whose head had ended", page.repaired)
                self._on_repaired(page.repaired)
                self._on_queued(None)
                for subscription in page.advanced:
                    self._on_queued(subscription)
            for subscription in page.unordered:
                await self._release(subscription, should_continue)
            if page.last is None:
                return

    async def _release(self, subscription: SubscriptionId, should_continue: ShouldContinue) -> None:
        moved = PAGE_SIZE
        while moved and should_continue():
            moved, called = await self._queries.release(subscription, limit=PAGE_SIZE)
            if called:
                self._on_queued(None)
                self._on_queued(subscription)
