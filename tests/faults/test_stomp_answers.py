"""Test a broker that answers as Artemis seldom does: an ERROR without a receipt, missing receipts.

Oracle: what got its receipt is not sent again, the rejected copy is found, and no caller waits for
ever.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Final

import pytest

from delivery.brokers import open_broker
from delivery.brokers.artemis.frames import Frame, FrameParser, encode, header
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker, RejectedTask
from tests.faults.test_stomp import Maker
from tests.support.broker_client import deliveries
from tests.support.installation import PATIENCE_S, ago, until

_MANAGEMENT: Final = b"activemq.management"
_ANSWER: Final = {"_AMQ_OperationSucceeded": "true"}


class Scripted:
    """Speak enough STOMP for management and sending."""

    def __init__(self, *, refuses: Collection[str] = (), receipts: int = 1_000_000) -> None:
        """Answer the deliveries in `refuses` by an ERROR without a receipt, and close.

        It sends `receipts` receipts for copies, and then no more.
        """
        self._refuses = refuses
        self._receipts = receipts
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.taken: list[str] = []
        self.beats = 0
        """The number of heart-beats that clients sent."""
        self.hangs = False
        """True: greet no new client."""
        self.hung = 0
        """The number of clients that got no greeting."""
        self.greeted = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        parser = FrameParser[Frame]()
        try:
            while data := await reader.read(65_536):
                self.beats += data == b"\n"
                for frame in parser.feed(data):
                    if not self._answer(frame, writer):
                        return
        except ConnectionError:
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def end(self) -> None:
        """Wait until its clients and their connections are gone."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _answer(self, frame: Frame, writer: asyncio.StreamWriter) -> bool:
        """Return whether the server goes on."""
        if frame.command == b"CONNECT":
            if self.hangs:
                self.hung += 1
                return True
            self.greeted += 1
            writer.write(encode("CONNECTED", {"version": "1.2", "heart-beat": "0,100"}))
            return True
        delivery = (header(frame.head, b"rooms-delivery-id") or b"").decode()
        if delivery in self._refuses:
            writer.write(encode("ERROR", {"message": "AMQ339999: it does not please me"}))
            return False
        if delivery:
            self.taken.append(delivery)
        receipt = header(frame.head, b"receipt")
        if receipt is not None and (self._receipts > 0 or not delivery):
            self._receipts -= bool(delivery)
            writer.write(encode("RECEIPT", {"receipt-id": receipt.decode()}))
        asked = header(frame.head, b"correlation-id")
        if header(frame.head, b"destination") == _MANAGEMENT and asked is not None:
            writer.write(encode("MESSAGE", {"correlation-id": asked.decode(), **_ANSWER}, b"[5]"))
        return True


@asynccontextmanager
async def serving(scripted: Scripted) -> AsyncIterator[Scripted]:
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.port = server.sockets[0].getsockname()[1]
    async with server:
        try:
            yield scripted
        finally:
            await scripted.end()


@asynccontextmanager
async def talking(scripted: Scripted, parameters: str) -> AsyncIterator[Broker]:
    async with (
        asyncio.timeout(PATIENCE_S),
        serving(scripted),
        open_broker(
            f"stomp://u:p@127.0.0.1:{scripted.port}?{parameters}",
            claim_s=60,
            farm="farm",
            client="scripted",
        ) as broker,
    ):
        yield broker


async def send(broker: Broker, copies: Sequence[DeliveryTask]) -> Sequence[RejectedTask]:
    return await broker.send(copies, not_before=[ago()] * len(copies))


async def test_a_rejected_copy_is_found_without_a_receipt() -> None:
    """Two of a batch are rejected without a receipt: they are taken out, and all others are sent."""
    copies = Maker().copies(30)
    bad = {copies[11].delivery_id, copies[20].delivery_id}
    scripted = Scripted(refuses=bad)
    async with talking(scripted, "heartbeat_ms=30000") as broker:
        refused = await send(broker, copies)
    assert [(one.task.delivery_id, one.queue_missing) for one in refused] == [
        (copies[11].delivery_id, False),
        (copies[20].delivery_id, False),
    ]
    assert all("does not please me" in one.reason for one in refused)
    counted = Counter(scripted.taken)
    assert counted.keys() == set(deliveries(copies)) - bad
    # The first time all went by without a receipt; from then on each has its own.
    assert [counted[copy.delivery_id] for copy in copies[:11]] == [2] * 11
    assert {counted[copy.delivery_id] for copy in copies if copy.delivery_id not in bad} == {1, 2}


@pytest.mark.parametrize("answered", [0, 2])
async def test_the_first_copy_without_a_receipt_is_named(answered: int) -> None:
    """The broker does not answer: it is given up in time, and the error names the first copy in doubt."""
    copies = Maker().copies(3, payload=bytes(3_000_000))
    first = copies[answered]
    async with talking(
        Scripted(receipts=answered // 2), "heartbeat_ms=30000&receipt_timeout_ms=1000"
    ) as broker:
        with pytest.raises(
            BrokerUnavailableError, match=f"{3 - answered} of 3 copies, from {first.delivery_id} on"
        ):
            await send(broker, copies)


async def test_an_idle_connection_sends_heart_beats() -> None:
    """Send heart-beats, or the broker would close after a minute."""
    scripted = Scripted()
    async with talking(scripted, "heartbeat_ms=250") as broker:
        assert await broker.depth(None) == 2 * 5, "five in each queue"

        async def beaten() -> bool:
            return scripted.beats >= 3

        await until(beaten, "three beats")


async def test_queues_that_are_slow_to_open_delay_nothing_else() -> None:
    """The broker greets none of a hundred pulls, whose clients then leave, and it recovers.

    Oracle: meanwhile the relay and workers connect at once, and so do other threads of the process.
    No connection is made for those that have left before their turn.
    """
    scripted = Scripted()
    maker = Maker()
    subscriptions = [maker.subscription() for _ in range(100)]
    async with talking(scripted, "heartbeat_ms=30000&connect_timeout_ms=3000") as broker:

        async def consume(subscription: SubscriptionId) -> None:
            async with broker.consume(credit=1, subscription=subscription):
                pass

        scripted.hangs = True
        opening = [asyncio.create_task(consume(subscription)) for subscription in subscriptions]

        async def hanging() -> bool:
            return scripted.hung >= 4

        await until(hanging, "pulls that get no greeting")
        scripted.hangs = False
        async with asyncio.timeout(1.5):
            assert await broker.depth(None) == 2 * 5, "five in each queue"
            assert await asyncio.to_thread(lambda: True)
        for task in opening:
            task.cancel()
        await asyncio.wait(opening)
        assert scripted.hung < len(opening)
        async with broker.consume(credit=1, subscription=subscriptions[0]):
            pass
        assert scripted.greeted == 2


async def test_pulls_that_left_a_broker_that_hangs_leave_nothing() -> None:
    """While the broker greets no client, pulls come and leave in great numbers.

    Oracle: what waits for a thread does not grow with those that have left.
    """
    scripted = Scripted()
    subscription = Maker().subscription()
    async with talking(scripted, "heartbeat_ms=30000&connect_timeout_ms=5000") as broker:

        async def consume() -> None:
            async with broker.consume(credit=1, subscription=subscription):
                pass

        scripted.hangs = True
        for _ in range(20):
            opening = [asyncio.create_task(consume()) for _ in range(50)]
            await asyncio.sleep(0)
            for task in opening:
                task.cancel()
            await asyncio.wait(opening)
            assert all(task.cancelled() for task in opening)
        waiting = [one for one in gc.get_objects() if type(one) is Future]
        assert len(waiting) < 100


async def test_a_pull_that_waits_for_a_thread_fails_when_the_broker_is_closed() -> None:
    """It was not cancelled itself, so it must not look as if."""
    scripted = Scripted()
    maker = Maker()
    async with talking(scripted, "heartbeat_ms=30000&connect_timeout_ms=500") as broker:

        async def consume() -> None:
            async with broker.consume(credit=1, subscription=maker.subscription()):
                pass

        scripted.hangs = True
        opening = [asyncio.create_task(consume()) for _ in range(30)]

        async def hanging() -> bool:
            return scripted.hung >= 4

        await until(hanging, "pulls that get no greeting")
    await asyncio.wait(opening)
    assert all(isinstance(task.exception(), BrokerUnavailableError) for task in opening)
