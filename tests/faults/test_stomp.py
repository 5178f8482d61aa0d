"""Break Artemis and the connections to it at every step.

Counted from outside: what got its receipt comes, unless the sentinel is lost.
"""

import asyncio
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import getrandbits
from typing import cast

import pytest

from delivery.brokers import open_broker
from delivery.brokers.artemis.connection import connect_socket
from rooms.backend_urls import parse_stomp_url
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, IdGenerator, MessageId, RoomId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import BrokerUnavailableError
from rooms.local.services import free_port
from rooms.ports import Broker
from tests.support.broker_client import COMES_BACK_S, deliveries, holds, taking
from tests.support.certificates import Authority
from tests.support.installation import PATIENCE_S, ago, now_ms, until
from tests.support.local_servers import TestServer, make_artemis, run_server
from tests.support.sentinel import put_sentinel
from tests.support.tcp_proxy import Proxy

ROOM = RoomId(7)
QUICK = "heartbeat_ms=4000&receipt_timeout_ms=10000&connect_timeout_ms=5000"
"""For tests that wait for a missing answer; on a busy machine a live broker may be as slow."""
Starter = Callable[..., TestServer]
_ACCEPTOR = "org.apache.activemq.artemis.core.remoting.impl.netty.NettyAcceptorFactory"


class Maker:
    """Make copies that no database knows."""

    def __init__(self) -> None:
        self._ids = IdGenerator(getrandbits)

    def subscription(self) -> SubscriptionId:
        return SubscriptionId(self._ids.generate(ROOM, now_ms()))

    def copies(
        self,
        count: int,
        subscription: SubscriptionId | None = None,
        *,
        kind: SubscriptionType = SubscriptionType.PUSH,
        payload: bytes = b"{}",
    ) -> list[DeliveryTask]:
        subscription = subscription or self.subscription()
        return [
            DeliveryTask(
                room_id=ROOM,
                delivery_id=DeliveryId(self._ids.generate(ROOM, now_ms())),
                message_id=MessageId(self._ids.generate(ROOM, now_ms())),
                subscription_id=subscription,
                kind=kind,
                generation=0,
                attempt=0,
                delay_ms=0,
                priority=4,
                event_type="order.created",
                event_version=1,
                correlation_id="trace",
                published_ms=now_ms(),
                expires_ms=None,
                subscription_version=None,
                deadline=float("inf"),
                headers=None,
                payload=payload,
            )
            for _ in range(count)
        ]


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def client() -> str:
    return f"fault-{secrets.token_hex(6)}"


@asynccontextmanager
async def proxied(url: str, client: str) -> AsyncIterator[tuple[Broker, Proxy]]:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(Proxy(*parse_stomp_url(url).hosts[0]))
        through = open_broker(_through(url, proxy), claim_s=60, farm="farm", client=client)
        yield await stack.enter_async_context(through), proxy


def _through(url: str, proxy: Proxy) -> str:
    parts = parse_stomp_url(url)
    return f"stomp://{parts.user}:{parts.password}@127.0.0.1:{proxy.port}"


async def send(broker: Broker, copies: Sequence[DeliveryTask]) -> None:
    assert not await broker.send(copies, not_before=[ago()] * len(copies))


async def drained(broker: Broker, count: int) -> list[str]:
    """Return the deliveries of all copies in the PUSH queue, each settled, and check that it is empty."""
    async with taking(broker) as taker:
        found = deliveries(await taker.has(count))
        await taker.consumer.settle(taker.copies)
        await holds(broker, 0)
        assert len(taker.copies) == len(found)
    return found


async def test_a_cut_between_send_and_receipt(artemis_url: str, client: str, maker: Maker) -> None:
    """The broker has them, the sender got no receipt. It sends them again, so they may come twice."""
    copies = maker.copies(100)
    async with (
        open_broker(artemis_url, claim_s=60, farm="farm", client=client) as direct,
        proxied(artemis_url, client) as (broker, proxy),
    ):
        await send(broker, maker.copies(50))  # the connections for large batches are there
        proxy.hold_answers()
        sending = asyncio.create_task(broker.send(copies, not_before=[ago()] * 100))
        await holds(direct, 150)
        assert not sending.done()
        proxy.cut()
        with pytest.raises(BrokerUnavailableError):
            await sending
        proxy.let_answers_go()
        await send(broker, copies)
        async with taking(direct) as taker:

            async def empty() -> bool:
                await taker.consumer.settle(taker.copies)
                return await direct.depth(None) == 0

            await taker.has(150)
            await until(empty, "every copy to be settled")
            found = deliveries(taker.copies)
        assert set(deliveries(copies)) <= set(found)
        assert len(set(found)) == 150


async def test_a_cut_between_receipt_and_ack(artemis_url: str, client: str, maker: Maker) -> None:
    """Copies that were not settled go to the next consumer; a late settle on the dead connection is harmless."""
    copies = maker.copies(20)
    async with proxied(artemis_url, client) as (broker, proxy):
        await send(broker, copies)
        async with taking(broker) as taker:
            taken = list(await taker.has(20))
            proxy.cut()
            await taker.breaks()
            await taker.consumer.settle(taken)
            await taker.consumer.release(taken)
        async with taking(broker) as taker:
            assert sorted(deliveries(await taker.has(20, within_s=COMES_BACK_S))) == sorted(
                deliveries(copies)
            )


async def test_a_cut_in_the_middle_of_settling(artemis_url: str, client: str, maker: Maker) -> None:
    """Each is either settled or comes again; none is in between."""
    copies = maker.copies(500)
    async with proxied(artemis_url, client) as (broker, proxy):
        await send(broker, copies)
        async with taking(broker) as taker:
            taken = list(await taker.has(500))
            before = proxy.asked
            for copy in taken[:250]:
                await taker.consumer.settle([copy])

            async def some_went() -> bool:
                return proxy.asked > before

            await until(some_went, "some acknowledgements on their way")
            proxy.cut()
            await taker.breaks()
        found = set()
        async with taking(broker) as taker:
            await taker.has(250)
            await until(lambda: _same(broker, taker.copies), "all that is left")
            found = set(deliveries(taker.copies))
        assert found >= set(deliveries(taken[250:]))


async def _same(broker: Broker, copies: list[DeliveryTask]) -> bool:
    return await broker.depth(None) == len(copies)


async def answers(broker: Broker) -> bool:
    try:
        await broker.depth(None)
    except BrokerUnavailableError:
        return False
    return True


class Load:
    """Run a sender and a consumer that outlast every absence of the broker."""

    def __init__(self, broker: Broker, maker: Maker) -> None:
        self._broker = broker
        self._maker = maker
        self._stop = False
        self._copies: list[DeliveryTask] = []
        self.accepted: list[str] = []
        self.seen: set[str] = set()

    async def publish(self) -> None:
        while not self._stop:
            batch = self._maker.copies(50)
            await self._send(batch)
            self._copies += batch
            self.accepted.extend(deliveries(batch))

    async def _send(self, batch: Sequence[DeliveryTask]) -> None:
        while True:
            try:
                await send(self._broker, batch)
                break
            except BrokerUnavailableError:
                await until(lambda: answers(self._broker), "the broker", within_s=90)

    async def send_again(self) -> None:
        """Send what has not come, as recovery does without a sentinel."""
        await self._send([copy for copy in self._copies if copy.delivery_id not in self.seen])

    def stop(self) -> None:
        self._stop = True

    async def take(self) -> None:
        while True:
            try:
                async with self._broker.consume(credit=200) as consumer:
                    async for copies in consumer.batches():
                        self.seen.update(deliveries(copies))
                        await consumer.settle(copies)
            except BrokerUnavailableError:
                await until(lambda: answers(self._broker), "the broker", within_s=90)

    async def more(self, count: int) -> None:
        wanted = len(self.accepted) + count

        async def grown() -> bool:
            return len(self.accepted) >= wanted and len(self.seen) >= wanted

        await until(grown, f"{count} more, sent and taken", within_s=120)

    async def whole(self) -> bool:
        return self.seen >= set(self.accepted)


async def test_a_broker_that_restarts_under_load(
    artemis_server: Starter, client: str, maker: Maker
) -> None:
    """Kill it twice under load: it has no sentinel then, and takes again what it has lost."""
    server = await asyncio.to_thread(artemis_server)
    async with open_broker(server.url, claim_s=60, farm="farm", client=client) as broker:
        load = Load(broker, maker)
        publishing = asyncio.create_task(load.publish())
        taken = asyncio.create_task(load.take())
        try:
            for _ in range(2):
                await put_sentinel(broker)
                await load.more(500)
                await asyncio.to_thread(server.restart)
                await until(lambda: answers(broker), "the broker", within_s=90)
                assert not await broker.has_sentinel()
                await load.send_again()
            await load.more(500)
            load.stop()
            await publishing
            await until(load.whole, "every accepted copy")
        finally:
            publishing.cancel()
            taken.cancel()
            await asyncio.gather(publishing, taken, return_exceptions=True)


async def test_a_frozen_broker_is_noticed_in_time(
    artemis_server: Starter, client: str, maker: Maker
) -> None:
    """Its connections stay open and silent: heart-beats detect it. It resumes with what it had."""
    server = await asyncio.to_thread(artemis_server)
    async with open_broker(
        f"{server.url}?{QUICK}", claim_s=60, farm="farm", client=client
    ) as broker:
        copies = maker.copies(5)
        await send(broker, copies)
        async with taking(broker) as taker:
            await taker.has(5)
            server.suspend()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    sending = asyncio.create_task(broker.send(maker.copies(1), not_before=[ago()]))
                    counting = asyncio.create_task(broker.depth(None))
                    with pytest.raises(BrokerUnavailableError):
                        await sending
                    with pytest.raises(BrokerUnavailableError):
                        await counting
                    await taker.breaks()
                    with pytest.raises(BrokerUnavailableError):
                        await broker.send(maker.copies(1), not_before=[ago()])
            finally:
                server.resume()

        await until(lambda: answers(broker), "the broker", within_s=90)
    # With the usual heart-beats, which a busy machine keeps up, too.
    async with (
        open_broker(server.url, claim_s=60, farm="farm", client=client) as broker,
        taking(broker) as taker,
    ):
        await until(lambda: _all(taker.copies, copies), "the copies")


async def _all(found: list[DeliveryTask], wanted: list[DeliveryTask]) -> bool:
    return set(deliveries(found)) >= set(deliveries(wanted))


async def test_a_rejected_copy_is_taken_out_of_a_send(
    artemis_url: str, client: str, maker: Maker
) -> None:
    """Only a copy that the broker never takes is rejected, with its reason, among good ones of many senders."""
    async with open_broker(artemis_url, claim_s=60, farm="farm", client=client) as broker:
        good = maker.copies(200)
        (nul,) = maker.copies(1)
        nul = replace(nul, correlation_id="a\0b")
        (wrong,) = maker.copies(1)
        wrong.priority = cast("int", "high")
        (missing,) = maker.copies(1, kind=SubscriptionType.PULL)
        batch = [*good[:50], nul, *good[50:99], wrong, good[99], missing]
        others = [
            asyncio.create_task(broker.send(good[n : n + 20], not_before=[ago()] * 20))
            for n in range(100, 200, 20)
        ]
        refused = await broker.send(batch, not_before=[ago()] * len(batch))
        assert not [one for found in await asyncio.gather(*others) for one in found]
        assert {one.task.delivery_id: one.queue_missing for one in refused} == {
            nul.delivery_id: False,
            wrong.delivery_id: False,
            missing.delivery_id: True,
        }
        assert all(one.reason for one in refused)
        assert sorted(await drained(broker, 200)) == sorted(deliveries(good))


async def test_a_full_disk_makes_the_broker_unavailable(
    artemis_server: Starter, client: str, maker: Maker
) -> None:
    """The broker takes nothing: no copy is rejected for ever, and what it has can be settled."""
    server = await asyncio.to_thread(artemis_server)
    queue = maker.subscription()
    copies = [
        replace(copy, native=True) for copy in maker.copies(3, queue, kind=SubscriptionType.PULL)
    ]
    async with open_broker(server.url, claim_s=60, farm="farm", client=client) as broker:
        await broker.create_queues([queue])
        await send(broker, copies)
    await asyncio.to_thread(server.stop)
    full = {"rooms.max.disk.usage.percent": "0", "rooms.disk.scan.period.ms": "100"}
    with run_server(make_artemis(server.log.parent.parent, properties=full)) as again:
        async with open_broker(again.url, claim_s=60, farm="farm", client=client) as broker:

            async def blocks() -> bool:
                return "AMQ222210" in again.log.read_text()

            await until(blocks, "the broker to find its disk full")
            with pytest.raises(BrokerUnavailableError):
                await broker.send(maker.copies(2), not_before=[ago()] * 2)
            async with taking(broker, subscription=queue) as taker:
                await taker.has(3)
                await taker.consumer.settle(taker.copies[:2])
            async with taking(broker, subscription=queue) as left:
                assert deliveries(await left.has(1)) == deliveries(taker.copies[2:])


async def test_malformed_messages_are_reported_and_end_nothing(
    artemis_url: str, client: str, maker: Maker
) -> None:
    """Foreign and broken messages are reported with what can be read of them, and gone once discarded."""
    (copy,) = maker.copies(1)
    async with open_broker(artemis_url, claim_s=60, farm="farm", client=client) as broker:
        await send(broker, [copy])
        for headers in (
            "",
            "rooms-format:2\n",
            f"rooms-format:1\nrooms-delivery-id:{copy.delivery_id}\nrooms-generation:4\nrooms-delivery-attempt:2\n",
            "rooms-format:1\nrooms-delivery-id:no-id\n",
        ):
            await _send_raw(artemis_url, f"push-farm-{client}", headers, b"\xff\0foreign")
        async with taking(broker) as taker:
            assert deliveries(await taker.has(1)) == [copy.delivery_id]
            found = await taker.puzzles(4)
            assert all(message.reason for message in found)
            assert {message.body for message in found} == {b"\xff\0foreign"}
            (known,) = [message for message in found if message.delivery_id is not None]
            assert (known.delivery_id, known.generation, known.attempt) == (copy.delivery_id, 4, 2)
            await holds(broker, 5)
            await taker.consumer.discard(found)
            await taker.consumer.discard(found)
            await taker.consumer.settle([copy])
            await holds(broker, 0)
            (last,) = maker.copies(1)
            await send(broker, [last])
            assert deliveries(await taker.has(2)) == deliveries([copy, last])


async def _send_raw(url: str, queue: str, headers: str, body: bytes) -> None:
    head = f"destination:{queue}\\c\\c{queue}\ndestination-type:ANYCAST\npersistent:true\n"
    await _send_frame(url, f"{head}{headers}content-length:{len(body)}\n", body)


async def _send_frame(url: str, headers: str, body: bytes) -> None:
    parts = parse_stomp_url(url)
    reader, writer = await asyncio.open_connection(*parts.hosts[0])
    hello = (
        f"CONNECT\naccept-version:1.2\nhost:x\nlogin:{parts.user}\npasscode:{parts.password}\n\n\0"
    )
    writer.write(hello.encode() + f"SEND\nreceipt:it\n{headers}\n".encode() + body + b"\0")
    async with asyncio.timeout(PATIENCE_S):
        while b"RECEIPT" not in (await reader.readuntil(b"\0")):
            pass
    writer.close()
    await writer.wait_closed()


async def test_a_queue_deleted_by_an_operator_ends_only_its_own_consumer(
    artemis_url: str, client: str, maker: Maker
) -> None:
    """A queue is removed with its consumers: those of other queues go on undisturbed."""
    kept, gone = maker.subscription(), maker.subscription()
    async with open_broker(artemis_url, claim_s=60, farm="farm", client=client) as broker:
        await broker.create_queues([kept, gone])
        async with (
            taking(broker) as pusher,
            taking(broker, subscription=kept) as puller,
            taking(broker, subscription=gone) as doomed,
        ):
            order = (
                "destination:activemq.management\ndestination-type:ANYCAST\n"
                "_AMQ_ResourceName:broker\n_AMQ_OperationName:destroyQueue\n"
            )
            await _send_frame(artemis_url, order, f'["subscription-{gone}", true, true]'.encode())
            assert isinstance(await doomed.breaks(), BrokerUnavailableError)
            wanted = [*maker.copies(1, kept, kind=SubscriptionType.PULL), *maker.copies(1)]
            await send(broker, wanted)
            assert deliveries(await puller.has(1)) == deliveries(wanted[:1])
            assert deliveries(await pusher.has(1)) == deliveries(wanted[1:])


async def test_garbage_instead_of_frames_means_unavailable(client: str, maker: Maker) -> None:
    """Servers that speak another protocol, or nothing: BrokerUnavailableError within the time-outs."""
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n\0", b"CONNECTED\nheart-beat:x,y\n\n\0", b""):

        async def serve(
            _reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = answer
        ) -> None:
            writer.write(answer)
            await writer.drain()
            await _reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with (
            server,
            asyncio.timeout(PATIENCE_S),
            open_broker(
                f"stomp://127.0.0.1:{port}?connect_timeout_ms=1000",
                claim_s=60,
                farm="farm",
                client=client,
            ) as broker,
        ):
            with pytest.raises(BrokerUnavailableError):
                await broker.send(maker.copies(1), not_before=[datetime.now(UTC)])


async def test_the_second_host_is_used_when_the_first_is_down(
    artemis_url: str, client: str, maker: Maker
) -> None:
    parts = parse_stomp_url(artemis_url)
    host, port = parts.hosts[0]
    url = f"stomp://{parts.user}:{parts.password}@127.0.0.1:1,{host}:{port}"
    async with open_broker(url, claim_s=60, farm="farm", client=client) as broker:
        await send(broker, maker.copies(1))
        await holds(broker, 1)


async def test_an_erased_journal_is_noticed(
    artemis_server: Starter, client: str, maker: Maker
) -> None:
    server = await asyncio.to_thread(artemis_server)
    async with open_broker(server.url, claim_s=60, farm="farm", client=client) as broker:
        await send(broker, maker.copies(3))
        await put_sentinel(broker)
        assert await broker.has_sentinel()
        await asyncio.to_thread(server.erase)
        await asyncio.to_thread(server.start)

        await until(lambda: answers(broker), "the broker", within_s=90)
        assert not await broker.has_sentinel()
        assert await broker.depth(None) == 0
        await send(broker, maker.copies(1))
        await put_sentinel(broker)
        assert await broker.has_sentinel()


@pytest.mark.parametrize("credit", [1, 3, 32])
async def test_a_small_credit_is_exact_for_the_smallest_copies(
    artemis_url: str, maker: Maker, credit: int
) -> None:
    async with open_broker(
        artemis_url, claim_s=60, farm="f", client=f"{credit}-{secrets.token_hex(1)}"
    ) as broker:
        copies = [
            replace(copy, event_type="e", correlation_id="c", payload=b"")
            for copy in maker.copies(credit + 10)
        ]
        await send(broker, copies)
        async with taking(broker, credit=credit) as taker:
            await taker.has(credit)
            (last,) = maker.copies(1)
            await send(broker, [last])
            await holds(broker, credit + 11)  # so it has handed out all that it would
            assert len(taker.copies) == credit
            await taker.consumer.settle(taker.copies)
            await taker.has(2 * credit if credit < 10 else credit + 11)


async def test_the_same_version_twice_at_once_is_one_attempt(
    artemis_url: str, client: str, maker: Maker
) -> None:
    """Duplicates are handed out once, and settled together."""
    (copy, last) = maker.copies(2)
    async with open_broker(artemis_url, claim_s=60, farm="farm", client=client) as broker:
        for _ in range(3):
            await send(broker, [copy])
        await send(broker, [last])
        async with taking(broker) as taker:
            assert deliveries(await taker.has(2)) == deliveries([copy, last])
            await holds(broker, 4)
            await taker.consumer.release([taker.copies[0]])
            assert deliveries((await taker.has(3))[2:]) == [copy.delivery_id]
            await taker.consumer.settle(taker.copies)
            await holds(broker, 0)


async def sends_at_once(url: str) -> bool:
    """A small frame leaves at once: with Nagle's algorithm two of them took 44 ms instead of 0.7."""
    with await asyncio.to_thread(connect_socket, parse_stomp_url(url)) as connection:
        return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


async def test_no_frame_waits_for_the_next(artemis_url: str) -> None:
    assert await sends_at_once(artemis_url)


async def test_tls_to_a_broker_whose_certificate_is_checked(
    artemis_url: str, client: str, maker: Maker, tmp_path: Path
) -> None:
    """TLS verifies against the system's authorities, or `ca`; much goes both ways in one connection."""
    Authority("127.0.0.1").write(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    parts = parse_stomp_url(artemis_url)
    copies = maker.copies(300, payload=bytes(range(256)) * 40)
    async with Proxy(*parts.hosts[0], tls=context) as proxy:
        url = f"stomps://{parts.user}:{parts.password}@127.0.0.1:{proxy.port}"
        async with open_broker(url, claim_s=60, farm="farm", client=client) as broker:
            with pytest.raises(BrokerUnavailableError):
                await broker.depth(None)
        for more in (f"ca={tmp_path / 'authority.pem'}", "verify=false"):
            async with open_broker(
                f"{url}?{more}", claim_s=60, farm="farm", client=client
            ) as broker:
                await send(broker, copies)
                async with taking(broker, credit=20_000) as taker:
                    found = {
                        copy.delivery_id: copy.payload for copy in await taker.has(len(copies))
                    }
                    assert set(found) == set(deliveries(copies))
                    assert set(found.values()) == {copies[0].payload}
                    await taker.consumer.settle(taker.copies)
            copies = maker.copies(300, payload=bytes(range(256)) * 40)


async def test_a_broker_that_asks_for_a_certificate(
    artemis_server: Starter, client: str, maker: Maker, tmp_path: Path
) -> None:
    """With mutual TLS a client without a trusted certificate is rejected."""
    theirs, ours, strangers = tmp_path / "broker", tmp_path / "rooms", tmp_path / "strangers"
    for folder in (theirs, ours, strangers):
        folder.mkdir()
        Authority("127.0.0.1").write(folder)
        (folder / "both.pem").write_bytes(
            (folder / "key.pem").read_bytes() + (folder / "chain.pem").read_bytes()
        )
    port = free_port()
    acceptor = {
        "host": "127.0.0.1",
        "port": str(port),
        "protocols": "STOMP",
        "sslEnabled": "true",
        "needClientAuth": "true",
        "keyStoreType": "PEM",
        "keyStorePath": str(theirs / "both.pem"),
        "trustStoreType": "PEMCA",
        "trustStorePath": str(ours / "authority.pem"),
    }
    server = await asyncio.to_thread(
        artemis_server,
        properties={
            "brokerconfig.acceptorConfigurations.tls.factoryClassName": _ACCEPTOR,
            **{
                f"brokerconfig.acceptorConfigurations.tls.params.{name}": value
                for name, value in acceptor.items()
            },
        },
    )
    parts = parse_stomp_url(server.url)
    url = f"stomps://{parts.user}:{parts.password}@127.0.0.1:{port}?ca={theirs / 'authority.pem'}"
    for wrong in ("", f"&certificate={strangers / 'chain.pem'}&key={strangers / 'key.pem'}"):
        async with open_broker(url + wrong, claim_s=60, farm="farm", client=client) as broker:
            with pytest.raises(BrokerUnavailableError):
                await broker.depth(None)
    for right in (
        f"&certificate={ours / 'chain.pem'}&key={ours / 'key.pem'}",
        f"&certificate={ours / 'both.pem'}",
    ):
        async with open_broker(url + right, claim_s=60, farm="farm", client=client) as broker:
            copies = maker.copies(100)
            await send(broker, copies)
            assert set(await drained(broker, 100)) == set(deliveries(copies))
        assert await sends_at_once(url + right)
