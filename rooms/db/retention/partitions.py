"""Partition messages, deliveries and their log by time, and decide which partitions to replace.

A `PartitionSet` is one range of ids, with a partition of each of the three tables. A day begins
**whole**. When it is over, what is kept of it moves to a partition `…_kept1`. Those of a month, and
later of a year, are merged, so that old rows are in a handful of partitions however long an
installation lives.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from psycopg import AsyncConnection
from psycopg.rows import TupleRow
from sqlalchemy import Connection, text

from rooms.domain.ids import created_ms, first_id

DAYS_AHEAD: Final = 7
# A day only grows, and its updates clean up after themselves (HOT). So vacuum and analyze must run
# seldom, or they cost a large share of everything that PostgreSQL does.
_AUTOVACUUM: Final = (
    "autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_vacuum_insert_threshold = 2000000, "
    "autovacuum_vacuum_scale_factor = 0.5, autovacuum_vacuum_threshold = 500000, "
    "autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 200000"
)
STORAGE_OPTIONS: Final = {
    "messages": f"WITH ({_AUTOVACUUM})",
    "deliveries": f"WITH (fillfactor = 50, {_AUTOVACUUM})",
    "log_entries": f"WITH ({_AUTOVACUUM})",
}
# A partition is created while every publish waits for its lock. So it is requested for a short
# time.
SHORT_LOCKS: Final = (
    text("SET LOCAL lock_timeout = '300ms'"),
    text("SET LOCAL statement_timeout = '2s'"),
    # A process that is suspended in between would block every publish.
    text("SET LOCAL idle_in_transaction_session_timeout = '2s'"),
)
_PARTITION_BOUNDS: Final = re.compile(
    r"FOR VALUES FROM \('([0-9a-f-]{36})'\) TO \('([0-9a-f-]{36})'\)"
)
_LIST_PARTITIONS: Final = """
SELECT p.relname::text, c.relname::text, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i
    JOIN pg_class p ON p.oid = i.inhparent JOIN pg_class c ON c.oid = i.inhrelid
WHERE p.oid = ANY (ARRAY['messages', 'deliveries', 'log_entries']::regclass[])
"""
_PARTITION_KEYS: Final = {
    table: "message_id" if table == "log_entries" else "id" for table in STORAGE_OPTIONS
}
_EXCLUSION_SUFFIX: Final = "_apart"
"""The suffix of a constraint that keeps a day out of a default partition."""
_LIST_EXCLUSIONS: Final = f"""
SELECT conrelid::regclass::text, conname FROM pg_constraint
WHERE contype = 'c' AND conrelid = ANY (ARRAY[{", ".join(f"'{table}_rest'" for table in STORAGE_OPTIONS)}]::regclass[])
    AND right(conname, {len(_EXCLUSION_SUFFIX)}) = '{_EXCLUSION_SUFFIX}'
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingDay:
    """Name a day and the partitions that it lacks, by table."""

    low: str
    high: str
    partitions: Mapping[str, str]

    def exclusion_condition(self, table: str) -> str:
        """Return the condition for a row of the table to be of another day.

        It has the form that PostgreSQL needs for a default partition.
        """
        key = _PARTITION_KEYS[table]
        return f"NOT ({key} IS NOT NULL AND {key} >= '{self.low}' AND {key} < '{self.high}')"


def missing_days(
    connection: Connection, now: datetime, days_ahead: int = DAYS_AHEAD
) -> Sequence[MissingDay]:
    """Return the days from today to `days_ahead` days on that lack partitions.

    Where the clock is behind, retention may have replaced such a day, or its whole month. A day of
    which rows are already in a default partition can get no partition any more: it stays
    there, whole.
    """
    days = []
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    existing = _existing_bounds(connection)
    for day in (today + timedelta(days=ahead) for ahead in range(days_ahead + 1)):
        low, high = (first_id(int(at.timestamp() * 1000)) for at in (day, day + timedelta(days=1)))
        lacking = MissingDay(
            low=low,
            high=high,
            partitions={
                table: f"{table}_{day:%Y%m%d}"
                for table in STORAGE_OPTIONS
                if not any(begin < high and end > low for begin, end in existing[table])
            },
        )
        if lacking.partitions and not any(
            _default_has_rows(connection, lacking, table) for table in lacking.partitions
        ):
            days.append(lacking)
    return days


def _existing_bounds(connection: Connection) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return the first id of each partition, and the first after it, by table."""
    found: dict[str, list[tuple[str, str]]] = {table: [] for table in STORAGE_OPTIONS}
    for table, _, bounds in connection.execute(text(_LIST_PARTITIONS)):
        if (between := _PARTITION_BOUNDS.fullmatch(bounds)) is not None:
            found[table].append((between[1], between[2]))
    return found


def _default_has_rows(connection: Connection, day: MissingDay, table: str) -> bool:
    key = _PARTITION_KEYS[table]
    in_day = f"{key} >= '{day.low}' AND {key} < '{day.high}'"
    statement = f"SELECT EXISTS (SELECT FROM {table}_rest WHERE {in_day})"  # noqa: S608 - constants of this package
    return bool(connection.scalar(text(statement)))


def create_partitions(connection: Connection, day: MissingDay) -> None:
    """Create what a day lacks.

    PostgreSQL scans the default partitions meanwhile, unless the day is excluded.
    """
    for table, name in day.partitions.items():
        bounds = f"FOR VALUES FROM ('{day.low}') TO ('{day.high}')"
        connection.execute(
            text(f"CREATE TABLE {name} PARTITION OF {table} {bounds} {STORAGE_OPTIONS[table]}")
        )


def add_exclusion(connection: Connection, day: MissingDay) -> None:
    """Keep new rows of a day out of the default partitions.

    It is short; `validate_exclusion` checks the existing rows.
    """
    for table, name in day.partitions.items():
        condition = day.exclusion_condition(table)
        connection.execute(
            text(
                f"ALTER TABLE {table}_rest ADD CONSTRAINT {name}{_EXCLUSION_SUFFIX} "
                f"CHECK ({condition}) NOT VALID"
            )
        )


def validate_exclusion(connection: Connection, day: MissingDay) -> None:
    """Check that no row of the day is in the default partitions, without blocking others."""
    for table, name in day.partitions.items():
        connection.execute(
            text(f"ALTER TABLE {table}_rest VALIDATE CONSTRAINT {name}{_EXCLUSION_SUFFIX}")
        )


def drop_exclusions(connection: Connection) -> None:
    """Let rows of every day without a partition into the default ones again."""
    for table, name in connection.execute(text(_LIST_EXCLUSIONS)).all():
        connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {name}"))


def default_partition_bytes(connection: Connection) -> int:
    """Return the size of the default partitions in bytes."""
    sizes = " + ".join(f"pg_relation_size('{table}_rest')" for table in STORAGE_OPTIONS)
    return int(connection.scalar(text(f"SELECT {sizes}")) or 0)


def ensure_partitions(connection: Connection, now: datetime, days_ahead: int = DAYS_AHEAD) -> int:
    """Create the partitions from today to `days_ahead` days on, in this transaction.

    Return how many were new.
    """
    days = missing_days(connection, now, days_ahead)
    for day in days:
        create_partitions(connection, day)
    return sum(len(day.partitions) for day in days)


PARTITIONED_TABLES: Final[Mapping[str, str]] = {
    "messages": "id",
    "deliveries": "id",
    "log_entries": "message_id",
}
"""The partitioned tables, and the column they are partitioned by."""

_PARTITION_NAME: Final = re.compile(r"[a-z_]+_([0-9]{4}(?:[0-9]{2}){0,2})(?:_kept([0-9]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSet:
    """Hold the partitions of the messages created in [low_ms, high_ms).

    `kept`: they hold only what was kept of a replaced range.
    """

    label: str
    low_ms: int
    high_ms: int
    kept: bool
    partitions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementRange:
    """Name partition sets that will be replaced by one, or by none."""

    label: str
    low_ms: int
    high_ms: int
    partition_sets: Sequence[PartitionSet]

    @property
    def bounds(self) -> tuple[str, str]:
        """Return the first id in it, and the first after it."""
        return first_id(self.low_ms), first_id(self.high_ms)


async def list_partition_sets(connection: AsyncConnection[TupleRow]) -> list[PartitionSet]:
    """Return the partition sets that all three tables have, the oldest first."""
    names: dict[tuple[str, str, str, bool], dict[str, str]] = {}
    for table, name, bounds in await (await connection.execute(_LIST_PARTITIONS)).fetchall():
        named, between = _PARTITION_NAME.fullmatch(name), _PARTITION_BOUNDS.fullmatch(bounds)
        if named is not None and between is not None:
            names.setdefault((between[1], between[2], named[1], named[2] is not None), {})[
                table
            ] = name
    parts = [
        PartitionSet(
            label=label,
            low_ms=created_ms(low),
            high_ms=created_ms(high),
            kept=kept,
            partitions=found,
        )
        for (low, high, label, kept), found in names.items()
        if found.keys() == PARTITIONED_TABLES.keys()
    ]
    return sorted(parts, key=lambda part: part.low_ms)


def ranges_to_replace(
    partition_sets: Sequence[PartitionSet], before_ms: int
) -> Iterator[ReplacementRange]:
    """Return the ranges to replace, of the sets that end by `before_ms`.

    First each set, then the months and years that have several kept sets and no whole one.
    """
    over = [part for part in partition_sets if part.high_ms <= before_ms]
    for part in over:
        yield ReplacementRange(
            label=part.label, low_ms=part.low_ms, high_ms=part.high_ms, partition_sets=[part]
        )
    for length in (6, 4):
        for label in sorted({part.label[:length] for part in over}):
            low_ms, high_ms = _period_ms(label)
            inside = [
                part for part in partition_sets if part.low_ms < high_ms and part.high_ms > low_ms
            ]
            if high_ms <= before_ms and len(inside) > 1 and all(part.kept for part in inside):
                yield ReplacementRange(
                    label=label, low_ms=low_ms, high_ms=high_ms, partition_sets=inside
                )


def _period_ms(label: str) -> tuple[int, int]:
    """Return the month `202609` or the year `2026` in milliseconds."""
    low = datetime(int(label[:4]), int(label[4:] or 1), 1, tzinfo=UTC)
    next_month = (low + timedelta(days=31)).replace(day=1)
    high = next_month if len(label) > len("2026") else low.replace(year=low.year + 1)
    return int(low.timestamp() * 1000), int(high.timestamp() * 1000)
