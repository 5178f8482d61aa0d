"""Test the tracking of a broker's tasks: each is claimed, waited for or settled, none twice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.push.in_flight_tasks import (
    FIRST_RETRY_S,
    LOCKED_RETRY_S,
    MAX_LOCKED_RETRY_S,
    InFlightTasks,
)
from rooms.db.queue.broker_claims import DeliveryVersion, version_of
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId
from tests.unit.delivery.push.test_endpoints import TASK

LIMIT = 100


def task_of(number: int, deadline: float = 60.0) -> DeliveryTask:
    return replace(TASK, delivery_id=DeliveryId(str(number)), deadline=deadline)


def test_tasks_of_one_version_are_claimed_once_and_settled_together() -> None:
    in_flight, twins = InFlightTasks(), [task_of(1) for _ in range(3)]
    in_flight.add(twins[:2])
    (asked,) = in_flight.next_to_claim(0.0, LIMIT)
    in_flight.on_claimed([asked])
    in_flight.add(twins[2:])
    assert in_flight.next_to_claim(0.0, LIMIT) == []
    assert [id(task) for task in in_flight.remove([version_of(asked)])] == [
        id(task) for task in twins
    ]
    assert in_flight.remove([version_of(asked)]) == []


def test_a_version_of_another_worker_is_tried_at_growing_intervals() -> None:
    in_flight, task = InFlightTasks(), task_of(1)
    in_flight.add([task])
    now, pauses = 0.0, []
    for _ in range(5):
        assert in_flight.next_to_claim(now, LIMIT) == [task]
        in_flight.on_unavailable(version_of(task), now, 60.0 - now, 7)
        assert in_flight.next_to_claim(now, LIMIT) == []
        pauses.append(in_flight.next_claim_in_s(now, 100.0))
        now += pauses[-1]
    assert pauses == [FIRST_RETRY_S * 2**number for number in range(5)]
    in_flight.next_to_claim(now, LIMIT)
    in_flight.on_unavailable(version_of(task), now, 60.0 - now, 7)
    assert now + in_flight.next_claim_in_s(now, 100.0) == 60.0


def test_a_locked_version_is_tried_again_in_a_moment() -> None:
    in_flight, task = InFlightTasks(), task_of(1)
    in_flight.add([task])
    now, pauses = 0.0, []
    for _ in range(5):
        assert in_flight.next_to_claim(now, LIMIT) == [task]
        in_flight.on_unavailable(version_of(task), now, -5.0, None)
        pauses.append(in_flight.next_claim_in_s(now, 1.0))
        now += pauses[-1]
    assert pauses == pytest.approx([LOCKED_RETRY_S * factor for factor in (1, 2, 4, 8, 8)])
    assert pauses[-1] == pytest.approx(MAX_LOCKED_RETRY_S)


def test_only_what_is_not_behind_others_has_a_retry_that_a_pause_must_not_pass() -> None:
    in_flight = InFlightTasks()
    behind, first, second = replace(task_of(1), behind=True), task_of(2), task_of(3)
    in_flight.add([behind])
    in_flight.next_to_claim(0.0, LIMIT)
    in_flight.on_unavailable(version_of(behind), 0.0, 0.0, None)
    assert in_flight.next_front_claim_in_s(0.0, 1.0) == 1.0
    in_flight.add([first, second])
    in_flight.next_to_claim(0.0, LIMIT)
    for task in (first, second):
        in_flight.on_unavailable(version_of(task), 1.0, 0.0, None)
    assert in_flight.next_front_claim_in_s(1.0, 1.0) == pytest.approx(LOCKED_RETRY_S)
    assert in_flight.next_front_claim_in_s(1.0, 0.001) == 0.001
    assert in_flight.next_front_claim_in_s(2.0, 1.0) == 0.0
    in_flight.remove([version_of(first)])
    assert in_flight.next_front_claim_in_s(1.0, 1.0) == pytest.approx(LOCKED_RETRY_S)
    assert second in in_flight.next_to_claim(2.0, LIMIT)
    assert in_flight.next_front_claim_in_s(2.0, 1.0) == 1.0
    in_flight.on_unavailable(version_of(second), 2.0, 0.0, None)
    in_flight.on_disconnect()
    assert in_flight.next_front_claim_in_s(2.0, 1.0) == 1.0


def test_versions_of_dead_workers_are_tried_at_once() -> None:
    in_flight, tasks = InFlightTasks(), [task_of(number) for number in range(3)]
    in_flight.add(tasks)
    in_flight.next_to_claim(0.0, LIMIT)
    for task, worker in zip(tasks, (7, 8, None), strict=True):
        in_flight.on_unavailable(version_of(task), 0.0, 60.0, worker)
    assert in_flight.awaited_workers() == {7, 8}
    in_flight.retry_soon(0.5, {8})
    assert in_flight.next_to_claim(0.5, LIMIT) == [tasks[1]]
    in_flight.on_claimed([tasks[1]])
    # Its earlier retry time has no effect any more.
    assert in_flight.next_to_claim(1.0, LIMIT) == [tasks[0], tasks[2]]


def test_a_claimed_task_waits_for_its_outcome_however_long_that_takes() -> None:
    in_flight, task = InFlightTasks(), task_of(1, deadline=60.0)
    in_flight.add([task])
    in_flight.on_claimed(in_flight.next_to_claim(0.0, LIMIT))
    assert in_flight.still_claimed([task], 59.0) == [task]
    assert in_flight.still_claimed([task], 60.0) == []
    assert in_flight.next_claim_in_s(0.0, 1e9) == 1e9
    assert in_flight.next_to_claim(1e6, LIMIT) == []
    assert in_flight.remove([version_of(task)]) == [task]


def test_a_claim_after_an_outage_is_later_than_that_of_the_task_before() -> None:
    in_flight, before = InFlightTasks(), task_of(1, deadline=60.0)
    in_flight.on_claimed([before])
    assert not in_flight.has_later_claim(before)
    in_flight.on_claimed([after := task_of(1, deadline=90.0)])
    assert in_flight.has_later_claim(before)
    assert not in_flight.has_later_claim(after)
    assert not in_flight.has_later_claim(task_of(2, deadline=60.0))


def test_a_task_that_gets_no_outcome_is_claimed_like_a_new_one_when_its_claim_ends() -> None:
    in_flight, task, again = InFlightTasks(), task_of(1, deadline=60.0), task_of(1)
    in_flight.add([task])
    in_flight.on_claimed(in_flight.next_to_claim(0.0, LIMIT))
    in_flight.forget([version_of(task), version_of(task_of(2))])
    assert in_flight.still_claimed([task], 59.0) == []
    in_flight.add([again])
    assert in_flight.next_to_claim(59.0, LIMIT) == []
    assert in_flight.next_claim_in_s(0.0, 100.0) == 60.0
    assert in_flight.next_to_claim(60.0, LIMIT) == [task]
    assert in_flight.remove([version_of(task)]) == [task, again]


def test_a_forgotten_version_without_tasks_waits_for_one() -> None:
    in_flight, task = InFlightTasks(), task_of(1)
    in_flight.add([task])
    in_flight.on_claimed(in_flight.next_to_claim(0.0, LIMIT))
    in_flight.on_disconnect()
    in_flight.forget([version_of(task)])
    assert in_flight.next_to_claim(60.0, LIMIT) == []
    in_flight.add([task])
    assert in_flight.next_to_claim(60.0, LIMIT) == [task]


def test_a_disconnect_keeps_claims_and_drops_tasks() -> None:
    in_flight, ours, others, fresh = InFlightTasks(), task_of(1), task_of(2), task_of(3)
    in_flight.add([ours, others])
    in_flight.next_to_claim(0.0, LIMIT)
    in_flight.on_claimed([ours])
    in_flight.on_unavailable(version_of(others), 0.0, 60.0, 7)
    in_flight.add([fresh])
    in_flight.on_disconnect()
    assert not in_flight.awaited_workers()
    assert in_flight.next_to_claim(5.0, LIMIT) == []
    assert in_flight.still_claimed([ours], 5.0) == [ours]
    again = task_of(1)
    in_flight.add([again])
    assert in_flight.next_to_claim(5.0, LIMIT) == []
    assert in_flight.remove([version_of(ours)]) == [again]


def test_a_disconnect_during_a_claim_leaves_a_claim_without_tasks() -> None:
    in_flight, task = InFlightTasks(), task_of(1)
    in_flight.add([task])
    asked = in_flight.next_to_claim(0.0, LIMIT)
    in_flight.on_disconnect()
    in_flight.on_claimed(asked)
    in_flight.on_unavailable(version_of(task_of(2)), 0.0, 60.0, 7)
    assert not in_flight.awaited_workers()
    assert in_flight.remove([version_of(task)]) == []


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 4), st.data())
def test_no_task_is_lost_and_no_version_is_claimed_twice(
    numbers: list[int], limit: int, data: st.DataObject
) -> None:
    """Expect that each task is settled exactly once, in any order of arrivals and results."""
    in_flight, now = InFlightTasks(), 0.0
    tasks = [task_of(number, deadline=1e9) for number in numbers]
    waiting, ours = list(tasks), set[DeliveryVersion]()
    done: list[DeliveryTask] = []
    for _ in range(200):
        if waiting:
            in_flight.add([waiting.pop() for _ in range(min(len(waiting), 3))])
        asked = in_flight.next_to_claim(now, limit)
        assert len({version_of(task) for task in asked}) == len(asked) <= limit
        for task in asked:
            version = version_of(task)
            assert version not in ours
            match data.draw(st.sampled_from(["claimed", "ended", "waits"])) if waiting else "ended":
                case "claimed":
                    in_flight.on_claimed([task])
                    ours.add(version)
                case "ended":
                    done += in_flight.remove([version])
                case _:
                    in_flight.on_unavailable(version, now, 3.0, 7)
        if ours and (not waiting or data.draw(st.booleans())):
            done += in_flight.remove([ours.pop()])
        now += in_flight.next_claim_in_s(now, 1.0)
        if len(done) == len(tasks):
            break
    assert sorted(map(id, done)) == sorted(map(id, tasks))
