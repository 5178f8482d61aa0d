"""Test that a stall is caused by the loop itself, not by its process being stopped."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rooms import loop_watchdog
from rooms.loop_watchdog import COLLECTION, UNKNOWN_CAUSE, LoopWatchdog, Stall, watch_loop

THRESHOLD_S = 0.2
LONG_S = 0.6


def burn_processor(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def collect() -> None:
    gc.collect()


async def stalls_of(*callbacks: object) -> list[Stall]:
    found: list[Stall] = []
    with watch_loop(found.append, threshold_s=THRESHOLD_S):
        for callback in callbacks:
            await asyncio.sleep(0.1)
            callback()  # type: ignore[operator]
        await asyncio.sleep(0.1)
    return found


@pytest.mark.blocking("its callbacks are the stalls")
async def test_a_callback_that_computes_is_a_stall_with_its_name() -> None:
    (stall,) = await stalls_of(lambda: burn_processor(LONG_S))
    assert stall.seconds >= LONG_S - 0.1
    assert "burn_processor" in stall.cause


@pytest.mark.blocking("its callbacks are the stalls")
async def test_a_callback_that_blocks_without_computing_is_a_stall() -> None:
    (stall,) = await stalls_of(lambda: time.sleep(LONG_S))
    assert stall.seconds > THRESHOLD_S
    assert "test_loop_watchdog" in stall.cause


@pytest.mark.blocking("its callbacks are the stalls")
async def test_each_stall_is_reported_once() -> None:
    found = await stalls_of(lambda: burn_processor(LONG_S), lambda: burn_processor(LONG_S))
    assert len(found) == 2


@pytest.mark.blocking("its collection is the stall")
async def test_a_long_garbage_collection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether a sample of the stack was taken meanwhile is a matter of chance.
    monkeypatch.setattr(loop_watchdog.LoopWatchdog, "_sample_stalls", lambda _: None)

    def slow(phase: str, _: object) -> None:
        if phase == "stop":
            burn_processor(LONG_S)

    gc.callbacks.insert(0, slow)
    try:
        (stall,) = await stalls_of(gc.collect)
    finally:
        gc.callbacks.remove(slow)
    assert stall.cause == COLLECTION


@pytest.mark.blocking("its callback is the stall")
async def test_a_sample_within_a_collection_names_what_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The sampling thread runs only while the interpreter is free, such as in this function.
    def record(watchdog: LoopWatchdog, phase: str, _: object) -> None:
        if phase == "start" and threading.get_ident() == watchdog._loop_thread:
            time.sleep(LONG_S)

    monkeypatch.setattr(LoopWatchdog, "_time_collection", record)
    (stall,) = await stalls_of(collect)
    assert stall.cause.rpartition(" > ")[2].startswith(f"{collect.__module__}.collect:")


async def test_many_short_callbacks_are_none() -> None:
    found: list[Stall] = []
    with watch_loop(found.append, threshold_s=THRESHOLD_S):
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            burn_processor(0.002)
            await asyncio.sleep(0)
    assert found == []


@pytest.mark.blocking("its callback is the stall")
async def test_a_call_that_keeps_the_interpreter_is_seen_by_its_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The sampling thread sees nothing of such a call.
    monkeypatch.setattr(loop_watchdog.LoopWatchdog, "_sample_stalls", lambda _: None)
    (stall,) = await stalls_of(lambda: burn_processor(LONG_S))
    assert stall.cause == UNKNOWN_CAUSE


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGSTOP")
def test_a_stopped_process_has_no_stall() -> None:
    code = """
        import asyncio
        from rooms.loop_watchdog import watch_loop

        async def main():
            found = []
            with watch_loop(found.append, threshold_s=0.2):
                print("ready", flush=True)
                await asyncio.to_thread(input)
                await asyncio.sleep(0.2)
            print(found, flush=True)

        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(LONG_S)  # the length of the stop itself, not a wait for anything
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "[]\n"
