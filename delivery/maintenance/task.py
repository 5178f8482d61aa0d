"""Run a periodic task for the length of a term.

A term is the time in which a partition of the election is assigned to this process under one epoch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import sqlalchemy.exc

from rooms.db.connection import CONNECTION_LOST
from rooms.errors import TransientError
from rooms.outages import OUTAGES
from rooms.ports import Membership

_log = logging.getLogger(__name__)

MIN_WAIT_S: Final = 0.25
MAX_WAIT_S: Final = 5.0
_UNAVAILABLE: Final = (TransientError, *CONNECTION_LOST, sqlalchemy.exc.OperationalError)

ShouldContinue = Callable[[], bool]
"""Return whether the term lasts; a task asks before each statement."""


class PeriodicTask(Protocol):
    """Do one piece of maintenance, again and again."""

    @property
    def name(self) -> str:
        """Return the name that the log uses."""
        ...

    async def run(self, should_continue: ShouldContinue) -> None:
        """Do what is due now. The task is run again whatever this raises; completed work stays."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionTask:
    """Run a function as a `PeriodicTask` without state."""

    name: str
    function: Callable[[ShouldContinue], Awaitable[None]]

    async def run(self, should_continue: ShouldContinue) -> None:
        """Call the function."""
        await self.function(should_continue)


class RunWindow(Protocol):
    """Define a time in which a task is run."""

    def is_current(self) -> bool:
        """Return whether there is time for another statement; to be asked before each."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait so long, or until the window ends."""
        ...


class Always:
    """Last until `stop`, for a task that checks by itself which partitions it has."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def is_current(self) -> bool:
        """Return whether `stop` is not set."""
        return not self._stop.is_set()

    async def sleep(self, seconds: float) -> None:
        """Wait so long, or until `stop` is set."""
        await wait_first(self._stop.wait(), timeout_s=seconds)


class Term:
    """Last until the epoch of its partition ends, or until `stop`.

    An async context manager: one task watches for the end, instead of two for each sleep of a task
    that runs each second.
    """

    def __init__(
        self, membership: Membership, partition: str, epoch: int, stop: asyncio.Event
    ) -> None:
        self._membership = membership
        self._partition = partition
        self.epoch = epoch
        self._stop = stop

    async def __aenter__(self) -> Self:
        self._ended = asyncio.create_task(self._wait_ended())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._ended.cancel()
        await asyncio.wait([self._ended])

    def is_current(self) -> bool:
        """Return whether there is time for another statement; to be asked before each."""
        return not self._stop.is_set() and self._membership.epoch(self._partition) == self.epoch

    async def sleep(self, seconds: float) -> None:
        """Wait so long, or until the term ends."""
        if not self.is_current() or seconds <= 0:
            return
        # The term lasts, though it had ended: the store was away until the deadline, and came back.
        if self._ended.done():
            self._ended.result()
            self._ended = asyncio.create_task(self._wait_ended())
        await asyncio.wait([self._ended], timeout=seconds)

    async def _wait_ended(self) -> None:
        while self.is_current():
            await wait_first(self._membership.wait_changed(), self._stop.wait())


async def next_term(membership: Membership, partition: str, stop: asyncio.Event) -> Term | None:
    """Wait for the next term of a partition and return it; None where `stop` was set first."""
    while not stop.is_set():
        epoch = membership.epoch(partition)
        if epoch is not None:
            return Term(membership, partition, epoch, stop)
        await wait_first(membership.wait_changed(), stop.wait())
    return None


async def wait_first(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
    """Wait until one of these ends, or for `timeout_s`. An error of the one that ends is raised."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


async def run_periodically(task: PeriodicTask, *, every_s: float, window: RunWindow) -> None:
    """Run a task until the window ends. A failing task backs off, and is logged once an outage."""
    failures, broken, outage = 0, False, f"runs of {task.name} failed"
    while window.is_current():
        try:
            await task.run(window.is_current)
        except Exception as exc:  # noqa: BLE001 - the other tasks go on, and a new process would fail the same way
            failures += 1
            unavailable = isinstance(exc, _UNAVAILABLE)
            if unavailable:
                OUTAGES.record_failure(exc, outage)
            elif not broken:
                _log.warning("%s failed, retrying: %s", task.name, exc, exc_info=exc)
            broken = broken or not unavailable
            await window.sleep(min(MAX_WAIT_S, max(every_s, MIN_WAIT_S) * 2 ** min(failures, 10)))
            continue
        OUTAGES.record_success(outage)  # a failure may have been of an earlier term
        if broken:
            _log.warning("%s succeeded after %d failures", task.name, failures)
        failures, broken = 0, False
        await window.sleep(every_s)
