"""Run the analysis once: update the state, write the tables, then switch `latest.json`.

The books (reconciliation, outcomes, rollups) are published before the findings (incidents, retry
advice), which take longer: until these follow, `latest.json` names the findings of an earlier run.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from delivery.analytics.runs.engine import Engine, Publication, run_folder
from delivery.analytics.runs.errors import NoSegmentsError
from delivery.analytics.runs.manifest import (
    COMPACT_AFTER_RUNS,
    Manifest,
    Partition,
    empty_manifest,
    has_unsalted_keys,
    load_known,
    load_manifest,
    partitions_of,
    reserve_run,
    save_manifest,
    state_engine,
)
from delivery.analytics.runs.outcomes import UnreadHours
from delivery.analytics.runs.tables import FINDING_TABLES, TABLES_BY_NAME, schema_document
from delivery.analytics.sealing.check import KnownSegment, check_segments
from delivery.analytics.sealing.errors import MAX_LISTED, SetAside, SetAsideReason
from delivery.analytics.sealing.layout import part_of
from delivery.analytics.sealing.lock import exclusive

LATEST: Final = "latest.json"
SCHEMA: Final = "schema.json"
_KEPT_RUNS: Final = 2
_THREADS: Final = 4
LOCK: Final = "analysis"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisReport:
    """Report the result of a run: number, partitions processed and known, and duplicate rows.

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
    """Hold the run whose findings readers see, and its time."""

    run: int
    at: datetime


class Analysis:
    """Analyse the segments of an engine into tables, one run at a time."""

    def __init__(self, engine: Engine, *, compact_after_runs: int = COMPACT_AFTER_RUNS) -> None:
        self._engine = engine
        self._segments = engine.segments
        self._output = engine.output
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
        updated. Raise BusyError, or AnalysisError, such as NoSegmentsError and StateError. A run
        that fails leaves the last tables unchanged. If it fails in the findings, its books are
        published, and the next run computes the findings, even without new partitions.
        """
        with (
            exclusive(self._output.local_folder, LOCK),
            self._engine.translate_errors(self._segments.root),
        ):
            return self._run(now, full=full, stale_s=stale_s, accept_gone=accept_gone)

    def set_aside(self) -> list[dict[str, Any]]:
        """Return the segments that the last complete run has not read, as in `latest.json`."""
        with self._engine.translate_errors(self._output.root):
            latest = self._latest() or {}
        return list(latest.get("set_aside", ()))

    def _run(
        self, now: datetime, *, full: bool, stale_s: float, accept_gone: bool
    ) -> AnalysisReport | None:
        full = full or self._starts_over()
        manifest = (
            empty_manifest(self._output) if full else load_manifest(self._output, self._engine.name)
        )
        known = load_known(self._output) if full else manifest.known
        checked = check_segments(
            self._segments,
            known,
            now_ms=int(now.timestamp() * 1000),
            trust_known=not full,
        )
        found = partitions_of(self._segments.root, checked.sound)
        aside = list(checked.set_aside)
        if accept_gone:
            gone = {one.path for one in aside if one.reason is SetAsideReason.GONE}
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
        with self._engine.running(size):
            refused = self._engine.contradictions(manifest, todo)
            if refused:
                found = {part: one.without(refused) for part, one in found.items()}
                found = {part: one for part, one in found.items() if one.files}
                todo = manifest.pending(found)
                aside += [_contradicted(path, what) for path, what in refused.items()]
                if not found and not manifest.done_partitions:
                    raise self._no_segments(aside)
                if self._is_current(manifest, todo, aside, is_kept=is_kept):
                    return None
            given = _Input(found=found, todo=todo, aside=aside, known=known)
            early = not full or self._latest() is None
            return self._run_partitions(manifest, given, now, kept, books_first=early)

    def _starts_over(self) -> bool:
        """Return True if the state is of the other engine, or has keys without a salt."""
        if has_unsalted_keys(self._output):
            self._engine.on_status(
                "the state has keys of an earlier version: counting the log anew, as --full does"
            )
            return True
        other = state_engine(self._output)
        if other is None or other == self._engine.name:
            return False
        self._engine.on_status(
            f"the state is of the engine {other}: counting the log anew, as --full does"
        )
        return True

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
        findings = self._published_findings()
        return latest is not None and findings is not None and findings.run == latest.get("run")

    def _reusable_findings(self, now: datetime, stale_s: float) -> FindingsRun | None:
        """Return the findings if they are recent enough."""
        kept = self._published_findings()
        # Those of a time to come are of a clock that was wrong.
        fresh = kept is not None and 0.0 <= (now - kept.at).total_seconds() < stale_s
        return kept if fresh else None

    def _published_findings(self) -> FindingsRun | None:
        """Return the findings that readers see; None if there are none, or no time of them."""
        latest = self._latest()
        findings = None if latest is None else latest.get("findings", latest)
        if findings is None:
            return None
        try:
            return FindingsRun(run=findings["run"], at=datetime.fromisoformat(findings["at"]))
        except (KeyError, TypeError, ValueError):
            return None

    def _run_partitions(
        self,
        manifest: Manifest,
        given: "_Input",
        now: datetime,
        kept: FindingsRun | None,
        *,
        books_first: bool,
    ) -> AnalysisReport:
        """Count the partitions and publish. `kept`: findings that this run does not compute again.

        `books_first`: what was published has tables of the same columns, so that the books of this
        run can stand beside earlier findings.
        """
        todo, engine, run = given.todo, self._engine, manifest.next_run
        reserve_run(self._output, run, engine.name)
        counted = engine.count(manifest, todo)
        after = manifest.with_done(todo, counted.schemas, given.known)
        aside = _with_counted(after, given.aside, todo)
        if len(after.parts_by_run()) > self._compact_after_runs:
            engine.on_status("compacting the results of earlier runs")
            after = engine.compact(after)
        changed: list[SetAside] = []
        fresh = frozenset(one.part for one in todo)

        def publish(totals: dict[str, int], findings: FindingsRun | None) -> AnalysisReport:
            counts = after.distrusting([one.path for one in changed])
            named = tuple(sorted([*aside, *changed], key=lambda one: one.path))
            self._publish_latest(
                run,
                now=now,
                partitions=len(todo),
                totals=totals,
                findings=findings,
                aside=named,
            )
            save_manifest(self._output, counts, engine.name)
            self._delete_old_runs(run, findings)
            return AnalysisReport(
                run=run,
                partitions=len(todo),
                known=len(counts.done_partitions),
                repeated_rows=sum(counted.doubled.values()),
                totals=totals,
                set_aside=named,
            )

        def publish_books(totals: dict[str, int]) -> None:
            if kept is None and books_first:
                publish(totals, self._published_findings())
                engine.on_status("the books are published, the findings follow")

        totals = engine.publish(
            Publication(
                run=run,
                manifest=after,
                previous_run=manifest.published if manifest.done_partitions else None,
                whole=lambda parts: self._whole_partitions(given, parts, fresh, changed),
                fresh=fresh,
                doubled=counted.doubled,
                with_findings=kept is None,
                now=now,
                unread=UnreadHours.of(aside),
                on_books=publish_books,
            )
        )
        return publish(totals, kept or FindingsRun(run=run, at=now))

    def _delete_old_runs(self, run: int, findings: FindingsRun | None) -> None:
        """Delete the tables that no reader has open, as far as reading lasts less than a run."""
        # Others may keep folders there, such as snapshots of a file system.
        runs = [int(name) for name in self._output.folders("runs") if name.isdecimal()]
        for old in runs:
            is_shown = findings is not None and old == findings.run
            if old <= run - _KEPT_RUNS and not is_shown:
                self._output.delete(f"runs/{old}")

    def _whole_partitions(
        self,
        given: "_Input",
        parts: Sequence[int],
        fresh: Collection[int],
        changed: list[SetAside],
    ) -> list[Partition]:
        """Return the partitions with the segments that still exist as they were sealed.

        Segments that an earlier run has read are compared with their checksums again; those that
        have changed are left out and added to `changed`.
        """
        wanted = [given.found[part] for part in parts if part in given.found]
        changed += self._changed_segments([one for one in wanted if one.part not in fresh])
        paths = {one.path for one in changed}
        whole = [one.without(paths) for one in wanted]
        return [one for one in whole if one.files]

    def _changed_segments(self, partitions: Sequence[Partition]) -> list[SetAside]:
        def compare(one: tuple[int, str, KnownSegment]) -> SetAside | None:
            part, path, known = one
            try:
                same = self._segments.sha256(path) == known.sha256
            except OSError:
                same = False
            return None if same else SetAside(
                path=path,
                reason=SetAsideReason.DAMAGED,
                detail="its bytes are not those that were sealed",
                part=part,
                counted=True,
            )  # fmt: skip

        listed = [(one.part, path, of) for one in partitions for path, of in one.files.items()]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="segments") as pool:
            return [one for one in pool.map(compare, listed) if one is not None]

    def _publish_latest(
        self,
        run: int,
        *,
        now: datetime,
        partitions: int,
        totals: dict[str, int],
        findings: FindingsRun | None,
        aside: Sequence[SetAside],
    ) -> None:
        """Make the tables of this run visible to readers. `findings` None: there are none yet."""
        runs = {name: run for name in TABLES_BY_NAME if name not in FINDING_TABLES}
        if findings is not None:
            runs.update(dict.fromkeys(FINDING_TABLES, findings.run))
        latest = {
            "run": run,
            "at": now.isoformat(),
            "partitions": partitions,
            "findings": findings and {"run": findings.run, "at": findings.at.isoformat()},
            "tables": {
                name: run_folder(runs[name], name) for name in TABLES_BY_NAME if name in runs
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
    """Hold the sound partitions, those to process, what is set aside, and what was read before."""

    found: Mapping[int, Partition]
    todo: Sequence[Partition]
    aside: Sequence[SetAside]
    known: Mapping[str, KnownSegment]


def _contradicted(path: str, what: str) -> SetAside:
    place = part_of(path)
    assert place is not None, "only segments are read"
    return SetAside(path=path, reason=SetAsideReason.DAMAGED, detail=what, part=place[0])


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
        if not (one.counted and one.reason is SetAsideReason.GONE and one.path in manifest.accepted)
    )
    return tuple(sorted(named, key=lambda one: one.path))


def _listed(aside: Sequence[SetAside]) -> list[dict[str, Any]]:
    return [one.document() for one in aside[:MAX_LISTED]]
