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
    failures: DataFrame,
    totals: DataFrame,
) -> list[Row]:
    """Rows of `incidents`."""
    inside = _inside(spark, found, failures)
    everything = _everything(totals)
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
                for cause in explanation.explain(inside.get(number, {}), everything)
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


def _inside(
    spark: SparkSession, found: Sequence[incidents.Incident], failures: DataFrame
) -> dict[int, dict[tuple[str, str], int]]:
    """By incident: failed attempts of its sessions by (attribute, value)."""
    if not found:
        return {}
    windows = [(n, s.key, s.begin, s.end) for n, incident in enumerate(found, 1) for s in incident.sessions]
    columns = dict(zip(("incident", "sub_key", "begin", "end"), zip(*windows, strict=True), strict=True))
    named = spark.createDataFrame(pa.table({name: pa.array(column, pa.int64()) for name, column in columns.items()}))
    met = failures.join(F.broadcast(named), "sub_key").where("minute between begin and end")
    counted = _by_attribute(met, ["incident"], "failures").collect()
    inside: dict[int, dict[tuple[str, str], int]] = {}
    for row in counted:
        inside.setdefault(row["incident"], {})[row["attribute"], row["value"]] = row["n"]
    return inside


def _everything(totals: DataFrame) -> dict[tuple[str, str], int]:
    rows = _by_attribute(totals, [], "attempts").collect()
    return {(row["attribute"], row["value"]): row["n"] for row in rows}


def _by_attribute(rows: DataFrame, keys: list[str], counted: str) -> DataFrame:
    attributes = F.array(
        *(F.struct(F.lit(name).alias("attribute"), F.col(name).cast("string").alias("value")) for name in _ATTRIBUTES)
    )
    exploded = rows.select(*keys, counted, F.explode(attributes).alias("one")).select(*keys, counted, "one.*")
    return exploded.where("value is not null").groupBy(*keys, "attribute", "value").agg(F.sum(counted).alias("n"))
