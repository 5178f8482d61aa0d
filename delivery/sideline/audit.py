"""Compares the rows of sidelines with their magazine entries. PostgreSQL is the truth."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from delivery.maintenance.task import ShouldContinue
from delivery.sideline.magazines import SidelineMagazineCache
from rooms.db.sideline.entries import EntryRef, SidelineEntries
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, first_id
from rooms.domain.magazine import MAX_BATCH, Slot, StoredEntry
from rooms.errors import MagazineMissingError
from rooms.ports import Clock, Magazine

_log = logging.getLogger(__name__)

FIRST_POSITION: Final = (RoomId(-(1 << 31)), DeliveryId(first_id(0)))
MIN_ORPHAN_AGE: Final = timedelta(minutes=2)
"""Age from which an entry that no row names is an orphan: its loader may be about to write it."""


@dataclass(slots=True)
class AuditResult:
    """Counts of an audit.

    `lost`: rows whose entry is not in the magazine, to be loaded again; `stale`: rows of deliveries
    that are no longer sidelined; `orphans`: entries that no row names; `repaired`: they were fixed.
    """

    rows: int = 0
    lost: int = 0
    stale: int = 0
    orphans: int = 0
    repaired: bool = False

    @property
    def differences(self) -> int:
        """Return the sum of all differences."""
        return self.lost + self.stale + self.orphans


class SidelineAudit:
    """Checks every row, and every entry of magazines whose depth differs from their rows."""

    name = "audit of sidelines"

    def __init__(
        self,
        sidelines: SidelineEntries,
        magazine_cache: SidelineMagazineCache,
        clock: Clock,
        *,
        on_lost: Callable[[int], None],
        batch: int = MAX_BATCH,
    ) -> None:
        """Report to `on_lost` the number of lost entries, on which the operator should alert."""
        self._sidelines = sidelines
        self._magazine_cache = magazine_cache
        self._clock = clock
        self._on_lost = on_lost
        self._batch = batch
        self._audited_surplus: dict[SubscriptionId, int] = {}

    async def run(self, should_continue: ShouldContinue) -> None:
        """Audit everything once, with repair."""
        result = await self.check(should_continue, repair=True)
        if result.lost:
            _log.warning(
                "%d sideline entries were missing from their magazines: loading them again",
                result.lost,
            )
            self._on_lost(result.lost)

    async def check(self, should_continue: ShouldContinue, *, repair: bool) -> AuditResult:
        """Check everything, and repair differences if `repair` is set."""
        result = AuditResult(repaired=repair)
        named: Counter[SubscriptionId] = Counter()
        after = FIRST_POSITION
        while should_continue():
            page = await self._sidelines.list_placed(after, limit=self._batch)
            if not page:
                break
            last = page[-1][0]
            after = last.room_id, last.delivery_id
            result.rows += len(page)
            by_subscription: defaultdict[SubscriptionId, list[tuple[EntryRef, bool]]] = defaultdict(
                list
            )
            for ref, sidelined in page:
                by_subscription[ref.subscription_id].append((ref, sidelined))
            for subscription, rows in by_subscription.items():
                named[subscription] += sum(
                    sidelined and ref.slot is not None for ref, sidelined in rows
                )
                await self._check_rows(subscription, rows, result, repair=repair)
        following: SubscriptionId | None = None
        while should_continue() and (
            subscriptions := await self._sidelines.list_subscriptions(following)
        ):
            for subscription in subscriptions:
                if should_continue():
                    await self._check_entries(
                        subscription, named[subscription], result, should_continue, repair=repair
                    )
            following = subscriptions[-1]
        return result

    async def _check_rows(
        self,
        subscription: SubscriptionId,
        rows: Sequence[tuple[EntryRef, bool]],
        result: AuditResult,
        *,
        repair: bool,
    ) -> None:
        magazine = await self._magazine_cache.get(subscription)
        placed = [ref for ref, sidelined in rows if sidelined and ref.slot is not None]
        missing = await self._find_missing(magazine, placed)
        stale = [ref for ref, sidelined in rows if not sidelined]
        result.stale += len(stale)
        if not repair:
            result.lost += len(missing)
            return
        if missing:
            # Entries that a shovel moved in the meantime do not count as lost.
            result.lost += await self._sidelines.record_lost(missing)
        if stale:
            if magazine is not None and (
                slots := [ref.slot for ref in stale if ref.slot is not None]
            ):
                await self._delete(subscription, magazine, slots)
            await self._sidelines.delete_stale(stale)

    async def _find_missing(
        self, magazine: Magazine | None, placed: Sequence[EntryRef]
    ) -> list[EntryRef]:
        if magazine is None or not placed:
            return list(placed)
        try:
            found = await magazine.find([ref.slot for ref in placed if ref.slot is not None])
        except MagazineMissingError:
            self._magazine_cache.invalidate(placed[0].subscription_id)
            return list(placed)
        present = {(stored.slot, stored.entry.id, stored.entry.generation) for stored in found}
        return [ref for ref in placed if (ref.slot, ref.delivery_id, ref.generation) not in present]

    async def _check_entries(
        self,
        subscription: SubscriptionId,
        row_count: int,
        result: AuditResult,
        should_continue: ShouldContinue,
        *,
        repair: bool,
    ) -> None:
        """Find entries that no row names, unless the magazine has as many entries as rows."""
        magazine = await self._magazine_cache.get(subscription)
        if magazine is None:
            return
        try:
            surplus = (await magazine.state()).depth - row_count
            # A counter may stay wrong after an ambiguous write; that is no reason to scan each
            # time.
            if repair and (not surplus or self._audited_surplus.get(subscription) == surplus):
                return
            if await self._scan_entries(
                subscription, magazine, result, should_continue, repair=repair
            ):
                self._audited_surplus[subscription] = (await magazine.state()).depth - row_count
            else:
                self._audited_surplus.pop(subscription, None)
        except MagazineMissingError:
            self._magazine_cache.invalidate(subscription)

    async def _scan_entries(
        self,
        subscription: SubscriptionId,
        magazine: Magazine,
        result: AuditResult,
        should_continue: ShouldContinue,
        *,
        repair: bool,
    ) -> bool:
        """Delete orphans; return whether every entry was decided.

        An entry that no row names and that is too young is left to a later audit, which must scan
        again.
        """
        after: Slot | None = None
        before = self._clock.now() - MIN_ORPHAN_AGE
        decided = True
        while should_continue():
            page = await magazine.peek(self._batch, after=after)
            unnamed = await self._find_unreferenced(subscription, page)
            orphans = [stored.slot for stored in unnamed if stored.loaded_at < before]
            decided = decided and len(orphans) == len(unnamed)
            result.orphans += len(orphans)
            if repair and orphans:
                await magazine.delete(orphans)
            if len(page) < self._batch:
                return decided
            after = page[-1].slot
        return False

    async def _find_unreferenced(
        self, subscription: SubscriptionId, entries: Sequence[StoredEntry]
    ) -> list[StoredEntry]:
        slots = await self._sidelines.find_slots(
            subscription, [DeliveryId(stored.entry.id) for stored in entries]
        )
        return [
            stored for stored in entries if slots.get(DeliveryId(stored.entry.id)) != stored.slot
        ]

    async def _delete(
        self, subscription: SubscriptionId, magazine: Magazine, slots: Sequence[Slot]
    ) -> None:
        try:
            await magazine.delete(slots)
        except MagazineMissingError:
            self._magazine_cache.invalidate(subscription)
