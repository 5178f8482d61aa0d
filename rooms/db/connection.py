"""Open connections: SQLAlchemy's pool for everyday queries, autocommit ones for hot statements.

`transaction`, `autocommit` and `snapshot` run everyday queries and translate PostgreSQL's errors
into those of `rooms.errors`.

The organisations of one process share the connections for everyday queries. Without shares, one
organisation's slow queries would hold every connection of the pool, and all others, readiness and
the look-up of keys would wait behind them.
"""

import asyncio
import contextlib
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Final, Self, TypeVar
from weakref import WeakValueDictionary

import psycopg
from psycopg.rows import TupleRow
from psycopg.types.string import TextLoader
from sqlalchemy import event, text
from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from rooms.db.session_settings import (
    CUSTOM_PLANS,
    IDLE_TRANSACTIONS,
    SERVER_TIMEOUTS,
    apply_settings_in_pool,
    settings_statement,
)
from rooms.domain.ids import OrganisationId
from rooms.errors import (
    QueryTimeoutError,
    RateLimitedError,
    StorageRefusedError,
    StorageUnavailableError,
)
from rooms.postgres_urls import format_postgres_url, parse_postgres_url

DRIVER: Final = "postgresql+psycopg://"
"""Engines take everything else as arguments of the driver."""

# A server that vanished silently (its machine or the network) is given up after about 15 s. Options
# in the URL win.
_TIMEOUTS: Final = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}

LONG_PAUSE: Final = text("SET LOCAL idle_in_transaction_session_timeout = '2min'")
"""Statement of a transaction that waits for another store between its statements."""

_READ_ONLY: Final = text("SET TRANSACTION READ ONLY")
_WAS_USED: Final = "was used"
"""The key in the pool's record of a connection; the pool forgets it with the connection."""

Connection = psycopg.AsyncConnection[TupleRow]
Result = TypeVar("Result")
SHARE_WAIT_S: Final = 10.0
"""Seconds for which a query waits for a connection of its organisation's share."""
MAX_SHARED: Final = 16
"""Connections for all shares together: readiness, keys and routes keep the others."""
MAX_TRIES: Final = 5
"""Times that a part of an answer is read: less than a minute, after which proxies give up."""


def psycopg_url(url: str) -> str:
    """Return `postgresql://…` as libpq reads it."""
    return format_postgres_url(parse_postgres_url(url))


def connect_arguments(url: str, *, name: str) -> dict[str, Any]:
    """Return the driver's arguments for a session, and what the URL asks for."""
    return {"application_name": name, **_TIMEOUTS, **parse_postgres_url(url)}


def open_engine(
    url: str,
    *,
    name: str = "rooms queries",
    size: int = 10,
    statement_timeout_s: int | None = None,
    lock_timeout_s: int | None = None,
) -> AsyncEngine:
    """Open a pool for everyday queries; connections that the server closed are replaced.

    `name` shows in pg_stat_activity, unless the URL has another. `statement_timeout_s`: PostgreSQL
    stops statements that take longer; None: it stops none. `lock_timeout_s`: a statement that waits
    longer for a lock is refused; None: it waits as long as the lock is held.

    Its errors show no values of statements, which would be in logs then. Every execution is planned
    for its values, unless the URL's options say otherwise.
    """
    settings = CUSTOM_PLANS | SERVER_TIMEOUTS | IDLE_TRANSACTIONS
    if statement_timeout_s is not None:
        settings["statement_timeout"] = f"{statement_timeout_s}s"
    if lock_timeout_s is not None:
        settings["lock_timeout"] = f"{lock_timeout_s}s"
    engine = create_async_engine(
        DRIVER,
        connect_args=connect_arguments(url, name=name),
        pool_size=size,
        max_overflow=size,
        hide_parameters=True,
    )
    apply_settings_in_pool(engine.sync_engine.pool, url, settings)
    event.listen(engine.sync_engine, "checkout", _refuse_ended)
    return engine


def _refuse_ended(adapted: Any, record: Any, _: object) -> None:
    """Let the pool replace a connection that the server closed.

    An idle connection has nothing to read unless the server said that it ends, or changed a
    setting, or keepalives found that it is gone. So no statement is needed to find out, other than
    with `pool_pre_ping`. A new connection is not asked: its first statement shows what it is worth.
    """
    if _WAS_USED not in record.info:
        record.info[_WAS_USED] = True
        return
    connection = adapted.driver_connection
    poll = select.poll()
    if not connection.closed:
        poll.register(connection.fileno(), select.POLLIN)
    if connection.closed or poll.poll(0):
        raise sqlalchemy_errors.DisconnectionError("the server closed the connection")


async def connect(url: str, *, name: str) -> Connection:
    """Open an autocommit connection that reads ids as text; `name` shows in pg_stat_activity."""
    arguments = connect_arguments(url, name=name) | {"application_name": name}
    connection: Connection = await psycopg.AsyncConnection.connect(autocommit=True, **arguments)
    statement = settings_statement(url, SERVER_TIMEOUTS | IDLE_TRANSACTIONS)
    if statement is not None:
        try:
            await connection.execute(statement.encode())
        except BaseException:
            await connection.close()
            raise
    register_types(connection)
    return connection


def register_types(connection: psycopg.AsyncConnection[Any]) -> None:
    """Read uuid as text, because ids are text everywhere in this code."""
    connection.adapters.register_loader("uuid", TextLoader)


class NotificationReader:
    """Read the notifications of a connection that executes no statement meanwhile.

    psycopg's own wait for them wakes up ten times a second, in each process. A context manager.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._descriptor = connection.fileno()
        self._readable = asyncio.Event()

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._descriptor, self._readable.set)
        return self

    def __exit__(self, *_: object) -> None:
        # Also after the connection ended: its number may be that of the next one.
        asyncio.get_running_loop().remove_reader(self._descriptor)

    async def read(self, timeout_s: float | None = None) -> list[tuple[str, str]]:
        """Return the channel and payload of what came; nothing after `timeout_s`.

        psycopg.OperationalError: the connection ended.
        """
        found: list[tuple[str, str]] = []
        pgconn = self._connection.pgconn
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    # First what was received together with the answer of a statement.
                    while (notify := pgconn.notifies()) is not None:
                        found.append((notify.relname.decode(), notify.extra.decode()))
                    if found:
                        break
                    await self._readable.wait()
                    self._readable.clear()
                    pgconn.consume_input()
        return found


class PersistentConnection:
    """Keep a connection for everyday reads, opened when needed and again after it was lost."""

    def __init__(self, url: str, *, name: str) -> None:
        self._url = url
        self._name = name
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def run(self, query: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Return the result of `query` on the connection, one query at a time.

        An idle connection may have been closed long ago, which only its next use shows. So the
        query is then tried once more on a new one. StorageUnavailableError: PostgreSQL is away.
        """
        async with self._lock:
            if self._connection is not None and not self._connection.closed:
                with contextlib.suppress(StorageUnavailableError):
                    return await self._run_once(query)
            return await self._run_once(query)

    async def _run_once(self, query: Callable[[Connection], Awaitable[Result]]) -> Result:
        try:
            if self._connection is None or self._connection.closed:
                self._connection = await connect(self._url, name=self._name)
            return await query(self._connection)
        except CONNECTION_LOST as exc:
            await self.close()
            raise StorageUnavailableError(str(exc)) from exc

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


@asynccontextmanager
async def open_connection(url: str, *, name: str) -> AsyncIterator[Connection]:
    """Open a connection by `connect` and close it at the end."""
    connection = await connect(url, name=name)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def open_reader(url: str, *, name: str) -> AsyncIterator[Connection]:
    """Open a connection by `open_connection`, for a block that reads only.

    StorageUnavailableError: PostgreSQL is away, or the session ended within the block.
    """
    try:
        async with open_connection(url, name=name) as connection:
            yield connection
    except (psycopg.InterfaceError, *CONNECTION_LOST) as exc:
        raise StorageUnavailableError(str(exc)) from exc


# The last two are no OperationalErrors.
SESSION_ENDED: Final = (
    psycopg.errors.AdminShutdown,
    psycopg.errors.CrashShutdown,
    psycopg.errors.IdleSessionTimeout,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
)
"""Errors that end the session; it is not known whether before or after the commit."""
CONNECTION_LOST: Final = (psycopg.OperationalError, *SESSION_ENDED)
"""Errors of a connection that could not be made, broke, or was ended by the server: an outage."""
_REFUSALS: Final = (
    psycopg.errors.DiskFull,
    psycopg.errors.InsufficientResources,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.IoError,
)


@asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Run one transaction: committed at the end of the block, rolled back if the block raises.

    StorageUnavailableError: the connection could not be made or broke. StorageRefusedError: nothing
    was written. RateLimitedError: the share of the task's organisation is used up.
    """
    with _translate_errors():
        async with hold_share(), engine.begin() as connection:
            yield connection


@asynccontextmanager
async def savepoint(connection: AsyncConnection) -> AsyncIterator[None]:
    """Run a part of a transaction; if it raises, only this part is rolled back.

    It raises the errors of `transaction`.
    """
    with _translate_errors():
        async with connection.begin_nested():
            yield


@asynccontextmanager
async def autocommit(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Run single statements, each a transaction of its own; raise the errors of `transaction`.

    It saves the exchanges for BEGIN and COMMIT, which cost more than a small statement itself.
    """
    with _translate_errors():
        async with hold_share(), engine.connect() as connection:
            yield await connection.execution_options(isolation_level="AUTOCOMMIT")


@asynccontextmanager
async def snapshot(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Run one transaction that only reads, and sees what its first statement sees all the time.

    It raises the errors of `transaction`.
    """
    with _translate_errors():
        async with hold_share(), engine.connect() as opened:
            connection = await opened.execution_options(isolation_level="REPEATABLE READ")
            async with connection.begin():
                # By an option, the session's later transactions would be READ WRITE, also where the
                # operator has set default_transaction_read_only.
                await connection.execute(_READ_ONLY)
                yield connection


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except sqlalchemy_errors.DBAPIError as exc:
        if isinstance(exc.orig, psycopg.errors.QueryCanceled):
            raise QueryTimeoutError(
                "the query took too long and was stopped, and nothing was written: narrow it, such"
                " as by since and until, or try again if another change may have been in its way"
            ) from exc
        if isinstance(exc.orig, _REFUSALS):
            raise StorageRefusedError(str(exc.orig)) from exc
        if isinstance(exc.orig, (psycopg.InterfaceError, *CONNECTION_LOST)):
            raise StorageUnavailableError(str(exc.orig)) from exc
        raise
    except sqlalchemy_errors.TimeoutError as exc:
        raise StorageRefusedError("every connection to PostgreSQL is busy") from exc


class ConnectionShare:
    """Hold one organisation's share: so many transactions at a time, as far as all allow it."""

    def __init__(
        self,
        limit: int,
        wait_s: float,
        on_refusal: Callable[[], None],
        all_shares: asyncio.Semaphore,
    ) -> None:
        self._all_shares = all_shares
        self._limit = limit
        self._wait_s = wait_s
        self._on_refusal = on_refusal
        self._free = asyncio.Semaphore(limit)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Use a part of the share. RateLimitedError: none became free in time."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._wait_s):
                    await stack.enter_async_context(self._free)
                    await stack.enter_async_context(self._all_shares)
            except TimeoutError as exc:
                self._on_refusal()
                raise RateLimitedError(
                    f"this query waited {self._wait_s:g} s for others: an organisation has"
                    f" {self._limit} at a time; send fewer requests at a time, or narrower ones"
                ) from exc
            yield


class ConnectionShares:
    """Give each organisation a share of `limit` connections."""

    def __init__(
        self, limit: int, *, on_refusal: Callable[[], None], wait_s: float = SHARE_WAIT_S
    ) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._on_refusal = on_refusal
        self._all_shares = asyncio.Semaphore(MAX_SHARED)
        self._shares: WeakValueDictionary[OrganisationId, ConnectionShare] = WeakValueDictionary()

    def leave(self) -> None:
        """Count the transactions of this task for no organisation from now on.

        A task begins with what the one that made it had.
        """
        _current.set(None)

    def enter(self, organisation: OrganisationId) -> None:
        """Count the transactions of this task as those of an organisation from now on.

        Each publish that has a task does, and few have a transaction.
        """
        _current.set((self, organisation))

    def of(self, organisation: OrganisationId) -> ConnectionShare:
        """Return the share of an organisation, which exists while it is in use or waited for."""
        share = self._shares.get(organisation)
        if share is None:
            share = ConnectionShare(self._limit, self._wait_s, self._on_refusal, self._all_shares)
            self._shares[organisation] = share
        return share


_current: ContextVar[tuple[ConnectionShares, OrganisationId] | None] = ContextVar(
    "connection_share", default=None
)


@contextmanager
def without_share() -> Iterator[None]:
    """Count no transaction of the block for an organisation: its result is for all of them."""
    entered = _current.get()
    _current.set(None)
    try:
        yield
    finally:
        _current.set(entered)


@asynccontextmanager
async def hold_share() -> AsyncIterator[None]:
    """Use a part of the share of this task's organisation, if it has one. RateLimitedError.

    A transaction within another one uses no further part, or the two could wait for each other.
    """
    entered = _current.get()
    if entered is None:
        yield
        return
    shares, organisation = entered
    async with shares.of(organisation).hold():
        _current.set(None)
        try:
            yield
        finally:
            # A generator may be closed in another context, where a token would not be valid.
            _current.set(entered)


async def wait_for_share(
    read: Callable[[], Awaitable[Result]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Result:
    """Return what `read` returns; where its organisation's share is in use, wait and read again.

    For the later parts of an answer that has begun, and so cannot be refused any more.
    RateLimitedError: the share was in use each time, and the answer must break off.
    """
    for _ in range(MAX_TRIES - 1):
        try:
            return await read()
        except RateLimitedError as exc:
            await sleep(exc.retry_after_s)
    return await read()
