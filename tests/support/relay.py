"""A relay at work in a test: on a real PostgreSQL, with a broker in memory, or whatever broker the test brings."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import pytest

from delivery.relay.relay import BATCH, Relay
from rooms.clock import SystemClock
from rooms.db.notify import Channel, Notifier
from rooms.db.queue.relay import RELAY_WRITER_KIND, EndedTask, RelayBatch, RelayOutbox
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.domain.work_location import POSTGRES_MODE, TO_RELAY, BrokerMode, relayed_mode
from rooms.metrics import Metrics
from rooms.ports import Broker, RejectedTask
from tests.support.fake_broker import MemoryBroker
from tests.support.installation import CLAIM_S, Installation, until

RELAYED: Final[BrokerMode] = relayed_mode(lookahead_ms=60_000)
IN_BOTH_SHAPES: Final = pytest.mark.parametrize(
    "shape", [POSTGRES_MODE, RELAYED], ids=["embedded", "relayed"]
)
"""For tests with an `installation`: PostgreSQL hands its work out, or another broker carries it."""
SESSION: Final = f"rooms {RELAY_WRITER_KIND}"
"""The application name of a relay's writer."""


class DiedError(Exception):
    """The relay's process is gone."""


class Watched(RelayOutbox):
    """The outbox of one relay, which may die or stand still at a step: as `kill -9` does, it gives nothing back."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__(writer)
        self.dies_before_mark = False
        self.dies_before_end = False
        self.dies_after_mark = False
        self.dies_after_claim = False
        self.marking = asyncio.Event()
        """Set when something is about to be marked."""
        self.may_mark = asyncio.Event()
        self.may_mark.set()
        self.marked = 0

    async def claim(self, **options: Any) -> RelayBatch:
        if self.marking.is_set():
            await self.may_mark.wait()  # a suspended relay claims nothing either
        batch = await super().claim(**options)
        if self.dies_after_claim and batch.tasks:
            raise DiedError
        return batch

    async def end_deliveries(self, endings: Sequence[EndedTask]) -> int:
        if self.dies_before_end:
            raise DiedError
        return await super().end_deliveries(endings)

    async def mark_sent(self, copies: Sequence[DeliveryTask]) -> tuple[int, list[SubscriptionId]]:
        if self.dies_before_mark:
            raise DiedError
        self.marking.set()
        await self.may_mark.wait()
        found = await super().mark_sent(copies)
        self.marked += found[0]
        if self.dies_after_mark:
            raise DiedError
        return found


@dataclass(eq=False)
class Runner:
    """One relay and what it says. `died` is set when its process is gone."""

    relay: Relay
    outgoing: Watched
    metrics: Metrics
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: list[SubscriptionId] = field(default_factory=list)
    died: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        try:
            await self.relay.run(self.stop)
        except* DiedError:
            await self.outgoing.writer.close()
            self.died.set()


@asynccontextmanager
async def relaying(
    url: str, broker: Broker, *, claim_s: float = CLAIM_S, poll_s: float = 0.1, batch: int = BATCH
) -> AsyncIterator[Runner]:
    """A relay that runs until the end of the block, and then drains."""
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(
            LogWriter(url, kind=RELAY_WRITER_KIND, durable=False)
        )
        outgoing, metrics = Watched(writer), Metrics()
        arrived: list[SubscriptionId] = []
        relay = Relay(
            outgoing=outgoing,
            broker=broker,
            clock=SystemClock(),
            metrics=metrics,
            on_pull_queued=arrived.append,
            claim_s=claim_s,
            poll_s=poll_s,
            batch=batch,
        )
        await stack.enter_async_context(
            Notifier(url, listeners={Channel.RELAY: lambda _names: relay.wake()})
        )
        runner = Runner(relay, outgoing, metrics, arrived=arrived)
        running = asyncio.create_task(runner.run())
        try:
            yield runner
            outgoing.may_mark.set()
            runner.stop.set()
            await running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


class Counting(MemoryBroker):
    """The broker in memory, which remembers what it was sent and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        """Steps in the order of their sending, doubles and all."""

    async def send(
        self, copies: Sequence[DeliveryTask], *, not_before: Sequence[datetime]
    ) -> Sequence[RejectedTask]:
        refused = await super().send(copies, not_before=not_before)
        gone = {one.task.dedup_id for one in refused}
        self.sent += [copy.dedup_id for copy in copies if copy.dedup_id not in gone]
        return refused

    def holds(self, subscription: SubscriptionId | None = None) -> list[str]:
        """The steps of the copies that wait in a queue and are due."""
        return [kept.copy.dedup_id for kept in self.kept[subscription].waiting]


async def places(installation: Installation) -> dict[int, int]:
    """Count the rows of the outbox by place."""
    found = await installation.rows("SELECT kind, count(*) AS n FROM outbox GROUP BY kind")
    return {row["kind"]: row["n"] for row in found}


async def until_sent(installation: Installation, *, within_s: float = 60.0) -> None:
    """Until nothing is left to send."""

    async def look() -> bool:
        return not set(await places(installation)) & set(map(int, TO_RELAY))

    await until(look, "the outbox to be sent", within_s=within_s)


async def to_send(
    installation: Installation,
    *subscriptions: SubscriptionId,
    kind: SubscriptionType = SubscriptionType.PUSH,
    count: int = 1,
    **fields: Any,
) -> list[DeliveryTask]:
    """Publish `count` messages whose work rows wait for the relay."""
    copies: list[DeliveryTask] = []
    for _ in range(count):
        copies += await installation.publish(*subscriptions, kind=kind, **fields)
    await installation.queue(*copies, shape=RELAYED)
    return copies


def names(copies: Iterable[DeliveryTask]) -> list[str]:
    """Their steps, sorted."""
    return sorted(copy.dedup_id for copy in copies)
