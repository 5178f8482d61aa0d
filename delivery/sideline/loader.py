"""Loads the entries of what was sidelined."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from delivery.sideline.entry import entry_of
from delivery.sideline.shelves import Shelves
from rooms.domain.ids import SubscriptionId
from rooms.domain.magazine import MAX_BATCH
from rooms.errors import MagazineMissingError
from rooms.storage.sidelines import Sidelines, Unloaded

_log = logging.getLogger(__name__)

BATCH: Final = MAX_BATCH


class Loader:
    """A duty. One that was interrupted leaves rows without a slot, and entries that nobody names, to the next look."""

    name = "the loading of sidelines"

    def __init__(self, sidelines: Sidelines, shelves: Shelves, *, batch: int = BATCH) -> None:
        self._sidelines = sidelines
        self._shelves = shelves
        self._batch = batch

    async def run(self, go_on: Callable[[], bool]) -> None:
        """Load all there is."""
        more = True
        while more and go_on():
            found, more = await self._sidelines.unloaded(limit=self._batch)
            by_subscription: defaultdict[SubscriptionId, list[Unloaded]] = defaultdict(list)
            for one in found:
                by_subscription[one.step.subscription_id].append(one)
            for subscription, ones in by_subscription.items():
                if not go_on():
                    return
                await self._load(subscription, ones)

    async def _load(self, subscription: SubscriptionId, ones: Sequence[Unloaded]) -> None:
        entries = [entry_of(one) for one in ones]
        magazine = await self._shelves.make(subscription)
        try:
            slots = await magazine.load(entries)
        except MagazineMissingError:
            _log.warning("the sideline of subscription %s is gone and made anew", subscription)
            magazine = await self._shelves.remake(subscription)
            slots = await magazine.load(entries)
        placed = [replace(one.step, slot=slot) for one, slot in zip(ones, slots, strict=True)]
        late = await self._sidelines.loaded(placed)
        if late:
            await magazine.delete([step.slot for step in late if step.slot is not None])
