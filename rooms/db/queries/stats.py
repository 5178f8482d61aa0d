"""Count what waits in each state, in PostgreSQL on request, at most every few seconds."""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.connection import transaction, without_share
from rooms.db.writer import LIVENESS_LOCK
from rooms.domain.work_location import TO_RELAY, WorkLocation
from rooms.errors import StorageRefusedError, TransientError
from rooms.outages import OUTAGES

CACHE_S: Final = 5.0
_SIDELINED_CACHE_S: Final = 15.0
_SIDELINED_RETRY_S: Final = 600.0
_SIDELINED_TIMEOUT_MS: Final = 2000
_COUNT_FAILED: Final = "counts for Prometheus failed"

# Rows that are due and unclaimed wait; later ones are scheduled or in backoff. A relay's claims are
# not counted.
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
    WHERE l.circuit_open AND s.status NOT IN ('deleted', 'rejected', 'terminated') AND coalesce(s.circuit_failures, r.circuit_failures) > 0
""")
_SIDELINED: Final = text("""
    SELECT reason, count(*) AS depth, extract(epoch FROM now() - min(since)) AS oldest_s FROM sidelined GROUP BY reason
""")
# By the index of entries without a slot.
_UNLOADED: Final = text(
    "SELECT count(*) FROM (SELECT FROM sidelined WHERE shard IS NULL LIMIT 100000) s"
)
_ALIVE: Final = text("""
    SELECT w.kind, count(*) AS alive FROM pg_locks l JOIN writers w ON w.id = l.objid::bigint
    WHERE l.locktype = 'advisory' AND l.classid = :lock AND l.objsubid = 2 AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    GROUP BY w.kind
""").bindparams(lock=LIVENESS_LOCK)

_TYPES: Final = ("push", "pull")
_LOCATIONS: Final = ("here", "to_send", "sent", "later")
_READY_LOCATIONS: Final = frozenset({WorkLocation.PUSH_LOCAL, WorkLocation.PULL_LOCAL, *TO_RELAY})
"""The locations where a due row waits to be taken out of the outbox: by a worker, a poll, or the
relay.
"""


# Prometheus registries keep collectors by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueueStats(Collector):
    """Hold one count of everything that waits."""

    up: bool
    depth: Mapping[str, int] = field(default_factory=dict)
    not_due: Mapping[str, int] = field(default_factory=dict)
    claimed: Mapping[str, int] = field(default_factory=dict)
    locations: Mapping[str, int] = field(default_factory=dict)
    outbox_age_s: float = 0.0
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    sidelined: Mapping[str, int] = field(default_factory=dict)
    sidelined_oldest_s: Mapping[str, float] = field(default_factory=dict)
    sideline_unloaded: int = 0
    alive_writers: Mapping[str, int] = field(default_factory=dict)
    leased: int = 0
    ordered_keys: int = 0
    blocked_keys: int = 0
    circuits_open: int = 0
    crash_looping: int = 0

    def collect(self) -> Iterator[Metric]:
        """Return the gauges, for prometheus_client."""
        yield GaugeMetricFamily(
            "rooms_database_up", "Whether PostgreSQL answered.", value=float(self.up)
        )
        if not self.up:
            return
        yield from (
            _family("rooms_queue_depth", "Copies that wait, due or not.", "kind", self.depth),
            _family("rooms_queue_later", "Copies that are not due yet.", "kind", self.not_due),
            _family("rooms_queue_claimed", "Copies that a worker has taken.", "kind", self.claimed),
            _family(
                "rooms_queue_oldest_seconds",
                "How long the oldest due copy waits.",
                "kind",
                self.oldest_s,
            ),
            _family(
                "rooms_outbox_rows",
                "Rows of the outbox by location.",
                "place",
                self.locations,
            ),
            _family("rooms_held", "Deliveries held back.", "reason", self.held),
            _family("rooms_sidelined", "Sidelined deliveries.", "reason", self.sidelined),
            _family(
                "rooms_sideline_oldest_seconds",
                "How long the oldest delivery has been sidelined.",
                "reason",
                self.sidelined_oldest_s,
            ),
            GaugeMetricFamily(
                "rooms_sideline_unloaded",
                "Sidelined deliveries that no magazine has yet, up to 100,000.",
                value=float(self.sideline_unloaded),
            ),
            _family(
                "rooms_processes_alive", "Writers whose session lives.", "kind", self.alive_writers
            ),
            GaugeMetricFamily(
                "rooms_circuits_open",
                "Subscriptions whose circuit is open.",
                value=float(self.circuits_open),
            ),
            GaugeMetricFamily(
                "rooms_ordered_keys",
                "Ordering keys with unfinished deliveries.",
                value=float(self.ordered_keys),
            ),
            GaugeMetricFamily(
                "rooms_parked_keys",
                "Ordering keys whose head is sidelined.",
                value=float(self.blocked_keys),
            ),
            GaugeMetricFamily(
                "rooms_outbox_abandoned",
                "Copies whose last two claims or more ended with the death of their worker.",
                value=float(self.crash_looping),
            ),
            GaugeMetricFamily(
                "rooms_leased", "Deliveries under a lease.", value=float(self.leased)
            ),
            GaugeMetricFamily(
                "rooms_outbox_age_seconds",
                "How long the oldest due outbox row waits for a worker, a poll or the relay.",
                value=self.outbox_age_s,
            ),
        )


def _family(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, description, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], float(value))
    return family


async def count_alive(connection: AsyncConnection) -> dict[str, int]:
    """Count the living writers of each kind, which their session locks prove."""
    return dict(tuple(row) for row in await connection.execute(_ALIVE))


class CachedStats:
    """Count at most once in `CACHE_S`, whatever the number of requests."""

    def __init__(self, engine: AsyncEngine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._cached: QueueStats | None = None
        self._cached_until = 0.0
        self._sidelined: dict[str, int] = {}
        self._sidelined_oldest_s: dict[str, float] = {}
        self._sidelined_until = 0.0

    async def counts(self) -> QueueStats:
        """Return what waits now, or did a few seconds ago; `up` is false if PostgreSQL is away."""
        async with self._lock:
            if self._cached is None or self._monotonic() >= self._cached_until:
                try:
                    with without_share():
                        await self._count_sidelined()
                        self._cached = await self._count()
                    OUTAGES.record_success(_COUNT_FAILED)
                except TransientError as exc:
                    OUTAGES.record_failure(exc, _COUNT_FAILED)
                    self._cached = QueueStats(up=False)
                self._cached_until = self._monotonic() + CACHE_S
            return self._cached

    async def _count(self) -> QueueStats:
        async with transaction(self._engine) as connection:
            queues = [tuple(row) for row in await connection.execute(_QUEUES)]
            held = await connection.execute(_HELD)
            leased = await connection.scalar(_LEASED)
            keys, parked = (await connection.execute(_KEYS)).one()
            circuits = await connection.scalar(_CIRCUITS)
            unloaded = await connection.scalar(_UNLOADED)
            alive = await count_alive(connection)
        depth, later, claimed = (dict.fromkeys(_TYPES, 0) for _ in range(3))
        oldest, places, age_s = dict.fromkeys(_TYPES, 0.0), dict.fromkeys(_LOCATIONS, 0), 0.0
        abandoned = 0
        for place, rows, lost, not_due, taken, oldest_s in queues:
            kind = _TYPES[place & 1]
            abandoned += lost
            depth[kind] += rows
            later[kind] += not_due
            claimed[kind] += taken
            oldest[kind] = max(oldest[kind], float(oldest_s))
            places[_LOCATIONS[place >> 1]] += rows
            if place in _READY_LOCATIONS:
                age_s = max(age_s, float(oldest_s))
        return QueueStats(
            up=True,
            depth=depth,
            not_due=later,
            claimed=claimed,
            oldest_s=oldest,
            locations=places,
            outbox_age_s=age_s,
            held=dict(tuple(row) for row in held),
            alive_writers=alive,
            sidelined=self._sidelined,
            sidelined_oldest_s=self._sidelined_oldest_s,
            sideline_unloaded=unloaded or 0,
            leased=leased or 0,
            ordered_keys=keys,
            blocked_keys=parked,
            circuits_open=circuits or 0,
            crash_looping=abandoned,
        )

    async def _count_sidelined(self) -> None:
        # This reads the whole table. So it is done seldom, never for long, and hardly ever again
        # once it took too long.
        if self._monotonic() < self._sidelined_until:
            return
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(
                    text(f"SET LOCAL statement_timeout = {_SIDELINED_TIMEOUT_MS}")
                )
                rows = [tuple(row) for row in await connection.execute(_SIDELINED)]
            self._sidelined = {reason: depth for reason, depth, _ in rows}
            self._sidelined_oldest_s = {reason: float(oldest_s) for reason, _, oldest_s in rows}
            self._sidelined_until = self._monotonic() + _SIDELINED_CACHE_S
        except StorageRefusedError:
            self._sidelined, self._sidelined_oldest_s = {}, {}
            self._sidelined_until = self._monotonic() + _SIDELINED_RETRY_S
