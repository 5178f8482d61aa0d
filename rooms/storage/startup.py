"""Waiting at the start until PostgreSQL takes writes: it may be recovering from a crash, or another server may take over."""

import asyncio
import re
import time
from typing import Final

import psycopg

from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.storage.engine import connection_for

_RETRY_S: Final = 0.5
_WAITED: Final = "tries to start failed"
# "the database system is starting up", "… is in recovery mode", "… is shutting down", "… is not yet accepting connections".
_STARTING: Final = re.compile(r"the database system is ")
_RECOVERING: Final = "PostgreSQL is in recovery and takes no writes"


async def wait_for_postgres(url: str, *, within_s: float, only_starting: bool = False) -> None:
    """Return when PostgreSQL takes writes. StorageUnavailableError says why it did not for so long.

    `only_starting`: wait only for a server that says that it is starting; whatever else is wrong is the caller's to find.
    """
    deadline = time.monotonic() + within_s
    while (error := await _refusal(url)) is not None:
        if only_starting and not _STARTING.search(str(error)):
            return
        OUTAGES.failed(error, _WAITED)
        if time.monotonic() + _RETRY_S > deadline:
            raise StorageUnavailableError(f"PostgreSQL did not take writes within {within_s:g} s: {error}") from error
        await asyncio.sleep(_RETRY_S)
    OUTAGES.succeeded(_WAITED)


async def _refusal(url: str) -> StorageUnavailableError | StorageRefusedError | None:
    try:
        async with connection_for(url, name="rooms start") as connection:
            cursor = await connection.execute("SELECT pg_is_in_recovery()")
            row = await cursor.fetchone()
    except psycopg.OperationalError as exc:
        return StorageUnavailableError(str(exc).strip())
    return StorageRefusedError(_RECOVERING) if row is not None and row[0] else None
