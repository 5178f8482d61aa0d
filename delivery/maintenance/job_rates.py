"""Keep the rate of each job from one of its time slices to the next."""

from collections.abc import Callable
from typing import Final

from rooms.domain.ids import JobId
from rooms.domain.rate_limiter import RateLimiter

_MAX_KEPT: Final = 10_000
"""Cancelled and failed jobs are among them. A job that is forgotten has its next batch at once."""


class JobRateLimiters:
    """Hold the limiters of jobs: a new one in each time slice would give it a free batch.

    Of more than 10,000 the one that was used least recently is forgotten.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._limiters: dict[JobId, RateLimiter] = {}

    def get(self, job: JobId, rate_per_s: float | None) -> RateLimiter:
        """Return the limiter of a job, whose rate does not change; None: no limit."""
        limiter = self._limiters.pop(job, None) or RateLimiter(rate_per_s, self._monotonic)
        if rate_per_s is not None:
            self._limiters[job] = limiter
            if len(self._limiters) > _MAX_KEPT:
                del self._limiters[next(iter(self._limiters))]
        return limiter

    def forget(self, job: JobId) -> None:
        """Drop the limiter of a job that is done."""
        self._limiters.pop(job, None)
