"""Test lanes: when tasks wait here, when they stay in the queue, and when they are held."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.push.endpoints import Endpoint
from delivery.push.lane import (
    CLAIM_MARGIN_S,
    IDLE_AFTER_S,
    OVERFLOW_AFTER_S,
    SATURATED_AFTER_S,
    Lane,
)
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId
from rooms.domain.state_machine import Reason, SubscriptionStatus
from rooms.ports import PUSH_CREDIT
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL, TASK

LEAST = 16
MOST = 512


def lane(slots: int = 4) -> Lane:
    return Lane(Endpoint(RECORD, SEAL), slots=slots, now=0.0)


def tasks(count: int, deadline: float = 1000.0) -> list[DeliveryTask]:
    return [
        replace(TASK, delivery_id=DeliveryId(str(number)), deadline=deadline)
        for number in range(count)
    ]


@pytest.mark.parametrize("status", sorted({*SubscriptionStatus} - {SubscriptionStatus.ACTIVE}))
def test_only_an_active_subscription_is_called(status: SubscriptionStatus) -> None:
    """A process of an earlier version may queue what is not approved."""
    assert lane().closed_reason(0.0) is None
    record = replace(RECORD, status=status)
    assert Lane(Endpoint(record, SEAL), slots=4, now=0.0).closed_reason(0.0) is not None


def test_a_lane_returns_to_no_older_settings() -> None:
    """They may have been read before a change, and come after it."""
    found, paused = lane(), replace(RECORD, version=9, status=SubscriptionStatus.PAUSED)
    found.update(Endpoint(paused, SEAL), 10.0)
    found.update(Endpoint(RECORD, SEAL), 69.0)
    assert found.closed_reason(69.0) is Reason.PAUSED
    resumed = replace(RECORD, version=9)  # as of the same version, from the room's settings
    found.update(Endpoint(resumed, SEAL), 69.0)
    assert found.closed_reason(69.0) is None


def test_a_lane_takes_the_settings_of_a_restored_database_after_a_minute() -> None:
    found = lane()
    found.update(Endpoint(replace(RECORD, version=9, status=SubscriptionStatus.PAUSED), SEAL), 10.0)
    found.update(Endpoint(RECORD, SEAL), 70.0)
    assert found.closed_reason(70.0) is None


def test_tasks_are_taken_in_order() -> None:
    found, given_ = lane(), tasks(5)
    found.enqueue(given_[:2], 0.0)
    found.enqueue(given_[2:], 0.0)
    assert [found.dequeue() for _ in range(6)] == [*given_, None]


@pytest.mark.parametrize(
    ("waiting", "busy", "startable"), [(0, 0, 0), (2, 0, 2), (9, 0, 4), (9, 3, 1), (9, 4, 0)]
)
def test_no_more_slots_start_than_there_are_tasks_or_slots(
    waiting: int, busy: int, startable: int
) -> None:
    found = lane(slots=4)
    found.enqueue(tasks(waiting), 0.0)
    found.busy = busy
    assert found.free_slots() == startable


def test_a_full_lane_stays_full_until_half_is_left() -> None:
    found = lane()
    found.enqueue(tasks(LEAST), 0.0)
    assert not found.is_full()
    found.enqueue(tasks(1), 0.0)
    assert found.is_full()
    while len(found.waiting) > LEAST // 2:
        assert found.is_full()
        found.dequeue()
    assert not found.is_full()
    found.enqueue(tasks(LEAST // 2), 0.0)
    assert not found.is_full()


def run_dry(found: Lane) -> None:
    while found.dequeue() is not None:
        pass


def test_a_lane_that_runs_empty_while_tasks_were_kept_back_grows() -> None:
    found, capacity = lane(), LEAST
    while capacity < MOST:
        found.enqueue(tasks(capacity + 1), 0.0)
        assert found.is_full()
        run_dry(found)
        assert not found.is_full()
        capacity *= 2
        found.enqueue(tasks(capacity), 0.0)
        assert not found.is_full()
        run_dry(found)
    found.enqueue(tasks(MOST + 1), 0.0)
    assert found.is_full()
    run_dry(found)
    found.enqueue(tasks(MOST + 1), 0.0)
    assert found.is_full(), "there is an end to it"


def test_running_empty_without_tasks_kept_back_changes_nothing() -> None:
    found = lane()
    for _ in range(5):
        found.enqueue(tasks(3), 0.0)
        run_dry(found)
    found.enqueue(tasks(LEAST + 1), 0.0)
    assert found.is_full()


def test_a_lane_that_freed_no_slot_for_a_second_is_saturated() -> None:
    found = lane(slots=2)
    found.enqueue(tasks(5), 10.0)
    found.busy = 2
    assert not found.is_saturated(10.0 + SATURATED_AFTER_S - 0.01)
    assert found.is_saturated(10.0 + SATURATED_AFTER_S)
    found.on_attempt_done(11.5, started=11.0)
    assert not found.is_saturated(12.0)
    assert found.is_saturated(12.5)


def test_a_lane_flows_while_short_attempts_end() -> None:
    found = lane(slots=2)
    found.enqueue(tasks(10), 10.0)
    assert not found.is_flowing(10.0), "it is not known yet"
    found.on_attempt_done(10.1, started=10.0)
    assert found.is_flowing(11.0)
    assert not found.is_flowing(11.2)
    found.on_attempt_done(12.0, started=10.5)
    assert not found.is_flowing(12.0), "a long one"
    found.on_attempt_done(12.0, started=11.5)
    assert found.is_flowing(12.0)


def test_a_lane_with_a_free_slot_is_not_saturated() -> None:
    found = lane(slots=2)
    found.busy = 1
    assert not found.is_saturated(1e9)


def test_an_idle_lane_is_not_saturated_by_its_first_tasks() -> None:
    found = lane(slots=1)
    found.enqueue(tasks(2), 500.0)
    found.busy = 1
    assert not found.is_saturated(500.5)


def test_a_lane_is_persistently_saturated_until_it_runs_empty() -> None:
    found, seen = lane(slots=2), []
    for refused in (7, 1):
        found.shed_count += refused
        seen.append(found.persistently_saturated)
    found.enqueue(tasks(2), 0.0)
    found.dequeue()
    seen.append(found.persistently_saturated)
    run_dry(found)
    seen.append(found.persistently_saturated)
    assert seen == [False, True, True, False]


def test_a_hanging_lane_stays_saturated_though_it_runs_empty() -> None:
    found = lane(slots=2)
    found.shed_count = 8
    found.on_attempt_done(10.0, started=10.0 - SATURATED_AFTER_S)
    assert found.dequeue() is None
    assert found.persistently_saturated
    found.on_attempt_done(20.0, started=19.9)
    assert found.dequeue() is None
    assert not found.persistently_saturated


def test_a_lane_without_held_tasks_is_not_persistently_saturated() -> None:
    found = lane()
    found.shed_count = 8
    found.on_none_held()
    assert not found.persistently_saturated


def test_after_holding_tasks_a_lane_takes_only_what_it_can_start() -> None:
    """Check that only free slots count: tasks behind hanging calls would be held again."""
    found = lane(slots=4)
    found.shed_count = 1
    assert found.free_capacity(0.0) == 4
    found.busy = 3
    assert found.free_capacity(0.0) == 1
    found.expect_tasks(1, 0.0)
    assert found.free_capacity(0.0) == 0, "one is on its way"
    found.enqueue(tasks(1), 0.0)
    assert found.free_capacity(0.0) == 0
    found.dequeue()
    found.on_attempt_done(0.1, started=0.0)
    run_dry(found)
    found.busy = 0
    assert found.free_capacity(0.0) == 4 + LEAST


def test_draining_removes_everything_and_resets_the_capacity() -> None:
    found = lane()
    found.enqueue(tasks(LEAST + 1), 0.0)
    assert found.is_full()
    run_dry(found)
    given_ = tasks(40)
    found.enqueue(given_, 0.0)
    assert found.drain() == given_
    assert found.drain() == []
    assert not found.is_full()
    found.enqueue(tasks(LEAST + 1), 0.0)
    assert found.is_full()


def test_free_capacity_is_what_the_lane_can_keep() -> None:
    found = lane(slots=4)
    assert found.free_capacity(0.0) == 4 + LEAST
    found.enqueue(tasks(10), 0.0)
    assert found.free_capacity(0.0) == 4 + LEAST - 10
    found.busy = 4
    assert found.free_capacity(0.0) == LEAST - 10
    found.enqueue(tasks(50), 0.0)
    assert found.free_capacity(0.0) == 0


@given(left=st.floats(0, 100))
def test_a_task_is_late_if_its_claim_may_end_before_its_attempt(left: float) -> None:
    found = lane()
    (task,) = tasks(1, deadline=100.0)
    needed = found.endpoint.timeout_s + CLAIM_MARGIN_S
    assert found.claim_too_short(task, 100.0 - left) == (100.0 - (100.0 - left) < needed)


def test_expired_tasks_are_removed_oldest_first() -> None:
    found = lane()
    old, young = tasks(3, deadline=50.0), tasks(2, deadline=90.0)
    found.enqueue([*old, *young], 0.0)
    assert found.pop_expired(0.0) == []
    assert found.pop_expired(47.0) == old
    assert found.pop_expired(47.0) == []
    assert list(found.waiting) == young


def test_a_lane_without_work_for_a_minute_is_idle() -> None:
    found = lane()
    assert not found.is_idle(IDLE_AFTER_S - 1)
    assert found.is_idle(IDLE_AFTER_S)
    found.busy = 1
    assert not found.is_idle(1e9)
    found.busy = 0
    found.enqueue(tasks(1), 1e6)
    assert not found.is_idle(1e9)
    found.dequeue()
    assert not found.is_idle(1e6 + 1)
    assert found.is_idle(1e9)


@given(st.lists(st.sampled_from(["offer", "take", "full", "drain"]), max_size=200))
def test_no_task_is_lost_in_a_lane(steps: list[str]) -> None:
    found, offered, seen = lane(), 0, 0
    for step in steps:
        if step == "offer":
            found.enqueue(tasks(7), 0.0)
            offered += 7
        elif step == "take":
            seen += found.dequeue() is not None
        elif step == "drain":
            seen += len(found.drain())
        else:
            found.is_full()
        assert len(found.waiting) == offered - seen
        if not found.waiting:
            assert not found.is_full(), "a lane with nothing in it is never passed over"


def busy_for(found: Lane, since: float, seconds: float, rate: float) -> float:
    """Run a lane with all slots busy that completes `rate` attempts a second."""
    found.busy = found.slots
    now = since
    for number in range(1, round(seconds * rate) + 1):
        now = since + number / rate
        found.dequeue()
        found.on_attempt_done(now, started=now)
    return now


def test_in_its_first_second_a_lane_keeps_all_tasks() -> None:
    found = lane()
    found.enqueue(tasks(5000), 0.0)
    found.busy = found.slots
    assert found.pop_overflow(0.99) == []
    assert len(found.waiting) == 5000


def test_the_last_tasks_beyond_ten_seconds_of_work_are_overflow() -> None:
    found, given_ = lane(), tasks(5000)
    found.enqueue(given_, 0.0)
    now = busy_for(found, 0.0, 2.0, 50.0)
    surplus = found.pop_overflow(now)
    assert len(found.waiting) == 50 * OVERFLOW_AFTER_S
    assert found.dequeue() is given_[100]
    assert surplus[0] is given_[-1]


def test_a_lane_that_completes_nothing_keeps_a_few_tasks() -> None:
    found = lane()
    found.enqueue(tasks(100), 0.0)
    found.busy = found.slots
    assert len(found.pop_overflow(1.5)) == 100 - LEAST


def test_a_lane_of_2000_a_second_keeps_the_whole_credit() -> None:
    found = lane(slots=32)
    found.enqueue(tasks(PUSH_CREDIT + 2400), 0.0)
    now = busy_for(found, 0.0, 1.2, 2000.0)
    assert len(found.waiting) >= PUSH_CREDIT
    assert found.pop_overflow(now) == []


def test_the_speed_of_a_lane_is_measured_continuously() -> None:
    found = lane()
    found.enqueue(tasks(20_000), 0.0)
    now = busy_for(found, 0.0, 6.0, 1000.0)
    assert found.pop_overflow(now) != []
    for _ in range(6):
        now = busy_for(found, now, 4.5, 10.0)
        found.pop_overflow(now)
    assert len(found.waiting) < 400


def test_after_idling_a_lane_keeps_all_tasks_again() -> None:
    found = lane()
    found.enqueue(tasks(10), 0.0)
    busy_for(found, 0.0, 3.0, 3.0)
    run_dry(found)
    found.busy = 0
    found.enqueue(tasks(3000), 60.0)
    found.busy = found.slots
    assert found.pop_overflow(60.9) == []
    assert found.pop_overflow(61.1) != []


def test_a_lane_that_must_leave_room_keeps_a_part_of_its_usual_work() -> None:
    found = lane()
    found.enqueue(tasks(5000), 0.0)
    now = busy_for(found, 0.0, 2.0, 50.0)
    found.pop_overflow(now, kept_part=0.125)
    assert len(found.waiting) == round(50 * OVERFLOW_AFTER_S * 0.125)
    assert found.free_capacity_for_released(now, kept_part=0.125) == 0
    slow = lane()
    slow.enqueue(tasks(100), 0.0)
    slow.busy = slow.slots
    slow.pop_overflow(1.5, kept_part=0.5)
    assert len(slow.waiting) == slow.slots


def test_a_lane_that_must_leave_room_keeps_few_in_its_first_second_but_all_that_was_released() -> (
    None
):
    found = lane()
    room = found.free_capacity_for_released(0.0, kept_part=0.5)
    found.enqueue(tasks(room), 0.0)
    while found.busy < found.slots:
        found.dequeue()
        found.busy += 1
    assert found.pop_overflow(0.0, kept_part=0.5) == []
    found.enqueue(tasks(100), 0.1)
    assert len(found.pop_overflow(0.1, kept_part=0.5)) == 100
    assert len(found.waiting) == LEAST // 2


def test_a_lane_that_runs_empty_again_and_again_does_not_take_all_the_room() -> None:
    found = lane()
    for _ in range(5):
        found.expect_released(1, 0.0)
        found.enqueue(tasks(1), 0.0)
        run_dry(found)
    assert found.free_capacity_for_released(0.0) == found.slots + 512
    assert found.free_capacity_for_released(0.0, kept_part=0.125) == found.slots + 64
    assert found.free_capacity_for_released(0.0, kept_part=0.5**7) == found.slots + found.slots


def test_released_tasks_are_awaited_before_more_are_released() -> None:
    found = lane()
    room = found.free_capacity_for_released(0.0)
    assert room == found.slots + LEAST
    found.expect_released(room, 0.0)
    assert found.free_capacity_for_released(0.5) == 0
    found.enqueue(tasks(7), 0.6)
    assert found.free_capacity_for_released(0.7) == 0
    run_dry(found)
    assert found.free_capacity_for_released(0.8) >= 7
    # Those that do not arrive were claimed by another worker.
    assert found.free_capacity_for_released(3.0) == found.slots + 2 * LEAST


def limited_lane(rate_per_s: float, *, next_token_in_s: float) -> Lane:
    policy = replace(RECORD.throttle, rate_per_s=rate_per_s)
    found = Lane(Endpoint(replace(RECORD, throttle=policy), SEAL), slots=4, now=0.0)
    found.next_token_at = next_token_in_s
    return found


@pytest.mark.parametrize(
    ("rate_per_s", "next_token_in_s", "kept"),
    [(0.001, 900.0, 0), (0.001, 9.0, 1), (0.5, 2.0, 5), (20.0, 0.05, 200), (60.0, 0.01, 500)],
)
def test_a_limited_lane_keeps_what_its_rate_lets_start_in_ten_seconds(
    rate_per_s: float, next_token_in_s: float, kept: int
) -> None:
    for pop in (Lane.pop_beyond_rate, Lane.pop_overflow):
        found, given_ = limited_lane(rate_per_s, next_token_in_s=next_token_in_s), tasks(500)
        found.enqueue(given_, 0.0)
        assert pop(found, 0.0) == given_[kept:][::-1]
        assert pop(found, 0.0) == []


def test_a_lane_whose_bucket_may_be_full_keeps_all_tasks() -> None:
    found = limited_lane(0.001, next_token_in_s=5.0)
    found.enqueue(tasks(500), 0.0)
    assert found.pop_beyond_rate(5.0) == []


def test_once_tasks_are_held_a_limited_lane_leaves_none_in_the_queue() -> None:
    """Those in the queue are older than those that are released, and would be attempted after them."""
    found = limited_lane(20.0, next_token_in_s=0.05)
    found.enqueue(tasks(500), 0.0)
    assert found.is_full()
    found.shed_count += len(found.pop_beyond_rate(0.0))
    found.shed_count += len(found.pop_beyond_rate(0.0))
    assert len(found.waiting) == LEAST
    assert not found.is_full()
    run_dry(found)
    found.tokens = 1
    assert found.dequeue() is not None
    assert found.persistently_saturated, "it is often empty between two tokens"
    found.on_none_held()
    assert not found.persistently_saturated


def test_a_limited_lane_takes_what_its_rate_lets_start_and_half_of_it_at_least() -> None:
    found = limited_lane(1.0, next_token_in_s=1.0)
    found.shed_count = 1
    assert found.free_capacity(0.0) == found.free_capacity_for_released(0.0) == 10
    found.enqueue(tasks(4), 0.0)
    assert found.free_capacity(0.0) == found.free_capacity_for_released(0.0) == 6
    found.enqueue(tasks(2), 0.0)
    assert found.free_capacity(0.0) == found.free_capacity_for_released(0.0) == 0
    assert limited_lane(0.001, next_token_in_s=10.1).free_capacity(0.0) == 0
    assert limited_lane(0.001, next_token_in_s=9.9).free_capacity(0.0) == 1
    assert limited_lane(1000.0, next_token_in_s=0.0).free_capacity(0.0) == 4 + LEAST


def test_a_hanging_limited_lane_takes_only_what_it_can_start() -> None:
    found = limited_lane(1000.0, next_token_in_s=0.0)
    found.shed_count, found.busy = 1, 3
    found.on_attempt_done(10.0, started=0.0)
    assert found.free_capacity(10.0) == 1


def test_a_lane_that_awaits_a_token_is_not_idle() -> None:
    found = limited_lane(0.001, next_token_in_s=1000.0)
    assert not found.is_idle(999.0)
    assert found.is_idle(1000.0)


def test_a_changed_rate_ends_the_wait_for_a_token() -> None:
    found = limited_lane(0.001, next_token_in_s=1000.0)
    same = replace(found.endpoint.record, version=9)
    found.update(Endpoint(same, SEAL), 1.0)
    assert found.next_token_at == 1000.0
    faster = replace(same, throttle=replace(same.throttle, rate_per_s=5.0))
    found.update(Endpoint(faster, SEAL), 2.0)
    assert found.next_token_at == 2.0


def test_what_a_slow_lane_will_not_start_before_its_claims_end_is_returned_early() -> None:
    found = lane(slots=1)
    given_ = tasks(500, deadline=43.0)
    found.enqueue(given_, 0.0)
    assert found.pop_unstartable(0.9) == []
    now = busy_for(found, 0.0, 3.0, 1.0)
    least_s = found.endpoint.timeout_s + CLAIM_MARGIN_S
    returned = found.pop_unstartable(now)
    assert len(found.waiting) == round(43.0 - now - least_s)
    assert returned[0] is given_[-1]
    fast = lane(slots=1)
    fast.enqueue(given_, 0.0)
    assert fast.pop_unstartable(busy_for(fast, 0.0, 3.0, 20.0)) == []


def test_a_lane_that_returned_tasks_gets_no_more_until_half_of_the_others_started() -> None:
    found = lane(slots=1)
    for _ in range(5):  # it was fast: it ran empty while tasks were kept back
        found.enqueue(tasks(MOST + 1), 0.0)
        assert found.is_full()
        run_dry(found)
    found.enqueue(tasks(500), 0.0)
    now = busy_for(found, 0.0, 3.0, 5.0)
    found.waiting[-1].deadline = now + 40.0 + found.endpoint.timeout_s + CLAIM_MARGIN_S
    assert found.pop_unstartable(now)
    assert len(found.waiting) == 200
    assert found.is_full()
    while len(found.waiting) > 100:
        assert found.is_full()
        found.dequeue()
    assert not found.is_full()


def test_the_last_tasks_of_the_lowest_priority_are_removed_first() -> None:
    found, given_ = limited_lane(0.5, next_token_in_s=2.0), tasks(9)
    for task, priority in zip(given_, (4, 0, 4, 4, 0, 4, 9, 4, 9), strict=True):
        task.priority = priority
    found.enqueue(given_, 0.0)
    assert found.pop_beyond_rate(0.0) == [given_[at] for at in (4, 1, 7, 5)]
    assert list(found.waiting) == [given_[at] for at in (0, 2, 3, 6, 8)]
