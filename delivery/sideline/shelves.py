"""The sideline magazines of subscriptions, opened once a process."""

from collections import OrderedDict
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.domain.magazine import MagazineName, sideline_of
from rooms.errors import MagazineMissingError
from rooms.magazines import Magazine, Magazines
from rooms.storage.sidelines import Sidelines

SHARDS: Final = 4
"""Of a subscription's sideline: a sweeper looks at every shard, and most sidelines are empty."""
_MOST_OPEN: Final = 10_000


def magazine_of(subscription: SubscriptionId) -> MagazineName:
    """The name of a subscription's sideline magazine."""
    return sideline_of(f"subscription-{subscription}")


class Shelves:
    """Finds and makes them. Errors are those of `Magazines` and `Sidelines`."""

    def __init__(self, magazines: Magazines, sidelines: Sidelines, *, shards: int = SHARDS) -> None:
        self._magazines = magazines
        self._sidelines = sidelines
        self._shards = shards
        self._open: OrderedDict[SubscriptionId, Magazine] = OrderedDict()

    async def find(self, subscription: SubscriptionId) -> Magazine | None:
        """The magazine, or None where there is none (any more)."""
        magazine = self._open.get(subscription)
        if magazine is None:
            try:
                magazine = await self._magazines.open(magazine_of(subscription))
            except MagazineMissingError:
                return None
            self._keep(subscription, magazine)
        return magazine

    async def make(self, subscription: SubscriptionId) -> Magazine:
        """The magazine, made where there is none."""
        return await self.find(subscription) or await self.remake(subscription)

    async def remake(self, subscription: SubscriptionId) -> Magazine:
        """The magazine, or what it has lost of itself, made anew; new slots are beyond those that rows still name."""
        beginning = await self._sidelines.beyond(subscription)
        magazine = await self._magazines.create(magazine_of(subscription), shards=self._shards, beginning=beginning)
        await self._sidelines.made(subscription, shards=magazine.shards)
        self._keep(subscription, magazine)
        return magazine

    def forget(self, subscription: SubscriptionId) -> None:
        """It was said to be missing: look anew the next time."""
        self._open.pop(subscription, None)

    def _keep(self, subscription: SubscriptionId, magazine: Magazine) -> None:
        self._open[subscription] = magazine
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
