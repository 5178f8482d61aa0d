"""Name what usage counts, and by what it is summed up."""

from collections.abc import Mapping
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
