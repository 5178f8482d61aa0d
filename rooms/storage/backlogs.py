"""What waits of one organisation: the counts of `rooms.storage.gauges`, over its rooms only."""

import asyncio
from collections.abc import Callable
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.domain.ids import OrganisationId
from rooms.storage.gauges import FRESH_S, Counts
from rooms.storage.transactions import transaction

MOST: Final = 100_000
"""Most rows that are counted of each table: an organisation cannot have more of the service's time than that costs."""
_MOST_KNOWN: Final = 1000
_KINDS: Final = ("push", "pull")

# Each room costs a look into the primary key of each table.
_OWN: Final = "(SELECT id FROM rooms WHERE organisation_id = :organisation) r CROSS JOIN LATERAL"
_QUEUES: Final = text(f"""
    SELECT kind & 1, count(*), count(*) FILTER (WHERE abandoned > 1), count(*) FILTER (WHERE due_at > now()),
        count(*) FILTER (WHERE claimed_until > now() AND kind NOT IN (2, 3)),
        coalesce(extract(epoch FROM now() - min(due_at) FILTER (WHERE due_at <= now())), 0)::float8
    FROM (SELECT o.* FROM {_OWN} (
        SELECT kind, abandoned, due_at, claimed_until FROM outbox WHERE room_id = r.id LIMIT {MOST}
    ) o LIMIT {MOST}) o GROUP BY 1
""")  # noqa: S608 - words of our own
_BY_REASON: Final = """
    SELECT reason, count(*) FROM (SELECT o.reason FROM {own} (
        SELECT reason FROM {table} WHERE room_id = r.id LIMIT {most}
    ) o LIMIT {most}) o GROUP BY 1
"""
_HELD: Final = text(_BY_REASON.format(own=_OWN, table="held", most=MOST))
_SIDELINED: Final = text(_BY_REASON.format(own=_OWN, table="sidelined", most=MOST))
_LEASED: Final = text(f"""
    SELECT count(*) FROM (SELECT FROM {_OWN} (SELECT FROM leases WHERE room_id = r.id LIMIT {MOST}) o LIMIT {MOST}) o
""")  # noqa: S608 - words of our own


class Backlogs:
    """Count what an organisation has waiting, at most once in `FRESH_S` however many requests ask."""

    def __init__(self, engine: AsyncEngine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._known: dict[OrganisationId, tuple[Counts, float]] = {}
        self._turns: dict[OrganisationId, asyncio.Lock] = {}

    async def counts(self, organisation: OrganisationId) -> Counts:
        """Return what waits now, or did a few seconds ago. StorageUnavailableError, StorageRefusedError."""
        turn = self._turns.setdefault(organisation, asyncio.Lock())
        try:
            async with turn:
                counts, until = self._known.get(organisation, (None, 0.0))
                if counts is None or self._monotonic() >= until:
                    counts = await self._count(organisation)
                    self._keep(organisation, counts)
                return counts
        finally:
            if not turn.locked():
                self._turns.pop(organisation, None)

    def _keep(self, organisation: OrganisationId, counts: Counts) -> None:
        self._known.pop(organisation, None)
        if len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[organisation] = counts, self._monotonic() + FRESH_S

    async def _count(self, organisation: OrganisationId) -> Counts:
        whose = {"organisation": organisation}
        async with transaction(self._engine) as connection:
            queues = {row[0]: tuple(row[1:]) for row in await connection.execute(_QUEUES, whose)}
            held = dict(tuple(row) for row in await connection.execute(_HELD, whose))
            sidelined = dict(tuple(row) for row in await connection.execute(_SIDELINED, whose))
            leased = await connection.scalar(_LEASED, whose)
        rows = {kind: queues.get(number, (0, 0, 0, 0, 0.0)) for number, kind in enumerate(_KINDS)}
        return Counts(
            up=True,
            depth={kind: row[0] for kind, row in rows.items()},
            abandoned=sum(row[1] for row in rows.values()),
            later={kind: row[2] for kind, row in rows.items()},
            claimed={kind: row[3] for kind, row in rows.items()},
            oldest_s={kind: row[4] for kind, row in rows.items()},
            held=held,
            sidelined=sidelined,
            leased=leased or 0,
        )
