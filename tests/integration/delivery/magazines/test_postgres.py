"""Test PostgreSQL magazines only: stamps that stay on their page, interrupted drops, and plans.

The generic plans of their statements stay good however the shards grow.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from delivery.magazines import postgres_sql
from rooms.db.writer import LogWriter
from rooms.domain.magazine import Entry, MagazineName
from rooms.errors import MagazineMissingError
from tests.support.installation import PATIENCE_S, until
from tests.support.magazines import (
    ALL_STUCK_S,
    EPOCH,
    NAME,
    drained,
    ids,
    magazine_of,
    opened,
    slots,
)
from tests.support.query_plans import kept_plans

STATEMENTS = {
    "load": postgres_sql.LOAD_ENTRIES,
    "fire": postgres_sql.FIRE_FREE,
    "fire, waiting": postgres_sql.FIRE_ANY,
    "fire, bounded": postgres_sql.FIRE_FREE_BELOW,
    "fire, bounded, waiting": postgres_sql.FIRE_ANY_BELOW,
    "take": postgres_sql.TAKE,
    "find": postgres_sql.FIND,
    "peek": postgres_sql.PEEK,
    "peek slots": postgres_sql.PEEK_SLOTS,
    "delete": postgres_sql.DELETE,
    "reload": postgres_sql.RELOAD,
    "sweep": postgres_sql.SWEEP_SHARD,
    "oldest": postgres_sql.OLDEST,
    "drop": postgres_sql.DROP_ENTRIES,
}
ENTRIES = re.compile(
    r"(?:Index Scan|Index Only Scan)(?: Backward)? using (\w+) on magazine_entries"
)
# By the whole key or in order of slots: never a scan of a shard or magazine for a few entries.
BY_SLOT = re.compile(
    r"Index Cond: \(\((?:\w+\.)?magazine_id = .*\) AND \((?:shard = .*\) AND \(pointer |ROW\(shard, pointer\) > ROW\()"
)
Connection = psycopg.Connection[tuple[object, ...]]


async def test_a_stamp_stays_on_its_page(database: str) -> None:
    async with magazine_of(database, shards=2) as magazine:
        for batch in range(4):
            await magazine.load([Entry(id=f"{batch}-{at}", body=bytes(1024)) for at in range(250)])
        assert len(await drained(magazine)) == 1000

    async def stamps() -> tuple[int, int] | None:
        with psycopg.connect(database, autocommit=True) as connection:
            row = connection.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'magazine_entries'"
            ).fetchone()
        return row if row is not None and row[0] == 1000 else None

    found = await until(stamps, "the statistics")
    assert found is not None
    assert found[1] > 0.95 * found[0]


MEBIBYTE = 1024 * 1024


def large(count: int) -> list[Entry]:
    return [Entry(id=f"{at}", body=bytes(MEBIBYTE)) for at in range(count)]


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_fire_hands_out_bounded_bytes(database: str, shards: int) -> None:
    async with magazine_of(database, shards=shards) as magazine:
        for one in large(10):
            await magazine.load([one])
        found = [len(await magazine.fire(1000)) for _ in range(4)]
        assert found == [4, 4, 2, 0]
        assert {one.fire_ts is None for one in await magazine.peek(1000)} == {False}


async def test_bodies_that_are_not_handed_out_do_not_count(database: str) -> None:
    """Pass over expired entries and those taken by slot in one call."""
    past = datetime.now(UTC) - timedelta(seconds=1)
    async with magazine_of(database, shards=1, expires=True) as magazine:
        await magazine.load([replace(one, expires_at=past) for one in large(6)])
        homes = await magazine.load(large(6))
        await magazine.take(homes[:3])
        assert slots(await magazine.fire(1000)) == homes[3:]
        assert await magazine.fire(1000) == []


async def test_a_sweep_hands_out_bounded_bytes(database: str) -> None:
    async with magazine_of(database, shards=1) as magazine:
        await magazine.load(large(10))
        await drained(magazine)
        found = []
        for _ in range(4):
            batch = await magazine.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)
            found += [len(batch.entries)]
            await magazine.delete(slots(batch.entries), swept=True)
        assert found == [4, 4, 2, 0]
        assert await magazine.count() == 0
        assert (await magazine.state()).shards[0].sweep_pointer == 10


async def test_a_dropped_magazine_leaves_no_rows(database: str) -> None:
    async with opened(database) as magazines:
        magazine = await magazines.create(NAME, shards=2)
        await magazine.load([Entry(id=f"{at}", body=b"x") for at in range(100)])
        await magazine.fire(10)
        assert await magazines.drop(NAME)
    with psycopg.connect(database, autocommit=True) as connection:
        for table in ("magazines", "magazine_pointers", "magazine_entries"):
            row = connection.execute(
                sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))
            ).fetchone()
            assert row == (0,), table


async def test_a_drop_reads_no_entry_that_it_has_deleted(database: str) -> None:
    """Keep dead rows readable by a snapshot, as a backup does, so that no scan may remove them."""
    with psycopg.connect(database) as reader, psycopg.connect(database, autocommit=True) as db:

        async def blocks() -> int | None:
            """Return the blocks that were read, when the sessions of the magazines have ended."""
            row = db.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%magazine%'"
            ).fetchone()
            found = db.execute(
                "SELECT heap_blks_read + heap_blks_hit FROM pg_statio_user_tables WHERE relname = 'magazine_entries'"
            ).fetchone()
            return int(found[0]) if row == (0,) and found is not None else None

        async with magazine_of(database, shards=2) as magazine:
            for batch in range(10):
                await magazine.load([Entry(id=f"{batch}-{at}", body=b"x") for at in range(1000)])
        before = await until(blocks, "the loads to be counted")
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1 FROM magazines")
        async with opened(database) as magazines:
            assert await magazines.drop(NAME)
        after = await until(blocks, "the drop to be counted")
        assert before is not None
        assert after is not None
        assert 0 < after - before < 25_000


async def test_drops_leave_connections_to_other_calls(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load while steps of as many drops as there are connections take long."""
    run, proceed = LogWriter.run, asyncio.Event()
    begun = 0

    async def slow(writer: LogWriter, statement: str, parameters: Any) -> Any:
        nonlocal begun
        if statement == postgres_sql.DROP_ENTRIES:
            await proceed.wait()
        found = await run(writer, statement, parameters)
        begun += statement == postgres_sql.DROP_POINTERS
        return found

    async def are_begun() -> bool:
        return begun == len(names)

    async with opened(database) as magazines:
        kept = await magazines.create(NAME)
        names = [MagazineName(f"dropped-{n}") for n in range(3)]
        for name in names:
            await magazines.create(name)
        monkeypatch.setattr(LogWriter, "run", slow)
        drops = [asyncio.create_task(magazines.drop(name)) for name in names]
        await until(are_begun, "the drops to begin")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await kept.load([Entry(id="a", body=b"x")])
        finally:
            proceed.set()
        assert await asyncio.gather(*drops) == [True] * 3


async def test_a_drop_that_was_broken_off_is_taken_up(database: str) -> None:
    async with opened(database) as magazines:
        magazine = await magazines.create(NAME, shards=2)
        await magazine.load([Entry(id="old", body=b"x")])
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("DELETE FROM magazine_pointers")
        with pytest.raises(MagazineMissingError):
            await magazines.open(NAME)
        again = await magazines.create(NAME, shards=3)
        assert await again.count() == 0
        await again.load([Entry(id="new", body=b"x")])
        assert ids(await drained(again)) == ["new"]


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
