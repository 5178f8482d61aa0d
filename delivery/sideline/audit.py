"""Holds the rows of the sidelines and their entries against each other. PostgreSQL wins."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from delivery.sideline.shelves import Shelves
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, first_id
from rooms.domain.magazine import MAX_BATCH, Slot, Stored
from rooms.errors import MagazineMissingError
from rooms.magazines import Magazine
from rooms.ports import Clock
from rooms.storage.sidelines import Sidelines, Step

_log = logging.getLogger(__name__)

START: Final = (RoomId(-(1 << 31)), DeliveryId(first_id(0)))
UNDER_WAY: Final = timedelta(minutes=2)
"""So old is an entry before it counts as nobody's: its loader may not have told its row yet."""


@dataclass(slots=True)
class Findings:
    """What an audit met. `lost`: rows whose entry the magazine does not have, to be loaded again; `stale`: rows that mean
    nothing any more; `nobodys`: entries that no row names. `mended` tells whether they were put right.
    """

    rows: int = 0
    lost: int = 0
    stale: int = 0
    nobodys: int = 0
    mended: bool = False

    @property
    def differences(self) -> int:
        """All of them together."""
        return self.lost + self.stale + self.nobodys


class Audit:
    """A duty: looks at every row, and at every entry of those magazines that have more of them than rows."""

    name = "the audit of sidelines"

    def __init__(
        self,
        sidelines: Sidelines,
        shelves: Shelves,
        clock: Clock,
        *,
        lost: Callable[[int], None],
        batch: int = MAX_BATCH,
    ) -> None:
        """`lost` is told how many entries had to be loaded again: a store that loses them is to alarm somebody."""
        self._sidelines = sidelines
        self._shelves = shelves
        self._clock = clock
        self._lost = lost
        self._batch = batch
        self._walked: dict[SubscriptionId, int] = {}

    async def run(self, go_on: Callable[[], bool]) -> None:
        """One audit of everything."""
        findings = await self.examine(go_on, mend=True)
        if findings.lost:
            _log.warning("%d sideline entries were missing from their magazines and are loaded again", findings.lost)
            self._lost(findings.lost)

    async def examine(self, go_on: Callable[[], bool], *, mend: bool) -> Findings:
        """Look at everything, and put right what differs where `mend` is set. Stops early when `go_on` says so."""
        findings = Findings(mended=mend)
        named: Counter[SubscriptionId] = Counter()
        after = START
        while go_on():
            page = await self._sidelines.placed(after, limit=self._batch)
            if not page:
                break
            last = page[-1][0]
            after = last.room_id, last.delivery_id
            findings.rows += len(page)
            by_subscription: defaultdict[SubscriptionId, list[tuple[Step, bool]]] = defaultdict(list)
            for step, sidelined in page:
                by_subscription[step.subscription_id].append((step, sidelined))
            for subscription, rows in by_subscription.items():
                named[subscription] += sum(sidelined and step.slot is not None for step, sidelined in rows)
                await self._rows(subscription, rows, findings, mend=mend)
        following: SubscriptionId | None = None
        while go_on() and (subscriptions := await self._sidelines.subscriptions(following)):
            for subscription in subscriptions:
                if go_on():
                    await self._entries(subscription, named[subscription], findings, go_on, mend=mend)
            following = subscriptions[-1]
        return findings

    async def _rows(
        self, subscription: SubscriptionId, rows: Sequence[tuple[Step, bool]], findings: Findings, *, mend: bool
    ) -> None:
        magazine = await self._shelves.find(subscription)
        placed = [step for step, sidelined in rows if sidelined and step.slot is not None]
        missing = await self._missing(magazine, placed)
        stale = [step for step, sidelined in rows if not sidelined]
        findings.stale += len(stale)
        if not mend:
            findings.lost += len(missing)
            return
        if missing:
            # A shovel may have been here in between: of what it moved nothing is lost, and nobody is to be alarmed.
            findings.lost += await self._sidelines.lost(missing)
        if stale:
            if magazine is not None and (slots := [step.slot for step in stale if step.slot is not None]):
                await self._delete(subscription, magazine, slots)
            await self._sidelines.forget(stale)

    async def _missing(self, magazine: Magazine | None, placed: Sequence[Step]) -> list[Step]:
        if magazine is None or not placed:
            return list(placed)
        try:
            found = await magazine.find([step.slot for step in placed if step.slot is not None])
        except MagazineMissingError:
            self._shelves.forget(placed[0].subscription_id)
            return list(placed)
        there = {(stored.slot, stored.entry.id, stored.entry.generation) for stored in found}
        return [step for step in placed if (step.slot, step.delivery_id, step.generation) not in there]

    async def _entries(
        self,
        subscription: SubscriptionId,
        named: int,
        findings: Findings,
        go_on: Callable[[], bool],
        *,
        mend: bool,
    ) -> None:
        """Look for entries that no row names, unless the magazine has just as many as there are rows."""
        magazine = await self._shelves.find(subscription)
        if magazine is None:
            return
        try:
            surplus = (await magazine.state()).depth - named
            # A counter may stay off by what a store once left in doubt: that alone is no reason to walk again and again.
            if mend and (not surplus or self._walked.get(subscription) == surplus):
                return
            if await self._walk(subscription, magazine, findings, go_on, mend=mend):
                self._walked[subscription] = (await magazine.state()).depth - named
            else:
                self._walked.pop(subscription, None)
        except MagazineMissingError:
            self._shelves.forget(subscription)

    async def _walk(
        self,
        subscription: SubscriptionId,
        magazine: Magazine,
        findings: Findings,
        go_on: Callable[[], bool],
        *,
        mend: bool,
    ) -> bool:
        """Delete what no row names; return whether every entry was judged. What no row names yet, and is too young to be
        judged, is left to a later audit, which must walk again.
        """
        after: Slot | None = None
        before = self._clock.now() - UNDER_WAY
        judged = True
        while go_on():
            page = await magazine.peek(self._batch, after=after)
            unnamed = await self._unnamed(subscription, page)
            orphans = [stored.slot for stored in unnamed if stored.loaded_at < before]
            judged = judged and len(orphans) == len(unnamed)
            findings.nobodys += len(orphans)
            if mend and orphans:
                await magazine.delete(orphans)
            if len(page) < self._batch:
                return judged
            after = page[-1].slot
        return False

    async def _unnamed(self, subscription: SubscriptionId, entries: Sequence[Stored]) -> list[Stored]:
        slots = await self._sidelines.slots(subscription, [DeliveryId(stored.entry.id) for stored in entries])
        return [stored for stored in entries if slots.get(DeliveryId(stored.entry.id)) != stored.slot]

    async def _delete(self, subscription: SubscriptionId, magazine: Magazine, slots: Sequence[Slot]) -> None:
        try:
            await magazine.delete(slots)
        except MagazineMissingError:
            self._shelves.forget(subscription)
