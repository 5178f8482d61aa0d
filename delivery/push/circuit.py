"""Count an endpoint's failures: when to open its circuit, and when to report it as failing."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

REPORT_AFTER_S: Final = 1.0
"""A streak of at least two failures that lasts this long is reported to the other workers."""


class CircuitBreaker:
    """Open after a number of failures in a row within a window.

    Times are seconds of any clock, given by the caller. They take 8 bytes each, because every lane
    may have a thousand.
    """

    __slots__ = ("_failed_at",)

    def __init__(self) -> None:
        self._failed_at = array("d")

    def succeeded(self) -> None:
        """Record a success, which ends the row of failures."""
        del self._failed_at[:]

    def reset(self) -> None:
        """Forget the failures, because they are those of former settings."""
        del self._failed_at[:]

    def failed_at(self) -> Sequence[float]:
        """Return the times of the failures, in little memory."""
        return array("d", self._failed_at)

    def restore(self, failed_at: Iterable[float]) -> None:
        """Go on with the failures of another breaker."""
        self._failed_at.extend(failed_at)

    def failed(self, now: float, *, failures: int, window_s: float) -> bool:
        """Record a failure and return whether the circuit must open; then counting starts again.

        `failures`: how many open it; 0 for never.
        """
        if not failures:
            del self._failed_at[:]
            return False
        self._failed_at.append(now)
        first = max(0, len(self._failed_at) - failures)
        while self._failed_at[first] < now - window_s:
            first += 1
        del self._failed_at[:first]
        enough = len(self._failed_at) >= failures
        if enough:
            del self._failed_at[:]
        return enough


class FailureStreak:
    """Distinguish a streak of failures from a single one, as far as this worker knows.

    Nothing is known of the attempts of other workers, so its length says nothing about the
    endpoint: only the record, which any success clears, does.
    """

    __slots__ = ("since", "succeeded_at")

    def __init__(self) -> None:
        self.since: float | None = None
        self.succeeded_at = float("-inf")
        """When an attempt last succeeded."""

    def succeeded(self, now: float) -> None:
        """Record a success."""
        self.since, self.succeeded_at = None, now

    def forget(self) -> None:
        """End the streak, because another worker saw a success."""
        self.since = None

    def failed(self, now: float) -> bool:
        """Record a failure and return whether the streak is long enough to report."""
        if self.since is None:
            self.since = now
        return now - self.since >= REPORT_AFTER_S
