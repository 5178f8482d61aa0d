"""Compare the rows of sidelines with their magazine entries. PostgreSQL is the truth."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Final

from delivery.maintenance.task import ShouldContinue
from delivery.sideline.magazines import SidelineMagazineCache
from delivery.sideline.turns import OrganisationTurns
from rooms.db.sideline.entries import EntryPosition, EntryRef, PlacedEntry, SidelineEntries
from rooms.domain.ids import DeliveryId, OrganisationId, RoomId, SubscriptionId, first_id
from rooms.domain.magazine import MAX_BATCH, Slot, StoredEntry
from rooms.errors import MagazineMissingError
from rooms.ports import Clock, Magazine

_log = logging.getLogger(__name__)

FIRST_POSITION: Final = (RoomId(-(1 << 31)), DeliveryId(first_id(0)))
MIN_ORPHAN_AGE: Final = timedelta(minutes=2)
"""Age from which an entry that no row names is an orphan: its loader may be about to write it."""


MAX_SUBSCRIPTIONS: Final = 50
"""Subscriptions of a turn at most."""
SCAN_PAGES: Final = 5
"""Pages of entries that a turn compares in a magazine."""
ROUND_S: Final = 60.0
"""Time after which the organisations that are done are audited again."""


@dataclass(slots=True)
class AuditResult:
    """Count what an audit found.

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


@dataclass(slots=True)
class _Scan:
    """Hold how far the entries of a magazine were compared, and whether each was decided.

    An entry that no row names and that is too young is left to a later audit, which must scan
    again.

    `surplus`: entries beyond the rows at the begin, without the deleted ones. It leaves out what
    was loaded meanwhile, perhaps behind the scan.
    """

    surplus: int
    after: Slot | None = None
    is_decided: bool = True
    is_over: bool = False


@dataclass(slots=True)
class _AuditProgress:
    """Hold how far the rows of a sideline were checked, and then its entries."""

    after: EntryPosition | None = None
    named: int = 0
    scan: _Scan | None = None


class SidelineAudit:
    """Check every row, and every entry of magazines whose depth differs from their rows.

    `run` does so in turns of organisations: a turn is one batch of rows, or a few of entries. The
    organisations that are done are audited again each minute, while larger ones go on.
    """

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
        self._turns = OrganisationTurns(max_waiting=inf)
        self._rest: Mapping[OrganisationId | None, frozenset[SubscriptionId]] = {}
        self._progress: dict[SubscriptionId, _AuditProgress] = {}

    async def run(self, should_continue: ShouldContinue) -> None:
        """Audit everything once, with repair."""
        is_over = False
        while not is_over and should_continue():
            result = AuditResult(repaired=True)
            try:
                is_over = await self._run_round(result, should_continue)
            finally:
                if result.lost:
                    _log.warning(
                        "%d sideline entries were missing from their magazines: loading them again",
                        result.lost,
                    )
                    self._on_lost(result.lost)

    async def _run_round(self, result: AuditResult, should_continue: ShouldContinue) -> bool:
        """Give turns until all are audited or it is time to begin anew; return whether all are.

        Of an organisation that the last round left unfinished, only the rest is audited.
        """
        until = self._clock.monotonic() + ROUND_S
        rest, self._rest = self._rest, {}
        self._turns.clear()
        listed: set[SubscriptionId] = set()
        after: SubscriptionId | None = None
        while should_continue() and (page := await self._sidelines.list_sidelines(after)):
            for one in page:
                listed.add(one.subscription)
                if one.subscription in rest.get(one.organisation, (one.subscription,)):
                    self._turns.add(one.subscription, one.organisation)
            after = page[-1].subscription
        for gone in self._progress.keys() - listed:
            del self._progress[gone]
        due = self._turns.start()
        while not self._turns.is_empty and should_continue():
            if due <= 0 and self._clock.monotonic() >= until:
                break
            due -= 1
            await self._take_turn(result, should_continue)
        self._rest = self._turns.waiting()
        return self._turns.is_empty

    async def _take_turn(self, result: AuditResult, should_continue: ShouldContinue) -> None:
        organisation, subscriptions = self._turns.next_turn(MAX_SUBSCRIPTIONS)
        # What fails is checked from its begin the next time.
        progress = {one: self._progress.pop(one, _AuditProgress()) for one in subscriptions}
        rows = await self._sidelines.list_placed_of(
            {one: progress[one].after for one in subscriptions}, limit=self._batch
        )
        by_subscription: defaultdict[SubscriptionId, list[PlacedEntry]] = defaultdict(list)
        for row in rows:
            by_subscription[row.ref.subscription_id].append(row)
        more_of = rows[-1].ref.subscription_id if len(rows) >= self._batch else None
        done: list[SubscriptionId] = []
        absent: list[SubscriptionId] = []
        for subscription in subscriptions:
            if not should_continue():
                break
            self._turns.serve(organisation, subscription)
            own = progress[subscription]
            if found := by_subscription[subscription]:
                result.rows += len(found)
                await self._check_rows(
                    subscription, [(row.ref, row.sidelined) for row in found], result, repair=True
                )
                own.named += sum(row.sidelined and row.ref.slot is not None for row in found)
                own.after = found[-1].position
            if subscription == more_of or not await self._check_entries(
                subscription, own.named, result, should_continue, repair=True, progress=own
            ):
                self._progress[subscription] = own
                break
            done.append(subscription)
            if own.after is None and await self._magazine_cache.get(subscription) is None:
                absent.append(subscription)
                self._audited_surplus.pop(subscription, None)
        if absent and should_continue():
            await self._sidelines.forget_ended(absent)
        self._turns.end_turn(organisation, done)

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
        progress: _AuditProgress | None = None,
    ) -> bool:
        """Find entries that no row names, unless the magazine has as many entries as rows.

        Return whether it is done. With `progress`, its scan goes on, for a few pages.
        """
        magazine = await self._magazine_cache.get(subscription)
        if magazine is None:
            return True
        try:
            surplus = (await magazine.state()).depth - row_count
            # A counter may stay wrong after an ambiguous write; that is no reason to scan each
            # time.
            if repair and (not surplus or self._audited_surplus.get(subscription) == surplus):
                return True
            pages = None if progress is None else SCAN_PAGES
            progress = progress or _AuditProgress()
            scan = progress.scan = progress.scan or _Scan(surplus)
            await self._scan_entries(
                subscription,
                magazine,
                result,
                should_continue,
                scan=scan,
                pages=pages,
                repair=repair,
            )
            if scan.is_over and scan.is_decided and repair:
                self._audited_surplus[subscription] = scan.surplus
            else:
                self._audited_surplus.pop(subscription, None)
        except MagazineMissingError:
            self._magazine_cache.invalidate(subscription)
            return True
        return scan.is_over

    async def _scan_entries(
        self,
        subscription: SubscriptionId,
        magazine: Magazine,
        result: AuditResult,
        should_continue: ShouldContinue,
        *,
        scan: _Scan,
        pages: int | None,
        repair: bool,
    ) -> None:
        """Delete orphans in the next pages, or in all that follow."""
        before = self._clock.now() - MIN_ORPHAN_AGE
        while should_continue() and pages != 0:
            page = await magazine.peek(self._batch, after=scan.after)
            unnamed = await self._find_unreferenced(subscription, page)
            orphans = [stored.slot for stored in unnamed if stored.loaded_at < before]
            scan.is_decided = scan.is_decided and len(orphans) == len(unnamed)
            result.orphans += len(orphans)
            if repair and orphans:
                scan.surplus -= len(await magazine.delete(orphans))
            if len(page) < self._batch:
                scan.is_over = True
                return
            scan.after = page[-1].slot
            pages = None if pages is None else pages - 1

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
