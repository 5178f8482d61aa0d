"""Set up the one connection that replaces old partitions.

Its statements are short, and it never waits long for a lock.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import psycopg

from rooms.db.connection import Connection
from rooms.errors import StorageRefusedError

LOCK_TIMEOUT_MS: Final = 150
"""The longest wait for a lock behind which other statements queue. It is shorter than PostgreSQL's
deadlock_timeout (1 s), so that in a deadlock it is retention that gives up.
"""
RETENTION_LOCK: Final = 0x6B656570
_MAX_TRIES: Final = 50
_PAUSE_S: Final = 0.05
_MAX_LOCK_TRIES: Final = 3
_LOCK_PAUSE_S: Final = 0.5
"""The pause between two tries, so that other statements get on."""

PAGES_PER_STATEMENT: Final = 256
"""The pages of a table that one statement reads: 2 MiB."""
COUNT_PAGES: Final = "SELECT pg_relation_size(%s::regclass) / current_setting('block_size')::int8"

# Small plans, always the same. Each statement is a transaction of its own and sees one state of the
# database.
_SESSION_SETTINGS: Final = (
    "SET default_transaction_isolation = 'repeatable read'; "
    "SET max_parallel_workers_per_gather = 0; "
    "SET enable_hashjoin = off; SET enable_mergejoin = off"
)
LOCK_CONFLICTS: Final = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
"""Another transaction holds a lock that was needed; nothing was done."""

ShouldContinue = Callable[[], bool]


async def prepare_session(
    connection: Connection, *, lock_timeout_ms: int = LOCK_TIMEOUT_MS
) -> bool:
    """Make the connection the one that replaces partitions, until it ends; False: another is."""
    await connection.execute(_SESSION_SETTINGS)
    await connection.execute(
        "SELECT set_config('lock_timeout', %s, false)", (str(lock_timeout_ms),)
    )
    return bool(await fetch_value(connection, "SELECT pg_try_advisory_lock(%s)", RETENTION_LOCK))


async def fetch_value(connection: Connection, statement: str, *values: Any) -> Any:
    """Return the single value that a statement selects."""
    ((found,),) = await fetch_rows(connection, statement, *values)
    return found


async def fetch_rows(
    connection: Connection, statement: str, *values: Any, **named: Any
) -> list[tuple[Any, ...]]:
    """Return the rows that a statement selects."""
    return await (await connection.execute(statement, named or values or None)).fetchall()


async def retry_exclusive_lock(connection: Connection, statement: str) -> None:
    """Execute a statement whose lock others wait behind, with few tries and long pauses."""
    await retry_on_lock_timeout(connection, statement, tries=_MAX_LOCK_TRIES, pause_s=_LOCK_PAUSE_S)


async def retry_on_lock_timeout(
    connection: Connection,
    statement: str,
    parameters: Any = None,
    *,
    tries: int = _MAX_TRIES,
    pause_s: float = _PAUSE_S,
) -> None:
    """Execute a statement, again after a lock conflict. StorageRefusedError: the conflict lasts."""
    for attempt in range(1, tries + 1):
        try:
            await connection.execute(statement, parameters)
        except LOCK_CONFLICTS as exc:
            if attempt == tries:
                raise StorageRefusedError(f"another transaction holds a lock: {exc}") from exc
            await asyncio.sleep(pause_s)
        else:
            return
