"""Test native subscriptions: the broker loses its data, they are deleted, readers reject messages.

Oracle: after a loss readers log in again with what they know. What was not handed over comes to
them, and what was is lost with the broker, as `handed_over` says. After a deletion no reader can
log in, and the broker has nothing of the subscription. What is rejected is sidelined by
maintenance, and a shovel has it read again. A broker that is killed while messages are rejected
loses none of them, and has none twice.
"""

import asyncio
import queue
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from proton import Delivery
from proton.utils import BlockingConnection
from stomp.utils import Frame

from delivery.brokers import open_broker
from delivery.maintenance.broker_users import sync_broker_users
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId
from rooms.domain.room import destination_name
from rooms.domain.state_machine import State, SubscriptionType
from tests.support import polling
from tests.support.installation import PATIENCE_S, installed, until
from tests.support.local_servers import TestServer
from tests.support.native_client import Reader, RefusedError, reader
from tests.support.native_installation import native_house
from tests.support.process_group import Crew
from tests.support.relay import relaying, to_send
from tests.support.room import Place

PULL = SubscriptionType.PULL
HOUR_MS = 3_600_000
MESSAGES = 300
RECEIPTS_BEFORE_KILL = (5, 40, 80)
UNCONFIRMED = 30


async def test_readers_log_in_again_after_a_loss_and_handed_over_messages_are_gone(
    database: str, artemis_server: Callable[..., TestServer]
) -> None:
    server = await asyncio.to_thread(artemis_server)
    async with (
        installed(database) as installation,
        open_broker(server.url, claim_s=60, farm="rooms", client="emptied") as broker,
        LogWriter(database, kind="chores") as writer,
    ):
        gate = broker.users
        assert gate is not None
        native = await installation.subscribe(PULL, native_password=gate.hash_password("secret"))
        await sync_broker_users(writer, gate, lambda: True)
        (gone,) = await to_send(installation, native, kind=PULL)

        async def handed_over() -> bool:
            return not await installation.value("SELECT count(*) FROM outbox")

        async with relaying(database, broker):
            await until(handed_over, "the message to be handed over")
        await asyncio.to_thread(server.erase)
        (waits,) = await to_send(installation, native, kind=PULL)
        await asyncio.to_thread(server.start)
        assert await gate.list_users({}) == {}
        await sync_broker_users(writer, gate, lambda: True)
        async with relaying(database, broker):
            await until(handed_over, "what waited to be handed over")

        def read() -> str:
            with reader(server.url, gate.user_name(native), "secret") as client:
                client.read(destination_name(installation.room, native))
                found = client.next().headers["rooms-delivery-id"]
                assert client.nothing_more()
                return str(found)

        assert await asyncio.to_thread(read) == waits.delivery_id
        assert {await installation.state(copy) for copy in (gone, waits)} == {State.HANDED_OVER}


class Answers:
    """Answers of a reader to one queue: NACK for some messages, ACK for all others.

    A message with the least priority is the last of the queue, and gets no answer.
    """

    def __init__(
        self,
        server: TestServer,
        *,
        user: str,
        destination: str,
        rejected: AbstractSet[DeliveryId],
        last: DeliveryId,
    ) -> None:
        self._server = server
        self._user = user
        self._destination = destination
        self._rejected = rejected
        self._last = last
        self.confirmed: set[DeliveryId] = set()

    def send_and_kill(self, receipts: int) -> None:
        """Kill the broker when so many answers are confirmed, and some others are under way."""
        with reader(self._server.url, self._user, "secret") as client:
            frames = self._read(client)
            for sent, (delivery, frame) in enumerate(frames.items()):
                if sent == receipts + UNCONFIRMED:
                    break
                reject = delivery in self._rejected
                answer = client.connection.nack if reject else client.connection.ack
                answer(frame.headers["ack"], receipt=delivery)
                if sent >= UNCONFIRMED:
                    self.confirmed.add(DeliveryId(client.receipts.get(timeout=PATIENCE_S)))
            self._server.kill()
            polling.until(lambda: client.over, "the connection to end")
            assert client.errors.empty()
            with suppress(queue.Empty):
                while True:
                    self.confirmed.add(DeliveryId(client.receipts.get_nowait()))

    def waiting(self) -> set[DeliveryId]:
        """Return the messages in the queue, without an answer to them."""
        with reader(self._server.url, self._user, "secret") as client:
            return set(self._read(client))

    def _read(self, client: Reader) -> dict[DeliveryId, Frame]:
        # Without a window all messages come before the first answer.
        client.connection.subscribe(
            self._destination,
            id="1",
            ack="client-individual",
            headers={"subscription-type": "MULTICAST", "consumer-window-size": "-1"},
        )
        found: dict[DeliveryId, Frame] = {}
        while True:
            frame = client.came.get(timeout=PATIENCE_S)
            delivery = DeliveryId(frame.headers["rooms-delivery-id"])
            if delivery == self._last:
                return found
            assert delivery not in found
            found[delivery] = frame


async def test_each_rejected_message_is_at_one_place_after_kills_of_the_broker(
    database: str, artemis_server: Callable[..., TestServer]
) -> None:
    """A message is acknowledged, in its queue, or a dead letter, and what is confirmed left its queue."""
    server = await asyncio.to_thread(artemis_server)
    async with native_house(database, server.url) as house:
        installation, gate = house.installation, house.gate
        native = await house.subscribe("secret")
        await house.keep()
        *copies, last = await to_send(installation, native, kind=PULL, count=MESSAGES + 1)
        for batch in (copies, [replace(last, priority=0)]):
            due = [datetime.now(UTC)] * len(batch)
            natives = [replace(copy, native=True) for copy in batch]
            assert await house.broker.send(natives, not_before=due) == []
        rejected = {copy.delivery_id for copy in copies[::2]}
        answers = Answers(
            server,
            user=gate.user_name(native),
            destination=destination_name(installation.room, native),
            rejected=rejected,
            last=last.delivery_id,
        )
        for receipts in RECEIPTS_BEFORE_KILL:
            await asyncio.to_thread(answers.send_and_kill, receipts)
            await asyncio.to_thread(server.start)
        waiting = await asyncio.to_thread(answers.waiting)
        assert answers.confirmed.isdisjoint(waiting)
        assert len(answers.confirmed) >= sum(RECEIPTS_BEFORE_KILL)
        dead: list[DeliveryId] = []
        async with gate.consume_dead_letters(credit=MESSAGES) as consumer:
            async with asyncio.timeout(PATIENCE_S):
                async for found in consumer.batches():
                    dead += [task.delivery_id for task in found]
                    if len(dead) >= len(rejected - waiting):
                        break
        assert len(dead) == len(set(dead)) == await gate.dead_letter_depth()
        assert set(dead) == rejected - waiting


async def left_at_the_broker(
    environment: Mapping[str, str], subscription: str
) -> tuple[bool, bool]:
    """Return whether the broker has a user, and a queue, of the subscription."""
    url, client = environment["BROKER_URL"], environment["ROOMS_CLIENT"]
    async with open_broker(url, claim_s=60, farm="rooms", client=client) as broker:
        assert broker.users is not None
        return subscription in await broker.users.list_users(
            {}
        ), subscription in await broker.list_queues()


@pytest.mark.parametrize("broker_url", ["relayed"], indirect=True, scope="module")
def test_deleting_a_subscription_deletes_its_user_and_queue(crew: Crew, place: Place) -> None:
    """Delete while a client reads: its connection ends, and what was not handed over is cancelled."""
    made: dict[str, Any] = crew.post(
        f"{place.at}/subscriptions", {"name": "native", "type": "PULL", "native": True}
    )
    login, native = made["login"], made["id"]
    assert asyncio.run(left_at_the_broker(crew.broker, native)) == (True, True)
    read, later = [place.publish(17, delay_ms=delay_ms)["message_id"] for delay_ms in (0, HOUR_MS)]
    with reader(crew.broker["BROKER_URL"], login["user"], login["password"]) as client:
        client.read(made["destination"])
        assert client.next().headers["rooms-message-id"] == read
        answer = crew.call("DELETE", f"/subscriptions/{native}")
        assert answer.status_code == 202, answer.text
        job = answer.json()["job_id"]
        # It is old enough that no process publishes to it any more.
        crew.rows(
            "UPDATE jobs SET created_at = now() - interval '1 minute' WHERE id = %s RETURNING 1",
            job,
        )
        crew.start("upkeep")
        polling.until(lambda: crew.get(f"/jobs/{job}")["state"] == "done", "the deletion")
        polling.until(lambda: client.over, "its reader to be shown out")
    with (
        pytest.raises(RefusedError),
        reader(crew.broker["BROKER_URL"], login["user"], login["password"]),
    ):
        pass
    assert asyncio.run(left_at_the_broker(crew.broker, native)) == (False, False)
    assert place.delivery(read, native)["state"] == "handed_over"
    gone = place.delivery(later, native)
    assert (gone["state"], gone["reason"]) == ("cancelled", "subscription_deleted")


@pytest.mark.parametrize("broker_url", ["relayed"], indirect=True, scope="module")
def test_rejected_messages_are_sidelined_and_read_again_after_a_shovel(
    crew: Crew, place: Place
) -> None:
    """Run real processes: relay, reader, killed maintenance and another, shovel, relay, reader."""
    made: dict[str, Any] = crew.post(
        f"{place.at}/subscriptions", {"name": "reject", "type": "PULL", "native": True}
    )
    login, native = made["login"], made["id"]
    found = {address["protocol"]: address for address in login["addresses"]}
    assert found.keys() == {"stomp", "amqp", "core"}

    def read(state: Any) -> str:
        connection = BlockingConnection(
            f"amqp://{found['amqp']['host']}:{found['amqp']['port']}",
            user=login["user"], password=login["password"], allowed_mechs="PLAIN", timeout=PATIENCE_S,
        )  # fmt: skip
        try:
            receiver = connection.create_receiver(login["queue"], credit=1)
            fields: Any = receiver.receive(timeout=PATIENCE_S).properties
            receiver.settle(state)
            return str(fields["rooms_message_id"])
        finally:
            connection.close()

    message = place.publish(17)["message_id"]
    assert read(Delivery.REJECTED) == message
    crew.start("upkeep").kill()
    crew.start("upkeep")
    place.await_state(message, native, "sidelined")
    delivery = place.delivery(message, native)
    assert (delivery["reason"], delivery["last_error"]) == (
        "nacked",
        "its reader rejected it at the broker",
    )
    job = crew.post(f"/subscriptions/{native}/sideline/shovel", {})
    polling.until(
        lambda: crew.get(f"/jobs/{job['job_id']}")["state"] == "done", "the shovel to be done"
    )
    assert read(Delivery.ACCEPTED) == message
    place.await_state(message, native, "handed_over")
    assert place.steps(message, native)[-4:] == [
        "handed_over",
        "sidelined",
        "shoveled",
        "handed_over",
    ]
