"""Check that a session that the server ends is an outage, wherever a connection is used directly.

An operator may limit transactions, and a suspended process loses its session.
"""

import asyncio
import logging
from datetime import UTC, datetime

import psycopg
import pytest

from delivery.leadership import postgres as election_module
from delivery.leadership.postgres import PostgresElection
from delivery.maintenance.task import Always, FunctionTask, ShouldContinue, run_periodically
from rooms.clock import SystemClock
from rooms.db import active_lock, readiness
from rooms.db.active_lock import ActiveLock
from rooms.db.connection import PersistentConnection
from rooms.db.queries import analytics, log_export
from rooms.db.queries.log_export import ExportConnection
from rooms.db.readiness import wait_for_postgres
from rooms.errors import StorageUnavailableError
from rooms.outages import OUTAGES

pytestmark = pytest.mark.parametrize("code", ["25P03", "25P04", "57P01", "57P05"])


def raising(code: str) -> str:
    return f"DO $$ BEGIN RAISE EXCEPTION 'terminating connection' USING ERRCODE = '{code}'; END $$"


async def test_everyday_reads(database: str, code: str) -> None:
    connection = PersistentConnection(database, name="a test")
    try:
        with pytest.raises(StorageUnavailableError):
            await connection.run(lambda opened: opened.execute(raising(code)))
        cursor = await connection.run(lambda opened: opened.execute("SELECT 1"))
        assert await cursor.fetchone() == (1,)
    finally:
        await connection.close()


def test_owners_of_findings(database: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analytics, "_ONE_SNAPSHOT", raising(code))
    with pytest.raises(StorageUnavailableError):
        analytics.read_owners(database)


def test_findings(database: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analytics, "_LOCK", raising(code))
    with pytest.raises(StorageUnavailableError):
        analytics.replace_findings(database, run=1, analysed_at=datetime.now(UTC), findings=[])


def test_the_export_of_the_log(database: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExportConnection(database, "a test") as exports:
        monkeypatch.setattr(log_export, "_SETTLED_XID", raising(code))
        with pytest.raises(StorageUnavailableError):
            exports.settled_xid()


async def test_a_standby_that_waits_for_the_lock(
    database: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ActiveLock(database) as lock:
        assert lock._connection is not None
        execute = lock._connection.execute
        monkeypatch.setattr(lock._connection, "execute", lambda *_: execute(raising(code)))
        with pytest.raises(StorageUnavailableError):
            await lock.acquire()
        async with asyncio.timeout(10):
            await lock.wait_lost()


async def test_a_standby_that_opens_its_session(
    database: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(*_: object, **__: object) -> None:
        raise psycopg.errors.lookup(code)("terminating connection")

    monkeypatch.setattr(active_lock, "connect", end)
    with pytest.raises(StorageUnavailableError):
        await ActiveLock(database).__aenter__()


async def test_a_process_that_waits_for_postgres(
    database: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object, **__: object) -> None:
        raise psycopg.errors.lookup(code)("terminating connection")

    monkeypatch.setattr(readiness, "open_connection", end)
    with pytest.raises(StorageUnavailableError, match="did not take writes"):
        await wait_for_postgres(database, within_s=0)


async def test_a_member_of_the_election(
    database: str, code: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It joins again, and the log names PostgreSQL as the reason."""
    monkeypatch.setattr(election_module, "_SETTINGS", raising(code))
    failed = asyncio.Event()
    monkeypatch.setattr(OUTAGES, "record_failure", lambda *_, **__: failed.set())
    async with (
        PostgresElection(database, member="own", clock=SystemClock()) as election,
        election.join(["first"]),
    ):
        async with asyncio.timeout(10):
            await failed.wait()
    assert "left the election" not in caplog.text


async def test_a_periodic_task(code: str, caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()

    async def end(_: ShouldContinue) -> None:
        stop.set()
        raise psycopg.errors.lookup(code)("terminating connection")

    with caplog.at_level(logging.WARNING, logger="delivery.maintenance.task"):
        await run_periodically(FunctionTask("a task", end), every_s=0, window=Always(stop))
    assert [one for one in caplog.records if one.name == "delivery.maintenance.task"] == []
