"""Test that rows of the newest transactions are found without reading all that was written before."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import open_engine, psycopg_url
from rooms.db.retention import log_index
from rooms.db.retention.log_index import RANGE_BLOCKS, LogIndex
from tests.support.installation import Installation

XID: Final = "(xid::text::bigint)"
PARTITION: Final = "log_entries_rest"
WIDE_ROWS: Final = (
    "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, detail)"
    " SELECT 1, 'ffffffff-0000-7000-8000-000000000001', 1, n, 'published', (SELECT string_agg(md5(n::text || m::text), '') FROM generate_series(1, 56) m)"
    " FROM generate_series(%s::int8, %s::int8 - 1) n RETURNING xid::text::bigint"
)
"""Four rows fill a block."""
ROWS: Final = 4 * RANGE_BLOCKS
"""Rows of one range. The first range of an index always has a summary."""


def always() -> bool:
    return True


@pytest.fixture
async def engine(installation: Installation) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(installation.url, size=1)
    yield engine
    await engine.dispose()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_index, "MIN_RANGES", 1)


async def write(installation: Installation, first: int, count: int) -> int:
    """Write rows in a transaction; return its id."""
    rows = await installation.rows(WIDE_ROWS, first, first + count)
    return int(rows[0]["xid"])


async def read(installation: Installation, first: int, end: int) -> tuple[int, int]:
    """Return how many rows transactions from `first` on, before `end`, have, and the blocks read."""
    query = f"SELECT FROM {PARTITION} WHERE {XID} >= {first} AND {XID} < {end}"
    with psycopg.connect(psycopg_url(installation.url)) as connection:
        connection.execute("SET enable_seqscan = off")
        (found,) = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}").fetchone() or ()
    plan: Any = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    assert plan["Node Type"] == "Bitmap Heap Scan"
    return round(plan["Actual Rows"]), plan["Lossy Heap Blocks"]


async def test_new_rows_are_found_without_reading_those_before_them(
    installation: Installation, engine: AsyncEngine
) -> None:
    first = await write(installation, 1, 5 * ROWS)
    assert await read(installation, first + 1, first + 2) == (0, 4 * RANGE_BLOCKS)
    index = LogIndex()
    await index.update(engine, always)
    assert await read(installation, first + 1, first + 2) == (0, 0)
    assert (await read(installation, first, first + 1))[0] == 5 * ROWS
    # New rows fill up a range that has a summary, and begin others that have none.
    second = await write(installation, 10_000, 2 * ROWS + 100)
    rows, blocks = await read(installation, second, second + 1)
    assert rows == 2 * ROWS + 100
    assert blocks < 4 * RANGE_BLOCKS
    await index.update(engine, always)
    third = await write(installation, 20_000, 1)
    assert (await read(installation, second, second + 1))[0] == 2 * ROWS + 100
    rows, blocks = await read(installation, third, third + 1)
    assert rows == 1
    assert blocks <= RANGE_BLOCKS


async def test_a_statement_is_bounded_and_a_stop_is_heeded(
    installation: Installation, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_index, "MAX_RANGES", 1)
    first = await write(installation, 1, 5 * ROWS)
    index, answers = LogIndex(), iter([True, True, False])
    await index.update(engine, lambda: next(answers))
    assert await read(installation, first + 1, first + 2) == (0, 3 * RANGE_BLOCKS)
    await index.update(engine, always)
    assert await read(installation, first + 1, first + 2) == (0, 0)


async def test_few_new_ranges_are_left(
    installation: Installation, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_index, "MIN_RANGES", 3)
    first = await write(installation, 1, 2 * ROWS)
    index = LogIndex()
    await index.update(engine, always)
    assert await read(installation, first + 1, first + 2) == (0, RANGE_BLOCKS)
    await write(installation, 10_000, ROWS)
    await index.update(engine, always)
    assert await read(installation, 1, 2) == (0, 0)


async def test_a_partition_that_is_locked_is_left_for_the_next_time(
    installation: Installation, engine: AsyncEngine
) -> None:
    first = await write(installation, 1, 2 * ROWS)
    index = LogIndex()
    with psycopg.connect(psycopg_url(installation.url)) as vacuum:
        # As VACUUM takes it.
        vacuum.execute(f"LOCK TABLE {PARTITION} IN SHARE UPDATE EXCLUSIVE MODE")
        async with asyncio.timeout(10):
            await index.update(engine, always)
    assert await read(installation, first + 1, first + 2) == (0, RANGE_BLOCKS)
    await index.update(engine, always)
    assert await read(installation, first + 1, first + 2) == (0, 0)


async def test_a_day_that_is_gone_or_rewritten_is_no_failure(
    installation: Installation, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention drops a day between the look at the indexes and its turn, or puts another one there."""
    first = await write(installation, 1, 2 * ROWS)
    index = LogIndex()
    await index.update(engine, always)
    await installation.rows(f"DROP TABLE {PARTITION}")
    await installation.rows(f"CREATE TABLE {PARTITION} PARTITION OF log_entries DEFAULT")
    first = await write(installation, 1, 3 * ROWS)
    gone = f"SELECT 'log_entries_gone_xid', 1::int8, 640::int8 UNION ALL {log_index._INDEXES.text}"
    monkeypatch.setattr(log_index, "_INDEXES", text(gone))
    await index.update(engine, always)
    assert await read(installation, first + 1, first + 2) == (0, 0)
