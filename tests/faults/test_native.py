"""Test native subscriptions: the broker loses its data, they are deleted, readers reject messages.

Oracle: after a loss readers log in again with what they know. What was not handed over comes to
them, and what was is lost with the broker, as `handed_over` says. After a deletion no reader can
log in, and the broker has nothing of the subscription. What is rejected is sidelined by
maintenance, and a shovel has it read again.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from proton import Delivery
from proton.utils import BlockingConnection

from delivery.brokers import open_broker
from delivery.maintenance.cleanup import sync_broker_users
from rooms.db.writer import LogWriter
from rooms.domain.room import destination_name
from rooms.domain.state_machine import State, SubscriptionType
from tests.support import polling
from tests.support.installation import PATIENCE_S, installed, until
from tests.support.local_servers import TestServer
from tests.support.native_client import RefusedError, reader
from tests.support.process_group import Crew
from tests.support.relay import relaying, to_send
from tests.support.room import Place

PULL = SubscriptionType.PULL
HOUR_MS = 3_600_000


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
