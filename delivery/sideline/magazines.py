"""Open the sideline magazines of subscriptions, once a process."""

from collections import OrderedDict
from typing import Final

from rooms.db.sideline.entries import SidelineEntries
from rooms.domain.ids import SubscriptionId
from rooms.domain.magazine import MagazineName, sideline_name
from rooms.errors import MagazineMissingError
from rooms.ports import Magazine, Magazines

SIDELINE_SHARDS: Final = 4
"""Shards of a sideline: few, since a sweep reads every shard and most sidelines are empty."""
_MAX_OPEN: Final = 10_000


def sideline_magazine_name(subscription: SubscriptionId) -> MagazineName:
    """Return the name of a subscription's sideline magazine."""
    return sideline_name(f"subscription-{subscription}")


class SidelineMagazineCache:
    """Open and create sideline magazines. Errors: of `Magazines` and `SidelineEntries`."""

    def __init__(self, magazines: Magazines, sidelines: SidelineEntries) -> None:
        self._magazines = magazines
        self._sidelines = sidelines
        self._open: OrderedDict[SubscriptionId, Magazine] = OrderedDict()

    async def get(self, subscription: SubscriptionId) -> Magazine | None:
        """Return the magazine, or None where it does not exist."""
        magazine = self._open.get(subscription)
        if magazine is None:
            try:
                magazine = await self._magazines.open(sideline_magazine_name(subscription))
            except MagazineMissingError:
                return None
            self._store(subscription, magazine)
        return magazine

    async def get_or_create(self, subscription: SubscriptionId) -> Magazine:
        """Return the magazine; create it where it does not exist."""
        return await self.get(subscription) or await self.recreate(subscription)

    async def recreate(self, subscription: SubscriptionId) -> Magazine:
        """Create the magazine or its lost parts; new slots are beyond those that rows name."""
        first_pointer = await self._sidelines.next_pointer(subscription)
        magazine = await self._magazines.create(
            sideline_magazine_name(subscription),
            shards=SIDELINE_SHARDS,
            first_pointer=first_pointer,
        )
        await self._sidelines.record_magazine(subscription, shards=magazine.shards)
        self._store(subscription, magazine)
        return magazine

    def invalidate(self, subscription: SubscriptionId) -> None:
        """Open the magazine again the next time."""
        self._open.pop(subscription, None)

    def _store(self, subscription: SubscriptionId, magazine: Magazine) -> None:
        self._open[subscription] = magazine
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
