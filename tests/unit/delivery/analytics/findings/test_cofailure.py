"""Test which pairs of subscriptions are significant."""

import tracemalloc
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from delivery.analytics.findings import cofailure
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


YEAR = 365 * 24 * 60


def sparse(key: int, minutes: np.ndarray, failures: np.ndarray) -> FailureSeries:
    return FailureSeries(
        key=key, minutes=minutes, attempts=failures, failures=failures, first_failures=failures
    )


def test_counts_and_correlations_are_those_of_whole_series() -> None:
    rng = np.random.default_rng(4)
    dense = rng.poisson(0.3, size=(6, 6_000)) * rng.integers(1, 5, size=(6, 6_000))
    series = [sparse(key, np.flatnonzero(row), row[row > 0]) for key, row in enumerate(dense)]
    found = find_cofailures(series, first=0, minutes=6_000, bad_minutes={}, kin={})
    assert len(found) == 15
    correlation = np.corrcoef(dense)
    bad = (dense > 1).astype(np.int64)
    for pair in found:
        assert pair.pearson == pytest.approx(correlation[pair.first, pair.second], abs=1e-6)
        assert pair.bad_both == bad[pair.first] @ bad[pair.second]


@pytest.mark.parametrize("share", [0.02, 0.4, 0.9])
@pytest.mark.parametrize("length", [1, 7])
def test_common_minutes_by_lag_are_the_same_by_each_method(share: float, length: int) -> None:
    rng = np.random.default_rng(5)
    for span in (50, 97, 3_000):
        a, b = (
            np.flatnonzero(np.repeat(rng.random(span // length + 1) < share, length)[:span])
            for _ in range(2)
        )
        if not (len(a) and len(b)):
            continue
        expected = np.bincount(((a[:, None] - b[None, :]) % span).ravel(), minlength=span)
        np.testing.assert_array_equal(cofailure._common_by_lag(a, b, span), expected)
        edges = cofailure._edges(a), cofailure._edges(b)
        np.testing.assert_array_equal(cofailure._common_of_runs(*edges, span), expected)


def test_a_year_of_outages_needs_no_more_memory_than_a_month() -> None:
    """Two hundred series fail for 3,000 minutes each, together with their neighbours."""
    series = [sparse(key, np.arange(3_000) + 2_500 * key, np.full(3_000, 2)) for key in range(200)]
    tracemalloc.start()
    try:
        found = find_cofailures(series, first=0, minutes=YEAR, bad_minutes={}, kin={})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [pair.bad_both for pair in found] == [500] * 199
    # One matrix of all minutes would have 400 MiB.
    assert peak < 150 * 2**20


def test_the_strongest_pairs_of_a_long_log_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each test reads the log, its pairs times its minutes are bounded."""
    tested: list[int] = []
    p_value = cofailure._p_value

    def counted(*given: object, **named: object) -> float:
        tested.append(1)
        return p_value(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(cofailure, "_p_value", counted)
    monkeypatch.setattr(cofailure, "_PAIR_MINUTES", 5 * YEAR)
    outages = [
        sparse(key, np.arange(100 + 10 * key), np.full(100 + 10 * key, 2)) for key in range(9)
    ]
    found = find_cofailures(outages, first=0, minutes=YEAR, bad_minutes={}, kin={})
    assert len(tested) == len(found) == 5
    assert min(pair.phi for pair in found) > 0.9
