"""Test who has advice, and who is compared, where there are too many subscriptions."""

import numpy as np
import pytest

from delivery.analytics.findings import cofailure
from delivery.analytics.findings.advice import MAX_ADVISED, advised_keys
from delivery.analytics.findings.series import FailureSeries
from delivery.analytics.findings.turns import take_turns


def test_each_room_has_its_turn_and_the_greatest_comes_first() -> None:
    rooms, weights = np.array([7, 7, 7, 3, 3, 9]), np.array([50, 90, 70, 5, 6, 1])
    assert take_turns(rooms, weights, 4).tolist() == [1, 4, 5, 2]
    assert sorted(take_turns(rooms, weights, 10).tolist()) == [0, 1, 2, 3, 4, 5]
    assert take_turns(np.zeros(3, np.int64), np.ones(3, np.int64), 2).tolist() == [0, 1]
    assert take_turns(np.zeros(0, np.int64), np.zeros(0, np.int64), 2).tolist() == []


def test_a_room_of_failing_subscriptions_leaves_advice_to_the_others() -> None:
    loud = [{"room_id": 1, "sub_key": key, "attempts": 900, "successes": 0} for key in range(2000)]
    quiet = {"room_id": 2, "sub_key": 5000, "attempts": 900, "successes": 800}
    keys = advised_keys([*loud, quiet])
    assert len(keys) == MAX_ADVISED
    assert keys == sorted(keys)
    assert 5000 in keys


def test_a_room_of_failing_subscriptions_leaves_pairs_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cofailure, "MAX_SUBSCRIPTIONS", 10)

    def failing(key: int, *minutes: int) -> FailureSeries:
        at = np.array(minutes, dtype=np.int64)
        tried = np.full(len(at), 5)
        return FailureSeries(
            key=key, minutes=at, attempts=tried, failures=tried, first_failures=tried
        )

    loud = [failing(key, *range(key, 4000, 7)) for key in range(40)]
    quiet = [failing(key, 100, 900, 901, 2500) for key in (90, 91)]
    found = cofailure.find_cofailures(
        [*loud, *quiet],
        first=0,
        minutes=4320,
        bad_minutes={},
        kin={},
        rooms={90: 2, 91: 2},
    )
    assert (90, 91) in {(pair.first, pair.second) for pair in found}
