"""Bring a database to the schema that this code needs."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationInfo
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

import migrations
from rooms.db.connection import DRIVER, SESSION_ENDED, connect_arguments
from rooms.db.connection import Connection as AsyncConnection
from rooms.db.retention.partitions import SHORT_LOCKS, default_partition_bytes, ensure_partitions
from rooms.db.retention.replace import MAX_DEFAULT_PARTITION_BYTES
from rooms.db.session_settings import SERVER_TIMEOUTS, apply_settings_in_pool
from rooms.errors import StorageRefusedError, StorageUnavailableError

_log = logging.getLogger(__name__)

LOCK_WAIT_S: Final = 120.0
"""The time for which refused locks are requested again; each revision has its own."""
TURN_WAIT_S: Final = 600.0
"""The time for which another migration is waited for."""
_MIGRATION_LOCK: Final = 0x726F6F6D
_SUSPENSIONS_S: Final = {"idle_in_transaction_session_timeout": 10, "idle_session_timeout": 60}
"""Seconds after which a migration that is suspended, with locks or between two, loses its session.

No revision works in Python between its statements for as long.
"""
_TRY_S: Final = 0.25
_REMINDER_S: Final = 60.0
# Every publish waits behind a request for a lock on its tables. In the pause those that waited go
# on.
_LOCK_TIMEOUT: Final = text("SET lock_timeout = '2s'")
# The time of a revision depends on the tables, and not on what statements of this role may take.
# PostgreSQL 16 has no transaction_timeout.
_NO_TIMEOUTS: Final = text(
    "SELECT set_config(name, '0', false) FROM pg_settings"
    " WHERE name IN ('statement_timeout', 'transaction_timeout')"
)
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
_TURN_HOLDER: Final = text(f"""
SELECT a.pid, a.application_name, a.client_addr::text AS client, a.state,
    extract(epoch FROM clock_timestamp() - a.state_change)::float8 AS age_s
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.database = a.datid
    AND a.datname = current_database() AND l.objsubid = 1
    AND l.classid::int8 << 32 | l.objid::int8 = {_MIGRATION_LOCK}
""")  # noqa: S608 - a constant of this module


def migrate(
    url: str, *, lock_wait_s: float = LOCK_WAIT_S, turn_wait_s: float = TURN_WAIT_S
) -> None:
    """Run every revision that the database lacks, then make the partitions of the coming days.

    Several processes may call this at once: an advisory lock lets one of them work, and the others
    find nothing to do. One that waits for longer than `turn_wait_s` raises StorageRefusedError.

    A revision that gets no lock within `lock_wait_s` of its first refusal raises
    StorageRefusedError, which names the oldest transaction. The revisions before it stay.
    StorageUnavailableError: the server ended the session, as after this process was suspended.
    """
    engine = _open_engine(url)
    try:
        with engine.connect() as connection:
            _wait_for_turn(connection, turn_wait_s)
            connection.execute(_LOCK_TIMEOUT)
            connection.execute(_NO_TIMEOUTS)
            connection.commit()
            config = Config()
            config.set_main_option("script_location", str(Path(migrations.__file__).parent))
            config.attributes["connection"] = connection
            applied: set[str] = set()
            config.attributes["on_version_apply"] = partial(_record_revision, applied)
            _retry_locks(connection, partial(command.upgrade, config, "head"), lock_wait_s, applied)
            _retry_locks(connection, partial(_make_days_ahead, connection), lock_wait_s)
            connection.execute(text(f"SELECT pg_advisory_unlock({_MIGRATION_LOCK})"))
            connection.commit()
    except DBAPIError as exc:
        if not isinstance(exc.orig, SESSION_ENDED):
            raise
        raise StorageUnavailableError(
            f"the server ended the session of the migration: {exc.orig}; migrate again"
        ) from exc
    finally:
        engine.dispose()


async def describe_missing(connection: AsyncConnection) -> str | None:
    """Describe what the schema lacks for this version; None: it is of this version, or newer."""
    found = ""
    try:
        cursor = await connection.execute("SELECT version_num FROM alembic_version")
        if (row := await cursor.fetchone()) is not None:
            (found,) = row
    except psycopg.errors.UndefinedTable:
        pass
    head, older = await asyncio.to_thread(_own_revisions)
    if found == head or (found and found not in older):
        return None
    return f"the database's schema is {found or 'missing'}, and not {head}: run `rooms migrate`"


def _own_revisions() -> tuple[str, frozenset[str]]:
    """Return the newest revision of this version, and all others."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    revisions = [one.revision for one in ScriptDirectory.from_config(config).walk_revisions()]
    return revisions[0], frozenset(revisions[1:])


def _open_engine(url: str) -> Engine:
    """Open a session that ends with its process: others wait for its locks, and its turn."""
    engine = create_engine(DRIVER, connect_args=connect_arguments(url, name="rooms migrate"))
    suspensions = {name: f"{seconds}s" for name, seconds in _SUSPENSIONS_S.items()}
    apply_settings_in_pool(engine.pool, url, SERVER_TIMEOUTS | suspensions)
    return engine


def _wait_for_turn(connection: Connection, wait_s: float) -> None:
    """Wait for the advisory lock, without the snapshot that a waiting statement would keep."""
    try_lock = text(f"SELECT pg_try_advisory_lock({_MIGRATION_LOCK})")
    began = reminded = time.monotonic()
    is_logged = False
    while not connection.scalar(try_lock):
        connection.commit()
        now = time.monotonic()
        if now >= began + wait_s:
            raise StorageRefusedError(
                f"another migration did not end within {wait_s:g} s: {_describe_turn(connection)};"
                " migrate again when it has ended, or end it by pg_terminate_backend"
            )
        if not is_logged or now >= reminded + _REMINDER_S:
            _log.warning("waiting for another migration: %s", _describe_turn(connection))
            is_logged, reminded = True, now
        time.sleep(_TRY_S)
    connection.commit()


def _describe_turn(connection: Connection) -> str:
    holder = connection.execute(_TURN_HOLDER).first()
    connection.commit()
    if holder is None:
        return "it has just ended"
    place = "on the server's machine" if holder.client is None else f"from {holder.client}"
    return (
        f"session {holder.pid} ({holder.application_name or 'without a name'}) {place}"
        f" has been {holder.state} for {holder.age_s:.0f} s"
    )


def _make_days_ahead(connection: Connection) -> None:
    """Make the coming days, unless the default partitions are large.

    PostgreSQL would scan them while every publish waits. Maintenance does it without that.
    """
    for setting in SHORT_LOCKS:
        connection.execute(setting)
    if default_partition_bytes(connection) <= MAX_DEFAULT_PARTITION_BYTES:
        ensure_partitions(connection, datetime.now(UTC))


def _record_revision(applied: set[str], *, step: MigrationInfo, **_: object) -> None:
    applied.update(step.up_revision_ids)


def _retry_locks(
    connection: Connection,
    work: Callable[[], object],
    wait_s: float,
    applied: Collection[str] = (),
) -> None:
    """Run work and commit it; run it again after a lock was not granted in time.

    The time begins with the first refusal: one of an index build ends after two minutes. It begins
    again when `applied`, the revisions that are complete, has grown since the last try, as it was
    not spent on the lock that is missing now.
    """
    deadline: float | None = None
    known = len(applied)
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
            if deadline is None or len(applied) > known:
                known, is_logged = len(applied), False
                deadline = time.monotonic() + wait_s
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
