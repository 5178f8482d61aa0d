"""Adapt the number of concurrent attempts to what an endpoint can do (AIMD).

The limit starts at four and doubles each round until the first overload, so a fast endpoint reaches
its maximum within milliseconds. An overload halves the limit; after that it grows by one a round.
Overload is a time-out, 429, 5xx, a failed connection, or a round that took far longer than usual.

The limit never drops below four, because hanging attempts must end some time.
"""

from typing import Final

INITIAL_LIMIT: Final = 4
"""The limit at the start, and the lowest one unless the maximum is lower."""
_OVERLOAD_FACTOR: Final = 0.5
_SLOW_FACTOR: Final = 0.8
_SLOW_RATIO: Final = 2.0
_SLOW_MARGIN_MS: Final = 100.0
"""A round is slow above twice the baseline plus this much; less may be load on this machine."""
_MIN_ROUND: Final = 8
_BASELINE_GROWTH: Final = 1.1
"""The baseline grows slowly, so an endpoint that became slower for good is accepted in the end."""


class AdaptiveConcurrency:
    """Limit attempts by additive increase and multiplicative decrease.

    Times are seconds of any clock, given by the caller.
    """

    __slots__ = (
        "_baseline_ms",
        "_growing",
        "_limit",
        "_maximum",
        "_reduced_at",
        "_round_count",
        "_round_sum_ms",
        "limit",
    )

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._limit = float(min(INITIAL_LIMIT, maximum))
        self.limit = int(self._limit)
        """Attempts at a time, up to the maximum."""
        self._growing = True
        self._reduced_at = float("-inf")
        self._baseline_ms: float | None = None
        self._round_count, self._round_sum_ms = 0, 0.0

    @property
    def is_reduced(self) -> bool:
        """Return whether overload keeps the limit below its maximum."""
        return not self._growing and self.limit < self._maximum

    def set_maximum(self, maximum: int) -> None:
        """Set the upper bound."""
        if maximum != self._maximum:
            self._maximum = maximum
            self._set_limit(self._limit)

    def on_success(self, *, busy: int, started: float, now: float, latency_ms: float) -> None:
        """Record a successful attempt. `busy`: attempts in progress, this one included."""
        self._round_count += 1
        self._round_sum_ms += latency_ms
        if (
            self._round_count >= self.limit
            and self._round_count >= _MIN_ROUND
            and self._round_was_slow(started, now)
        ):
            return
        # A limit that is not reached says nothing about a higher one.
        if self._limit < self._maximum and busy >= self.limit:
            self._set_limit(self._limit + (1.0 if self._growing else 1.0 / self._limit))

    def on_overload(self, *, started: float, now: float) -> None:
        """Record an overload. Attempts that began before the last reduction do not count again."""
        self._reduce(_OVERLOAD_FACTOR, started, now)

    def _round_was_slow(self, started: float, now: float) -> bool:
        mean_ms, self._round_count, self._round_sum_ms = (
            self._round_sum_ms / self._round_count,
            0,
            0.0,
        )
        baseline_ms = mean_ms if self._baseline_ms is None else self._baseline_ms
        slow = mean_ms > baseline_ms * _SLOW_RATIO + _SLOW_MARGIN_MS
        self._baseline_ms = min(mean_ms, baseline_ms * _BASELINE_GROWTH)
        if slow:
            self._reduce(_SLOW_FACTOR, started, now)
        return slow

    def _reduce(self, factor: float, started: float, now: float) -> None:
        if started <= self._reduced_at:
            return
        self._reduced_at, self._growing = now, False
        self._set_limit(self._limit * factor)

    def _set_limit(self, limit: float) -> None:
        self._limit = min(max(float(INITIAL_LIMIT), limit), float(self._maximum))
        self.limit = int(self._limit)
