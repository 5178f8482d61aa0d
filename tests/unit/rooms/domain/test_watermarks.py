"""Test the low-water marks that brokers, PULL and the relay share."""

from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.delivery_task import PRIORITIES
from rooms.domain.watermarks import NO_WATERMARKS, Watermarks

DUE = st.integers(0, 1000)
BOUNDS = st.tuples(*[DUE] * PRIORITIES)


def mark(marks: Watermarks, priority: int) -> int:
    return marks.bounds[PRIORITIES - 1 - priority]


def test_a_new_queue_is_scanned_from_the_beginning_of_time() -> None:
    assert Watermarks().bounds is NO_WATERMARKS
    assert set(NO_WATERMARKS) == {0}


def test_a_scan_of_everything_raises_all_marks() -> None:
    marks = Watermarks()
    marks.advance(700)
    assert marks.bounds == (700,) * PRIORITIES


def test_a_partial_scan_leaves_the_marks_of_lower_priorities() -> None:
    marks = Watermarks((5,) * PRIORITIES)
    marks.advance(700, reached=7, reached_us=300)
    assert marks.bounds == (700, 700, 300, *[5] * 7)
    assert [mark(marks, priority) for priority in (9, 8, 7, 6)] == [700, 700, 300, 5]


@given(BOUNDS, DUE, st.integers(0, PRIORITIES - 1), DUE)
def test_each_priority_has_the_mark_of_what_was_scanned_of_it(
    bounds: tuple[int, ...], complete_us: int, reached: int, reached_us: int
) -> None:
    marks, before = Watermarks(bounds), Watermarks(bounds)
    marks.advance(complete_us, reached=reached, reached_us=reached_us)
    assert len(marks.bounds) == PRIORITIES
    for priority in range(PRIORITIES):
        unscanned = mark(before, priority) if priority < reached else reached_us
        assert mark(marks, priority) == (complete_us if priority > reached else unscanned)


@given(BOUNDS, BOUNDS)
def test_marks_are_only_lowered_or_only_raised(
    bounds: tuple[int, ...], others: tuple[int, ...]
) -> None:
    lowered, raised = Watermarks(bounds), Watermarks(bounds)
    lowered.lower_to(others)
    raised.raise_to(others)
    for priority in range(PRIORITIES):
        assert (
            mark(lowered, priority) <= mark(Watermarks(bounds), priority) <= mark(raised, priority)
        )
        both = {mark(Watermarks(bounds), priority), mark(Watermarks(others), priority)}
        assert (mark(lowered, priority), mark(raised, priority)) == (min(both), max(both))


def test_a_reset_scans_everything_again() -> None:
    marks = Watermarks()
    marks.advance(700)
    marks.reset()
    assert marks.bounds is NO_WATERMARKS
