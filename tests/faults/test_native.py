"""A broker that was emptied, and its native subscriptions. The oracle: their readers come in again with what they know, what
was not handed over yet comes to them, and what was is gone with the broker, as `handed_over` says.
"""

import asyncio
from collections.abc import Callable

import pytest

from rooms.brokers import open_broker
from rooms.domain.names import destination
from rooms.domain.states import State, SubscriptionType
from rooms.embedded import Running
from rooms.storage.writer import Writer
from rooms.upkeep.gates import GatesOfNatives
from tests.installation import installed, until
from tests.natively import reader
from tests.relaying import relaying, to_send

PULL = SubscriptionType.PULL


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
