"""Bring a database to the schema that this code needs."""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import psycopg
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError

import migrations
from rooms.db.connection import sqlalchemy_url
from rooms.db.retention.partitions import SHORT_LOCKS, default_partition_bytes, ensure_partitions
from rooms.db.retention.replace import MAX_DEFAULT_PARTITION_BYTES
from rooms.errors import StorageRefusedError

_log = logging.getLogger(__name__)

LOCK_WAIT_S: Final = 120.0
"""The time for which locks that others hold are requested again."""
_MIGRATION_LOCK: Final = 0x726F6F6D
_TRY_S: Final = 0.25
# Every publish waits behind a request for a lock on its tables. In the pause those that waited go
# on.
_LOCK_TIMEOUT: Final = text("SET lock_timeout = '2s'")
_PAUSE_S: Final = 2.0
_LOCK_CONFLICTS: Final = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
_OLDEST_HOLDER: Final = text("""
SELECT a.pid, a.application_name, a.state,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age_s
FROM pg_stat_activity a
WHERE a.pid <> pg_backend_pid() AND a.datname = current_database() AND EXISTS (
    SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'relation' AND l.granted
) ORDER BY a.xact_start LIMIT 1
""")


def migrate(url: str, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
    """Run every revision that the database lacks, then make the partitions of the coming days.

    Several processes may call this at once: an advisory lock lets one of them work, and the others
    find nothing to do.

    A revision that gets a lock neither at once nor within `lock_wait_s` raises StorageRefusedError,
    which names the oldest transaction. The revisions before it stay.
    """
    engine = create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            _wait_for_turn(connection)
            connection.execute(_LOCK_TIMEOUT)
            connection.commit()
            config = Config()
            config.set_main_option("script_location", str(Path(migrations.__file__).parent))
            config.attributes["connection"] = connection
            _retry_locks(connection, partial(command.upgrade, config, "head"), lock_wait_s)
            _retry_locks(connection, partial(_make_days_ahead, connection), lock_wait_s)
            connection.execute(text(f"SELECT pg_advisory_unlock({_MIGRATION_LOCK})"))
            connection.commit()
    finally:
        engine.dispose()


def _wait_for_turn(connection: Connection) -> None:
    """Wait for the advisory lock, without the snapshot that a waiting statement would keep."""
    try_lock = text(f"SELECT pg_try_advisory_lock({_MIGRATION_LOCK})")
    while not connection.scalar(try_lock):
        connection.commit()
        time.sleep(_TRY_S)
    connection.commit()


def _make_days_ahead(connection: Connection) -> None:
    """Make the coming days, unless the default partitions are large.

    PostgreSQL would scan them while every publish waits. Maintenance does it without that.
    """
    for setting in SHORT_LOCKS:
        connection.execute(setting)
    if default_partition_bytes(connection) <= MAX_DEFAULT_PARTITION_BYTES:
        ensure_partitions(connection, datetime.now(UTC))


def _retry_locks(connection: Connection, work: Callable[[], object], wait_s: float) -> None:
    """Run work and commit it; run it again after a lock was not granted in time."""
    deadline = time.monotonic() + wait_s
    is_logged = False
    while True:
        try:
            work()
            connection.commit()
        except DBAPIError as exc:
            if not isinstance(exc.orig, _LOCK_CONFLICTS):
                raise
            connection.rollback()
            reason = _describe_holder(connection)
            if time.monotonic() >= deadline:
                raise StorageRefusedError(
                    f"a lock was not granted within {wait_s:g} s: {reason};"
                    " end that transaction, or migrate again later"
                ) from exc
            if not is_logged:
                _log.warning("the migration waits for a lock: %s", reason)
                is_logged = True
            time.sleep(_PAUSE_S)
        else:
            return


def _describe_holder(connection: Connection) -> str:
    holder = connection.execute(_OLDEST_HOLDER).first()
    connection.commit()
    if holder is None:
        return "another transaction held it"
    age = "" if holder.age_s is None else f" for {holder.age_s:.0f} s"
    return (
        f"session {holder.pid} ({holder.application_name or 'without a name'}, {holder.state})"
        f" is in a transaction{age}"
    )
