"""Test which open queue of an external broker makes room for another."""

from dataclasses import dataclass
from typing import cast

import pytest

from delivery.pull.broker_consumer import BrokerConsumer
from delivery.pull.open_queues import OpenQueues
from delivery.pull.target import PullTarget
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId


@dataclass(eq=False)
class FakeConsumer:
    key: PullTarget
    is_idle: bool = True


def add(
    queues: OpenQueues, organisation: str, name: str, *, is_idle: bool = True
) -> BrokerConsumer:
    key = PullTarget(RoomId(1), SubscriptionId(name), OrganisationId(organisation))
    consumer = cast("BrokerConsumer", FakeConsumer(key, is_idle))
    queues.add(consumer)
    return consumer


@pytest.fixture
def queues() -> OpenQueues:
    return OpenQueues(6)


ONE, OTHER = OrganisationId("one"), OrganisationId("other")


def test_an_organisation_has_half_and_gives_up_its_own(queues: OpenQueues) -> None:
    _, second, third = (add(queues, ONE, name, is_idle=name != "a") for name in "abc")
    assert queues.is_full(ONE)
    assert not queues.is_full(OTHER)
    assert queues.find_idle(ONE) is second
    queues.on_copies(second.key)
    assert queues.find_idle(ONE) is third


def test_a_queue_that_is_not_idle_is_not_given_up(queues: OpenQueues) -> None:
    for name in "abc":
        add(queues, ONE, name, is_idle=False)
    assert queues.find_idle(ONE) is None


def test_beyond_all_the_organisation_with_the_most_gives_one_up(queues: OpenQueues) -> None:
    most = [add(queues, ONE, name) for name in "abc"]
    for number in range(3):
        add(queues, f"small {number}", "q")
    assert queues.is_full(OTHER)
    assert queues.find_idle(OTHER) is most[0]


def test_a_consumer_that_was_replaced_does_not_remove_its_successor(queues: OpenQueues) -> None:
    former = add(queues, ONE, "a")
    assert queues.remove(former)
    current = add(queues, ONE, "a")
    assert not queues.remove(former)
    assert queues.get(current.key) is current
    assert list(queues) == [current.key]
