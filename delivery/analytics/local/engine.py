"""Compute runs with DuckDB in this process."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from delivery.analytics.local.counting import NAMES, STATE_QUERIES, compact, write_query
from delivery.analytics.local.files import LocalOutput
from delivery.analytics.local.publish import LocalPublisher
from delivery.analytics.local.rows import SegmentRows
from delivery.analytics.runs.engine import CountedPartitions, OnStatus, Publication
from delivery.analytics.runs.errors import LocalFailedError
from delivery.analytics.runs.manifest import LOCAL, Manifest, Partition, state_folder
from delivery.analytics.sealing.files import LocalFiles

_MEMORY: Final = "1GB"
"""Memory of DuckDB; what needs more goes to temporary files."""
_MAX_THREADS: Final = 4
_SCRATCH: Final = "_scratch-"
_ROWS: Final = "rows"
_OLDER: Final = "older_rows"


class LocalEngine:
    """Compute runs over folders of this machine."""

    name = LOCAL

    def __init__(self, *, segments_at: str, output: str, on_status: OnStatus) -> None:
        self._root = str(Path(segments_at).absolute())
        self.segments = LocalFiles(self._root)
        self.output = LocalOutput(output)
        self.on_status = on_status
        self._open: duckdb.DuckDBPyConnection | None = None
        self._loaded: SegmentRows | None = None

    @contextmanager
    def running(self, size_bytes: int) -> Iterator[None]:  # noqa: ARG002 - of the port
        """Open DuckDB with temporary files below the output; they are removed at the end."""
        folder = self.output.path("")
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_SCRATCH}*"):
            # Of a run that was killed: this one has the lock of the folder.
            shutil.rmtree(left, ignore_errors=True)
        with (
            tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch,
            duckdb.connect(config=_settings(scratch)) as connection,
        ):
            connection.execute("SET TimeZone = 'UTC'")
            self._open = connection
            try:
                yield
            finally:
                self._open = self._loaded = None

    @contextmanager
    def translate_errors(self, where: str) -> Iterator[None]:
        """Raise errors of DuckDB, Arrow and the file system as LocalFailedError, in three lines."""
        try:
            yield
        except (duckdb.Error, pa.ArrowException, OSError) as exc:
            raise LocalFailedError(
                f"the analysis failed: {str(exc).splitlines()[0][:200]}",
                where=where,
                remedy="run it again with --debug, or with --engine spark",
            ) from exc

    @property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        assert self._open is not None, "only within `running`"
        return self._open

    def contradictions(
        self, manifest: Manifest, partitions: Collection[Partition]
    ) -> dict[str, str]:
        """Load the rows, and return the segments whose rows are not what their manifests state."""
        self.on_status(f"reading {len(partitions)} partitions")
        self._loaded = SegmentRows(self._connection, self._root, _ROWS, manifest.salt)
        self._loaded.load(partitions)
        manifests = {path: one for part in partitions for path, one in part.manifests.items()}
        return self._loaded.contradictions(manifests)

    def count(self, manifest: Manifest, partitions: Sequence[Partition]) -> CountedPartitions:
        """Write the state of the partitions that were loaded."""
        assert self._loaded is not None, "contradictions come first"
        self._loaded.keep(partitions)
        doubled = self._loaded.finish()
        if partitions:
            folder = state_folder(manifest.next_run)
            for table, query in STATE_QUERIES.items():
                write_query(self._connection, query, self.output, f"{folder}/{table}")
            self._loaded.register_names("new_names")
            write_query(
                self._connection, "SELECT * FROM new_names", self.output, f"{folder}/{NAMES}"
            )
        return CountedPartitions(doubled=doubled, schemas={})

    def compact(self, manifest: Manifest) -> Manifest:
        """Merge the state of all runs into one."""
        return compact(self._connection, self.output, manifest)

    def publish(self, publication: Publication) -> dict[str, int]:
        """Write the tables of one run."""

        def read(parts: Sequence[int]) -> list[str]:
            chosen = publication.whole(parts)
            views = [_ROWS] if any(one.part in publication.fresh for one in chosen) else []
            older = [one for one in chosen if one.part not in publication.fresh]
            if older:
                rows = SegmentRows(self._connection, self._root, _OLDER, publication.manifest.salt)
                rows.load(older)
                rows.finish()
                views.append(_OLDER)
            return views

        publisher = LocalPublisher(self._connection, self.output, publication, self.on_status)
        return publisher.publish(read)


def _settings(scratch: str) -> dict[str, str | bool | int | float | list[str]]:
    return {
        "memory_limit": _MEMORY,
        "threads": min(os.cpu_count() or 1, _MAX_THREADS),
        "temp_directory": scratch,
        "preserve_insertion_order": False,
        # Nothing is loaded from the network, or from the home folder of the user.
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
