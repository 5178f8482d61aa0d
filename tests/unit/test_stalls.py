"""Which stalls fail a test."""

import asyncio
import functools
import subprocess
import sys
import time

import pytest

from rooms.loop_watchdog import COLLECTION, UNSEEN, Stall
from tests import stalls

BLOCK = functools.partial(time.sleep, 1.5)


def run_program() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1.5)"], check=True)


def stall(running: str) -> Stall:
    return Stall(seconds=1.0, running=running)


@pytest.mark.parametrize(
    "running",
    [
        COLLECTION,
        "asyncio.runners.Runner.run:118 > tests.sink.Sink.wait:150",
        "tests.faults.test_full.kill:90 > subprocess.Popen.wait:1264 > subprocess.Popen._wait:2040",
        "tests.conftest.artemis_server:195 > rooms.embedded.running.Running.start:94",
        "tests.publishing.House.run:54 > psycopg.connection.Connection.connect:109 > selectors.EpollSelector.select:468",
    ],
)
def test_what_the_test_itself_does_fails_nothing(running: str) -> None:
    assert stalls.of_the_test(stall(running))


@pytest.mark.parametrize(
    "running",
    [
        UNSEEN,
        "tests.stalls.watched.<locals>.run:24 > tests.rest.test_rooms.test_a:5 > rooms.publishing.filter.MessageFilter.judge:9",
        "rooms.storage.writer.Writer.run:10 > psycopg.connection_async.AsyncConnection.execute:1",
    ],
)
def test_what_the_product_does_fails_it(running: str) -> None:
    assert not stalls.of_the_test(stall(running))


async def test_a_test_fails_where_a_library_call_of_the_product_keeps_the_loop() -> None:
    async def test() -> None:
        await asyncio.sleep(0.15)
        asyncio.get_running_loop().call_soon(BLOCK)
        await asyncio.sleep(0.15)

    with pytest.raises(AssertionError, match=stalls.LOGGED):
        await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(stalls.watched(test)())), 30)


async def test_a_test_that_waits_for_a_program_does_not_fail() -> None:
    async def test() -> None:
        await asyncio.sleep(0.15)
        run_program()

    await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(stalls.watched(test)())), 30)
