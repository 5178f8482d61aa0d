"""Test that a client that leaves ends the statement of its stream, without a warning."""

import logging
from collections.abc import AsyncGenerator

import psycopg
import pytest
from litestar.response import Stream
from sqlalchemy import text

from rooms.api.stream_task import in_own_task
from rooms.db.connection import open_engine, transaction
from tests.support.leaving_client import request_and_leave

RUNNING = (
    "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND datname = current_database()"
    " AND query = 'SELECT pg_sleep(60)'"
)


async def test_the_statement_of_a_client_that_leaves_is_ended(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "psycopg")
    engine = open_engine(database, size=1)
    watching = await psycopg.AsyncConnection.connect(database, autocommit=True)

    async def running() -> int:
        row = await (await watching.execute(RUNNING)).fetchone()
        assert row is not None
        return int(row[0])

    async def chunks() -> AsyncGenerator[bytes, None]:
        async with transaction(engine) as connection:
            await connection.execute(text("SELECT pg_sleep(60)"))
        yield b"never"

    async def is_running() -> None:
        while not await running():
            pass

    try:
        await request_and_leave(lambda: Stream(in_own_task(chunks())), is_running)
        assert await running() == 0
    finally:
        await watching.close()
        await engine.dispose()
    assert caplog.records == []
