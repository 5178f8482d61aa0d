"""Decide what open deliveries are: waiting, stuck, lost, or unknown for want of segments."""

from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.runs.conformance import CODE_MASK, CODES
from delivery.analytics.runs.outcomes import (
    AGED,
    ATTEMPT_US,
    GRACE_US,
    LEASE_US,
    PENDING,
    PENDING_US,
    S_US,
    UNSERVED_US,
    UnreadHours,
)
from rooms.domain.state_machine import LogKind


def may_have_later(unread: UnreadHours, last_us: Column) -> Column:
    """Return True if rows after this time may be among the unread ones."""
    before_us = unread.later_before_us
    if unread.anywhere or before_us is None:
        return F.lit(unread.anywhere)
    return last_us < F.lit(before_us)


def may_contain(unread: UnreadHours, part: Column) -> Column:
    """Return True if rows of this hour may be among the unread ones."""
    if unread.anywhere or not unread.parts:
        return F.lit(unread.anywhere)
    return part.isin(*sorted(unread.parts))


def log_end_us(partials: DataFrame, now: datetime) -> int:
    """Return the time of the newest row of any delivery, but not after `now`."""
    newest = partials.agg(F.max("last_us").alias("newest")).collect()[0]["newest"]
    now_us = int(now.timestamp() * S_US)
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
        F.when(~outcome.isin(*PENDING), outcome)
        .when(may_have_later(unread, F.col("last_us")), "unknown")
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
        journeys.where(F.col("outcome").isin(*AGED))
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
