"""PULL over a furnished database: a publisher and a puller as one API process has them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.place import EMBEDDED, relayed
from rooms.errors import LateError
from rooms.metrics import Metrics
from rooms.ports import Broker
from rooms.pulling.puller import Gone, Puller
from rooms.pulling.service import open_puller
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.signals import Channel, Signals
from rooms.storage.writer import Writer
from tests.carrying import Carrier
from tests.copies import MemoryBroker
from tests.publishing import Desk, House, open_desk

EVENT_TYPE = "order.created"
PATIENCE_S = 60.0
HORIZON_MS = 60_000


async def until(look: Callable[[], bool]) -> None:
    """Until it is so, for states that send no signal."""
    async with asyncio.timeout(PATIENCE_S):
        while not look():  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.002)


@dataclass
class Counter:
    """Where messages are published and pulled. One room, one PULL subscription unless a test makes more."""

    house: House
    desk: Desk
    puller: Puller
    ends: LeaseEnds
    metrics: Metrics
    signals: Signals
    room: RoomId
    queue: SubscriptionId
    broker: Broker | None = None
    """Another one than PostgreSQL, which carries the copies."""
    carrier: Carrier | None = None
    hears: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once wake-ups reach its puller; where that begins, it wakes whoever waits."""

    async def publish(self, payload: object = None, **fields: Any) -> str:
        """Publish one message; its id."""
        body = json.dumps({"event_type": EVENT_TYPE, "payload": payload, **fields}).encode()
        return await self.publish_bytes(body)

    async def publish_bytes(self, body: bytes) -> str:
        answer = await self.desk.publisher.publish(self.house.principal, self.room, body, None)
        await self.carried()
        return str(json.loads(answer.body)["message_id"])

    async def carried(self) -> None:
        """Until what is queued is where it is pulled from."""
        if self.broker is not None:
            await until(lambda: not self.house.count("outbox WHERE kind IN (2, 3)"))

    async def pull_bytes(self, *, queue: str | None = None, gone: Gone | None = None, **fields: Any) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            status, body = await self.puller.pull(
                self.house.principal, queue or self.queue, json.dumps(fields).encode(), gone
            )
        assert status == 200
        return body

    async def pull(self, **fields: Any) -> list[dict[str, Any]]:
        """The messages that a pull gave."""
        found: list[dict[str, Any]] = json.loads(await self.pull_bytes(**fields))["messages"]
        return found

    async def settle(self, how: str, *ack_ids: str, queue: str | None = None, **fields: Any) -> list[str]:
        """The status of each ack id; all late or not."""
        body = json.dumps({"ack_ids": ack_ids, **fields}).encode()
        try:
            async with asyncio.timeout(PATIENCE_S):
                _, answer = await getattr(self.puller, how)(self.house.principal, queue or self.queue, body)
            results = [(result["ack_id"], result["status"]) for result in json.loads(answer)["results"]]
        except LateError as error:
            results = list(error.results)
        assert [ack_id for ack_id, _ in results] == list(ack_ids)
        return [status for _, status in results]

    async def someone_waits(self) -> None:
        """Until a poll has found nothing and waits for a ring, which nothing tells."""
        await until(lambda: bool(self.puller._waiters.resting()))

    def row(self, delivery: str) -> tuple[Any, ...]:
        """(state, generation, attempt, attempts, reason) of a delivery."""
        (found,) = self.house.run(
            "SELECT state::text, generation, attempt, attempts, reason FROM deliveries WHERE id = %s", delivery
        )
        return found

    def work(self) -> dict[str, int]:
        """How many rows each work table holds."""
        return {table: self.house.count(table) for table in ("outbox", "held", "leases")}

    def log(self, message: str) -> list[tuple[str, int, int]]:
        """(kind, generation, attempt) of every step of the message's delivery, in its order."""
        return self.house.run(
            "SELECT kind, generation, attempt FROM delivery_log WHERE message_id = %s AND delivery_id IS NOT NULL"
            " ORDER BY generation, attempt, ts, writer_seq",
            message,
        )

    def run_out(self, *deliveries: str) -> None:
        """Let the time of leases be up, without anybody noticing yet."""
        self.house.run(
            "UPDATE leases SET until = now() - interval '1 ms' WHERE id = ANY (%s::uuid[])", list(deliveries)
        )


@asynccontextmanager
async def open_counter(
    url: str, *, house: House | None = None, broker: Broker | None = None, **subscription: Any
) -> AsyncIterator[Counter]:
    """A counter in a room of its own; `broker`: another one than PostgreSQL, which carries the copies.

    To a broker in memory a `Carrier` brings them; for any other one it is the test that runs a relay.
    """
    shape = EMBEDDED if broker is None else relayed(horizon_ms=HORIZON_MS)
    async with AsyncExitStack() as stack:
        house = house or House(url)
        room = house.room()
        house.event_type(room, EVENT_TYPE)
        queue = house.subscription(room, "PULL", **subscription)
        desk = await stack.enter_async_context(open_desk(url, shape=shape))
        puller: Puller | None = None
        carrier: Carrier | None = None
        if isinstance(broker, MemoryBroker):
            carrier = await stack.enter_async_context(Carrier(url, broker))

        hears = asyncio.Event()

        def heard(names: frozenset[str]) -> None:
            hears.set()
            if puller is not None:
                puller.heard(names)

        def changed(names: frozenset[str]) -> None:
            if puller is not None:
                puller.changed(names)

        signals = await stack.enter_async_context(
            Signals(url, hear={Channel.PULL: heard, Channel.CONFIG: changed}, shape=shape)
        )
        metrics = Metrics()
        opened = puller = await stack.enter_async_context(
            open_puller(url, signals=signals, metrics=metrics, broker=broker, shape=shape)
        )
        ends = LeaseEnds(await stack.enter_async_context(Writer(url, kind="upkeep", shape=shape)))
        yield Counter(house, desk, opened, ends, metrics, signals, room, queue, broker, carrier, hears)
