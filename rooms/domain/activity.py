"""Name what is counted by the minute, and estimate percentiles of how long calls took.

Latencies are counted in buckets. Bucket 0 holds up to 1 ms, bucket n more than 2^((n-1)/2) and up
to 2^(n/2) ms, the last one everything longer. An estimate is in
the bucket of the exact value, so they differ by less than a factor of 1.42.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

MINUTES: Final = 60
"""The minutes that are shown; the last of them is the current one."""
KEPT_MINUTES: Final = 90
"""Minutes are kept so long; what comes later is not counted by the minute."""
MINUTE_COUNTERS: Final = ("deliveries", "delivered", "failed", "sidelined", "expired")
"""The names of the counts: columns of the table, and fields of the API."""
BUCKETS: Final = 34
_RATIO: Final = 2.0**0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteCounts:
    """Hold what happened in one minute; `latencies`: calls by bucket, as far as there are any."""

    start: datetime
    counts: Mapping[str, int]
    latencies: Sequence[int]


def percentile_ms(latencies: Sequence[int], share: float) -> float | None:
    """Estimate the latency that this share of the calls does not exceed; None: no calls."""
    rank = share * sum(latencies)
    below = 0
    for bucket, count in enumerate(latencies):
        if count and below + count >= rank:
            within = min(1.0, max(0.0, (rank - below) / count))
            return _estimate_ms(bucket, within)
        below += count
    return None


def _estimate_ms(bucket: int, within: float) -> float:
    if bucket == 0:
        return round(within, 3)
    lowest: float = _RATIO ** (bucket - 1)
    if bucket == BUCKETS - 1:
        return round(lowest, 3)
    return round(float(lowest * _RATIO**within), 3)


def add_latencies(all_latencies: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the calls of several minutes by bucket."""
    return [
        sum(one[bucket] for one in all_latencies if bucket < len(one)) for bucket in range(BUCKETS)
    ]
