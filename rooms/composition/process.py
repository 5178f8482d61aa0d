"""A process of ours: its event loop, its log, and how it is asked to end."""

import asyncio
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

from rooms.errors import TransientError
from rooms.log_lines import log_to_stderr
from rooms.loop_watchdog import Stall, watching
from rooms.metrics import Metrics
from rooms.settings import Settings
from rooms.storage.startup import wait_for_postgres

GC_THRESHOLD: Final = 50_000
STARTING_S: Final = 5.0
"""Modules are imported where they are first used: what an event loop does in its first seconds is no stall."""

_log = logging.getLogger(__name__)


def member_name() -> str:
    """A name for this process among the members of the installation, new each time."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when the process is asked to end. Inside a running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


Told = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Has something called, within the block, when the process is asked to end."""


class Stops:
    """What is to be stopped, where several things go on in one process."""

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []
        self._stopped = False

    def stop(self) -> None:
        """Stop all of it, and whatever begins from now on."""
        self._stopped = True
        for stop in list(self._stops):
            stop()

    @contextmanager
    def heard(self, stop: Callable[[], None]) -> Iterator[None]:
        """`Told` for one of them."""
        self._stops.append(stop)
        try:
            if self._stopped:
                stop()
            yield
        finally:
            self._stops.remove(stop)


def raise_file_limit(wanted: int) -> int:
    """Let this process have so many files and connections open, as far as an ordinary process may; return how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def run(
    kind: str,
    main: Callable[[Metrics], Coroutine[Any, Any, None]],
    settings: Settings,
    database_url: str | None = None,
) -> None:
    """Run a process of ours, named `kind` in metrics: on uvloop where there is one, watched, its log on standard error.

    With `database_url` it waits first, for as long as the settings say, until PostgreSQL takes writes. A TransientError
    says in one line why the process could not start.
    """
    log_to_stderr(settings.log_level)
    # What was imported lives as long as the process: the collector need not look at it for every few hundred messages.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_once_up(kind, main, settings, database_url))
    except BaseExceptionGroup as group:
        if (error := only_transient(group)) is None:
            raise
        raise error from group


def only_transient(group: BaseExceptionGroup[BaseException]) -> TransientError | None:
    """Return the first error of a group that has nothing but TransientErrors."""
    transient, others = group.split(TransientError)
    if others is not None or transient is None:
        return None
    error: BaseException = transient
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TransientError)
    return error


async def _once_up(
    kind: str,
    main: Callable[[Metrics], Coroutine[Any, Any, None]],
    settings: Settings,
    database_url: str | None,
) -> None:
    if database_url is None or await _is_up(database_url, settings.start_wait_s):
        await _watched(kind, main, settings)


async def _is_up(database_url: str, within_s: float) -> bool:
    """Wait for PostgreSQL. False: the process was asked to end."""
    stop = asyncio.Event()
    with stopped_by_signals(stop.set):
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


async def _watched(kind: str, main: Callable[[Metrics], Coroutine[Any, Any, None]], settings: Settings) -> None:
    metrics = Metrics()
    longest_s = 0.0

    def report(stall: Stall) -> None:
        nonlocal longest_s
        _log.warning("the event loop stood still for %.2f s; it ran %s", stall.seconds, stall.running)
        metrics.loop_stalls.labels(kind).inc()
        longest_s = max(longest_s, stall.seconds)
        metrics.loop_longest_stall.labels(kind).set(longest_s)

    metrics.loop_stalls.labels(kind)  # so that a scrape shows 0 before there is one
    with ExitStack() as stack:

        def watch() -> None:
            stack.enter_context(watching(report, threshold_s=settings.loop_stall_ms / 1000))

        if settings.loop_stall_ms:
            stack.callback(asyncio.get_running_loop().call_later(STARTING_S, watch).cancel)
        await main(metrics)
