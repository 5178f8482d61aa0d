"""Test that a simulation of many deliveries at once equals a simulation of each one."""

import numpy as np
import pytest

from delivery.analytics.findings.availability import AvailabilityPaths, Timeline
from delivery.analytics.findings.policy_simulation import (
    Arrivals,
    Bootstrap,
    Policy,
    PolicyEffect,
    Sample,
    pareto_front,
    range_of,
    sample_of,
    simulate,
)
from delivery.analytics.findings.series import BIN_S, Floats, Ints

# With gaps, one of them a whole outage, and the last bin long before the last attempt.
BINS: Ints = np.array([100, 101, 102, 105, 111, 112, 113, 114, 130, 131])
ATTEMPTS: Ints = np.array([4, 5, 3, 2, 6, 2, 2, 4, 1, 3])
SUCCESSES: Ints = np.array([4, 4, 3, 1, 0, 0, 0, 1, 1, 3])
TIMELINE = Timeline.of_bins(BINS, ATTEMPTS, SUCCESSES, beyond=20)
RATES: Floats = np.random.default_rng(3).uniform(0, 1, (2, len(TIMELINE.lengths)))
NOTHING = Arrivals(
    **{name: np.zeros(0, dtype=np.int64) for name in ("bins", "tries", "delivered", "count")}
)
POLICIES = [(20_000, 1.0, 6), (7_000, 2.0, 5), (300_000, 3.0, 4), (1_000, 1.5, 0)]


def sample() -> tuple[Sample, AvailabilityPaths]:
    """Return five groups: delivered at first, after a retry, and given up, on two paths."""
    arrivals = Arrivals(
        bins=np.array([100, 101, 111, 112, 130]),
        tries=np.array([1, 2, 3, 3, 2]),
        delivered=np.array([1, 1, 0, 0, 1]),
        count=np.array([9, 2, 4, 1, 1]),
    )
    paths = AvailabilityPaths(
        timeline=TIMELINE, rates=RATES, undeliverable=np.array([[1, 0], [4, 1]])
    )
    return sample_of(arrivals, NOTHING, paths), paths


def one_by_one(paths: AvailabilityPaths, offsets_s: Floats) -> PolicyEffect:
    """Simulate delivery by delivery, attempt by attempt."""
    tried = waited = 0.0
    delivered = np.zeros(len(offsets_s))
    for path in range(2):
        lost = {111: paths.undeliverable[path, 0], 112: paths.undeliverable[path, 1]}
        delivered[0] += 9
        tried += 9
        for first, count in ((101, 2), (111, 4), (112, 1), (130, 1)):
            left = float(count - lost.get(first, 0))
            tried += lost.get(first, 0) * len(offsets_s) + left
            for number, offset in enumerate(offsets_s[1:].tolist(), 1):
                at = np.array([first + 0.5 + offset / BIN_S])
                share = float(paths.rates[path, paths.timeline.blocks_at(at)[0]])
                tried += left
                delivered[number] += left * share
                left *= 1 - share
        waited = float(delivered @ offsets_s)
    late = next(
        at
        for at, sum_ in zip(offsets_s, np.cumsum(delivered), strict=True)
        if sum_ >= 0.95 * delivered.sum()
    )
    return PolicyEffect(
        delivered=delivered.sum() / 34,
        attempts=tried / 34,
        mean_wait_s=waited / delivered.sum(),
        p95_wait_s=float(late),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_simulation_equals_simulations_of_each_delivery(policy: tuple[float, float, int]) -> None:
    delay_ms, multiplier, attempts = policy
    some, paths = sample()
    longest = Policy(delay_ms=delay_ms, multiplier=multiplier, attempts=attempts).offsets_s()
    found = simulate(some, paths, longest)
    for number in range(attempts + 1):
        offsets = Policy(delay_ms=delay_ms, multiplier=multiplier, attempts=number).offsets_s()
        wanted = one_by_one(paths, offsets)
        for effect in (found.effects[number], simulate(some, paths, offsets).effects[number]):
            for name in ("delivered", "attempts", "mean_wait_s", "p95_wait_s"):
                assert getattr(effect, name) == pytest.approx(getattr(wanted, name), rel=1e-9)


def test_what_was_delivered_at_first_stays_delivered() -> None:
    some, paths = sample()
    never = AvailabilityPaths(
        timeline=TIMELINE, rates=np.zeros_like(RATES), undeliverable=paths.undeliverable
    )
    effect = simulate(some, never, np.array([0.0, 60.0])).effects[1]
    assert effect == PolicyEffect(
        delivered=9 / 17, attempts=25 / 17, mean_wait_s=0.0, p95_wait_s=0.0
    )


def test_a_terminal_status_ends_a_delivery_under_every_policy() -> None:
    terminal = Arrivals(
        bins=np.array([120]), tries=np.array([1]), delivered=np.array([0]), count=np.array([3])
    )
    arrivals = Arrivals(
        bins=np.array([100, 101]), tries=np.array([1, 2]), delivered=np.array([1, 1]),
        count=np.array([5, 2]),
    )  # fmt: skip
    paths = AvailabilityPaths(
        timeline=TIMELINE, rates=np.ones_like(RATES), undeliverable=np.zeros((2, 0), dtype=np.int64)
    )
    some = sample_of(arrivals, terminal, paths)
    effect = simulate(some, paths, np.array([0.0, 10.0, 20.0])).effects[2]
    assert (effect.delivered, effect.attempts) == (0.7, 1.2)


def test_a_cap_bounds_every_wait() -> None:
    policy = Policy(delay_ms=1000, multiplier=3.0, attempts=4, max_delay_ms=5000)
    assert policy.waits_s().tolist() == [1, 3, 5, 5]
    assert policy.offsets_s().tolist() == [0, 1, 4, 9, 14]


def test_replicates_of_one_policy_contain_its_effect() -> None:
    some, paths = sample()
    bootstrap = Bootstrap.of(some, np.random.default_rng(5))
    offsets = np.array([0.0, 15.0, 45.0])
    found = range_of(bootstrap.replicates(some, paths, offsets))
    effect = simulate(some, paths, offsets).effects[2]
    for name in ("delivered", "attempts", "mean_wait_s"):
        low, high = getattr(found, name)
        assert low <= getattr(effect, name) <= high
    # No episode at all may occur: then everything is delivered at the first attempt.
    assert found.delivered[1] == 1.0
    assert found.attempts[0] == 1.0


def test_the_front_has_what_nothing_beats() -> None:
    def effect(delivered: float, attempts: float, wait: float) -> PolicyEffect:
        return PolicyEffect(
            delivered=delivered, attempts=attempts, mean_wait_s=wait, p95_wait_s=wait
        )

    effects = [
        effect(0.9, 1.0, 5), effect(0.9, 1.1, 5), effect(0.95, 1.2, 9), effect(0.95, 1.2, 9),
        effect(0.94, 1.2, 9), effect(0.8, 1.0, 1),
    ]  # fmt: skip
    assert pareto_front(effects) == [0, 2, 3, 5]
