"""Derive the journey of each delivery from its log rows, in any order and with duplicates.

The rows of a partition become one row a delivery (`partial_journeys`), and partitions are then
merged (`merge_journeys`). Every aggregate is a minimum, maximum, sum or OR of integers. It merges
exactly, and Spark never has to sort for it.
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.runs.conformance import (
    CODE_MASK,
    CODES,
    FINAL_KINDS,
    ILLEGAL,
    INITIAL,
    STEP_STARTS,
    TRANSITIONS,
)
from delivery.analytics.runs.outcomes import (
    CREATION_KINDS,
    END_KINDS,
    ORDINARY_KINDS,
    OUTCOME_BY_KIND,
)
from delivery.analytics.runs.tables import MAXIMA, MINIMA, SUMS
from rooms.domain.state_machine import LogKind

_IDS: Final = ("delivery_hi", "delivery_lo")
_HOUR_MS: Final = 3_600_000
_MAX_BROADCAST_ROWS: Final = 200_000
"""Deliveries with rows in several hours up to which they are broadcast; above, all are merged."""
HIGH_CARDINALITY_COLUMNS: Final = (
    "delivery_id", "message_id", "delivery_hi", "delivery_lo", "message_hi", "message_lo",
    "last_key", "latency_us", "enqueued_us", "first_us", "first_attempt_us", "finished_us",
    "last_us", "due_us", "since_us",
)  # fmt: skip
"""Columns of nearly unique values, which get no Parquet dictionary."""


def _is(*kinds: LogKind) -> Column:
    return F.col("code").isin([CODES[kind] for kind in kinds])


def _count(condition: Column) -> Column:
    # Cheaper than a sum of ones and zeros, and it cannot be null or overflow.
    return F.count(F.when(condition, 1))


def partial_journeys(rows: DataFrame) -> DataFrame:
    """Return one row for each delivery of a partition."""
    attempted, retried = _is(LogKind.ATTEMPTED), _is(LogKind.RETRY_SCHEDULED)
    due = F.col("ts_us") + F.coalesce("delay_ms", F.lit(0)) * 1000
    return (
        rows.where("delivery_hi is not null")
        .groupBy("part", "delivery_hi", "delivery_lo")
        .agg(
            F.count(F.lit(1)).alias("events"),
            _count(_is(*CREATION_KINDS)).alias("enqueued"),
            _count(attempted).alias("attempts"),
            _count(attempted & F.col("error_class").isNull()).alias("successes"),
            _count(retried).alias("retries"),
            F.sum(F.when(retried, F.col("attempt")).otherwise(0))
            .cast("bigint")
            .alias("retry_steps"),
            _count(_is(LogKind.LEASED)).alias("leases"),
            _count(_is(*END_KINDS)).alias("ends"),
            _count(_is(*FINAL_KINDS)).alias("finals"),
            F.sum(F.when(retried, F.col("delay_ms")).otherwise(0)).alias("backoff_ms"),
            F.sum(F.when(attempted, F.col("latency_us")).otherwise(0)).alias("latency_us"),
            F.min(F.when(_is(*CREATION_KINDS), F.col("ts_us"))).alias("enqueued_us"),
            F.min("ts_us").alias("first_us"),
            F.min(F.when(attempted, F.col("ts_us"))).alias("first_attempt_us"),
            F.min(F.when(_is(*FINAL_KINDS, *END_KINDS, LogKind.HANDED_OVER), F.col("ts_us"))).alias(
                "finished_us"
            ),
            F.max("room_id").alias("room_id"),
            F.max("message_hi").alias("message_hi"),
            F.max("message_lo").alias("message_lo"),
            F.max("sub_key").alias("sub_key"),
            F.max("type_key").alias("type_key"),
            F.max("host_key").alias("host_key"),
            F.max("event_version").alias("event_version"),
            F.max("ts_us").alias("last_us"),
            F.max("order_key").alias("last_key"),
            F.max(F.when(_is(*STEP_STARTS), due)).alias("due_us"),
            F.max("generation").alias("generation"),
            F.bit_or(F.expr("shiftleft(1, code)")).alias("kinds"),
        )
    )


def merge_journeys(partials: DataFrame) -> DataFrame:
    """Return one row a delivery with its outcome; `reconciliation` judges those that are open."""
    return _with_outcome(_sum_by_delivery(partials))


def merge_journeys_by_hour(partials: DataFrame) -> DataFrame:
    """Merge as `merge_journeys`, but leave deliveries with all rows in one hour in place."""
    other_hours = partials.where(_is_other_hour()).select(*_IDS)
    if other_hours.limit(_MAX_BROADCAST_ROWS + 1).count() > _MAX_BROADCAST_ROWS:
        return merge_journeys(partials)
    keys = F.broadcast(other_hours.distinct())
    whole = partials.join(keys, list(_IDS), "left_anti").drop("part")
    spanning = partials.join(keys, list(_IDS), "left_semi")
    return _with_outcome(whole.unionByName(_sum_by_delivery(spanning)))


def _is_other_hour() -> Column:
    """Return True for rows outside the publish hour; a delivery with rows in two hours has one."""
    return F.expr(f"shiftrightunsigned(message_hi, 16) div {_HOUR_MS} <> part")


def _sum_by_delivery(partials: DataFrame) -> DataFrame:
    return partials.groupBy(*_IDS).agg(
        *(F.sum(name).alias(name) for name in SUMS),
        *(F.min(name).alias(name) for name in MINIMA),
        *(F.max(name).alias(name) for name in MAXIMA),
        F.bit_or("kinds").alias("kinds"),
    )


def _with_outcome(merged: DataFrame) -> DataFrame:
    last = F.col("last_key").bitwiseAND(CODE_MASK)
    outcome = F.lit("waiting")
    for kind, name in OUTCOME_BY_KIND.items():
        outcome = F.when(last == CODES[kind], name).otherwise(outcome)
    allowed = sum(1 << CODES[kind] for kind in ORDINARY_KINDS)
    # Retries with at most one end are always legal. A pulled delivery is plain if leased once.
    pushed = (F.col("leases") == 0) & (F.col("ends") <= 1) & (F.col("finals") <= 1)
    acked = F.col("kinds").bitwiseAND(1 << CODES[LogKind.PULL_ACKED]) != 0
    pulled = (
        (F.col("leases") == 1)
        & (F.col("retries") == 0)
        & (F.col("ends") == 0)
        & (F.col("finals") <= 1)
    )
    plain = (
        (F.col("enqueued") == 1)
        & (F.col("kinds").bitwiseAND(~allowed) == 0)
        & (F.col("generation") == 0)
        & (F.col("retry_steps") * 2 == F.col("retries") * (F.col("retries") + 1))
        & (pushed | pulled)
        & (((F.col("leases") > 0) == acked) | (F.col("finals") == 0))
    )
    return merged.withColumn("outcome", outcome).withColumn("plain", plain)


def kind_paths(rows: DataFrame) -> DataFrame:
    """Return (delivery_hi, delivery_lo, events, path, legal): ordered kinds and their legality."""
    codes = F.transform(
        F.sort_array(F.collect_list("order_key")), lambda key: key.bitwiseAND(CODE_MASK)
    )
    width = len(TRANSITIONS[0])
    table = F.array(*(F.lit(state) for row in TRANSITIONS for state in row))
    step = F.aggregate(
        "codes",
        F.lit(INITIAL),
        lambda state, code: F.get(table, (state * width + code).cast("int")),
    )
    names = F.array(F.lit("unknown"), *(F.lit(kind.value) for kind in CODES))
    path = F.concat_ws(" ", F.transform("codes", lambda code: F.get(names, code.cast("int"))))
    found = rows.groupBy("delivery_hi", "delivery_lo").agg(
        F.count(F.lit(1)).alias("events"), codes.alias("codes")
    )
    return found.select(
        "delivery_hi", "delivery_lo", "events", path.alias("path"), (step != ILLEGAL).alias("legal")
    )


def anomaly_name() -> Column:
    """Name the inconsistency of a journey; null if there is none."""
    return (
        F.when(F.col("enqueued") == 0, "never_enqueued")
        .when(F.col("enqueued") > 1, "enqueued_twice")
        .when(~F.coalesce("legal", F.lit(True)), "illegal_path")
        .when(
            (F.col("outcome") == "delivered") & (F.col("successes") == 0),
            "delivered_without_success",
        )
    )


def id_text(hi: str, lo: str) -> Column:
    """Format an id from its halves."""
    # As bytes, since cutting a text counts its characters from the start.
    high, low = (
        F.lpad(F.lower(F.hex(half)).cast("binary"), F.lit(16), F.lit(b"0")) for half in (hi, lo)
    )
    cuts = ((high, 1, 8), (high, 9, 4), (high, 13, 4), (low, 1, 4), (low, 5, 12))
    first, *others = (F.substring(half, start, length) for half, start, length in cuts)
    return F.concat(first, *(piece for cut in others for piece in (F.lit(b"-"), cut))).cast(
        "string"
    )


def with_message(rows: DataFrame) -> DataFrame:
    """Add the text of the message id."""
    return rows.withColumn("message_id", id_text("message_hi", "message_lo"))


def outcome_counts(journeys: DataFrame) -> DataFrame:
    """Return (room_id, subscription_id, outcome, deliveries, attempts, duplicates)."""
    return journeys.groupBy("room_id", "subscription_id", "outcome").agg(
        F.count(F.lit(1)).alias("deliveries"),
        F.sum("attempts").alias("attempts"),
        F.sum(F.greatest(F.col("successes") - 1, F.lit(0))).alias("duplicates"),
    )
