"""Test that a broker user reads one queue and nothing else, with clients that know only the broker."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from delivery.brokers import open_broker
from delivery.brokers.artemis.broker import ArtemisBroker
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.room import destination_name
from rooms.ports import Broker, BrokerUsers
from tests.support.installation import until as comes_true
from tests.support.native_client import Reader, RefusedError, reader
from tests.support.polling import until
from tests.support.publisher import make_id
from tests.support.sentinel import put_sentinel

ROOM = RoomId(7)


@dataclass
class House:
    url: str
    broker: Broker
    gate: BrokerUsers
    stack: AsyncExitStack

    async def enter(self, subscription: SubscriptionId, password: str) -> Reader:
        """Connect a client as that subscription's user."""
        context = reader(self.url, self.gate.user_name(subscription), password)
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
        assert broker.users is not None
        yield House(artemis_url, broker, broker.users, stack)


def subscription() -> SubscriptionId:
    return SubscriptionId(make_id(ROOM))


def of(identity: SubscriptionId) -> str:
    return destination_name(ROOM, identity)


def replies(broker: Broker) -> str:
    """Return the address at which the management answers this adapter."""
    assert isinstance(broker, ArtemisBroker)
    return broker._management._reply_to


@pytest.mark.parametrize(
    "what",
    [
        "another subscription",
        "push",
        "the sentinel",
        "prepared sentinels",
        "answers",
        "dead letters",
    ],
)
async def test_a_user_reads_nothing_but_its_queue(house: House, what: str) -> None:
    own, other = subscription(), subscription()
    await house.broker.create_queues([other])
    await house.gate.create(own, house.gate.hash_password("secret"))
    await put_sentinel(house.broker)
    prefix = house.gate.user_name(own).split("-subscription-")[0]
    place, routing = {
        "another subscription": (of(other), "MULTICAST"),
        "push": (f"push-{prefix}::push-{prefix}", "ANYCAST"),
        "the sentinel": (f"sentinel-{prefix}::sentinel-{prefix}", "ANYCAST"),
        "prepared sentinels": (
            f"prepared-sentinels-{prefix}::prepared-sentinels-{prefix}",
            "ANYCAST",
        ),
        "answers": (replies(house.broker), "ANYCAST"),
        "dead letters": (f"rooms-dead-letters::dead-letters-{prefix}", "MULTICAST"),
    }[what]
    client = await house.enter(own, "secret")
    await asyncio.to_thread(client.read, place, routing)
    said = await asyncio.to_thread(client.refused)
    assert "AMQ339016 Error creating subscription" in said or "does not have permission" in said
    assert client.came.empty()


@pytest.mark.parametrize(
    "where", ["its queue", "its address", "management", "push", "dead letters"]
)
async def test_a_user_sends_nowhere(house: House, where: str) -> None:
    own = subscription()
    await house.gate.create(own, house.gate.hash_password("secret"))
    prefix = house.gate.user_name(own).split("-subscription-")[0]
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


async def test_a_rejected_login_succeeds_as_soon_as_the_user_exists(house: House) -> None:
    """Clear the cache in which the broker keeps refusals for a while."""
    own = subscription()
    with pytest.raises(RefusedError):
        await house.enter(own, "secret")
    hashed = house.gate.hash_password("secret")
    await house.gate.create(own, hashed)
    client = await house.enter(own, "secret")
    await house.gate.create(own, hashed)
    await asyncio.to_thread(client.read, of(own))
    assert not client.over, "nothing changed, so no connection ends"


async def test_a_new_password_ends_connections_of_the_old_one(house: House) -> None:
    own = subscription()
    await house.gate.create(own, house.gate.hash_password("secret"))
    client = await house.enter(own, "secret")
    await house.gate.create(own, house.gate.hash_password("other"))
    await asyncio.to_thread(until, lambda: client.over, "the old connection to end")
    with pytest.raises(RefusedError):
        await house.enter(own, "secret")
    await house.enter(own, "other")


async def test_removing_a_user_ends_its_connections(house: House) -> None:
    own, other = subscription(), subscription()
    for identity in (own, other):
        await house.gate.create(identity, house.gate.hash_password("secret"))
    client = await house.enter(own, "secret")
    await asyncio.to_thread(client.read, of(own))
    await house.gate.remove(own)
    await asyncio.to_thread(until, lambda: client.over, "the connection to end")
    with pytest.raises(RefusedError):
        await house.enter(own, "secret")
    await comes_true(lambda: house.broker.delete_queue(own), "the queue to have no consumer")
    await house.gate.remove(own)
    await house.enter(other, "secret")


async def test_users_are_listed_with_their_state(house: House) -> None:
    own, other, third = subscription(), subscription(), subscription()
    hashed = {identity: house.gate.hash_password("secret") for identity in (own, other, third)}
    await house.gate.create(own, hashed[own])
    await house.gate.create(other, house.gate.hash_password("older"))
    await house.gate.create(third, hashed[third])
    assert await house.broker.delete_queue(third)
    assert await house.gate.list_users(hashed) == {own: True, other: False, third: False}
    assert await house.gate.list_users({}) == {own: False, other: False, third: False}
    assert await house.gate.has_user(own)
    for identity in hashed:
        await house.gate.remove(identity)
    assert await house.gate.list_users(hashed) == {}
    assert not await house.gate.has_user(own)


async def test_two_installations_do_not_see_each_others_users(
    house: House, artemis_url: str
) -> None:
    own = subscription()
    await house.gate.create(own, house.gate.hash_password("secret"))
    async with open_broker(
        artemis_url, claim_s=60, farm="rooms", client=f"gate-{secrets.token_hex(6)}"
    ) as broker:
        assert broker.users is not None
        assert await broker.users.list_users({}) == {}
        assert broker.users.user_name(own) != house.gate.user_name(own)


async def test_a_hash_does_not_reveal_the_password(house: House) -> None:
    hashed = [house.gate.hash_password("secret") for _ in range(2)]
    assert hashed[0] != hashed[1]
    assert "secret" not in hashed[0]
