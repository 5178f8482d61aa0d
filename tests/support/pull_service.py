"""PULL over a furnished database: a publisher and a puller as one API process has them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from delivery.pull.open_queues import MAX_OPEN_QUEUES
from delivery.pull.service import PullService, WaitDisconnect, open_pull_service
from rooms.db.leases.release import LeaseQueries
from rooms.db.notify import Channel, Notifier
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.work_location import POSTGRES_MODE, relayed_mode
from rooms.errors import LeaseExpiredError
from rooms.metrics import Metrics
from rooms.ports import Broker
from tests.support.fake_broker import MemoryBroker
from tests.support.in_process_relay import Carrier
from tests.support.publisher import Desk, House, open_desk

EVENT_TYPE = "order.created"
PATIENCE_S = 60.0
LOOKAHEAD_MS = 60_000


async def until(look: Callable[[], bool]) -> None:
    """Until it is so, for states that send no signal."""
    async with asyncio.timeout(PATIENCE_S):
        while not look():  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.002)


@dataclass
class Counter:
    """Where messages are published and pulled.

    One room, one PULL subscription unless a test makes more.
    """

    house: House
    desk: Desk
    puller: PullService
    ends: LeaseQueries
    metrics: Metrics
    signals: Notifier
    room: RoomId
    queue: SubscriptionId
    broker: Broker | None = None
    """Another one than PostgreSQL, which carries the copies."""
    carrier: Carrier | None = None
    hears: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once notifications reach the pull service; from then on they wake waiting polls."""

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

    async def pull_bytes(
        self, *, queue: str | None = None, gone: WaitDisconnect | None = None, **fields: Any
    ) -> bytes:
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

    async def settle(
        self, how: str, *ack_ids: str, queue: str | None = None, **fields: Any
    ) -> list[str]:
        """The status of each ack id; all late or not."""
        body = json.dumps({"ack_ids": ack_ids, **fields}).encode()
        try:
            async with asyncio.timeout(PATIENCE_S):
                _, answer = await getattr(self.puller, how)(
                    self.house.principal, queue or self.queue, body
                )
            results = [
                (result["ack_id"], result["status"]) for result in json.loads(answer)["results"]
            ]
        except LeaseExpiredError as error:
            results = list(error.results)
        assert [ack_id for ack_id, _ in results] == list(ack_ids)
        return [status for _, status in results]

    async def a_client_waits(self) -> None:
        """Wait until a poll has found nothing and waits for a notification, which sends no signal."""
        await until(lambda: bool(self.puller._waiters.waiting_keys()))

    def row(self, delivery: str) -> tuple[Any, ...]:
        """(state, generation, attempt, attempts, reason) of a delivery."""
        (found,) = self.house.run(
            "SELECT state::text, generation, attempt, attempts, reason FROM deliveries WHERE id = %s",
            delivery,
        )
        return found

    def work(self) -> dict[str, int]:
        """Count the rows of each work table."""
        return {table: self.house.count(table) for table in ("outbox", "held", "leases")}

    def log(self, message: str) -> list[tuple[str, int, int]]:
        """(kind, generation, attempt) of every step of the message's delivery, in its order."""
        return self.house.run(
            "SELECT kind, generation, attempt FROM delivery_log WHERE message_id = %s AND delivery_id IS NOT NULL"
            " ORDER BY generation, attempt, ts, writer_seq",
            message,
        )

    def run_out(self, *deliveries: str) -> None:
        """Let the time of leases be up, before a process notices it."""
        self.house.run(
            "UPDATE leases SET until = now() - interval '1 ms' WHERE id = ANY (%s::uuid[])",
            list(deliveries),
        )


@asynccontextmanager
async def open_counter(
    url: str,
    *,
    house: House | None = None,
    broker: Broker | None = None,
    max_open_queues: int = MAX_OPEN_QUEUES,
    **subscription: Any,
) -> AsyncIterator[Counter]:
    """A counter in a room of its own; `broker`: another one than PostgreSQL, which carries the copies.

    To a broker in memory a `Carrier` brings them, that of the first counter of a `house`; for any
    other one it is the test that runs a relay.
    """
    shape = POSTGRES_MODE if broker is None else relayed_mode(lookahead_ms=LOOKAHEAD_MS)
    async with AsyncExitStack() as stack:
        is_first = house is None
        house = house or House(url)
        room = house.room()
        house.event_type(room, EVENT_TYPE)
        queue = house.subscription(room, "PULL", **subscription)
        desk = await stack.enter_async_context(open_desk(url, shape=shape))
        puller: PullService | None = None
        carrier: Carrier | None = None
        # Two would send each copy twice.
        if isinstance(broker, MemoryBroker) and is_first:
            carrier = await stack.enter_async_context(Carrier(url, broker))

        hears = asyncio.Event()

        def heard(names: frozenset[str]) -> None:
            hears.set()
            if puller is not None:
                puller.on_notify(names)

        def changed(names: frozenset[str]) -> None:
            if puller is not None:
                puller.on_config_change(names)

        signals = await stack.enter_async_context(
            Notifier(
                url, listeners={Channel.PULL: heard, Channel.CONFIG: changed}, broker_mode=shape
            )
        )
        metrics = Metrics()
        opened = puller = await stack.enter_async_context(
            open_pull_service(
                url,
                signals=signals,
                metrics=metrics,
                broker=broker,
                mode=shape,
                max_open_queues=max_open_queues,
            )
        )
        ends = LeaseQueries(
            await stack.enter_async_context(LogWriter(url, kind="upkeep", broker_mode=shape))
        )
        yield Counter(
            house, desk, opened, ends, metrics, signals, room, queue, broker, carrier, hears
        )
