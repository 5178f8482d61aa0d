"""Metrics of an external broker: its disk usage, and the depth of native queues."""

from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.native_subscriptions import native_passwords
from rooms.db.writer import LogWriter
from rooms.metrics import Metrics
from rooms.ports import Broker


async def update_broker_metrics(
    writer: LogWriter, broker: Broker, metrics: Metrics, should_continue: ShouldContinue
) -> None:
    """Ask the broker's management API for disk usage and native queue depths.

    BrokerUnavailableError leaves the metrics as they were.
    """
    if (usage := await broker.disk_usage()) is not None:
        metrics.broker_disk_usage.set(usage)
    if broker.users is None or not should_continue():
        return
    natives = await native_passwords(writer)
    depths = await broker.users.pull_queue_depths() if natives else {}
    found = [depths.get(subscription, 0) for subscription in natives]
    metrics.native_queue_depth.set(sum(found))
    metrics.native_queue_depth_max.set(max(found, default=0))
