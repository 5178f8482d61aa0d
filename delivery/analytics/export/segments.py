"""Write log rows from PostgreSQL's CSV into hourly Parquet segments, on any Arrow file system.

Errors:

ExportError
├── DestinationError       the destination cannot be written
└── InterruptedExportError the term ended or the process stops; the next run continues the plan
"""

import hashlib
import io
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
from pyarrow import fs

from delivery.analytics.sealing.contents import TYPES, Contents
from delivery.analytics.sealing.layout import (
    SEGMENT_COLUMNS,
    SEGMENT_VERSION,
    hour_folder,
    part_of,
)
from delivery.analytics.sealing.manifest import (
    SegmentManifest,
    manifest_name,
    unfinished_segment,
)
from rooms.errors import DeliveryError


class ExportError(DeliveryError):
    """Report that the export cannot continue."""


class DestinationError(ExportError):
    """Report that the destination cannot be written."""


class InterruptedExportError(ExportError):
    """Report that the term ended, or the process stops."""


SCHEMA: Final = pa.schema(
    [pa.field(one.name, TYPES[one.type], one.nullable) for one in SEGMENT_COLUMNS]
)
_ID_HALVES: Final[Mapping[str, tuple[str, slice]]] = {
    "message_hi": ("message_id", slice(0, 8)),
    "message_lo": ("message_id", slice(8, 16)),
    "delivery_hi": ("delivery_id", slice(0, 8)),
    "delivery_lo": ("delivery_id", slice(8, 16)),
}
COLUMNS: Final = tuple(one.name for one in SEGMENT_COLUMNS if one.name not in _ID_HALVES)
"""Columns read from PostgreSQL; the id halves are computed here."""
_CSV_TYPES: Final = {
    name: pa.int64() if name == "ts" else SCHEMA.field(name).type for name in COLUMNS
}
_BLOCK_BYTES: Final = 4 << 20
GROUP_ROWS: Final = 1 << 17
"""Rows in a Parquet row group, which bounds the rows in memory."""
_HOUR_US: Final = 3_600_000_000
_ID_LENGTH: Final = 36
_DIGITS: Final = [place for place in range(_ID_LENGTH) if place not in {8, 13, 18, 23}]
_NIBBLE: Final = np.zeros(256, np.uint8)
_NIBBLE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16, dtype=np.uint8)

Ints = npt.NDArray[np.int64]
ReadChunk = Callable[[], bytes]
OnRows = Callable[[int], bool]
"""Called with the number of rows read so far; False stops the export."""


@dataclass(slots=True, kw_only=True)
class WrittenSegments:
    """Total a plan: files, bytes, and for each writer its row count, first and last number."""

    files: int = 0
    size: int = 0
    writers: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return sum(count for count, _, _ in self.writers.values())

    def count(self, rows: pa.Table) -> None:
        """Add rows to the counts of their writers."""
        counts = (
            rows.group_by("writer_id")
            .aggregate([("writer_seq", "count"), ("writer_seq", "min"), ("writer_seq", "max")])
            .to_pydict()
        )
        for writer, count, first, last in zip(
            counts["writer_id"],
            counts["writer_seq_count"],
            counts["writer_seq_min"],
            counts["writer_seq_max"],
            strict=True,
        ):
            known, lowest, highest = self.writers.get(writer, (0, first, last))
            self.writers[writer] = known + count, min(lowest, first), max(highest, last)


class _HashedStream(io.RawIOBase):
    """Pass what is written on, and compute its size and SHA-256.

    So the manifest states what was meant to be written, not what a disk has made of it. The inner
    stream stays open for its owner.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, content: Any) -> int:
        """Write bytes."""
        data = memoryview(content)
        self._hash.update(data)
        self.size += data.nbytes
        self._stream.write(data)
        return data.nbytes

    def writable(self) -> bool:
        """Return True."""
        return True

    def sha256(self) -> str:
        """Return the SHA-256 as hexadecimal."""
        return self._hash.hexdigest()


class SegmentFile:
    """Hold a segment while it is written: its stream, and what its rows contain."""

    def __init__(self, stream: Any) -> None:
        self.stream = _HashedStream(stream)
        self.contents = Contents()

    def manifest(self, folder: str, name: str) -> SegmentManifest:
        """Describe the written segment."""
        place = part_of(f"{folder}/{name}")
        assert place is not None, "the export names its segments"
        return SegmentManifest(
            segment=name,
            part=place[0],
            rows=self.contents.rows,
            size=self.stream.size,
            sha256=self.stream.sha256(),
            layout=SEGMENT_VERSION,
            log_version=self.contents.log_version,
            kinds=tuple(sorted(self.contents.kinds)),
            columns=tuple(SCHEMA.names),
            writers=self.contents.writers,
        )


class Destination:
    """Write segments to a folder: a local path or a URI for Arrow (s3, gs, abfs, hdfs)."""

    def __init__(self, url: str) -> None:
        """Open the file system. Raise DestinationError if the scheme is unknown."""
        try:
            if "://" in url:
                self._files, self.root = fs.FileSystem.from_uri(url)
            else:
                self._files, self.root = fs.LocalFileSystem(), os.path.abspath(url)  # noqa: PTH100 - a text, like URIs
        except (pa.ArrowInvalid, OSError, ValueError) as exc:
            raise DestinationError(
                f"{url.partition('://')[0]} cannot hold segments: {exc}"
            ) from exc
        self.root = self.root.rstrip("/")
        self._local = isinstance(self._files, fs.LocalFileSystem)
        self.name = f"{self._files.type_name}:{self.root}"
        """The destination without credentials that its URL may contain."""

    @contextmanager
    def open_file(self, folder: str, name: str, token: str) -> Iterator[SegmentFile]:
        """Write a segment that appears, or replaces an existing one, only when complete.

        Its manifest appears before it. In between, and while both are replaced, the unfinished
        file beside them shows readers that the segment is being written.
        """
        at = posixpath.join(self.root, folder)
        hidden = posixpath.join(at, f"_{name}.{token}")
        try:
            self._files.create_dir(at, recursive=True)
            with self._files.open_output_stream(hidden) as stream:
                written = SegmentFile(stream)
                yield written
            self._write_manifest(at, name, token, written.manifest(folder, name))
            self._publish(hidden, posixpath.join(at, name))
        except OSError as exc:
            raise DestinationError(f"{self.name}: {exc}") from exc

    def _write_manifest(self, at: str, name: str, token: str, manifest: SegmentManifest) -> None:
        final = manifest_name(name)
        hidden = posixpath.join(at, f"_{final}.{token}")
        with self._files.open_output_stream(hidden) as stream:
            stream.write(manifest.text().encode())
        self._publish(hidden, posixpath.join(at, final))

    def _publish(self, hidden: str, final: str) -> None:
        if self._local:
            _fsync(hidden)
        elif (
            self._files.type_name == "hdfs"
            and self._files.get_file_info(final).type != fs.FileType.NotFound
        ):
            self._files.delete_file(final)
        self._files.move(hidden, final)
        if self._local:
            _fsync(posixpath.dirname(final))

    def remove_partial(self, folder: str, name: str) -> None:
        """Remove partial files of earlier tries, and no manifest."""
        at = posixpath.join(self.root, folder)
        for found in self._files.get_file_info(fs.FileSelector(at, allow_not_found=True)):
            if unfinished_segment(found.base_name) == name or found.base_name.startswith(
                f"_{manifest_name(name)}."
            ):
                self._files.delete_file(found.path)


def write_segments(
    destination: Destination,
    read: ReadChunk,
    *,
    stem: str,
    token: str,
    on_rows: OnRows,
    retry: bool = False,
) -> WrittenSegments:
    """Write CSV rows, which `read` returns in the order of their hours, until it returns b"".

    `stem` names the files and `token` this try. With `retry`, remove partial files of earlier
    tries. Raise DestinationError, or InterruptedExportError once `on_rows` returns False. Errors of
    `read` propagate.
    """
    written = WrittenSegments()
    hours = _split_by_hour(_read_tables(_CsvStream(read)))
    name = f"{stem}.parquet"
    rows = next(hours, None)
    while rows is not None:
        hour, part = rows
        folder = hour_folder(hour)
        if retry:
            destination.remove_partial(folder, name)
        with (
            destination.open_file(folder, name, token) as file,
            _open_row_groups(file.stream) as groups,
        ):
            while rows is not None and rows[0] == hour:
                part = rows[1]
                groups.add(part)
                written.count(part)
                file.contents.count(part)
                if not on_rows(written.rows):
                    raise InterruptedExportError(
                        "the export was stopped; the next one continues its plan"
                    )
                rows = next(hours, None)
        written.files += 1
        written.size += file.stream.size
    return written


class _CsvStream(io.RawIOBase):
    """Read PostgreSQL's COPY output as a raw stream for Arrow."""

    def __init__(self, read: ReadChunk) -> None:
        self._read = read
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def peek(self) -> bool:
        """Return True if there is more data."""
        if not self._left:
            self._left = memoryview(self._read())
        return bool(self._left)

    def readinto(self, into: Any) -> int:
        if not self.peek():
            return 0
        count = min(len(into), len(self._left))
        into[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


class _RowGroups:
    """Buffer rows into the row groups of one Parquet file."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._waiting: list[pa.Table] = []
        self._count = 0

    def add(self, rows: pa.Table) -> None:
        self._waiting.append(rows)
        self._count += rows.num_rows
        if self._count >= GROUP_ROWS:
            self.flush()

    def flush(self) -> None:
        if self._count:
            self._writer.write_table(pa.concat_tables(self._waiting), row_group_size=GROUP_ROWS)
        self._waiting, self._count = [], 0


@contextmanager
def _open_row_groups(stream: Any) -> Iterator[_RowGroups]:
    with pq.ParquetWriter(stream, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        groups = _RowGroups(writer)
        yield groups
        groups.flush()


def _read_tables(stream: _CsvStream) -> Iterator[pa.Table]:
    if not stream.peek():
        return
    reader = pc.open_csv(
        io.BufferedReader(stream, _BLOCK_BYTES),
        read_options=pc.ReadOptions(
            column_names=list(COLUMNS), block_size=_BLOCK_BYTES, use_threads=False
        ),
        parse_options=pc.ParseOptions(newlines_in_values=True),
        convert_options=pc.ConvertOptions(
            column_types=_CSV_TYPES,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    with reader:
        for batch in reader:
            yield _to_segment(pa.Table.from_batches([batch]))


def _split_by_hour(tables: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    """Split the rows where their hour changes."""
    for table in tables:
        hours = table.column("ts").cast(pa.int64()).to_numpy() // _HOUR_US
        edges = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), len(hours)]
        for begin, end in pairwise(edges):
            if end > begin:
                yield int(hours[begin]), table.slice(begin, end - begin)


def _to_segment(table: pa.Table) -> pa.Table:
    """Convert rows to the columns of a segment."""
    halves = {name: _id_half(table.column(of), part) for name, (of, part) in _ID_HALVES.items()}
    columns = [
        halves[name] if name in halves else table.column(name).cast(SCHEMA.field(name).type)
        for name in SCHEMA.names
    ]
    return pa.table(columns, schema=SCHEMA)


def _id_half(ids: pa.ChunkedArray, part: slice) -> pa.Array:
    """Return eight bytes of each id as a signed number, for joins."""
    whole = ids.combine_chunks()
    absent = whole.is_null().to_numpy(zero_copy_only=False)
    texts = (
        whole.fill_null("0" * _ID_LENGTH).to_numpy(zero_copy_only=False).astype(f"S{_ID_LENGTH}")
    )
    nibbles = _NIBBLE[texts.view(np.uint8).reshape(len(texts), _ID_LENGTH)[:, _DIGITS]]
    octets = (nibbles[:, 0::2] << 4) | nibbles[:, 1::2]
    numbers: Ints = np.ascontiguousarray(octets[:, part]).view(">i8").reshape(-1).astype(np.int64)
    return pa.array(numbers, mask=absent)


def _fsync(path: str) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
