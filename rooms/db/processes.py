"""Record an installation's processes, and the backends and secret keys of each.

A process adds its row when it starts and confirms it every few seconds. A row that is no longer
confirmed belongs to a process that died. The last row stays when all of them have stopped: it names
the backends the installation ran on.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import psycopg

from rooms.backends import Backends, ProcessRecord
from rooms.db.connection import Connection

RUNNING_S: Final = 45.0
"""A process counts as running for so long after it last confirmed its row."""
STOPPED_KEPT_S: Final = 3600.0
"""The time for which the row of a process that ended is kept beside those that run."""

_BACKEND_COLUMNS: Final = ("broker", "election", "magazines", "farm", "client")

# The confirmed row is the newest one, so any other may be deleted.
_HEARTBEAT: Final = """
WITH confirmed AS (
    INSERT INTO processes (name, kind, host, pid, broker, election, magazines, farm, client,
        secret_keys)
    VALUES (%(name)s, %(kind)s, %(host)s, %(pid)s, %(broker)s, %(election)s, %(magazines)s,
        %(farm)s, %(client)s, %(secret_keys)s)
    ON CONFLICT (name) DO UPDATE SET seen_at = now(), stopped = false,
        secret_keys = excluded.secret_keys
)
DELETE FROM processes WHERE name IN (
    SELECT name FROM processes
    WHERE seen_at < now() - %(kept)s * interval '1 s' AND name <> %(name)s FOR UPDATE SKIP LOCKED
)
"""
_MARK_STOPPED: Final = "UPDATE processes SET stopped = true, seen_at = now() WHERE name = %(name)s"
_READ: Final = """
SELECT name, kind, host, pid, running, secret_keys,
    broker, election, magazines, farm, client FROM (
    SELECT *, NOT stopped AND seen_at > now() - %(running)s * interval '1 s' AS running,
        row_number() OVER (ORDER BY seen_at DESC, name) AS place FROM processes
) p WHERE running OR place = 1 ORDER BY name LIMIT 1000
"""
SCHEMA_MISSING: Final = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn)
"""The database has an older schema, without this table."""


async def heartbeat(connection: Connection, process: ProcessRecord) -> None:
    """Add or confirm this process's row, and delete the rows of others that ended long ago.

    Raises psycopg's errors.
    """
    row: dict[str, Any] = {
        "name": process.name,
        "kind": process.kind,
        "host": process.host,
        "pid": process.pid,
        "secret_keys": None if process.secret_keys is None else list(process.secret_keys),
    }
    await connection.execute(_HEARTBEAT, row | asdict(process.backends) | {"kept": STOPPED_KEPT_S})


async def mark_stopped(connection: Connection, name: str) -> None:
    """Record that the process stops. Raises psycopg's errors."""
    await connection.execute(_MARK_STOPPED, {"name": name})


async def read_processes(connection: Connection) -> Sequence[ProcessRecord]:
    """Return the running processes; if there are none, the one that was seen last.

    Raises psycopg's errors.
    """
    cursor = await connection.execute(_READ, {"running": RUNNING_S})
    return [
        ProcessRecord(
            name=name,
            kind=kind,
            host=host,
            pid=pid,
            running=is_running,
            secret_keys=None if keys is None else tuple(keys),
            backends=Backends(**dict(zip(_BACKEND_COLUMNS, backends, strict=True))),
        )
        for name, kind, host, pid, is_running, keys, *backends in await cursor.fetchall()
    ]
