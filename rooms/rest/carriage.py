"""Whether the broker that carries the copies answers, as the API tells it. Publishing goes on while it does not."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker

_log = logging.getLogger(__name__)

FRESH_S: Final = 1.0
_TIMEOUT_S: Final = 2.0


class Reach(Collector):
    """The gauge of the broker's answer."""

    def __init__(self, *, up: bool) -> None:
        self._up = up

    def collect(self) -> Iterator[Metric]:
        """The one gauge."""
        yield GaugeMetricFamily("rooms_broker_up", "Whether the broker answered.", value=float(self._up))


class Carriage:
    """Asks at most once in `FRESH_S`, however many want to know."""

    def __init__(self, broker: Broker, monotonic: Callable[[], float]) -> None:
        self._broker = broker
        self._monotonic = monotonic
        self._turn = asyncio.Lock()
        self._up = True
        self._until = 0.0

    async def up(self) -> bool:
        """Whether the broker answered, a second ago at most; it has two seconds to."""
        async with self._turn:
            if self._monotonic() >= self._until:
                was_up, self._up = self._up, await self._ask()
                if was_up != self._up:
                    _log.warning("the broker is %s", "back" if self._up else "away: copies wait in the outbox")
                self._until = self._monotonic() + FRESH_S
            return self._up

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._broker.remembers()
        except (BrokerUnavailableError, TimeoutError):
            return False
        return True
