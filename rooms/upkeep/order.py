"""The order of keys: those whose head is over, or gone, and that nobody passed on; and those of subscriptions whose order
was taken back, in which nothing is to wait any more.

Whoever ends a head passes its key on in the same statement; so there is nothing else to do here, but where a worker did
not know yet that its subscription is ordered, or somebody changed rows by hand.
"""

import logging
from collections.abc import Callable
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.storage.order import Order, Place
from rooms.upkeep.duty import GoOn

_log = logging.getLogger(__name__)

PAGE: Final = 1000
MOST_PAGES: Final = 5
"""At a time: with very many keys under way the walk goes round more slowly, not harder."""


class OrderOfKeys:
    """Walks over the keys that something is under way of, again and again."""

    name = "the order of keys"

    def __init__(
        self, order: Order, queued: Callable[[SubscriptionId | None], None], mended: Callable[[int], None]
    ) -> None:
        """`queued` is told of a subscription in which something is in the queue again; None: of any PUSH one.
        `mended` is told how many keys were passed on.
        """
        self._order = order
        self._queued = queued
        self._mended = mended
        self._after: Place | None = None

    async def run(self, go_on: GoOn) -> None:
        """The next pages."""
        for _ in range(MOST_PAGES):
            if not go_on():
                return
            page = await self._order.mend(self._after, limit=PAGE)
            self._after = page.last
            if page.found:
                _log.warning("%d ordering keys had no head any more and go on", page.found)
                self._mended(page.found)
                self._queued(None)
                for subscription in page.called:
                    self._queued(subscription)
            for subscription in page.unordered:
                await self._let_go(subscription, go_on)
            if page.last is None:
                return

    async def _let_go(self, subscription: SubscriptionId, go_on: GoOn) -> None:
        moved = PAGE
        while moved and go_on():
            moved, called = await self._order.let_go(subscription, limit=PAGE)
            if called:
                self._queued(None)
                self._queued(subscription)
