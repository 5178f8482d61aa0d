"""Count attempts in small time bins, as input of co-failure, incidents and retry advice.

Failing minutes of subscriptions are arrays that fit into one process for a log of any size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.spark.conformance import CODES
from rooms.domain.state_machine import LogKind

BIN_S: Final = 15
BINS_PER_MINUTE: Final = 60 // BIN_S
ATTRIBUTES: Final = (
    "target_host",
    "event_type",
    "event_version",
    "worker_host",
    "error_class",
    "http_status",
)
"""Attributes that may explain an incident, besides room and subscription."""


def _attempt_rows(rows: DataFrame) -> DataFrame:
    """Return the attempts; only failed ones keep their HTTP status."""
    status = F.when(F.col("error_class").isNotNull(), F.col("http_status")).alias("http_status")
    names = ("part", "room_id", "sub_key", "ts_us", "attempt")
    tried = rows.where(F.col("code") == CODES[LogKind.ATTEMPTED])
    return tried.select(*names, *(name for name in ATTRIBUTES if name != "http_status"), status)


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


def attempts_by_minute(counts: DataFrame) -> DataFrame:
    """Return (sub_key, minute, attempts, failures, fresh); `minute` counts from 1970."""
    minute = F.floor(F.col("bin") / F.lit(BINS_PER_MINUTE)).alias("minute")
    return (
        counts.where("attempts > 0")
        .groupBy("sub_key", minute)
        .agg(
            F.sum("attempts").alias("attempts"),
            (F.sum("attempts") - F.sum("successes")).alias("failures"),
            F.sum("fresh").alias("fresh"),
        )
    )


def count_attributes(rows: DataFrame) -> DataFrame:
    """Return (part, room_id, sub_key, minute, …ATTRIBUTES, attempts), the input of root causes.

    Failed attempts have their minute. All others are one sum a partition.
    """
    minute = F.when(
        F.col("error_class").isNotNull(), F.floor(F.col("ts_us") / F.lit(60_000_000))
    ).alias("minute")
    grouped = _attempt_rows(rows).groupBy("part", "room_id", "sub_key", minute, *ATTRIBUTES)
    return grouped.agg(F.count(F.lit(1)).alias("attempts"))


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MIN_BAD_FAILURES: Final = 2
_MIN_BAD_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSeries:
    """Attempts and failures of a subscription by minute since 1970, ascending."""

    key: int
    minutes: Ints
    attempts: Ints
    failures: Ints
    first_failures: Ints
    """Failed first attempts, each of another delivery."""

    def bad_minutes(self) -> Ints:
        """Return the minutes with at least two failures that are at least half of all attempts."""
        enough = self.failures >= _MIN_BAD_FAILURES
        return self.minutes[enough & (self.failures >= _MIN_BAD_SHARE * self.attempts)]

    def failing_mask(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the minutes in which at least half of the attempts failed."""
        failing: npt.NDArray[np.bool_] = self.failures >= np.maximum(
            _MIN_BAD_SHARE * self.attempts, 1
        )
        return failing


def to_series(rows: Mapping[str, Ints]) -> Iterator[FailureSeries]:
    """Split columns (sub_key, minute, attempts, failures, fresh) into series, ascending by key."""
    order = np.lexsort((rows["minute"], rows["sub_key"]))
    sorted_rows = {name: values[order] for name, values in rows.items()}
    keys = sorted_rows["sub_key"]
    cuts = np.flatnonzero(np.diff(keys)) + 1
    bounds = [0, *cuts.tolist(), len(keys)]
    for begin, end in pairwise(bounds):
        if end > begin:
            some = slice(begin, end)
            yield FailureSeries(
                key=int(keys[begin]),
                minutes=sorted_rows["minute"][some],
                attempts=sorted_rows["attempts"][some],
                failures=sorted_rows["failures"][some],
                first_failures=sorted_rows["fresh"][some],
            )
