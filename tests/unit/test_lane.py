"""Lanes: when copies wait here, when they stay in the queue, and when they are held."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.endpoint import Endpoint
from delivery.lane import IDLE_AFTER_S, MARGIN_S, SATURATED_AFTER_S, SURPLUS_AFTER_S, Lane
from delivery.queue import CREDIT
from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId
from tests.unit.test_endpoint import COPY, RECORD, SEAL

LEAST = 16
MOST = 512


def lane(slots: int = 4) -> Lane:
    return Lane(Endpoint(RECORD, SEAL), slots=slots, now=0.0)


def copies(count: int, deadline: float = 1000.0) -> list[Copy]:
    return [replace(COPY, delivery_id=DeliveryId(str(number)), deadline=deadline) for number in range(count)]


def test_copies_are_taken_in_their_order() -> None:
    found, given_ = lane(), copies(5)
    found.offer(given_[:2], 0.0)
    found.offer(given_[2:], 0.0)
    assert [found.take() for _ in range(6)] == [*given_, None]


@pytest.mark.parametrize(("waiting", "busy", "startable"), [(0, 0, 0), (2, 0, 2), (9, 0, 4), (9, 3, 1), (9, 4, 0)])
def test_no_more_slots_start_than_there_are_copies_or_slots(waiting: int, busy: int, startable: int) -> None:
    found = lane(slots=4)
    found.offer(copies(waiting), 0.0)
    found.busy = busy
    assert found.startable() == startable


def test_once_full_it_stays_so_until_half_is_gone() -> None:
    found = lane()
    found.offer(copies(LEAST), 0.0)
    assert not found.full()
    found.offer(copies(1), 0.0)
    assert found.full()
    while len(found.waiting) > LEAST // 2:
        assert found.full()
        found.take()
    assert not found.full()
    found.offer(copies(LEAST // 2), 0.0)
    assert not found.full()


def run_dry(found: Lane) -> None:
    while found.take() is not None:
        pass


def test_a_lane_that_runs_dry_while_it_was_kept_short_may_hold_more() -> None:
    found, capacity = lane(), LEAST
    while capacity < MOST:
        found.offer(copies(capacity + 1), 0.0)
        assert found.full()
        run_dry(found)
        assert not found.full()
        capacity *= 2
        found.offer(copies(capacity), 0.0)
        assert not found.full()
        run_dry(found)
    found.offer(copies(MOST + 1), 0.0)
    assert found.full()
    run_dry(found)
    found.offer(copies(MOST + 1), 0.0)
    assert found.full(), "there is an end to it"


def test_running_dry_without_having_been_kept_short_changes_nothing() -> None:
    found = lane()
    for _ in range(5):
        found.offer(copies(3), 0.0)
        run_dry(found)
    found.offer(copies(LEAST + 1), 0.0)
    assert found.full()


def test_saturated_is_a_lane_that_freed_no_slot_for_a_second() -> None:
    found = lane(slots=2)
    found.offer(copies(5), 10.0)
    found.busy = 2
    assert not found.saturated(10.0 + SATURATED_AFTER_S - 0.01)
    assert found.saturated(10.0 + SATURATED_AFTER_S)
    found.freed(11.5, started=11.0)
    assert not found.saturated(12.0)
    assert found.saturated(12.5)


def test_a_lane_with_a_free_slot_is_not_saturated() -> None:
    found = lane(slots=2)
    found.busy = 1
    assert not found.saturated(1e9)


def test_a_lane_that_rested_is_not_saturated_by_its_first_copies() -> None:
    found = lane(slots=1)
    found.offer(copies(2), 500.0)
    found.busy = 1
    assert not found.saturated(500.5)


def test_a_lane_is_crowded_from_what_was_turned_away_until_it_runs_dry() -> None:
    found, seen = lane(slots=2), []
    for refused in (7, 1):
        found.turned_away += refused
        seen.append(found.crowded)
    found.offer(copies(2), 0.0)
    found.take()
    seen.append(found.crowded)
    run_dry(found)
    seen.append(found.crowded)
    assert seen == [False, True, True, False]


def test_what_hangs_stays_crowded_though_it_runs_dry_when_its_calls_end() -> None:
    found = lane(slots=2)
    found.turned_away = 8
    found.freed(10.0, started=10.0 - SATURATED_AFTER_S)
    assert found.take() is None
    assert found.crowded
    found.freed(20.0, started=19.9)
    assert found.take() is None
    assert not found.crowded


def test_a_lane_of_which_nothing_is_held_any_more_is_not_crowded() -> None:
    found = lane()
    found.turned_away = 8
    found.nothing_held()
    assert not found.crowded


def test_a_lane_that_turned_copies_away_has_room_for_what_can_be_begun_alone() -> None:
    """What waits behind calls that hang would only be held again."""
    found = lane(slots=4)
    found.turned_away = 1
    assert found.room(0.0) == 4
    found.busy = 3
    assert found.room(0.0) == 1
    found.expect(1, 0.0)
    assert found.room(0.0) == 0, "one is on its way"
    found.offer(copies(1), 0.0)
    assert found.room(0.0) == 0
    found.take()
    found.freed(0.1, started=0.0)
    run_dry(found)
    found.busy = 0
    assert found.room(0.0) == 4 + LEAST


def test_draining_takes_everything_and_lets_it_start_small_again() -> None:
    found = lane()
    found.offer(copies(LEAST + 1), 0.0)
    assert found.full()
    run_dry(found)
    given_ = copies(40)
    found.offer(given_, 0.0)
    assert found.drain() == given_
    assert found.drain() == []
    assert not found.full()
    found.offer(copies(LEAST + 1), 0.0)
    assert found.full()


def test_room_is_what_can_be_kept() -> None:
    found = lane(slots=4)
    assert found.room(0.0) == 4 + LEAST
    found.offer(copies(10), 0.0)
    assert found.room(0.0) == 4 + LEAST - 10
    found.busy = 4
    assert found.room(0.0) == LEAST - 10
    found.offer(copies(50), 0.0)
    assert found.room(0.0) == 0


@given(left=st.floats(0, 100))
def test_a_copy_is_too_late_when_its_claim_may_end_before_its_attempt(left: float) -> None:
    found = lane()
    (copy,) = copies(1, deadline=100.0)
    needed = found.endpoint.timeout_s + MARGIN_S
    assert found.too_late(copy, 100.0 - left) == (100.0 - (100.0 - left) < needed)


def test_what_outlives_its_claim_is_taken_out_oldest_first() -> None:
    found = lane()
    old, young = copies(3, deadline=50.0), copies(2, deadline=90.0)
    found.offer([*old, *young], 0.0)
    assert found.outlived(0.0) == []
    assert found.outlived(47.0) == old
    assert found.outlived(47.0) == []
    assert list(found.waiting) == young


def test_idle_is_a_lane_that_rested_for_a_minute() -> None:
    found = lane()
    assert not found.idle(IDLE_AFTER_S - 1)
    assert found.idle(IDLE_AFTER_S)
    found.busy = 1
    assert not found.idle(1e9)
    found.busy = 0
    found.offer(copies(1), 1e6)
    assert not found.idle(1e9)
    found.take()
    assert not found.idle(1e6 + 1)
    assert found.idle(1e9)


@given(st.lists(st.sampled_from(["offer", "take", "full", "drain"]), max_size=200))
def test_nothing_gets_lost_in_a_lane(steps: list[str]) -> None:
    found, offered, seen = lane(), 0, 0
    for step in steps:
        if step == "offer":
            found.offer(copies(7), 0.0)
            offered += 7
        elif step == "take":
            seen += found.take() is not None
        elif step == "drain":
            seen += len(found.drain())
        else:
            found.full()
        assert len(found.waiting) == offered - seen
        if not found.waiting:
            assert not found.full(), "a lane with nothing in it is never passed over"


def busy_for(found: Lane, since: float, seconds: float, rate: float) -> float:
    """A lane with all its slots at work that finishes `rate` attempts a second, taking from what waits."""
    found.busy = found.slots
    now = since
    for number in range(1, round(seconds * rate) + 1):
        now = since + number / rate
        found.take()
        found.freed(now, started=now)
    return now


def test_in_its_first_second_of_work_a_lane_keeps_all() -> None:
    found = lane()
    found.offer(copies(5000), 0.0)
    found.busy = found.slots
    assert found.surplus(0.99) == []
    assert len(found.waiting) == 5000


def test_what_came_last_and_takes_longer_than_ten_seconds_is_surplus() -> None:
    found, given_ = lane(), copies(5000)
    found.offer(given_, 0.0)
    now = busy_for(found, 0.0, 2.0, 50.0)
    surplus = found.surplus(now)
    assert len(found.waiting) == 50 * SURPLUS_AFTER_S
    assert found.take() is given_[100]
    assert surplus[0] is given_[-1]


def test_a_lane_that_achieves_nothing_keeps_a_few() -> None:
    found = lane()
    found.offer(copies(100), 0.0)
    found.busy = found.slots
    assert len(found.surplus(1.5)) == 100 - LEAST


def test_a_lane_of_two_thousand_a_second_keeps_all_that_a_worker_has() -> None:
    found = lane(slots=32)
    found.offer(copies(CREDIT + 2400), 0.0)
    now = busy_for(found, 0.0, 1.2, 2000.0)
    assert len(found.waiting) >= CREDIT
    assert found.surplus(now) == []


def test_what_a_lane_achieves_is_measured_anew_all_the_time() -> None:
    found = lane()
    found.offer(copies(20_000), 0.0)
    now = busy_for(found, 0.0, 6.0, 1000.0)
    assert found.surplus(now) != []
    for _ in range(6):
        now = busy_for(found, now, 4.5, 10.0)
        found.surplus(now)
    assert len(found.waiting) < 400


def test_after_a_rest_a_lane_keeps_all_again() -> None:
    found = lane()
    found.offer(copies(10), 0.0)
    busy_for(found, 0.0, 3.0, 3.0)
    run_dry(found)
    found.busy = 0
    found.offer(copies(3000), 60.0)
    found.busy = found.slots
    assert found.surplus(60.9) == []
    assert found.surplus(61.1) != []


def test_what_was_brought_back_is_waited_for_before_more_is() -> None:
    found = lane()
    room = found.room_for_surplus(0.0)
    assert room == found.slots + LEAST
    found.expect_kept(room, 0.0)
    assert found.room_for_surplus(0.5) == 0
    found.offer(copies(7), 0.6)
    assert found.room_for_surplus(0.7) == 0
    run_dry(found)
    assert found.room_for_surplus(0.8) >= 7
    # What does not come was another worker's.
    assert found.room_for_surplus(3.0) == found.slots + 2 * LEAST
