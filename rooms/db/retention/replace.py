"""Replace old partitions by what must be kept of them.

    prepare ──► copy ──► has_no_older_snapshot ──► swap ──► drop_replaced
      │          │                                  │        └── free ids of deleted messages,
      │          │                                  │            drop the old partitions
      │          │                                  └── one transaction: detach the old partitions,
      │          │                                      attach the copy (if it has rows)
      │          └── what is unfinished, sidelined or changed lately, its messages, their log
      └── empty tables beside the partitions, and mirror triggers on these (`mirror_triggers.py`)

Only the triggers and the swap take locks that others wait behind. Each is requested with a time-out
and held while a few catalog rows change; if it is not granted, it is requested again later. Until
the swap is committed nothing is deleted, and `drop_unfinished` removes what a process left that
died before it. After the swap, detached partitions are recognised by their name and dropped by
`drop_replaced`.

The swap is right for statements that wait behind it with an older snapshot. `has_no_older_snapshot`
has ensured that none is older than the copy, and every later change is in the copy by the very
transaction that changed the partition.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rooms.db.connection import Connection
from rooms.db.queries.log_export import EXPORTED_TOTALS, SYSTEM_IDENTIFIER
from rooms.db.queries.restored_log import RESTORED_END, is_not_exported
from rooms.db.retention.bounded_locks import (
    COUNT_PAGES,
    LOCK_CONFLICTS,
    PAGES_PER_STATEMENT,
    ShouldContinue,
    fetch_rows,
    fetch_value,
    retry_exclusive_lock,
    retry_on_lock_timeout,
)
from rooms.db.retention.mirror_triggers import FUNCTION_SUFFIX, PRIMARY_KEYS, mirror_trigger
from rooms.db.retention.partitions import (
    PARTITIONED_TABLES,
    STORAGE_OPTIONS,
    PartitionSet,
    ReplacementRange,
)
from rooms.domain.state_machine import UNFINISHED, State
from rooms.errors import StorageRefusedError

MAX_LOCK_MS: Final = 2000
"""The longest time for a statement of the swap, for its lock, and for the whole swap: so long
others can wait.
"""
MAX_DEFAULT_PARTITION_BYTES: Final = 64 << 20
"""PostgreSQL scans the default partitions to attach a copy, while all others wait: up to this size.
"""
_BATCH: Final = 200
_ENDED_STATES: Final = ", ".join(
    f"'{state}'" for state in sorted(set(State) - UNFINISHED - {State.SIDELINED})
)
ENDED_LONG_AGO: Final = f"(state IN ({_ENDED_STATES}) AND updated_at < %(before)s::timestamptz)"
"""True for a delivery that ended long enough ago."""

_NEW_SUFFIX: Final = "_new"
"""The suffix of a table that is not attached yet."""
_COLUMNS: Final = """
SELECT attname::text FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_FREE_NUMBER: Final = """
SELECT 1 + coalesce(max(substring(relname FROM '_kept([0-9]+)')::int4), 0) FROM pg_class
WHERE relname ~ ('^(messages|deliveries|log_entries)_' || %s || '_kept[0-9]+(_gone|_new)?$')
"""
_CREATE_TABLE: Final = """
CREATE TABLE {to} (LIKE {table} INCLUDING DEFAULTS INCLUDING INDEXES INCLUDING STORAGE INCLUDING COMPRESSION) {storage};
ALTER TABLE {to} ADD CONSTRAINT {to}_bounds CHECK ({key} >= '{low}' AND {key} < '{high}')
"""
_COUNT_KEPT: Final = "SELECT count(*) FILTER (WHERE NOT {over}), count(*) FROM {source}"
_COPY: Final = """
INSERT INTO {to} ({columns}) SELECT {columns} FROM (
    SELECT * FROM {source} WHERE ctid >= %(from)s::tid AND ctid < %(to)s::tid AND NOT {over} FOR KEY SHARE
) s ON CONFLICT DO NOTHING
"""
_COPIED_PAGE: Final = """
SELECT room_id, id, message_id FROM {to} WHERE (room_id, id) > (%s::int4, %s::uuid) ORDER BY room_id, id LIMIT %s
"""
_COPY_RELATED_ROWS: Final = """
INSERT INTO {to} ({columns}) SELECT {listed} FROM (
    SELECT DISTINCT * FROM unnest(%s::int4[], %s::uuid[]) AS v (room_id, message_id)
) v JOIN {source} s ON s.room_id = v.room_id AND s.{key} = v.message_id FOR KEY SHARE OF s
ON CONFLICT DO NOTHING
"""
_CURRENT_XMAX: Final = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8"
# Sessions of other roles show nothing here. They are not part of Rooms, and their statements are
# not retried either.
_OLDER_SNAPSHOT: Final = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND backend_type = 'client backend' AND age(backend_xmin) > age((%s::int8 & 4294967295)::text::xid)
)
"""
_NOT_EXPORTED: Final = """
SELECT EXISTS (SELECT FROM {{source}} s WHERE {condition}{{but}})
""".format(
    condition=is_not_exported(
        "(xid::text::bigint)", "%(exported)s::bigint", "%(restored_end)s::bigint"
    )
)
_EXCEPT_COPIED: Final = " AND NOT EXISTS (SELECT FROM {to} t WHERE {same})"
_DEFAULT_HAS_ROWS: Final = (
    "SELECT EXISTS (SELECT FROM {table}_rest WHERE {key} >= %s AND {key} < %s)"
)
_DEFAULT_PARTITION_BYTES: Final = "SELECT {sizes}".format(
    sizes=" + ".join(f"pg_relation_size('{table}_rest')" for table in PARTITIONED_TABLES)
)
_LOCK_TABLES: Final = (
    "LOCK TABLE ONLY messages, ONLY deliveries, ONLY log_entries IN ACCESS EXCLUSIVE MODE"
)
_ANY_KEPT: Final = "SELECT EXISTS (SELECT FROM {to} WHERE NOT {over})"
_SAVE_WATERMARK: Final = """
INSERT INTO upkeep_marks AS m (name, at) VALUES ('retention', to_timestamp(%s / 1000.0))
ON CONFLICT (name) DO UPDATE SET at = greatest(m.at, excluded.at)
"""


async def count_kept(
    connection: Connection, partition_set: PartitionSet, before: datetime
) -> tuple[int, int]:
    """Count the deliveries of a set that would be kept, and all of them."""
    statement = _COUNT_KEPT.format(
        source=partition_set.partitions["deliveries"], over=ENDED_LONG_AGO
    )
    ((kept, total),) = await fetch_rows(connection, statement, before=before)
    return kept, total


async def exported_xid(connection: Connection, destination: str) -> int:
    """Return the transaction id below which all log rows have been exported to this destination."""
    ((end, _, _),) = await fetch_rows(
        connection, EXPORTED_TOTALS, destination, await fetch_value(connection, SYSTEM_IDENTIFIER)
    )
    return int(end)


async def restored_end(connection: Connection, destination: str) -> int:
    """Return the id below which all restored log rows have been exported to this destination."""
    return int(await fetch_value(connection, RESTORED_END, destination))


async def default_has_rows(connection: Connection, replaced: ReplacementRange) -> bool:
    """Return whether the default partitions have rows of these times.

    No partition can be made for them then.
    """
    for table, key in PARTITIONED_TABLES.items():
        if await fetch_value(
            connection, _DEFAULT_HAS_ROWS.format(table=table, key=key), *replaced.bounds
        ):
            return True
    return False


class PartitionReplacement:
    """Replace one range.

    Each step must end before the next one begins; StorageRefusedError: not now.
    """

    def __init__(
        self,
        connection: Connection,
        replaced: ReplacementRange,
        *,
        before: datetime,
        exported: int | None,
        restored_end: int = 0,
        lock_ms: int = MAX_LOCK_MS,
    ) -> None:
        """Keep what ended after `before`, and log rows that are not exported.

        `exported`: rows of a transaction below it are exported; None: all. `restored_end`: so are
        restored rows below it.
        """
        self._connection = connection
        self._range = replaced
        self._before = before
        self._exported = exported
        self._restored_end = restored_end
        self._lock_ms = lock_ms
        self._columns: dict[str, Sequence[str]] = {}
        self._targets: dict[str, str] = {}
        self._copied_xid = 0

    async def is_exported(self) -> bool:
        """Return whether the export has all log rows that would be deleted.

        Those added since `prepare` are kept.
        """
        if self._exported is None:
            return True
        same = " AND ".join(f"t.{key} = s.{key}" for key in PRIMARY_KEYS["log_entries"])
        but = (
            _EXCEPT_COPIED.format(to=self._targets["log_entries"], same=same)
            if self._targets
            else ""
        )
        for part in self._range.partition_sets:
            statement = _NOT_EXPORTED.format(source=part.partitions["log_entries"], but=but)
            if await self._has_not_exported(statement):
                return False
        return True

    async def _has_not_exported(self, statement: str) -> bool:
        ((found,),) = await fetch_rows(
            self._connection,
            statement,
            exported=self._exported,
            restored_end=self._restored_end,
        )
        return bool(found)

    async def prepare(self) -> None:
        """Make the empty tables, and the mirror triggers."""
        if (
            await fetch_value(self._connection, _DEFAULT_PARTITION_BYTES)
            > MAX_DEFAULT_PARTITION_BYTES
            and await self._has_rows_to_keep()
        ):
            raise StorageRefusedError("the default partitions hold too much data")
        number = await fetch_value(self._connection, _FREE_NUMBER, self._range.label)
        low, high = self._range.bounds
        for table, key in PARTITIONED_TABLES.items():
            self._columns[table] = [
                name for (name,) in await fetch_rows(self._connection, _COLUMNS, table)
            ]
            self._targets[table] = to = f"{table}_{self._range.label}_kept{number}{_NEW_SUFFIX}"
            make = _CREATE_TABLE.format(
                to=to, table=table, storage=STORAGE_OPTIONS[table], key=key, low=low, high=high
            )
            await self._connection.execute(make)
        for part in self._range.partition_sets:
            for table in PARTITIONED_TABLES:
                function, trigger = mirror_trigger(
                    table, dict(part.partitions), self._targets, self._columns
                )
                await self._connection.execute(function)
                await retry_exclusive_lock(self._connection, trigger)

    async def _has_rows_to_keep(self) -> bool:
        for part in self._range.partition_sets:
            found = await fetch_rows(
                self._connection,
                _ANY_KEPT.format(to=part.partitions["deliveries"], over=ENDED_LONG_AGO),
                before=self._before,
            )
            if found[0][0]:
                return True
        return False

    async def copy(self, should_continue: ShouldContinue) -> bool:
        """Copy what is kept, in small transactions. False: `should_continue` returned False."""
        for part in self._range.partition_sets:
            source = part.partitions["deliveries"]
            columns = ", ".join(self._columns["deliveries"])
            statement = _COPY.format(
                to=self._targets["deliveries"], source=source, columns=columns, over=ENDED_LONG_AGO
            )
            for low in range(
                0, await fetch_value(self._connection, COUNT_PAGES, source), PAGES_PER_STATEMENT
            ):
                if not should_continue():
                    return False
                pages = {
                    "from": f"({low},0)",
                    "to": f"({low + PAGES_PER_STATEMENT},0)",
                    "before": self._before,
                }
                await retry_on_lock_timeout(self._connection, statement, pages)
        return await self._copy_related(should_continue)

    async def _copy_related(self, should_continue: ShouldContinue) -> bool:
        room, last = -1, self._range.bounds[0]
        page = _COPIED_PAGE.format(to=self._targets["deliveries"])
        while found := await fetch_rows(self._connection, page, room, last, _BATCH):
            room, last = found[-1][0], found[-1][1]
            wanted = [row[0] for row in found], [row[2] for row in found]
            for part in self._range.partition_sets:
                for table in ("messages", "log_entries"):
                    if not should_continue():
                        return False
                    statement = _COPY_RELATED_ROWS.format(
                        to=self._targets[table],
                        source=part.partitions[table],
                        key=PARTITIONED_TABLES[table],
                        columns=", ".join(self._columns[table]),
                        listed=", ".join(f"s.{column}" for column in self._columns[table]),
                    )
                    await retry_on_lock_timeout(self._connection, statement, wanted)
        self._copied_xid = await fetch_value(self._connection, _CURRENT_XMAX)
        return True

    async def has_no_older_snapshot(self) -> bool:
        """Return whether no transaction has a snapshot any more that is older than the copy."""
        return not await fetch_value(self._connection, _OLDER_SNAPSHOT, self._copied_xid)

    async def swap(self) -> bool:
        """Put the copy in the place of the partitions, or nothing if nothing is kept.

        Return whether something is.
        """
        try:
            async with self._connection.transaction():
                return await self._swap_tables()
        except LOCK_CONFLICTS as exc:
            raise StorageRefusedError(f"another transaction holds a lock: {exc}") from exc

    async def _swap_tables(self) -> bool:
        connection, (low, high) = self._connection, self._range.bounds
        await connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        await connection.execute(f"SET LOCAL statement_timeout = {self._lock_ms}")
        # If the process is suspended in the middle of this, the server ends the session, so that
        # others can go on.
        await connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = {self._lock_ms}")
        await connection.execute(_LOCK_TABLES)
        ((stays,),) = await fetch_rows(
            connection,
            _ANY_KEPT.format(to=self._targets["deliveries"], over=ENDED_LONG_AGO),
            before=self._before,
        )
        if not stays and self._exported is not None:
            log = _NOT_EXPORTED.format(source=self._targets["log_entries"], but="")
            stays = await self._has_not_exported(log)
        until = asyncio.get_running_loop().time() + self._lock_ms / 1000
        for part in self._range.partition_sets:
            # In one round trip, because all others wait for each.
            await connection.execute(
                ";".join(
                    f"ALTER TABLE {table} DETACH PARTITION {name};"
                    f"DROP FUNCTION {name}{FUNCTION_SUFFIX} CASCADE;"
                    f"ALTER TABLE {name} RENAME TO {name}_gone"
                    for table, name in part.partitions.items()
                )
            )
            if asyncio.get_running_loop().time() > until:
                raise StorageRefusedError("the swap takes too long")
        for table, to in self._targets.items():
            await connection.execute(
                f"ALTER TABLE {table} ATTACH PARTITION {to} "
                f"FOR VALUES FROM ('{low}') TO ('{high}');"
                f"ALTER TABLE {to} DROP CONSTRAINT {to}_bounds;"
                f"ALTER TABLE {to} RENAME TO {to.removesuffix(_NEW_SUFFIX)}"
                if stays
                else f"DROP TABLE {to}"
            )
        await connection.execute(_SAVE_WATERMARK, (self._range.high_ms,))
        return bool(stays)


_LIST_TABLES: Final = """
SELECT relname::text FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r' AND NOT relispartition
    AND relname ~ ('^(messages|deliveries|log_entries)_[0-9]{4,8}' || %s || '$') ORDER BY 1
"""
_LIST_FUNCTIONS: Final = """
SELECT proname::text FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
    AND proname ~ '^(messages|deliveries|log_entries)_[0-9]{4,8}(_kept[0-9]+)?_mirror$' ORDER BY 1
"""
_RELEASE_IDS: Final = """
DELETE FROM message_ids i USING {gone} g
WHERE g.ctid >= %(from)s::tid AND g.ctid < %(to)s::tid AND g.caller_id IS NOT NULL AND i.room_id = g.room_id
    AND i.caller_id = g.caller_id AND i.message_id = g.id
    AND NOT EXISTS (SELECT FROM messages m WHERE m.room_id = g.room_id AND m.id = g.id)
"""


async def drop_unfinished(connection: Connection) -> None:
    """Drop what was begun and not swapped. StorageRefusedError: it is in use, try again."""
    for (function,) in await fetch_rows(connection, _LIST_FUNCTIONS):
        await retry_exclusive_lock(connection, f"DROP FUNCTION {function} CASCADE")
    for (table,) in await fetch_rows(connection, _LIST_TABLES, "_kept[0-9]+_new"):
        await connection.execute(f"DROP TABLE {table}")


async def drop_replaced(connection: Connection, should_continue: ShouldContinue) -> None:
    """Free the ids of deleted messages, and drop the partitions that a swap has detached."""
    for (gone,) in await fetch_rows(connection, _LIST_TABLES, "(_kept[0-9]+)?_gone"):
        if gone.startswith("messages_"):
            for low in range(
                0, await fetch_value(connection, COUNT_PAGES, gone), PAGES_PER_STATEMENT
            ):
                if not should_continue():
                    return
                pages = {"from": f"({low},0)", "to": f"({low + PAGES_PER_STATEMENT},0)"}
                await retry_on_lock_timeout(connection, _RELEASE_IDS.format(gone=gone), pages)
    for (gone,) in await fetch_rows(connection, _LIST_TABLES, "(_kept[0-9]+)?_gone"):
        if not should_continue():
            return
        await connection.execute(f"DROP TABLE {gone}")
