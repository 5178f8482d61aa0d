"""What the metrics are told of publishing, a commit at a time."""

import logging
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.errors import PermanentError, RoomsError, StorageRefusedError
from rooms.metrics import Metrics

_log = logging.getLogger(__name__)

ACCEPTED: Final = "accepted"
DUPLICATE: Final = "duplicate"
_MOST_TOLD: Final = 1000


class Meter:
    """Counts messages by what became of them, and how long those accepted took."""

    def __init__(self, metrics: Metrics) -> None:
        self._outcomes = {
            name: metrics.publishes.labels(name) for name in (ACCEPTED, DUPLICATE, "invalid", "refused", "unavailable")
        }
        self._filter_errors = metrics.filter_errors
        self._told: set[SubscriptionId] = set()
        # One `observe` a message would cost more than the rest of a publish's own code; its parts take many at once.
        histogram = metrics.publish_latency
        self._bounds: list[float] = histogram._upper_bounds  # noqa: SLF001
        self._buckets = histogram._buckets  # noqa: SLF001
        self._sum = histogram._sum  # noqa: SLF001

    def accepted(self, messages: int, latencies_s: Iterable[float]) -> None:
        """A commit, with the latency of each request in it."""
        self._outcomes[ACCEPTED].inc(messages)
        found: dict[int, int] = {}
        total = 0.0
        for latency_s in latencies_s:
            bucket = bisect_left(self._bounds, latency_s)
            found[bucket] = found.get(bucket, 0) + 1
            total += latency_s
        for bucket, count in found.items():
            self._buckets[bucket].inc(count)
        self._sum.inc(total)

    def duplicate(self) -> None:
        """A request that was answered from its key."""
        self._outcomes[DUPLICATE].inc()

    def filter_failed(self, subscription: SubscriptionId, error: str) -> None:
        """A filter that could not say whether it wants a message. The log has the first of each subscription."""
        self._filter_errors.inc()
        if subscription not in self._told:
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            self._told.add(subscription)
            _log.warning("the filter of subscription %s failed, and its message is delivered: %s", subscription, error)

    def failed(self, error: RoomsError) -> None:
        """A request that was not accepted."""
        match error:
            case PermanentError():
                self._outcomes["invalid"].inc()
            case StorageRefusedError():
                self._outcomes["refused"].inc()
            case _:
                self._outcomes["unavailable"].inc()
