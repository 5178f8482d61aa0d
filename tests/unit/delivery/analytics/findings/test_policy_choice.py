"""Test retry advice against the truth of simulated endpoints.

The seeds are others than those the bench prints, and than those the parameters were set by.
"""

from dataclasses import replace

import numpy as np
import pytest

from delivery.analytics.findings.policy_simulation import Policy
from delivery.analytics.findings.success_rates import AttemptSuccessRates
from tests.support.retry_worlds import (
    UNRESOLVED,
    WORLDS,
    AdviceScore,
    RetryWorld,
    draw_period,
    log_period,
    score,
)

SEEDS = (101, 102, 103)


@pytest.fixture(scope="module")
def scores() -> list[AdviceScore]:
    """Score every world on three seeds."""
    found = [score(world, seed) for world in WORLDS for seed in SEEDS]
    return [one for one in found if one is not None]


def test_no_advice_is_worse_than_what_was_set(scores: list[AdviceScore]) -> None:
    assert len(scores) == len(WORLDS) * len(SEEDS)
    assert sum(one.advice.recommended is not None for one in scores) >= len(scores) / 2
    assert [(one.world, one.advice.recommended) for one in scores if one.is_worse] == []
    assert [one.world for one in scores if one.is_worse_later] == []


def test_promises_hold(scores: list[AdviceScore]) -> None:
    resolved = [one for one in scores if one.world not in UNRESOLVED]
    assert [(one.world, one.error()) for one in resolved if not one.is_right] == []
    advised = [one for one in resolved if one.recommended is not None]
    for name in ("delivered", "attempts", "mean_wait_s"):
        held = [one.holds(one.recommended, name) for one in advised]
        assert sum(held) >= 0.9 * len(held), name
    later = [one.holds(one.recommended_later, "delivered") for one in advised]
    assert sum(later) >= 0.8 * len(later)


def test_replays_reproduce_what_was_measured(scores: list[AdviceScore]) -> None:
    assert all(one.advice.reproduced for one in scores if one.world not in UNRESOLVED)


def test_refused_bodies_are_recognised_at_any_rate(scores: list[AdviceScore]) -> None:
    true = {world.name: world.refused * (1 - world.refused_from) for world in WORLDS}
    for one in scores:
        if one.world not in UNRESOLVED:
            wanted = true[one.world]
            assert one.advice.undeliverable_share == pytest.approx(wanted, abs=0.005 + wanted / 5)


def test_a_policy_never_gives_up_earlier(scores: list[AdviceScore]) -> None:
    for one in scores:
        if (best := one.advice.recommended) is not None:
            last = best.policy.offsets_s()[-1]
            assert last >= 0.9 * one.advice.deployed.offsets_s()[-1]


def test_the_back_test_catches_what_does_not_hold(scores: list[AdviceScore]) -> None:
    """Test with outages that become five times as long in the last third."""
    grown = [one for one in scores if one.world == "outages grow"]
    assert [one.advice.held_up for one in grown] == [False] * len(SEEDS)
    steady = [one for one in scores if one.world in {"noise", "refused 0.3 %", "much noise"}]
    # The later part has few failures, so by chance one may differ.
    assert sum(one.advice.held_up is False for one in steady) <= 1


def test_a_recommended_policy_waits_the_same_whatever_the_room_sets(
    scores: list[AdviceScore],
) -> None:
    for one in scores:
        if (best := one.advice.recommended) is not None:
            cap = best.policy.max_delay_ms
            assert cap is not None
            waits = best.policy.waits_s() * 1000
            free = replace(best.policy, max_delay_ms=None).waits_s() * 1000
            # The cap is either that of the policy, or beyond its longest wait.
            assert waits.max() <= cap
            assert (waits == np.minimum(free, cap)).all()


def test_the_same_counts_give_the_same_advice() -> None:
    world = next(one for one in WORLDS if one.name == "outages")
    random = np.random.default_rng(7)
    logged = log_period(draw_period(world, random), world.policy, random, end_s=86_400.0)
    assert logged.advice(5) == logged.advice(5)


def test_too_few_deliveries_give_no_advice() -> None:
    world = RetryWorld(
        name="few", policy=Policy(delay_ms=1000, multiplier=2.0, attempts=3), days=0.2, noise=0.3,
        a_minute=0.2,
    )  # fmt: skip
    random = np.random.default_rng(1)
    period = draw_period(world, random)
    assert log_period(period, world.policy, random, end_s=17_000.0).advice() is None


def test_the_deployed_policy_is_recognised_with_its_cap() -> None:
    counts = np.array([100, 50, 30, 20, 10])
    waits = np.array([5_000, 15_000, 45_000, 60_000, 0])
    rates = AttemptSuccessRates(
        attempts=counts,
        successes=counts // 2,
        retries=np.array([50, 30, 20, 10, 0]),
        delay_ms=np.array([50, 30, 20, 10, 0]) * waits,
        latency_us=counts * 1000,
        jitter=0.2,
    )
    assert rates.deployed_policy() == Policy(
        delay_ms=5000.0, multiplier=3.0, attempts=4, max_delay_ms=60_000.0, jitter=0.2
    )
