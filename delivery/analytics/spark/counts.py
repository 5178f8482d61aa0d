"""Count attempts in small time bins, as input of co-failure, incidents and retry advice.

Failing minutes of subscriptions are arrays that fit into one process for a log of any size.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.findings.advice import BY_ATTEMPT
from delivery.analytics.findings.cells import (
    CELL_S,
    GROUPED_BY,
    LOGGED,
    SAMPLE_DIGITS,
    SAMPLE_SEPARATOR,
    AttemptCells,
    sample_step,
)
from delivery.analytics.findings.series import BIN_S
from delivery.analytics.runs.conformance import CODES
from delivery.analytics.spark.segments import text_key
from rooms.domain.state_machine import LogKind


def count_attempts(rows: DataFrame) -> DataFrame:
    """Return (part, room_id, sub_key, bin, attempt, attempts, successes, fresh, retries, …).

    `bin` counts 15 s since 1970, `attempt` is the attempt number, `fresh` counts failed first
    attempts. `retries` counts attempts followed by another one, and `delay_ms` sums the waits
    between them. `latency_us` sums durations.
    """
    attempted = F.col("code") == CODES[LogKind.ATTEMPTED]
    retried = F.col("code") == CODES[LogKind.RETRY_SCHEDULED]
    failed = F.col("error_class").isNotNull()
    none = F.lit(0)
    number = F.when(retried, F.col("attempt") - 1).otherwise(F.col("attempt")).alias("attempt")
    return (
        rows.where(attempted | retried)
        .groupBy(
            "part",
            "room_id",
            "sub_key",
            F.floor(F.col("ts_us") / F.lit(BIN_S * 1_000_000)).alias("bin"),
            number,
        )
        .agg(
            F.count(F.when(attempted, 1)).alias("attempts"),
            F.count(F.when(attempted & ~failed, 1)).alias("successes"),
            F.count(F.when(attempted & failed & (F.col("attempt") == 0), 1)).alias("fresh"),
            F.sum(F.when(attempted, F.col("latency_us")).otherwise(none)).alias("latency_us"),
            F.count(F.when(retried, 1)).alias("retries"),
            F.sum(F.when(retried, F.col("delay_ms")).otherwise(none)).alias("delay_ms"),
        )
    )


def attempts_by_bin(counts: DataFrame) -> DataFrame:
    """Return (sub_key, bin, attempts, successes) for the bins with attempts."""
    return (
        counts.where("attempts > 0")
        .groupBy("sub_key", "bin")
        .agg(F.sum("attempts").alias("attempts"), F.sum("successes").alias("successes"))
    )


def count_attributes(rows: DataFrame) -> DataFrame:
    """Return (part, sub_key, bin, first, …LOGGED, policy_version, attempts, sidelined).

    The input of incidents. `bin` counts CELL_S since 1970 at the start of the attempt, and `first`
    marks first attempts. Only failed attempts keep their HTTP status.
    """
    attempted = F.col("code") == CODES[LogKind.ATTEMPTED]
    sidelined = F.col("code") == CODES[LogKind.SIDELINED]
    failed = attempted & F.col("error_class").isNotNull()
    began_us = F.col("ts_us") - F.when(attempted, F.coalesce("latency_us", F.lit(0))).otherwise(0)
    texts = {
        "error_class": F.when(failed, F.col("error_class")),
        "http_status": F.when(failed, F.col("http_status")),
    }
    return (
        rows.where((attempted | sidelined) & F.col("sub_key").isNotNull())
        .groupBy(
            "part",
            "sub_key",
            F.floor(began_us / F.lit(CELL_S * 1_000_000)).alias("bin"),
            (attempted & (F.col("attempt") == 0)).alias("first"),
            *(texts.get(name, F.col(name)).cast("string").alias(name) for name in LOGGED),
            "policy_version",
        )
        .agg(
            F.count(F.when(attempted, 1)).alias("attempts"),
            F.count(F.when(sidelined, 1)).alias("sidelined"),
        )
    )


def collect_cells(counted: DataFrame, *, most: int | None = None) -> AttemptCells:
    """Collect the counts of `count_attributes`.

    Of more than `most` rows (by default `MAX_CELLS`) a fixed sample is taken, of successes and
    failures alike: so a sample has less evidence, and no evidence that the log has not.
    """
    step = sample_step(counted.count(), most)
    columns = [name for name in counted.columns if name not in {"part", "attempts", "sidelined"}]
    if step > 1:
        texts = [
            F.coalesce(F.col(name).cast("string"), F.lit(""))
            for name in GROUPED_BY
            if name in columns
        ]
        digits = F.substring(F.md5(F.concat_ws(SAMPLE_SEPARATOR, *texts)), 1, SAMPLE_DIGITS)
        counted = counted.where(F.conv(digits, 16, 10).cast("long") % step == 0)
    rows = counted.select(*columns, "attempts", "sidelined").toArrow()
    return AttemptCells.from_arrow(rows, weight=step)


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


def arrival_counts(journeys: DataFrame, salt: str) -> DataFrame:
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
        text_key("subscription_id", salt).alias("sub_key"),
        first,
        F.col("attempts").alias("tries"),
        delivered,
    )
    return by_bin.agg(F.count(F.lit(1)).alias("count"))
