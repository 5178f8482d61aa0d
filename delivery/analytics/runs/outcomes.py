"""Define the outcomes of deliveries, and when an open one is stuck, lost or unknown.

A delivery that is waiting, held or in flight is judged by the end of the log, never by the time of
the analysis: the newest row that any delivery has.

| verdict | condition |
| --- | --- |
| unknown | later rows of it may be in a segment that was set aside |
| lost | it waits, and newer messages of its PUSH subscription were attempted |
| stuck | an attempt without outcome for an hour; a lease for 13 hours; held or due for a day, |
| | or for 6 hours while its subscription was not served |
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from delivery.analytics.sealing.errors import SetAside
from rooms.domain.state_machine import LogKind

CREATION_KINDS: Final = (LogKind.ENQUEUED, LogKind.REPLAYED)
"""Kinds that create a delivery. A replay has no publish row; its one row reports both."""
ORDINARY_KINDS: Final = (
    LogKind.ENQUEUED, LogKind.ATTEMPTED, LogKind.RETRY_SCHEDULED, LogKind.DELIVERED,
    LogKind.SIDELINED, LogKind.DROPPED, LogKind.EXPIRED, LogKind.CANCELLED,
    LogKind.LEASED, LogKind.PULL_ACKED,
)  # fmt: skip
END_KINDS: Final = (
    LogKind.DELIVERED,
    LogKind.SIDELINED,
    LogKind.DROPPED,
    LogKind.EXPIRED,
    LogKind.CANCELLED,
)
OUTCOME_BY_KIND: Final = {
    LogKind.DELIVERED: "delivered",
    LogKind.PULL_ACKED: "acked",
    LogKind.HANDED_OVER: "handed_over",
    LogKind.EXPIRED: "expired",
    LogKind.CANCELLED: "cancelled",
    LogKind.DROPPED: "dropped",
    LogKind.PURGED: "purged",
    LogKind.SIDELINED: "sidelined",
    LogKind.HELD: "held",
    LogKind.LEASED: "in_flight",
    LogKind.ATTEMPTED: "in_flight",
}
OUTCOMES: Final = (
    *dict.fromkeys(OUTCOME_BY_KIND.values()),
    "waiting",
    "stuck",
    "unknown",
    "lost",
)
"""Outcomes of a delivery; each has exactly one."""

S_US: Final = 1_000_000
HOUR_US: Final = 3600 * S_US
GRACE_US: Final = HOUR_US
"""Delay of newer attempts after which a waiting PUSH delivery counts as lost."""
ATTEMPT_US: Final = HOUR_US
"""Time without an outcome after which an attempt is stuck: it takes minutes at most."""
LEASE_US: Final = 13 * HOUR_US
"""Age from which a lease is stuck: the longest lease is 12 hours."""
PENDING_US: Final = 24 * HOUR_US
"""Time after which what is held or due is stuck."""
UNSERVED_US: Final = 6 * HOUR_US
"""The same where the subscription had no attempt, lease or hand-over for as long."""

PENDING: Final = ("waiting", "held", "in_flight")
AGED: Final = (*PENDING, "stuck", "unknown", "lost", "sidelined")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadHours:
    """Name hours with rows in segments that are set aside. `anywhere`: their hours are unknown."""

    parts: frozenset[int] = frozenset()
    anywhere: bool = False

    @classmethod
    def of(cls, found: Collection[SetAside]) -> "UnreadHours":
        """Return the hours of rows that are in no result."""
        unread = [one for one in found if one.has_rows and not one.counted]
        return cls(
            parts=frozenset(one.part for one in unread if one.part is not None),
            anywhere=any(one.part is None for one in unread),
        )

    @property
    def later_before_us(self) -> int | None:
        """Return the time before which a last row may have later ones that are unread; None: no."""
        if not self.parts:
            return None
        # An hour more, as clocks of several PostgreSQL servers differ.
        return (max(self.parts) + 1) * HOUR_US + GRACE_US
