"""The record of an installation's processes and of the stores that each of them runs on.

A process enters itself when it starts and confirms the row every few seconds. A row that is not confirmed any more belongs
to a process that died. The last row stays when all of them have stopped: it says what the installation ran on.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import psycopg

from rooms.backends import Backends, ProcessRecord
from rooms.storage.engine import Connection

RUNNING_S: Final = 45.0
"""A process counts as running for so long after it was last heard of."""
KEPT_S: Final = 3600.0
"""How long the row of a process that ended is kept beside those that run."""

# The row that is confirmed is the newest one, so that any other may go.
_CONFIRM: Final = """
WITH confirmed AS (
    INSERT INTO processes (name, kind, host, pid, broker, election, magazines, farm, client)
    VALUES (%(name)s, %(kind)s, %(host)s, %(pid)s, %(broker)s, %(election)s, %(magazines)s, %(farm)s, %(client)s)
    ON CONFLICT (name) DO UPDATE SET seen_at = now(), stopped = false
)
DELETE FROM processes WHERE name IN (
    SELECT name FROM processes WHERE seen_at < now() - %(kept)s * interval '1 s' AND name <> %(name)s
    FOR UPDATE SKIP LOCKED
)
"""
_STOPPED: Final = "UPDATE processes SET stopped = true, seen_at = now() WHERE name = %(name)s"
_READ: Final = """
SELECT name, kind, host, pid, extract(epoch FROM now() - seen_at)::float8, running, broker, election, magazines, farm, client
FROM (
    SELECT *, NOT stopped AND seen_at > now() - %(running)s * interval '1 s' AS running,
        row_number() OVER (ORDER BY seen_at DESC, name) AS place FROM processes
) p WHERE running OR place = 1 ORDER BY name LIMIT 1000
"""
MISSING: Final = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn)
"""The database has an older schema, without this record."""


async def confirm(connection: Connection, process: ProcessRecord) -> None:
    """Enter this process, or say that it still runs; forget rows of others that ended long ago. psycopg's errors."""
    row: dict[str, Any] = {"name": process.name, "kind": process.kind, "host": process.host, "pid": process.pid}
    await connection.execute(_CONFIRM, row | asdict(process.backends) | {"kept": KEPT_S})


async def leave(connection: Connection, name: str) -> None:
    """Say that the process stops. psycopg's errors."""
    await connection.execute(_STOPPED, {"name": name})


async def read_processes(connection: Connection) -> Sequence[ProcessRecord]:
    """Return the processes that run, and the last one heard of where that is none of them. psycopg's errors."""
    cursor = await connection.execute(_READ, {"running": RUNNING_S})
    return [
        ProcessRecord(
            name=name,
            kind=kind,
            host=host,
            pid=pid,
            seen_s=seen_s,
            running=is_running,
            backends=Backends(broker=broker, election=election, magazines=magazines, farm=farm, client=client),
        )
        for name, kind, host, pid, seen_s, is_running, broker, election, magazines, farm, client in await cursor.fetchall()
    ]
