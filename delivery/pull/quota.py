"""Bound the consumers of one organisation that wait in a process, since each holds memory."""

from collections.abc import Callable
from typing import Final

from rooms.domain.ids import OrganisationId
from rooms.errors import RateLimitedError

MAX_CONSUMERS: Final = 2000


class ConsumerQuota:
    """Count the streams and waiting polls of each organisation.

    `on_refused` is called for each refusal.
    """

    def __init__(self, max_consumers: int, on_refused: Callable[[], None]) -> None:
        self._max_consumers = max_consumers
        self._on_refused = on_refused
        self._waiting: dict[OrganisationId, int] = {}

    def acquire(self, organisation: OrganisationId) -> None:
        """Add one, which `release` takes away.

        RateLimitedError: the organisation has as many as it may have.
        """
        waiting = self._waiting.get(organisation, 0)
        if waiting >= self._max_consumers:
            self._on_refused()
            raise RateLimitedError(
                f"an organisation may have {self._max_consumers} streams and waiting polls"
                " at a time; end one of them first"
            )
        self._waiting[organisation] = waiting + 1

    def release(self, organisation: OrganisationId) -> None:
        """Take one away."""
        waiting = self._waiting[organisation] - 1
        if waiting:
            self._waiting[organisation] = waiting
        else:
            del self._waiting[organisation]
