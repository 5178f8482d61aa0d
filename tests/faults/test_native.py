"""Native subscriptions whose broker was emptied, such that are deleted, and such whose reader rejects a message.

Oracle: after the one their readers come in again with what they know, what was not handed over yet comes to them, and what
was is gone with the broker, as `handed_over` says. After the other nobody comes in, and the broker has nothing of them.
What is rejected is sidelined by the upkeep process, and a shovel has it read again.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from proton import Delivery
from proton.utils import BlockingConnection

from rooms.brokers import open_broker
from rooms.domain.names import destination
from rooms.domain.states import State, SubscriptionType
from rooms.embedded import Running
from rooms.storage.writer import Writer
from rooms.upkeep.gates import GatesOfNatives
from tests import waiting
from tests.faults.crew import Crew
from tests.installation import PATIENCE_S, installed, until
from tests.natively import RefusedError, reader
from tests.place import Place
from tests.relaying import relaying, to_send

PULL = SubscriptionType.PULL
HOUR_MS = 3_600_000


@pytest.mark.row("E8")
async def test_readers_come_in_again_and_what_was_handed_over_is_gone(
    database: str, artemis_server: Callable[..., Running]
) -> None:
    server = await asyncio.to_thread(artemis_server)
    async with (
        installed(database) as installation,
        open_broker(server.url, claim_s=60, farm="rooms", client="emptied") as broker,
        Writer(database, kind="chores") as writer,
    ):
        gate = broker.gate
        assert gate is not None
        native = await installation.subscribe(PULL, native_password=gate.hashed("secret"))
        upkeep = GatesOfNatives(writer, gate)
        await upkeep.run(lambda: True)
        (gone,) = await to_send(installation, native, kind=PULL)

        async def handed_over() -> bool:
            return not await installation.value("SELECT count(*) FROM outbox")

        async with relaying(database, broker):
            await until(handed_over, "the message to be handed over")
        await asyncio.to_thread(server.wipe)
        (waits,) = await to_send(installation, native, kind=PULL)
        await asyncio.to_thread(server.start)
        assert await gate.opened({}) == {}
        await upkeep.run(lambda: True)
        async with relaying(database, broker):
            await until(handed_over, "what waited to be handed over")

        def read() -> str:
            with reader(server.url, gate.user(native), "secret") as client:
                client.read(destination(installation.room, native))
                found = client.next().headers["rooms-delivery-id"]
                assert client.nothing_more()
                return str(found)

        assert await asyncio.to_thread(read) == waits.delivery_id
        assert {await installation.state(copy) for copy in (gone, waits)} == {State.HANDED_OVER}


async def left_at_the_broker(environment: Mapping[str, str], subscription: str) -> tuple[bool, bool]:
    """Whether the broker knows a user, and a queue, of the subscription."""
    url, client = environment["BROKER_URL"], environment["ROOMS_CLIENT"]
    async with open_broker(url, claim_s=60, farm="rooms", client=client) as broker:
        assert broker.gate is not None
        return subscription in await broker.gate.opened({}), subscription in await broker.queues()


@pytest.mark.row("E8")
@pytest.mark.parametrize("broker_url", ["relayed"], indirect=True, scope="module")
def test_a_deleted_one_takes_its_user_and_its_queue_along(crew: Crew, place: Place) -> None:
    """While somebody reads it: the connection ends, or the queue would be kept. What was not handed over is cancelled."""
    made: dict[str, Any] = crew.post(f"{place.at}/subscriptions", {"name": "native", "type": "PULL", "native": True})
    login, native = made["login"], made["id"]
    assert asyncio.run(left_at_the_broker(crew.broker, native)) == (True, True)
    read, later = [place.publish(17, delay_ms=delay_ms)["message_id"] for delay_ms in (0, HOUR_MS)]
    with reader(crew.broker["BROKER_URL"], login["user"], login["password"]) as client:
        client.read(made["destination"])
        assert client.next().headers["rooms-message-id"] == read
        answer = crew.call("DELETE", f"/subscriptions/{native}")
        assert answer.status_code == 202, answer.text
        job = answer.json()["job_id"]
        # It is old enough for nobody to be publishing to it still.
        crew.rows("UPDATE jobs SET created_at = now() - interval '1 minute' WHERE id = %s RETURNING 1", job)
        crew.start("upkeep")
        waiting.until(lambda: crew.get(f"/jobs/{job}")["state"] == "done", "the deletion")
        waiting.until(lambda: client.over, "its reader to be shown out")
    with pytest.raises(RefusedError), reader(crew.broker["BROKER_URL"], login["user"], login["password"]):
        pass
    assert asyncio.run(left_at_the_broker(crew.broker, native)) == (False, False)
    assert place.delivery(read, native)["state"] == "handed_over"
    gone = place.delivery(later, native)
    assert (gone["state"], gone["reason"]) == ("cancelled", "subscription_deleted")


@pytest.mark.parametrize("broker_url", ["relayed"], indirect=True, scope="module")
def test_what_its_reader_rejects_is_sidelined_and_read_again_after_a_shovel(crew: Crew, place: Place) -> None:
    """Through the processes as they run: relay, reader, a killed upkeep and another, shovel, relay, reader."""
    made: dict[str, Any] = crew.post(f"{place.at}/subscriptions", {"name": "reject", "type": "PULL", "native": True})
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
    assert (delivery["reason"], delivery["last_error"]) == ("nacked", "its reader rejected it at the broker")
    job = crew.post(f"/subscriptions/{native}/sideline/shovel", {})
    waiting.until(lambda: crew.get(f"/jobs/{job['job_id']}")["state"] == "done", "the shovel to be done")
    assert read(Delivery.ACCEPTED) == message
    place.await_state(message, native, "handed_over")
    assert place.steps(message, native)[-4:] == ["handed_over", "sidelined", "shoveled", "handed_over"]
