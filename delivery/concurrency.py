"""How many attempts at a time a lane makes: one more for each round of successes, half as many when the endpoint is in trouble.

It begins with a few and doubles a round until the first trouble, so that a fast endpoint has all it may within
milliseconds. One that hangs gets no more than those few, and keeps them: what is due to it has to come to its end some day.
Trouble is a time-out, 429, 5xx, no connection, or a round that took far longer than rounds did.
"""

from typing import Final

FIRST: Final = 4
"""How many it begins with, and never less while it may have so many."""
_HALF: Final = 0.5
_SLOWER: Final = 0.8
_TOLERANCE: Final = 2.0
_TOLERANCE_MS: Final = 100.0
"""Longer than twice the usual and this much more is trouble; less may be our own load."""
_SHORTEST_ROUND: Final = 8
_DRIFT: Final = 1.1
"""What is usual follows what is, upwards slowly: an endpoint that got slower for good is left alone in the end."""


class Concurrency:
    """Additive increase, multiplicative decrease. Times are seconds of any clock, given by the caller."""

    __slots__ = ("_count", "_growing", "_limit", "_most", "_sum_ms", "_troubled_at", "_usual_ms", "limit")

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(min(FIRST, most))
        self.limit = int(self._limit)
        """Attempts at a time, up to `most`."""
        self._growing = True
        self._troubled_at = float("-inf")
        self._usual_ms: float | None = None
        self._count, self._sum_ms = 0, 0.0

    @property
    def cut(self) -> bool:
        """Whether trouble keeps it below what it may have."""
        return not self._growing and self.limit < self._most

    def allow(self, most: int) -> None:
        """Another upper bound."""
        if most != self._most:
            self._most = most
            self._set(self._limit)

    def succeeded(self, *, busy: int, started: float, now: float, latency_ms: float) -> None:
        """An attempt that began at `started` was answered well, while so many were under way."""
        self._count += 1
        self._sum_ms += latency_ms
        if self._count >= self.limit and self._count >= _SHORTEST_ROUND and self._slow(started, now):
            return
        # Who does not use what he has learns nothing of what more would do.
        if self._limit < self._most and busy >= self.limit:
            self._set(self._limit + (1.0 if self._growing else 1.0 / self._limit))

    def troubled(self, *, started: float, now: float) -> None:
        """An attempt showed that the endpoint has more than it can do. What began before the last cut tells nothing new."""
        self._cut(_HALF, started, now)

    def _slow(self, started: float, now: float) -> bool:
        mean_ms, self._count, self._sum_ms = self._sum_ms / self._count, 0, 0.0
        usual_ms = mean_ms if self._usual_ms is None else self._usual_ms
        slow = mean_ms > usual_ms * _TOLERANCE + _TOLERANCE_MS
        self._usual_ms = min(mean_ms, usual_ms * _DRIFT)
        if slow:
            self._cut(_SLOWER, started, now)
        return slow

    def _cut(self, factor: float, started: float, now: float) -> None:
        if started <= self._troubled_at:
            return
        self._troubled_at, self._growing = now, False
        self._set(self._limit * factor)

    def _set(self, limit: float) -> None:
        self._limit = min(max(float(FIRST), limit), float(self._most))
        self.limit = int(self._limit)
