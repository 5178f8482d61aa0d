"""Write the tables of one run from the state of all partitions."""

import io
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.sealing.layout import ddl
from delivery.analytics.spark import (
    counts,
    journeys,
    reconciliation,
    results,
    retry_advice,
    rollups,
    verdicts,
)
from delivery.analytics.spark.errors import CollisionError
from delivery.analytics.spark.segments import HadoopFiles
from delivery.analytics.spark.session import run_parallel
from delivery.analytics.spark.state import PartialResults, write_table
from delivery.analytics.spark.tables import TABLES_BY_NAME

FINDING_TABLES: Final = frozenset({"hazards", "cofailures", "incidents", "advice", "advice_front"})
"""Tables that a run may keep from an earlier one."""
_NAME_SCHEMA: Final = pa.schema([("what", pa.string()), ("key", pa.int64()), ("name", pa.string())])
_SMALL_TABLE_BYTES: Final = 4 << 20
OnStatus = Callable[[str], None]
ReadRows = Callable[[Sequence[int]], DataFrame | None]
"""Reads the rows of those partitions whose segments still exist."""
_IDS: Final = ("delivery_hi", "delivery_lo")
_NAME_COLUMNS: Final = {
    "subscription": ("sub_key", "subscription_id"),
    "type": ("type_key", "event_type"),
    "host": ("host_key", "target_host"),
}
_TOTALS: Final = (
    "fanout",
    "enqueued",
    "missing",
    "excess",
    "unread",
    "never_enqueued",
    "stuck",
    "unknown",
    "lost",
    "duplicates",
    "residual_fanout",
    "residual_outcome",
)


class RunPublisher:
    """Writes the tables of one run; readers do not see them before `latest.json` names it."""

    def __init__(
        self, spark: SparkSession, files: HadoopFiles, *, run: int, on_status: OnStatus
    ) -> None:
        self._spark = spark
        self._files = files
        self._on_status = on_status
        self.run = run

    def folder(self, table: str, run: int | None = None) -> str:
        """Return the folder of a table under the output address, of this or another run."""
        return f"runs/{run or self.run}/{table}"

    def publish(
        self,
        state: PartialResults,
        *,
        previous_run: int | None,
        read: ReadRows,
        with_findings: bool,
        small: bool,
        now: datetime,
        unread: verdicts.UnreadHours,
    ) -> dict[str, int]:
        """Write every table, FINDING_TABLES only on demand. Return the reconciliation totals.

        `previous_run`: the run whose paths hold for deliveries without new rows. `small`: the log
        is small. `unread`: hours with rows that no segment that was read has.
        """
        rolled, anchors = state.read_table("rollups"), state.read_table("anchors")
        deliveries = state.read_table("deliveries")
        with run_parallel(self._spark) as start:
            self._on_status("looking up names")
            named = start(lambda: _collect_names(rollups.name_keys(rolled)))
            ended = start(lambda: verdicts.log_end_us(deliveries, now))
            start(
                lambda: self._write("gaps", reconciliation.sequence_gaps(state.read_table("words")))
            )
            known = named.result()
            names = self._to_frame(
                _NAME_SCHEMA,
                [{"what": what, "key": key, "name": name} for what, key, name in known],
            )
            subscriptions = {key: name for what, key, name in known if what == "subscription"}
            self._on_status("merging journeys")
            merge = journeys.merge_journeys if small else journeys.merge_journeys_by_hour
            end_us = ended.result()
            judged = verdicts.with_verdicts(
                merge(deliveries), rollups.service(rolled), end_us=end_us, unread=unread
            )
            joined = start(lambda: self._write_journeys(judged, names))
            if with_findings:
                start(lambda: self._write_cofailures(state, subscriptions))
                failing = start(
                    lambda: self._write_hazards(state.read_table("cells"), subscriptions)
                )
            joined.result()
            whole = self._read("journeys")
            if with_findings:
                start(lambda: self._write_advice(whole, failing.result(), subscriptions))
            self._on_status("checking paths")
            start(lambda: self._write_paths(whole, previous_run, read))
            self._on_status("reconciling")
            totals = start(
                lambda: self._write_reconciliation(reconciliation.reconcile(anchors, whole, unread))
            )
            absent = reconciliation.missing_deliveries(anchors, whole, unread)
            start(lambda: self._write("missing", journeys.with_message(absent)))
            start(lambda: self._write("ages", verdicts.ages(whole, end_us=end_us)))
            start(lambda: self._write("outcomes", journeys.outcome_counts(whole)))
            # Last, as the replay in the driver leaves a core free.
            self._on_status("rolling up")
            start(lambda: self._write("rollups_hourly", rollups.hourly(rolled)))
            start(lambda: self._write("rollups_daily", rollups.daily(rolled)))
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

    def _write_paths(self, whole: DataFrame, previous_run: int | None, read: ReadRows) -> None:
        """Write the paths of deliveries that are not plain; copy those without new rows."""
        not_plain = whole.where("not plain").select(*_IDS, "events", "first_us", "last_us")
        found: list[DataFrame] = []
        if previous_run is not None:
            earlier = self._read("paths", previous_run).where("legal is not null")
            found.append(
                earlier.join(not_plain.select(*_IDS, "events"), [*_IDS, "events"], "left_semi")
            )
            not_plain = not_plain.join(
                earlier.select(*_IDS, "events"), [*_IDS, "events"], "left_anti"
            )
        hours = F.sequence(
            *(F.floor(F.col(name) / F.lit(3_600_000_000)) for name in ("first_us", "last_us"))
        )
        parts = sorted(
            row["part"]
            for row in not_plain.select(F.explode(hours).alias("part")).distinct().collect()
        )
        rows = read(parts)
        pending = not_plain.select(*_IDS, "events")
        if rows is None:
            unseen = pending.withColumns(
                {"path": F.lit(None).cast("string"), "legal": F.lit(None).cast("boolean")}
            )
            found.append(unseen)
        else:
            walked = journeys.kind_paths(rows.join(pending.select(*_IDS), list(_IDS), "left_semi"))
            found.append(pending.join(walked, [*_IDS, "events"], "left"))
        everything = found[0] if len(found) == 1 else found[0].unionByName(found[1])
        self._write("paths", everything)
        paths = self._read("paths").drop("events")
        odd = whole.join(paths, list(_IDS), "left").withColumn("anomaly", journeys.anomaly_name())
        self._write("anomalies", odd.where("anomaly is not null"))

    def _write_cofailures(self, state: PartialResults, subscriptions: Mapping[int, str]) -> None:
        self._on_status("finding incidents")
        found = results.CofailureResult.from_cells(counts.collect_cells(state.read_table("causes")))
        self._write_rows("cofailures", results.cofailure_rows(found.pairs, subscriptions))
        self._write_rows("incidents", results.incident_rows(found, subscriptions))

    def _write_hazards(
        self, cells: DataFrame, subscriptions: Mapping[int, str]
    ) -> retry_advice.AdvisedSubscriptions:
        counted = (
            retry_advice.attempt_success_rates(cells)
            .where("sub_key is not null")
            .toArrow()
            .to_pylist()
        )
        named = [{**row, "subscription_id": subscriptions[row["sub_key"]]} for row in counted]
        self._write_rows("hazards", named)
        return retry_advice.AdvisedSubscriptions.from_success_rates(counted, cells)

    def _write_advice(
        self,
        whole: DataFrame,
        failing_subscriptions: retry_advice.AdvisedSubscriptions,
        subscriptions: Mapping[int, str],
    ) -> None:
        self._on_status("replaying retries")
        advised = retry_advice.advise_all(whole, failing_subscriptions, subscriptions)
        rows, fronts = retry_advice.advice_rows(advised, subscriptions)
        self._write_rows("advice", rows)
        self._write_rows("advice_front", fronts)

    def _write_reconciliation(self, reconciled: DataFrame) -> dict[str, int]:
        self._write("reconciliation", reconciled)
        row = (
            self._read("reconciliation")
            .agg(*(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in _TOTALS))
            .collect()[0]
        )
        return {name: int(row[name]) for name in _TOTALS}

    def _table_path(self, table: str, run: int | None = None) -> str:
        return f"{self._files.root}/runs/{run or self.run}/{table}"

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
        columns = TABLES_BY_NAME[table].columns
        schema = pa.schema([(one.name, results.arrow_type(one)) for one in columns])
        made = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
        if made.nbytes > _SMALL_TABLE_BYTES:
            self._write(table, self._spark.createDataFrame(made).coalesce(1))
            return
        file = io.BytesIO()
        pq.write_table(made, file, compression="zstd")
        self._files.write(f"{self.folder(table)}/part-0.parquet", file.getvalue())

    def _to_frame(self, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> DataFrame:
        return self._spark.createDataFrame(
            pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
        )


def _collect_names(names: DataFrame) -> list[tuple[str, int, str]]:
    """Return (what, key, name) of every name. Raise CollisionError if two names share a key."""
    columns = names.toArrow().to_pydict()
    known = sorted(zip(columns["what"], columns["key"], columns["name"], strict=True))
    for first, second in pairwise(known):
        if first[:2] == second[:2]:
            raise CollisionError(
                f"two names of one {first[0]} have the same key: {first[2]}, {second[2]}"
            )
    return known
