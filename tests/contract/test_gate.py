"""The contract of `rooms.ports.Gate`: a broker's user may read one queue and nothing else, told by clients that know nothing of Rooms."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from rooms.brokers import open_broker
from rooms.brokers.stomp import StompBroker
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.names import destination
from rooms.ports import Broker, Gate
from tests.installation import until as comes_true
from tests.natively import Reader, RefusedError, reader
from tests.publishing import make_id
from tests.waiting import until

ROOM = RoomId(7)


@dataclass
class House:
    url: str
    broker: Broker
    gate: Gate
    stack: AsyncExitStack

    async def enter(self, subscription: SubscriptionId, password: str) -> Reader:
        """A client as that subscription's user."""
        context = reader(self.url, self.gate.user(subscription), password)
        found = await asyncio.to_thread(context.__enter__)
        self.stack.push(context)
        return found


@pytest.fixture
async def house(artemis_url: str) -> AsyncIterator[House]:
    client = f"gate-{secrets.token_hex(6)}"
    async with (
        open_broker(artemis_url, claim_s=60, farm="rooms", client=client) as broker,
        AsyncExitStack() as stack,
    ):
        assert broker.gate is not None
        yield House(artemis_url, broker, broker.gate, stack)


def subscription() -> SubscriptionId:
    return SubscriptionId(make_id(ROOM))


def of(identity: SubscriptionId) -> str:
    return destination(ROOM, identity)


def replies(broker: Broker) -> str:
    """Where the management answers this adapter."""
    assert isinstance(broker, StompBroker)
    return broker._management._reply_to


@pytest.mark.row("E8")
@pytest.mark.parametrize("what", ["another subscription", "push", "the mark", "answers", "dead letters"])
async def test_a_user_reads_nothing_but_its_queue(house: House, what: str) -> None:
    own, other = subscription(), subscription()
    await house.broker.ensure([other])
    await house.gate.open(own, house.gate.hashed("secret"))
    await house.broker.mark()
    prefix = house.gate.user(own).split("-subscription-")[0]
    place, routing = {
        "another subscription": (of(other), "MULTICAST"),
        "push": (f"push-{prefix}::push-{prefix}", "ANYCAST"),
        "the mark": (f"rooms-marker-{prefix}::rooms-marker-{prefix}", "ANYCAST"),
        "answers": (replies(house.broker), "ANYCAST"),
        "dead letters": (f"rooms-dead-letters::dead-letters-{prefix}", "MULTICAST"),
    }[what]
    client = await house.enter(own, "secret")
    await asyncio.to_thread(client.read, place, routing)
    said = await asyncio.to_thread(client.refused)
    assert "AMQ339016 Error creating subscription" in said or "does not have permission" in said
    assert client.came.empty()


@pytest.mark.row("E8")
@pytest.mark.parametrize("where", ["its queue", "its address", "management", "push", "dead letters"])
async def test_a_user_sends_nowhere(house: House, where: str) -> None:
    own = subscription()
    await house.gate.open(own, house.gate.hashed("secret"))
    prefix = house.gate.user(own).split("-subscription-")[0]
    place, routing = {
        "its queue": (of(own), "MULTICAST"),
        "its address": (f"room-{ROOM}", "MULTICAST"),
        "management": ("activemq.management", "ANYCAST"),
        "push": (f"push-{prefix}::push-{prefix}", "ANYCAST"),
        "dead letters": ("rooms-dead-letters", "MULTICAST"),
    }[where]
    client = await house.enter(own, "secret")
    await asyncio.to_thread(client.send, place, routing)
    assert "AMQ339011 Error sending message" in await asyncio.to_thread(client.refused)
    assert await house.broker.depth(own) == 0


async def test_whoever_came_too_early_comes_in_as_soon_as_the_user_is_there(house: House) -> None:
    """The broker remembers refusals for a while; it has to be told."""
    own = subscription()
    with pytest.raises(RefusedError):
        await house.enter(own, "secret")
    hashed = house.gate.hashed("secret")
    await house.gate.open(own, hashed)
    client = await house.enter(own, "secret")
    await house.gate.open(own, hashed)
    await asyncio.to_thread(client.read, of(own))
    assert not client.over, "nothing changed, so nobody is sent away"


async def test_another_password_ends_what_the_one_before_began(house: House) -> None:
    own = subscription()
    await house.gate.open(own, house.gate.hashed("secret"))
    client = await house.enter(own, "secret")
    await house.gate.open(own, house.gate.hashed("other"))
    await asyncio.to_thread(until, lambda: client.over, "the old connection to end")
    with pytest.raises(RefusedError):
        await house.enter(own, "secret")
    await house.enter(own, "other")


async def test_a_closed_gate_leaves_nobody_at_the_queue(house: House) -> None:
    own, other = subscription(), subscription()
    for identity in (own, other):
        await house.gate.open(identity, house.gate.hashed("secret"))
    client = await house.enter(own, "secret")
    await asyncio.to_thread(client.read, of(own))
    await house.gate.close(own)
    await asyncio.to_thread(until, lambda: client.over, "the connection to end")
    with pytest.raises(RefusedError):
        await house.enter(own, "secret")
    await comes_true(lambda: house.broker.delete(own), "the queue to have no consumer")
    await house.gate.close(own)
    await house.enter(other, "secret")


async def test_what_is_open_is_told(house: House) -> None:
    own, other, third = subscription(), subscription(), subscription()
    hashed = {identity: house.gate.hashed("secret") for identity in (own, other, third)}
    await house.gate.open(own, hashed[own])
    await house.gate.open(other, house.gate.hashed("older"))
    await house.gate.open(third, hashed[third])
    assert await house.broker.delete(third)
    assert await house.gate.opened(hashed) == {own: True, other: False, third: False}
    assert await house.gate.opened({}) == {own: False, other: False, third: False}
    for identity in hashed:
        await house.gate.close(identity)
    assert await house.gate.opened(hashed) == {}


async def test_two_installations_do_not_see_each_others_users(house: House, artemis_url: str) -> None:
    own = subscription()
    await house.gate.open(own, house.gate.hashed("secret"))
    async with open_broker(artemis_url, claim_s=60, farm="rooms", client=f"gate-{secrets.token_hex(6)}") as broker:
        assert broker.gate is not None
        assert await broker.gate.opened({}) == {}
        assert broker.gate.user(own) != house.gate.user(own)


async def test_a_hash_tells_nothing(house: House) -> None:
    hashed = [house.gate.hashed("secret") for _ in range(2)]
    assert hashed[0] != hashed[1]
    assert "secret" not in hashed[0]
