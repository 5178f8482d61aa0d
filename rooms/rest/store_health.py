"""The health of a store beside PostgreSQL: whether it answers. Publishing goes on while one does not."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rooms.errors import TransientError

_log = logging.getLogger(__name__)

FRESH_S: Final = 1.0
_TIMEOUT_S: Final = 2.0


class UpGauge(Collector):
    """A gauge that is 1 where the store answered and 0 where it did not."""

    def __init__(self, name: str, text: str, *, up: bool) -> None:
        self._name = name
        self._text = text
        self._up = up

    def collect(self) -> Iterator[Metric]:
        """Yield the one gauge."""
        yield GaugeMetricFamily(self._name, self._text, value=float(self._up))


class StoreHealth:
    """Asks at most once in `FRESH_S`, however many callers there are."""

    def __init__(
        self, check: Callable[[], Awaitable[object]], monotonic: Callable[[], float], *, name: str, meanwhile: str
    ) -> None:
        """`check` raises a TransientError where the store is away; `name` and `meanwhile` are for the log."""
        self._check = check
        self._monotonic = monotonic
        self._name = name
        self._meanwhile = meanwhile
        self._turn = asyncio.Lock()
        self._up = True
        self._until = 0.0

    async def up(self) -> bool:
        """Return whether the store answered within two seconds, at most a second ago."""
        async with self._turn:
            if self._monotonic() >= self._until:
                was_up, self._up = self._up, await self._ask()
                if was_up != self._up:
                    _log.warning("%s %s", self._name, "is back" if self._up else f"is away: {self._meanwhile}")
                self._until = self._monotonic() + FRESH_S
            return self._up

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._check()
        except (TransientError, TimeoutError):
            return False
        return True


def magazines_gauge(*, up: bool) -> UpGauge:
    """Return the gauge of the magazines' store."""
    return UpGauge("rooms_magazines_up", "Whether the store of the magazines (MAGAZINE_URL) answered.", up=up)
