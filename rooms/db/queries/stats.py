"""Count what waits in each state, in PostgreSQL on request, at most every few seconds."""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.connection import savepoint, transaction, without_share
from rooms.db.writer import LIVENESS_LOCK
from rooms.domain.delivery_task import PRIORITIES
from rooms.domain.work_location import TO_RELAY, WorkLocation
from rooms.errors import QueryTimeoutError, StorageRefusedError, TransientError
from rooms.outages import OUTAGES

CACHE_S: Final = 5.0
_SIDELINED_CACHE_S: Final = 15.0
_RETRY_S: Final = 60.0
"""A statement that took too long is left out for this time."""
_TIMEOUT_MS: Final = 1000
_COUNT_FAILED: Final = "counts for Prometheus failed"
MAX_READ: Final = 300_000
"""Rows that are read of a table whose rows are counted by kind or reason."""
MAX_COUNTED: Final = 100_000
"""Rows that are counted where one number is asked for."""

# Rows that are due and unclaimed wait; later ones are scheduled or in backoff. A relay's claims are
# not counted.
_QUEUES: Final = text("""
    SELECT kind, count(*) AS depth, count(*) FILTER (WHERE abandoned > 1) AS abandoned,
        count(*) FILTER (WHERE due_at > now()) AS later,
        count(*) FILTER (WHERE claimed_until > now() AND kind NOT IN (2, 3)) AS claimed,
        coalesce(extract(epoch FROM now() - min(due_at) FILTER (WHERE due_at <= now())), 0) AS oldest_s
    FROM (SELECT kind, abandoned, due_at, claimed_until FROM outbox LIMIT :read) o GROUP BY kind
""")
# By the indexes of what workers and the relay claim: the oldest row may be beyond those read above.
_OLDEST: Final = text(f"""
    SELECT o.kind, extract(epoch FROM now() - min(o.due_at)) FROM generate_series(0, {PRIORITIES - 1}) p CROSS JOIN LATERAL (
        (SELECT kind, due_at FROM outbox WHERE kind = 0 AND priority = p AND due_at <= now() ORDER BY due_at LIMIT 1)
        UNION ALL
        (SELECT kind, due_at FROM outbox WHERE kind IN (2, 3) AND priority = p AND due_at <= now() ORDER BY due_at LIMIT 1)
    ) o GROUP BY o.kind
""")  # noqa: S608 - a constant
_HELD: Final = text(
    "SELECT reason, count(*) FROM (SELECT reason FROM held LIMIT :read) h GROUP BY reason"
)
# With OFFSET 0, each key costs a look into a primary key, and never a read of all of `sidelined`.
_KEYS: Final = text("""
    SELECT count(*), count(*) FILTER (WHERE EXISTS (SELECT FROM sidelined s WHERE s.room_id = k.room_id AND s.id = k.head_id OFFSET 0))
    FROM (SELECT room_id, head_id FROM ordered_keys LIMIT :counted) k
""")
_LEASED: Final = text("SELECT count(*) FROM (SELECT FROM leases LIMIT :counted) l")
# Each open circuit costs two looks into primary keys.
_CIRCUITS: Final = text("""
    SELECT count(*) FROM (
        SELECT room_id, id FROM (SELECT room_id, id, circuit_open FROM lanes LIMIT :read) l WHERE circuit_open LIMIT :counted
    ) l JOIN subscriptions s ON s.room_id = l.room_id AND s.id = l.id JOIN rooms r ON r.id = s.room_id
    WHERE s.status NOT IN ('deleted', 'rejected', 'terminated') AND coalesce(s.circuit_failures, r.circuit_failures) > 0
""")
_SIDELINED: Final = text("""
    SELECT reason, count(*) AS depth, extract(epoch FROM now() - min(since)) AS oldest_s
    FROM (SELECT reason, since FROM sidelined LIMIT :read) s GROUP BY reason
""")
# By the index of entries without a slot.
_UNLOADED: Final = text(
    "SELECT count(*) FROM (SELECT FROM sidelined WHERE shard IS NULL LIMIT :counted) s"
)
_ALIVE: Final = text("""
    SELECT w.kind, count(*) AS alive FROM pg_locks l JOIN writers w ON w.id = l.objid::bigint
    WHERE l.locktype = 'advisory' AND l.classid = :lock AND l.objsubid = 2 AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    GROUP BY w.kind
""").bindparams(lock=LIVENESS_LOCK)

_Row = tuple[Any, ...]
_TYPES: Final = ("push", "pull")
_LOCATIONS: Final = ("here", "to_send", "sent", "later")
_READY_LOCATIONS: Final = frozenset({WorkLocation.PUSH_LOCAL, WorkLocation.PULL_LOCAL, *TO_RELAY})
"""The locations where a due row waits to be taken out of the outbox: by a worker, a poll, or the
relay.
"""


# Prometheus registries keep collectors by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueueStats(Collector):
    """Hold one count of everything that waits; None, or nothing: that count was refused."""

    up: bool
    depth: Mapping[str, int] = field(default_factory=dict)
    not_due: Mapping[str, int] = field(default_factory=dict)
    claimed: Mapping[str, int] = field(default_factory=dict)
    locations: Mapping[str, int] = field(default_factory=dict)
    outbox_age_s: float | None = None
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    sidelined: Mapping[str, int] = field(default_factory=dict)
    sidelined_oldest_s: Mapping[str, float] = field(default_factory=dict)
    sideline_unloaded: int | None = None
    alive_writers: Mapping[str, int] = field(default_factory=dict)
    leased: int | None = None
    ordered_keys: int | None = None
    blocked_keys: int | None = None
    circuits_open: int | None = None
    crash_looping: int | None = None

    def collect(self) -> Iterator[Metric]:
        """Return the gauges, for prometheus_client."""
        yield GaugeMetricFamily(
            "rooms_database_up", "Whether PostgreSQL answered.", value=float(self.up)
        )
        if not self.up:
            return
        yield from (
            _family(
                "rooms_queue_depth",
                "Copies that wait, due or not, among up to 300,000 rows of the outbox.",
                "kind",
                self.depth,
            ),
            _family(
                "rooms_queue_later",
                "Copies that are not due yet, among up to 300,000 rows of the outbox.",
                "kind",
                self.not_due,
            ),
            _family(
                "rooms_queue_claimed",
                "Copies that a worker has taken, among up to 300,000 rows of the outbox.",
                "kind",
                self.claimed,
            ),
            _family(
                "rooms_queue_oldest_seconds",
                "How long the oldest due copy waits; PULL: among up to 300,000 rows.",
                "kind",
                self.oldest_s,
            ),
            _family(
                "rooms_outbox_rows",
                "Rows of the outbox by location, up to 300,000 in all.",
                "place",
                self.locations,
            ),
            _family(
                "rooms_held",
                "Deliveries held back, up to 300,000 in all.",
                "reason",
                self.held,
            ),
            _family(
                "rooms_sidelined",
                "Sidelined deliveries, up to 300,000 in all.",
                "reason",
                self.sidelined,
            ),
            _family(
                "rooms_sideline_oldest_seconds",
                "How long the oldest delivery has been sidelined, among up to 300,000.",
                "reason",
                self.sidelined_oldest_s,
            ),
            _gauge(
                "rooms_sideline_unloaded",
                "Sidelined deliveries that no magazine has yet, up to 100,000.",
                self.sideline_unloaded,
            ),
            _family(
                "rooms_processes_alive", "Writers whose session lives.", "kind", self.alive_writers
            ),
            _gauge(
                "rooms_circuits_open",
                "Subscriptions whose circuit is open, up to 100,000 among 300,000.",
                self.circuits_open,
            ),
            _gauge(
                "rooms_ordered_keys",
                "Ordering keys with unfinished deliveries, up to 100,000.",
                self.ordered_keys,
            ),
            _gauge(
                "rooms_parked_keys",
                "Ordering keys whose head is sidelined, among up to 100,000 keys.",
                self.blocked_keys,
            ),
            _gauge(
                "rooms_outbox_abandoned",
                "Copies whose last two claims or more ended with the death of their worker, among up to 300,000 rows of the outbox.",
                self.crash_looping,
            ),
            _gauge("rooms_leased", "Deliveries under a lease, up to 100,000.", self.leased),
            _gauge(
                "rooms_outbox_age_seconds",
                "How long the oldest due outbox row waits for a worker, a poll or the relay.",
                self.outbox_age_s,
            ),
        )


def _gauge(name: str, description: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(name, description)
    if value is not None:
        family.add_metric([], float(value))
    return family


def _family(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, description, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], float(value))
    return family


async def count_alive(connection: AsyncConnection) -> dict[str, int]:
    """Count the living writers of each kind, which their session locks prove."""
    return dict(tuple(row) for row in await connection.execute(_ALIVE))


class CachedStats:
    """Count at most once in `CACHE_S`, whatever the number of requests.

    Each statement reads a bounded number of rows in a bounded time. If one is refused, only its
    figures are missing.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        monotonic: Callable[[], float],
        *,
        max_read: int = MAX_READ,
        max_counted: int = MAX_COUNTED,
    ) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._bounds = {"read": max_read, "counted": max_counted}
        self._lock = asyncio.Lock()
        self._cached: QueueStats | None = None
        self._cached_until = 0.0
        self._sidelined: Sequence[_Row] = ()
        self._sidelined_until = 0.0
        self._left_out_until: dict[TextClause, float] = {}

    async def counts(self) -> QueueStats:
        """Return what waits now, or did a few seconds ago; `up` is false if PostgreSQL is away."""
        async with self._lock:
            if self._cached is None or self._monotonic() >= self._cached_until:
                try:
                    with without_share():
                        self._cached = await self._count()
                except StorageRefusedError as exc:
                    OUTAGES.record_failure(exc, _COUNT_FAILED)
                    self._cached = QueueStats(up=True)
                except TransientError as exc:
                    OUTAGES.record_failure(exc, _COUNT_FAILED)
                    self._cached = QueueStats(up=False)
                self._cached_until = self._monotonic() + CACHE_S
            return self._cached

    async def _count(self) -> QueueStats:
        async with transaction(self._engine) as connection:
            await connection.execute(text(f"SET LOCAL statement_timeout = {_TIMEOUT_MS}"))
            if self._monotonic() >= self._sidelined_until:
                self._sidelined = await self._rows(connection, _SIDELINED)
                self._sidelined_until = self._monotonic() + _SIDELINED_CACHE_S
            queues = await self._rows(connection, _QUEUES)
            oldest = await self._rows(connection, _OLDEST)
            held = await self._rows(connection, _HELD)
            leased = await self._row(connection, _LEASED, 1)
            keys = await self._row(connection, _KEYS, 2)
            circuits = await self._row(connection, _CIRCUITS, 1)
            unloaded = await self._row(connection, _UNLOADED, 1)
            alive = await self._rows(connection, _ALIVE)
        if not self._left_out_until:
            OUTAGES.record_success(_COUNT_FAILED)
        is_complete = _QUEUES not in self._left_out_until
        return replace(
            _outbox_stats(queues, oldest) if is_complete else QueueStats(up=True),
            held=dict(held),
            alive_writers=dict(alive),
            sidelined={reason: depth for reason, depth, _ in self._sidelined},
            sidelined_oldest_s={reason: float(age_s) for reason, _, age_s in self._sidelined},
            sideline_unloaded=unloaded[0],
            leased=leased[0],
            ordered_keys=keys[0],
            blocked_keys=keys[1],
            circuits_open=circuits[0],
        )

    async def _row(
        self, connection: AsyncConnection, statement: TextClause, columns: int
    ) -> Sequence[int | None]:
        rows = await self._rows(connection, statement)
        return rows[0] if rows else (None,) * columns

    async def _rows(self, connection: AsyncConnection, statement: TextClause) -> Sequence[_Row]:
        """Return what a statement finds; nothing while it is refused or left out."""
        if self._monotonic() < self._left_out_until.get(statement, 0.0):
            return ()
        try:
            async with savepoint(connection):
                found = await connection.execute(statement, self._bounds)
                rows = [tuple(row) for row in found]
        except StorageRefusedError as exc:
            OUTAGES.record_failure(exc, _COUNT_FAILED)
            self._left_out_until[statement] = self._monotonic() + (
                _RETRY_S if isinstance(exc, QueryTimeoutError) else CACHE_S
            )
            return ()
        self._left_out_until.pop(statement, None)
        return rows


def _outbox_stats(queues: Sequence[_Row], claimable: Sequence[_Row]) -> QueueStats:
    """Return the counts of the outbox by type and by location."""
    depth, later, claimed = (dict.fromkeys(_TYPES, 0) for _ in range(3))
    oldest, places, age_s = dict.fromkeys(_TYPES, 0.0), dict.fromkeys(_LOCATIONS, 0), 0.0
    abandoned = 0
    for place, rows, lost, not_due, taken, _ in queues:
        kind = _TYPES[place & 1]
        abandoned += lost
        depth[kind] += rows
        later[kind] += not_due
        claimed[kind] += taken
        places[_LOCATIONS[place >> 1]] += rows
    for place, oldest_s in (*((row[0], row[-1]) for row in queues), *claimable):
        kind = _TYPES[place & 1]
        oldest[kind] = max(oldest[kind], float(oldest_s))
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
        crash_looping=abandoned,
    )
