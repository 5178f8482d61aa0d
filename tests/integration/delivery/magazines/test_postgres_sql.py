"""Generic plans of the PostgreSQL magazine's statements stay good however the shards grow."""

import re
from collections.abc import Callable

import psycopg
import pytest

from delivery.magazines import postgres_sql
from tests.support.query_plans import kept_plans

STATEMENTS = {
    "load": postgres_sql.LOAD_ENTRIES,
    "fire": postgres_sql.FIRE_FREE,
    "fire, waiting": postgres_sql.FIRE_ANY,
    "take": postgres_sql.TAKE,
    "find": postgres_sql.FIND,
    "peek": postgres_sql.PEEK,
    "delete": postgres_sql.DELETE,
    "reload": postgres_sql.RELOAD,
    "sweep": postgres_sql.SWEEP_SHARD,
}
ENTRIES = re.compile(
    r"(?:Index Scan|Index Only Scan)(?: Backward)? using (\w+) on magazine_entries"
)
# By the whole key or in order of slots: never a scan of a shard or magazine for a few entries.
BY_SLOT = re.compile(
    r"Index Cond: \(\((?:\w+\.)?magazine_id = .*\) AND \((?:shard = .*\) AND \(pointer |ROW\(shard, pointer\) > ROW\()"
)
Connection = psycopg.Connection[tuple[object, ...]]


def unknown(connection: Connection) -> None:
    """Fill a table that was never analysed."""


def emptied(connection: Connection) -> None:
    """Delete all entries but one, and vacuum."""
    connection.execute("INSERT INTO magazines (name, shards, expires) VALUES ('m', 1, false)")
    connection.execute(
        "INSERT INTO magazine_entries (magazine_id, shard, pointer, id, body) SELECT 1, 0, n, n::text, '' FROM generate_series(1, 5000) n"
    )
    connection.execute("DELETE FROM magazine_entries WHERE pointer < 5000")
    connection.execute("VACUUM ANALYZE magazine_entries, magazine_pointers")


@pytest.mark.parametrize("state", [unknown, emptied])
def test_entries_are_found_by_their_slots(
    database: str, state: Callable[[Connection], None]
) -> None:
    wrong = []
    with psycopg.connect(database, autocommit=True) as connection:
        state(connection)
        for name, plan in kept_plans(connection, STATEMENTS):
            wrong += [
                (name, line.strip()) for line in plan if "Seq Scan" in line or "Bitmap" in line
            ]
            wrong += [
                (name, f"{line.strip()} / {plan[at + 1].strip()}")
                for at, line in enumerate(plan)
                if ENTRIES.search(line) and not BY_SLOT.search(plan[at + 1])
            ]
            looks = sum("Scan using" in line and "magazine_entries" in line for line in plan)
            if not looks and "load" not in name:
                wrong.append((name, "it looks at no entry"))
    assert wrong == []
