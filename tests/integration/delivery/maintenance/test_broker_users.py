"""Test which native subscriptions have a user at the broker: their readers need no API key."""

from collections.abc import Mapping
from typing import Any

import pytest

from delivery.maintenance.broker_users import (
    FULL_EVERY_S,
    UNSETTLED_S,
    BrokerUserSync,
    sync_broker_users,
)
from delivery.maintenance.service import TaskIntervals
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import BrokerUnavailableError
from tests.support.installation import Installation
from tests.support.manual_clock import ManualClock


class Users:
    """The users of a broker, in memory."""

    def __init__(self) -> None:
        self.present: dict[SubscriptionId, str] = {}
        self.lists = 0
        self.away = False

    async def list_users(
        self, password_hashes: Mapping[SubscriptionId, str]
    ) -> Mapping[SubscriptionId, bool]:
        self.lists += 1
        return {one: password_hashes.get(one) == hashed for one, hashed in self.present.items()}

    async def has_user(self, subscription: SubscriptionId) -> bool:
        if self.away:
            raise BrokerUnavailableError("it is away")
        return subscription in self.present

    async def create(self, subscription: SubscriptionId, hashed: str) -> None:
        self.present[subscription] = hashed

    async def remove(self, subscription: SubscriptionId) -> None:
        self.present.pop(subscription, None)


class Syncing:
    """The task of one term, with a clock that moves between its runs only."""

    def __init__(self, writer: LogWriter) -> None:
        self.users = Users()
        self.clock = ManualClock()
        users: Any = self.users
        self.task = BrokerUserSync(writer, users, self.clock)

    async def run(self, *, after_s: float = 2.0) -> None:
        self.clock.now_s += after_s
        await self.task.run(lambda: True)

    async def settle(self) -> int:
        """Run until nothing is unsettled; return how often all users were listed so far."""
        for _ in range(2):
            await self.run(after_s=0)
        await self.run(after_s=UNSETTLED_S)
        before = self.users.lists
        await self.run()
        assert self.users.lists == before, "nothing has changed"
        return before


@pytest.fixture
def syncing(writer: LogWriter) -> Syncing:
    return Syncing(writer)


READABLE = {"active", "paused"}


@pytest.mark.parametrize(
    "status", ["active", "paused", "suspended", "terminated", "pending", "deleted"]
)
async def test_a_reader_is_cut_off_by_the_next_run_without_a_notification(
    installation: Installation, syncing: Syncing, status: str
) -> None:
    subscription = await installation.subscribe(SubscriptionType.PULL, native_password="hash")
    await syncing.settle()
    assert set(syncing.users.present) == {subscription}
    await installation.change(subscription, status=status)
    await syncing.run()
    assert set(syncing.users.present) == ({subscription} if status in READABLE else set())
    await installation.change(subscription, status="active")
    await syncing.run()
    assert set(syncing.users.present) == {subscription}


async def test_all_users_are_listed_only_where_something_may_differ(
    installation: Installation, syncing: Syncing
) -> None:
    subscriptions = [
        await installation.subscribe(SubscriptionType.PULL, native_password="hash")
        for _ in range(3)
    ]
    other = await installation.subscribe()
    listed = await syncing.settle()
    await installation.change(other, status="suspended")
    for _ in range(5):
        await syncing.run()
    assert syncing.users.lists == listed
    await installation.change(subscriptions[1], native_password="another")
    await syncing.run()
    assert (syncing.users.lists, syncing.users.present[subscriptions[1]]) == (listed + 1, "another")
    listed = await syncing.settle()
    await syncing.run(after_s=FULL_EVERY_S)
    assert syncing.users.lists == listed + 1, "in case that anything else has changed them"


async def test_a_user_that_the_api_created_late_is_removed(
    installation: Installation, syncing: Syncing
) -> None:
    """A subscription is created and deleted between two runs, and then its user is created."""
    await syncing.settle()
    gone = await installation.subscribe(
        SubscriptionType.PULL, native_password="hash", status="deleted"
    )
    await syncing.run()
    await syncing.users.create(gone, "hash")
    await syncing.run()
    assert syncing.users.present == {}


async def test_the_users_of_a_room_that_is_deleted_are_removed(
    installation: Installation, syncing: Syncing
) -> None:
    await installation.subscribe(SubscriptionType.PULL, native_password="hash")
    await syncing.settle()
    await installation.rows("UPDATE rooms SET deleting = true RETURNING 1")
    await syncing.run()
    assert syncing.users.present == {}


async def test_an_emptied_broker_has_its_users_again_after_the_next_run(
    installation: Installation, syncing: Syncing
) -> None:
    made = [
        await installation.subscribe(SubscriptionType.PULL, native_password="hash")
        for _ in range(3)
    ]
    await syncing.settle()
    syncing.users.present.clear()
    await syncing.run()
    assert set(syncing.users.present) == set(made)
    # One after another is asked for, so that the loss of one is found too.
    await syncing.settle()
    await syncing.users.remove(made[0])
    for _ in made:
        await syncing.run()
    assert set(syncing.users.present) == set(made)


async def test_all_users_are_compared_after_an_outage_of_the_broker(
    installation: Installation, syncing: Syncing
) -> None:
    await installation.subscribe(SubscriptionType.PULL, native_password="hash")
    listed = await syncing.settle()
    syncing.users.away = True
    with pytest.raises(BrokerUnavailableError):
        await syncing.run()
    syncing.users.away = False
    await syncing.run()
    assert syncing.users.lists == listed + 1


@pytest.mark.parametrize(
    "status", ["active", "paused", "suspended", "terminated", "pending", "deleted"]
)
async def test_a_reader_is_cut_off_when_its_subscription_stops(
    installation: Installation, writer: LogWriter, status: str
) -> None:
    subscription = await installation.subscribe(SubscriptionType.PULL, native_password="hash")
    users: Any = Users()
    await sync_broker_users(writer, users, lambda: True)
    assert set(users.present) == {subscription}
    await installation.change(subscription, status=status)
    await sync_broker_users(writer, users, lambda: True)
    assert set(users.present) == ({subscription} if status in READABLE else set())
    await installation.change(subscription, status="active")
    await sync_broker_users(writer, users, lambda: True)
    assert set(users.present) == {subscription}


def test_readers_are_cut_off_within_five_seconds() -> None:
    assert TaskIntervals().broker_users_s <= 2.0
