"""Store the state between runs: partial results of partitions, and the manifest of runs.

    state/manifest.json              written last; a run that died before it left no state
    state/run=7/deliveries/*.parquet rows of the partitions that run 7 processed, with `part`

A partition with changed files is processed again, and its rows of older runs are ignored. Nothing
is rewritten in place, so no rename is needed. When there are many runs, their rows are compacted
into one.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from delivery.analytics.spark.conformance import TRANSITIONS, order_base
from delivery.analytics.spark.errors import StateError
from delivery.analytics.spark.journeys import HIGH_CARDINALITY_COLUMNS
from delivery.analytics.spark.segments import SEGMENT_VERSION, HadoopFiles, Partition
from rooms.domain.state_machine import LogKind

_MANIFEST: Final = "state/manifest.json"
_LAYOUT: Final = 3
COMPACT_AFTER_RUNS: Final = 24
"""Runs after which their rows are compacted."""


def _layout_fingerprint() -> str:
    """Hash the meaning of all stored numbers; a state with another hash is useless."""
    meanings = [
        _LAYOUT,
        SEGMENT_VERSION,
        [(kind.value, order_base(kind)) for kind in LogKind],
        TRANSITIONS,
    ]
    return hashlib.sha256(json.dumps(meanings).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class DonePartition:
    """A processed partition: its run, and the fingerprint of its files."""

    run: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Run of each partition; `next_run` grows with every run, `published` is complete."""

    done_partitions: Mapping[int, DonePartition] = field(default_factory=dict)
    next_run: int = 1
    published: int | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)
    """Spark schema of each table as JSON, which saves opening files."""

    def pending(self, found: Mapping[int, Partition]) -> list[Partition]:
        """Return the partitions that are new or have changed files."""
        return [
            partition
            for part, partition in found.items()
            if part not in self.done_partitions
            or self.done_partitions[part].fingerprint != partition.fingerprint
        ]

    def with_done(self, worked_on: Collection[Partition], schemas: Mapping[str, str]) -> "Manifest":
        """Return the manifest after the next run has processed these partitions."""
        run = self.next_run
        done = {one.part: DonePartition(run=run, fingerprint=one.fingerprint) for one in worked_on}
        known = {**self.schemas, **schemas}
        return Manifest(
            done_partitions={**self.done_partitions, **done},
            next_run=run + 1,
            published=run,
            schemas=known,
        )

    def parts_by_run(self) -> dict[int, list[int]]:
        """Return the current partitions of each run."""
        found: dict[int, list[int]] = {}
        for part, done in sorted(self.done_partitions.items()):
            found.setdefault(done.run, []).append(part)
        return found


def load_manifest(files: HadoopFiles) -> Manifest:
    """Load the manifest, empty if there is none. Raise StateError if it has another meaning."""
    text = files.read(_MANIFEST)
    if text is None:
        return Manifest()
    document = json.loads(text)
    if document["meaning"] != _layout_fingerprint():
        raise StateError("the state was written by another version of Rooms: run once with --full")
    done = {
        int(part): DonePartition(run=run, fingerprint=fingerprint)
        for part, (run, fingerprint) in document["done"].items()
    }
    return Manifest(
        done_partitions=done,
        next_run=document["next_run"],
        published=document["published"],
        schemas=document["schemas"],
    )


def empty_manifest(files: HadoopFiles) -> Manifest:
    """Return a manifest without partitions that continues the run numbers."""
    text = files.read(_MANIFEST)
    return Manifest() if text is None else Manifest(next_run=json.loads(text)["next_run"])


def reserve_run(files: HadoopFiles, run: int) -> None:
    """Reserve the run number, even if the run fails: readers may open its tables early."""
    text = files.read(_MANIFEST)
    document = _manifest_document(Manifest()) if text is None else json.loads(text)
    files.write(_MANIFEST, json.dumps({**document, "next_run": run + 1}))


def _manifest_document(manifest: Manifest) -> dict[str, Any]:
    return {
        "meaning": _layout_fingerprint(),
        "next_run": manifest.next_run,
        "published": manifest.published,
        "schemas": dict(manifest.schemas),
        "done": {
            str(part): [done.run, done.fingerprint]
            for part, done in manifest.done_partitions.items()
        },
    }


def save_manifest(files: HadoopFiles, manifest: Manifest) -> None:
    """Save the manifest and delete the state of runs that it no longer names."""
    files.write(_MANIFEST, json.dumps(_manifest_document(manifest)))
    live = {f"run={run}" for run in manifest.parts_by_run()}
    for folder in set(files.folders("state")) - live:
        files.delete(f"state/{folder}")


def write_table(rows: DataFrame, path: str) -> None:
    """Write a table, replacing an existing one."""
    plain = {f"parquet.enable.dictionary#{name}": "false" for name in HIGH_CARDINALITY_COLUMNS}
    rows.write.mode("overwrite").options(**plain).parquet(path)


class PartialResults:
    """The partial results in `root` according to one manifest."""

    def __init__(self, spark: SparkSession, files: HadoopFiles, manifest: Manifest) -> None:
        self._spark = spark
        self._files = files
        self._manifest = manifest

    def table_path(self, run: int, table: str) -> str:
        """Return the path of a run's table."""
        return f"{self._files.root}/state/run={run}/{table}"

    def read_table(self, table: str) -> DataFrame:
        """Read the rows of all partitions, each from its last run."""
        reader = self._spark.read.schema(
            StructType.fromJson(json.loads(self._manifest.schemas[table]))
        )
        found = [
            reader.parquet(self.table_path(run, table)).where(F.col("part").isin(*parts))
            for run, parts in self._manifest.parts_by_run().items()
        ]
        return reduce(DataFrame.unionByName, found)

    def compact(self, tables: Iterable[str], *, into_run: int) -> Manifest:
        """Merge the rows of all runs into one. Return the manifest, which the caller saves."""
        for table in tables:
            write_table(self.read_table(table), self.table_path(into_run, table))
        done = {
            part: replace(one, run=into_run) for part, one in self._manifest.done_partitions.items()
        }
        return replace(self._manifest, done_partitions=done, next_run=into_run + 1)
