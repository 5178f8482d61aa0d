"""Standbys on a real PostgreSQL: which of them becomes active, and when."""

import asyncio

import pytest

from rooms.app import standalone
from rooms.app.process import ShutdownGroup
from rooms.db.active_lock import ActiveLock
from rooms.metrics import Metrics
from rooms.settings import read_settings
from tests.support.installation import PATIENCE_S, Installation, until

SESSION = "rooms active lock"


async def test_a_standby_whose_session_ends_waits_again_and_is_not_active(
    database: str, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the session of the waiting process, as a failover does."""
    monkeypatch.setattr(standalone, "_RETRY_S", 0.01)
    active = asyncio.Event()

    async def run_active(*_: object) -> None:
        active.set()
        shutdown.stop()

    monkeypatch.setattr(standalone, "_run_active", run_active)
    shutdown = ShutdownGroup()

    async def waiting_session() -> int | None:
        """The session of the standby, once it has tried in vain to have the lock."""
        found = await installation.rows(
            "SELECT pid FROM pg_stat_activity a WHERE application_name = %s"
            " AND datname = current_database() AND query LIKE '%%advisory%%' AND pid <> %s",
            SESSION,
            holder,
        )
        return found[0]["pid"] if found else None

    async with ActiveLock(database) as first:
        await first.acquire()
        (holder,) = await installation.backends(SESSION)
        standby = asyncio.create_task(
            standalone._run_standby(read_settings({}), database, Metrics(), shutdown)
        )
        ended = await until(waiting_session, "the standby to wait")
        await installation.rows("SELECT pg_terminate_backend(%s, 60000)", ended)

        async def waits_again() -> bool:
            assert not active.is_set()
            return await waiting_session() not in {None, ended}

        await until(waits_again, "the standby to wait again")
    async with asyncio.timeout(PATIENCE_S):
        await standby
    assert active.is_set()


async def test_a_standby_that_is_stopped_while_it_waits_ends(
    database: str, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_active(*_: object) -> None:
        pytest.fail("the lock is held by another process")

    monkeypatch.setattr(standalone, "_run_active", run_active)
    shutdown = ShutdownGroup()
    async with ActiveLock(database) as first:
        await first.acquire()
        standby = asyncio.create_task(
            standalone._run_standby(read_settings({}), database, Metrics(), shutdown)
        )

        async def both_are_there() -> bool:
            return len(await installation.backends(SESSION)) == 2

        await until(both_are_there, "the standby to connect")
        shutdown.stop()
        async with asyncio.timeout(PATIENCE_S):
            await standby
