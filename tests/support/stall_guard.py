"""Fail tests that block an event loop: their own, or one of a process that they start."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from rooms.loop_watchdog import COLLECTION, Stall, watch_loop
from tests.support.virtual_time import VirtualTimeLoop

THRESHOLD_S: Final = 0.25
LOGGED: Final = "the event loop stood still"
_WATCHED: Final[set[object]] = set()
"""Inner tests of hypothesis that are wrapped already."""


def watched(test: Callable[..., Awaitable[None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """Wrap an asynchronous test: it fails where its loop is blocked."""

    @functools.wraps(test)
    async def run(*arguments: Any, **named: Any) -> None:
        found: list[Stall] = []
        with watch_loop(found.append, threshold_s=THRESHOLD_S):
            await test(*arguments, **named)
        assert_none(found)

    return run


def watched_runners(test: Callable[..., None]) -> Callable[..., None]:
    """Wrap a synchronous test: it fails where a loop is blocked that it runs with `asyncio.Runner`, as `asyncio.run` does."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        found: list[Stall] = []
        original = asyncio.Runner.run

        async def watch_main(main: Coroutine[Any, Any, Any]) -> Any:
            with watch_loop(found.append, threshold_s=THRESHOLD_S):
                return await main

        def run_watched(
            runner: asyncio.Runner, main: Coroutine[Any, Any, Any], **given: Any
        ) -> Any:
            if isinstance(runner.get_loop(), VirtualTimeLoop):  # whose clock no stall moves
                return original(runner, main, **given)
            return original(runner, watch_main(main), **given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Runner, "run", run_watched)
            test(*arguments, **named)
        assert_none(found)

    return run


def assert_none(found: Iterable[Stall]) -> None:
    """Fail where a loop stood still, but for what the test itself did."""
    stalls = [stall for stall in found if not of_the_test(stall)]
    assert not stalls, "\n".join(
        f"{LOGGED} for {stall.seconds:.2f} s; it ran {stall.cause}" for stall in stalls
    )


def of_the_test(stall: Stall) -> bool:
    """Return whether the test itself kept its loop: it collected the run's own heap, started a server, asked a database or migrated one.

    The product migrates in a process of its own. Rooms processes are checked by their logs, where none of this is left out.
    """
    calls = stall.cause.split(" > ")
    return (
        stall.cause == COLLECTION
        or calls[-1].startswith("tests.")
        or any(
            call.startswith(
                ("subprocess.", "rooms.local.", "psycopg.connection.Connection.", "alembic.")
            )
            for call in calls
        )
    )


def watch(item: pytest.Item) -> None:
    """Watch the loop of a test, and those that a synchronous one runs, unless it is marked as `blocking`."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("blocking"):
        return
    handle = getattr(item.obj, "hypothesis", None)
    if handle is None:
        watch_test = watched if inspect.iscoroutinefunction(item.obj) else watched_runners
        item.obj = watch_test(item.obj)
    elif inspect.iscoroutinefunction(handle.inner_test):
        # The items of all parameters share it; each example is watched.
        if handle.inner_test not in _WATCHED:
            handle.inner_test = watched(handle.inner_test)
            _WATCHED.add(handle.inner_test)
    else:
        item.obj = watched_runners(item.obj)


def assert_none_logged(*logs: Path) -> None:
    """Fail where a process that wrote one of these logs had a stall."""
    found = logged(*logs)
    assert not found, "\n".join(found)


def logged(*logs: Path) -> list[str]:
    """The lines about stalls in these logs."""
    return [
        f"{log.name}: {line}"
        for log in logs
        if log.name != "supervisor.log"  # which repeats them
        for line in log.read_text(errors="replace").splitlines()
        if LOGGED in line
    ]
