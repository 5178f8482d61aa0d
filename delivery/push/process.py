"""Run the push worker with everything it needs, from start to drain, and count its outcomes."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

from delivery.push.attempt import AttemptExecutor
from delivery.push.endpoint_state import (
    LOCK_TIMEOUT_MS,
    EndpointEventQueue,
    EndpointStateWriter,
)
from delivery.push.endpoints import EndpointCache
from delivery.push.sandbox.client import SandboxClient
from delivery.push.task_source import TaskSource
from delivery.push.worker import PushWorker
from rooms.db.connection import PersistentConnection
from rooms.db.notify import Channel, Notifier
from rooms.db.queue.holds import Holds
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.throttle import SharedLaneState
from rooms.db.secrets import Cipher
from rooms.db.writer import LogWriter
from rooms.domain.state_machine import State
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from rooms.metrics import Metrics, status_label
from rooms.ports import Clock, Sender
from rooms.prometheus_internals import observe_many


class AttemptMetrics:
    """Count outcomes by state, error class and status family, which bounds the labels."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock

    def observe(self, batch: Sequence[DeliveryOutcome]) -> None:
        """Count a batch that was just committed."""
        now_ms = self._clock.now_ms()
        delivered = State.DELIVERED  # read once: in Python 3.11 that is a call
        labels = [
            (outcome.state, None, None)
            if (result := outcome.result) is None
            else (outcome.state, result.error, result.status)
            for outcome in batch
        ]
        for (state, error, status), count in Counter(labels).items():
            self._metrics.attempts.labels(state, error or "none", status_label(status)).inc(count)
        observe_many(
            self._metrics.attempt_latency,
            [outcome.result.latency_ms / 1000 for outcome in batch if outcome.result is not None],
        )
        observe_many(
            self._metrics.delivered_latency,
            [
                max(0, now_ms - outcome.task.published_ms) / 1000
                for outcome in batch
                if outcome.state is delivered
            ],
        )


async def run_push(
    *,
    database_url: str,
    task_source: TaskSource,
    sender: Sender,
    cipher: Cipher,
    clock: Clock,
    metrics: Metrics,
    slots: int,
    sandbox: SandboxClient | None,
    sandbox_after_crashes: int,
    stop: asyncio.Event,
    broker_mode: BrokerMode = POSTGRES_MODE,
) -> None:
    """Attempt due deliveries until `stop` is set, then drain.

    `slots`: attempts at a time for each subscription. `sandbox` attempts the deliveries with which
    `sandbox_after_crashes` workers died; None: the worker attempts them itself. Raises
    StorageUnavailableError if PostgreSQL is unavailable at the start; later the worker waits for
    it.
    """
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(
            LogWriter(database_url, kind="settler", broker_mode=broker_mode)
        )
        reading = PersistentConnection(database_url, name="rooms endpoints")
        stack.push_async_callback(reading.close)
        worker: PushWorker
        signals = await stack.enter_async_context(
            Notifier(
                database_url,
                listeners={Channel.CONFIG: lambda rooms: worker.settings_changed(rooms)},  # noqa: PLW0108 - bound below
                broker_mode=broker_mode,
            )
        )

        # Writers of their own, opened at first use. Outcomes must not wait for a locked room, and
        # tokens for neither outcomes nor the disk.
        states = LogWriter(
            database_url,
            kind="states",
            lock_timeout_ms=LOCK_TIMEOUT_MS,
            broker_mode=broker_mode,
        )
        stack.push_async_callback(states.close)
        limits = LogWriter(database_url, kind="limits", durable=False)
        stack.push_async_callback(limits.close)
        state_writer = EndpointStateWriter(
            SharedLaneState(states),
            signals,
            observe=metrics.count_lane_change,
        )
        events = EndpointEventQueue(
            write_event=state_writer.write,
            write_status_reason=state_writer.set_status_reason,
            monotonic=clock.monotonic,
        )
        endpoints = EndpointCache(reading, cipher, set_status_reason=events.set_status_reason)
        worker = PushWorker(
            task_source=task_source,
            attempts=AttemptExecutor(
                sender=sender,
                clock=clock,
                random=random.random,
                sandbox=sandbox,
                sandbox_after_crashes=sandbox_after_crashes,
            ),
            outcomes=OutcomeQueries(
                writer, ordered=endpoints.ordered_subscriptions, on_advanced=signals.notify_queued
            ),
            holds=Holds(writer, on_released=metrics.count_released),
            shared=SharedLaneState(limits, on_limited=metrics.rate_limited.inc),
            endpoints=endpoints,
            clock=clock,
            events=events,
            observe=AttemptMetrics(metrics, clock).observe,
            on_requeued=signals.notify_queued,
            report_slowed=metrics.lanes_throttled.set,
            report_saturated=lambda identity: signals.notify(Channel.SATURATED, identity),
            slots=slots,
        )
        await worker.run(stop)
