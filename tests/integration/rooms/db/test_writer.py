"""Check a writer's statements against rows that another transaction changes at that very moment."""

import asyncio

import psycopg
import pytest
from sqlalchemy import text

from rooms.db.connection import open_engine, transaction
from rooms.db.writer import LogWriter
from rooms.errors import QueryTimeoutError, StorageRefusedError, StorageUnavailableError
from tests.support.polling import until

_ROWS = 2000
_TABLES = f"""
CREATE TABLE work (id int PRIMARY KEY, part_id int NOT NULL, n int NOT NULL DEFAULT 0);
CREATE TABLE parts (id int PRIMARY KEY, body text NOT NULL) PARTITION BY RANGE (id);
CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (400);
CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (400) TO (800);
INSERT INTO parts SELECT i, repeat('x', 300) FROM generate_series(0, 799) i;
INSERT INTO work SELECT i, i * 7 % 800 FROM generate_series(0, {_ROWS - 1}) i;
ANALYZE work, parts;
"""
# The form of many statements: rows are locked, and what belongs to each is looked up in a
# partitioned table.
_LOCK_AND_LOOK = """
WITH picked AS MATERIALIZED (
    SELECT w.* FROM unnest(%(ids)s::int4[]) k (id) CROSS JOIN LATERAL (SELECT * FROM work w WHERE w.id = k.id FOR UPDATE) w
), looked AS MATERIALIZED (
    SELECT p.id, p.n, m.body FROM picked p CROSS JOIN LATERAL (SELECT * FROM parts m WHERE m.id = p.part_id LIMIT 1) m
)
SELECT 0, id, n, body FROM looked
"""


def _waits_for_a_lock(url: str) -> bool:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
    return row is not None and bool(row[0])


async def test_a_row_changed_in_mid_statement_is_seen_as_it_is_then(database: str) -> None:
    """PostgreSQL 18 crashes in this very statement where it rechecks the changed row instead of starting again."""
    async with (
        LogWriter(database, kind="test") as writer,
        await psycopg.AsyncConnection.connect(database) as other,
    ):
        await other.execute(_TABLES)
        await other.commit()
        for turn in range(1, 4):
            await other.execute("UPDATE work SET n = n + 1 WHERE id = 3")
            asked = asyncio.create_task(writer.run(_LOCK_AND_LOOK, {"ids": list(range(_ROWS))}))
            await asyncio.to_thread(
                until, lambda: _waits_for_a_lock(database), "the statement to wait for the row"
            )
            await other.commit()
            changes = {identity: n for identity, n, _ in await asked}
            assert len(changes) == _ROWS
            assert changes[3] == turn


_RAISE = """
CREATE FUNCTION give_up(code text) RETURNS int LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'terminating connection' USING ERRCODE = code; END $$
"""


@pytest.mark.parametrize("code", ["25P03", "25P04", "57P01", "57P05"])
async def test_a_session_that_a_timeout_of_the_server_ends_is_an_outage(
    database: str, code: str
) -> None:
    """An operator may set limits on transactions. A job must try again after them, not fail for good."""
    engine = open_engine(database)
    async with (
        LogWriter(database, kind="test") as writer,
        await psycopg.AsyncConnection.connect(database, autocommit=True) as other,
    ):
        await other.execute(_RAISE)
        with pytest.raises(StorageUnavailableError):
            await writer.run("SELECT 0, give_up(%(code)s::text)", {"code": code})
        assert await writer.run("SELECT 0, 1", {}) == [(1,)]
        with pytest.raises(StorageUnavailableError):
            async with transaction(engine) as connection:
                await connection.execute(text("SELECT give_up(:code)"), {"code": code})
    await engine.dispose()


@pytest.mark.parametrize(
    "ended", [psycopg.errors.IdleInTransactionSessionTimeout, psycopg.errors.AdminShutdown]
)
async def test_a_session_that_ends_while_it_is_opened_is_an_outage(
    database: str, monkeypatch: pytest.MonkeyPatch, ended: type[psycopg.Error]
) -> None:
    """As of a process that was suspended for half a minute just then."""

    async def register(_: LogWriter, __: object) -> int:
        raise ended("terminating connection")

    async with LogWriter(database, kind="test") as writer:
        assert await writer.run("SELECT 0, 1", {}) == [(1,)]
        await writer.close()
        with monkeypatch.context() as patch:
            patch.setattr(LogWriter, "_register", register)
            with pytest.raises(StorageUnavailableError):
                await writer.run("SELECT 0, 1", {})
        assert await writer.run("SELECT 0, 1", {}) == [(1,)]


async def test_a_statement_beyond_its_time_is_stopped_with_advice(database: str) -> None:
    async with LogWriter(database, kind="test", statement_timeout_s=1) as writer:
        with pytest.raises(QueryTimeoutError, match="nothing was written"):
            await writer.run("SELECT 0, pg_sleep(60)::text", {})
        assert await writer.run("SELECT 0, 1", {}) == [(1,)]


_CONFLICT = """
CREATE FUNCTION conflict() RETURNS int LANGUAGE plpgsql AS $$
BEGIN PERFORM nextval('tries'); RAISE serialization_failure; END $$
"""


@pytest.mark.parametrize(("longest_s", "tries"), [(None, 100), (0.0, 1), (60.0, 100)])
async def test_a_statement_that_meets_others_starts_again_for_a_bounded_time(
    database: str, longest_s: float | None, tries: int
) -> None:
    assert await tries_until_refused(database, "SELECT 0, conflict()", longest_s) == tries


async def test_the_first_try_of_a_statement_that_meets_others_counts(database: str) -> None:
    """It may wait for locks, so a long one would make the whole longer than its bound."""
    slow = "SELECT 0, conflict() FROM pg_sleep(0.2)"
    assert await tries_until_refused(database, slow, 0.1) == 1


async def tries_until_refused(database: str, statement: str, longest_s: float | None) -> int:
    async with (
        LogWriter(database, kind="test", max_conflicts_s=longest_s) as writer,
        await psycopg.AsyncConnection.connect(database, autocommit=True) as other,
    ):
        await other.execute("CREATE SEQUENCE tries")
        await other.execute(_CONFLICT)
        with pytest.raises(StorageRefusedError):
            await writer.run(statement, {})
        assert await writer.run("SELECT 0, 1", {}) == [(1,)]
        cursor = await other.execute("SELECT last_value FROM tries")
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])
