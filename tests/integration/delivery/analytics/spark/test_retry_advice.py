"""Test retry advice from a log with shared outages, noise and refused bodies."""

import numpy as np
import pytest

from tests.support.analysis_logs import SHARING
from tests.support.analysis_run import Analysed


def test_advice_needs_a_replay_that_reproduces_the_measurement(together: Analysed) -> None:
    advised = together.rows("advice")
    assert len(advised) >= 25
    for row in advised:
        assert abs(row["measured_delivered"] - row["replayed_delivered"]) <= 0.01, row[
            "subscription_id"
        ]
        assert (
            abs(row["measured_attempts"] - row["replayed_attempts"])
            <= 0.05 * row["measured_attempts"]
        )
        assert row["reproduced"]
        assert row["deployed_redeliveries"] == SHARING.attempts
        assert row["deployed_delay_ms"] == pytest.approx(SHARING.delay_s * 1000)
        assert row["deployed_multiplier"] == pytest.approx(SHARING.multiplier, rel=0.05)


def test_advice_is_no_worse_on_later_data(together: Analysed) -> None:
    advised = together.rows("advice")
    held = [row for row in advised if row["held_up"] is not False]
    assert len(held) >= 0.8 * len(advised)
    chosen = [row for row in advised if row["recommended_delivered"] is not None]
    assert all(row["recommended_delivered"] >= row["replayed_delivered"] - 0.001 for row in chosen)
    # Four retries end after 11 minutes; more retries would outlast outages of half an hour.
    better = [
        row for row in chosen if row["recommended_delivered"] > row["measured_delivered"] + 0.005
    ]
    assert len(better) > len(advised) / 3
    for row in chosen:
        for name in ("delivered", "attempts", "mean_wait_s"):
            low, high = row[f"recommended_{name}_low"], row[f"recommended_{name}_high"]
            assert low <= row[f"recommended_{name}"] <= high
        assert row["recommended_max_delay_ms"] is not None


def test_refused_bodies_are_counted_as_such(together: Analysed) -> None:
    steady = [row for row in together.rows("advice") if row["measured_delivered"] > 0.9]
    share = sum(row["hopeless"] * row["deliveries"] for row in steady)
    assert share / sum(row["deliveries"] for row in steady) == pytest.approx(
        SHARING.hopeless, abs=0.004
    )


def test_the_front_has_only_optimal_policies(
    together: Analysed,
) -> None:
    fronts: dict[str, list[tuple[float, float, float]]] = {}
    for row in together.rows("advice_front"):
        result = (-row["expected_delivered"], row["expected_attempts"], row["expected_mean_wait_s"])
        fronts.setdefault(row["subscription_id"], []).append(result)
    for row in together.rows("advice"):
        if not row["reproduced"]:
            continue
        front = np.array(fronts[row["subscription_id"]])
        # Each policy is better than every other one in some respect.
        less = (front[:, None] < front).any(axis=2)
        assert (less == less.T).all()
