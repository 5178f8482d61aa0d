"""The manners of the one connection that goes through the past: short statements, and no lock that is insisted on."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import psycopg

from rooms.errors import StorageRefusedError
from rooms.storage.engine import Connection

PATIENCE_MS: Final = 150
"""How long a lock is waited for that others wait behind meanwhile. Shorter than PostgreSQL's deadlock_timeout (1 s): of two
that wait for each other it is the retention that gives up.
"""
RETENTION_LOCK: Final = 0x6B656570
_TRIES: Final = 50
_PAUSE_S: Final = 0.05
_LOCK_TRIES: Final = 3
_LOCK_PAUSE_S: Final = 0.5
"""Between two of them, so that others get on."""

PAGES: Final = 256
"""Of a table, that one statement goes through: 2 MiB."""
PAGES_OF: Final = "SELECT pg_relation_size(%s::regclass) / current_setting('block_size')::int8"

# Small plans, always the same; a transaction of its own for each statement, which sees one state of the database.
_MANNERS: Final = (
    "SET default_transaction_isolation = 'repeatable read'; SET max_parallel_workers_per_gather = 0; "
    "SET enable_hashjoin = off; SET enable_mergejoin = off"
)
BUSY: Final = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
"""Somebody is in the way; nothing was done."""

GoOn = Callable[[], bool]


async def prepare(connection: Connection, *, patience_ms: int = PATIENCE_MS) -> bool:
    """Make the connection the one that goes through the past, until it ends; False: somebody else does."""
    await connection.execute(_MANNERS)
    await connection.execute("SELECT set_config('lock_timeout', %s, false)", (str(patience_ms),))
    return bool(await value(connection, "SELECT pg_try_advisory_lock(%s)", RETENTION_LOCK))


async def value(connection: Connection, statement: str, *values: Any) -> Any:
    """The one value that a statement gives."""
    ((found,),) = await rows(connection, statement, *values)
    return found


async def rows(connection: Connection, statement: str, *values: Any, **named: Any) -> list[tuple[Any, ...]]:
    """The rows that a statement gives."""
    return await (await connection.execute(statement, named or values or None)).fetchall()


async def locked(connection: Connection, statement: str) -> None:
    """`tried`, for a statement whose lock others wait behind."""
    await tried(connection, statement, tries=_LOCK_TRIES, pause_s=_LOCK_PAUSE_S)


async def tried(
    connection: Connection, statement: str, parameters: Any = None, *, tries: int = _TRIES, pause_s: float = _PAUSE_S
) -> None:
    """Execute a statement, again where somebody was in the way. StorageRefusedError: somebody still is."""
    for attempt in range(1, tries + 1):
        try:
            await connection.execute(statement, parameters)
        except BUSY as exc:
            if attempt == tries:
                raise StorageRefusedError(f"somebody is in the way: {exc}") from exc
            await asyncio.sleep(pause_s)
        else:
            return
