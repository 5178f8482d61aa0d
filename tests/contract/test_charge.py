"""Being in charge: one at a time, and somebody else as soon as whoever is has ended, was cut off, or says nothing."""

import asyncio

import pytest

from rooms.errors import StorageUnavailableError
from rooms.storage.charge import Charge
from tests.installation import PATIENCE_S, installed

pytestmark = pytest.mark.row("E7")


async def told(charge: Charge, statement: str) -> object:
    """What its session answers."""
    assert charge._connection is not None
    cursor = await charge._connection.execute(statement)
    return (await cursor.fetchone() or [None])[0] if cursor.description else None


async def test_the_next_one_waits_for_the_first_to_leave(database: str) -> None:
    async with Charge(database) as second:
        async with Charge(database) as first:
            await first.taken()
            waiting = asyncio.create_task(second.taken())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        async with asyncio.timeout(PATIENCE_S):
            await waiting


async def test_whoever_is_cut_off_hears_of_it_and_another_takes_over(database: str) -> None:
    async with Charge(database, silence_s=30) as first, Charge(database) as second, installed(database) as installation:
        await first.taken()
        lost = asyncio.create_task(first.lost())
        waiting = asyncio.create_task(second.taken())
        (holder,) = await installation.rows(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = 1919905647"
        )
        await installation.rows("SELECT pg_terminate_backend(%s)", holder["pid"])
        async with asyncio.timeout(PATIENCE_S):
            await waiting
            await lost


async def test_who_says_nothing_is_not_in_charge_for_long(database: str) -> None:
    """A process that stands still: its session is ended by the server, and it finds that out when it goes on."""
    async with Charge(database, silence_s=30) as frozen, Charge(database) as second:
        await frozen.taken()
        assert await told(frozen, "SHOW idle_session_timeout") == "30s"
        await told(frozen, "SET idle_session_timeout = '100ms'")
        async with asyncio.timeout(PATIENCE_S):
            await second.taken()
            await frozen.lost()


async def test_who_shows_that_it_lives_stays_in_charge(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooms.storage.charge.PING_S", 0.02)
    async with Charge(database, silence_s=60) as first, Charge(database) as second, installed(database) as installation:
        await first.taken()
        lost = asyncio.create_task(first.lost())
        waiting = asyncio.create_task(second.taken())
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


async def test_a_postgresql_that_is_away_is_told() -> None:
    with pytest.raises(StorageUnavailableError):
        async with Charge("postgresql://127.0.0.1:1/nothing"):
            pass
