"""Test the connection for everyday reads: an end while it was idle costs no error."""

import asyncio

import psycopg
import pytest

from rooms.db.connection import Connection, PersistentConnection, open_connection
from rooms.errors import StorageUnavailableError

NAME = "a test of reads"


async def backend(connection: Connection) -> int:
    row = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
    assert row is not None
    return int(row[0])


async def test_a_session_that_ended_while_idle_is_replaced(database: str) -> None:
    connection = PersistentConnection(database, name=NAME)
    try:
        first = await connection.run(backend)
        async with open_connection(database, name="another") as other:
            await other.execute("SELECT pg_terminate_backend(%s)", (first,))
        assert await connection.run(backend) != first
    finally:
        await connection.close()


async def test_an_error_on_a_new_connection_is_an_outage(database: str) -> None:
    connection, tries = PersistentConnection(database, name=NAME), 0

    async def fail(_opened: Connection) -> None:
        nonlocal tries
        tries += 1
        raise psycopg.errors.AdminShutdown("terminating connection")

    try:
        await connection.run(backend)
        with pytest.raises(StorageUnavailableError):
            await connection.run(fail)
        assert tries == 2
        with pytest.raises(StorageUnavailableError):
            await connection.run(fail)
        assert tries == 3
    finally:
        await connection.close()


async def test_a_cancelled_query_is_not_repeated(database: str) -> None:
    connection, tries = PersistentConnection(database, name=NAME), 0

    async def hang(_opened: Connection) -> None:
        nonlocal tries
        tries += 1
        await asyncio.sleep(60)

    try:
        await connection.run(backend)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.run(hang)
        assert tries == 1
    finally:
        await connection.close()
