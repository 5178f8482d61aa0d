"""Migrations beside transactions that hold locks: publishes go on, and the holder is named."""

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy
from alembic import command

from migrations import concurrent_indexes
from rooms.db import schema
from rooms.db.connection import Connection, open_connection
from rooms.db.schema import describe_missing, migrate
from rooms.errors import StorageRefusedError, StorageUnavailableError
from tests.migrations.test_upgrades import alembic
from tests.support.installation import PATIENCE_S, Installation, until

TABLES = ("deliveries", "log_entries", "messages")
HOLDER = "a long dump"


@pytest.fixture
async def holder(database: str) -> AsyncIterator[Connection]:
    """A session that holds a lock from its next transaction on."""
    async with open_connection(database, name=HOLDER) as connection:
        yield connection


async def drop_last_day(installation: Installation) -> str:
    """Drop the partitions of the last day ahead, and return their suffix."""
    last = f"{datetime.now(UTC) + timedelta(days=7):%Y%m%d}"
    for table in TABLES:
        await installation.rows(f"DROP TABLE {table}_{last}")
    return last


async def test_publishes_go_on_while_a_migration_waits_for_a_lock(
    installation: Installation,
    database: str,
    holder: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(schema, "_PAUSE_S", 0.2)
    subscription = await installation.subscribe()
    day = await drop_last_day(installation)
    async with holder.transaction():
        await holder.execute("LOCK TABLE messages_rest IN ACCESS SHARE MODE")
        migrating = asyncio.create_task(asyncio.to_thread(migrate, database))

        async def waits() -> bool:
            return bool(
                await installation.value(
                    "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
                    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                )
            )

        await until(waits, "the migration to request its lock")
        async with asyncio.timeout(PATIENCE_S):
            await installation.publish(subscription)
        assert not migrating.done()

        async def is_logged() -> bool:
            return HOLDER in caplog.text

        await until(is_logged, "the holder to be named")
    await migrating
    for table in TABLES:
        assert await installation.value("SELECT to_regclass(%s) IS NOT NULL", f"{table}_{day}")


async def test_a_migration_gives_up_and_names_who_holds_the_lock(
    database: str, holder: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with holder.transaction():
        await holder.execute("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StorageRefusedError, match=rf"{HOLDER}, idle in transaction\) is in a"):
            await asyncio.to_thread(migrate, database, lock_wait_s=0)
    await asyncio.to_thread(migrate, database, lock_wait_s=0)


@pytest.fixture
def before_several(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Go back before revisions of which the second needs a lock on subscriptions.

    A request for a lock ends later than the time for which locks are requested again.
    """
    with alembic(database) as config:
        command.downgrade(config, "0040")
    monkeypatch.setattr(schema, "_LOCK_TIMEOUT", sqlalchemy.text("SET lock_timeout = '1500ms'"))
    monkeypatch.setattr(schema, "_PAUSE_S", 0.05)
    return database


async def until_held_up(database: str, caplog: pytest.LogCaptureFixture) -> "asyncio.Task[object]":
    """Begin to migrate, and return when the holder of a lock is named."""
    migrating: asyncio.Task[object] = asyncio.create_task(
        asyncio.to_thread(migrate, database, lock_wait_s=1)
    )

    async def is_logged() -> bool:
        return migrating.done() or HOLDER in caplog.text

    await until(is_logged, "the holder to be named")
    return migrating


async def test_the_time_for_a_lock_begins_again_after_progress(
    installation: Installation,
    before_several: str,
    holder: Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with holder.transaction():
        await holder.execute("LOCK TABLE subscriptions IN ACCESS SHARE MODE")
        migrating = await until_held_up(before_several, caplog)
    await migrating
    assert await describe_missing(holder) is None


async def test_an_index_build_that_is_the_first_revision_is_tried_again(
    installation: Installation,
    before_several: str,
    holder: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its first request for a lock ends later than the time for which locks are requested again."""
    limits = concurrent_indexes._LIMITS | {"lock_timeout": "1500ms"}
    monkeypatch.setattr(concurrent_indexes, "_LIMITS", limits)
    async with holder.transaction():
        await holder.execute("LOCK TABLE held IN ROW EXCLUSIVE MODE")
        migrating = await until_held_up(before_several, caplog)
    await migrating
    assert await describe_missing(holder) is None


async def test_the_time_for_a_lock_ends_without_progress(
    before_several: str, holder: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with holder.transaction():
        await holder.execute("LOCK TABLE subscriptions IN ACCESS SHARE MODE")
        with pytest.raises(StorageRefusedError, match=r"not granted within 1 s"):
            await asyncio.to_thread(migrate, before_several, lock_wait_s=1)
    assert len([line for line in caplog.messages if HOLDER in line]) == 1
    assert "is 0041, and not" in str(await describe_missing(holder))


async def test_a_migration_that_waits_for_its_turn_keeps_no_snapshot(
    installation: Installation, database: str, holder: Connection
) -> None:
    await holder.execute(f"SELECT pg_advisory_lock({schema._MIGRATION_LOCK})")
    migrating = asyncio.create_task(asyncio.to_thread(migrate, database))
    began: set[object] = set()

    async def waits_between_statements() -> bool:
        for session in await installation.rows(
            "SELECT xact_start, backend_xmin, query_start FROM pg_stat_activity"
            " WHERE datname = current_database() AND state = 'idle' AND query = 'COMMIT'"
        ):
            assert (session["xact_start"], session["backend_xmin"]) == (None, None)
            began.add(session["query_start"])
        return len(began) > 2

    await until(waits_between_statements, "the migration to try again")
    assert not migrating.done()
    await holder.execute(f"SELECT pg_advisory_unlock({schema._MIGRATION_LOCK})")
    await migrating


async def test_a_migration_waits_for_another_one_with_an_end_and_names_it(
    database: str, holder: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await holder.execute(f"SELECT pg_advisory_lock({schema._MIGRATION_LOCK})")
    with pytest.raises(
        StorageRefusedError, match=rf"another migration .* \({HOLDER}\) .* been idle"
    ):
        await asyncio.to_thread(migrate, database, turn_wait_s=0.5)
    waiting = [line for line in caplog.messages if "waiting for another migration" in line]
    assert len(waiting) == 1
    assert f"session {holder.info.backend_pid} ({HOLDER})" in waiting[0]


async def test_a_suspended_migration_loses_its_locks(
    database: str, holder: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, resume = threading.Event(), threading.Event()

    def work(connection: sqlalchemy.Connection) -> None:
        connection.execute(sqlalchemy.text("LOCK TABLE messages"))
        locked.set()
        assert resume.wait(PATIENCE_S)
        connection.execute(sqlalchemy.text("SELECT 1"))

    monkeypatch.setattr(schema, "_SUSPENSIONS_S", {"idle_in_transaction_session_timeout": 1})
    monkeypatch.setattr(schema, "_make_days_ahead", work)
    migrating = asyncio.create_task(asyncio.to_thread(migrate, database))
    try:
        assert await asyncio.to_thread(locked.wait, PATIENCE_S)
        await holder.execute("SET lock_timeout = '20s'")
        await holder.execute("SELECT count(*) FROM messages")
    finally:
        resume.set()
    with pytest.raises(StorageUnavailableError, match="migrate again"):
        await migrating


@pytest.mark.parametrize("how", ["url", "database"])
async def test_a_revision_takes_longer_than_statements_of_the_role_may(
    how: str, database: str, holder: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(connection: sqlalchemy.Connection) -> None:
        connection.execute(sqlalchemy.text("SELECT pg_sleep(0.3)"))

    url = database
    if how == "url":
        url += "&options=-c%20statement_timeout%3D100ms"
    else:
        name = await (await holder.execute("SELECT current_database()")).fetchone()
        assert name is not None
        await holder.execute(f"ALTER DATABASE \"{name[0]}\" SET statement_timeout = '100ms'")
    monkeypatch.setattr(schema, "_make_days_ahead", work)
    await asyncio.to_thread(migrate, url)


async def test_the_server_gives_up_a_migration_that_vanished(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, str] = {}

    def work(connection: sqlalchemy.Connection) -> None:
        rows = connection.execute(
            sqlalchemy.text(
                "SELECT name, CASE WHEN name LIKE 'tcp%' THEN source ELSE setting END FROM pg_settings"
            )
        )
        found.update((name, value) for name, value in rows)

    monkeypatch.setattr(schema, "_make_days_ahead", work)
    await asyncio.to_thread(migrate, database)
    # The server shows no value of these for a unix socket.
    assert found["tcp_keepalives_idle"] == found["tcp_user_timeout"] == "session"
    assert found["idle_in_transaction_session_timeout"] == "10000"
    assert found["idle_session_timeout"] == "60000"
