"""Keep the log's index of transactions up to date with what was appended.

`log_entries_xid` is a BRIN index: a summary of each range of blocks. PostgreSQL reads every range
without one, and by itself it summarizes new ranges only when it vacuums, which a log of inserts
seldom needs. What reads by transaction (the count of usage, the export, retention) would read the
whole day each time. Only complete ranges are summarized: in one with a summary, each transaction
that adds rows must widen it.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psycopg
from sqlalchemy import exc, text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import transaction
from rooms.errors import StorageRefusedError

RANGE_BLOCKS: Final = 64
"""Blocks of a range, as the migrations create the index."""
MIN_RANGES: Final = 16
"""Fewer new ranges (8 MiB) are left: to read them costs less."""
MAX_RANGES: Final = 1000
"""Ranges of one statement: half a gigabyte, which takes about a second."""
_INDEXES: Final = text("""
SELECT i.indexrelid::regclass::text AS name, i.indexrelid::int8 AS oid,
    pg_relation_size(i.indrelid) / current_setting('block_size')::int8 AS blocks
FROM pg_inherits h JOIN pg_index i ON i.indexrelid = h.inhrelid
WHERE h.inhparent = to_regclass('log_entries_xid')
""")
_LOCK_TIMEOUT: Final = text("SET LOCAL lock_timeout = '200ms'")
_SUMMARIZE: Final = text(f"""
SELECT sum(brin_summarize_range(CAST(:name AS regclass), block))
FROM generate_series(CAST(:first AS int8), CAST(:last AS int8), {RANGE_BLOCKS}) block
""")  # noqa: S608 - a constant of this module
_SKIPPED: Final = (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedTable)
"""Another role owns the table, or retention has dropped it: reading takes longer, no more."""


@dataclass(frozen=True, slots=True)
class _Partition:
    name: str
    oid: int
    """The index itself: a rewritten day has another one of the same name."""
    blocks: int


class LogIndex:
    """Summarize the new ranges of every partition. Remember what has a summary."""

    def __init__(self) -> None:
        self._summarized: dict[int, int] = {}
        """Blocks with a summary, by index."""

    async def update(self, engine: AsyncEngine, should_continue: Callable[[], bool]) -> None:
        """Summarize all new ranges, a bounded number a transaction. StorageUnavailableError.

        A partition whose lock something else holds, such as a vacuum, is left for the next time.
        """
        async with transaction(engine) as connection:
            found = [_Partition(*row) for row in await connection.execute(_INDEXES)]
        known = self._summarized
        self._summarized = {one.oid: known.get(one.oid, 0) for one in found}
        for partition in found:
            with contextlib.suppress(StorageRefusedError):
                await self._update(engine, partition, should_continue)

    async def _update(
        self, engine: AsyncEngine, partition: _Partition, should_continue: Callable[[], bool]
    ) -> None:
        complete = partition.blocks // RANGE_BLOCKS * RANGE_BLOCKS
        first = self._summarized[partition.oid]
        if complete - first < MIN_RANGES * RANGE_BLOCKS:
            return
        while first < complete and should_continue():
            end = min(complete, first + MAX_RANGES * RANGE_BLOCKS)
            values = {"name": partition.name, "first": first, "last": end - 1}
            try:
                async with transaction(engine) as connection:
                    await connection.execute(_LOCK_TIMEOUT)
                    await connection.execute(_SUMMARIZE, values)
            except exc.ProgrammingError as error:
                if not isinstance(error.orig, _SKIPPED):
                    raise
            self._summarized[partition.oid] = first = end
