"""What tries would have done, looked up for many at once, is what each of them does by itself."""

import numpy as np
import pytest

from delivery.correlation.cells import BIN_S
from delivery.correlation.replay import Arrivals, Availability, Effect, Policy, Replay, replay
from delivery.correlation.series import Floats, Ints

HOPELESS = 0.03
# Bins without attempts in between, a whole outage among them, and the last one long before the last try.
BINS: Ints = np.array([100, 101, 102, 105, 111, 112, 113, 114, 130, 131])
ATTEMPTS = np.array([4.0, 5, 3, 2, 6, 2, 2, 4, 1, 3])
SUCCESSES = np.array([4.0, 4, 3, 1, 0, 0, 0, 1, 1, 3])


def arrivals(bins: list[int], count: list[int]) -> Arrivals:
    some = np.array(bins)
    return Arrivals(bins=some, tries=np.ones_like(some), delivered=np.ones_like(some), count=np.array(count))


def one_by_one(came: Arrivals, offsets_s: Floats) -> Effect:
    """Delivery by delivery, try by try."""
    total = float(came.count.sum())
    tried, delivered = 0.0, np.zeros(len(offsets_s))
    for first, count in zip(came.bins.tolist(), came.count.tolist(), strict=True):
        left = 1.0
        for number, offset in enumerate(offsets_s.tolist()):
            share = float(np.interp(first + offset / BIN_S, BINS, SUCCESSES / ATTEMPTS))
            tried += count * left
            delivered[number] += count * left * share * (1 - HOPELESS)
            left *= 1 - share
    late = next(at for at, sum_ in zip(offsets_s, np.cumsum(delivered), strict=True) if sum_ >= 0.95 * delivered.sum())
    return Effect(
        delivered=delivered.sum() / total,
        attempts=tried / total * (1 - HOPELESS) + HOPELESS * len(offsets_s),
        mean_wait_s=float(delivered @ offsets_s) / delivered.sum(),
        p95_wait_s=float(late),
    )


def close(one: Effect, other: Effect) -> bool:
    names = ("delivered", "attempts", "mean_wait_s", "p95_wait_s")
    return all(getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9) for name in names)


@pytest.mark.parametrize("policy", [(20_000, 1.0, 6), (7_000, 2.0, 5), (300_000, 3.0, 4), (1_000, 1.5, 0)])
def test_every_policy_and_every_set_at_once(policy: tuple[float, float, int]) -> None:
    delay_ms, multiplier, attempts = policy
    sets = [arrivals([100, 105, 111, 111, 113], [3, 1, 2, 4, 1]), arrivals([131, 112], [2, 9])]
    available = Availability(BINS, ATTEMPTS, SUCCESSES)
    longest = Policy(delay_ms=delay_ms, multiplier=multiplier, attempts=attempts).offsets_s()
    found = Replay(sets, available, HOPELESS).effects(longest)
    assert [len(of_set) for of_set in found] == [attempts + 1] * len(sets)
    for came, of_set in zip(sets, found, strict=True):
        for number, effect in enumerate(of_set):
            offsets = Policy(delay_ms=delay_ms, multiplier=multiplier, attempts=number).offsets_s()
            assert close(effect, one_by_one(came, offsets))
            assert close(effect, replay(came, available, HOPELESS, offsets))


def test_where_nothing_succeeds_nothing_is_waited_for() -> None:
    came = arrivals([111], [5])
    effect = replay(came, Availability(BINS, ATTEMPTS, np.zeros(len(BINS))), 0.0, np.array([0.0, 60.0]))
    assert effect == Effect(delivered=0.0, attempts=2.0, mean_wait_s=0.0, p95_wait_s=0.0)
