"""How much waits where, counted in PostgreSQL when somebody asks, at most every few seconds."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.domain.place import TO_SEND, Place
from rooms.errors import StorageRefusedError, TransientError
from rooms.outages import OUTAGES
from rooms.storage.transactions import transaction
from rooms.storage.writer import LIFE_LOCK

FRESH_S: Final = 5.0
_SIDELINED_FRESH_S: Final = 15.0
_SIDELINED_REST_S: Final = 600.0
_SIDELINED_TIMEOUT_MS: Final = 2000
_UNCOUNTED: Final = "counts for Prometheus failed"

# Rows that are due and unclaimed wait; those due later are scheduled or in backoff. A relay's claims are no worker's.
_QUEUES: Final = text("""
    SELECT kind, count(*) AS depth, count(*) FILTER (WHERE abandoned > 1) AS abandoned,
        count(*) FILTER (WHERE due_at > now()) AS later,
        count(*) FILTER (WHERE claimed_until > now() AND kind NOT IN (2, 3)) AS claimed,
        coalesce(extract(epoch FROM now() - min(due_at) FILTER (WHERE due_at <= now())), 0) AS oldest_s
    FROM outbox GROUP BY kind
""")
_HELD: Final = text("SELECT reason, count(*) AS depth FROM held GROUP BY reason")
_KEYS: Final = text("""
    SELECT count(*), count(*) FILTER (WHERE EXISTS (SELECT FROM sidelined s WHERE s.room_id = k.room_id AND s.id = k.head_id))
    FROM ordered_keys k
""")
_LEASED: Final = text("SELECT count(*) FROM leases")
_CIRCUITS: Final = text("""
    SELECT count(*) FROM lanes l JOIN subscriptions s ON s.room_id = l.room_id AND s.id = l.id JOIN rooms r ON r.id = s.room_id
    WHERE l.circuit_open AND s.status <> 'deleted' AND coalesce(s.circuit_failures, r.circuit_failures) > 0
""")
_SIDELINED: Final = text("""
    SELECT reason, count(*) AS depth, extract(epoch FROM now() - min(since)) AS oldest_s FROM sidelined GROUP BY reason
""")
# By the index of what has no slot yet.
_UNLOADED: Final = text("SELECT count(*) FROM (SELECT FROM sidelined WHERE shard IS NULL LIMIT 100000) s")
_ALIVE: Final = text("""
    SELECT w.kind, count(*) AS alive FROM pg_locks l JOIN writers w ON w.id = l.objid::bigint
    WHERE l.locktype = 'advisory' AND l.classid = :lock AND l.objsubid = 2 AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    GROUP BY w.kind
""").bindparams(lock=LIFE_LOCK)

_TYPES: Final = ("push", "pull")
_PLACES: Final = ("here", "to_send", "sent", "later")
_WAITING: Final = frozenset({Place.PUSH_HERE, Place.PULL_HERE, *TO_SEND})
"""Where a due row waits for whoever takes it out of the outbox: a worker, a poll, or the relay."""


# Registries of Prometheus keep collectors by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counts(Collector):
    """One count of everything that waits."""

    up: bool
    depth: Mapping[str, int] = field(default_factory=dict)
    later: Mapping[str, int] = field(default_factory=dict)
    claimed: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    outbox_age_s: float = 0.0
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    sidelined: Mapping[str, int] = field(default_factory=dict)
    sidelined_oldest_s: Mapping[str, float] = field(default_factory=dict)
    unloaded: int = 0
    alive: Mapping[str, int] = field(default_factory=dict)
    leased: int = 0
    ordered_keys: int = 0
    parked_keys: int = 0
    circuits_open: int = 0
    abandoned: int = 0

    def collect(self) -> Iterator[Metric]:
        """The gauges, as prometheus_client takes them from a collector of its own."""
        yield GaugeMetricFamily("rooms_database_up", "Whether PostgreSQL answered.", value=float(self.up))
        if not self.up:
            return
        yield from (
            _family("rooms_queue_depth", "Copies that wait, due or not.", "kind", self.depth),
            _family("rooms_queue_later", "Copies that are not due yet.", "kind", self.later),
            _family("rooms_queue_claimed", "Copies that a worker has taken.", "kind", self.claimed),
            _family("rooms_queue_oldest_seconds", "How long the oldest due copy waits.", "kind", self.oldest_s),
            _family("rooms_outbox_rows", "Rows of the outbox by where they stand.", "place", self.places),
            _family("rooms_held", "Deliveries held back.", "reason", self.held),
            _family("rooms_sidelined", "Deliveries put aside.", "reason", self.sidelined),
            _family(
                "rooms_sideline_oldest_seconds",
                "How long the oldest delivery put aside rests.",
                "reason",
                self.sidelined_oldest_s,
            ),
            GaugeMetricFamily(
                "rooms_sideline_unloaded",
                "Deliveries put aside that no magazine has yet, up to 100,000.",
                value=float(self.unloaded),
            ),
            _family("rooms_processes_alive", "Writers whose session lives.", "kind", self.alive),
            GaugeMetricFamily(
                "rooms_circuits_open", "Subscriptions whose circuit is open.", value=float(self.circuits_open)
            ),
            GaugeMetricFamily(
                "rooms_ordered_keys", "Ordering keys that something is under way of.", value=float(self.ordered_keys)
            ),
            GaugeMetricFamily(
                "rooms_parked_keys", "Ordering keys whose head is sidelined.", value=float(self.parked_keys)
            ),
            GaugeMetricFamily(
                "rooms_outbox_abandoned",
                "Copies that two workers running or more had in hand when they died.",
                value=float(self.abandoned),
            ),
            GaugeMetricFamily("rooms_leased", "Deliveries under a lease.", value=float(self.leased)),
            GaugeMetricFamily(
                "rooms_outbox_age_seconds",
                "How long the oldest due row of the outbox waits for a worker, a poll or the relay.",
                value=self.outbox_age_s,
            ),
        )


def _family(name: str, told: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, told, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], float(value))
    return family


async def count_alive(connection: AsyncConnection) -> dict[str, int]:
    """How many writers of each kind live, which their session locks prove."""
    return dict(tuple(row) for row in await connection.execute(_ALIVE))


class Gauges:
    """Counts at most once in `FRESH_S`, however many ask."""

    def __init__(self, engine: AsyncEngine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._turn = asyncio.Lock()
        self._last: Counts | None = None
        self._until = 0.0
        self._sidelined: dict[str, int] = {}
        self._oldest_s: dict[str, float] = {}
        self._sidelined_until = 0.0

    async def counts(self) -> Counts:
        """What waits now, or did a few seconds ago. With PostgreSQL away: that it is."""
        async with self._turn:
            if self._last is None or self._monotonic() >= self._until:
                try:
                    await self._count_sidelined()
                    self._last = await self._count()
                    OUTAGES.succeeded(_UNCOUNTED)
                except TransientError as exc:
                    OUTAGES.failed(exc, _UNCOUNTED)
                    self._last = Counts(up=False)
                self._until = self._monotonic() + FRESH_S
            return self._last

    async def _count(self) -> Counts:
        async with transaction(self._engine) as connection:
            queues = [tuple(row) for row in await connection.execute(_QUEUES)]
            held = await connection.execute(_HELD)
            leased = await connection.scalar(_LEASED)
            keys, parked = (await connection.execute(_KEYS)).one()
            circuits = await connection.scalar(_CIRCUITS)
            unloaded = await connection.scalar(_UNLOADED)
            alive = await count_alive(connection)
        depth, later, claimed = (dict.fromkeys(_TYPES, 0) for _ in range(3))
        oldest, places, age_s = dict.fromkeys(_TYPES, 0.0), dict.fromkeys(_PLACES, 0), 0.0
        abandoned = 0
        for place, rows, lost, not_due, taken, oldest_s in queues:
            kind = _TYPES[place & 1]
            abandoned += lost
            depth[kind] += rows
            later[kind] += not_due
            claimed[kind] += taken
            oldest[kind] = max(oldest[kind], float(oldest_s))
            places[_PLACES[place >> 1]] += rows
            if place in _WAITING:
                age_s = max(age_s, float(oldest_s))
        return Counts(
            up=True,
            depth=depth,
            later=later,
            claimed=claimed,
            oldest_s=oldest,
            places=places,
            outbox_age_s=age_s,
            held=dict(tuple(row) for row in held),
            alive=alive,
            sidelined=self._sidelined,
            sidelined_oldest_s=self._oldest_s,
            unloaded=unloaded or 0,
            leased=leased or 0,
            ordered_keys=keys,
            parked_keys=parked,
            circuits_open=circuits or 0,
            abandoned=abandoned,
        )

    async def _count_sidelined(self) -> None:
        # This reads the whole table, so it is done seldom, never for long, and hardly ever again once it took too long.
        if self._monotonic() < self._sidelined_until:
            return
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(text(f"SET LOCAL statement_timeout = {_SIDELINED_TIMEOUT_MS}"))
                rows = [tuple(row) for row in await connection.execute(_SIDELINED)]
            self._sidelined = {reason: depth for reason, depth, _ in rows}
            self._oldest_s = {reason: float(oldest_s) for reason, _, oldest_s in rows}
            self._sidelined_until = self._monotonic() + _SIDELINED_FRESH_S
        except StorageRefusedError:
            self._sidelined, self._oldest_s = {}, {}
            self._sidelined_until = self._monotonic() + _SIDELINED_REST_S
