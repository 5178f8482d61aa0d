"""Bound the consumers that one organisation has waiting in a process: each holds memory for as long as it waits."""

from collections.abc import Callable
from typing import Final

from rooms.domain.ids import OrganisationId
from rooms.errors import RateLimitedError

MAX_CONSUMERS: Final = 2000


class ConsumerQuota:
    """Count the streams and the waiting polls of each organisation; `refused` is called for each that is too many."""

    def __init__(self, most: int, refused: Callable[[], None]) -> None:
        self._most = most
        self._refused = refused
        self._waiting: dict[OrganisationId, int] = {}

    def take(self, organisation: OrganisationId) -> None:
        """Add one, which `release` takes away again. RateLimitedError: the organisation has as many as it may."""
        waiting = self._waiting.get(organisation, 0)
        if waiting >= self._most:
            self._refused()
            raise RateLimitedError(
                f"an organisation may have {self._most} streams and waiting polls at a time; end one of them first"
            )
        self._waiting[organisation] = waiting + 1

    def release(self, organisation: OrganisationId) -> None:
        """Take one away."""
        waiting = self._waiting[organisation] - 1
        if waiting:
            self._waiting[organisation] = waiting
        else:
            del self._waiting[organisation]
