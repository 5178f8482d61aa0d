"""Define the layout of segments: columns, versions and folders, for writer and readers.

A sealed segment has the columns of `delivery_log` and integer keys of its ids. Segments are in
`dt=YYYY-MM-DD/hr=HH` by the UTC hour of `ts`, and a file never changes. Ids are stored as text for
readers and as two 64-bit halves for joins, since text keys make joins slower by half. The module
imports neither Spark nor Arrow.
"""

import re
from dataclasses import dataclass
from datetime import date
from typing import Final

SEGMENT_VERSION: Final = 1
"""Version of this layout. Columns may be added; their meaning never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """Define a column; `type` is a Spark type (int, bigint, float, double, boolean, string …)."""

    name: str
    type: str
    says: str
    nullable: bool = True


def _column(name: str, kind: str, description: str) -> ColumnSpec:
    return ColumnSpec(
        name=name, type=kind.rstrip("!"), says=description, nullable=not kind.endswith("!")
    )


SEGMENT_COLUMNS: Final = (
    _column("room_id", "int!", "the room"),
    _column("message_id", "string!", "UUIDv7 of the message"),
    _column("message_hi", "bigint!", "its first 64 bits, signed; the first 48 are its millisecond"),
    _column("message_lo", "bigint!", "its last 64 bits, signed"),
    _column("writer_id", "int!", "who wrote the row"),
    _column("writer_seq", "bigint!", "counts the writer's rows from 1 without a gap"),
    _column("xid", "bigint!", "transaction that wrote it"),
    _column("ts", "timestamp!", "when it began, by PostgreSQL's clock; µs, UTC"),
    _column("kind", "string!", "what happened: a value of LogKind"),
    _column("subscription_id", "string", "null: it is about the message"),
    _column("delivery_id", "string", "null: it is about the message"),
    _column("delivery_hi", "bigint", "first half of delivery_id"),
    _column("delivery_lo", "bigint", "last half of delivery_id"),
    _column("generation", "int", "of the delivery's step"),
    _column("attempt", "int", "of the delivery's step"),
    _column("event_version", "int", "of the message"),
    _column("fanout", "int", "deliveries that the transaction made; on published and replayed"),
    _column("payload_bytes", "int", "size of the payload; on published"),
    _column("policy_version", "int", "settings of the subscription that decided"),
    _column("delay_ms", "bigint", "wait before the step"),
    _column("latency_ms", "float", "duration of an attempt"),
    _column("worker", "int", "writer id of the worker that attempted"),
    _column("http_status", "int", "null: no complete answer"),
    _column("schema_version", "int!", "layout of the log row"),
    _column("correlation_id", "string", "as the publisher gave it"),
    _column("event_type", "string", "of the message"),
    _column("target_host", "string", "host of the webhook"),
    _column("worker_host", "string", "machine that wrote it"),
    _column("error_class", "string", "why an attempt failed; null on success"),
    _column("detail", "string", "reason or message for people"),
    _column("publisher_id", "string", "key that published it; on published"),
    _column("publisher_organisation_id", "string", "its organisation; on published"),
    _column("application", "string", "application of the key; on published"),
    _column("worker_version", "string", "version of Rooms that the worker runs; on attempted"),
)
"""Older segments end at `detail`; readers find null in the columns that they lack."""
LOG_VERSION: Final = 1
"""The highest `schema_version` of a log row that this version of Rooms understands."""
_ADDED_LATER: Final = frozenset(
    {"publisher_id", "publisher_organisation_id", "application", "worker_version"}
)
REQUIRED_COLUMNS: Final = tuple(one.name for one in SEGMENT_COLUMNS if one.name not in _ADDED_LATER)
NEVER_NULL: Final = tuple(one.name for one in SEGMENT_COLUMNS if not one.nullable)


def ddl(columns: tuple[ColumnSpec, ...]) -> str:
    """Return the columns as Spark schema text."""
    return ", ".join(f"`{column.name}` {column.type}" for column in columns)


_PATH: Final = re.compile(
    r"(?:^|/)dt=(\d{4})-(\d{2})-(\d{2})/hr=(\d{2})/([A-Za-z0-9][\w.=+-]*\.parquet)$", re.ASCII
)
"""Names without spaces and glob characters, which Spark would expand."""
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_HOURS: Final = 24


def part_of(path: str) -> tuple[int, str] | None:
    """Return the hour since 1970 and the file name of a segment's path; None: it is no such path.

    A folder of a day or hour that does not exist is no such path.
    """
    match = _PATH.search(path)
    if match is None:
        return None
    year, month, day, hour = map(int, match.groups()[:4])
    try:
        days = date(year, month, day).toordinal() - _EPOCH_DAY
    except ValueError:
        return None
    return None if hour >= _HOURS or days < 0 else (days * _HOURS + hour, match.group(5))


def hour_folder(part: int) -> str:
    """Return the folder of an hour since 1970."""
    day, hr = divmod(part, _HOURS)
    return f"dt={date.fromordinal(day + _EPOCH_DAY)}/hr={hr:02d}"
