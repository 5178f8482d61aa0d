"""Check whether this process can accept publishes, and which parts of the installation are up.

Publishing continues while the broker, the magazines' store or the leader is absent.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import transaction
from rooms.db.queries.stats import count_alive
from rooms.db.readiness import WriteCheck
from rooms.domain.cluster import ClusterView
from rooms.errors import ElectionUnavailableError, StorageUnavailableError, TransientError
from rooms.outages import OUTAGES, Dependency
from rooms.ports import Broker, Election


class UpGauge(Collector):
    """Export a gauge that is 1 where the store answered and 0 where it did not."""

    def __init__(self, name: str, text: str, *, up: bool) -> None:
        self._name = name
        self._text = text
        self._up = up

    def collect(self) -> Iterator[Metric]:
        """Yield the one gauge."""
        yield GaugeMetricFamily(self._name, self._text, value=float(self._up))


class StoreHealth:
    """Check a store at most once in `FRESH_S`, for any number of callers."""

    def __init__(
        self,
        check: Callable[[], Awaitable[object]],
        monotonic: Callable[[], float],
        *,
        dependency: Dependency,
    ) -> None:
        """Use `check`, which raises a TransientError on failure.

        `dependency` names the store in the log.
        """
        self._check = check
        self._monotonic = monotonic
        self._dependency = dependency
        self._check_failed = f"checks of {dependency} failed"
        self._lock = asyncio.Lock()
        self._up = True
        self._fresh_until = 0.0

    async def up(self) -> bool:
        """Return whether the store answered within two seconds, at most a second ago."""
        async with self._lock:
            if self._monotonic() >= self._fresh_until:
                self._up = await self._probe()
                self._fresh_until = self._monotonic() + FRESH_S
            return self._up

    async def _probe(self) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._check()
        except TransientError as exc:
            OUTAGES.record_failure(exc, self._check_failed)
            return False
        except TimeoutError:
            OUTAGES.record_failure(
                TransientError("it does not answer"),
                self._check_failed,
                dependency=self._dependency,
            )
            return False
        OUTAGES.record_success(self._check_failed, dependency=self._dependency)
        return True


def magazines_gauge(*, up: bool) -> UpGauge:
    """Return the gauge of the magazines' store."""
    return UpGauge(
        "rooms_magazines_up", "Whether the store of the magazines (MAGAZINE_URL) answered.", up=up
    )


class BrokerUpGauge(UpGauge):
    """Describe the gauge of the broker."""

    def __init__(self, *, up: bool) -> None:
        super().__init__("rooms_broker_up", "Whether the broker answered.", up=up)


class BrokerHealth(StoreHealth):
    """Describe the health check of the broker."""

    def __init__(self, broker: Broker, monotonic: Callable[[], float]) -> None:
        super().__init__(broker.has_sentinel, monotonic, dependency=Dependency.BROKER)


FRESH_S: Final = 1.0
_CHECK_FAILED: Final = "checks of the leader failed"


class LeaderAbsentGauge(Collector):
    """Export for how long there has been no leader."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the one gauge."""
        help_text = "Seconds without a leader, while no task moves to another process; 0 with one."
        yield GaugeMetricFamily("rooms_leader_absent_seconds", help_text, value=self._seconds)


class LeaderHealth:
    """Check at most once in `FRESH_S`, and remember when a leader was last seen."""

    def __init__(
        self, election: Election, monotonic: Callable[[], float], *, dependency: Dependency
    ) -> None:
        """Use `election`, whose store is `dependency` in the log."""
        self._election = election
        self._monotonic = monotonic
        self._dependency = dependency
        self._lock = asyncio.Lock()
        self._leader_seen_at = monotonic()
        self._absent_s = 0.0
        self._fresh_until = 0.0

    async def view(self) -> ClusterView:
        """Return the current cluster. ElectionUnavailableError: no answer within two seconds."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._election.view()
        except TimeoutError as exc:
            cause: Exception = exc
            if self._dependency is Dependency.POSTGRESQL:
                cause = StorageUnavailableError("PostgreSQL does not answer")  # for the log
            raise ElectionUnavailableError("the election's store does not answer") from cause

    async def absent_s(self) -> float:
        """Return for how many seconds there has been no leader, at most a second ago.

        While the election's store does not answer, there is no leader.
        """
        async with self._lock:
            if self._monotonic() >= self._fresh_until:
                self._absent_s = await self._probe()
                self._fresh_until = self._monotonic() + FRESH_S
            return self._absent_s

    async def _probe(self) -> float:
        stored_s = 0.0
        try:
            view = await self.view()
        except ElectionUnavailableError as exc:
            OUTAGES.record_failure(exc, _CHECK_FAILED, dependency=self._dependency)
        else:
            OUTAGES.record_success(_CHECK_FAILED, dependency=self._dependency)
            if view.leader is not None:
                self._leader_seen_at = self._monotonic()
                return 0.0
            stored_s = view.leader_absent_s
        return max(stored_s, self._monotonic() - self._leader_seen_at)


PARTS: Final = ("database", "writes", "worker", "upkeep", "leader")
_TIMEOUT_S: Final = 2.0
# True on a standby.
_WRITABLE: Final = text("SELECT current_setting('transaction_read_only') = 'off'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessReport:
    """Report each part in `up`, and whether the process is ready: every part was up once.

    `database`: PostgreSQL answers and is not a standby; `writes`: it accepts writes too.
    `leader_absent_s`: for how long there has been no leader.
    """

    up: dict[str, bool]
    ready: bool
    leader_absent_s: float

    @property
    def degraded(self) -> list[str]:
        """Return the parts that are not up."""
        return [part for part, up in self.up.items() if not up]


class Readiness:
    """Remember which parts have been up since this process started.

    `broker_health` and `magazines`: where these stores are not PostgreSQL. They never make a
    process unready: publishing continues without them.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        leader_health: LeaderHealth,
        broker_health: BrokerHealth | None = None,
        magazines: StoreHealth | None = None,
        *,
        writes: WriteCheck,
    ) -> None:
        self._engine = engine
        self._writes = writes
        self._report_task: asyncio.Task[ReadinessReport] | None = None
        self._broker_health = broker_health
        self._magazines = magazines
        self._required = PARTS if broker_health is None else (*PARTS, "relay")
        self._leader_health = leader_health
        self._seen_up: set[str] = set()

    async def report(self) -> ReadinessReport:
        """Return what is up now. PostgreSQL and each other store get two seconds to answer.

        Probes need no key, so that probes at the same time share one check.
        """
        if self._report_task is None:
            # In a context of its own: the share of connections of the first probe's organisation is
            # nothing to the others.
            self._report_task = asyncio.create_task(self._check(), context=contextvars.Context())
            self._report_task.add_done_callback(self._on_report_done)
        return await asyncio.shield(self._report_task)

    def _on_report_done(self, task: asyncio.Task[ReadinessReport]) -> None:
        self._report_task = None
        if not task.cancelled():
            task.exception()  # the probes may have disconnected

    async def _check(self) -> ReadinessReport:
        absent_s = await self._leader_health.absent_s()
        try:
            async with asyncio.timeout(_TIMEOUT_S), transaction(self._engine) as connection:
                writable = bool(await connection.scalar(_WRITABLE))
                alive = await count_alive(connection)
        except (TransientError, TimeoutError):
            writable, alive = False, {}
        up = {
            "database": writable,
            "writes": writable and await self._writes.is_writable(),
            "worker": alive.get("worker", 0) > 0,
            "upkeep": alive.get("upkeep", 0) > 0,
            "leader": absent_s == 0,
        }
        if self._broker_health is not None:
            up |= {"relay": alive.get("relay", 0) > 0, "broker": await self._broker_health.up()}
        if self._magazines is not None:
            up["magazines"] = await self._magazines.up()
        self._seen_up.update(part for part, is_up in up.items() if is_up)
        return ReadinessReport(
            up=up,
            ready=up["writes"] and self._seen_up.issuperset(self._required),
            leader_absent_s=absent_s,
        )
