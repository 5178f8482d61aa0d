"""The registration of a process: which stores it runs on stands in the database while it runs.

A process that runs on other stores than the rest is warned about and not refused: an installation changes its broker while
it runs, process by process, and the duty `upkeep/changeover` moves what stands in the places of the former one.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import psycopg

from rooms.backends import ProcessRecord, backends_of, describe, differences, running
from rooms.composition.process import member_name
from rooms.settings import Settings
from rooms.storage.engine import connection_for
from rooms.storage.processes import MISSING, confirm, leave, read_processes
from rooms.upkeep.turn import first

_log = logging.getLogger(__name__)

CONFIRM_S: Final = 15.0
"""Seconds between two confirmations: a third of what a process counts as running for."""
_RETRY_S: Final = 2.0
_LEAVE_S: Final = 2.0
_EXAMPLES: Final = 3


@asynccontextmanager
async def registered(
    settings: Settings, database_url: str, kind: str, *, every_s: float = CONFIRM_S
) -> AsyncIterator[None]:
    """Keep this process on record within the block. PostgreSQL may come and go meanwhile."""
    registration = _Registration(settings, database_url, kind)
    stop = asyncio.Event()
    task = asyncio.create_task(registration.keep(every_s, stop))
    try:
        yield
    finally:
        stop.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await registration.end()


class _Registration:
    def __init__(self, settings: Settings, database_url: str, kind: str) -> None:
        self._url = database_url
        self._entered = False
        self._reported: frozenset[str] = frozenset()
        self._process = ProcessRecord(
            name=member_name(),
            kind=kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            seen_s=0.0,
            running=True,
            backends=backends_of(settings),
        )

    async def keep(self, every_s: float, stop: asyncio.Event) -> None:
        while not stop.is_set():
            pause_s = every_s if await self._confirm() else min(_RETRY_S, every_s)
            await first(stop.wait(), within_s=pause_s)

    async def _confirm(self) -> bool:
        try:
            async with connection_for(self._url, name="rooms registration") as connection:
                await confirm(connection, self._process)
                self._entered = True
                self._compare(running(await read_processes(connection)))
        except MISSING:
            return True  # a later migration brings the table; nothing depends on it in a hurry
        except psycopg.Error as exc:
            _log.debug("this process could not be put on record: %s", exc)
            return False
        return True

    def _compare(self, others: Sequence[ProcessRecord]) -> None:
        other = [one for one in others if differences(self._process.backends, one.backends)]
        found = frozenset(describe(differences(self._process.backends, one.backends)) for one in other)
        if found and found != self._reported:
            labels = ", ".join(one.label for one in other[:_EXAMPLES])
            _log.warning(
                "this process (%s) and %d others (%s) run on different stores: %s. Restart those with the former settings",
                self._process.kind,
                len(other),
                labels,
                " | ".join(sorted(found)),
            )
        self._reported = found

    async def end(self) -> None:
        if not self._entered:
            return
        # The row of a process that could not say so ends by itself.
        with contextlib.suppress(psycopg.Error, TimeoutError):
            async with asyncio.timeout(_LEAVE_S), connection_for(self._url, name="rooms registration") as connection:
                await leave(connection, self._process.name)
