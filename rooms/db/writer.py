"""Write state transitions on one connection, and number their log rows.

The log has no global order. Each writer numbers its own rows without a gap, so that a missing row
shows. The count is only certain while the end of every statement is known. A connection that breaks
in mid-statement is given up together with its writer id, and the next statement starts a new writer
at 1.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any, Final, Self, TypeVar

import psycopg
from psycopg.pq.abc import PGresult

from rooms.db.connection import CONNECTION_LOST, SESSION_ENDED, Connection, connect
from rooms.db.prepared import PreparedStatements
from rooms.db.statement_parts import session_lives
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from rooms.errors import (
    LockTimeoutError,
    QueryTimeoutError,
    StorageRefusedError,
    StorageUnavailableError,
)

LIVENESS_LOCK: Final = 0x726F6F6D
"""The first key of the session lock that a writer holds while it lives; the second key is the
writer's id.
"""

PUBLISHER: Final = "publisher"
"""The kind of the writers of publishes."""
MAX_DEAD_WRITERS: Final = 500

_REGISTER: Final = (
    "INSERT INTO writers (kind, host, pid, version) VALUES (%s, %s, %s, %s) RETURNING id"
)
# The hot statements find everything by primary key or by an index made for them. Generic plans,
# without the scans that a large batch would make attractive to the planner, keep them that way.
_PLANNER_SETTINGS: Final = (
    "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; "
    "SET enable_bitmapscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; "
    "SET jit = off"
)
_TAKE_LIVENESS_LOCK: Final = "SELECT pg_advisory_lock(%s, %s)"
_ISOLATED_SESSION: Final = "SET default_transaction_isolation = 'repeatable read'"
_ISOLATED_TRANSACTION: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_MAX_TRIES: Final = 100
"""Each try failed because another statement committed, so work goes on all the same. To need more
tries is a bug.
"""

_TOO_LONG: Final = (
    "the change took too long and was stopped, and nothing was written: try again, as another"
    " change may have been in its way"
)

# PostgreSQL raises these when it cannot take more right now, although the statement was right:
# nothing was written.
_REFUSALS: Final = (
    psycopg.errors.DiskFull,
    psycopg.errors.InsufficientResources,
    psycopg.errors.OutOfMemory,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.CheckViolation,  # "no partition of relation found for row"
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.OperatorIntervention,
    psycopg.errors.IoError,
)


_T = TypeVar("_T")


class _SerializationConflictError(StorageRefusedError):
    """Report that a row changed between a statement's snapshot and its lock: nothing is written."""


_DEAD_WRITERS: Final = f"""
SELECT 0, w.id FROM writers w
WHERE (%(kind)s::text IS NULL OR w.kind = %(kind)s::text) AND NOT {session_lives("w.id")}
UNION ALL SELECT 0, NULL ORDER BY 2 DESC NULLS LAST LIMIT %(limit)s::int4
"""  # noqa: S608 - constants of this package


def _has_values(row: tuple[Any, ...]) -> bool:
    # Nearly every row has a value in its second column; only the others are read to their end.
    return len(row) > 1 and (row[1] is not None or any(column is not None for column in row[2:]))


class LogWriter:
    """Run one statement at a time on one connection.

    Use as `async with LogWriter(url, kind="worker") as writer`.

    A statement that waits `lock_timeout_ms` for a lock is refused (0: it waits for ever), and so is
    one that takes `statement_timeout_s`. One that meets others starts again for `max_conflicts_s`
    at most, with its first try (None: a hundred times). Without `durable`, a crash of PostgreSQL
    may take back what was committed in the last moment: only for claims, which no crash outlives.
    `broker_mode` decides where the work rows go that its statements make.

    `isolated`: a statement sees one state of the database. If a row that it wants to change was
    changed meanwhile, the statement starts again. Without it, PostgreSQL reads such a row again in
    mid-statement. That recheck breaks PostgreSQL 18 (seen on 18.4, not on 16.14). It needs FOR
    UPDATE below the outermost query, together with a look-up in a partitioned table by another
    row's value: the recheck's memory is freed and the look-up goes on using it.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: str,
        lock_timeout_ms: int = 0,
        statement_timeout_s: int | None = None,
        max_conflicts_s: float | None = None,
        durable: bool = True,
        broker_mode: BrokerMode = POSTGRES_MODE,
        isolated: bool = True,
    ) -> None:
        self.broker_mode = broker_mode
        self._mode_parameters = {
            "push": int(broker_mode.push),
            "pull": int(broker_mode.pull),
            "lookahead": broker_mode.lookahead_ms,
        }
        self._url = url
        self._kind = kind
        self._lock_timeout_ms = lock_timeout_ms
        self._statement_timeout_s = statement_timeout_s
        self._max_conflicts_s = max_conflicts_s
        self._durable = durable
        self._isolated = isolated
        self._host = socket.gethostname()
        self._version = version("rooms")
        self._connection: Connection | None = None
        self._prepared: PreparedStatements | None = None
        self._lock = asyncio.Lock()
        self._next_seq = 1
        self.id = 0
        """This writer's number; it changes when the connection was lost."""

    @property
    def is_connected(self) -> bool:
        """Return whether the session still lives, as far as is known, and with it its claims."""
        return self._connection is not None and not self._connection.closed

    @property
    def host(self) -> str:
        """Return the machine this writer runs on, as the log names it."""
        return self._host

    async def __aenter__(self) -> Self:
        async with self._lock:
            await self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, which ends the proof that this writer lives."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def run(
        self, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Run a statement that commits by itself, and return its rows without their first column.

        The first columns add up to the number of log rows that the statement wrote. A row whose
        other columns are all null only carries that count, and is left out. The statement gets the
        writer's id and next number as the parameters `writer` and `seq`. The broker mode is in
        `push` and `pull` (work locations of rows that are due) and `lookahead` (ms). All of them
        are added here if `parameters` is a dict.

        StorageUnavailableError: the connection broke, the outcome is in doubt. StorageRefusedError:
        nothing was written, and the statement may be tried later. Other psycopg errors are bugs and
        are not translated.
        """
        rows = await self._run(statement, parameters, self._execute)
        return [row[1:] for row in rows if _has_values(row)]

    async def run_whole(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement as `run` does, and return all its rows with their first column.

        For many rows that saves a copy of each.
        """
        return await self._run(statement, parameters, self._execute)

    async def run_isolated(
        self, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Run a statement as `run` of an isolated writer does, even if this one is not isolated."""
        execute = self._execute if self._isolated else self._execute_isolated
        rows = await self._run(statement, parameters, execute)
        return [row[1:] for row in rows if _has_values(row)]

    async def _run(
        self,
        statement: str,
        parameters: Sequence[Any] | dict[str, Any],
        execute: Callable[
            [Connection, str, Sequence[Any] | dict[str, Any]], Awaitable[list[tuple[Any, ...]]]
        ],
    ) -> list[tuple[Any, ...]]:
        async with self._lock:
            connection = self._connection
            if connection is None or connection.closed:
                connection = await self._open()
            if isinstance(parameters, dict):
                parameters = {
                    **parameters,
                    **self._mode_parameters,
                    "writer": self.id,
                    "seq": self._next_seq,
                }
            rows = await self._retry_on_conflict(
                connection, lambda: execute(connection, statement, parameters)
            )
            self._next_seq += int(rows[0][0])
            return rows

    async def run_packed(
        self, statement: str, values: Sequence[bytes]
    ) -> list[tuple[bytes | None, ...]]:
        """Run a statement as `run` does, but without the driver's adaptation.

        It is for the statement that every publish waits for.

        Placeholders are `$1`, `$2`, …; each value is in the binary form of its type. The writer's
        id (int4) and next number (int8) are added as the last two. Rows come as PostgreSQL's binary
        values. Errors are those of `run`.
        """
        async with self._lock:
            connection = self._connection
            if connection is None or connection.closed:
                connection = await self._open()
            own = (self.id.to_bytes(4, "big"), self._next_seq.to_bytes(8, "big"))
            result = await self._retry_on_conflict(
                connection, lambda: self._execute_packed(connection, statement, (*values, *own))
            )
            columns = range(1, result.nfields)
            self._next_seq += int.from_bytes(result.get_value(0, 0) or b"", "big")
            rows = [
                tuple([result.get_value(row, column) for column in columns])
                for row in range(result.ntuples)
            ]
            return [row for row in rows if any(value is not None for value in row)]

    async def _execute(
        self, connection: Connection, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        cursor = connection.cursor(binary=True)
        await cursor.execute(statement, parameters, prepare=True)
        return await cursor.fetchall()

    async def _execute_isolated(
        self, connection: Connection, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        async with connection.transaction():
            await connection.execute(_ISOLATED_TRANSACTION)
            return await self._execute(connection, statement, parameters)

    async def _execute_packed(
        self, connection: Connection, statement: str, values: Sequence[bytes]
    ) -> PGresult:
        if self._prepared is None:
            self._prepared = PreparedStatements(connection)
        return await self._prepared.run(statement, values)

    async def _retry_on_conflict(
        self, connection: Connection, work: Callable[[], Awaitable[_T]]
    ) -> _T:
        now_s = asyncio.get_running_loop().time
        first_s = now_s()
        for _ in range(_MAX_TRIES - 1):
            try:
                return await self._translate_errors(connection, work)
            except _SerializationConflictError:
                if self._max_conflicts_s is None:
                    continue
                if now_s() - first_s >= self._max_conflicts_s:
                    raise
        return await self._translate_errors(connection, work)

    async def _translate_errors(
        self, connection: Connection, work: Callable[[], Awaitable[_T]]
    ) -> _T:
        try:
            return await work()
        except psycopg.errors.SerializationFailure as exc:
            raise _SerializationConflictError(str(exc)) from exc
        except SESSION_ENDED as exc:
            await self.close()
            raise StorageUnavailableError(str(exc)) from exc
        except _REFUSALS as exc:
            if connection.closed:
                raise StorageUnavailableError(str(exc)) from exc
            if isinstance(exc, psycopg.errors.LockNotAvailable):
                raise LockTimeoutError(str(exc)) from exc
            if self._statement_timeout_s and isinstance(exc, psycopg.errors.QueryCanceled):
                raise QueryTimeoutError(_TOO_LONG) from exc
            raise StorageRefusedError(str(exc)) from exc
        except (psycopg.OperationalError, psycopg.InterfaceError) as exc:
            await self.close()
            raise StorageUnavailableError(str(exc)) from exc
        except asyncio.CancelledError:
            await self.close()
            raise

    async def _open(self) -> Connection:
        self._prepared = None
        try:
            async with AsyncExitStack() as stack:
                connection = await connect(self._url, name=session_name(self._kind))
                stack.push_async_callback(connection.close)
                self.id = await self._register(connection)
                stack.pop_all()
        except _REFUSALS as exc:
            raise StorageRefusedError(str(exc)) from exc
        except CONNECTION_LOST as exc:
            raise StorageUnavailableError(str(exc)) from exc
        self._next_seq, self._connection = 1, connection
        return connection

    async def _register(self, connection: Connection) -> int:
        await connection.execute(_PLANNER_SETTINGS)
        if self._isolated:
            await connection.execute(_ISOLATED_SESSION)
        await connection.execute(
            "SELECT set_config('lock_timeout', %s, false)", (str(self._lock_timeout_ms),)
        )
        if self._statement_timeout_s is not None:
            await connection.execute(
                "SELECT set_config('statement_timeout', %s, false)",
                (f"{self._statement_timeout_s}s",),
            )
        # The lock is taken before others can see the row: a writer that is seen without its lock
        # may be called dead.
        async with connection.transaction():
            cursor = await connection.execute(
                _REGISTER, (self._kind, self._host, os.getpid(), self._version)
            )
            row = await cursor.fetchone()
            assert row is not None
            await connection.execute(_TAKE_LIVENESS_LOCK, (LIVENESS_LOCK, row[0]))
        if not self._durable:
            await connection.execute("SET synchronous_commit = off")
        return int(row[0])


def session_name(kind: str) -> str:
    """Return the name of the sessions of writers of a kind."""
    return f"rooms {kind}"


async def dead_writers(
    writer: LogWriter, *, kind: str | None = None, limit: int = MAX_DEAD_WRITERS
) -> list[int]:
    """Return writers (of one kind) whose session is gone, the newest first.

    Their claims do not count. Errors: those of `LogWriter.run`.
    """
    rows = await writer.run(_DEAD_WRITERS, {"kind": kind, "limit": limit, "life": LIVENESS_LOCK})
    return [row[0] for row in rows]
