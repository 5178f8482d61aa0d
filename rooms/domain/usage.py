"""Name what usage counts by the hour and by the minute, and estimate how long calls took.

Latencies are counted in buckets. Bucket 0 holds up to 1 ms, bucket n more than 2^((n-1)/2) and up
to 2^(n/2) ms, the last one everything longer. An estimate is in
the bucket of the exact value, so they differ by less than a factor of 1.42.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from rooms.domain.ids import OrganisationId, RoomId


class UsageDimension(StrEnum):
    """Name what counts are grouped by, besides time."""

    ORGANISATION = "organisation"
    ROOM = "room"
    EVENT_TYPE = "event_type"
    APPLICATION = "application"


class UsagePeriod(StrEnum):
    """Name the length of time of one row; days are those of UTC."""

    HOUR = "hour"
    DAY = "day"

    @property
    def length(self) -> timedelta:
        """Return how long it lasts."""
        return timedelta(hours=1) if self is UsagePeriod.HOUR else timedelta(days=1)

    def floor(self, at: datetime) -> datetime:
        """Return the begin of the hour or day that `at` is in."""
        start = at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        return start if self is UsagePeriod.HOUR else start.replace(hour=0)


MAX_APPLICATIONS: Final = 100
"""The applications of an organisation that an hour has rows of: those that were counted first."""
OTHER_APPLICATIONS: Final = "*"
"""Stands for all further ones; no application has this name."""
COUNTERS: Final = (
    "messages",
    "bytes",
    "deliveries",
    "attempts",
    "failed_attempts",
    "delivered",
    "sidelined",
    "expired",
    "cancelled",
    "dropped",
    "purged",
)
"""The names of the counts: columns of the table, and fields of the API."""
HIDDEN_COLUMNS: Final = {
    "deliveries": "kept_deliveries",
    "expired": "kept_expired",
    "cancelled": "kept_cancelled",
}
"""Counts with a part that a subscriber in another organisation's room may not know of.

By their columns with this part: what was not due or held by a suspension when it was counted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Hold the counts of one period and group.

    What it is not grouped by is None. `event_type` is also None for deliveries whose message was
    gone, and `application` for what has none. Names are None for what was deleted, and of rooms of
    others.
    """

    start: datetime
    organisation_id: OrganisationId | None
    organisation_name: str | None
    room_id: RoomId | None
    room_name: str | None
    event_type: str | None
    application: str | None
    counts: Mapping[str, int]


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
