"""When a worker has seen enough of an endpoint's failures: to open its circuit, or to call it failing."""

from collections import deque
from typing import Final

REPORT_AFTER_S: Final = 1.0
"""Nothing but failures for so long, and at least two of them, is worth telling the other workers."""


class Breaker:
    """Opens at so many failures in a row within a window. Times are seconds of any clock, given by the caller."""

    __slots__ = ("_failed_at",)

    def __init__(self) -> None:
        self._failed_at: deque[float] = deque()

    def succeeded(self) -> None:
        """An attempt was answered well: the row of failures is over."""
        self._failed_at.clear()

    def failed(self, now: float, *, failures: int, window_s: float) -> bool:
        """An attempt failed; whether that is enough. `failures` 0: never. When it is, counting begins anew."""
        if not failures:
            self._failed_at.clear()
            return False
        self._failed_at.append(now)
        while len(self._failed_at) > failures or self._failed_at[0] < now - window_s:
            self._failed_at.popleft()
        enough = len(self._failed_at) >= failures
        if enough:
            self._failed_at.clear()
        return enough


class Streak:
    """Since when there was nothing but failures, as far as one worker knows."""

    __slots__ = ("since", "well_at")

    def __init__(self) -> None:
        self.since: float | None = None
        self.well_at = float("-inf")
        """When an attempt was answered well last."""

    def succeeded(self, now: float) -> None:
        """An attempt was answered well."""
        self.since, self.well_at = None, now

    def failed(self, now: float) -> float | None:
        """An attempt failed; for how long that is so, once it is worth telling."""
        if self.since is None:
            self.since = now
        lasted = now - self.since
        return lasted if lasted >= REPORT_AFTER_S else None
