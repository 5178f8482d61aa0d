"""Test that a replay of many sets at once equals a replay of each delivery."""

import numpy as np
import pytest

from delivery.analytics.spark.counts import BIN_S, Floats, Ints
from delivery.analytics.spark.replay import (
    Arrivals,
    Availability,
    Policy,
    PolicyEffect,
    PolicyReplay,
    replay_policy,
)

HOPELESS = 0.03
# With gaps, one of them a whole outage, and the last bin long before the last attempt.
BINS: Ints = np.array([100, 101, 102, 105, 111, 112, 113, 114, 130, 131])
ATTEMPTS = np.array([4.0, 5, 3, 2, 6, 2, 2, 4, 1, 3])
SUCCESSES = np.array([4.0, 4, 3, 1, 0, 0, 0, 1, 1, 3])


def arrivals(bins: list[int], count: list[int]) -> Arrivals:
    some = np.array(bins)
    return Arrivals(
        bins=some, tries=np.ones_like(some), delivered=np.ones_like(some), count=np.array(count)
    )


def one_by_one(came: Arrivals, offsets_s: Floats) -> PolicyEffect:
    """Replay delivery by delivery, attempt by attempt."""
    total = float(came.count.sum())
    tried, delivered = 0.0, np.zeros(len(offsets_s))
    for first, count in zip(came.bins.tolist(), came.count.tolist(), strict=True):
        left = 1.0
        for number, offset in enumerate(offsets_s.tolist()):
            share = float(np.interp(first + offset / BIN_S, BINS, SUCCESSES / ATTEMPTS))
            tried += count * left
            delivered[number] += count * left * share * (1 - HOPELESS)
            left *= 1 - share
    late = next(
        at
        for at, sum_ in zip(offsets_s, np.cumsum(delivered), strict=True)
        if sum_ >= 0.95 * delivered.sum()
    )
    return PolicyEffect(
        delivered=delivered.sum() / total,
        attempts=tried / total * (1 - HOPELESS) + HOPELESS * len(offsets_s),
        mean_wait_s=float(delivered @ offsets_s) / delivered.sum(),
        p95_wait_s=float(late),
    )


def close(one: PolicyEffect, other: PolicyEffect) -> bool:
    names = ("delivered", "attempts", "mean_wait_s", "p95_wait_s")
    return all(
        getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9) for name in names
    )


@pytest.mark.parametrize(
    "policy", [(20_000, 1.0, 6), (7_000, 2.0, 5), (300_000, 3.0, 4), (1_000, 1.5, 0)]
)
def test_all_policies_and_sets_equal_single_replays(policy: tuple[float, float, int]) -> None:
    delay_ms, multiplier, attempts = policy
    sets = [arrivals([100, 105, 111, 111, 113], [3, 1, 2, 4, 1]), arrivals([131, 112], [2, 9])]
    available = Availability(BINS, ATTEMPTS, SUCCESSES)
    longest = Policy(delay_ms=delay_ms, multiplier=multiplier, attempts=attempts).offsets_s()
    found = PolicyReplay(sets, available, HOPELESS).effects(longest)
    assert [len(of_set) for of_set in found] == [attempts + 1] * len(sets)
    for came, of_set in zip(sets, found, strict=True):
        for number, effect in enumerate(of_set):
            offsets = Policy(delay_ms=delay_ms, multiplier=multiplier, attempts=number).offsets_s()
            assert close(effect, one_by_one(came, offsets))
            assert close(effect, replay_policy(came, available, HOPELESS, offsets))


def test_without_success_there_is_no_wait() -> None:
    came = arrivals([111], [5])
    effect = replay_policy(
        came, Availability(BINS, ATTEMPTS, np.zeros(len(BINS))), 0.0, np.array([0.0, 60.0])
    )
    assert effect == PolicyEffect(delivered=0.0, attempts=2.0, mean_wait_s=0.0, p95_wait_s=0.0)
