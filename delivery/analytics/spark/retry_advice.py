"""Count attempts and deliveries for retry advice."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.findings.advice import BY_ATTEMPT
from delivery.analytics.findings.series import BIN_S
from delivery.analytics.runs.conformance import CODES
from delivery.analytics.spark.segments import text_key
from rooms.domain.state_machine import LogKind


def attempt_success_rates(counts: DataFrame) -> DataFrame:
    """Return the success rate by attempt number and the mean wait after it, over all partitions.

    `shortest_ms` and `longest_ms` are of bins with one retry, whose wait is known exactly.
    """
    single = F.when(F.col("retries") == 1, F.col("delay_ms"))
    counted = counts.groupBy("room_id", "sub_key", "attempt").agg(
        *(F.sum(name).alias(name) for name in BY_ATTEMPT),
        F.min(single).alias("shortest_ms"),
        F.max(single).alias("longest_ms"),
    )
    return counted.withColumns(
        {
            "hazard": F.try_divide("successes", "attempts"),
            "mean_delay_ms": F.try_divide(F.col("delay_ms").cast("double"), F.col("retries")),
        }
    )


def arrival_counts(journeys: DataFrame) -> DataFrame:
    """Return (sub_key, bin, tries, delivered, count) of finished PUSH deliveries by first attempt.

    A sidelined delivery counts as failed, also after a shovel.
    """
    aside = F.col("kinds").bitwiseAND(1 << CODES[LogKind.SIDELINED]) != 0
    done = (F.col("outcome") == "delivered") | aside
    first = F.floor(F.col("first_attempt_us") / F.lit(BIN_S * 1_000_000)).alias("bin")
    delivered = F.when(aside, 0).otherwise(1).alias("delivered")
    ended = journeys.where(done & F.col("first_attempt_us").isNotNull())
    # There are nearly as many groups as deliveries, and numbers are lighter than texts.
    by_bin = ended.groupBy(
        text_key("subscription_id").alias("sub_key"),
        first,
        F.col("attempts").alias("tries"),
        delivered,
    )
    return by_bin.agg(F.count(F.lit(1)).alias("count"))
