"""The days that messages, deliveries and their log are cut into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, text

from rooms.domain.ids import first_id

DAYS_AHEAD: Final = 7
# A day only grows, and its updates clean up after themselves (HOT): vacuum and analyze come seldom, or they cost a
# fifth of everything that PostgreSQL does.
_SELDOM: Final = (
    "autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_vacuum_insert_threshold = 2000000, "
    "autovacuum_vacuum_scale_factor = 0.5, autovacuum_vacuum_threshold = 500000, "
    "autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 200000"
)
STORAGE: Final = {
    "messages": f"WITH ({_SELDOM})",
    "deliveries": f"WITH (fillfactor = 50, {_SELDOM})",
    "log_entries": f"WITH ({_SELDOM})",
}


_KEYS: Final = {table: "message_id" if table == "log_entries" else "id" for table in STORAGE}
_APART: Final = "_apart"
"""Ends the name of a constraint that keeps a day out of a default partition."""
_CONSTRAINTS: Final = f"""
SELECT conrelid::regclass::text, conname FROM pg_constraint
WHERE contype = 'c' AND conrelid = ANY (ARRAY[{", ".join(f"'{table}_rest'" for table in STORAGE)}]::regclass[])
    AND right(conname, {len(_APART)}) = '{_APART}'
"""  # noqa: S608 - names of our own


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A day and the names of the partitions that it lacks, by table."""

    low: str
    high: str
    names: Mapping[str, str]

    def outside(self, table: str) -> str:
        """The condition for a row of the table to be of another day, as PostgreSQL puts it for a default partition."""
        key = _KEYS[table]
        return f"NOT ({key} IS NOT NULL AND {key} >= '{self.low}' AND {key} < '{self.high}')"


def missing_days(connection: Connection, now: datetime, days_ahead: int = DAYS_AHEAD) -> Sequence[Day]:
    """The days from today to `days_ahead` days on that lack partitions.

    A day of which rows already fell into a default partition cannot be made any more: it stays there, whole.
    """
    days = []
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    existing = set(connection.scalars(text("SELECT relname FROM pg_class WHERE relispartition")))
    for day in (today + timedelta(days=ahead) for ahead in range(days_ahead + 1)):
        low, high = (first_id(int(at.timestamp() * 1000)) for at in (day, day + timedelta(days=1)))
        named = {table: f"{table}_{day:%Y%m%d}" for table in STORAGE}
        lacking = Day(low=low, high=high, names={table: name for table, name in named.items() if name not in existing})
        if lacking.names and not any(_has_strays(connection, lacking, table) for table in lacking.names):
            days.append(lacking)
    return days


def _has_strays(connection: Connection, day: Day, table: str) -> bool:
    key = _KEYS[table]
    strays = f"SELECT EXISTS (SELECT FROM {table}_rest WHERE {key} >= '{day.low}' AND {key} < '{day.high}')"  # noqa: S608 - ids of our own
    return bool(connection.scalar(text(strays)))


def make_day(connection: Connection, day: Day) -> None:
    """Make what a day lacks. PostgreSQL reads the default partitions meanwhile, unless the day is kept out of them."""
    for table, name in day.names.items():
        bounds = f"FOR VALUES FROM ('{day.low}') TO ('{day.high}')"
        connection.execute(text(f"CREATE TABLE {name} PARTITION OF {table} {bounds} {STORAGE[table]}"))


def keep_out(connection: Connection, day: Day) -> None:
    """Let no more rows of a day into the default partitions. Short; whether there are any `check_out` finds."""
    for table, name in day.names.items():
        condition = day.outside(table)
        connection.execute(
            text(f"ALTER TABLE {table}_rest ADD CONSTRAINT {name}{_APART} CHECK ({condition}) NOT VALID")
        )


def check_out(connection: Connection, day: Day) -> None:
    """Read the default partitions, while everybody goes on: no row of the day is in them."""
    for table, name in day.names.items():
        connection.execute(text(f"ALTER TABLE {table}_rest VALIDATE CONSTRAINT {name}{_APART}"))


def let_in(connection: Connection) -> None:
    """Let rows of every day that has no partition into the default ones."""
    for table, name in connection.execute(text(_CONSTRAINTS)).all():
        connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {name}"))


def rest_bytes(connection: Connection) -> int:
    """What the default partitions weigh."""
    sizes = " + ".join(f"pg_relation_size('{table}_rest')" for table in STORAGE)
    return int(connection.scalar(text(f"SELECT {sizes}")) or 0)


def ensure_partitions(connection: Connection, now: datetime, days_ahead: int = DAYS_AHEAD) -> int:
    """Make the partitions from today to `days_ahead` days on, in this transaction; returns how many were new."""
    days = missing_days(connection, now, days_ahead)
    for day in days:
        make_day(connection, day)
    return sum(len(day.names) for day in days)
