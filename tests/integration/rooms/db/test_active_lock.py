"""Check the active lock: one holder at a time, and a successor once the holder ended, was cut off, or is silent."""

import asyncio

import pytest

from rooms.db.active_lock import ActiveLock
from rooms.errors import StorageUnavailableError
from tests.support.installation import PATIENCE_S, installed, until


async def session_answer(charge: ActiveLock, statement: str) -> object:
    """Return the answer of the lock's session."""
    assert charge._connection is not None
    cursor = await charge._connection.execute(statement)
    return (await cursor.fetchone() or [None])[0] if cursor.description else None


async def test_the_next_one_waits_for_the_first_to_leave(database: str) -> None:
    async with ActiveLock(database) as second:
        async with ActiveLock(database) as first:
            await first.acquire()
            waiting = asyncio.create_task(second.acquire())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        async with asyncio.timeout(PATIENCE_S):
            await waiting


async def test_a_standby_keeps_no_snapshot_while_it_waits(database: str) -> None:
    """An old snapshot would keep vacuum, retention and the count of usage from their work."""
    async with (
        ActiveLock(database, session_timeout_s=2 * PATIENCE_S) as first,
        ActiveLock(database, session_timeout_s=2 * PATIENCE_S) as second,
        installed(database) as installation,
    ):
        await first.acquire()
        pid = await session_answer(second, "SELECT pg_backend_pid()")
        waiting = asyncio.create_task(second.acquire())
        began: set[object] = set()

        async def is_between_statements() -> bool:
            (session,) = await installation.rows(
                "SELECT state, xact_start, backend_xmin, query_start FROM pg_stat_activity"
                " WHERE pid = %s",
                pid,
            )
            if session["state"] == "idle":
                assert (session["xact_start"], session["backend_xmin"]) == (None, None)
                began.add(session["query_start"])
            return len(began) > 2

        await until(is_between_statements, "the standby to try again, and to leave no transaction")
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_holder_that_is_cut_off_notices_and_another_takes_over(database: str) -> None:
    async with (
        ActiveLock(database, session_timeout_s=30) as first,
        ActiveLock(database) as second,
        installed(database) as installation,
    ):
        await first.acquire()
        lost = asyncio.create_task(first.wait_lost())
        waiting = asyncio.create_task(second.acquire())
        (holder,) = await installation.rows(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = 1919905647"
        )
        await installation.rows("SELECT pg_terminate_backend(%s)", holder["pid"])
        async with asyncio.timeout(PATIENCE_S):
            await waiting
            await lost


async def test_a_silent_holder_loses_the_lock_soon(database: str) -> None:
    """A suspended process: the server ends its session, and the process notices when it goes on."""
    async with ActiveLock(database, session_timeout_s=30) as frozen, ActiveLock(database) as second:
        await frozen.acquire()
        assert await session_answer(frozen, "SHOW idle_session_timeout") == "30s"
        await session_answer(frozen, "SET idle_session_timeout = '100ms'")
        async with asyncio.timeout(PATIENCE_S):
            await second.acquire()
            await frozen.wait_lost()


async def test_a_holder_that_pings_keeps_the_lock(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.db.active_lock.PING_S", 0.02)
    async with (
        ActiveLock(database, session_timeout_s=60) as first,
        ActiveLock(database) as second,
        installed(database) as installation,
    ):
        await first.acquire()
        lost = asyncio.create_task(first.wait_lost())
        waiting = asyncio.create_task(second.acquire())
        spoke: set[object] = set()
        async with asyncio.timeout(PATIENCE_S):
            while len(spoke) < 5:
                spoke.add(
                    await installation.value(
                        "SELECT query_start FROM pg_stat_activity JOIN pg_locks USING (pid)"
                        " WHERE locktype = 'advisory' AND granted AND datname = current_database()"
                    )
                )
        assert not lost.done()
        assert not waiting.done()
        lost.cancel()
        waiting.cancel()
        await asyncio.gather(lost, waiting, return_exceptions=True)


async def test_an_unreachable_postgresql_is_reported() -> None:
    with pytest.raises(StorageUnavailableError):
        async with ActiveLock("postgresql://127.0.0.1:1/nothing"):
            pass
