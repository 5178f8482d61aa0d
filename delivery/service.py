"""The worker process: the push worker with everything it needs, from start to drain."""

import asyncio
import random
from contextlib import AsyncExitStack

from delivery.attempts import Attempts
from delivery.endpoint import Endpoint
from delivery.endpoints import Endpoints
from delivery.notices import Notices
from delivery.queue import Queue
from delivery.telemetry import Telemetry
from delivery.worker import PushWorker
from rooms.domain.attempt import Answer
from rooms.domain.place import EMBEDDED, Shape
from rooms.metrics import Metrics
from rooms.ports import Clock, Sender
from rooms.storage.endpoints import EndpointRecord
from rooms.storage.engine import KeptConnection
from rooms.storage.outcomes import Outcomes
from rooms.storage.sealing import Seal
from rooms.storage.signals import Channel, Signals
from rooms.storage.writer import Writer


async def push(
    *,
    database_url: str,
    queue: Queue,
    sender: Sender,
    seal: Seal,
    clock: Clock,
    metrics: Metrics,
    slots: int,
    stop: asyncio.Event,
    shape: Shape = EMBEDDED,
) -> None:
    """Attempt what comes due until `stop` is set, then drain. `slots`: attempts at a time for each subscription.

    StorageUnavailableError where PostgreSQL is away at the start; later it is waited for.
    """
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(Writer(database_url, kind="settler", shape=shape))
        outcomes = Outcomes(writer)
        reading = KeptConnection(database_url, name="rooms endpoints")
        stack.push_async_callback(reading.close)
        worker: PushWorker
        signals = await stack.enter_async_context(
            Signals(
                database_url,
                hear={Channel.CONFIG: lambda rooms: worker.settings_changed(rooms)},  # noqa: PLW0108 - bound below
                shape=shape,
            )
        )

        async def disable(endpoint: Endpoint, answer: Answer) -> None:
            record = endpoint.record
            reason = f"the endpoint answered {answer.status}"
            if await outcomes.disable(record.room_id, record.subscription_id, reason=reason):
                signals.ring(Channel.CONFIG, str(record.room_id))

        async def remark(record: EndpointRecord, reason: str | None) -> None:
            await outcomes.remark(record.room_id, record.subscription_id, version=record.version, reason=reason)

        notices = Notices(disable=disable, remark=remark)
        worker = PushWorker(
            queue=queue,
            attempts=Attempts(sender=sender, clock=clock, draw=random.random),
            outcomes=outcomes,
            endpoints=Endpoints(reading, seal, remark=notices.remark),
            clock=clock,
            notices=notices,
            observe=Telemetry(metrics, clock).observe,
            released=signals.ring_queued,
            slots=slots,
        )
        await worker.run(stop)
