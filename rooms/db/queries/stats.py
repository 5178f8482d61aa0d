"""Count what waits in each state, in PostgreSQL on request, at most every few seconds."""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
import math
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
from rooms.errors import StorageRefusedError, TransientError
from rooms.outages import OUTAGES

CACHE_S: Final = 5.0
_SIDELINED_CACHE_S: Final = 15.0
MAX_AGE_S: Final = CACHE_S + _SIDELINED_CACHE_S
"""The longest age of figures that are not refused; the first page of the console says it."""
_RETRY_S: Final = 60.0
"""A count that was refused is left out for this time."""
_KEPT_S: Final = 300.0
"""The longest age of figures that stand in for refused ones."""
_UNKNOWN_S: Final = 30.0
"""Time without a free connection after which the database counts as away."""
_TIMEOUT_MS: Final = 1000
_ALL_S: Final = 3.0
"""Time after which no further statement of a count begins: one scrape has ten seconds."""
# The bounds must leave out the same rows each time: figures that jump mislead more than old ones.
_SETTINGS: Final = text(
    f"SELECT set_config('statement_timeout', '{_TIMEOUT_MS}', true), set_config('synchronize_seqscans', 'off', true)"
)
_COUNT_FAILED: Final = "counts for Prometheus failed"
MAX_READ: Final = 300_000
"""Rows that are read of a table whose rows are counted by kind or reason."""
MAX_COUNTED: Final = 100_000
"""Rows that are counted where one number is asked for."""

_MAX_POLLED: Final = 1000

# Rows that are due and unclaimed wait; later ones are scheduled or in backoff. A relay's claims are
# not counted.
_QUEUES: Final = text("""
    SELECT kind, count(*) AS depth, count(*) FILTER (WHERE abandoned > 1) AS abandoned,
        count(*) FILTER (WHERE due_at > now()) AS later,
        count(*) FILTER (WHERE claimed_until > now() AND kind NOT IN (2, 3)) AS claimed,
        coalesce(extract(epoch FROM now() - min(due_at) FILTER (WHERE due_at <= now())), 0) AS oldest_s
    FROM (SELECT kind, abandoned, due_at, claimed_until FROM outbox LIMIT :read) o GROUP BY kind
""")
# By the indexes of what workers and the relay claim, and of 1,000 subscriptions what polls take:
# the oldest row may be beyond those read above.
_OLDEST: Final = text(f"""
    WITH RECURSIVE polled (id) AS (
        (SELECT subscription_id FROM outbox WHERE kind = 1 ORDER BY subscription_id LIMIT 1)
        UNION ALL
        SELECT o.id FROM polled, LATERAL (
            SELECT subscription_id AS id FROM outbox WHERE kind = 1 AND subscription_id > polled.id ORDER BY subscription_id LIMIT 1
        ) o
    )
    SELECT o.kind, extract(epoch FROM now() - min(o.due_at)) FROM generate_series(0, {PRIORITIES - 1}) p CROSS JOIN LATERAL (
        (SELECT kind, due_at FROM outbox WHERE kind = 0 AND priority = p AND due_at <= now() ORDER BY due_at LIMIT 1)
        UNION ALL
        (SELECT kind, due_at FROM outbox WHERE kind IN (2, 3) AND priority = p AND due_at <= now() ORDER BY due_at LIMIT 1)
    ) o GROUP BY o.kind
    UNION ALL
    SELECT 1, extract(epoch FROM now() - min(o.due_at)) FROM (SELECT id FROM polled LIMIT {_MAX_POLLED}) s
        CROSS JOIN generate_series(0, {PRIORITIES - 1}) p CROSS JOIN LATERAL (
            SELECT due_at FROM outbox WHERE kind = 1 AND subscription_id = s.id AND priority = p AND due_at <= now() ORDER BY due_at LIMIT 1
        ) o HAVING count(*) > 0
""")  # noqa: S608 - constants
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


@dataclass(frozen=True, slots=True, eq=False)
class _Count:
    """Name a statement; after a refusal it is left out for `retry_s`, and else for `cache_s`."""

    name: str
    statement: TextClause
    retry_s: float = _RETRY_S
    cache_s: float = 0.0


_ALIVE_COUNT: Final = _Count("processes", _ALIVE, retry_s=CACHE_S)
_OLDEST_COUNT: Final = _Count("oldest", _OLDEST, retry_s=CACHE_S)
_QUEUES_COUNT: Final = _Count("outbox", _QUEUES)
_HELD_COUNT: Final = _Count("held", _HELD)
_LEASED_COUNT: Final = _Count("leases", _LEASED)
_KEYS_COUNT: Final = _Count("ordering_keys", _KEYS)
_CIRCUITS_COUNT: Final = _Count("circuits", _CIRCUITS)
_UNLOADED_COUNT: Final = _Count("unloaded", _UNLOADED)
_SIDELINED_COUNT: Final = _Count("sidelined", _SIDELINED, cache_s=_SIDELINED_CACHE_S)
_COUNTS: Final = (
    _ALIVE_COUNT,
    _OLDEST_COUNT,
    _QUEUES_COUNT,
    _HELD_COUNT,
    _LEASED_COUNT,
    _KEYS_COUNT,
    _CIRCUITS_COUNT,
    _UNLOADED_COUNT,
    _SIDELINED_COUNT,
)
"""In this order: if time is short, the first ones matter most."""
_TYPES: Final = ("push", "pull")
_LOCATIONS: Final = ("here", "to_send", "sent", "later")
_READY_LOCATIONS: Final = frozenset({WorkLocation.PUSH_LOCAL, WorkLocation.PULL_LOCAL, *TO_RELAY})
"""The locations where a due row waits to be taken out of the outbox: by a worker, a poll, or the
relay.
"""


# Prometheus registries keep collectors by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueueStats(Collector):
    """Hold one count of everything that waits.

    `refused`: the counts that were refused, by name, with 1, and all others with 0. Their figures
    are those of before; None, or a missing kind: none is known.
    """

    up: bool
    refused: Mapping[str, int] = field(default_factory=dict)
    depth: Mapping[str, int] = field(default_factory=dict)
    not_due: Mapping[str, int] = field(default_factory=dict)
    claimed: Mapping[str, int] = field(default_factory=dict)
    locations: Mapping[str, int] = field(default_factory=dict)
    outbox_age_s: float | None = None
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, int] | None = None
    sidelined: Mapping[str, int] | None = None
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
                "rooms_counts_refused",
                "Whether a count was refused or took too long; its figures are up to 5 minutes old, or missing.",
                "count",
                self.refused,
            ),
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
                "How long the oldest due copy waits; PULL: among 300,000 rows and 1,000 subscriptions.",
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
                self.held or {},
            ),
            _family(
                "rooms_sidelined",
                "Sidelined deliveries, up to 300,000 in all.",
                "reason",
                self.sidelined or {},
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
                "How long the oldest due outbox row waits for a worker, a poll (of 1,000 subscriptions) or the relay.",
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

    Each statement reads a bounded number of rows in a bounded time. The figures of one that is
    refused are those of before, for some minutes.
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
        self._connected_at = -math.inf
        self._found: dict[_Count, tuple[Sequence[_Row], float]] = {}
        self._next_at: dict[_Count, float] = {}
        self._refused: set[_Count] = set()

    async def counts(self) -> QueueStats:
        """Return what waits now, or did a few seconds ago; `up` is false if PostgreSQL is away."""
        async with self._lock:
            if self._cached is None or self._monotonic() >= self._cached_until:
                try:
                    with without_share():
                        await self._read_all()
                except StorageRefusedError as exc:  # no free connection: perhaps it is only busy
                    OUTAGES.record_failure(exc, _COUNT_FAILED)
                    self._refused.update(_COUNTS)
                    is_up = self._monotonic() - self._connected_at < _UNKNOWN_S
                    self._cached = self._stats() if is_up else QueueStats(up=False)
                except TransientError as exc:
                    OUTAGES.record_failure(exc, _COUNT_FAILED)
                    self._cached = QueueStats(up=False)
                else:
                    self._cached = self._stats()
                self._cached_until = self._monotonic() + CACHE_S
            return self._cached

    async def _read_all(self) -> None:
        began_s = self._monotonic()
        async with transaction(self._engine) as connection:
            await connection.execute(_SETTINGS)
            self._connected_at = self._monotonic()
            for count in _COUNTS:
                if self._monotonic() - began_s >= _ALL_S:
                    self._refused.add(count)
                elif self._monotonic() >= self._next_at.get(count, -math.inf):
                    await self._read(connection, count)
        if not self._refused:
            OUTAGES.record_success(_COUNT_FAILED)

    async def _read(self, connection: AsyncConnection, count: _Count) -> None:
        try:
            async with savepoint(connection):
                found = await connection.execute(count.statement, self._bounds)
                rows = [tuple(row) for row in found]
        except StorageRefusedError as exc:
            OUTAGES.record_failure(exc, _COUNT_FAILED)
            self._refused.add(count)
            self._next_at[count] = self._monotonic() + count.retry_s
        else:
            self._refused.discard(count)
            now_s = self._monotonic()
            self._found[count] = rows, now_s
            self._next_at[count] = now_s + count.cache_s

    def _rows(self, count: _Count) -> Sequence[_Row] | None:
        """Return the rows of a count; None: they are not known, or too old."""
        rows, at_s = self._found.get(count, ((), -math.inf))
        return rows if self._monotonic() - at_s <= _KEPT_S else None

    def _row(self, count: _Count, columns: int) -> Sequence[int | None]:
        return (self._rows(count) or [(None,) * columns])[0]

    def _stats(self) -> QueueStats:
        held, sidelined = self._rows(_HELD_COUNT), self._rows(_SIDELINED_COUNT)
        ordered_keys, blocked_keys = self._row(_KEYS_COUNT, 2)
        return replace(
            _outbox_stats(self._rows(_QUEUES_COUNT), self._rows(_OLDEST_COUNT)),
            refused={count.name: int(count in self._refused) for count in _COUNTS},
            held=None if held is None else dict(held),
            alive_writers=dict(self._rows(_ALIVE_COUNT) or ()),
            sidelined=None
            if sidelined is None
            else {reason: depth for reason, depth, _ in sidelined},
            sidelined_oldest_s={reason: float(age_s) for reason, _, age_s in sidelined or ()},
            sideline_unloaded=self._row(_UNLOADED_COUNT, 1)[0],
            leased=self._row(_LEASED_COUNT, 1)[0],
            ordered_keys=ordered_keys,
            blocked_keys=blocked_keys,
            circuits_open=self._row(_CIRCUITS_COUNT, 1)[0],
        )


def _outbox_stats(queues: Sequence[_Row] | None, claimable: Sequence[_Row] | None) -> QueueStats:
    """Return the counts of the outbox by type and by location; None: one is not known."""
    depth, later, claimed = (dict.fromkeys(_TYPES, 0) for _ in range(3))
    oldest, places, age_s = dict.fromkeys(_TYPES, 0.0), dict.fromkeys(_LOCATIONS, 0), 0.0
    abandoned = 0
    for place, rows, lost, not_due, taken, _ in queues or ():
        kind = _TYPES[place & 1]
        abandoned += lost
        depth[kind] += rows
        later[kind] += not_due
        claimed[kind] += taken
        places[_LOCATIONS[place >> 1]] += rows
    for place, oldest_s in (*((row[0], row[-1]) for row in queues or ()), *(claimable or ())):
        kind = _TYPES[place & 1]
        oldest[kind] = max(oldest[kind], float(oldest_s))
        if place in _READY_LOCATIONS:
            age_s = max(age_s, float(oldest_s))
    if queues is None and claimable is None:
        return QueueStats(up=True)
    ages = QueueStats(up=True, oldest_s=oldest, outbox_age_s=age_s)
    if queues is None:
        return ages
    return replace(
        ages,
        depth=depth,
        not_due=later,
        claimed=claimed,
        locations=places,
        crash_looping=abandoned,
    )
