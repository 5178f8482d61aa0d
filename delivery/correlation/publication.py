"""The tables of one run, from the state of all partitions."""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.correlation import findings, journeys, recommendations, reconciliation, rollups, sequences
from delivery.correlation.actions import side_by_side
from delivery.correlation.columns import ddl
from delivery.correlation.errors import CollisionError
from delivery.correlation.files import Files
from delivery.correlation.state import State, write
from delivery.correlation.tables import BY_NAME

FINDINGS: Final = frozenset({"hazards", "cofailures", "incidents", "advice", "advice_front"})
"""Tables that a run may leave as an earlier one has written them."""
_NAMES: Final = pa.schema([("what", pa.string()), ("key", pa.int64()), ("name", pa.string())])
_SMALL: Final = 4 << 20
Tell = Callable[[str], None]
Read = Callable[[Sequence[int]], DataFrame | None]
"""The rows of those partitions whose segments are still there."""
_IDS: Final = ("delivery_hi", "delivery_lo")
_TEXTS: Final = {
    "subscription": ("sub_key", "subscription_id"),
    "type": ("type_key", "event_type"),
    "host": ("host_key", "target_host"),
}
_TOTALS: Final = (
    "fanout",
    "enqueued",
    "missing",
    "excess",
    "lost",
    "duplicates",
    "residual_fanout",
    "residual_outcome",
)


class Publication:
    """Writes the tables of one run; nobody reads them before `latest.json` names the run."""

    def __init__(self, spark: SparkSession, files: Files, *, run: int, tell: Tell) -> None:
        self._spark = spark
        self._files = files
        self._tell = tell
        self.run = run

    def folder(self, table: str, run: int | None = None) -> str:
        """Where a table of this run (or another one) lies, below the address of the output."""
        return f"runs/{run or self.run}/{table}"

    def publish(
        self, state: State, *, before: int | None, read: Read, with_findings: bool, small: bool
    ) -> dict[str, int]:
        """Write every table, FINDINGS only where they are wanted; the books' totals.

        `before`: the run whose paths still hold where no row was added. `small`: the log is.
        """
        rolled, anchors = state.read("rollups"), state.read("anchors")
        absent = journeys.with_message(reconciliation.missing(anchors))
        with side_by_side(self._spark) as start:
            self._tell("looking up names")
            named = start(lambda: _known(rollups.names(rolled)))
            start(lambda: self._write("missing", absent))
            start(lambda: self._write("gaps", sequences.gaps(state.read("words"))))
            known = named.result()
            names = self._frame(_NAMES, [{"what": what, "key": key, "name": name} for what, key, name in known])
            subscriptions = {key: name for what, key, name in known if what == "subscription"}
            self._tell("putting journeys together")
            merge = journeys.merge if small else journeys.merge_hours
            joined = start(lambda: self._journeys(merge(state.read("deliveries")), rolled, names))
            if with_findings:
                start(lambda: self._together(state, subscriptions))
                failing = start(lambda: self._failing(state.read("cells"), subscriptions))
            joined.result()
            whole = self._read("journeys")
            if with_findings:
                start(lambda: self._advice(whole, failing.result(), subscriptions))
            self._tell("checking paths")
            start(lambda: self._paths(whole, before, read))
            self._tell("closing the books")
            books = start(lambda: self._books(reconciliation.reconcile(anchors, whole)))
            start(lambda: self._write("outcomes", journeys.outcomes(whole)))
            # Last: the replay, which is the driver's own, leaves a core to others at the end.
            self._tell("rolling up")
            start(lambda: self._write("rollups_hourly", rollups.hourly(rolled)))
            start(lambda: self._write("rollups_daily", rollups.daily(rolled)))
        return books.result()

    def _journeys(self, merged: DataFrame, rolled: DataFrame, names: DataFrame) -> None:
        whole = journeys.with_lost(merged, rollups.served(rolled))
        for what, (key, text) in _TEXTS.items():
            texts = names.where(F.col("what") == what).select(F.col("key").alias(key), F.col("name").alias(text))
            whole = whole.join(F.broadcast(texts), key, "left")
        self._write("journeys", journeys.with_message(whole.withColumn("delivery_id", journeys.identity(*_IDS))))

    def _paths(self, whole: DataFrame, before: int | None, read: Read) -> None:
        """Paths of what is not plain: the last run's where no row was added, the others from their segments."""
        winding = whole.where("not plain").select(*_IDS, "events", "first_us", "last_us")
        found: list[DataFrame] = []
        if before is not None:
            earlier = self._read("paths", before).where("legal is not null")
            found.append(earlier.join(winding.select(*_IDS, "events"), [*_IDS, "events"], "left_semi"))
            winding = winding.join(earlier.select(*_IDS, "events"), [*_IDS, "events"], "left_anti")
        hours = F.sequence(*(F.floor(F.col(name) / F.lit(3_600_000_000)) for name in ("first_us", "last_us")))
        parts = sorted(row["part"] for row in winding.select(F.explode(hours).alias("part")).distinct().collect())
        rows = read(parts)
        wanted = winding.select(*_IDS, "events")
        if rows is None:
            unseen = wanted.withColumns({"path": F.lit(None).cast("string"), "legal": F.lit(None).cast("boolean")})
            found.append(unseen)
        else:
            walked = journeys.paths(rows.join(wanted.select(*_IDS), list(_IDS), "left_semi"))
            found.append(wanted.join(walked, [*_IDS, "events"], "left"))
        everything = found[0] if len(found) == 1 else found[0].unionByName(found[1])
        self._write("paths", everything)
        paths = self._read("paths").drop("events")
        odd = whole.join(paths, list(_IDS), "left").withColumn("anomaly", journeys.anomaly())
        self._write("anomalies", odd.where("anomaly is not null"))

    def _together(self, state: State, subscriptions: Mapping[int, str]) -> None:
        self._tell("looking for what fails together")
        found = findings.Found.of(findings.Minutes.of(state.read("cells")))
        self._write_rows("cofailures", findings.pairs(found.pairs, subscriptions))
        causes = state.read("causes")
        self._write_rows("incidents", findings.incident_rows(self._spark, found.incidents, subscriptions, causes))

    def _failing(self, cells: DataFrame, subscriptions: Mapping[int, str]) -> recommendations.Failing:
        counted = recommendations.by_attempt(cells).where("sub_key is not null").toArrow().to_pylist()
        named = [{**row, "subscription_id": subscriptions[row["sub_key"]]} for row in counted]
        self._write_rows("hazards", named)
        return recommendations.Failing.of(counted, cells)

    def _advice(self, whole: DataFrame, failing: recommendations.Failing, subscriptions: Mapping[int, str]) -> None:
        self._tell("replaying retries")
        advised = recommendations.advices(whole, failing, subscriptions)
        rows, fronts = recommendations.advice_rows(advised, subscriptions)
        self._write_rows("advice", rows)
        self._write_rows("advice_front", fronts)

    def _books(self, reconciled: DataFrame) -> dict[str, int]:
        self._write("reconciliation", reconciled)
        row = (
            self._read("reconciliation")
            .agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in _TOTALS))
            .collect()[0]
        )
        return {name: int(row[name]) for name in _TOTALS}

    def _at(self, table: str, run: int | None = None) -> str:
        return f"{self._files.root}/runs/{run or self.run}/{table}"

    def _read(self, table: str, run: int | None = None) -> DataFrame:
        return self._spark.read.schema(ddl(BY_NAME[table].columns)).parquet(self._at(table, run))

    def _write(self, table: str, rows: DataFrame) -> None:
        """With the columns that the schema names, in its order and types."""
        columns = BY_NAME[table].columns
        chosen = rows.select(*(F.col(one.name).cast(one.type).alias(one.name) for one in columns))
        write(chosen, self._at(table))

    def _write_rows(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows that are here already: a small file is written without a job."""
        columns = BY_NAME[table].columns
        schema = pa.schema([(one.name, findings.arrow_type(one.type)) for one in columns])
        made = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
        if made.nbytes > _SMALL:
            self._write(table, self._spark.createDataFrame(made).coalesce(1))
            return
        file = io.BytesIO()
        pq.write_table(made, file, compression="zstd")
        self._files.write(f"{self.folder(table)}/part-0.parquet", file.getvalue())

    def _frame(self, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
        return self._spark.createDataFrame(pa.Table.from_pylist([dict(row) for row in rows], schema=schema))


def _known(names: DataFrame) -> list[tuple[str, int, str]]:
    """(what, key, name) of everything. CollisionError where any two texts share a key."""
    told = names.toArrow().to_pydict()
    known = sorted(zip(told["what"], told["key"], told["name"], strict=True))
    for first, second in pairwise(known):
        if first[:2] == second[:2]:
            raise CollisionError(f"two names of one {first[0]} have the same key: {first[2]}, {second[2]}")
    return known
