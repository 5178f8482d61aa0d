"""How a subscription does, in one word and since when."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from rooms.domain.condition import Condition, Symptoms, judge
from rooms.domain.states import SubscriptionStatus

NOW = datetime(2026, 1, 31, 3, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


WELL = Symptoms(status=SubscriptionStatus.ACTIVE, status_since=ago(9_000), delivered_at=ago(1))


@pytest.mark.parametrize(
    ("symptoms", "condition", "since"),
    [
        (replace(WELL, status=SubscriptionStatus.DISABLED, retries_from=ago(5), retries_to=ago(5)), "disabled", 9_000),
        (replace(WELL, status=SubscriptionStatus.DISABLED, only_failures_since=ago(9_500)), "disabled", 9_500),
        (replace(WELL, status=SubscriptionStatus.PAUSED, waits_from=ago(800)), "paused", 9_000),
        (replace(WELL, circuit_open_since=ago(40), sidelined_from=ago(90)), "circuit_open", 40),
        (replace(WELL, circuit_open_since=ago(40), only_failures_since=ago(50)), "circuit_open", 50),
        (replace(WELL, only_failures_since=ago(50)), "failing", 50),
        (replace(WELL, unserved=True, waits_from=ago(70)), "failing", 70),
        (replace(WELL, unserved=True), "failing", 9_000),
        # The oldest retry was published before the last success: it can have failed only after it.
        (replace(WELL, delivered_at=ago(60), retries_from=ago(61), retries_to=ago(2)), "failing", 60),
        (replace(WELL, delivered_at=None, retries_from=ago(61), retries_to=ago(2)), "failing", 61),
        # The schedule is short and the failure is long: what was sidelined since the last success is older than any retry.
        (
            replace(
                WELL,
                delivered_at=ago(700),
                retries_from=ago(10),
                retries_to=ago(2),
                sidelined_from=ago(8_000),
                sidelined_again=ago(600),
            ),
            "failing",
            600,
        ),
        (replace(WELL, delivered_at=ago(700), sidelined_from=ago(8_000), sidelined_again=ago(600)), "failing", 600),
        (replace(WELL, retries_from=ago(60), retries_to=ago(5)), "unsteady", 60),
        (replace(WELL, waits_from=ago(61), sidelined_from=ago(900)), "behind", 61),
        (replace(WELL, waits_from=ago(59), sidelined_from=ago(900)), "resting", 900),
    ],
)
def test_the_word_and_since_when(symptoms: Symptoms, condition: str, since: float) -> None:
    assert judge(symptoms, NOW) == (Condition(condition), ago(since))
