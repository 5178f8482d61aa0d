"""Sideline dead letters of native queues, so that they can be shoveled, and measure the queues.

The broker moves a rejected message to its dead-letter address, where this installation has a queue.
A message leaves that queue once its delivery is sidelined durably. After a crash in between it
comes again, with a generation that is over, and is dropped.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from delivery.maintenance.task import ShouldContinue
from rooms.db.catalog.native_subscriptions import (
    DeadLetterOutcome,
    native_passwords,
    sideline_rejected,
)
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.metrics import Metrics
from rooms.ports import Broker, BrokerUsers, Consumer

_log = logging.getLogger(__name__)

_CREDIT: Final = 500
_IDLE_S: Final = 1.0
"""A queue without a message for so long is empty, or has only those that came too early."""


class DeadLetterReader:
    """Read the dead-letter queue when it has messages."""

    name = "dead letters of native queues"

    def __init__(
        self, writer: LogWriter, users: BrokerUsers, on_outcome: Callable[[str, int], None]
    ) -> None:
        """Report to `on_outcome` an outcome and the number of dead letters that had it."""
        self._writer = writer
        self._users = users
        self._on_outcome = on_outcome

    async def run(self, should_continue: ShouldContinue) -> None:
        """Sideline what waits now. BrokerUnavailableError: the broker is unavailable."""
        if not await self._users.dead_letter_depth() or not should_continue():
            return
        async with self._users.consume_dead_letters(credit=_CREDIT) as consumer:
            batches = consumer.batches()
            with suppress(TimeoutError):
                while should_continue():
                    async with asyncio.timeout(_IDLE_S):
                        tasks = await anext(batches)
                    await self._sideline(consumer, tasks)

    async def _sideline(self, consumer: Consumer, tasks: Sequence[DeliveryTask]) -> None:
        if malformed := consumer.take_malformed():
            _log.warning(
                "discarded %d dead letters that Rooms did not send, the first: %s",
                len(malformed),
                malformed[0].reason,
            )
            self._on_outcome("unreadable", len(malformed))
            await consumer.discard(malformed)
        outcomes = await sideline_rejected(self._writer, tasks)
        recorded = [
            task
            for task, outcome in zip(tasks, outcomes, strict=True)
            if outcome is not DeadLetterOutcome.NOT_YET_RECORDED
        ]
        await consumer.settle(recorded)
        for outcome in (DeadLetterOutcome.SIDELINED, DeadLetterOutcome.DISCARDED):
            if count := outcomes.count(outcome):
                _log.info("%d dead letters of native queues: %s", count, outcome)
                self._on_outcome(outcome, count)


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
