"""Whether PostgreSQL takes writes: a full disk goes on answering reads.

The newest outcome of real commits says it, as long as it is fresh and good. Otherwise a small write is tried, by at most one
request at a time and not more often than every few seconds. It needs a new block of the file system, and not only room in a
file that is there: the table is emptied into a new file first.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import psycopg
from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.errors import StorageRefusedError, TransientError
from rooms.storage.transactions import transaction

_log = logging.getLogger(__name__)

FRESH_S: Final = 5.0
"""How long a commit, or a write that was tried, proves that writes work."""
AGAIN_S: Final = 2.0
"""How soon a write is tried again after one that failed, so that recovery is seen."""
_TIMEOUT_S: Final = 2.0

# A backup holds a lock on every table for as long as it runs: then only the row is written.
_LOCK: Final = text("LOCK TABLE write_probes IN ACCESS EXCLUSIVE MODE NOWAIT")
_EMPTY: Final = text("TRUNCATE write_probes")
_WRITE: Final = text("INSERT INTO write_probes (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET at = now()")


class WriteCheck:
    """Remembers the newest outcome of commits in this process, and tries a write where there was none."""

    def __init__(self, engine: AsyncEngine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._turn = asyncio.Lock()
        self._works = True
        self._proved_until = float("-inf")
        self._not_before = float("-inf")

    def committed(self) -> None:
        """Note that a real write was committed."""
        self._proved_until = self._monotonic() + FRESH_S

    def failed(self) -> None:
        """Note that a real write was not: no earlier outcome proves anything any more."""
        self._proved_until = float("-inf")

    async def works(self) -> bool:
        """Return whether writes are taken, as far as the last few seconds show."""
        if self._monotonic() < self._proved_until:
            return True
        async with self._turn:
            if self._monotonic() >= self._proved_until and self._monotonic() >= self._not_before:
                await self._try()
            return self._monotonic() < self._proved_until or self._works

    async def _try(self) -> None:
        works, why = True, ""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._write()
        except (TransientError, TimeoutError, sqlalchemy_errors.DBAPIError) as exc:
            works, why = False, str(exc) or "it took too long"
        if works != self._works:
            if works:
                _log.info("PostgreSQL takes writes again")
            else:
                _log.warning("PostgreSQL takes no writes: %s", why)
        self._works = works
        self._not_before = self._monotonic() + (FRESH_S if works else AGAIN_S)

    async def _write(self) -> None:
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(_LOCK)
                await connection.execute(_EMPTY)
                await connection.execute(_WRITE)
        except StorageRefusedError as exc:
            if not _locked(exc):
                raise
            async with transaction(self._engine) as connection:
                await connection.execute(_WRITE)


def _locked(error: StorageRefusedError) -> bool:
    cause = error.__cause__
    return isinstance(cause, sqlalchemy_errors.DBAPIError) and isinstance(cause.orig, psycopg.errors.LockNotAvailable)
