"""Count what became of requests to publish."""

import logging
from collections.abc import Iterable
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.errors import PermanentError, QuotaExceededError, RoomsError, StorageRefusedError
from rooms.metrics import Metrics
from rooms.prometheus_internals import observe_many

_log = logging.getLogger(__name__)

ACCEPTED: Final = "accepted"
DUPLICATE: Final = "duplicate"
_MAX_LOGGED: Final = 1000
"""Subscriptions whose failing filter was logged, before all are forgotten."""


class PublishMetrics:
    """Count published messages by outcome, and observe the latency of accepted ones."""

    def __init__(self, metrics: Metrics) -> None:
        self._outcomes = {
            name: metrics.publishes.labels(name)
            for name in (ACCEPTED, DUPLICATE, "invalid", "refused", "unavailable")
        }
        self._filter_errors = metrics.filter_errors
        self._logged_subscriptions: set[SubscriptionId] = set()
        self._latency = metrics.publish_latency

    def count_accepted(self, messages: int, latencies_s: Iterable[float]) -> None:
        """Count the messages of a commit, with the latency of each request in it."""
        self._outcomes[ACCEPTED].inc(messages)
        observe_many(self._latency, latencies_s)

    def count_duplicate(self) -> None:
        """Count a request that was answered from its key."""
        self._outcomes[DUPLICATE].inc()

    def record_filter_error(self, subscription: SubscriptionId, error: str) -> None:
        """Count a filter that failed, and log the first failure of each subscription.

        What the library quotes may be a value of the message, so it is left out of the log.
        """
        self._filter_errors.inc()
        if subscription not in self._logged_subscriptions:
            if len(self._logged_subscriptions) >= _MAX_LOGGED:
                self._logged_subscriptions.clear()
            self._logged_subscriptions.add(subscription)
            reason, quote, _ = error.partition('"')
            _log.warning(
                "filter of subscription %s failed, the message is delivered: %s",
                subscription,
                f"{reason}…" if quote else error,
            )

    def count_failure(self, error: RoomsError) -> None:
        """Count a request that was not accepted."""
        match error:
            case QuotaExceededError():
                self._outcomes["refused"].inc()
            case PermanentError():
                self._outcomes["invalid"].inc()
            case StorageRefusedError():
                self._outcomes["refused"].inc()
            case _:
                self._outcomes["unavailable"].inc()
