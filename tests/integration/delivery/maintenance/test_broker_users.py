"""Test which native subscriptions have a user at the broker: their readers need no API key."""

from collections.abc import Mapping
from typing import Any

import pytest

from delivery.maintenance.cleanup import sync_broker_users
from delivery.maintenance.service import TaskIntervals
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from tests.support.installation import Installation


class Users:
    """The users of a broker, in memory."""

    def __init__(self) -> None:
        self.present: dict[SubscriptionId, str] = {}

    async def list_users(
        self, password_hashes: Mapping[SubscriptionId, str]
    ) -> Mapping[SubscriptionId, bool]:
        return {one: password_hashes.get(one) == hashed for one, hashed in self.present.items()}

    async def create(self, subscription: SubscriptionId, hashed: str) -> None:
        self.present[subscription] = hashed

    async def remove(self, subscription: SubscriptionId) -> None:
        self.present.pop(subscription, None)


READABLE = {"active", "paused"}


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
