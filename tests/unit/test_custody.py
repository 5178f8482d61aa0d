"""Custody: every copy that a broker handed out is asked about, ours, waited for, or given back; none twice at once."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from delivery.custody import FIRST_PAUSE_S, MOMENT_S, Custody
from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId
from rooms.storage.claims import Step, step_of
from tests.unit.test_endpoint import COPY

LIMIT = 100


def copy_of(number: int, deadline: float = 60.0) -> Copy:
    return replace(COPY, delivery_id=DeliveryId(str(number)), deadline=deadline)


def test_copies_of_one_step_are_asked_about_once_and_settled_together() -> None:
    custody, twins = Custody(), [copy_of(1) for _ in range(3)]
    custody.arrive(twins[:2])
    (asked,) = custody.next(0.0, LIMIT)
    custody.take([asked])
    custody.arrive(twins[2:])
    assert custody.next(0.0, LIMIT) == []
    assert [id(copy) for copy in custody.forget([step_of(asked)])] == [id(copy) for copy in twins]
    assert custody.forget([step_of(asked)]) == []


def test_what_is_somebody_elses_is_asked_again_after_longer_and_longer() -> None:
    custody, copy = Custody(), copy_of(1)
    custody.arrive([copy])
    now, pauses = 0.0, []
    for _ in range(5):
        assert custody.next(now, LIMIT) == [copy]
        custody.wait(step_of(copy), now, 60.0 - now, 7)
        assert custody.next(now, LIMIT) == []
        pauses.append(custody.next_s(now, 100.0))
        now += pauses[-1]
    assert pauses == [FIRST_PAUSE_S * 2**number for number in range(5)]
    custody.next(now, LIMIT)
    custody.wait(step_of(copy), now, 60.0 - now, 7)
    assert now + custody.next_s(now, 100.0) == 60.0


def test_what_was_locked_is_asked_again_in_a_moment() -> None:
    custody, copy = Custody(), copy_of(1)
    custody.arrive([copy])
    custody.next(0.0, LIMIT)
    custody.wait(step_of(copy), 0.0, -5.0, None)
    assert custody.next_s(0.0, 1.0) == MOMENT_S
    assert custody.next(MOMENT_S, LIMIT) == [copy]


def test_what_the_dead_had_is_asked_about_at_once() -> None:
    custody, copies = Custody(), [copy_of(number) for number in range(3)]
    custody.arrive(copies)
    custody.next(0.0, LIMIT)
    for copy, worker in zip(copies, (7, 8, None), strict=True):
        custody.wait(step_of(copy), 0.0, 60.0, worker)
    assert custody.workers() == {7, 8}
    custody.hurry(0.5, {8})
    assert custody.next(0.5, LIMIT) == [copies[1]]
    custody.take([copies[1]])
    # Its old appointment means nothing any more.
    assert custody.next(1.0, LIMIT) == [copies[0], copies[2]]


def test_a_claim_that_ran_out_is_asked_about_like_a_new_copy() -> None:
    custody, copy = Custody(), copy_of(1, deadline=60.0)
    custody.arrive([copy])
    custody.take(custody.next(0.0, LIMIT))
    assert custody.held([copy], 59.0) == [copy]
    assert custody.held([copy], 60.0) == []
    assert custody.next_s(0.0, 100.0) == 60.0
    assert custody.next(60.0, LIMIT) == [copy]


def test_without_its_connection_a_claim_stays_and_a_copy_does_not() -> None:
    custody, ours, others, fresh = Custody(), copy_of(1), copy_of(2), copy_of(3)
    custody.arrive([ours, others])
    custody.next(0.0, LIMIT)
    custody.take([ours])
    custody.wait(step_of(others), 0.0, 60.0, 7)
    custody.arrive([fresh])
    custody.lose()
    assert not custody.waiting
    assert custody.next(5.0, LIMIT) == []
    assert custody.held([ours], 5.0) == [ours]
    again = copy_of(1)
    custody.arrive([again])
    assert custody.next(5.0, LIMIT) == []
    assert custody.forget([step_of(ours)]) == [again]


def test_a_connection_that_is_lost_amid_a_claim_leaves_a_claim_without_a_copy() -> None:
    custody, copy = Custody(), copy_of(1)
    custody.arrive([copy])
    asked = custody.next(0.0, LIMIT)
    custody.lose()
    custody.take(asked)
    custody.wait(step_of(copy_of(2)), 0.0, 60.0, 7)
    assert not custody.waiting
    assert custody.forget([step_of(copy)]) == []


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 4), st.data())
def test_no_copy_is_lost_and_no_step_is_out_twice(numbers: list[int], limit: int, data: st.DataObject) -> None:
    """Whatever is answered, in whatever order copies come: in the end each is given back exactly once."""
    custody, now = Custody(), 0.0
    copies = [copy_of(number, deadline=1e9) for number in numbers]
    waiting, ours = list(copies), set[Step]()
    done: list[Copy] = []
    for _ in range(200):
        if waiting:
            custody.arrive([waiting.pop() for _ in range(min(len(waiting), 3))])
        asked = custody.next(now, limit)
        assert len({step_of(copy) for copy in asked}) == len(asked) <= limit
        for copy in asked:
            step = step_of(copy)
            assert step not in ours
            match data.draw(st.sampled_from(["ours", "over", "wait"])) if waiting else "over":
                case "ours":
                    custody.take([copy])
                    ours.add(step)
                case "over":
                    done += custody.forget([step])
                case _:
                    custody.wait(step, now, 3.0, 7)
        if ours and (not waiting or data.draw(st.booleans())):
            done += custody.forget([ours.pop()])
        now += custody.next_s(now, 1.0)
        if len(done) == len(copies):
            break
    assert sorted(map(id, done)) == sorted(map(id, copies))
