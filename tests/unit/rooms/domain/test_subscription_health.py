"""Test the health of subscriptions, and since when it holds."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from rooms.domain.state_machine import SubscriptionStatus
from rooms.domain.subscription_health import HealthInput, SubscriptionHealth, classify

NOW = datetime(2026, 1, 31, 3, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


WELL = HealthInput(status=SubscriptionStatus.ACTIVE, status_since=ago(9_000), delivered_at=ago(1))


@pytest.mark.parametrize(
    ("symptoms", "condition", "since"),
    [
        (
            replace(
                WELL,
                status=SubscriptionStatus.DISABLED,
                oldest_retry_at=ago(5),
                newest_retry_at=ago(5),
            ),
            "disabled",
            9_000,
        ),
        (
            replace(WELL, status=SubscriptionStatus.DISABLED, only_failures_since=ago(9_500)),
            "disabled",
            9_500,
        ),
        (replace(WELL, status=SubscriptionStatus.PAUSED, waiting_since=ago(800)), "paused", 9_000),
        (
            replace(WELL, circuit_open_since=ago(40), oldest_sidelined_at=ago(90)),
            "circuit_open",
            40,
        ),
        (
            replace(WELL, circuit_open_since=ago(40), only_failures_since=ago(50)),
            "circuit_open",
            50,
        ),
        (replace(WELL, only_failures_since=ago(50)), "failing", 50),
        (replace(WELL, held_for_reason=True, waiting_since=ago(70)), "failing", 70),
        (replace(WELL, held_for_reason=True), "failing", 9_000),
        # The oldest retry was published before the last success: it can have failed only after it.
        (
            replace(WELL, delivered_at=ago(60), oldest_retry_at=ago(61), newest_retry_at=ago(2)),
            "failing",
            60,
        ),
        (
            replace(WELL, delivered_at=None, oldest_retry_at=ago(61), newest_retry_at=ago(2)),
            "failing",
            61,
        ),
        # The schedule is short and the failure is long: what was sidelined since the last success is older than any retry.
        (
            replace(
                WELL,
                delivered_at=ago(700),
                oldest_retry_at=ago(10),
                newest_retry_at=ago(2),
                oldest_sidelined_at=ago(8_000),
                residelined_at=ago(600),
            ),
            "failing",
            600,
        ),
        (
            replace(
                WELL, delivered_at=ago(700), oldest_sidelined_at=ago(8_000), residelined_at=ago(600)
            ),
            "failing",
            600,
        ),
        (replace(WELL, oldest_retry_at=ago(60), newest_retry_at=ago(5)), "unsteady", 60),
        (replace(WELL, waiting_since=ago(61), oldest_sidelined_at=ago(900)), "behind", 61),
        (replace(WELL, waiting_since=ago(59), oldest_sidelined_at=ago(900)), "resting", 900),
    ],
)
def test_the_word_and_since_when(symptoms: HealthInput, condition: str, since: float) -> None:
    assert classify(symptoms, NOW) == (SubscriptionHealth(condition), ago(since))
