"""Keep failures that are not recorded yet when their lane is removed.

The next redelivery may be hours away, and its failure must not be the first one again. For so long,
a lane with its endpoint would take too much memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.cache_shares import CacheShares
from rooms.domain.ids import OrganisationId, SubscriptionId

_MAX_CACHED: Final = 50_000
"""The most shares of all entries, together less than 40 MB."""
_TIMES_PER_SHARE: Final = 32
"""An entry has one share, and one more for every so many times."""


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

    Where they take too much memory, the organisation with the most of it loses its oldest ones. An
    entry counts by its times: a circuit may need 5 failures, or 1,000.
    """

    def __init__(self) -> None:
        self._failures: dict[SubscriptionId, UnrecordedFailures] = {}
        self._shares = CacheShares[tuple[SubscriptionId, int]]()
        self._share_count = 0

    def __len__(self) -> int:
        return len(self._failures)

    def add(
        self,
        subscription_id: SubscriptionId,
        organisation: OrganisationId,
        failures: UnrecordedFailures,
    ) -> None:
        """Keep the failures of a subscription whose lane is removed."""
        self.take(subscription_id)
        self._failures[subscription_id] = failures
        for share in _shares_of(subscription_id, failures):
            self._shares.add(share, organisation)
            self._share_count += 1
        while self._share_count > _MAX_CACHED:
            displaced, _ = self._shares.displaced()
            self.take(displaced)

    def take(self, subscription_id: SubscriptionId) -> UnrecordedFailures | None:
        """Remove and return the failures of a subscription, if there are some."""
        failures = self._failures.pop(subscription_id, None)
        if failures is not None:
            for share in _shares_of(subscription_id, failures):
                self._shares.discard(share)
                self._share_count -= 1
        return failures


def _shares_of(
    subscription_id: SubscriptionId, failures: UnrecordedFailures
) -> Iterator[tuple[SubscriptionId, int]]:
    for share in range(1 + len(failures.failed_at) // _TIMES_PER_SHARE):
        yield subscription_id, share
