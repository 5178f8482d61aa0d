"""Decide what open deliveries are: waiting, stuck, lost, or unknown for want of segments.

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
from datetime import datetime
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.sealing.reasons import SetAside
from delivery.analytics.spark.conformance import CODE_MASK, CODES
from rooms.domain.state_machine import LogKind

_S_US: Final = 1_000_000
_HOUR_US: Final = 3600 * _S_US
GRACE_US: Final = _HOUR_US
"""Delay of newer attempts after which a waiting PUSH delivery counts as lost."""
ATTEMPT_US: Final = _HOUR_US
"""Time without an outcome after which an attempt is stuck: it takes minutes at most."""
LEASE_US: Final = 13 * _HOUR_US
"""Age from which a lease is stuck: the longest lease is 12 hours."""
PENDING_US: Final = 24 * _HOUR_US
"""Time after which what is held or due is stuck."""
UNSERVED_US: Final = 6 * _HOUR_US
"""The same where the subscription had no attempt, lease or hand-over for as long."""

_PENDING: Final = ("waiting", "held", "in_flight")
_AGED: Final = (*_PENDING, "stuck", "unknown", "lost", "sidelined")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadHours:
    """Hours with rows in segments that are set aside. `anywhere`: their hours are unknown."""

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

    def may_have_later(self, last_us: Column) -> Column:
        """Return True if rows after this time may be among the unread ones."""
        if self.anywhere or not self.parts:
            return F.lit(self.anywhere)
        # An hour more, as clocks of several PostgreSQL servers differ.
        return last_us < F.lit((max(self.parts) + 1) * _HOUR_US + GRACE_US)

    def contain(self, part: Column) -> Column:
        """Return True if rows of this hour may be among the unread ones."""
        if self.anywhere or not self.parts:
            return F.lit(self.anywhere)
        return part.isin(*sorted(self.parts))


def log_end_us(partials: DataFrame, now: datetime) -> int:
    """Return the time of the newest row of any delivery, but not after `now`."""
    newest = partials.agg(F.max("last_us").alias("newest")).collect()[0]["newest"]
    now_us = int(now.timestamp() * _S_US)
    return now_us if newest is None else min(int(newest), now_us)


def with_verdicts(
    merged: DataFrame, service: DataFrame, *, end_us: int, unread: UnreadHours
) -> DataFrame:
    """Set the outcomes `lost`, `stuck` and `unknown`.

    `service`: (sub_key, served_ms, serviced_us): the publish time of the newest message with a
    first attempt at the subscription, and its last attempt, lease or hand-over. A delivery due an
    hour before `served_ms` that still waits was passed over. A delivery without such a message
    waits, as its subscription has no consumer (paused, disabled, not pulled): in time, it is stuck.
    """
    joined = merged.join(F.broadcast(service), "sub_key", "left").withColumn(
        "since_us", _since_us()
    )
    outcome, end = F.col("outcome"), F.lit(end_us)
    kind = F.col("last_key").bitwiseAND(CODE_MASK)
    passed = F.col("due_us") + GRACE_US < F.col("served_ms") * 1000
    lost = (outcome == "waiting") & F.coalesce(passed, F.lit(False))
    idle_us = end - F.col("since_us")
    unserved_us = end - F.coalesce("serviced_us", F.lit(0))
    stuck = (
        F.when(outcome == "in_flight", idle_us > _limit(kind))
        .when(
            outcome.isin("held", "waiting"),
            (idle_us > PENDING_US) | ((idle_us > UNSERVED_US) & (unserved_us > UNSERVED_US)),
        )
        .otherwise(F.lit(False))
    )
    verdict = (
        F.when(~outcome.isin(*_PENDING), outcome)
        .when(unread.may_have_later(F.col("last_us")), "unknown")
        .when(lost, "lost")
        .when(stuck, "stuck")
        .otherwise(outcome)
    )
    return joined.withColumn("outcome", verdict).drop("served_ms", "serviced_us")


def _limit(kind: Column) -> Column:
    return F.when(kind == CODES[LogKind.LEASED], LEASE_US).otherwise(ATTEMPT_US)


def _since_us() -> Column:
    """Return since when a delivery is as it is; what waits is so since it was due."""
    kind = F.col("last_key").bitwiseAND(CODE_MASK)
    others = [LogKind.LEASED, LogKind.ATTEMPTED, LogKind.HELD, LogKind.SIDELINED]
    waits = ~kind.isin([CODES[one] for one in others])
    return F.when(waits, F.coalesce("due_us", "last_us")).otherwise(F.col("last_us"))


def ages(journeys: DataFrame, *, end_us: int) -> DataFrame:
    """Return how many deliveries of each subscription are open, and the oldest of each outcome."""
    oldest = F.struct("since_us", "delivery_id")
    return (
        journeys.where(F.col("outcome").isin(*_AGED))
        .groupBy("room_id", "subscription_id", "outcome")
        .agg(F.count(F.lit(1)).alias("deliveries"), F.min(oldest).alias("oldest"))
        .select(
            "room_id",
            "subscription_id",
            "outcome",
            "deliveries",
            F.timestamp_micros("oldest.since_us").alias("oldest_since"),
            (F.greatest(F.lit(end_us) - F.col("oldest.since_us"), F.lit(0)) / F.lit(1e6)).alias(
                "oldest_age_s"
            ),
            F.col("oldest.delivery_id").alias("oldest_delivery_id"),
        )
    )
