"""What an operator wants to see of another broker: its disk, and what lies in native queues."""

from rooms.metrics import Metrics
from rooms.ports import Broker
from rooms.storage.natives import passwords
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn


class BrokerGauges:
    """Asks the broker's management: for its disk, and where there are native subscriptions for the depths of all queues."""

    name = "the broker's gauges"

    def __init__(self, writer: Writer, broker: Broker, metrics: Metrics) -> None:
        self._writer = writer
        self._broker = broker
        self._metrics = metrics

    async def run(self, go_on: GoOn) -> None:
        """Set the gauges. BrokerUnavailableError leaves them as they were."""
        if (share := await self._broker.disk_usage()) is not None:
            self._metrics.broker_disk_usage.set(share)
        if self._broker.gate is None or not go_on():
            return
        natives = await passwords(self._writer)
        depths = await self._broker.gate.depths() if natives else {}
        found = [depths.get(subscription, 0) for subscription in natives]
        self._metrics.native_queue_depth.set(sum(found))
        self._metrics.native_queue_deepest.set(max(found, default=0))
