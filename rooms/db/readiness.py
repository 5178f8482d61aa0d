"""Check that PostgreSQL takes writes: with a full disk it still answers reads.

The newest outcome of real commits answers, while it is fresh and good. Otherwise one small write is
tried, by one request at a time and not more often than every few seconds. The write needs a new
block of the file system, not only space in an existing file: the table is emptied into a new file
first.

At the start a process waits until PostgreSQL takes writes: it may be recovering from a crash, or
failing over.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Final

import psycopg
from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import CONNECTION_LOST, open_connection, transaction
from rooms.errors import StorageRefusedError, StorageUnavailableError, TransientError
from rooms.outages import OUTAGES, Dependency

_log = logging.getLogger(__name__)

PROOF_S: Final = 5.0
"""The time for which a commit, or a test write, proves that writes work."""
RETRY_S: Final = 2.0
"""The time from a failed write to the next test write, so that recovery is noticed."""
_TIMEOUT_S: Final = 2.0

_START_RETRY_S: Final = 0.5
_START_FAILED: Final = "tries to start failed"
# "the database system is starting up", "… is in recovery mode", "… is shutting down", "… is not yet
# accepting connections".
_STARTING: Final = re.compile(r"the database system is ")
_RECOVERING: Final = "PostgreSQL is in recovery and takes no writes"

# A backup locks every table for as long as it runs: then only the row is written.
_LOCK: Final = text("LOCK TABLE write_probes IN ACCESS EXCLUSIVE MODE NOWAIT")
_EMPTY: Final = text("TRUNCATE write_probes")
_WRITE: Final = text(
    "INSERT INTO write_probes (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET at = now()"
)


class WriteCheck:
    """Keep the newest outcome of commits in this process, and try a write when there is none."""

    def __init__(self, engine: AsyncEngine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._writable = True
        self._proved_until = float("-inf")
        self._next_probe_s = float("-inf")

    def committed(self) -> None:
        """Note that a real write was committed."""
        self._proved_until = self._monotonic() + PROOF_S

    def failed(self) -> None:
        """Note that a real write failed: no earlier outcome proves anything now."""
        self._proved_until = float("-inf")

    async def is_writable(self) -> bool:
        """Return whether writes are taken, as far as the last few seconds show."""
        if self._monotonic() < self._proved_until:
            return True
        async with self._lock:
            if self._monotonic() >= self._proved_until and self._monotonic() >= self._next_probe_s:
                await self._probe()
            return self._monotonic() < self._proved_until or self._writable

    async def _probe(self) -> None:
        works, reason = True, ""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._write()
        except (TransientError, TimeoutError, sqlalchemy_errors.DBAPIError) as exc:
            works, reason = False, str(exc) or "the write took too long"
        else:
            OUTAGES.record_answer(Dependency.POSTGRESQL)
        if works != self._writable:
            if works:
                _log.info("PostgreSQL takes writes again")
            else:
                _log.warning("PostgreSQL takes no writes: %s", reason)
        self._writable = works
        self._next_probe_s = self._monotonic() + (PROOF_S if works else RETRY_S)

    async def _write(self) -> None:
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(_LOCK)
                await connection.execute(_EMPTY)
                await connection.execute(_WRITE)
        except StorageRefusedError as exc:
            if not _is_lock_conflict(exc):
                raise
            async with transaction(self._engine) as connection:
                await connection.execute(_WRITE)


def _is_lock_conflict(error: StorageRefusedError) -> bool:
    cause = error.__cause__
    return isinstance(cause, sqlalchemy_errors.DBAPIError) and isinstance(
        cause.orig, psycopg.errors.LockNotAvailable
    )


async def wait_for_postgres(url: str, *, within_s: float, only_starting: bool = False) -> None:
    """Return when PostgreSQL takes writes.

    StorageUnavailableError gives the reason if it did not within `within_s`.

    `only_starting`: wait only for a server that reports that it is starting. Any other error is
    left for the caller to find.
    """
    deadline = time.monotonic() + within_s
    while (error := await _readiness_error(url)) is not None:
        if only_starting and not _STARTING.search(str(error)):
            return
        OUTAGES.record_failure(error, _START_FAILED)
        if time.monotonic() + _START_RETRY_S > deadline:
            raise StorageUnavailableError(
                f"PostgreSQL did not take writes within {within_s:g} s: {error}"
            ) from error
        await asyncio.sleep(_START_RETRY_S)
    OUTAGES.record_success(_START_FAILED)


async def _readiness_error(url: str) -> StorageUnavailableError | StorageRefusedError | None:
    try:
        async with open_connection(url, name="rooms start") as connection:
            cursor = await connection.execute("SELECT pg_is_in_recovery()")
            row = await cursor.fetchone()
    except CONNECTION_LOST as exc:
        return StorageUnavailableError(str(exc).strip())
    return StorageRefusedError(_RECOVERING) if row is not None and row[0] else None
