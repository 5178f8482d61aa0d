"""Run a process: its event loop, its log, and its end."""

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, TypeVar

from rooms.db.readiness import wait_for_postgres
from rooms.errors import SettingsError, TransientError
from rooms.loop_watchdog import Stall, watch_loop
from rooms.metrics import Metrics
from rooms.safe_text import log_to_stderr
from rooms.settings import Settings

GC_THRESHOLD: Final = 50_000
STARTUP_GRACE_S: Final = 5.0
"""Modules are imported on first use, so that the first seconds of an event loop are no stall."""

ErrorT = TypeVar("ErrorT", bound=Exception)

_log = logging.getLogger(__name__)


def member_name() -> str:
    """Return a new name for this process among the members of the installation."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT, inside a running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


StopHook = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Registers a callback, for the block, that is called when the process must stop."""


class ShutdownGroup:
    """Stop several parts of one process together."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._stopped = False

    def stop(self) -> None:
        """Stop every part, and every part that starts later."""
        self._stopped = True
        for stop in list(self._callbacks):
            stop()

    @contextmanager
    def register(self, stop: Callable[[], None]) -> Iterator[None]:
        """Return the `StopHook` of one part."""
        self._callbacks.append(stop)
        try:
            if self._stopped:
                stop()
            yield
        finally:
            self._callbacks.remove(stop)


def run(
    kind: str,
    main: Callable[[Metrics], Coroutine[Any, Any, None]],
    settings: Settings,
    database_url: str | None = None,
) -> None:
    """Run a process, named `kind` in metrics: on uvloop if there is one, with its log on stderr.

    With `database_url` it first waits until PostgreSQL accepts writes, as long as the settings say.
    A TransientError or SettingsError says in one line why the process could not start.
    """
    log_to_stderr(settings.log_level)
    # Imported objects live as long as the process: the collector need not scan them every few
    # hundred messages.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_run_when_up(kind, main, settings, database_url))
    except BaseExceptionGroup as group:
        if (error := first_of(group, SettingsError) or first_transient(group)) is None:
            raise
        raise error from group


def first_transient(group: BaseExceptionGroup[BaseException]) -> TransientError | None:
    """Return the first error of a group that only has TransientErrors."""
    return first_of(group, TransientError)


def first_of(group: BaseExceptionGroup[BaseException], kind: type[ErrorT]) -> ErrorT | None:
    """Return the first error of a group that only has errors of this kind."""
    found, others = group.split(kind)
    if others is not None or found is None:
        return None
    error: BaseException = found
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, kind)
    return error


async def _run_when_up(
    kind: str,
    main: Callable[[Metrics], Coroutine[Any, Any, None]],
    settings: Settings,
    database_url: str | None,
) -> None:
    if database_url is None or await _wait_until_up(database_url, settings.start_wait_s):
        await _run_watched(kind, main, settings)


async def _wait_until_up(database_url: str, within_s: float) -> bool:
    """Wait for PostgreSQL. False: the process must stop."""
    stop = asyncio.Event()
    with stop_on_signals(stop.set):
        waiting = asyncio.create_task(wait_for_postgres(database_url, within_s=within_s))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
        finally:
            for task in (waiting, stopping):
                task.cancel()
            await asyncio.gather(waiting, stopping, return_exceptions=True)
    return not stop.is_set()


async def _run_watched(
    kind: str, main: Callable[[Metrics], Coroutine[Any, Any, None]], settings: Settings
) -> None:
    metrics = Metrics()
    longest_s = 0.0

    def report(stall: Stall) -> None:
        nonlocal longest_s
        _log.warning("the event loop stood still for %.2f s; it ran %s", stall.seconds, stall.cause)
        metrics.loop_stalls.labels(kind).inc()
        longest_s = max(longest_s, stall.seconds)
        metrics.loop_longest_stall.labels(kind).set(longest_s)

    metrics.loop_stalls.labels(kind)  # so that a scrape shows 0 before the first one
    with ExitStack() as stack:

        def end_startup() -> None:
            # Routes, caches and pools, too, live as long as the process.
            gc.freeze()
            if settings.loop_stall_ms:
                stack.enter_context(watch_loop(report, threshold_s=settings.loop_stall_ms / 1000))

        stack.callback(asyncio.get_running_loop().call_later(STARTUP_GRACE_S, end_startup).cancel)
        await main(metrics)
