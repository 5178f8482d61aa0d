"""Segments: rows of the log from PostgreSQL's CSV into Parquet files, one an hour of `ts`, on any file system of Arrow."""

import io
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
from pyarrow import fs

from delivery.correlation.columns import SEGMENT
from delivery.export.errors import DestinationError, InterruptedExportError

_TYPES: Final = {
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
}
SCHEMA: Final = pa.schema([pa.field(one.name, _TYPES[one.type], one.nullable) for one in SEGMENT])
_HALVES: Final[Mapping[str, tuple[str, slice]]] = {
    "message_hi": ("message_id", slice(0, 8)),
    "message_lo": ("message_id", slice(8, 16)),
    "delivery_hi": ("delivery_id", slice(0, 8)),
    "delivery_lo": ("delivery_id", slice(8, 16)),
}
COLUMNS: Final = tuple(one.name for one in SEGMENT if one.name not in _HALVES)
"""What is asked of PostgreSQL; the halves of ids are made here."""
_CSV_TYPES: Final = {name: pa.int64() if name == "ts" else SCHEMA.field(name).type for name in COLUMNS}
_BLOCK_BYTES: Final = 4 << 20
GROUP_ROWS: Final = 1 << 17
"""Rows of a row group, and so what is held in memory at a time."""
_HOUR_US: Final = 3_600_000_000
_ID: Final = 36
_DIGITS: Final = [place for place in range(_ID) if place not in {8, 13, 18, 23}]
_NIBBLE: Final = np.zeros(256, np.uint8)
_NIBBLE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16, dtype=np.uint8)

Ints = npt.NDArray[np.int64]
Read = Callable[[], bytes]
Watch = Callable[[int], bool]
"""Told how many rows were read so far; False: stop here."""


@dataclass(slots=True, kw_only=True)
class Written:
    """What became of a plan's rows: files, their bytes, and of each writer how many rows and the last number."""

    files: int = 0
    size: int = 0
    writers: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many there were."""
        return sum(count for count, _ in self.writers.values())

    def count(self, rows: pa.Table) -> None:
        """Add these rows to their writers'."""
        told = rows.group_by("writer_id").aggregate([("writer_seq", "count"), ("writer_seq", "max")]).to_pydict()
        for writer, count, last in zip(
            told["writer_id"], told["writer_seq_count"], told["writer_seq_max"], strict=True
        ):
            before, highest = self.writers.get(writer, (0, 0))
            self.writers[writer] = before + count, max(highest, last)


class Destination:
    """A folder for segments: a local path, or a URI of a file system that Arrow knows (s3, gs, abfs, hdfs)."""

    def __init__(self, url: str) -> None:
        """DestinationError: no such kind of file system."""
        try:
            if "://" in url:
                self._files, self.root = fs.FileSystem.from_uri(url)
            else:
                self._files, self.root = fs.LocalFileSystem(), os.path.abspath(url)  # noqa: PTH100 - of text, as the others are
        except (pa.ArrowInvalid, OSError, ValueError) as exc:
            raise DestinationError(f"{urlsplit(url).scheme or url} is no place for segments: {exc}") from exc
        self.root = self.root.rstrip("/")
        self._local = isinstance(self._files, fs.LocalFileSystem)
        self.name = f"{self._files.type_name}:{self.root}"
        """Names the place without the secrets that an address may carry."""

    @contextmanager
    def file(self, folder: str, name: str, token: str) -> Iterator[Any]:
        """A file that gets its name when the block is over, as a whole or not at all; there may be one of that name."""
        at = posixpath.join(self.root, folder)
        hidden, final = posixpath.join(at, f"_{name}.{token}"), posixpath.join(at, name)
        try:
            self._files.create_dir(at, recursive=True)
            with self._files.open_output_stream(hidden) as stream:
                yield stream
            if self._local:
                _sync(hidden)
            elif self._files.type_name == "hdfs" and self._files.get_file_info(final).type != fs.FileType.NotFound:
                self._files.delete_file(final)
            self._files.move(hidden, final)
            if self._local:
                _sync(at)
        except OSError as exc:
            raise DestinationError(f"{self.name}: {exc}") from exc

    def clean(self, folder: str, name: str) -> None:
        """Remove what earlier tries at a file have left."""
        at = posixpath.join(self.root, folder)
        for found in self._files.get_file_info(fs.FileSelector(at, allow_not_found=True)):
            if found.base_name.startswith(f"_{name}."):
                self._files.delete_file(found.path)

    def size(self, folder: str, name: str) -> int:
        """Bytes of a file."""
        return int(self._files.get_file_info(posixpath.join(self.root, folder, name)).size)


def write(destination: Destination, read: Read, *, stem: str, token: str, watch: Watch, again: bool = False) -> Written:
    """Write the rows that `read` gives as CSV, in the order of their hours, until it gives b"".

    `stem` names the files, `token` this try alone; `again`: an earlier try may have left something.
    DestinationError; InterruptedExportError where `watch` says so. What `read` raises goes through.
    """
    written = Written()
    hours = _hours(_batches(_Stream(read)))
    name = f"{stem}.parquet"
    rows = next(hours, None)
    while rows is not None:
        hour, part = rows
        folder = folder_of(hour)
        if again:
            destination.clean(folder, name)
        with destination.file(folder, name, token) as stream, _groups(stream) as groups:
            while rows is not None and rows[0] == hour:
                part = rows[1]
                groups.add(part)
                written.count(part)
                if not watch(written.rows):
                    raise InterruptedExportError("the export was stopped; the next one goes on with its plan")
                rows = next(hours, None)
        written.files += 1
        written.size += destination.size(folder, name)
    return written


def folder_of(hour: int) -> str:
    """The folder of an hour since 1970."""
    day, hr = divmod(hour, 24)
    return f"dt={np.datetime64(day, 'D')}/hr={hr:02d}"


class _Stream(io.RawIOBase):
    """What PostgreSQL sends, as Arrow reads it."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def peek(self) -> bool:
        """Whether there is anything."""
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


class _Groups:
    """Rows on their way into one Parquet file, gathered into row groups."""

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
def _groups(stream: Any) -> Iterator[_Groups]:
    with pq.ParquetWriter(stream, SCHEMA, compression="zstd") as writer:
        groups = _Groups(writer)
        yield groups
        groups.flush()


def _batches(stream: _Stream) -> Iterator[pa.Table]:
    if not stream.peek():
        return
    reader = pc.open_csv(
        io.BufferedReader(stream, _BLOCK_BYTES),
        read_options=pc.ReadOptions(column_names=list(COLUMNS), block_size=_BLOCK_BYTES, use_threads=False),
        parse_options=pc.ParseOptions(newlines_in_values=True),
        convert_options=pc.ConvertOptions(
            column_types=_CSV_TYPES, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
    with reader:
        for batch in reader:
            yield _segment(pa.Table.from_batches([batch]))


def _hours(tables: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    """The rows cut where their hour changes."""
    for table in tables:
        hours = table.column("ts").cast(pa.int64()).to_numpy() // _HOUR_US
        edges = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), len(hours)]
        for begin, end in pairwise(edges):
            if end > begin:
                yield int(hours[begin]), table.slice(begin, end - begin)


def _segment(table: pa.Table) -> pa.Table:
    """The columns of a segment."""
    halves = {name: _half(table.column(of), part) for name, (of, part) in _HALVES.items()}
    columns = [
        halves[name] if name in halves else table.column(name).cast(SCHEMA.field(name).type) for name in SCHEMA.names
    ]
    return pa.table(columns, schema=SCHEMA)


def _half(ids: pa.ChunkedArray, part: slice) -> pa.Array:
    """Eight bytes of each id as a signed number, as joins want them."""
    whole = ids.combine_chunks()
    absent = whole.is_null().to_numpy(zero_copy_only=False)
    texts = whole.fill_null("0" * _ID).to_numpy(zero_copy_only=False).astype(f"S{_ID}")
    nibbles = _NIBBLE[texts.view(np.uint8).reshape(len(texts), _ID)[:, _DIGITS]]
    octets = (nibbles[:, 0::2] << 4) | nibbles[:, 1::2]
    numbers: Ints = np.ascontiguousarray(octets[:, part]).view(">i8").reshape(-1).astype(np.int64)
    return pa.array(numbers, mask=absent)


def _sync(path: str) -> None:
    """Have a file, or the names in a folder, on disk before anybody says so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
