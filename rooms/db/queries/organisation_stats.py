"""Count what waits in one organisation: the counts of `rooms.db.queries.stats` over its rooms."""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
from collections.abc import Callable
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import transaction
from rooms.db.queries.stats import CACHE_S, QueueStats
from rooms.domain.ids import OrganisationId

MAX_ROWS_COUNTED: Final = 100_000
"""The most rows counted of each table, which limits what an organisation's requests may cost."""
_MAX_CACHED: Final = 1000
_TYPES_BY_BIT: Final = ("push", "pull")

# Each room costs a look into the primary key of each table.
_OWN_ROOMS: Final = (
    "(SELECT id FROM rooms WHERE organisation_id = :organisation) r CROSS JOIN LATERAL"
)
_ORGANISATION_QUEUES: Final = text(f"""
    SELECT kind & 1, count(*), count(*) FILTER (WHERE abandoned > 1), count(*) FILTER (WHERE due_at > now()),
        count(*) FILTER (WHERE claimed_until > now() AND kind NOT IN (2, 3)),
        coalesce(extract(epoch FROM now() - min(due_at) FILTER (WHERE due_at <= now())), 0)::float8
    FROM (SELECT o.* FROM {_OWN_ROOMS} (
        SELECT kind, abandoned, due_at, claimed_until FROM outbox WHERE room_id = r.id LIMIT {MAX_ROWS_COUNTED}
    ) o LIMIT {MAX_ROWS_COUNTED}) o GROUP BY 1
""")  # noqa: S608 - constants of this package
_BY_REASON: Final = """
    SELECT reason, count(*) FROM (SELECT o.reason FROM {own} (
        SELECT reason FROM {table} WHERE room_id = r.id LIMIT {most}
    ) o LIMIT {most}) o GROUP BY 1
"""
_ORGANISATION_HELD: Final = text(
    _BY_REASON.format(own=_OWN_ROOMS, table="held", most=MAX_ROWS_COUNTED)
)
_ORGANISATION_SIDELINED: Final = text(
    _BY_REASON.format(own=_OWN_ROOMS, table="sidelined", most=MAX_ROWS_COUNTED)
)
_ORGANISATION_LEASED: Final = text(f"""
    SELECT count(*) FROM (SELECT FROM {_OWN_ROOMS} (SELECT FROM leases WHERE room_id = r.id LIMIT {MAX_ROWS_COUNTED}) o LIMIT {MAX_ROWS_COUNTED}) o
""")  # noqa: S608 - constants of this package


class OrganisationStats:
    """Count what waits in an organisation, at most once in `CACHE_S`."""

    def __init__(self, engine: AsyncEngine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._cache: dict[OrganisationId, tuple[QueueStats, float]] = {}
        self._locks: dict[OrganisationId, asyncio.Lock] = {}

    async def counts(self, organisation: OrganisationId) -> QueueStats:
        """Return what waits now, or did a few seconds ago.

        StorageUnavailableError, StorageRefusedError.
        """
        lock = self._locks.setdefault(organisation, asyncio.Lock())
        try:
            async with lock:
                counts, until = self._cache.get(organisation, (None, 0.0))
                if counts is None or self._monotonic() >= until:
                    counts = await self._count(organisation)
                    self._store(organisation, counts)
                return counts
        finally:
            if not lock.locked():
                self._locks.pop(organisation, None)

    def _store(self, organisation: OrganisationId, counts: QueueStats) -> None:
        self._cache.pop(organisation, None)
        if len(self._cache) >= _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        self._cache[organisation] = counts, self._monotonic() + CACHE_S

    async def _count(self, organisation: OrganisationId) -> QueueStats:
        whose = {"organisation": organisation}
        async with transaction(self._engine) as connection:
            queues = {
                row[0]: tuple(row[1:])
                for row in await connection.execute(_ORGANISATION_QUEUES, whose)
            }
            held = dict(tuple(row) for row in await connection.execute(_ORGANISATION_HELD, whose))
            sidelined = dict(
                tuple(row) for row in await connection.execute(_ORGANISATION_SIDELINED, whose)
            )
            leased = await connection.scalar(_ORGANISATION_LEASED, whose)
        rows = {
            kind: queues.get(number, (0, 0, 0, 0, 0.0)) for number, kind in enumerate(_TYPES_BY_BIT)
        }
        return QueueStats(
            up=True,
            depth={kind: row[0] for kind, row in rows.items()},
            crash_looping=sum(row[1] for row in rows.values()),
            not_due={kind: row[2] for kind, row in rows.items()},
            claimed={kind: row[3] for kind, row in rows.items()},
            oldest_s={kind: row[4] for kind, row in rows.items()},
            held=held,
            sidelined=sidelined,
            leased=leased or 0,
        )
