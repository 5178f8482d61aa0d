"""Transactions for everyday queries; what PostgreSQL or the way to it breaks comes out as the house's own errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import psycopg
from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.errors import StorageRefusedError, StorageUnavailableError

_REFUSALS: Final = (
    psycopg.errors.DiskFull,
    psycopg.errors.InsufficientResources,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.IoError,
)


@asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """One transaction, committed at the end of the block, rolled back where the block raises.

    StorageUnavailableError: the connection could not be made or broke. StorageRefusedError: nothing was written.
    """
    try:
        async with engine.begin() as connection:
            yield connection
    except sqlalchemy_errors.DBAPIError as exc:
        if isinstance(exc.orig, _REFUSALS):
            raise StorageRefusedError(str(exc.orig)) from exc
        if isinstance(exc.orig, psycopg.OperationalError | psycopg.InterfaceError):
            raise StorageUnavailableError(str(exc.orig)) from exc
        raise
    except sqlalchemy_errors.TimeoutError as exc:
        raise StorageRefusedError("every connection to PostgreSQL is busy") from exc
