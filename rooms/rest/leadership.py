"""Whether anybody leads, as the API tells it: by the election's store, and by the clock while that is away."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rooms.domain.cluster import ClusterView
from rooms.errors import ElectionUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Election

FRESH_S: Final = 1.0
_TIMEOUT_S: Final = 2.0
_UNSEEN: Final = "checks of the leader failed"


class Absence(Collector):
    """The gauge of how long nobody has led."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        """The one gauge."""
        told = "How long nobody has led, so that no duty moves to another process; 0 while there is a leader."
        yield GaugeMetricFamily("rooms_leader_absent_seconds", told, value=self._seconds)


class Leadership:
    """Looks at most once in `FRESH_S`, however many ask, and remembers when it last saw a leader."""

    def __init__(self, election: Election, monotonic: Callable[[], float]) -> None:
        self._election = election
        self._monotonic = monotonic
        self._turn = asyncio.Lock()
        self._seen_at = monotonic()
        self._absent_s = 0.0
        self._until = 0.0

    async def view(self) -> ClusterView:
        """The cluster as it is now. ElectionUnavailableError after two seconds at most."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._election.view()
        except TimeoutError as exc:
            raise ElectionUnavailableError("the election's store does not answer") from exc

    async def absent_s(self) -> float:
        """How long nobody has led, a second ago at most. A store that is away leads nobody."""
        async with self._turn:
            if self._monotonic() >= self._until:
                self._absent_s = await self._look()
                self._until = self._monotonic() + FRESH_S
            return self._absent_s

    async def _look(self) -> float:
        stored_s = 0.0
        try:
            view = await self.view()
        except ElectionUnavailableError as exc:
            OUTAGES.failed(exc, _UNSEEN)
        else:
            OUTAGES.succeeded(_UNSEEN)
            if view.leader is not None:
                self._seen_at = self._monotonic()
                return 0.0
            stored_s = view.leader_absent_s
        return max(stored_s, self._monotonic() - self._seen_at)
