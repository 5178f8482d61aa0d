"""A rate limit over batches: when the next so many may go."""

from collections.abc import Callable


class Pace:
    """`rate_per_s` deliveries a second, evenly; None: no limit. A pause earns no more than a second's worth."""

    def __init__(self, rate_per_s: float | None, monotonic: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._monotonic = monotonic
        self._free_at = monotonic()

    def batch(self, most: int) -> int:
        """How many to take at a time, so that a second has several batches."""
        return most if self._rate_per_s is None else max(1, min(most, int(self._rate_per_s / 10)))

    def wait_s(self, count: int) -> float:
        """How long to wait before these `count` go; asking is booking."""
        if self._rate_per_s is None:
            return 0.0
        now = self._monotonic()
        begin = max(self._free_at, now - 1.0)
        self._free_at = begin + count / self._rate_per_s
        return max(0.0, begin - now)
