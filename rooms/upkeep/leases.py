"""The end of leases whose time is up."""

from collections.abc import Callable
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.storage.lease_ends import LeaseEnds
from rooms.upkeep.duty import GoOn

BATCH: Final = 1000


class EndOfLeases:
    """Ends leases, the oldest first, and wakes those who poll the queues that got something."""

    name = "the end of leases"

    def __init__(self, leases: LeaseEnds, ring: Callable[[SubscriptionId], None]) -> None:
        self._leases = leases
        self._ring = ring

    async def run(self, go_on: GoOn) -> None:
        """End everything that is over."""
        while go_on():
            ended, subscriptions = await self._leases.end(limit=BATCH)
            for subscription in subscriptions:
                self._ring(subscription)
            if ended < BATCH:
                return
