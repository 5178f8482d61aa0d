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
    """(part, room_id, sub_key, bin, attempt, attempts, successes, fresh, latency_us, retries, delay_ms).

    `bin` counts 15 s since 1970, `attempt` is the number of the attempt, `fresh` are first tries that failed. `retries`: how
    many were followed by another one, `delay_ms`: how long those waited for it, in all.
    """
    attempted = F.col("code") == CODES[LogKind.ATTEMPTED]
    retried = F.col("code") == CODES[LogKind.RETRY_SCHEDULED]
    failed = F.col("error_class").isNotNull()
    none = F.lit(0)
    number = F.when(retried, F.col("attempt") - 1).otherwise(F.col("attempt")).alias("attempt")
    return (
        rows.where(attempted | retried)
        .groupBy("part", "room_id", "sub_key", F.floor(F.col("ts_us") / F.lit(BIN_S * 1_000_000)).alias("bin"), number)
        .agg(
            F.count(F.when(attempted, 1)).alias("attempts"),
            F.count(F.when(attempted & ~failed, 1)).alias("successes"),
            F.count(F.when(attempted & failed & (F.col("attempt") == 0), 1)).alias("fresh"),
            F.sum(F.when(attempted, F.col("latency_us")).otherwise(none)).alias("latency_us"),
            F.count(F.when(retried, 1)).alias("retries"),
            F.sum(F.when(retried, F.col("delay_ms")).otherwise(none)).alias("delay_ms"),
        )
    )


def bins(cells_of_parts: DataFrame) -> DataFrame:
    """(sub_key, bin, attempts, successes): the bins with attempts."""
    return (
        cells_of_parts.where("attempts > 0")
        .groupBy("sub_key", "bin")
        .agg(F.sum("attempts").alias("attempts"), F.sum("successes").alias("successes"))
    )


def minutes(cells_of_parts: DataFrame) -> DataFrame:
    """(sub_key, minute, attempts, failures, fresh): `minute` counts minutes since 1970."""
    minute = F.floor(F.col("bin") / F.lit(BINS_A_MINUTE)).alias("minute")
    return (
        cells_of_parts.where("attempts > 0")
        .groupBy("sub_key", minute)
        .agg(
            F.sum("attempts").alias("attempts"),
            (F.sum("attempts") - F.sum("successes")).alias("failures"),
            F.sum("fresh").alias("fresh"),
        )
    )


def causes(rows: DataFrame) -> DataFrame:
    """(part, room_id, sub_key, minute, …ATTRIBUTES, attempts): what incidents are explained from.

    Failed attempts have their minute. All others, whose minute explains nothing, are one sum a partition.
    """
    minute = F.when(F.col("error_class").isNotNull(), F.floor(F.col("ts_us") / F.lit(60_000_000))).alias("minute")
    grouped = _attempts(rows).groupBy("part", "room_id", "sub_key", minute, *ATTRIBUTES)
    return grouped.agg(F.count(F.lit(1)).alias("attempts"))
