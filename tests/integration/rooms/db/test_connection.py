"""Test how the connections of everyday queries are set up."""

import asyncio
import contextlib
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db import connection as connection_module
from rooms.db.connection import (
    NotificationReader,
    autocommit,
    open_connection,
    open_engine,
    snapshot,
    transaction,
)
from rooms.db.queries.analytics import read_owners
from rooms.db.queries.deliveries import deliveries_of_subscription
from rooms.db.queries.log_export import ExportConnection
from rooms.db.queries.messages import ListFilter
from rooms.db.schema import migrate
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.errors import QueryTimeoutError, StorageRefusedError, StorageUnavailableError
from tests.support.session_pooler import SessionPooler

_RUNS = 20
"""psycopg prepares a statement after 5 of them, and PostgreSQL may keep one plan after 5 more."""
_PREPARED = text(
    "SELECT generic_plans, custom_plans FROM pg_prepared_statements"
    " WHERE statement LIKE '%FROM deliveries%'"
)


async def plans_of_a_list(engine: AsyncEngine) -> tuple[int, int]:
    """Read a page again and again; return how many plans were for any value, and for its own."""
    for _ in range(_RUNS):
        async with transaction(engine) as connection:
            page = await deliveries_of_subscription(
                connection,
                RoomId(1),
                SubscriptionId("01a20a90-7e59-7000-8000-000100000001"),
                ListFilter(),
                due_only=False,
                before=None,
                limit=51,
            )
            assert not page.found
    async with transaction(engine) as connection:
        row = (await connection.execute(_PREPARED)).one()
    await engine.dispose()
    return row[0], row[1]


async def test_a_page_is_planned_for_its_values(database: str) -> None:
    """Check that no plan is kept that knows no LIMIT: it would sort all deliveries for a page."""
    generic, custom = await plans_of_a_list(open_engine(database, size=1))
    assert generic == 0
    assert custom > 0


async def test_a_pool_names_its_connections(database: str) -> None:
    engine = open_engine(database, name="rooms api queries")
    try:
        async with transaction(engine) as connection:
            name = await connection.scalar(text("SHOW application_name"))
    finally:
        await engine.dispose()
    assert name == "rooms api queries"


async def test_options_of_the_url_win(database: str) -> None:
    joined = "&" if "?" in database else "?"
    asked = f"{database}{joined}options=-c%20plan_cache_mode%3Dforce_generic_plan"
    generic, _ = await plans_of_a_list(open_engine(asked, size=1))
    assert generic > 0


async def test_notifications_are_read_as_they_come(database: str) -> None:
    """Also after another statement, for which psycopg waits on the same socket."""
    async with (
        open_connection(database, name="a test") as listening,
        open_connection(database, name="another") as sending,
    ):
        await listening.execute("LISTEN rooms_test")
        with NotificationReader(listening) as reader:
            assert await reader.read(0.01) == []
            await sending.execute("NOTIFY rooms_test, 'first'; NOTIFY rooms_test, 'second'")
            assert await reader.read(60) == [("rooms_test", "first"), ("rooms_test", "second")]
        await listening.execute("SELECT 1")
        await sending.execute("NOTIFY rooms_test, 'third'")
        with NotificationReader(listening) as reader:
            assert await reader.read(60) == [("rooms_test", "third")]


async def test_a_reader_that_waits_does_not_wake_up_by_itself(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Psycopg would look ten times a second, in each process that listens."""
    async with open_connection(database, name="a test") as listening:
        await listening.execute("LISTEN rooms_test")
        loop, polls = asyncio.get_running_loop(), list[int]()
        add_reader = loop.add_reader

        def counted(descriptor: int, *args: Any) -> None:
            polls.append(descriptor)
            add_reader(descriptor, *args)

        monkeypatch.setattr(loop, "add_reader", counted)
        with NotificationReader(listening) as reader:
            waiting = asyncio.create_task(reader.read())
            await asyncio.wait({waiting}, timeout=0.35)
            assert not waiting.done()
            assert len(polls) == 1
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting


async def test_a_reader_fails_when_the_server_ends_its_connection(database: str) -> None:
    """So its owner connects again instead of waiting for ever."""
    async with (
        open_connection(database, name="a test") as listening,
        open_connection(database, name="another") as ending,
    ):
        with NotificationReader(listening) as reader:
            waiting = asyncio.create_task(reader.read())
            await ending.execute("SELECT pg_terminate_backend(%s)", [listening.info.backend_pid])
            with pytest.raises(psycopg.OperationalError):
                await asyncio.wait_for(waiting, 60)
        descriptor = reader._descriptor
        assert not asyncio.get_running_loop().remove_reader(descriptor), "it was still watched"
        async with open_connection(database, name="a test") as next_one:
            assert next_one.fileno() == descriptor, "the number is used again"
            await asyncio.wait_for(next_one.execute("SELECT 1"), 60)


async def test_a_connection_that_the_server_ended_is_replaced(database: str) -> None:
    """Without a statement that asks whether it still lives."""
    engine = open_engine(database, size=1)
    async with transaction(engine) as connection:
        first = await connection.scalar(text("SELECT pg_backend_pid()"))
    async with open_connection(database, name="a test") as other:
        await other.execute("SELECT pg_terminate_backend(%s, 5000)", (first,))
    async with transaction(engine) as connection:
        second = await connection.scalar(text("SELECT pg_backend_pid()"))
    await engine.dispose()
    assert second != first


async def test_a_new_connection_is_not_asked_whether_it_lives(database: str) -> None:
    """Two that the server ends at once are errors of their statements, and of nothing else."""
    engine = open_engine(database, size=1)

    def end(adapted: Any, *_: object) -> None:
        with psycopg.connect(database) as other:
            pid = adapted.driver_connection.info.backend_pid
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    event.listen(engine.sync_engine, "connect", end)
    with pytest.raises(StorageUnavailableError):
        async with transaction(engine) as connection:
            await connection.execute(text("SELECT 1"))
    await engine.dispose()


async def test_a_silent_server_is_given_up_by_the_pool_unless_the_url_says_when(
    database: str,
) -> None:
    joined = "&" if "?" in database else "?"
    for url, idle in ((database, "5"), (f"{database}{joined}keepalives_idle=77", "77")):
        engine = open_engine(url, size=1)
        async with engine.connect() as connection:
            raw: Any = (await connection.get_raw_connection()).driver_connection
            found = raw.info.get_parameters()
        await engine.dispose()
        assert found["keepalives_idle"] == idle
        assert found["tcp_user_timeout"] == "15000"


async def test_a_healthy_connection_is_kept(database: str) -> None:
    engine = open_engine(database, size=1)
    pids = set()
    for use in (transaction, autocommit, snapshot, transaction, autocommit, snapshot):
        async with use(engine) as connection:
            pids.add(await connection.scalar(text("SELECT pg_backend_pid()")))
    await engine.dispose()
    assert len(pids) == 1


async def test_a_statement_of_its_own_is_committed_at_once(database: str) -> None:
    engine = open_engine(database, size=1)
    in_transaction = text("SELECT now() <> statement_timestamp()")
    async with autocommit(engine) as connection:
        await connection.execute(text("CREATE TEMPORARY TABLE kept (one int)"))
        assert not await connection.scalar(in_transaction)
        await asyncio.sleep(0.01)
        assert not await connection.scalar(in_transaction)
    # The next user of the same connection has a transaction again.
    async with transaction(engine) as connection:
        assert await connection.scalar(text("SELECT count(*) FROM kept")) == 0
        await asyncio.sleep(0.01)
        assert await connection.scalar(in_transaction)
    await engine.dispose()


@pytest.mark.parametrize("use", [transaction, autocommit, snapshot])
async def test_a_session_keeps_to_a_default_of_reading_only(database: str, use: Any) -> None:
    """An operator or a provider sets it where a disk is nearly full; it holds in used sessions."""
    engine = open_engine(database, size=1)
    show = text("SHOW transaction_read_only")
    try:
        async with use(engine) as connection:
            await connection.execute(text("SELECT 1"))
        async with transaction(engine) as connection:
            assert await connection.scalar(show) == "off"
            await connection.execute(text("SET default_transaction_read_only = on"))
        async with transaction(engine) as connection:
            assert await connection.scalar(show) == "on"
    finally:
        await engine.dispose()


async def test_a_snapshot_sees_one_moment_and_writes_nothing(database: str) -> None:
    engine = open_engine(database, size=1)
    count = text("SELECT count(*) FROM organisations")
    async with snapshot(engine) as connection:
        before = await connection.scalar(count)
        async with open_connection(database, name="test") as other:
            await other.execute(
                "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'meanwhile')"
            )
        assert await connection.scalar(count) == before
    with pytest.raises(StorageRefusedError):
        async with snapshot(engine) as connection:
            await connection.execute(text("DELETE FROM organisations"))
    # The next user of the same connection is isolated as usual, and may write.
    async with transaction(engine) as connection:
        assert await connection.scalar(count) == before + 1
        assert await connection.scalar(text("SHOW transaction_isolation")) == "read committed"
        assert await connection.scalar(text("SHOW transaction_read_only")) == "off"
    await engine.dispose()


async def test_errors_of_a_statement_of_its_own_are_translated(database: str) -> None:
    engine = open_engine(database, size=1, statement_timeout_s=1)
    with pytest.raises(QueryTimeoutError):
        async with autocommit(engine) as connection:
            await connection.execute(text("SELECT pg_sleep(5)"))
    await engine.dispose()


_GUARDS = (
    "SELECT name, CASE WHEN source = 'default' THEN boot_val WHEN name LIKE 'tcp%%' THEN source ELSE"
    " setting END AS setting FROM pg_settings WHERE name IN ('idle_in_transaction_session_timeout',"
    " 'lock_timeout', 'tcp_keepalives_count', 'tcp_keepalives_idle', 'tcp_keepalives_interval',"
    " 'tcp_user_timeout')"
)
_EXPECTED_GUARDS = {
    "idle_in_transaction_session_timeout": "30000",
    "lock_timeout": "0",
    "tcp_keepalives_count": "session",
    "tcp_keepalives_idle": "session",
    "tcp_keepalives_interval": "session",
    "tcp_user_timeout": "session",
}
"""The server shows 0 for what is set of TCP on a unix socket, but that it was set."""


async def guards_of_a_pool(url: str, **arguments: Any) -> dict[str, str]:
    engine = open_engine(url, **arguments)
    try:
        async with transaction(engine) as connection:
            rows = await connection.execute(text(_GUARDS))
            return {row.name: row.setting for row in rows}
    finally:
        await engine.dispose()


async def guards_of_a_connection(url: str) -> dict[str, str]:
    async with open_connection(url, name="a test") as connection:
        cursor = await connection.execute(_GUARDS)
        return dict(await cursor.fetchall())


async def test_the_server_ends_the_transactions_of_a_client_that_vanished(database: str) -> None:
    """Without this, an API host that vanishes keeps its row locks for two hours."""
    assert await guards_of_a_pool(database) == _EXPECTED_GUARDS
    assert await guards_of_a_connection(database) == _EXPECTED_GUARDS


def exporting_system(url: str) -> str:
    with ExportConnection(url, "test") as exports:
        return exports.system


async def test_a_proxy_that_knows_no_startup_parameter_of_ours_lets_every_session_in(
    database: str,
) -> None:
    """Proxies in session mode are promised to work, and know none that they need not track."""
    async with SessionPooler(database) as pooler:
        guards = await guards_of_a_pool(pooler.url, statement_timeout_s=7, lock_timeout_s=5)
        assert guards == _EXPECTED_GUARDS | {"lock_timeout": "5000"}
        assert await guards_of_a_connection(pooler.url) == _EXPECTED_GUARDS
        await asyncio.to_thread(migrate, pooler.url)
        await asyncio.to_thread(read_owners, pooler.url)
        assert await asyncio.to_thread(exporting_system, pooler.url)
        assert pooler.refused == []
        assert pooler.sessions == 5


async def test_the_settings_of_a_connection_are_kept_over_its_uses(database: str) -> None:
    """A transaction that is rolled back does not take them back."""
    engine = open_engine(database, size=1, statement_timeout_s=7)
    settings = text("SELECT current_setting('statement_timeout'), pg_backend_pid()")
    found = set()
    for use in (transaction, autocommit, snapshot, transaction):
        with contextlib.suppress(ZeroDivisionError):
            async with use(engine) as connection:
                found.add(tuple((await connection.execute(settings)).one()))
                raise ZeroDivisionError
    await engine.dispose()
    assert [one[0] for one in found] == ["7s"]


async def test_a_server_that_ends_a_session_before_its_settings_is_away(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = "' || pg_terminate_backend(pg_backend_pid())::text || '"
    monkeypatch.setattr(connection_module, "SERVER_TIMEOUTS", {"rooms.test": ending})
    engine = open_engine(database, size=1)
    with pytest.raises(StorageUnavailableError):
        async with transaction(engine):
            pass
    await engine.dispose()
    with pytest.raises(psycopg.OperationalError):
        async with open_connection(database, name="a test"):
            pass


async def test_options_of_the_operator_win_over_the_guards(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "idle_in_transaction_session_timeout"
    asked = f"{database}&options=-c%20{name}%3D7s"
    expected = _EXPECTED_GUARDS | {name: "7000"}
    assert await guards_of_a_pool(asked) == expected
    assert await guards_of_a_connection(asked) == expected
    monkeypatch.setenv("PGOPTIONS", f"-c {name}=8s")
    assert await guards_of_a_pool(asked) == expected
    expected[name] = "8000"
    assert await guards_of_a_pool(database) == expected
    assert await guards_of_a_connection(database) == expected


async def test_a_pool_may_refuse_to_wait_for_a_lock(database: str) -> None:
    assert (await guards_of_a_pool(database, lock_timeout_s=5))["lock_timeout"] == "5000"
