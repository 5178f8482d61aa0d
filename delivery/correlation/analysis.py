"""One run of the analysis: new partitions into the state, the state of all into tables, then the pointer to them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.correlation import cells, journeys, reconciliation, rollups, segments, sequences
from delivery.correlation.actions import side_by_side
from delivery.correlation.errors import NoSegmentsError
from delivery.correlation.files import Files
from delivery.correlation.publication import FINDINGS, Publication, Tell
from delivery.correlation.segments import Partition
from delivery.correlation.session import sized
from delivery.correlation.state import MANY, Manifest, State, fresh, load, reserve, save, write
from delivery.correlation.tables import BY_NAME, document

LATEST: Final = "latest.json"
SCHEMA: Final = "schema.json"
_STATE: Final[dict[str, Callable[[DataFrame], DataFrame]]] = {
    "deliveries": journeys.partial,
    "anchors": reconciliation.anchors,
    "rollups": rollups.hourly_state,
    "cells": cells.cells,
    "causes": cells.causes,
}
_KEPT_RUNS: Final = 2
_ALONE: Final = re.compile(r"local(\[.*\])?")
"""A master without which there is nothing: tasks run in the driver itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run did: its number, the partitions worked on and known, and how many rows came more than once."""

    run: int
    partitions: int
    known: int
    repeated_rows: int
    totals: dict[str, int]
    """Of the reconciliation, summed up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The run whose findings readers see, and when it was."""

    run: int
    at: datetime


class Analysis:
    """Analyses the segments under one address into tables under another one. After `many` runs their rows are put together."""

    def __init__(self, spark: SparkSession, *, segments_at: str, out: str, tell: Tell, many: int = MANY) -> None:
        self._spark = spark
        self._segments = Files(spark, segments_at)
        self._out = Files(spark, out)
        self._tell = tell
        self._many = many

    def run(self, *, now: datetime, full: bool = False, stale_s: float = 0.0) -> Report | None:
        """Work on what is new (`full`: on everything) and publish; None where nothing is new.

        `stale_s`: what fails together and advice may be this old; until then only the books, outcomes and rollups follow.
        NoSegmentsError, StateError, CollisionError. A run that fails leaves the last one's tables as they were.
        """
        manifest = fresh(self._out) if full else load(self._out)
        files = self._segments.walk()
        found = segments.partitions(files)
        if not found and not manifest.done:
            raise NoSegmentsError(f"there are no sealed segments at {self._segments.root}")
        todo = manifest.todo(found)
        kept = None if full else self._kept(now, stale_s)
        if not todo and manifest.published is not None and (kept or self._whole()):
            return None
        size = sum(file.size for file in (*files, *self._out.walk("state")))
        with sized(self._spark, size) as small:
            return self._run(manifest, found, todo, now, kept, small=small)

    def _latest(self) -> dict[str, Any] | None:
        text = self._out.read(LATEST)
        return None if text is None else json.loads(text)

    def _whole(self) -> bool:
        """Whether the findings that readers have are of the same run as everything else."""
        latest = self._latest()
        return latest is not None and latest.get("findings", latest)["run"] == latest["run"]

    def _kept(self, now: datetime, stale_s: float) -> Kept | None:
        """The findings that are still good enough."""
        latest = self._latest()
        if latest is None or not stale_s:
            return None
        told = latest.get("findings", latest)
        kept = Kept(run=told["run"], at=datetime.fromisoformat(told["at"]))
        return None if (now - kept.at).total_seconds() >= stale_s else kept

    def _run(
        self,
        manifest: Manifest,
        found: Mapping[int, Partition],
        todo: Sequence[Partition],
        now: datetime,
        kept: Kept | None,
        *,
        small: bool,
    ) -> Report:
        reserve(self._out, manifest.next_run)
        doubled, schemas = self._work(manifest, todo, small=small)
        after = manifest.after(todo, schemas)
        if len(after.runs()) > self._many:
            self._tell("putting the results of earlier runs together")
            after = State(self._spark, self._out, after).gather(("words", *_STATE), into=after.next_run)
        run = manifest.next_run
        publication = Publication(self._spark, self._out, run=run, tell=self._tell)
        state = State(self._spark, self._out, after)
        before = manifest.published if manifest.done else None
        totals = publication.publish(
            state,
            before=before,
            read=lambda parts: self._rows(state, found, parts, {one.part: doubled.get(one.part, 0) for one in todo}),
            with_findings=kept is None,
            small=small,
        )
        kept = kept or Kept(run=run, at=now)
        self._finish(publication, now, len(todo), totals, kept)
        save(self._out, after)
        for folder in self._out.folders("runs"):
            if int(folder) <= run - _KEPT_RUNS and int(folder) != kept.run:
                self._out.delete(f"runs/{folder}")
        return Report(
            run=run, partitions=len(todo), known=len(after.done), repeated_rows=sum(doubled.values()), totals=totals
        )

    def _work(
        self, manifest: Manifest, todo: Sequence[Partition], *, small: bool
    ) -> tuple[dict[int, int], dict[str, str]]:
        """Write the state of these partitions; how many rows came more than once in which, and the tables' schemas."""
        if not todo:
            return {}, {}
        state = State(self._spark, self._out, manifest)
        run = manifest.next_run
        rows = segments.read(self._spark, self._segments.root, todo)
        self._tell(f"reading {len(todo)} partitions")
        counted = sequences.words(rows)
        write(counted, state.path(run, "words"))
        words = self._spark.read.schema(counted.schema).parquet(state.path(run, "words"))
        schemas = {"words": counted.schema.json()}
        doubled = sequences.doubled(words)
        keyed = segments.keyed(segments.once(rows, doubled))
        if small and _ALONE.fullmatch(self._spark.sparkContext.master or ""):
            # Five tables are made of them: kept where nothing is lost but all of it. A cluster reads them again, and may lose an executor.
            keyed = keyed.localCheckpoint(eager=False)

        def count(name: str) -> None:
            self._tell(f"counting {name}")
            made = _STATE[name](keyed)
            write(made, state.path(run, name))
            schemas[name] = made.schema.json()

        with side_by_side(self._spark) as start:
            for name in _STATE:
                start(partial(count, name))
        return doubled, schemas

    def _rows(
        self, state: State, found: Mapping[int, Partition], parts: Sequence[int], known: Mapping[int, int]
    ) -> DataFrame | None:
        """The rows of these partitions, as far as their segments are still there. `known`: rows that come too often."""
        chosen = [found[part] for part in parts if part in found]
        if not chosen:
            return None
        rows = segments.read(self._spark, self._segments.root, chosen)
        doubled = {part for part in parts if known.get(part)}
        if older := [one.part for one in chosen if one.part not in known]:
            doubled |= set(sequences.doubled(state.read("words").where(F.col("part").isin(*older))))
        return segments.keyed(segments.once(rows, doubled))

    def _finish(
        self, publication: Publication, now: datetime, partitions: int, totals: dict[str, int], kept: Kept
    ) -> None:
        """From here on readers find this run's tables."""
        latest = {
            "run": publication.run,
            "at": now.isoformat(),
            "partitions": partitions,
            "findings": {"run": kept.run, "at": kept.at.isoformat()},
            "tables": {name: publication.folder(name, kept.run if name in FINDINGS else None) for name in BY_NAME},
            "totals": totals,
        }
        self._out.write(SCHEMA, document())
        self._out.write(LATEST, json.dumps(latest, indent=2) + "\n")
