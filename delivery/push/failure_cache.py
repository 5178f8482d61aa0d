"""Keep failures that are not recorded yet when their lane is removed.

The next redelivery may be hours away, and its failure must not be the first one again. For so long,
a lane with its endpoint would take too much memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rooms.cache_shares import CacheShares
from rooms.domain.ids import OrganisationId, SubscriptionId

_MAX_CACHED: Final = 50_000


@dataclass(frozen=True, slots=True)
class UnrecordedFailures:
    """Hold what a worker knows of an endpoint's failures. Times are monotonic seconds.

    It counts until `valid_until`, for this version of the subscription.
    """

    version: int
    valid_until: float
    since: float
    """The start of the streak."""
    is_reported: bool
    failed_at: Sequence[float]
    """The times that count for the circuit."""


class FailureCache:
    """Keep the failures of subscriptions without a lane.

    Where there are too many, the organisation with the most of them loses its oldest ones.
    """

    def __init__(self) -> None:
        self._failures: dict[SubscriptionId, UnrecordedFailures] = {}
        self._shares = CacheShares[SubscriptionId]()

    def __len__(self) -> int:
        return len(self._failures)

    def add(
        self,
        subscription_id: SubscriptionId,
        organisation: OrganisationId,
        failures: UnrecordedFailures,
    ) -> None:
        """Keep the failures of a subscription whose lane is removed."""
        self._failures[subscription_id] = failures
        self._shares.add(subscription_id, organisation)
        if len(self._failures) > _MAX_CACHED:
            self.take(self._shares.displaced())

    def take(self, subscription_id: SubscriptionId) -> UnrecordedFailures | None:
        """Remove and return the failures of a subscription, if there are some."""
        failures = self._failures.pop(subscription_id, None)
        if failures is not None:
            self._shares.discard(subscription_id)
        return failures
