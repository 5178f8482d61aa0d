"""Findings: co-failure and incidents, from counts that Spark has made small enough for one process."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.correlation import cells, cofailure, explanation, incidents
from delivery.correlation.series import Ints, Series, series_of

_ATTRIBUTES: Final = ("room_id", *cells.ATTRIBUTES)
_EVERYTHING: Final = 0
"""Stands for the whole log where an incident's number stands, which are counted from 1."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Minutes:
    """The attempts of a log by minute: all series, and the log's first minute and length."""

    series: Sequence[Series]
    first: int
    span: int

    @classmethod
    def of(cls, cells_of_parts: DataFrame) -> "Minutes":
        """Collected from the cells."""
        rows = cells.minutes(cells_of_parts).toArrow()
        if not rows.num_rows:
            return cls(series=(), first=0, span=0)
        columns = {name: ints(rows, name) for name in rows.column_names}
        first = int(columns["minute"].min())
        span = int(columns["minute"].max()) - first + 1
        return cls(series=list(series_of(columns)), first=first, span=span)


def ints(rows: pa.Table, name: str) -> Ints:
    """A column of whole numbers."""
    found: Ints = rows.column(name).to_numpy().astype(np.int64)
    return found


def pairs(found: Iterable[cofailure.Pair], names: Mapping[int, str]) -> list[Row]:
    """Rows of `cofailures`."""
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
class Found:
    """What fails together all over the log, and when it did."""

    pairs: Sequence[cofailure.Pair]
    incidents: Sequence[incidents.Incident]

    @classmethod
    def of(cls, minutes: Minutes) -> "Found":
        """Looked for in the minutes."""
        pairs = cofailure.cofailures(minutes.series, first=minutes.first, minutes=minutes.span)
        kin = incidents.kin_of((pair.first, pair.second) for pair in pairs if pair.significant)
        shared = incidents.find(minutes.series, first=minutes.first, minutes=minutes.span, kin=kin)
        return cls(pairs=pairs, incidents=shared)


def incident_rows(
    spark: SparkSession,
    found: Sequence[incidents.Incident],
    names: Mapping[int, str],
    causes: DataFrame,
) -> list[Row]:
    """Rows of `incidents`."""
    counts = _counts(spark, found, causes)
    everything = counts.get(_EVERYTHING, {})
    return [
        {
            "incident": number,
            "kind": incident.kind,
            "began": _minute(incident.begin),
            "ended": _minute(incident.end + 1),
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
                for cause in explanation.explain(counts.get(number, {}), everything)
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
    """Arrow's type for a column's."""
    return _ARROW.get(kind, _CAUSES)


def _minute(minute: int) -> datetime:
    return datetime.fromtimestamp(minute * 60, UTC)


def _counts(
    spark: SparkSession, found: Sequence[incidents.Incident], causes: DataFrame
) -> dict[int, dict[tuple[str, str], int]]:
    """By incident: failed attempts of its sessions by (attribute, value); for `_EVERYTHING` all attempts of the log."""
    columns = [F.col(name).cast("string").alias(name) for name in _ATTRIBUTES]
    counted = causes.select(F.lit(_EVERYTHING).cast("bigint").alias("incident"), *columns, F.col("attempts").alias("n"))
    if found:
        windows = [(n, s.key, s.begin, s.end) for n, incident in enumerate(found, 1) for s in incident.sessions]
        sides = dict(zip(("incident", "sub_key", "begin", "end"), zip(*windows, strict=True), strict=True))
        named = spark.createDataFrame(pa.table({name: pa.array(column, pa.int64()) for name, column in sides.items()}))
        met = causes.join(F.broadcast(named), "sub_key").where("minute between begin and end")
        counted = counted.unionByName(met.select("incident", *columns, F.col("attempts").alias("n")))
    attributes = F.array(
        *(F.struct(F.lit(name).alias("attribute"), F.col(name).alias("value")) for name in _ATTRIBUTES)
    )
    exploded = counted.select("incident", "n", F.explode(attributes).alias("one")).select("incident", "n", "one.*")
    told = exploded.where("value is not null").groupBy("incident", "attribute", "value").agg(F.sum("n").alias("n"))
    counts: dict[int, dict[tuple[str, str], int]] = {}
    for row in told.collect():
        counts.setdefault(row["incident"], {})[row["attribute"], row["value"]] = row["n"]
    return counts
