"""Test how many failures open a circuit, and when a streak of failures is reported."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from delivery.push.circuit import REPORT_AFTER_S, CircuitBreaker, FailureStreak


def test_enough_failures_in_a_row_open_it_and_counting_starts_again() -> None:
    found = CircuitBreaker()
    seen = [found.failed(float(at), failures=3, window_s=60) for at in range(7)]
    assert seen == [False, False, True, False, False, True, False]


def test_a_success_between_them_ends_the_row() -> None:
    found = CircuitBreaker()
    assert not found.failed(0, failures=2, window_s=60)
    found.succeeded()
    assert not found.failed(1, failures=2, window_s=60)
    assert found.failed(2, failures=2, window_s=60)


def test_failures_further_apart_than_the_window_are_no_row() -> None:
    found = CircuitBreaker()
    assert not any(found.failed(at * 11.0, failures=3, window_s=20) for at in range(50))
    assert found.failed(49 * 11.0 + 1, failures=3, window_s=20)


def test_a_row_of_many_failures_takes_little_memory() -> None:
    tracemalloc.start()
    found = CircuitBreaker()
    assert not any(found.failed(at / 7, failures=1000, window_s=600) for at in range(999))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.failed_at()) == 999
    assert size < 999 * 10


def test_a_limit_of_zero_failures_never_opens_it() -> None:
    found = CircuitBreaker()
    assert not any(found.failed(0.0, failures=0, window_s=60) for _ in range(1000))


@given(
    failures=st.integers(1, 6),
    window_s=st.floats(0.5, 20),
    events=st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=80),
)
def test_it_opens_exactly_when_the_last_failures_are_within_the_window(
    failures: int, window_s: float, events: list[tuple[float, bool]]
) -> None:
    found, now, row = CircuitBreaker(), 0.0, list[float]()
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


def test_a_streak_is_reported_after_a_while_from_its_first_failure() -> None:
    found = FailureStreak()
    assert not found.failed(10.0)
    assert not found.failed(10.0 + REPORT_AFTER_S / 2)
    assert found.failed(10.0 + REPORT_AFTER_S)
    assert found.failed(100.0)
    found.succeeded(101.0)
    assert (found.since, found.succeeded_at) == (None, 101.0)
    assert not found.failed(102.0)
    assert found.failed(104.0)
    found.forget()
    assert (found.since, found.succeeded_at) == (None, 101.0)
    assert not found.failed(106.0)
