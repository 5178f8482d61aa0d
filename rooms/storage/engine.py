"""Connections: SQLAlchemy's pool for everyday queries, kept autocommit ones for the hot statements."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow
from psycopg.types.string import TextLoader
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from rooms.errors import StorageUnavailableError

# A server that vanished without a word (its machine, or the way to it) is given up after some 15 s. The address wins.
_IMPATIENCE: Final = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}

Connection = AsyncConnection[TupleRow]
Result = TypeVar("Result")


def sqlalchemy_url(url: str) -> str:
    """`postgresql://…` as SQLAlchemy names the psycopg dialect."""
    return make_url(url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def psycopg_url(url: str) -> str:
    """`postgresql://…` as libpq reads it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def open_engine(url: str, *, size: int = 10) -> AsyncEngine:
    """A pool for everyday queries; a connection that the server closed is noticed before it is handed out."""
    return create_async_engine(sqlalchemy_url(url), pool_size=size, max_overflow=size, pool_pre_ping=True)


async def connect(url: str, *, name: str) -> Connection:
    """A connection of one's own in autocommit, ids read as text; `name` shows in pg_stat_activity."""
    address = make_url(psycopg_url(url)).update_query_dict(_IMPATIENCE | dict(make_url(url).query))
    connection: Connection = await AsyncConnection.connect(
        address.render_as_string(hide_password=False), autocommit=True, application_name=name
    )
    register_types(connection)
    return connection


def register_types(connection: psycopg.AsyncConnection[Any]) -> None:
    """Read uuid as text: ids are text everywhere in the house."""
    connection.adapters.register_loader("uuid", TextLoader)


class KeptConnection:
    """A connection for everyday reads that is opened when needed and again when it was lost."""

    def __init__(self, url: str, *, name: str) -> None:
        self._url = url
        self._name = name
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    async def run(self, query: Callable[[Connection], Awaitable[Result]]) -> Result:
        """What `query` makes of the connection, one query at a time. StorageUnavailableError when PostgreSQL is away."""
        async with self._turn:
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = await connect(self._url, name=self._name)
                return await query(self._connection)
            except psycopg.OperationalError as exc:
                await self.close()
                raise StorageUnavailableError(str(exc)) from exc

    async def close(self) -> None:
        """Let the connection go."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


@asynccontextmanager
async def connection_for(url: str, *, name: str) -> AsyncIterator[Connection]:
    """`connect`, closed at the end."""
    connection = await connect(url, name=name)
    try:
        yield connection
    finally:
        await connection.close()
