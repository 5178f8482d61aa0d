"""Test that a client that leaves ends the statement of its stream, without a warning."""

import logging
from collections.abc import AsyncGenerator
from typing import Any

import psycopg
import pytest
from litestar import Litestar, get
from litestar.response import Stream
from sqlalchemy import text

from rooms.api.stream_task import in_own_task
from rooms.db.connection import open_engine, transaction

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

    @get("/")
    async def answer() -> Stream:
        return Stream(in_own_task(chunks()))

    requested = False

    async def receive() -> dict[str, object]:
        nonlocal requested
        if not requested:
            requested = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while not await running():
            pass
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        pass

    scope: Any = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": "/", "raw_path": b"/", "query_string": b"", "root_path": "",
        "headers": [], "client": None, "server": None, "state": {}, "extensions": {},
    }  # fmt: skip
    try:
        await Litestar([answer], openapi_config=None, logging_config=None)(scope, receive, send)  # type: ignore[arg-type]
        assert await running() == 0
    finally:
        await watching.close()
        await engine.dispose()
    assert caplog.records == []
