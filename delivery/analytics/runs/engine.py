"""Define what computes a run: Spark, or DuckDB in this process.

An engine counts the rows of partitions into the state, and writes the tables from the state of all
partitions. `run` has the rest: which segments are read, the manifest, and `latest.json`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from delivery.analytics.runs.files import OutputFiles
from delivery.analytics.runs.manifest import Manifest, Partition
from delivery.analytics.runs.outcomes import UnreadHours
from delivery.analytics.sealing.files import SegmentFiles

OnStatus = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPartitions:
    """Duplicate rows by partition, and what the engine must know of its tables."""

    doubled: Mapping[int, int]
    schemas: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Describe one run to the engine that writes its tables from the state of `manifest`.

    `previous_run`: the run whose paths hold for deliveries without new rows. `fresh`: partitions
    that this run has counted. `unread`: hours with rows that no segment that was read has.
    """

    run: int
    manifest: Manifest
    previous_run: int | None
    whole: Callable[[Sequence[int]], list[Partition]]
    """Returns those of some partitions whose segments still exist as they were sealed."""
    fresh: frozenset[int]
    doubled: Mapping[int, int]
    with_findings: bool
    now: datetime
    unread: UnreadHours
    on_books: Callable[[dict[str, int]], None]
    """Called once with the totals, when every table but FINDING_TABLES is written."""

    def folder(self, table: str) -> str:
        """Return the folder of a table of this run under the output address."""
        return run_folder(self.run, table)


def run_folder(run: int, table: str) -> str:
    """Return the folder of a run's table under the output address."""
    return f"runs/{run}/{table}"


class Engine(Protocol):
    """Compute one run at a time over the segments at one address."""

    name: str
    """One of `manifest.ENGINES`."""
    on_status: OnStatus

    @property
    def segments(self) -> SegmentFiles:
        """Return the files of the segments."""
        ...

    @property
    def output(self) -> OutputFiles:
        """Return the files of the output."""
        ...

    def running(self, size_bytes: int) -> AbstractContextManager[None]:
        """Prepare for an input of this size, and release what the run holds at the end."""
        ...

    def translate_errors(self, where: str) -> AbstractContextManager[None]:
        """Raise the engine's errors as AnalysisError. `where`: the input."""
        ...

    def contradictions(
        self, manifest: Manifest, partitions: Collection[Partition]
    ) -> dict[str, str]:
        """Return the segments whose rows are not what their manifests state, with the difference.

        Only segments that no earlier run has read are compared.
        """
        ...

    def count(self, manifest: Manifest, partitions: Sequence[Partition]) -> CountedPartitions:
        """Write the state of partitions as `manifest.next_run`."""
        ...

    def compact(self, manifest: Manifest) -> Manifest:
        """Merge the state of all runs into `manifest.next_run`. The caller saves the result."""
        ...

    def publish(self, publication: Publication) -> dict[str, int]:
        """Write every table, FINDING_TABLES only on demand. Return the reconciliation totals.

        Raise CollisionError if two names have one key.
        """
        ...
