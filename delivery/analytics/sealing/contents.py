"""Read what a Parquet file contains, with bounded memory, and refuse what is no segment."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivery.analytics.sealing.errors import ContentError, SetAsideReason
from delivery.analytics.sealing.layout import (
    LOG_VERSION,
    NEVER_NULL,
    REQUIRED_COLUMNS,
    SEGMENT_COLUMNS,
)
from delivery.analytics.sealing.manifest import WriterRange
from rooms.domain.state_machine import LogKind

TYPES: Final = {
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
}
_EXPECTED: Final = {one.name: TYPES[one.type] for one in SEGMENT_COLUMNS}
_KINDS: Final = frozenset(LogKind)
_HOUR_US: Final = 3_600_000_000
_MAGIC: Final = b"PAR1"
_END_BYTES: Final = 8
"""The length of the footer and the magic."""
_BATCH_ROWS: Final = 1 << 16
_MAX_GROUP_BYTES: Final = 4 << 30
_MAX_FOOTER_BYTES: Final = 64 << 20
"""Declared sizes above which a file is not read: no segment has them, and they cost memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """Hold what the end of a Parquet file states."""

    rows: int
    columns: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Contents:
    """Count what the rows of a segment contain."""

    rows: int = 0
    log_version: int = 0
    kinds: set[str] = field(default_factory=set)
    writers: dict[int, WriterRange] = field(default_factory=dict)

    def count(self, rows: pa.Table) -> None:
        """Add rows."""
        if not rows.num_rows:
            return
        self.rows += rows.num_rows
        self.log_version = max(self.log_version, pc.max(rows.column("schema_version")).as_py())
        self.kinds.update(pc.unique(rows.column("kind")).to_pylist())
        found = (
            rows.group_by("writer_id")
            .aggregate([("writer_seq", "count"), ("writer_seq", "min"), ("writer_seq", "max")])
            .to_pylist()
        )
        for one in found:
            added = WriterRange(
                rows=one["writer_seq_count"],
                first=one["writer_seq_min"],
                last=one["writer_seq_max"],
            )
            known = self.writers.get(one["writer_id"])
            self.writers[one["writer_id"]] = added if known is None else _merge(known, added)


def _merge(one: WriterRange, other: WriterRange) -> WriterRange:
    return WriterRange(
        rows=one.rows + other.rows,
        first=min(one.first, other.first),
        last=max(one.last, other.last),
    )


def read_footer(file: BinaryIO) -> Footer:
    """Return what the end of the file states. Raise ContentError if it is no segment."""
    with _parquet(file) as parquet:
        return _checked_footer(parquet)


def _parquet(file: BinaryIO) -> Any:
    _check_footer_size(file)
    try:
        return pq.ParquetFile(
            file,
            page_checksum_verification=True,
            thrift_string_size_limit=_MAX_FOOTER_BYTES,
            thrift_container_size_limit=1 << 20,
        )
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise ContentError(
            SetAsideReason.DAMAGED, f"it is no whole Parquet file: {_short(exc)}"
        ) from exc


def _check_footer_size(file: BinaryIO) -> None:
    """Raise ContentError if the end is no Parquet, or claims a footer that fills the memory."""
    size = file.seek(0, os.SEEK_END)
    if size < len(_MAGIC) + _END_BYTES:
        raise ContentError(SetAsideReason.DAMAGED, f"it has only {size} bytes")
    file.seek(size - _END_BYTES)
    end = file.read(_END_BYTES)
    file.seek(0)
    if end[-len(_MAGIC) :] != _MAGIC:
        raise ContentError(SetAsideReason.DAMAGED, "it does not end as Parquet does")
    claimed = int.from_bytes(end[: -len(_MAGIC)], "little")
    if claimed > min(_MAX_FOOTER_BYTES, size):
        raise ContentError(SetAsideReason.DAMAGED, f"it claims a footer of {claimed} bytes")


def _checked_footer(parquet: Any) -> Footer:
    try:
        schema, metadata = parquet.schema_arrow, parquet.metadata
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise ContentError(
            SetAsideReason.DAMAGED, f"its schema is unreadable: {_short(exc)}"
        ) from exc
    check_columns(schema.names)
    for name, expected in _EXPECTED.items():
        if name in schema.names:
            found = schema.field(name).type
            if found != expected and not (
                pa.types.is_string(expected) and pa.types.is_large_string(found)
            ):
                raise ContentError(
                    SetAsideReason.FOREIGN,
                    f"its column {name} has the type {found}, not {expected}",
                )
    for number in range(metadata.num_row_groups):
        if metadata.row_group(number).total_byte_size > _MAX_GROUP_BYTES:
            raise ContentError(SetAsideReason.FOREIGN, "it has a row group of more than 4 GiB")
    if not metadata.num_rows:
        raise ContentError(SetAsideReason.EMPTY, "it has no rows")
    return Footer(rows=metadata.num_rows, columns=tuple(schema.names))


def check_columns(names: Iterable[str]) -> None:
    """Raise ContentError unless these are the columns of a segment, which may have later ones."""
    found = list(names)
    missing = [name for name in REQUIRED_COLUMNS if name not in found]
    if missing:
        raise ContentError(SetAsideReason.FOREIGN, f"it lacks columns: {', '.join(missing[:5])}")
    if len({name.lower() for name in found}) < len(found):
        raise ContentError(SetAsideReason.FOREIGN, "it has two columns of one name")


def check_versions(log_version: int, kinds: Iterable[str]) -> None:
    """Raise ContentError if rows are of a later version, or of kinds that it has added."""
    if log_version > LOG_VERSION:
        raise ContentError(
            SetAsideReason.FUTURE,
            f"it has log rows of version {log_version}, and {LOG_VERSION} is known",
        )
    unknown = sorted(set(kinds) - _KINDS)
    if unknown:
        raise ContentError(SetAsideReason.FUTURE, f"it has unknown kinds: {', '.join(unknown[:5])}")


def read_contents(file: BinaryIO, *, part: int) -> tuple[Footer, Contents]:
    """Read every row of a segment of this hour. Raise ContentError if it is none, or damaged.

    All columns are decoded, so that damage is noticed where pages have checksums.
    """
    found = Contents()
    with _parquet(file) as parquet:
        footer = _checked_footer(parquet)
        try:
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                rows = pa.Table.from_batches([batch])
                _check_rows(rows, part)
                found.count(rows)
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise ContentError(
                SetAsideReason.DAMAGED, f"its rows are unreadable: {_short(exc)}"
            ) from exc
    if found.rows != footer.rows:
        raise ContentError(
            SetAsideReason.DAMAGED, f"it has {found.rows} rows, and states {footer.rows}"
        )
    check_versions(found.log_version, found.kinds)
    return footer, found


def _check_rows(rows: pa.Table, part: int) -> None:
    for name in NEVER_NULL:
        if rows.column(name).null_count:
            raise ContentError(SetAsideReason.FOREIGN, f"its column {name} has nulls")
    if rows.num_rows and pc.min(rows.column("writer_seq")).as_py() < 1:
        raise ContentError(SetAsideReason.FOREIGN, "it has a writer_seq below 1")
    ends = pc.min_max(rows.column("ts").cast(pa.int64())).as_py()
    if rows.num_rows and {ends["min"] // _HOUR_US, ends["max"] // _HOUR_US} != {part}:
        raise ContentError(SetAsideReason.RENAMED, "it has rows of another hour than its folder")


def _short(exc: Exception) -> str:
    return str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__
