"""A kept connection that writes transitions and numbers their log rows.

The log has no global order; each writer counts its own steps without a gap, so that a missing one shows. The
count is only known for certain while every statement's end is known: a connection that breaks in mid-statement is
given up together with its writer id, and the next statement starts a new writer at 1.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, Format

from rooms.domain.place import EMBEDDED, Shape
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.storage.engine import Connection, connect

LIFE_LOCK: Final = 0x726F6F6D
"""First key of the session lock (second: the writer's id) that a writer holds while it lives."""

_REGISTER: Final = "INSERT INTO writers (kind, host, pid) VALUES (%s, %s, %s) RETURNING id"
# The hot statements find everything by primary key or by an index made for them. Plans made once, without looking at
# the parameters, and without the scans that a large batch would tempt the planner into, keep them that way.
_PLANS: Final = (
    "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off; "
    "SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off"
)
_LIVE: Final = "SELECT pg_advisory_lock(%s, %s)"
_ISOLATED: Final = "SET default_transaction_isolation = 'repeatable read'"
_ALONE: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_TRIES: Final = 100
"""Each of them failed because somebody else's statement committed, so everybody's work goes on; no end of it is a bug."""

# What PostgreSQL says when it will not take more right now, although the statement was right: nothing was written.
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


# It ends the session; whether before or after the commit, nobody can say.
_ENDS: Final = (psycopg.errors.AdminShutdown, psycopg.errors.CrashShutdown, psycopg.errors.IdleSessionTimeout)

_T = TypeVar("_T")


class _OutrunError(StorageRefusedError):
    """A row changed between the statement's look and its hand on it. Nothing was written."""


def _tells(row: tuple[Any, ...]) -> bool:
    # Nearly every row has something in its second column; only the others are looked at to their end.
    return len(row) > 1 and (row[1] is not None or any(column is not None for column in row[2:]))


class Writer:
    """One connection, one statement at a time. Use as `async with Writer(url, kind="worker") as writer`.

    A statement that waits `lock_timeout_ms` for somebody's lock is refused (0: it waits for ever). Without `durable`, a
    crash of PostgreSQL may take back what was committed in the last moment: for claims alone, which no crash outlives.
    `shape` says where the work rows go that its statements make.

    `isolated`: a statement sees one state of the database; where a row that it wants to change is not that row any
    more, it starts again. Without it, PostgreSQL looks at such a row again in mid-statement, and that recheck breaks
    PostgreSQL 18 (seen on 18.4, not on 16.14) where FOR UPDATE and a partitioned table that is looked up by another
    row's value stand together below the outermost query: the recheck's memory is freed and the look-up goes on using it.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: str,
        lock_timeout_ms: int = 0,
        durable: bool = True,
        shape: Shape = EMBEDDED,
        isolated: bool = True,
    ) -> None:
        self.shape = shape
        self._places = {"push": int(shape.push), "pull": int(shape.pull), "horizon": shape.horizon_ms}
        self._url = url
        self._kind = kind
        self._lock_timeout_ms = lock_timeout_ms
        self._durable = durable
        self._isolated = isolated
        self._prepared: dict[str, bytes] = {}
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

        The statement reads the writer's id and its next number from the parameters `writer` and `seq`, and the shape
        from `push`, `pull` (places of work that is due) and `horizon` (ms), all added here to a dict. Returns the rows without that column; a row whose other columns are all null only carried the count.

        StorageUnavailableError: the connection broke, the outcome is in doubt. StorageRefusedError: nothing was
        written and the statement may be tried later. Other psycopg errors are bugs and rise as they are.
        """
        return await self._run(statement, parameters, self._execute)

    async def run_isolated(self, statement: str, parameters: Sequence[Any] | dict[str, Any]) -> list[tuple[Any, ...]]:
        """`run` as an isolated writer does it, whichever this is."""
        return await self._run(statement, parameters, self._execute if self._isolated else self._execute_alone)

    async def _run(
        self,
        statement: str,
        parameters: Sequence[Any] | dict[str, Any],
        execute: Callable[[Connection, str, Sequence[Any] | dict[str, Any]], Awaitable[list[tuple[Any, ...]]]],
    ) -> list[tuple[Any, ...]]:
        async with self._turn:
            connection = self._connection
            if connection is None or connection.closed:
                connection = await self._open()
            if isinstance(parameters, dict):
                parameters = {**parameters, **self._places, "writer": self.id, "seq": self._next}
            rows = await self._told(connection, lambda: execute(connection, statement, parameters))
            self._next += int(rows[0][0])
            return [row[1:] for row in rows if _tells(row)]

    async def run_packed(self, statement: str, values: Sequence[bytes]) -> list[tuple[bytes | None, ...]]:
        """`run` without the driver's adaptation, for the statement that every publish waits for.

        Placeholders are `$1`, `$2`, …; each value is in its type's binary form. The writer's id (int4) and next number
        (int8) are added as the last two. Rows come as PostgreSQL's binary values. Errors are `run`'s.
        """
        async with self._turn:
            connection = self._connection
            if connection is None or connection.closed:
                connection = await self._open()
            ours = (self.id.to_bytes(4, "big"), self._next.to_bytes(8, "big"))
            result = await self._told(connection, lambda: self._exchange(connection, statement, (*values, *ours)))
            columns = range(1, result.nfields)
            self._next += int.from_bytes(result.get_value(0, 0) or b"", "big")
            rows = [tuple([result.get_value(row, column) for column in columns]) for row in range(result.ntuples)]
            return [row for row in rows if any(value is not None for value in row)]

    async def _execute(
        self, connection: Connection, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        cursor = connection.cursor(binary=True)
        await cursor.execute(statement, parameters, prepare=True)
        return await cursor.fetchall()

    async def _execute_alone(
        self, connection: Connection, statement: str, parameters: Sequence[Any] | dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        async with connection.transaction():
            await connection.execute(_ALONE)
            return await self._execute(connection, statement, parameters)

    async def _exchange(self, connection: Connection, statement: str, values: Sequence[bytes]) -> Any:
        pgconn = connection.pgconn
        name = self._prepared.get(statement)
        if name is None:
            name = f"packed_{len(self._prepared)}".encode()
            pgconn.send_prepare(name, statement.encode())
            self._check(await connection.wait(generators.execute(pgconn)))
            self._prepared[statement] = name
        pgconn.send_query_prepared(name, values, [Format.BINARY] * len(values), result_format=Format.BINARY)
        return self._check(await connection.wait(generators.execute(pgconn)))

    def _check(self, results: Sequence[Any]) -> Any:
        # The rows come before the commit does, so that an error may still follow them.
        for result in results:
            if result.status not in {ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK}:
                raise psycopg.errors.error_from_result(result)
        return results[0]

    async def _told(self, connection: Connection, work: Callable[[], Awaitable[_T]]) -> _T:
        for _ in range(_TRIES - 1):
            try:
                return await self._told_once(connection, work)
            except _OutrunError:
                continue
        return await self._told_once(connection, work)

    async def _told_once(self, connection: Connection, work: Callable[[], Awaitable[_T]]) -> _T:
        try:
            return await work()
        except psycopg.errors.SerializationFailure as exc:
            raise _OutrunError(str(exc)) from exc
        except _ENDS as exc:
            await self.close()
            raise StorageUnavailableError(str(exc)) from exc
        except _REFUSALS as exc:
            if connection.closed:
                raise StorageUnavailableError(str(exc)) from exc
            raise StorageRefusedError(str(exc)) from exc
        except (psycopg.OperationalError, psycopg.InterfaceError) as exc:
            await self.close()
            raise StorageUnavailableError(str(exc)) from exc
        except asyncio.CancelledError:
            await self.close()
            raise

    async def _open(self) -> Connection:
        self._prepared = {}
        try:
            async with AsyncExitStack() as stack:
                connection = await connect(self._url, name=f"rooms {self._kind}")
                stack.push_async_callback(connection.close)
                self.id = await self._register(connection)
                stack.pop_all()
        except _REFUSALS as exc:
            raise StorageRefusedError(str(exc)) from exc
        except psycopg.OperationalError as exc:
            raise StorageUnavailableError(str(exc)) from exc
        self._next, self._connection = 1, connection
        return connection

    async def _register(self, connection: Connection) -> int:
        await connection.execute(_PLANS)
        if self._isolated:
            await connection.execute(_ISOLATED)
        await connection.execute("SELECT set_config('lock_timeout', %s, false)", (str(self._lock_timeout_ms),))
        # The lock is taken before others can see the row: whoever sees a writer without its lock may call it dead.
        async with connection.transaction():
            cursor = await connection.execute(_REGISTER, (self._kind, self._host, os.getpid()))
            row = await cursor.fetchone()
            assert row is not None
            await connection.execute(_LIVE, (LIFE_LOCK, row[0]))
        if not self._durable:
            await connection.execute("SET synchronous_commit = off")
        return int(row[0])
