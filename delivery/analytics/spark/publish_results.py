"""Write the tables of one run from the state of all partitions."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.findings import advice, results
from delivery.analytics.runs.engine import OnStatus, Publication, run_folder
from delivery.analytics.runs.small_tables import checked_names, rows_of_table, small_file
from delivery.analytics.runs.tables import TABLES_BY_NAME, TOTALS
from delivery.analytics.sealing.layout import ddl
from delivery.analytics.spark import (
    counts,
    journeys,
    reconciliation,
    rollups,
)
from delivery.analytics.spark.segments import HadoopFiles
from delivery.analytics.spark.session import run_parallel
from delivery.analytics.spark.state import PartialResults, write_table

_NAME_SCHEMA: Final = pa.schema([("what", pa.string()), ("key", pa.int64()), ("name", pa.string())])
_SMALL_TABLE_BYTES: Final = 4 << 20
ReadRows = Callable[[Sequence[int]], DataFrame | None]
"""Reads the rows of those partitions whose segments still exist."""
_IDS: Final = ("delivery_hi", "delivery_lo")
_NAME_COLUMNS: Final = {
    "subscription": ("sub_key", "subscription_id"),
    "type": ("type_key", "event_type"),
    "host": ("host_key", "target_host"),
}


class RunPublisher:
    """Write the tables of one run; readers do not see them before `latest.json` names it."""

    def __init__(
        self, spark: SparkSession, files: HadoopFiles, *, run: int, on_status: OnStatus
    ) -> None:
        self._spark = spark
        self._files = files
        self._on_status = on_status
        self.run = run

    def publish(
        self, state: PartialResults, given: Publication, read: ReadRows, *, small: bool
    ) -> dict[str, int]:
        """Write the tables. `small`: the log is small. Return the reconciliation totals."""
        unread = given.unread
        rolled, anchors = state.read_table("rollups"), state.read_table("anchors")
        deliveries = state.read_table("deliveries")
        with run_parallel(self._spark) as start:
            self._on_status("looking up names")
            named = start(lambda: checked_names(rollups.name_keys(rolled).toArrow()))
            ended = start(lambda: reconciliation.log_end_us(deliveries, given.now))
            words = state.read_table("words")
            gaps = start(lambda: self._write("gaps", reconciliation.sequence_gaps(words)))
            known = named.result()
            names = self._to_frame(
                _NAME_SCHEMA,
                [{"what": what, "key": key, "name": name} for what, key, name in known],
            )
            subscriptions = {key: name for what, key, name in known if what == "subscription"}
            self._on_status("merging journeys")
            merge = journeys.merge_journeys if small else journeys.merge_journeys_by_hour
            end_us = ended.result()
            judged = reconciliation.with_verdicts(
                merge(deliveries), rollups.service(rolled), end_us=end_us, unread=unread
            )
            joined = start(lambda: self._write_journeys(judged, names))
            if given.with_findings:
                start(lambda: self._write_cofailures(state, subscriptions, given.now))
                failing = start(
                    lambda: self._write_hazards(state.read_table("cells"), subscriptions)
                )
            joined.result()
            whole = self._read("journeys")
            if given.with_findings:
                start(lambda: self._write_advice(whole, failing.result(), subscriptions, given))
            self._on_status("checking paths")
            books = [
                gaps,
                start(lambda: self._write_paths(whole, deliveries, given.previous_run, read)),
            ]
            self._on_status("reconciling")
            totals = start(
                lambda: self._write_reconciliation(reconciliation.reconcile(anchors, whole, unread))
            )
            absent = reconciliation.missing_deliveries(anchors, whole, unread)
            for table, rows in (
                ("missing", journeys.with_message(absent)),
                ("ages", reconciliation.ages(whole, end_us=end_us)),
                ("outcomes", journeys.outcome_counts(whole)),
                # Last, as the simulation in the driver leaves a core free.
                ("rollups_hourly", rollups.hourly(rolled)),
                ("rollups_daily", rollups.daily(rolled)),
            ):
                books.append(start(partial(self._write, table, rows)))
            self._on_status("rolling up")
            for one in books:
                one.result()
            given.on_books(totals.result())
        return totals.result()

    def _write_journeys(self, whole: DataFrame, names: DataFrame) -> None:
        for what, (key, text) in _NAME_COLUMNS.items():
            texts = names.where(F.col("what") == what).select(
                F.col("key").alias(key), F.col("name").alias(text)
            )
            whole = whole.join(F.broadcast(texts), key, "left")
        self._write(
            "journeys",
            journeys.with_message(whole.withColumn("delivery_id", journeys.id_text(*_IDS))),
        )

    def _write_paths(
        self, whole: DataFrame, deliveries: DataFrame, previous_run: int | None, read: ReadRows
    ) -> None:
        """Write the paths of deliveries that are not plain; copy those without new rows."""
        not_plain = whole.where("not plain").select(*_IDS, "events")
        found: list[DataFrame] = []
        if previous_run is not None:
            earlier = self._read("paths", previous_run).where("legal is not null")
            found.append(earlier.join(not_plain, [*_IDS, "events"], "left_semi"))
            not_plain = not_plain.join(
                earlier.select(*_IDS, "events"), [*_IDS, "events"], "left_anti"
            )
        # Not the hours between its first and its last row: one delivery of last year would have the
        # whole log read in every run.
        hours = deliveries.join(not_plain.select(*_IDS), list(_IDS), "left_semi")
        rows = read(sorted(row["part"] for row in hours.select("part").distinct().collect()))
        if rows is None:
            unseen = not_plain.withColumns(
                {"path": F.lit(None).cast("string"), "legal": F.lit(None).cast("boolean")}
            )
            found.append(unseen)
        else:
            walked = journeys.kind_paths(
                rows.join(not_plain.select(*_IDS), list(_IDS), "left_semi")
            )
            found.append(not_plain.join(walked, [*_IDS, "events"], "left"))
        everything = found[0] if len(found) == 1 else found[0].unionByName(found[1])
        self._write("paths", everything)
        paths = self._read("paths").drop("events")
        odd = whole.join(paths, list(_IDS), "left").withColumn("anomaly", journeys.anomaly_name())
        self._write("anomalies", odd.where("anomaly is not null"))

    def _write_cofailures(
        self, state: PartialResults, subscriptions: Mapping[int, str], now: datetime
    ) -> None:
        self._on_status("finding incidents")
        cells = counts.collect_cells(state.read_table("causes"))
        found = results.CofailureResult.from_cells(cells, now)
        self._write_rows("cofailures", results.cofailure_rows(found.pairs, subscriptions))
        self._write_rows("incidents", results.incident_rows(found, subscriptions))

    def _write_hazards(
        self, cells: DataFrame, subscriptions: Mapping[int, str]
    ) -> advice.AdvisedSubscriptions:
        counted = (
            counts.attempt_success_rates(cells).where("sub_key is not null").toArrow().to_pylist()
        )
        named = [{**row, "subscription_id": subscriptions[row["sub_key"]]} for row in counted]
        self._write_rows("hazards", named)
        keys = advice.advised_keys(counted)
        bins = counts.attempts_by_bin(cells.where(F.col("sub_key").isin(keys))) if keys else None
        return advice.AdvisedSubscriptions.from_counts(counted, bins and bins.toArrow())

    def _write_advice(
        self,
        whole: DataFrame,
        failing: advice.AdvisedSubscriptions,
        subscriptions: Mapping[int, str],
        given: Publication,
    ) -> None:
        self._on_status("replaying retries")
        names = [subscriptions[one] for one in failing.by_number]
        some = whole.where(F.col("subscription_id").isin(names))
        arrivals = counts.arrival_counts(some, given.manifest.salt).toArrow() if names else None
        advised = advice.advise_all(arrivals, failing, given.now)
        rows, fronts = advice.advice_rows(advised, subscriptions)
        self._write_rows("advice", rows)
        self._write_rows("advice_front", fronts)

    def _write_reconciliation(self, reconciled: DataFrame) -> dict[str, int]:
        self._write("reconciliation", reconciled)
        row = (
            self._read("reconciliation")
            .agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in TOTALS))
            .collect()[0]
        )
        return {name: int(row[name]) for name in TOTALS}

    def _table_path(self, table: str, run: int | None = None) -> str:
        return f"{self._files.root}/{run_folder(run or self.run, table)}"

    def _read(self, table: str, run: int | None = None) -> DataFrame:
        return self._spark.read.schema(ddl(TABLES_BY_NAME[table].columns)).parquet(
            self._table_path(table, run)
        )

    def _write(self, table: str, rows: DataFrame) -> None:
        """Write a table with the columns, order and types of its schema."""
        columns = TABLES_BY_NAME[table].columns
        chosen = rows.select(*(F.col(one.name).cast(one.type).alias(one.name) for one in columns))
        write_table(chosen, self._table_path(table))

    def _write_rows(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of the driver, without a Spark job."""
        made = rows_of_table(table, rows)
        if made.nbytes > _SMALL_TABLE_BYTES:
            self._write(table, self._spark.createDataFrame(made).coalesce(1))
            return
        self._files.write(f"{run_folder(self.run, table)}/part-0.parquet", small_file(made))

    def _to_frame(self, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
        return self._spark.createDataFrame(
            pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
        )
