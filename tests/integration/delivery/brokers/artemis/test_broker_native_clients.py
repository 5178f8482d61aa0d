"""Read native queues with stomp.py, Qpid Proton, Qpid JMS and the JMS client of Artemis.

A message that a reader rejects is sidelined, and a shovel returns it. Nothing is lost or delivered
twice by this.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from proton import Delivery, Message, SSLDomain
from proton.utils import BlockingConnection
from stomp import StompConnection11

from delivery.brokers.artemis import users
from delivery.doctor.checks import BrokerQueueCheck
from delivery.maintenance.native_queues import update_broker_metrics
from rooms.backend_urls import parse_stomp_url
from rooms.clock import SystemClock
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.message_headers import SIGNATURE_HEADER
from rooms.domain.room import destination_name
from rooms.domain.state_machine import LogKind, Reason, State, SubscriptionStatus, SubscriptionType
from rooms.local.services import free_port
from tests.support.certificates import Authority
from tests.support.installation import PAYLOAD, until
from tests.support.java_clients import read_by_jms, trust, uri
from tests.support.local_servers import TestServer
from tests.support.native_client import reader
from tests.support.native_installation import House, native_house, value_of
from tests.support.relay import RELAYED, relaying, to_send
from tests.support.sentinel import put_sentinel

PULL: Final = SubscriptionType.PULL
PASSWORD: Final = "secret"
_TIMEOUT_S: Final = 60.0
_ACCEPTOR: Final = "org.apache.activemq.artemis.core.remoting.impl.netty.NettyAcceptorFactory"
Starter = Callable[..., TestServer]


@pytest.fixture
async def house(database: str, artemis_url: str) -> AsyncIterator[House]:
    async with native_house(database, artemis_url) as opened:
        yield opened


async def handed_over(
    house: House, count: int = 1, **fields: Any
) -> tuple[SubscriptionId, list[DeliveryTask]]:
    """Return a native subscription with this many deliveries in its queue."""
    native = await house.subscribe(PASSWORD)
    await house.keep()
    copies = await to_send(house.installation, native, kind=PULL, count=count, **fields)
    async with relaying(house.installation.url, house.broker):
        await house.ended(*copies)
    return native, copies


async def reason(house: House, copy: DeliveryTask) -> tuple[Reason, str]:
    """Return why a delivery is where it is."""
    row = await house.installation.delivery(copy)
    return row["reason"], row["last_error"]


async def by_amqp(house: House, native: SubscriptionId, states: Sequence[Any]) -> list[Message]:
    """Receive messages with Qpid Proton, and settle each as given."""

    def take() -> list[Message]:
        place = urlsplit(house.url)
        connection = BlockingConnection(
            f"amqp://{place.hostname}:{place.port}",
            user=house.gate.user_name(native),
            password=PASSWORD,
            allowed_mechs="PLAIN",
            timeout=_TIMEOUT_S,
        )
        try:
            receiver = connection.create_receiver(
                destination_name(house.installation.room, native), credit=1
            )
            found = []
            for state in states:
                found.append(receiver.receive(timeout=_TIMEOUT_S))
                receiver.settle(state)
            return found
        finally:
            connection.close()

    return await asyncio.to_thread(take)


def plain_uri(protocol: str, url: str) -> str:
    """Return the address of the broker for Java clients without TLS."""
    ((host, port),) = parse_stomp_url(url).hosts
    return uri(protocol, host, port)


def operator(url: str) -> tuple[str, str]:
    """Return the user and password of Rooms itself."""
    parts = parse_stomp_url(url)
    return parts.user, parts.password


def fields(message: Message) -> dict[Any, Any]:
    """Return the properties of a message as Rooms writes them."""
    found: Any = message.properties  # its annotation knows no value but None
    return dict(found)


def body(message: Message) -> bytes:
    found: Any = message.body  # a memoryview, which its annotation leaves out
    return bytes(found)


def steps(messages: Sequence[Message]) -> list[DeliveryId]:
    return [DeliveryId(fields(message)["rooms_delivery_id"]) for message in messages]


async def test_proton_reads_every_field_at_its_amqp_place(house: House) -> None:
    signed = {SIGNATURE_HEADER: "a.b.c"}
    native, (copy,) = await handed_over(house, priority=7, headers=signed)
    (message,) = await by_amqp(house, native, [Delivery.ACCEPTED])
    assert json.loads(fields(message)["rooms_headers"]) == signed
    assert copy.priority == 7
    assert (message.correlation_id, message.subject) == (copy.correlation_id, copy.event_type)
    assert (body(message), message.durable, message.priority) == (copy.payload, True, copy.priority)
    assert (
        fields(message)["rooms_message_id"]
        == fields(message)["rooms-message-id"]
        == copy.message_id
    )
    assert message.id is None, "Artemis takes no message id from STOMP; the documentation says so"


async def test_amqp_rejected_message_is_sidelined_and_shovelled(
    house: House,
) -> None:
    native, copies = await handed_over(house, 3)
    found = await by_amqp(house, native, [Delivery.REJECTED, Delivery.ACCEPTED, Delivery.REJECTED])
    assert sorted(steps(found)) == sorted(copy.delivery_id for copy in copies)
    by_id = {copy.delivery_id: copy for copy in copies}
    first, second, third = (by_id[identity] for identity in steps(found))
    await house.sidelined(first, third)
    assert await house.installation.state(second) is State.HANDED_OVER
    assert await reason(house, first) == (Reason.NACKED, "its reader rejected it at the broker")
    assert await house.installation.kinds(first) == [LogKind.HANDED_OVER, LogKind.SIDELINED]
    assert house.counted("sidelined") == 2
    await house.shovel(first)
    async with relaying(house.installation.url, house.broker):
        await house.ended(first)
    (again,) = await by_amqp(house, native, [Delivery.ACCEPTED])
    assert steps([again]) == [first.delivery_id]
    assert body(again) == first.payload
    assert fields(again)["rooms_generation"] == str(first.generation + 1)


async def test_dead_letter_before_the_recorded_hand_over_waits(
    house: House,
) -> None:
    """Receipt and record are two steps.

    A relay that dies between them leaves the delivery queued, and its message readable.
    """
    native = await house.subscribe(PASSWORD)
    await house.keep()
    (copy,) = await to_send(house.installation, native, kind=PULL)
    async with relaying(house.installation.url, house.broker) as first:
        first.outgoing.dies_before_end = True
        await first.died.wait()
    await by_amqp(house, native, [Delivery.REJECTED])

    async def counted() -> bool:
        return await house.gate.dead_letter_depth() == 1

    await until(counted, "the dead letter to be counted")
    await house.look_for_dead_letters()
    assert await house.installation.state(copy) is State.QUEUED
    async with relaying(house.installation.url, house.broker):
        await house.ended(copy)
    await house.sidelined(copy)
    assert house.counted("discarded") == 0


async def test_dead_letters_of_ended_deliveries_are_discarded(house: House) -> None:
    """The subscription is deleted, it has moved on, or another installation sent the message."""
    native, copies = await handed_over(house, 3)
    await by_amqp(house, native, [Delivery.REJECTED] * 3)
    gone, moved, other = copies
    await house.installation.rows(
        "DELETE FROM deliveries WHERE id = %s RETURNING 1", gone.delivery_id
    )
    await house.installation.rows(
        "UPDATE deliveries SET generation = 1 WHERE id = %s RETURNING 1", moved.delivery_id
    )
    await house.installation.change(native, status=SubscriptionStatus.DELETED)

    async def looked() -> bool:
        await house.look_for_dead_letters()
        return house.counted("discarded") == 3

    await until(looked, "all of them to be discarded")
    assert (await house.installation.delivery(other))["state"] == State.HANDED_OVER
    assert not await house.installation.value("SELECT count(*) FROM sidelined")


async def test_task_that_crashes_before_its_ack_sidelines_once(house: House) -> None:
    native, (copy,) = await handed_over(house)
    await by_amqp(house, native, [Delivery.REJECTED])

    async def taken() -> DeliveryTask:
        async with house.gate.consume_dead_letters(credit=10) as consumer:
            found: DeliveryTask = (await anext(consumer.batches()))[0]
            return found

    dead = await asyncio.wait_for(taken(), _TIMEOUT_S)
    assert dead.delivery_id == copy.delivery_id
    await house.sidelined(copy)
    assert await house.installation.kinds(copy) == [LogKind.HANDED_OVER, LogKind.SIDELINED]


async def test_foreign_messages_are_removed_from_the_dead_letters(house: House) -> None:
    """Another user of the broker may have the same dead-letter address."""
    native, (copy,) = await handed_over(house)
    with reader(house.url, *operator(house.url)) as client:
        client.send("rooms-dead-letters")

        async def looked() -> bool:
            await house.look_for_dead_letters()
            return house.counted("unreadable") == 1

        await until(looked, "it to be counted")
    await by_amqp(house, native, [Delivery.REJECTED])
    await house.sidelined(copy)


async def test_stomp_reads_both_spellings_and_the_standard_headers(house: House) -> None:
    native, (copy,) = await handed_over(house)
    (headers,) = await house.read(native, 1, PASSWORD)
    assert (
        headers["correlation-id"]
        == headers["rooms_correlation_id"]
        == headers["rooms-correlation-id"]
    )
    assert headers["type"] == headers["rooms_event_type"] == copy.event_type
    hyphens = {
        name.replace("-", "_"): value
        for name, value in headers.items()
        if name.startswith("rooms-")
    }
    assert hyphens == {name: value for name, value in headers.items() if name.startswith("rooms_")}


async def by_stomp(
    house: House, native: SubscriptionId, answers: Sequence[str], *, ack: str = "client-individual"
) -> list[DeliveryId]:
    """Receive as many messages as there are answers, then send each: ack, nack, or nothing."""

    def take() -> list[DeliveryId]:
        with reader(house.url, house.gate.user_name(native), PASSWORD) as client:
            client.read(destination_name(house.installation.room, native), ack=ack)
            frames = [client.came.get(timeout=_TIMEOUT_S) for _ in answers]
            for frame, answer in zip(frames, answers, strict=True):
                if answer:
                    getattr(client.connection, answer)(frame.headers["ack"], receipt="answered")
                    client.receipt("answered")
            assert client.errors.empty()
            return [DeliveryId(frame.headers["rooms_delivery_id"]) for frame in frames]

    return await asyncio.to_thread(take)


async def test_stomp_nack_is_sidelined_and_shovelled(house: House) -> None:
    native, copies = await handed_over(house, 3)
    found = await by_stomp(house, native, ["nack", "ack", "nack"])
    by_id = {copy.delivery_id: copy for copy in copies}
    first, second, third = (by_id[identity] for identity in found)
    await house.sidelined(first, third)
    assert await house.installation.state(second) is State.HANDED_OVER
    assert await reason(house, first) == (Reason.NACKED, "its reader rejected it at the broker")
    assert house.counted("sidelined") == 2
    assert await house.broker.depth(native) == 0
    await house.shovel(first)
    async with relaying(house.installation.url, house.broker):
        await house.ended(first)
    # Rejected, returned and rejected again: the broker does not take the copy for a duplicate.
    assert await by_stomp(house, native, ["nack"]) == [first.delivery_id]
    await house.sidelined(first)
    assert house.counted("sidelined") == 3


async def test_nack_without_individual_mode_rejects_what_came_before_it(house: House) -> None:
    """As an ACK of a subscription with `ack:client` acknowledges everything up to its message."""
    native, copies = await handed_over(house, 4)
    found = await by_stomp(house, native, ["", "ack", "", "nack"], ack="client")
    by_id = {copy.delivery_id: copy for copy in copies}
    await house.sidelined(by_id[found[2]], by_id[found[3]])
    states = [await house.installation.state(by_id[identity]) for identity in found[:2]]
    assert states == [State.HANDED_OVER] * 2
    assert await house.broker.depth(native) == 0


async def test_stomp_1_1_rejects_by_message_and_subscription(house: House) -> None:
    native, (copy,) = await handed_over(house)

    def nack() -> None:
        with reader(
            house.url, house.gate.user_name(native), PASSWORD, version=StompConnection11
        ) as client:
            client.read(destination_name(house.installation.room, native))
            frame = client.came.get(timeout=_TIMEOUT_S)
            client.connection.nack(frame.headers["message-id"], "1", receipt="answered")
            client.receipt("answered")

    await asyncio.to_thread(nack)
    await house.sidelined(copy)


async def test_nack_of_an_unknown_message_is_an_error_and_rejects_nothing(house: House) -> None:
    native, (copy,) = await handed_over(house)

    def nack(identity: str) -> str:
        with reader(house.url, house.gate.user_name(native), PASSWORD) as client:
            client.read(destination_name(house.installation.room, native))
            frame = client.came.get(timeout=_TIMEOUT_S)
            consumer = frame.headers["ack"].split(",")[0]
            client.connection.nack(identity.format(consumer=consumer))
            return client.refused()

    for identity in ("nonsense", "1,2,3", "{consumer},1", "x,y", "9999999999999999999999,1"):
        assert await asyncio.to_thread(nack, identity), identity
    assert await house.gate.dead_letter_depth() == 0
    assert len(await house.read(native, 1, PASSWORD)) == 1
    assert await house.installation.state(copy) is State.HANDED_OVER


async def test_rejected_messages_do_not_use_up_the_readers_window(house: House) -> None:
    """Each message is larger than what the broker sends ahead."""
    native = await house.subscribe(PASSWORD)
    await house.keep()
    payload = b'{"x":"%b"}' % (b"y" * 200_000)
    copies = [
        replace(copy, payload=payload)
        for copy in await to_send(house.installation, native, kind=PULL, count=5)
    ]
    assert await house.broker.send(copies, not_before=[datetime.now(UTC)] * 5) == []

    def reject_each() -> None:
        with reader(house.url, house.gate.user_name(native), PASSWORD) as client:
            client.read(destination_name(house.installation.room, native))
            for _ in copies:
                frame = client.came.get(timeout=_TIMEOUT_S)
                client.connection.nack(frame.headers["ack"], receipt="answered")
                client.receipt("answered")

    await asyncio.to_thread(reject_each)
    async with house.gate.consume_dead_letters(credit=10) as consumer:
        tasks: list[DeliveryTask] = []
        async with asyncio.timeout(_TIMEOUT_S):
            async for batch in consumer.batches():
                tasks += batch
                await consumer.settle(batch)
                if len(tasks) == len(copies):
                    break
    assert {task.delivery_id for task in tasks} == {copy.delivery_id for copy in copies}
    assert {task.payload for task in tasks} == {payload}


async def test_doctor_reports_a_broker_that_destroys_what_is_rejected(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_sentinel(house.broker)
    doctor = BrokerQueueCheck(house.writer, house.broker, SystemClock(), lambda: None, settle_s=0)
    assert await house.gate.keeps_rejected()
    native = await house.subscribe(PASSWORD)
    await house.keep()
    assert await doctor.run(repair=False) == []
    # A broker with another class has not this one.
    monkeypatch.setattr(users, "_NACK_INTERCEPTOR", "rooms.Another")
    (finding,) = await doctor.run(repair=True)
    assert (finding.count, finding.repaired, finding.examples) == (1, 0, [native])
    assert "NackInterceptor" in finding.advice


@pytest.mark.parametrize("protocol", ["amqp", "core"])
async def test_jms_reads_every_field_by_selector(house: House, protocol: str) -> None:
    native = await house.subscribe(PASSWORD)
    await house.keep()
    headers = {"tenant": "a\nb", "größe": "ü"}
    wanted = await house.installation.publish(
        native,
        kind=PULL,
        headers=headers,
        correlation_id="trace:1\\2",
        event_type="order.wanted",
        priority=7,
    )
    others = await house.installation.publish(native, kind=PULL)
    copies = [*wanted, *others]
    await house.installation.queue(*copies, shape=RELAYED)
    async with relaying(house.installation.url, house.broker):
        await house.ended(*copies)
    found = await asyncio.to_thread(
        read_by_jms,
        protocol,
        plain_uri(protocol, house.url),
        user=house.gate.user_name(native),
        password=PASSWORD,
        queue=destination_name(house.installation.room, native),
        count=1,
        selector="rooms_event_type = 'order.wanted'",
    )
    (message,) = found
    assert message["JMSCorrelationID"] == message["rooms_correlation_id"] == "trace:1\\2"
    assert message["JMSType"] == message["rooms_event_type"] == "order.wanted"
    assert message["JMSPriority"] == "7"
    assert message["JMSMessageID"] is None or protocol == "amqp"
    assert message["rooms_delivery_id"] == wanted[0].delivery_id
    assert message["version"] == "3"
    assert message["body"].encode("latin-1") == PAYLOAD


async def test_qpid_jms_rejected_message_is_sidelined(house: House) -> None:
    native, copies = await handed_over(house, 2)
    found = await asyncio.to_thread(
        read_by_jms,
        "amqp",
        plain_uri("amqp", house.url),
        user=house.gate.user_name(native),
        password=PASSWORD,
        queue=destination_name(house.installation.room, native),
        count=2,
        how="reject",
    )
    assert {message["rooms_delivery_id"] for message in found} == {
        copy.delivery_id for copy in copies
    }
    await house.sidelined(*copies)


async def test_gauges_report_native_queue_depth_and_disk_usage(
    house: House,
) -> None:
    native, _ = await handed_over(house, 3)
    await handed_over(house, 2)
    await house.installation.subscribe(PULL)
    metrics = house.metrics

    async def reported() -> bool:
        await update_broker_metrics(house.writer, house.broker, metrics, lambda: True)
        return [
            value_of(gauge)
            for gauge in (metrics.native_queue_depth, metrics.native_queue_depth_max)
        ] == [5, 3]

    await until(reported, "the depths")
    await by_amqp(house, native, [Delivery.ACCEPTED] * 3)

    async def less() -> bool:
        await update_broker_metrics(house.writer, house.broker, metrics, lambda: True)
        return (
            value_of(metrics.native_queue_depth) == 2
            and 0 < value_of(metrics.broker_disk_usage) < 1
        )

    await until(less, "the depths, and the disk's share after the broker's first look")


async def test_every_client_reads_by_tls(
    database: str, artemis_server: Starter, tmp_path: Path
) -> None:
    """One acceptor has a certificate, as documented, beside the one that Rooms uses."""
    Authority("localhost", "127.0.0.1").write(tmp_path)
    (tmp_path / "both.pem").write_bytes(
        (tmp_path / "key.pem").read_bytes() + (tmp_path / "chain.pem").read_bytes()
    )
    port = free_port()
    acceptor = {
        "host": "127.0.0.1",
        "port": str(port),
        "protocols": "STOMP,AMQP,CORE",
        "sslEnabled": "true",
        "keyStoreType": "PEM",
        "keyStorePath": str(tmp_path / "both.pem"),
    }
    properties = {
        "brokerconfig.acceptorConfigurations.tls.factoryClassName": _ACCEPTOR,
        **{
            f"brokerconfig.acceptorConfigurations.tls.params.{name}": value
            for name, value in acceptor.items()
        },
    }
    server = await asyncio.to_thread(artemis_server, properties=properties)
    trusted = await asyncio.to_thread(trust, tmp_path / "authority.pem", tmp_path / "trusted.p12")
    async with native_house(database, server.url) as house:
        native, copies = await handed_over(house, 4)
        queue, user = (
            destination_name(house.installation.room, native),
            house.gate.user_name(native),
        )

        def by_proton() -> DeliveryId:
            domain = SSLDomain(SSLDomain.MODE_CLIENT)
            domain.set_trusted_ca_db(str(tmp_path / "authority.pem"))
            domain.set_peer_authentication(
                SSLDomain.VERIFY_PEER_NAME
            )  # it compares names only, no addresses
            connection = BlockingConnection(
                f"amqps://localhost:{port}",
                user=user,
                password=PASSWORD,
                ssl_domain=domain,
                timeout=_TIMEOUT_S,
            )
            try:
                receiver = connection.create_receiver(queue, credit=1)
                message = receiver.receive(timeout=_TIMEOUT_S)
                receiver.accept()
                return steps([message])[0]
            finally:
                connection.close()

        def by_stomp() -> DeliveryId:
            url = f"stomps://127.0.0.1:{port}"
            with reader(url, user, PASSWORD, authority=tmp_path / "authority.pem") as client:
                client.read(queue)
                frame = client.next()
                client.connection.disconnect(receipt="over")
                return DeliveryId(frame.headers["rooms_delivery_id"])

        found = [await asyncio.to_thread(by_proton), await asyncio.to_thread(by_stomp)]
        for protocol in ("amqp", "core"):
            (message,) = await asyncio.to_thread(
                read_one, protocol, uri(protocol, "127.0.0.1", port, trusted=trusted), user, queue
            )
            found.append(DeliveryId(message["rooms_delivery_id"]))
        assert len(set(found)) == len(found)
        assert set(found) <= {copy.delivery_id for copy in copies}


def read_one(protocol: str, at: str, user: str, queue: str) -> list[dict[str, Any]]:
    """Read one message, and leave the others in the queue."""
    return read_by_jms(
        protocol, at, user=user, password=PASSWORD, queue=queue, count=1, how="first"
    )
