"""Bound the consumers of one organisation that wait in a process, since each holds memory."""

from collections.abc import Callable, Sized
from typing import Final

from rooms.domain.ids import OrganisationId
from rooms.errors import RateLimitedError

MAX_CONSUMERS: Final = 2000
SUBSCRIPTIONS_OF_ONE: Final = 10
"""So many subscriptions of a stream count as one consumer: each is looked at once a second."""


def stream_weight(targets: Sized) -> int:
    """Return as how many consumers a stream of these subscriptions counts."""
    return max(1, -(-len(targets) // SUBSCRIPTIONS_OF_ONE))


class ConsumerLimit:
    """Count the streams and waiting polls of each organisation.

    `on_refused` is called for each refusal.
    """

    def __init__(self, max_consumers: int, on_refused: Callable[[], None]) -> None:
        self._max_consumers = max_consumers
        self._on_refused = on_refused
        self._waiting: dict[OrganisationId, int] = {}

    def acquire(self, organisation: OrganisationId, weight: int = 1) -> None:
        """Add one that counts as `weight`, which `release` takes away.

        RateLimitedError: the organisation has as many as it may have.
        """
        waiting = self._waiting.get(organisation, 0) + weight
        if waiting > self._max_consumers:
            self._on_refused()
            raise RateLimitedError(
                f"an organisation may have {self._max_consumers} streams and waiting polls"
                f" at a time, each {SUBSCRIPTIONS_OF_ONE} subscriptions of a stream count as one;"
                " end one of them first"
            )
        self._waiting[organisation] = waiting

    def release(self, organisation: OrganisationId, weight: int = 1) -> None:
        """Take it away."""
        waiting = self._waiting[organisation] - weight
        if waiting:
            self._waiting[organisation] = waiting
        else:
            del self._waiting[organisation]
