"""The worker process: the push worker with everything it needs, from start to drain."""

import asyncio
import random
from contextlib import AsyncExitStack

from delivery.attempts import Attempts
from delivery.endpoints import Endpoints
from delivery.isolation.sender import IsolatedSender
from delivery.notices import Notices
from delivery.queue import Queue
from delivery.records import Records
from delivery.telemetry import Telemetry
from delivery.worker import PushWorker
from rooms.domain.ids import IdMaker
from rooms.domain.place import EMBEDDED, Shape
from rooms.metrics import Metrics
from rooms.ports import Clock, Sender
from rooms.storage.engine import KeptConnection
from rooms.storage.holds import Holds
from rooms.storage.lanes import SharedLanes
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
    ids: IdMaker,
    metrics: Metrics,
    slots: int,
    isolated: IsolatedSender | None,
    isolate_after: int,
    stop: asyncio.Event,
    shape: Shape = EMBEDDED,
) -> None:
    """Attempt what comes due until `stop` is set, then drain. `slots`: attempts at a time for each subscription; `isolated`
    attempts what `isolate_after` workers died with (None: nothing is isolated).

    StorageUnavailableError where PostgreSQL is away at the start; later it is waited for.
    """
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(Writer(database_url, kind="settler", shape=shape))
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

        lanes = SharedLanes(writer)
        # Opened with the first draw: tokens are not to wait for outcomes, nor for the disk.
        limits = Writer(database_url, kind="limits", durable=False)
        stack.push_async_callback(limits.close)
        records = Records(lanes, signals, ids=ids, clock=clock, observe=metrics.lane_changed)
        notices = Notices(tell=records.tell, remark=records.remark)
        endpoints = Endpoints(reading, seal, remark=notices.remark)
        worker = PushWorker(
            queue=queue,
            attempts=Attempts(
                sender=sender, clock=clock, draw=random.random, isolated=isolated, isolate_after=isolate_after
            ),
            outcomes=Outcomes(writer, ordered=endpoints.ordered, called=signals.ring_queued),
            holds=Holds(writer, released=metrics.let_go),
            shared=SharedLanes(limits, limited=metrics.rate_limited.inc),
            endpoints=endpoints,
            clock=clock,
            notices=notices,
            observe=Telemetry(metrics, clock).observe,
            released=signals.ring_queued,
            slowed=metrics.lanes_slowed.set,
            crowded=lambda identity: signals.ring(Channel.CROWDED, identity),
            slots=slots,
        )
        await worker.run(stop)
