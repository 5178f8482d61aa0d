"""When failures are enough: for an open circuit, and for calling an endpoint failing."""

from hypothesis import given
from hypothesis import strategies as st

from delivery.breaker import REPORT_AFTER_S, Breaker, Streak


def test_so_many_failures_in_a_row_are_enough_and_counting_begins_anew() -> None:
    found = Breaker()
    seen = [found.failed(float(at), failures=3, window_s=60) for at in range(7)]
    assert seen == [False, False, True, False, False, True, False]


def test_a_success_between_them_ends_the_row() -> None:
    found = Breaker()
    assert not found.failed(0, failures=2, window_s=60)
    found.succeeded()
    assert not found.failed(1, failures=2, window_s=60)
    assert found.failed(2, failures=2, window_s=60)


def test_failures_further_apart_than_the_window_are_no_row() -> None:
    found = Breaker()
    assert not any(found.failed(at * 11.0, failures=3, window_s=20) for at in range(50))
    assert found.failed(49 * 11.0 + 1, failures=3, window_s=20)


def test_nought_failures_never_open_it() -> None:
    found = Breaker()
    assert not any(found.failed(0.0, failures=0, window_s=60) for _ in range(1000))


@given(
    failures=st.integers(1, 6),
    window_s=st.floats(0.5, 20),
    events=st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=80),
)
def test_it_opens_exactly_where_the_last_failures_stand_together(
    failures: int, window_s: float, events: list[tuple[float, bool]]
) -> None:
    found, now, row = Breaker(), 0.0, list[float]()
    for gap, well in events:
        now += gap
        if well:
            found.succeeded()
            row.clear()
            continue
        row.append(now)
        enough = len(row) >= failures and row[-failures] >= now - window_s
        assert found.failed(now, failures=failures, window_s=window_s) == enough
        if enough:
            row.clear()


def test_a_streak_is_told_of_after_a_while_and_from_its_first_failure_on() -> None:
    found = Streak()
    assert found.failed(10.0) is None
    assert found.failed(10.0 + REPORT_AFTER_S / 2) is None
    assert found.failed(10.0 + REPORT_AFTER_S) == REPORT_AFTER_S
    assert found.failed(100.0) == 90.0
    found.succeeded(101.0)
    assert (found.since, found.well_at) == (None, 101.0)
    assert found.failed(102.0) is None
