"""What runs leave for later runs: partial results a partition, and the manifest that says which run holds which partition.

    state/manifest.json              written last: a run that died before it left nothing that counts
    state/run=7/deliveries/*.parquet rows of the partitions that run 7 worked on, each with its `part`

A partition that got another file is worked on again, and its rows of older runs no longer count; nothing is rewritten in
place, so that nobody needs a rename. When runs have become many, their rows are put together into one.
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

from delivery.correlation.columns import VERSION
from delivery.correlation.conformance import TABLE, order_base
from delivery.correlation.errors import StateError
from delivery.correlation.files import Files
from delivery.correlation.journeys import UNREPEATED
from delivery.correlation.segments import Partition
from rooms.domain.states import LogKind

_MANIFEST: Final = "state/manifest.json"
_LAYOUT: Final = 2
MANY: Final = 24
"""Runs after which their rows are put together."""


def _meaning() -> str:
    """What numbers in the state stand for; another one makes the state useless."""
    told = [_LAYOUT, VERSION, [(kind.value, order_base(kind)) for kind in LogKind], TABLE]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A partition that is done: by which run, from which files."""

    run: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Which run did which partition. `next_run` grows by every run, `published` is the last one whose tables are whole."""

    done: Mapping[int, Done] = field(default_factory=dict)
    next_run: int = 1
    published: int | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)
    """Spark's schema of each table in JSON: told, so that nobody has to open files to learn it."""

    def todo(self, found: Mapping[int, Partition]) -> list[Partition]:
        """The partitions that are new, or whose files are others than they were."""
        return [
            partition
            for part, partition in found.items()
            if part not in self.done or self.done[part].fingerprint != partition.fingerprint
        ]

    def after(self, worked_on: Collection[Partition], schemas: Mapping[str, str]) -> "Manifest":
        """What holds when the next run has done these partitions and published its tables."""
        run = self.next_run
        done = {one.part: Done(run=run, fingerprint=one.fingerprint) for one in worked_on}
        known = {**self.schemas, **schemas}
        return Manifest(done={**self.done, **done}, next_run=run + 1, published=run, schemas=known)

    def runs(self) -> dict[int, list[int]]:
        """The partitions of each run that still count."""
        found: dict[int, list[int]] = {}
        for part, done in sorted(self.done.items()):
            found.setdefault(done.run, []).append(part)
        return found


def load(files: Files) -> Manifest:
    """The manifest of earlier runs, an empty one where there were none. StateError where it means something else."""
    text = files.read(_MANIFEST)
    if text is None:
        return Manifest()
    told = json.loads(text)
    if told["meaning"] != _meaning():
        raise StateError("the state was written by another version of Rooms: run once with --full")
    done = {int(part): Done(run=run, fingerprint=fingerprint) for part, (run, fingerprint) in told["done"].items()}
    return Manifest(done=done, next_run=told["next_run"], published=told["published"], schemas=told["schemas"])


def fresh(files: Files) -> Manifest:
    """A manifest that has nothing done, whatever is there, and still never uses a run's number twice."""
    text = files.read(_MANIFEST)
    return Manifest() if text is None else Manifest(next_run=json.loads(text)["next_run"])


def reserve(files: Files, run: int) -> None:
    """Let no other run use this number, however this one ends: readers may hold its tables before it is saved."""
    text = files.read(_MANIFEST)
    told = _told(Manifest()) if text is None else json.loads(text)
    files.write(_MANIFEST, json.dumps({**told, "next_run": run + 1}))


def _told(manifest: Manifest) -> dict[str, Any]:
    return {
        "meaning": _meaning(),
        "next_run": manifest.next_run,
        "published": manifest.published,
        "schemas": dict(manifest.schemas),
        "done": {str(part): [done.run, done.fingerprint] for part, done in manifest.done.items()},
    }


def save(files: Files, manifest: Manifest) -> None:
    """From here on the manifest holds; what no longer counts is removed."""
    files.write(_MANIFEST, json.dumps(_told(manifest)))
    live = {f"run={run}" for run in manifest.runs()}
    for folder in set(files.folders("state")) - live:
        files.delete(f"state/{folder}")


def write(rows: DataFrame, path: str) -> None:
    """Write a table, over the one that may be there."""
    plain = {f"parquet.enable.dictionary#{name}": "false" for name in UNREPEATED}
    rows.write.mode("overwrite").options(**plain).parquet(path)


class State:
    """The partial results in `root` as one manifest has them."""

    def __init__(self, spark: SparkSession, files: Files, manifest: Manifest) -> None:
        self._spark = spark
        self._files = files
        self._manifest = manifest

    def path(self, run: int, table: str) -> str:
        """Where a run keeps a table."""
        return f"{self._files.root}/state/run={run}/{table}"

    def read(self, table: str) -> DataFrame:
        """The rows of all partitions, each of the run that did it last."""
        reader = self._spark.read.schema(StructType.fromJson(json.loads(self._manifest.schemas[table])))
        found = [
            reader.parquet(self.path(run, table)).where(F.col("part").isin(*parts))
            for run, parts in self._manifest.runs().items()
        ]
        return reduce(DataFrame.unionByName, found)

    def gather(self, tables: Iterable[str], *, into: int) -> Manifest:
        """Put the rows of every run into one; the manifest that then holds, to be saved by the caller."""
        for table in tables:
            write(self.read(table), self.path(into, table))
        done = {part: replace(one, run=into) for part, one in self._manifest.done.items()}
        return replace(self._manifest, done=done, next_run=into + 1)
