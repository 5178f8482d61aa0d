"""Which stalls fail a test."""

import asyncio
import functools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from rooms.loop_watchdog import COLLECTION, UNKNOWN_CAUSE, Stall
from tests.faults.hostile.suite import Suite, attack
from tests.support import stall_guard

BLOCK = functools.partial(time.sleep, 1.5)


def run_program() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1.5)"], check=True)


def stall(running: str) -> Stall:
    return Stall(seconds=1.0, cause=running)


@pytest.mark.parametrize(
    "running",
    [
        COLLECTION,
        "asyncio.runners.Runner.run:118 > tests.support.webhook_sink.Sink.wait:150",
        "tests.faults.test_full.kill:90 > subprocess.Popen.wait:1264 > subprocess.Popen._wait:2040",
        "tests.conftest.artemis_server:195 > tests.support.local_servers.TestServer.start:85",
        "tests.support.publisher.House.run:54 > psycopg.connection.Connection.connect:109 > selectors.EpollSelector.select:468",
        "alembic.script.base.Script._from_path:1039 > alembic.util.pyfiles.load_python_file:113 > pathlib.Path.exists:1235",
    ],
)
def test_what_the_test_itself_does_fails_nothing(running: str) -> None:
    assert stall_guard.of_the_test(stall(running))


@pytest.mark.parametrize(
    "running",
    [
        UNKNOWN_CAUSE,
        "tests.support.stall_guard.watched.<locals>.run:24 > tests.integration.rooms.api.test_rooms.test_a:5 > rooms.publishing.cel_filter.MessageFilter.judge:9",
        "rooms.db.writer.Writer.run:10 > psycopg.connection_async.AsyncConnection.execute:1",
    ],
)
def test_what_the_product_does_fails_it(running: str) -> None:
    assert not stall_guard.of_the_test(stall(running))


async def test_a_test_fails_where_a_library_call_of_the_product_keeps_the_loop() -> None:
    async def test() -> None:
        await asyncio.sleep(0.15)
        asyncio.get_running_loop().call_soon(BLOCK)
        await asyncio.sleep(0.15)

    with pytest.raises(AssertionError, match=stall_guard.LOGGED):
        await asyncio.wait_for(
            asyncio.to_thread(lambda: asyncio.run(stall_guard.watched(test)())), 30
        )


async def test_a_test_that_waits_for_a_program_does_not_fail() -> None:
    async def test() -> None:
        await asyncio.sleep(0.15)
        run_program()

    await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(stall_guard.watched(test)())), 30)


@pytest.mark.blocking("the stall is within")
def test_a_synchronous_test_fails_where_a_loop_that_it_runs_is_kept() -> None:
    async def main() -> str:
        await asyncio.sleep(0.15)
        asyncio.get_running_loop().call_soon(BLOCK)
        await asyncio.sleep(0.15)
        return "done"

    def test() -> None:
        assert asyncio.run(main()) == "done"

    def in_a_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(test).result()  # whose frames are not those of a test

    with pytest.raises(AssertionError, match=stall_guard.LOGGED):
        stall_guard.watched_runners(in_a_thread)()


@pytest.mark.blocking("the stall is within")
async def test_an_attack_fails_where_a_case_keeps_the_loop() -> None:
    @asynccontextmanager
    async def target(_: str) -> AsyncIterator[Callable[[float], Awaitable[str]]]:
        async def run(seconds: float) -> str:
            asyncio.get_running_loop().call_soon(functools.partial(time.sleep, seconds))
            await asyncio.sleep(0.15)
            return "slept"

        yield run

    async def attacked(seconds: float) -> Counter[str]:
        suite = Suite(name="sleeps", cases=2, generate=lambda _: seconds, target=target)
        return await attack(suite, "", seed=1, cases=2)

    assert await attacked(0.0) == {"slept": 2}
    with pytest.raises(AssertionError, match=f"sleeps.*(?s:.)*{stall_guard.LOGGED}"):
        await attacked(0.8)
