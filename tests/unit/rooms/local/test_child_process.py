"""Test what the supervisor logs about a child that dies repeatedly."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rooms.local.child_process import Child, ChildMonitor, wait_ready
from rooms.local.log_file import RotatingLog
from rooms.local.supervisor import SupervisorRun

AGAIN = "child ended with code 3; restarting it"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(tmp_path: Path, said: list[str]) -> Iterator[ChildMonitor]:
    book = RotatingLog(tmp_path / "child.log", echo=said.append)
    yield ChildMonitor(
        Child(name="child", argv=["false"]),
        environment={},
        run_dir=tmp_path,
        log_file=book,
        log_line=said.append,
    )
    book.close()


def die(keeper: ChildMonitor, now: float, *, steady: bool = False) -> None:
    keeper.deaths += 1
    keeper._log_death("ended with code 3", now, steady=steady)


def test_repeated_deaths_are_logged_once_a_minute(keeper: ChildMonitor, said: list[str]) -> None:
    for second in range(300):
        die(keeper, 1000.0 + second)
    assert [line.startswith(AGAIN) for line in said[:3]] == [True] * 3
    assert len(said) == 3 + 4
    assert all("59 more times since the last report" in line for line in said[3:])


def test_death_of_a_stable_child_is_logged_at_once(keeper: ChildMonitor, said: list[str]) -> None:
    for second in range(10):
        die(keeper, 1000.0 + second)
    die(keeper, 1020.0, steady=True)
    assert len(said) == 4
    assert "7 more times since the last report" in said[-1]


async def test_a_child_without_a_check_is_started_again_when_its_first_start_fails(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the machine can make no process: the start waits only for children with a check."""
    book = RotatingLog(tmp_path / "child.log", echo=said.append)
    child = Child(name="worker", argv=["sleep", "60"])
    keeper = ChildMonitor(
        child, environment={}, run_dir=tmp_path, log_file=book, log_line=said.append
    )
    spawn, failures = keeper._spawn, iter([BlockingIOError(11, "no more processes")])
    started = asyncio.Event()

    async def unlucky() -> Any:
        for failure in failures:
            raise failure
        found = await spawn()
        started.set()
        return found

    monkeypatch.setattr(keeper, "_spawn", unlucky)
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        await started.wait()
        await wait_ready(keeper)
        await keeper.stop(deadline=asyncio.get_running_loop().time() + 5, urgent=asyncio.Event())
        await running
    assert "worker could not start: " in said[0]
    assert keeper.failure is None
    book.close()


@pytest.mark.parametrize("ignored", [True, False])
async def test_a_hangup_that_nohup_ignores_stops_nothing(*, ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        run = SupervisorRun(foundations=(), monitors=(), drain_s=1)
        lines: list[str] = []
        with run.stop_on_signals(lines.append):
            os.kill(os.getpid(), signal.SIGHUP) if ignored else None
            handled = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
            await asyncio.sleep(0.05)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert handled is not ignored
    assert lines == []
