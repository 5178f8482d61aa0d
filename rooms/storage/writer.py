"""A kept connection that writes transitions and numbers their log rows.

`delivery_log` has no global order; each writer counts its own rows without a gap, so that a missing one shows. The
count is only known for certain while every statement's end is known: a connection that breaks in mid-statement is
given up together with its writer id, and the next statement starts a new writer at 1.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import psycopg

from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.storage.engine import Connection, connect

LIFE_LOCK: Final = 0x726F6F6D
"""First key of the session lock (second: the writer's id) that a writer holds while it lives."""

_REGISTER: Final = "INSERT INTO writers (kind, host, pid) VALUES (%s, %s, %s) RETURNING id"
# The hot statements find everything by primary key or by an index made for them. Plans made once, without looking at
# the parameters, and without the scans that a large batch would tempt the planner into, keep them that way.
_PLANS: Final = (
    "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_hashjoin = off; "
    "SET enable_mergejoin = off; SET jit = off"
)
_LIVE: Final = "SELECT pg_advisory_lock(%s, %s)"

# What PostgreSQL says when it will not take more right now, although the statement was right: nothing was written.
_REFUSALS: Final = (
    psycopg.errors.DiskFull,
    psycopg.errors.InsufficientResources,
    psycopg.errors.CheckViolation,  # "no partition of relation found for row"
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.OperatorIntervention,
    psycopg.errors.IoError,
)


class Writer:
    """One connection, one statement at a time. Use as `async with Writer(url, kind="worker") as writer`."""

    def __init__(self, url: str, *, kind: str) -> None:
        self._url = url
        self._kind = kind
        self._host = socket.gethostname()
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._next = 1
        self.id = 0
        """This writer's number; changes when the connection was lost."""

    @property
    def host(self) -> str:
        """The machine this writer runs on, as the log names it."""
        return self._host

    async def __aenter__(self) -> Self:
        async with self._turn:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let the connection, and with it the proof of life, go."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def run(self, statement: str, parameters: Sequence[Any] | dict[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement that commits by itself; each row's first column is how many log rows it wrote in all.

        The statement reads the writer's id and its next number from the parameters `writer` and `seq` (added here to
        a dict). Returns the rows without that column; a row whose other columns are all null only carried the count.

        StorageUnavailableError: the connection broke, the outcome is in doubt. StorageRefusedError: nothing was
        written and the statement may be tried later. Other psycopg errors are bugs and rise as they are.
        """
        async with self._turn:
            connection = self._connection
            if connection is None or connection.closed:
                connection = await self._open()
            if isinstance(parameters, dict):
                parameters = {**parameters, "writer": self.id, "seq": self._next}
            try:
                cursor = connection.cursor(binary=True)
                await cursor.execute(statement, parameters, prepare=True)
                rows = await cursor.fetchall()
            except _REFUSALS as exc:
                if connection.closed:
                    raise StorageUnavailableError(str(exc)) from exc
                raise StorageRefusedError(str(exc)) from exc
            except psycopg.OperationalError as exc:
                await self.close()
                raise StorageUnavailableError(str(exc)) from exc
            except asyncio.CancelledError:
                await self.close()
                raise
            self._next += int(rows[0][0])
            return [row[1:] for row in rows if any(column is not None for column in row[1:])]

    async def _open(self) -> Connection:
        try:
            connection = await connect(self._url, name=f"rooms {self._kind}")
            await connection.execute(_PLANS)
            # The lock is taken before others can see the row: whoever sees a writer without its lock may call it dead.
            async with connection.transaction():
                cursor = await connection.execute(_REGISTER, (self._kind, self._host, os.getpid()))
                row = await cursor.fetchone()
                assert row is not None
                await connection.execute(_LIVE, (LIFE_LOCK, row[0]))
        except psycopg.OperationalError as exc:
            raise StorageUnavailableError(str(exc)) from exc
        self.id, self._next, self._connection = row[0], 1, connection
        return connection
