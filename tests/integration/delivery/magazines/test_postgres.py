"""Test PostgreSQL magazines only: stamps that stay on their page, and interrupted drops."""

import psycopg
import pytest
from psycopg import sql

from rooms.domain.magazine import Entry
from rooms.errors import MagazineMissingError
from tests.support.installation import until
from tests.support.magazines import NAME, drained, ids, magazine_of, opened


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
