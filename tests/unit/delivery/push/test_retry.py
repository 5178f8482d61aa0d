"""Test what follows from a failed attempt: delays, jitter, `Retry-After`, expiry, statuses."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.push.retry import (
    MAX_DELAY_MS,
    RETRY_AFTER_CAP_MS,
    backoff_ms,
    decide_retry,
    retry_after_ms,
)
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.retry_policy import Drop, Expire, Retry, RetryPolicy, Sideline
from rooms.domain.state_machine import Reason

NOW_MS = 1_750_000_000_000


def failed(status: int | None = 500, retry_after: str | None = None) -> AttemptResult:
    error = ErrorClass.TIMEOUT if status is None else ErrorClass.STATUS
    return AttemptResult(
        status=status,
        error=error,
        detail="x",
        body_head=b"",
        retry_after=retry_after,
        latency_ms=1.0,
    )


delays = st.integers(0, 86_400_000)
multipliers = st.one_of(st.integers(1, 10).map(float), st.floats(1, 10, allow_nan=False))
caps = st.none() | st.integers(0, MAX_DELAY_MS)
policies = st.builds(
    RetryPolicy,
    delay_ms=delays,
    multiplier=multipliers,
    attempts=st.integers(0, 1000),
    max_delay_ms=caps,
)
statuses = st.none() | st.integers(100, 599)


@given(delay_ms=delays, multiplier=st.integers(1, 10), n=st.integers(0, 12))
def test_whole_multipliers_give_the_exact_formula(delay_ms: int, multiplier: int, n: int) -> None:
    policy = RetryPolicy(delay_ms=delay_ms, multiplier=float(multiplier), attempts=20)
    assert backoff_ms(policy, n) == min(delay_ms * multiplier**n, MAX_DELAY_MS)


@given(delay_ms=delays, multiplier=st.fractions(0, 10, max_denominator=64), n=st.integers(0, 12))
def test_fractional_multipliers_give_the_formula_to_the_millisecond(
    delay_ms: int, multiplier: Fraction, n: int
) -> None:
    exact = Fraction(float(multiplier)) ** n * delay_ms
    policy = RetryPolicy(delay_ms=delay_ms, multiplier=float(multiplier), attempts=20)
    if exact < MAX_DELAY_MS:
        assert abs(backoff_ms(policy, n) - exact) <= Fraction(1, 2) + exact / 10**12


def test_the_documented_example_of_the_formula() -> None:
    policy = RetryPolicy(delay_ms=1000, multiplier=2.0, attempts=5)
    assert [backoff_ms(policy, n) for n in range(5)] == [1000, 2000, 4000, 8000, 16000]
    waits = [decide_retry(failed(), attempt, policy, now_ms=NOW_MS) for attempt in range(6)]
    assert waits == [
        *(Retry(attempt=n + 1, delay_ms=1000 * 2**n) for n in range(5)),
        Sideline(reason=Reason.ATTEMPTS_EXHAUSTED),
    ]


@given(policy=policies, n=st.integers(0, 100_000))
def test_no_wait_is_longer_than_its_cap_however_large_the_power(
    policy: RetryPolicy, n: int
) -> None:
    cap = MAX_DELAY_MS if policy.max_delay_ms is None else policy.max_delay_ms
    assert 0 <= backoff_ms(policy, n) <= cap


@given(policy=policies, n=st.integers(0, 500))
def test_delays_never_shrink(policy: RetryPolicy, n: int) -> None:
    assert backoff_ms(policy, n) <= backoff_ms(policy, n + 1)


def test_a_delay_of_zero_stays_zero_if_the_power_overflows() -> None:
    assert backoff_ms(RetryPolicy(delay_ms=0, multiplier=10.0, attempts=1000), 999) == 0
    assert backoff_ms(RetryPolicy(delay_ms=1, multiplier=10.0, attempts=1000), 999) == MAX_DELAY_MS


@given(policy=policies, attempt=st.integers(0, 1000))
def test_the_next_attempt_is_one_more(policy: RetryPolicy, attempt: int) -> None:
    decision = decide_retry(failed(), attempt, policy, now_ms=NOW_MS)
    if attempt < policy.attempts:
        assert decision == Retry(attempt=attempt + 1, delay_ms=backoff_ms(policy, attempt))
    else:
        assert decision == Sideline(reason=Reason.ATTEMPTS_EXHAUSTED)


@given(status=statuses)
def test_zero_attempts_mean_no_redelivery(status: int | None) -> None:
    policy = RetryPolicy(delay_ms=1, multiplier=1.0, attempts=0)
    assert isinstance(decide_retry(failed(status), 0, policy, now_ms=NOW_MS), Sideline)


@given(policy=policies, attempt=st.integers(0, 20), draw=st.floats(0, 1))
def test_without_jitter_the_random_number_has_no_effect(
    policy: RetryPolicy, attempt: int, draw: float
) -> None:
    drawn = decide_retry(failed(), attempt, policy, now_ms=NOW_MS, random=draw)
    assert drawn == decide_retry(failed(), attempt, policy, now_ms=NOW_MS)


@given(policy=policies, attempt=st.integers(0, 20), jitter=st.floats(0, 1), draw=st.floats(0, 1))
def test_jitter_stays_within_its_share_and_the_cap(
    policy: RetryPolicy, attempt: int, jitter: float, draw: float
) -> None:
    exact = backoff_ms(policy, attempt)
    decision = decide_retry(
        failed(),
        attempt,
        replace(policy, jitter=jitter),
        now_ms=NOW_MS,
        random=draw,
    )
    if isinstance(decision, Retry):
        assert exact * (1 - jitter) - 1 <= decision.delay_ms <= exact * (1 + jitter) + 1
        assert decision.delay_ms <= (
            MAX_DELAY_MS if policy.max_delay_ms is None else policy.max_delay_ms
        )
    assert decision == decide_retry(
        failed(),
        attempt,
        replace(policy, jitter=jitter),
        now_ms=NOW_MS,
        random=draw,
    )


def test_jitter_draws_over_its_whole_share() -> None:
    policy = RetryPolicy(delay_ms=1000, multiplier=1.0, attempts=9, jitter=0.5)
    drawn = [
        decide_retry(failed(), 0, policy, now_ms=NOW_MS, random=draw) for draw in (0.0, 0.5, 1.0)
    ]
    assert drawn == [Retry(attempt=1, delay_ms=wait) for wait in (500, 1000, 1500)]


@given(
    policy=policies,
    asked_s=st.integers(0, 10**12),
    attempt=st.integers(0, 20),
    zeros=st.integers(0, 20),
)
def test_retry_after_in_seconds(
    policy: RetryPolicy, asked_s: int, attempt: int, zeros: int
) -> None:
    header = "0" * zeros + str(asked_s)
    decision = decide_retry(failed(503, header), attempt, policy, now_ms=NOW_MS)
    if isinstance(decision, Retry):
        cap = RETRY_AFTER_CAP_MS if policy.max_delay_ms is None else policy.max_delay_ms
        assert decision.delay_ms == max(backoff_ms(policy, attempt), min(asked_s * 1000, cap))


@given(ahead_s=st.integers(-100_000, 100_000))
def test_retry_after_as_a_date(ahead_s: int) -> None:
    at = datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(seconds=ahead_s)
    policy = RetryPolicy(delay_ms=5000, multiplier=1.0, attempts=1)
    decision = decide_retry(failed(429, format_datetime(at, usegmt=True)), 0, policy, now_ms=NOW_MS)
    assert decision == Retry(attempt=1, delay_ms=max(5000, min(ahead_s * 1000, RETRY_AFTER_CAP_MS)))


@pytest.mark.parametrize("zone", ["GMT", "-0000", "+0000", "UTC", "Z"])
def test_a_date_without_a_zone_is_utc(zone: str) -> None:
    text = f"Sun, 15 Jun 2025 15:06:50 {zone}"
    assert retry_after_ms(text, NOW_MS) == 10_000


@pytest.mark.parametrize(
    "garbage",
    [
        "", " ", "soon", "-1", "1.5", "+3", "1e3", "\u0663", "\u00b2", "Mon, 99 Foo 2025 99:99:99 GMT",
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Mon, 01 Jan 2024 00:00:00 +99999999999999999999",
        "\x00", "0x10", "1,2", "Mon, 01 Jan 0000 00:00:00 GMT",
    ],
)  # fmt: skip
def test_garbage_is_ignored(garbage: str) -> None:
    assert retry_after_ms(garbage, NOW_MS) in {None, 0}
    policy = RetryPolicy(delay_ms=7, multiplier=1.0, attempts=1)
    decision = decide_retry(failed(503, garbage), 0, policy, now_ms=NOW_MS)
    assert decision == Retry(attempt=1, delay_ms=7)


@given(
    st.text(max_size=60)
    | st.from_regex(r"[A-Z][a-z]{2}, \d{1,25} [A-Z][a-z]{2} \d{1,25} [\d:]{1,12} [+-]?\w{1,25}")
)
def test_no_header_can_break_the_decision(header: str) -> None:
    asked = retry_after_ms(header, NOW_MS)
    assert asked is None or asked >= 0


@given(
    policy=policies,
    attempt=st.integers(0, 10),
    left_ms=st.integers(-1000, 10**9),
    header=st.none() | st.integers(0, 10_000).map(str),
)
def test_a_retry_due_at_or_after_the_expiry_is_not_made(
    policy: RetryPolicy, attempt: int, left_ms: int, header: str | None
) -> None:
    free = decide_retry(failed(503, header), attempt, policy, now_ms=NOW_MS)
    bound = decide_retry(failed(503, header), attempt, policy, now_ms=NOW_MS, left_ms=left_ms)
    if isinstance(free, Retry) and free.delay_ms >= left_ms:
        assert bound == Expire()
    else:
        assert bound == free


@given(status=statuses, attempt=st.integers(0, 5), ignorable=st.booleans(), terminal=st.booleans())
def test_statuses_decide_before_counts(
    status: int | None,
    attempt: int,
    ignorable: bool,  # noqa: FBT001 - drawn
    terminal: bool,  # noqa: FBT001 - drawn
) -> None:
    listed = frozenset() if status is None else frozenset({status})
    policy = RetryPolicy(
        delay_ms=1,
        multiplier=1.0,
        attempts=3,
        ignorable_statuses=listed if ignorable else frozenset(),
        terminal_statuses=listed if terminal else frozenset(),
    )
    decision = decide_retry(failed(status), attempt, policy, now_ms=NOW_MS, left_ms=0.0)
    if status == 410:
        assert decision == Sideline(reason=Reason.TERMINAL_STATUS, disable_endpoint=True)
    elif status is not None and ignorable:
        assert decision == Drop()
    elif status is not None and terminal:
        assert decision == Sideline(reason=Reason.TERMINAL_STATUS)
    elif attempt >= 3:
        assert decision == Sideline(reason=Reason.ATTEMPTS_EXHAUSTED)
    else:
        assert decision == Expire()
