"""Test which pairs of subscriptions are significant."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from delivery.analytics.findings.cofailure import CofailurePair, find_cofailures
from delivery.analytics.findings.series import FailureSeries
from tests.support.incident_scores import average_precision

DAYS = 3
MINUTES = DAYS * 24 * 60
Outage = tuple[int, int]
"""First minute and number of minutes."""


def series(key: int, outages: Iterable[Outage]) -> FailureSeries:
    minutes = np.arange(MINUTES)
    failing = np.zeros(MINUTES, dtype=np.int64)
    for begin, length in outages:
        failing[begin : begin + length] = 1
    return FailureSeries(
        key=key,
        minutes=minutes,
        attempts=np.full(MINUTES, 3),
        failures=failing * 3,
        first_failures=failing,
    )


def pairs_of(
    outages: Sequence[Sequence[Outage]], *, hosts: Sequence[str] | None = None
) -> list[CofailurePair]:
    kin = {} if hosts is None else {key: frozenset({host}) for key, host in enumerate(hosts)}
    return find_cofailures(
        [series(key, some) for key, some in enumerate(outages)],
        first=0,
        minutes=MINUTES,
        bad_minutes={},
        kin=kin,
    )


def test_pairs_stay_significant_among_two_thousand_subscriptions() -> None:
    rng = np.random.default_rng(1)
    outages: list[list[Outage]] = []
    for _ in range(50):
        begins = np.sort(rng.choice(MINUTES - 60, 3, replace=False)).tolist()
        common = [(begin, int(rng.integers(8, 30))) for begin in begins]
        outages += [common] * 4
    while len(outages) < 2_000:
        begins = rng.choice(MINUTES - 60, 2, replace=False).tolist()
        outages.append([(begin, int(rng.integers(8, 30))) for begin in begins])
    found = pairs_of(outages, hosts=[f"host-{key // 4}" for key in range(2_000)])
    true = {
        (a, b) for g in range(50) for a in range(4 * g, 4 * g + 4) for b in range(a + 1, 4 * g + 4)
    }
    called = [(pair.first, pair.second) for pair in found if pair.significant]
    assert len(true & set(called)) >= 0.95 * len(true)
    assert len(set(called) - true) <= 0.06 * len(called)
    assert average_precision([(pair.first, pair.second) for pair in found], true) >= 0.95


def test_a_tail_is_below_one_by_the_length_of_the_log() -> None:
    together = [(300, 20), (1500, 25), (3100, 15)]
    (pair,) = pairs_of([together, together, [(2000, 20)]])
    assert (pair.first, pair.second, pair.bad_both) == (0, 1, 60)
    assert pair.p < 1 / MINUTES / 100
    assert pair.significant


def test_one_coincidence_in_a_crowd_is_not_significant() -> None:
    rng = np.random.default_rng(2)
    outages = [[(int(begin), 20)] for begin in rng.choice(MINUTES - 60, 300, replace=False)]
    assert not any(pair.significant for pair in pairs_of(outages))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_nightly_habit_of_each_is_no_relation(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def nights() -> list[Outage]:
        return [(day * 1440 + 120 + int(rng.integers(0, 8)), 25) for day in range(DAYS)]

    assert not any(pair.significant for pair in pairs_of([nights() for _ in range(6)]))


def test_bad_minutes_of_incidents_count_beside_those_of_the_series() -> None:
    found = find_cofailures(
        [series(0, []), series(1, [])],
        first=0,
        minutes=MINUTES,
        bad_minutes={0: np.arange(100, 130), 1: np.arange(100, 130)},
        kin={},
    )
    assert [(pair.bad_first, pair.bad_second, pair.bad_both) for pair in found] == [(30, 30, 30)]
