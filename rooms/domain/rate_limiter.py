"""Limit the rate of batches."""

from collections.abc import Callable
from typing import Final

_BATCH_INTERVAL_S: Final = 0.1


class RateLimiter:
    """Allow `rate_per_s` deliveries a second, evenly; None: no limit.

    A pause saves up at most a tenth of a second's deliveries, and nothing before the first. So the
    last of n follows n / rate seconds after the first, less the time of one batch.
    """

    def __init__(self, rate_per_s: float | None, monotonic: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._monotonic = monotonic
        self._next_at: float | None = None

    def batch_size(self, limit: int) -> int:
        """Return the size of a batch, so that a second has several."""
        return (
            limit
            if self._rate_per_s is None
            else max(1, min(limit, int(self._rate_per_s * _BATCH_INTERVAL_S)))
        )

    def delay_s(self) -> float:
        """Return the seconds to wait before the next batch."""
        if self._rate_per_s is None:
            return 0.0
        now = self._monotonic()
        return max(0.0, self._begin(now) - now)

    def take(self, count: int) -> None:
        """Count `count` deliveries that are made now, after the wait.

        A wait that was broken off has counted nothing, so the next one is no longer.
        """
        if self._rate_per_s is not None:
            self._next_at = self._begin(self._monotonic()) + count / self._rate_per_s

    def _begin(self, now: float) -> float:
        return now if self._next_at is None else max(self._next_at, now - _BATCH_INTERVAL_S)
