"""A part of the past is replaced by what must stay of it.

    begin ──► copy ──► settled ──► swap ──► bury
      │         │                   │         └── ids of messages that are gone are free; the old partitions are dropped
      │         │                   └── one transaction: the old partitions out, the copy (if anything is in it) in
      │         └── what is unfinished, sidelined or changed lately, its messages, their log
      └── empty tables beside the part, and mirrors on it (`mirrors.py`)

Only the triggers and the swap take locks that others wait behind. Each is asked for with a time-out and held while a few
rows of the catalog change; whoever does not get it tries again later. Until the swap is committed nothing is gone, and
`leftovers.py` takes away what somebody left who died before it; after it, what is out is told by its name, and buried.

The swap is right for statements that wait behind it with a snapshot taken before: `settled` has seen to it that none is
older than the copy, and what changed since stands in the copy by the very transactions that changed the part.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rooms.domain.states import UNFINISHED, State
from rooms.errors import StorageRefusedError
from rooms.storage.engine import Connection
from rooms.storage.exports import EXPORTED, SYSTEM
from rooms.storage.mirrors import KEYS, SUFFIX, mirror_of
from rooms.storage.partitions import STORAGE
from rooms.storage.patience import BUSY, PAGES, PAGES_OF, GoOn, locked, rows, tried, value
from rooms.storage.spans import TABLES, Part, Span

HELD_MS: Final = 2000
"""How long a statement of the swap may take, or be waited for, and what it does in all: so long others can wait."""
REST_BYTES: Final = 64 << 20
"""To put a copy in its place PostgreSQL reads all of the default partitions, while everybody waits: up to so much."""
_BATCH: Final = 200
_OVER_STATES: Final = ", ".join(f"'{state}'" for state in sorted(set(State) - UNFINISHED - {State.SIDELINED}))
OVER: Final = f"(state IN ({_OVER_STATES}) AND updated_at < %(before)s::timestamptz)"
"""Of a delivery: it has ended, and long enough ago."""

_NEW: Final = "_new"
"""Ends the name of a table that is not in its place yet."""
_COLUMNS: Final = """
SELECT attname::text FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_FREE_NUMBER: Final = """
SELECT 1 + coalesce(max(substring(relname FROM '_kept([0-9]+)')::int4), 0) FROM pg_class
WHERE relname ~ ('^(messages|deliveries|log_entries)_' || %s || '_kept[0-9]+(_gone|_new)?$')
"""
_MAKE: Final = """
CREATE TABLE {to} (LIKE {table} INCLUDING DEFAULTS INCLUDING INDEXES INCLUDING STORAGE INCLUDING COMPRESSION) {storage};
ALTER TABLE {to} ADD CONSTRAINT {to}_bounds CHECK ({key} >= '{low}' AND {key} < '{high}')
"""
_WEIGH: Final = "SELECT count(*) FILTER (WHERE NOT {over}), count(*) FROM {source}"
_COPY: Final = """
INSERT INTO {to} ({columns}) SELECT {columns} FROM (
    SELECT * FROM {source} WHERE ctid >= %(from)s::tid AND ctid < %(to)s::tid AND NOT {over} FOR KEY SHARE
) s ON CONFLICT DO NOTHING
"""
_PAGE: Final = """
SELECT room_id, id, message_id FROM {to} WHERE (room_id, id) > (%s::int4, %s::uuid) ORDER BY room_id, id LIMIT %s
"""
_FOLLOW: Final = """
INSERT INTO {to} ({columns}) SELECT {listed} FROM (
    SELECT DISTINCT * FROM unnest(%s::int4[], %s::uuid[]) AS v (room_id, message_id)
) v JOIN {source} s ON s.room_id = v.room_id AND s.{key} = v.message_id FOR KEY SHARE OF s
ON CONFLICT DO NOTHING
"""
_NOW: Final = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8"
# Another role's sessions show nothing here; they are not ours, and their statements are not begun again either.
_OLDER: Final = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND backend_type = 'client backend' AND age(backend_xmin) > age((%s::int8 & 4294967295)::text::xid)
)
"""
_NOT_LEFT: Final = """
SELECT EXISTS (SELECT FROM {source} s WHERE (xid::text::bigint) >= %s{but})
"""
_BUT: Final = " AND NOT EXISTS (SELECT FROM {to} t WHERE {same})"
_STRAYS: Final = "SELECT EXISTS (SELECT FROM {table}_rest WHERE {key} >= %s AND {key} < %s)"
_REST: Final = "SELECT {sizes}".format(sizes=" + ".join(f"pg_relation_size('{table}_rest')" for table in TABLES))
_LOCK: Final = "LOCK TABLE ONLY messages, ONLY deliveries, ONLY log_entries IN ACCESS EXCLUSIVE MODE"
_ANY: Final = "SELECT EXISTS (SELECT FROM {to} WHERE NOT {over})"
_MARK: Final = """
INSERT INTO upkeep_marks AS m (name, at) VALUES ('retention', to_timestamp(%s / 1000.0))
ON CONFLICT (name) DO UPDATE SET at = greatest(m.at, excluded.at)
"""


async def weigh(connection: Connection, part: Part, before: datetime) -> tuple[int, int]:
    """How many deliveries of a part would stay, and how many there are."""
    statement = _WEIGH.format(source=part.names["deliveries"], over=OVER)
    ((kept, total),) = await rows(connection, statement, before=before)
    return kept, total


async def exported_below(connection: Connection, destination: str) -> int:
    """Every row of the log of a transaction below this one has left for there."""
    ((end, _, _),) = await rows(connection, EXPORTED, destination, await value(connection, SYSTEM))
    return int(end)


async def has_strays(connection: Connection, span: Span) -> bool:
    """Whether rows of these times stand in the default partitions, so that no partition can be made over them."""
    for table, key in TABLES.items():
        if await value(connection, _STRAYS.format(table=table, key=key), *span.bounds):
            return True
    return False


class Replacement:
    """One span on its way out. Each step is to be finished before the next one; StorageRefusedError: not now."""

    def __init__(
        self,
        connection: Connection,
        span: Span,
        *,
        before: datetime,
        exported: int | None,
        held_ms: int = HELD_MS,
    ) -> None:
        """What ended before `before` goes. `exported`: of the log what is of a transaction below it; None: all."""
        self._connection = connection
        self._span = span
        self._before = before
        self._exported = exported
        self._held_ms = held_ms
        self._columns: dict[str, Sequence[str]] = {}
        self._to: dict[str, str] = {}
        self._since = 0

    async def has_left(self) -> bool:
        """Whether the export has all of the log that would go; what came since `begin` stays."""
        if self._exported is None:
            return True
        same = " AND ".join(f"t.{key} = s.{key}" for key in KEYS["log_entries"])
        but = _BUT.format(to=self._to["log_entries"], same=same) if self._to else ""
        for part in self._span.parts:
            statement = _NOT_LEFT.format(source=part.names["log_entries"], but=but)
            if await value(self._connection, statement, self._exported):
                return False
        return True

    async def begin(self) -> None:
        """Make the empty tables, and the mirrors."""
        if await value(self._connection, _REST) > REST_BYTES and await self._keeps():
            raise StorageRefusedError("too much stands in the default partitions")
        number = await value(self._connection, _FREE_NUMBER, self._span.label)
        low, high = self._span.bounds
        for table, key in TABLES.items():
            self._columns[table] = [name for (name,) in await rows(self._connection, _COLUMNS, table)]
            self._to[table] = to = f"{table}_{self._span.label}_kept{number}{_NEW}"
            make = _MAKE.format(to=to, table=table, storage=STORAGE[table], key=key, low=low, high=high)
            await self._connection.execute(make)
        for part in self._span.parts:
            for table in TABLES:
                function, trigger = mirror_of(table, dict(part.names), self._to, self._columns)
                await self._connection.execute(function)
                await locked(self._connection, trigger)

    async def _keeps(self) -> bool:
        for part in self._span.parts:
            found = await rows(
                self._connection, _ANY.format(to=part.names["deliveries"], over=OVER), before=self._before
            )
            if found[0][0]:
                return True
        return False

    async def copy(self, go_on: GoOn) -> bool:
        """Copy what stays, in small transactions. False: `go_on` said no."""
        for part in self._span.parts:
            source = part.names["deliveries"]
            columns = ", ".join(self._columns["deliveries"])
            statement = _COPY.format(to=self._to["deliveries"], source=source, columns=columns, over=OVER)
            for low in range(0, await value(self._connection, PAGES_OF, source), PAGES):
                if not go_on():
                    return False
                pages = {"from": f"({low},0)", "to": f"({low + PAGES},0)", "before": self._before}
                await tried(self._connection, statement, pages)
        return await self._follow(go_on)

    async def _follow(self, go_on: GoOn) -> bool:
        room, last = -1, self._span.bounds[0]
        page = _PAGE.format(to=self._to["deliveries"])
        while found := await rows(self._connection, page, room, last, _BATCH):
            room, last = found[-1][0], found[-1][1]
            wanted = [row[0] for row in found], [row[2] for row in found]
            for part in self._span.parts:
                for table in ("messages", "log_entries"):
                    if not go_on():
                        return False
                    statement = _FOLLOW.format(
                        to=self._to[table],
                        source=part.names[table],
                        key=TABLES[table],
                        columns=", ".join(self._columns[table]),
                        listed=", ".join(f"s.{column}" for column in self._columns[table]),
                    )
                    await tried(self._connection, statement, wanted)
        self._since = await value(self._connection, _NOW)
        return True

    async def settled(self) -> bool:
        """Whether nobody looks at a state of the database any more that is older than the copy."""
        return not await value(self._connection, _OLDER, self._since)

    async def swap(self) -> bool:
        """Put the copy in the place of the part, or nothing where nothing stays; whether something does."""
        try:
            async with self._connection.transaction():
                return await self._swapped()
        except BUSY as exc:
            raise StorageRefusedError(f"somebody is in the way: {exc}") from exc

    async def _swapped(self) -> bool:
        connection, (low, high) = self._connection, self._span.bounds
        await connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        await connection.execute(f"SET LOCAL statement_timeout = {self._held_ms}")
        # Frozen in the middle of this, a process would hold everybody up.
        await connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = {self._held_ms}")
        await connection.execute(_LOCK)
        ((stays,),) = await rows(connection, _ANY.format(to=self._to["deliveries"], over=OVER), before=self._before)
        if not stays and self._exported is not None:
            log = _NOT_LEFT.format(source=self._to["log_entries"], but="")
            stays = await value(connection, log, self._exported)
        until = asyncio.get_running_loop().time() + self._held_ms / 1000
        for part in self._span.parts:
            # At once, as everybody waits for every round trip.
            await connection.execute(
                ";".join(
                    f"ALTER TABLE {table} DETACH PARTITION {name}; DROP FUNCTION {name}{SUFFIX} CASCADE;"
                    f"ALTER TABLE {name} RENAME TO {name}_gone"
                    for table, name in part.names.items()
                )
            )
            if asyncio.get_running_loop().time() > until:
                raise StorageRefusedError("it takes too long")
        for table, to in self._to.items():
            await connection.execute(
                f"ALTER TABLE {table} ATTACH PARTITION {to} FOR VALUES FROM ('{low}') TO ('{high}');"
                f"ALTER TABLE {to} DROP CONSTRAINT {to}_bounds; ALTER TABLE {to} RENAME TO {to.removesuffix(_NEW)}"
                if stays
                else f"DROP TABLE {to}"
            )
        await connection.execute(_MARK, (self._span.high_ms,))
        return bool(stays)
