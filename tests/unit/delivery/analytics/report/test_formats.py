"""Test that numbers are written as people write them."""

from datetime import UTC, datetime

import pytest

from delivery.analytics.report.formats import (
    count_text,
    percent_range_text,
    percent_text,
    policy_text,
    seconds_text,
    span_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0421, "42 ms"), (0.9999, "1 s"), (1.25, "1.2 s"), (9.04, "9 s"), (42, "42 s"),
        (60, "1 min"), (200, "3 min 20 s"), (3600, "1 h"), (3725, "1 h 2 min"),
        (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"), (0.0001, "under 0.1 %"), (0.004, "0.4 %"), (0.0321, "3.2 %"), (0.333, "33 %"),
        (0.85, "85 %"), (0.992, "99.2 %"), (0.9999, "over 99.9 %"), (1.0, "100 %"),
    ],
)  # fmt: skip
def test_shares_have_tenths_where_they_matter(share: float, text: str) -> None:
    assert percent_text(share) == text


def test_ranges_and_counts() -> None:
    assert percent_range_text(0.971, 0.992) == "97.1 to 99.2 %"
    assert percent_range_text(0.5, 0.5) == "50 %"
    assert count_text(1, "delivery", "deliveries") == "1 delivery"
    assert count_text(1234, "delivery", "deliveries") == "1,234 deliveries"


def test_a_period_names_its_day_once() -> None:
    began = datetime(2026, 3, 1, 23, 50, tzinfo=UTC)
    assert span_text(began, began.replace(minute=59)) == "2026-03-01 23:50 to 23:59"
    assert (
        span_text(began, datetime(2026, 3, 2, 0, 5, tzinfo=UTC))
        == "2026-03-01 23:50 to 2026-03-02 00:05"
    )


def test_a_policy_is_one_phrase() -> None:
    assert policy_text(1000, 2.0, 0, None) == "no retries"
    assert policy_text(200_000, 2.0, 1, None) == "1 retry, the first after 3 min 20 s"
    assert policy_text(1000, 2.0, 5, 4000) == (
        "5 retries, the first after 1 s, each wait 2 times the last, at most 4 s"
    )
    assert policy_text(1000, 2.0, 5, 90_000) == (
        "5 retries, the first after 1 s, each wait 2 times the last"
    )
    # The most that a tenant may set: a factor without a cap is beyond any number.
    assert policy_text(1, 100.0, 1000, 60_000) == (
        "1,000 retries, the first after 1 ms, each wait 100 times the last, at most 1 min"
    )
