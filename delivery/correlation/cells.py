"""Cells: attempts counted in small bins of time. Co-failure, incidents and advice are worked out from these alone."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.correlation.conformance import CODES
from rooms.domain.states import LogKind

BIN_S: Final = 15
BINS_A_MINUTE: Final = 60 // BIN_S
ATTRIBUTES: Final = ("target_host", "event_type", "event_version", "worker_host", "error_class", "http_status")
"""What an incident may be explained by, the room and subscription apart."""


def _attempts(rows: DataFrame) -> DataFrame:
    """Attempts; only failed ones keep their status, so that it is weighed among failures."""
    status = F.when(F.col("error_class").isNotNull(), F.col("http_status")).alias("http_status")
    names = ("part", "room_id", "sub_key", "ts_us", "attempt")
    tried = rows.where(F.col("code") == CODES[LogKind.ATTEMPTED])
    return tried.select(*names, *(name for name in ATTRIBUTES if name != "http_status"), status)


def cells(rows: DataFrame) -> DataFrame:
    """(part, sub_key, bin, attempts, successes, fresh): `bin` counts 15 s since 1970; `fresh`: first tries that failed."""
    one, none = F.lit(1), F.lit(0)
    return (
        _attempts(rows)
        .groupBy("part", "sub_key", F.floor(F.col("ts_us") / F.lit(BIN_S * 1_000_000)).alias("bin"))
        .agg(
            F.count(one).alias("attempts"),
            F.sum(F.when(F.col("error_class").isNull(), one).otherwise(none)).alias("successes"),
            F.sum(F.when((F.col("attempt") == 0) & F.col("error_class").isNotNull(), one).otherwise(none)).alias(
                "fresh"
            ),
        )
    )


def minutes(cells_of_parts: DataFrame) -> DataFrame:
    """(sub_key, minute, attempts, failures, fresh): `minute` counts minutes since 1970."""
    minute = F.floor(F.col("bin") / F.lit(BINS_A_MINUTE)).alias("minute")
    return cells_of_parts.groupBy("sub_key", minute).agg(
        F.sum("attempts").alias("attempts"),
        (F.sum("attempts") - F.sum("successes")).alias("failures"),
        F.sum("fresh").alias("fresh"),
    )


def failures(rows: DataFrame) -> DataFrame:
    """Failed attempts a minute, subscription and value of each attribute: what incidents are explained from."""
    minute = F.floor(F.col("ts_us") / F.lit(60_000_000)).alias("minute")
    failed = _attempts(rows).where("error_class is not null")
    return failed.groupBy("part", "room_id", "sub_key", minute, *ATTRIBUTES).agg(F.count(F.lit(1)).alias("failures"))


def totals(rows: DataFrame) -> DataFrame:
    """All attempts a partition and value of each attribute: what the explanations are measured against."""
    return _attempts(rows).groupBy("part", "room_id", "sub_key", *ATTRIBUTES).agg(F.count(F.lit(1)).alias("attempts"))


def hazards(rows: DataFrame) -> DataFrame:
    """(part, room_id, sub_key, attempt, attempts, successes, latency_us, retries, delay_ms) by number of the attempt.

    `retries`: how many were followed by another one, `delay_ms`: how long those waited for it, in all.
    """
    attempted = F.col("code") == CODES[LogKind.ATTEMPTED]
    retried = F.col("code") == CODES[LogKind.RETRY_SCHEDULED]
    one, none = F.lit(1), F.lit(0)
    number = F.when(retried, F.col("attempt") - 1).otherwise(F.col("attempt")).alias("attempt")
    return (
        rows.where(attempted | retried)
        .groupBy("part", "room_id", "sub_key", number)
        .agg(
            F.sum(F.when(attempted, one).otherwise(none)).alias("attempts"),
            F.sum(F.when(attempted & F.col("error_class").isNull(), one).otherwise(none)).alias("successes"),
            F.sum(F.when(attempted, F.col("latency_us")).otherwise(none)).alias("latency_us"),
            F.sum(F.when(retried, one).otherwise(none)).alias("retries"),
            F.sum(F.when(retried, F.col("delay_ms")).otherwise(none)).alias("delay_ms"),
        )
    )
