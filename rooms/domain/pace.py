"""A rate limit over batches: when the next so many may go."""

from collections.abc import Callable
from typing import Final

_TURN_S: Final = 0.1


class Pace:
    """`rate_per_s` deliveries a second, evenly, from the first that go; None: no limit.

    Nothing is saved up before the first, and a pause earns no more than a tenth of a second's worth: whoever goes the last
    of n goes n / rate seconds after the first, less what one batch stands for.
    """

    def __init__(self, rate_per_s: float | None, monotonic: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._monotonic = monotonic
        self._free_at: float | None = None

    def batch(self, most: int) -> int:
        """How many to take at a time, so that a second has several batches."""
        return most if self._rate_per_s is None else max(1, min(most, int(self._rate_per_s * _TURN_S)))

    def wait_s(self, count: int) -> float:
        """How long to wait before these `count` go; asking is booking."""
        if self._rate_per_s is None:
            return 0.0
        now = self._monotonic()
        begin = now if self._free_at is None else max(self._free_at, now - _TURN_S)
        self._free_at = begin + count / self._rate_per_s
        return max(0.0, begin - now)
