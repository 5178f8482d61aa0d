"""The health of a store beside PostgreSQL: whether it answers. Publishing goes on while one does not."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rooms.errors import TransientError
from rooms.outages import OUTAGES, Part

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

    def __init__(self, check: Callable[[], Awaitable[object]], monotonic: Callable[[], float], *, part: Part) -> None:
        """`check` raises a TransientError where the store is away; `part` names the store in the log."""
        self._check = check
        self._monotonic = monotonic
        self._part = part
        self._unseen = f"checks of {part} failed"
        self._turn = asyncio.Lock()
        self._up = True
        self._until = 0.0

    async def up(self) -> bool:
        """Return whether the store answered within two seconds, at most a second ago."""
        async with self._turn:
            if self._monotonic() >= self._until:
                self._up = await self._ask()
                self._until = self._monotonic() + FRESH_S
            return self._up

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._check()
        except TransientError as exc:
            OUTAGES.failed(exc, self._unseen)
            return False
        except TimeoutError:
            OUTAGES.failed(TransientError("it does not answer"), self._unseen, part=self._part)
            return False
        OUTAGES.succeeded(self._unseen, part=self._part)
        return True


def magazines_gauge(*, up: bool) -> UpGauge:
    """Return the gauge of the magazines' store."""
    return UpGauge("rooms_magazines_up", "Whether the store of the magazines (MAGAZINE_URL) answered.", up=up)
