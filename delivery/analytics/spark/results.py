"""Compute co-failures and incidents from counts that fit into one process."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.spark import cofailure, counts, incidents, root_cause
from delivery.analytics.spark.counts import FailureSeries, Ints, to_series

_ATTRIBUTES: Final = ("room_id", *counts.ATTRIBUTES)
_WHOLE_LOG: Final = 0
"""Key of the whole log in place of an incident number, which starts at 1."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMinutes:
    """Attempts of a log by minute: all series, first minute and number of minutes."""

    series: Sequence[FailureSeries]
    first: int
    span: int

    @classmethod
    def from_counts(cls, cells: DataFrame) -> "FailureMinutes":
        """Collect the series from the counts."""
        rows = counts.attempts_by_minute(cells).toArrow()
        if not rows.num_rows:
            return cls(series=(), first=0, span=0)
        columns = {name: int_column(rows, name) for name in rows.column_names}
        first = int(columns["minute"].min())
        span = int(columns["minute"].max()) - first + 1
        return cls(series=list(to_series(columns)), first=first, span=span)


def int_column(rows: pa.Table, name: str) -> Ints:
    """Return an integer column."""
    found: Ints = rows.column(name).to_numpy().astype(np.int64)
    return found


def cofailure_rows(found: Iterable[cofailure.CofailurePair], names: Mapping[int, str]) -> list[Row]:
    """Return the rows of `cofailures`."""
    rows = []
    for pair in found:
        first, second = sorted((names[pair.first], names[pair.second]))
        turned = first != names[pair.first]
        rows.append(
            {
                "first_id": first,
                "second_id": second,
                "bad_first": pair.bad_second if turned else pair.bad_first,
                "bad_second": pair.bad_first if turned else pair.bad_second,
                "bad_both": pair.bad_both,
                "jaccard": pair.jaccard,
                "lift": pair.lift,
                "phi": pair.phi,
                "pearson": pair.pearson,
                "p": pair.p,
                "q": pair.q,
                "significant": pair.significant,
            }
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CofailureResult:
    """Subscriptions that fail together over the log, and when they did."""

    pairs: Sequence[cofailure.CofailurePair]
    incidents: Sequence[incidents.Incident]

    @classmethod
    def from_minutes(cls, minutes: FailureMinutes) -> "CofailureResult":
        """Find co-failures and incidents in the minutes."""
        pairs = cofailure.find_cofailures(minutes.series, first=minutes.first, minutes=minutes.span)
        related = incidents.related_subscriptions(
            (pair.first, pair.second) for pair in pairs if pair.significant
        )
        shared = incidents.find_incidents(
            minutes.series, first=minutes.first, minutes=minutes.span, related=related
        )
        return cls(pairs=pairs, incidents=shared)


def incident_rows(
    spark: SparkSession,
    found: Sequence[incidents.Incident],
    names: Mapping[int, str],
    causes: DataFrame,
) -> list[Row]:
    """Return the rows of `incidents`."""
    counts = _attribute_counts(spark, found, causes)
    everything = counts.get(_WHOLE_LOG, {})
    return [
        {
            "incident": number,
            "kind": incident.kind,
            "began": _minute_start(incident.begin),
            "ended": _minute_start(incident.end + 1),
            "subscriptions": sorted(names[key] for key in incident.keys),
            "failures": incident.failures,
            "attempts": sum(session.attempts for session in incident.sessions),
            "causes": [
                {
                    "attribute": cause.attribute,
                    "value": cause.value,
                    "inside": cause.inside,
                    "outside": cause.outside,
                    "log_odds": cause.log_odds,
                    "z": cause.z,
                }
                for cause in root_cause.find_causes(counts.get(number, {}), everything)
            ],
        }
        for number, incident in enumerate(found, 1)
    ]


_ARROW: Final = {
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<string>": pa.list_(pa.string()),
}
_CAUSES: Final = pa.list_(
    pa.struct(
        [("attribute", pa.string()), ("value", pa.string())]
        + [(name, pa.float64()) for name in ("inside", "outside", "log_odds", "z")]
    )
)


def arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a column type."""
    return _ARROW.get(kind, _CAUSES)


def _minute_start(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * 60, UTC)


def _attribute_counts(
    spark: SparkSession, found: Sequence[incidents.Incident], causes: DataFrame
) -> dict[int, dict[tuple[str, str], int]]:
    """Count failed attempts by incident and (attribute, value); the whole log has its own key."""
    columns = [F.col(name).cast("string").alias(name) for name in _ATTRIBUTES]
    counted = causes.select(
        F.lit(_WHOLE_LOG).cast("bigint").alias("incident"), *columns, F.col("attempts").alias("n")
    )
    if found:
        windows = [
            (n, s.key, s.begin, s.end)
            for n, incident in enumerate(found, 1)
            for s in incident.sessions
        ]
        sides = dict(
            zip(("incident", "sub_key", "begin", "end"), zip(*windows, strict=True), strict=True)
        )
        named = spark.createDataFrame(
            pa.table({name: pa.array(column, pa.int64()) for name, column in sides.items()})
        )
        matched = causes.join(F.broadcast(named), "sub_key").where("minute between begin and end")
        counted = counted.unionByName(
            matched.select("incident", *columns, F.col("attempts").alias("n"))
        )
    attributes = F.array(
        *(
            F.struct(F.lit(name).alias("attribute"), F.col(name).alias("value"))
            for name in _ATTRIBUTES
        )
    )
    exploded = counted.select("incident", "n", F.explode(attributes).alias("one")).select(
        "incident", "n", "one.*"
    )
    totals = (
        exploded.where("value is not null")
        .groupBy("incident", "attribute", "value")
        .agg(F.sum("n").alias("n"))
    )
    counts: dict[int, dict[tuple[str, str], int]] = {}
    for row in totals.collect():
        counts.setdefault(row["incident"], {})[row["attribute"], row["value"]] = row["n"]
    return counts
