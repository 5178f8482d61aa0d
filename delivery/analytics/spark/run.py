"""Run the analysis once: update the state, write the tables, then switch `latest.json`."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.sealing.check import KnownSegment, check_segments
from delivery.analytics.sealing.layout import part_of
from delivery.analytics.sealing.lock import exclusive
from delivery.analytics.sealing.reasons import MAX_LISTED, Reason, SetAside
from delivery.analytics.spark import counts, journeys, reconciliation, rollups, segments
from delivery.analytics.spark.errors import NoSegmentsError
from delivery.analytics.spark.publish_results import FINDING_TABLES, OnStatus, RunPublisher
from delivery.analytics.spark.segment_files import open_segments
from delivery.analytics.spark.segments import HadoopFiles, Partition
from delivery.analytics.spark.session import run_parallel, translate_spark_errors, tuned_for_size
from delivery.analytics.spark.state import (
    COMPACT_AFTER_RUNS,
    Manifest,
    PartialResults,
    empty_manifest,
    load_known,
    load_manifest,
    reserve_run,
    save_manifest,
    write_table,
)
from delivery.analytics.spark.tables import TABLES_BY_NAME, schema_document
from delivery.analytics.spark.verdicts import UnreadHours

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
_THREADS: Final = 4
LOCK: Final = "analysis"
_LOCAL_MASTER: Final = re.compile(r"local(\[.*\])?")
"""Master URLs for which tasks run in the driver process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisReport:
    """Result of a run: number, partitions processed and known, and duplicate rows.

    `set_aside`: segments that are not read, so the result is incomplete.
    """

    run: int
    partitions: int
    known: int
    repeated_rows: int
    totals: dict[str, int]
    """Reconciliation totals."""
    set_aside: tuple[SetAside, ...] = ()


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
        with translate_spark_errors(spark, segments_at):
            self._segments = HadoopFiles(spark, segments_at)
            self._output = HadoopFiles(spark, output)
        self._on_status = on_status
        self._compact_after_runs = compact_after_runs

    def run(
        self,
        *,
        now: datetime,
        full: bool = False,
        stale_s: float = 0.0,
        accept_gone: bool = False,
    ) -> AnalysisReport | None:
        """Process new partitions (`full`: all) and publish tables. Return None if nothing is new.

        `accept_gone`: segments that are gone, and whose rows an earlier run has counted, were
        removed on purpose. They are not named again while their numbers stay.
        Findings may be `stale_s` old; until then only reconciliation, outcomes and rollups are
        updated. Raise BusyError, NoSegmentsError, StateError, CollisionError or SparkFailedError. A
        failed run leaves the last tables unchanged.
        """
        with (
            exclusive(self._output.local_folder, LOCK),
            translate_spark_errors(self._spark, self._segments.root),
        ):
            return self._run(now, full=full, stale_s=stale_s, accept_gone=accept_gone)

    def set_aside(self) -> list[dict[str, Any]]:
        """Return the segments that the last complete run has not read, as in `latest.json`."""
        with translate_spark_errors(self._spark, self._output.root):
            latest = self._latest() or {}
        return list(latest.get("set_aside", ()))

    def _run(
        self, now: datetime, *, full: bool, stale_s: float, accept_gone: bool
    ) -> AnalysisReport | None:
        manifest = empty_manifest(self._output) if full else load_manifest(self._output)
        known = load_known(self._output) if full else manifest.known
        checked = check_segments(
            open_segments(self._segments),
            known,
            now_ms=int(now.timestamp() * 1000),
            trust_known=not full,
        )
        found = segments.partitions_of(self._segments.root, checked.sound)
        aside = list(checked.set_aside)
        if accept_gone:
            gone = {one.path for one in aside if one.reason is Reason.GONE}
            manifest = replace(manifest, accepted=manifest.accepted | gone)
        if not found and not manifest.done_partitions:
            raise self._no_segments(aside)
        todo = manifest.pending(found)
        kept = None if full else self._reusable_findings(now, stale_s)
        is_kept = kept is not None
        if self._is_current(manifest, todo, aside, is_kept=is_kept):
            return None
        size = sum(one.size for one in checked.sound)
        size += sum(one.size for one in self._output.list_files("state"))
        with tuned_for_size(self._spark, size) as small:
            refused = segments.contradictions(self._spark, self._segments.root, todo)
            if refused:
                found = {part: one.without(refused) for part, one in found.items()}
                found = {part: one for part, one in found.items() if one.files}
                todo = manifest.pending(found)
                aside += [_contradicted(path, what) for path, what in refused.items()]
                if not found and not manifest.done_partitions:
                    raise self._no_segments(aside)
                if self._is_current(manifest, todo, aside, is_kept=is_kept):
                    return None
            return self._run_partitions(
                manifest, _Input(found=found, todo=todo, aside=aside, known=known), now, kept,
                small=small,
            )  # fmt: skip

    def _no_segments(self, aside: Sequence[SetAside]) -> NoSegmentsError:
        if not aside:
            return NoSegmentsError(f"there are no sealed segments at {self._segments.root}")
        first = aside[0].document()
        return NoSegmentsError(
            f"no segment can be read: all {len(aside)} are set aside",
            where=f"{self._segments.root}/{first['path']}: {first['reason']}: {first['detail']}",
            remedy=first["remedy"],
            is_incomplete=True,
        )

    def _is_current(
        self,
        manifest: Manifest,
        todo: Sequence[Partition],
        aside: Sequence[SetAside],
        *,
        is_kept: bool,
    ) -> bool:
        """Return True if the last result is about these segments, and names the same set aside."""
        if todo or manifest.published is None:
            return False
        latest = self._latest() or {}
        return (is_kept or self._has_current_findings()) and latest.get("set_aside") == _listed(
            _with_counted(manifest, aside, ())
        )

    def _latest(self) -> dict[str, Any] | None:
        """Return the last result; None if there is none, or if it is damaged."""
        try:
            text = self._output.read(LATEST)
            found = None if text is None else json.loads(text)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

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
        given: "_Input",
        now: datetime,
        findings: FindingsRun | None,
        *,
        small: bool,
    ) -> AnalysisReport:
        todo = given.todo
        reserve_run(self._output, manifest.next_run)
        doubled, schemas = self._write_state(manifest, todo, small=small)
        after = manifest.with_done(todo, schemas, given.known)
        aside = _with_counted(after, given.aside, todo)
        if len(after.parts_by_run()) > self._compact_after_runs:
            self._on_status("compacting the results of earlier runs")
            after = PartialResults(self._spark, self._output, after).compact(
                ("words", *_STATE_BUILDERS), into_run=after.next_run
            )
        run = manifest.next_run
        publication = RunPublisher(self._spark, self._output, run=run, on_status=self._on_status)
        state = PartialResults(self._spark, self._output, after)
        before = manifest.published if manifest.done_partitions else None
        changed: list[SetAside] = []
        totals = publication.publish(
            state,
            previous_run=before,
            read=lambda parts: self._read_rows(state, given, parts, doubled, changed),
            with_findings=findings is None,
            small=small,
            now=now,
            unread=UnreadHours.of(aside),
        )
        findings = findings or FindingsRun(run=run, at=now)
        after = after.distrusting([one.path for one in changed])
        aside = tuple(sorted([*aside, *changed], key=lambda one: one.path))
        self._publish_latest(
            publication,
            now=now,
            partitions=len(todo),
            totals=totals,
            findings=findings,
            aside=aside,
        )
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
            set_aside=aside,
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
        given: "_Input",
        parts: Sequence[int],
        doubled: Mapping[int, int],
        changed: list[SetAside],
    ) -> DataFrame | None:
        """Read the rows of partitions whose segments still exist, without duplicates.

        Segments that an earlier run has read are compared with their checksums again; those that
        have changed are left out and added to `changed`.
        """
        fresh = {one.part for one in given.todo}
        wanted = [given.found[part] for part in parts if part in given.found]
        older = [one for one in wanted if one.part not in fresh]
        changed += self._changed_segments(older)
        paths = {one.path for one in changed}
        whole = [one.without(paths) for one in wanted]
        chosen = [one for one in whole if one.files]
        if not chosen:
            return None
        rows = segments.read_rows(self._spark, self._segments.root, chosen)
        repeated = {part for part in parts if doubled.get(part)}
        if old_parts := [one.part for one in chosen if one.part not in fresh]:
            repeated |= set(
                reconciliation.duplicate_partitions(
                    state.read_table("words").where(F.col("part").isin(*old_parts))
                )
            )
        return segments.with_keys(segments.deduplicate(rows, repeated))

    def _changed_segments(self, partitions: Sequence[Partition]) -> list[SetAside]:
        files = open_segments(self._segments)

        def compare(one: tuple[int, str, KnownSegment]) -> SetAside | None:
            part, path, known = one
            try:
                same = files.sha256(path) == known.sha256
            except OSError:
                same = False
            return None if same else SetAside(
                path=path,
                reason=Reason.DAMAGED,
                detail="its bytes are not those that were sealed",
                part=part,
                counted=True,
            )  # fmt: skip

        listed = [(one.part, path, of) for one in partitions for path, of in one.files.items()]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="segments") as pool:
            return [one for one in pool.map(compare, listed) if one is not None]

    def _publish_latest(
        self,
        publication: RunPublisher,
        *,
        now: datetime,
        partitions: int,
        totals: dict[str, int],
        findings: FindingsRun,
        aside: Sequence[SetAside],
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
            "incomplete": bool(aside),
            "set_aside_total": len(aside),
            "set_aside": _listed(aside),
        }
        self._output.write(SCHEMA, schema_document())
        self._output.write(LATEST, json.dumps(latest, indent=2) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """The sound partitions, those to process, what is set aside, and what earlier runs read."""

    found: Mapping[int, Partition]
    todo: Sequence[Partition]
    aside: Sequence[SetAside]
    known: Mapping[str, KnownSegment]


def _contradicted(path: str, what: str) -> SetAside:
    place = part_of(path)
    assert place is not None, "only segments are read"
    return SetAside(path=path, reason=Reason.DAMAGED, detail=what, part=place[0])


def _with_counted(
    manifest: Manifest, aside: Sequence[SetAside], todo: Sequence[Partition]
) -> tuple[SetAside, ...]:
    """Mark what is set aside but counted: its hour keeps the rows that an earlier run read.

    What was removed on purpose is left out, but only while it is counted.
    """
    worked = {one.part for one in todo}
    marked = (
        replace(one, counted=one.part not in worked and manifest.counts(one.path, one.part))
        for one in aside
    )
    named = (
        one
        for one in marked
        if not (one.counted and one.reason is Reason.GONE and one.path in manifest.accepted)
    )
    return tuple(sorted(named, key=lambda one: one.path))


def _listed(aside: Sequence[SetAside]) -> list[dict[str, Any]]:
    return [one.document() for one in aside[:MAX_LISTED]]
