"""What workers say of crowded lanes: told in turns, kept for a moment."""

from dataclasses import replace

import pytest

from delivery.crowding import Crowding
from delivery.endpoint import Endpoint
from delivery.lane import Lane
from delivery.lanes import Lanes
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import SubscriptionStatus
from rooms.publishing.crowd import KEPT_S, Crowd
from tests.unit.test_endpoint import RECORD, SEAL


class Watch:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_heard_is_kept_for_a_moment_after_it_was_heard_last() -> None:
    watch = Watch()
    crowd = Crowd(watch)
    assert crowd.members() == frozenset()
    crowd.heard(["a", "b"])
    watch.now += KEPT_S / 2
    crowd.heard(["b", "c"])
    assert crowd.members() == {"a", "b", "c"}
    watch.now += KEPT_S / 2
    assert crowd.members() == {"b", "c"}
    watch.now += KEPT_S / 2
    assert crowd.members() == frozenset()


def test_hearing_nothing_says_nothing() -> None:
    crowd = Crowd(Watch())
    crowd.heard(["a"])
    crowd.heard([])
    assert crowd.members() == {"a"}


def test_the_members_are_the_same_object_until_they_change() -> None:
    crowd = Crowd(Watch())
    crowd.heard(["a"])
    before = crowd.members()
    crowd.heard(["a"])
    assert crowd.members() is before
    crowd.heard(["b"])
    assert crowd.members() is not before


def crowded(lanes: Lanes, number: int, status: SubscriptionStatus = SubscriptionStatus.ACTIVE) -> Lane:
    record = replace(RECORD, subscription_id=SubscriptionId(f"s{number}"), status=status)
    lane = lanes.enter(Endpoint(record, SEAL), 0.0)
    lane.turned_away = 100
    return lane


def test_each_crowded_lane_is_told_once_a_second_and_only_while_it_is_crowded() -> None:
    lanes = Lanes(slots=4, exclude=lambda _identities: None)
    told: list[str] = []
    crowding = Crowding(lanes, told.append)
    lane = crowded(lanes, 1)
    crowding.look(10.0)
    crowding.look(10.5)
    assert told == ["s1"]
    crowding.look(11.0)
    assert told == ["s1", "s1"]
    lane.turned_away = 0
    crowding.look(12.0)
    assert told == ["s1", "s1"]


@pytest.mark.parametrize("status", [SubscriptionStatus.PAUSED, SubscriptionStatus.DISABLED])
def test_what_is_held_for_another_reason_is_not_told(status: SubscriptionStatus) -> None:
    lanes = Lanes(slots=4, exclude=lambda _identities: None)
    told: list[str] = []
    crowded(lanes, 1, status)
    Crowding(lanes, told.append).look(10.0)
    assert told == []


def test_many_are_told_in_turns() -> None:
    lanes = Lanes(slots=4, exclude=lambda _identities: None)
    told: list[str] = []
    for number in range(250):
        crowded(lanes, number)
    crowding = Crowding(lanes, told.append)
    for now in (10.0, 10.25):
        crowding.look(now)
    assert len(told) == len(set(told)) == 200, "a wake-up does not carry more"
    crowding.look(10.5)
    assert len(set(told)) == 250
