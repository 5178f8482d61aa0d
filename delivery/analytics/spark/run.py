"""Run the analysis once: update the state, write the tables, then switch `latest.json`."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.spark import counts, journeys, reconciliation, rollups, segments
from delivery.analytics.spark.errors import NoSegmentsError
from delivery.analytics.spark.publish_results import FINDING_TABLES, OnStatus, RunPublisher
from delivery.analytics.spark.segments import HadoopFiles, Partition
from delivery.analytics.spark.session import run_parallel, tuned_for_size
from delivery.analytics.spark.state import (
    COMPACT_AFTER_RUNS,
    Manifest,
    PartialResults,
    empty_manifest,
    load_manifest,
    reserve_run,
    save_manifest,
    write_table,
)
from delivery.analytics.spark.tables import TABLES_BY_NAME, schema_document

LATEST: Final = "latest.json"
SCHEMA: Final = "schema.json"
_STATE_BUILDERS: Final[dict[str, Callable[[DataFrame], DataFrame]]] = {
    "deliveries": journeys.partial_journeys,
    "anchors": reconciliation.anchor_counts,
    "rollups": rollups.hourly_state,
    "cells": counts.count_attempts,
    "causes": counts.count_attributes,
}
_KEPT_RUNS: Final = 2
_LOCAL_MASTER: Final = re.compile(r"local(\[.*\])?")
"""Master URLs for which tasks run in the driver process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisReport:
    """Result of a run: number, partitions processed and known, and duplicate rows."""

    run: int
    partitions: int
    known: int
    repeated_rows: int
    totals: dict[str, int]
    """Reconciliation totals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsRun:
    """The run whose findings readers see, and its time."""

    run: int
    at: datetime


class Analysis:
    """Analyses segments at one address into tables at another."""

    def __init__(
        self,
        spark: SparkSession,
        *,
        segments_at: str,
        output: str,
        on_status: OnStatus,
        compact_after_runs: int = COMPACT_AFTER_RUNS,
    ) -> None:
        self._spark = spark
        self._segments = HadoopFiles(spark, segments_at)
        self._output = HadoopFiles(spark, output)
        self._on_status = on_status
        self._compact_after_runs = compact_after_runs

    def run(
        self, *, now: datetime, full: bool = False, stale_s: float = 0.0
    ) -> AnalysisReport | None:
        """Process new partitions (`full`: all) and publish tables. Return None if nothing is new.

        Findings may be `stale_s` old; until then only reconciliation, outcomes and rollups are
        updated. Raise NoSegmentsError, StateError or CollisionError. A failed run leaves the last
        tables unchanged.
        """
        manifest = empty_manifest(self._output) if full else load_manifest(self._output)
        files = self._segments.list_files()
        found = segments.find_partitions(files)
        if not found and not manifest.done_partitions:
            raise NoSegmentsError(f"there are no sealed segments at {self._segments.root}")
        todo = manifest.pending(found)
        kept = None if full else self._reusable_findings(now, stale_s)
        if not todo and manifest.published is not None and (kept or self._has_current_findings()):
            return None
        size = sum(file.size for file in (*files, *self._output.list_files("state")))
        with tuned_for_size(self._spark, size) as small:
            return self._run_partitions(manifest, found, todo, now, kept, small=small)

    def _latest(self) -> dict[str, Any] | None:
        text = self._output.read(LATEST)
        return None if text is None else json.loads(text)

    def _has_current_findings(self) -> bool:
        """Return True if the published findings are of the latest run."""
        latest = self._latest()
        return latest is not None and latest.get("findings", latest)["run"] == latest["run"]

    def _reusable_findings(self, now: datetime, stale_s: float) -> FindingsRun | None:
        """Return the findings if they are recent enough."""
        latest = self._latest()
        if latest is None or not stale_s:
            return None
        findings = latest.get("findings", latest)
        kept = FindingsRun(run=findings["run"], at=datetime.fromisoformat(findings["at"]))
        return None if (now - kept.at).total_seconds() >= stale_s else kept

    def _run_partitions(
        self,
        manifest: Manifest,
        found: Mapping[int, Partition],
        todo: Sequence[Partition],
        now: datetime,
        findings: FindingsRun | None,
        *,
        small: bool,
    ) -> AnalysisReport:
        reserve_run(self._output, manifest.next_run)
        doubled, schemas = self._write_state(manifest, todo, small=small)
        after = manifest.with_done(todo, schemas)
        if len(after.parts_by_run()) > self._compact_after_runs:
            self._on_status("compacting the results of earlier runs")
            after = PartialResults(self._spark, self._output, after).compact(
                ("words", *_STATE_BUILDERS), into_run=after.next_run
            )
        run = manifest.next_run
        publication = RunPublisher(self._spark, self._output, run=run, on_status=self._on_status)
        state = PartialResults(self._spark, self._output, after)
        before = manifest.published if manifest.done_partitions else None
        totals = publication.publish(
            state,
            previous_run=before,
            read=lambda parts: self._read_rows(
                state, found, parts, {one.part: doubled.get(one.part, 0) for one in todo}
            ),
            with_findings=findings is None,
            small=small,
        )
        findings = findings or FindingsRun(run=run, at=now)
        self._publish_latest(publication, now, len(todo), totals, findings)
        save_manifest(self._output, after)
        for folder in self._output.folders("runs"):
            if int(folder) <= run - _KEPT_RUNS and int(folder) != findings.run:
                self._output.delete(f"runs/{folder}")
        return AnalysisReport(
            run=run,
            partitions=len(todo),
            known=len(after.done_partitions),
            repeated_rows=sum(doubled.values()),
            totals=totals,
        )

    def _write_state(
        self, manifest: Manifest, todo: Sequence[Partition], *, small: bool
    ) -> tuple[dict[int, int], dict[str, str]]:
        """Write the state of partitions. Return duplicate rows by partition, and table schemas."""
        if not todo:
            return {}, {}
        state = PartialResults(self._spark, self._output, manifest)
        run = manifest.next_run
        rows = segments.read_rows(self._spark, self._segments.root, todo)
        self._on_status(f"reading {len(todo)} partitions")
        counted = reconciliation.sequence_words(rows)
        write_table(counted, state.table_path(run, "words"))
        words = self._spark.read.schema(counted.schema).parquet(state.table_path(run, "words"))
        schemas = {"words": counted.schema.json()}
        doubled = reconciliation.duplicate_partitions(words)
        keyed = segments.with_keys(segments.deduplicate(rows, doubled))
        if small and _LOCAL_MASTER.fullmatch(self._spark.sparkContext.master or ""):
            # Five tables use the rows. A cluster reads them again, as it may lose an executor.
            keyed = keyed.localCheckpoint(eager=False)

        def count(name: str) -> None:
            self._on_status(f"counting {name}")
            made = _STATE_BUILDERS[name](keyed)
            write_table(made, state.table_path(run, name))
            schemas[name] = made.schema.json()

        with run_parallel(self._spark) as start:
            for name in _STATE_BUILDERS:
                start(partial(count, name))
        return doubled, schemas

    def _read_rows(
        self,
        state: PartialResults,
        found: Mapping[int, Partition],
        parts: Sequence[int],
        duplicates: Mapping[int, int],
    ) -> DataFrame | None:
        """Read the rows of partitions whose segments still exist, without duplicates."""
        chosen = [found[part] for part in parts if part in found]
        if not chosen:
            return None
        rows = segments.read_rows(self._spark, self._segments.root, chosen)
        doubled = {part for part in parts if duplicates.get(part)}
        if older := [one.part for one in chosen if one.part not in duplicates]:
            doubled |= set(
                reconciliation.duplicate_partitions(
                    state.read_table("words").where(F.col("part").isin(*older))
                )
            )
        return segments.with_keys(segments.deduplicate(rows, doubled))

    def _publish_latest(
        self,
        publication: RunPublisher,
        now: datetime,
        partitions: int,
        totals: dict[str, int],
        findings: FindingsRun,
    ) -> None:
        """Make the tables of this run visible to readers."""
        latest = {
            "run": publication.run,
            "at": now.isoformat(),
            "partitions": partitions,
            "findings": {"run": findings.run, "at": findings.at.isoformat()},
            "tables": {
                name: publication.folder(name, findings.run if name in FINDING_TABLES else None)
                for name in TABLES_BY_NAME
            },
            "totals": totals,
        }
        self._output.write(SCHEMA, schema_document())
        self._output.write(LATEST, json.dumps(latest, indent=2) + "\n")
