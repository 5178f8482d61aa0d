"""Hold the scores of incidents on worlds of eleven kinds, on three seeds each.

The least values are just below those of the tuning seeds. `make bench BENCH=incidents` measures
seeds on which nothing was tuned.
"""

import pytest

from tests.support.failure_scenarios import HELD_OUT_SEEDS, SCENARIOS, TUNING_SEEDS
from tests.support.world_scores import score_worlds

LEAST = {
    "hosts": {"recall": 0.95, "precision": 0.95, "pairs": 0.95},
    "networks": {"recall": 0.95, "precision": 0.95, "pairs": 0.95},
    "versions": {"recall": 0.95, "precision": 0.9},
    "machines": {"recall": 0.95, "precision": 0.95},
    "partial": {"recall": 0.75, "precision": 0.9},
    "flapping": {"recall": 0.9, "precision": 0.85, "pairs": 0.95},
    "cascades": {"recall": 0.9, "precision": 0.95, "pairs": 0.9},
    "quiet": {"recall": 0.9, "precision": 0.9, "pairs": 0.9},
    "nightly": {"recall": 0.95, "precision": 0.95},
    "mixture": {"recall": 0.9, "precision": 0.9, "pairs": 0.9},
}
MOST_ERROR_S = {"begin error s": 30.0, "end error s": 20.0}
UNSURE = {
    "quiet": {"begin error s": 120.0},
    "partial": {"begin error s": 60.0, "end error s": 60.0},
}
"""Errors that little traffic and partial outages leave."""


def test_no_seed_is_both_tuned_on_and_held_out() -> None:
    assert set(TUNING_SEEDS).isdisjoint(HELD_OUT_SEEDS)
    assert set(SCENARIOS) == {"noise", *LEAST}


def test_noise_makes_no_incident() -> None:
    scores = score_worlds("noise", TUNING_SEEDS)
    assert scores.incidents.found == 0
    assert scores.significant == 0


@pytest.mark.parametrize("scenario", LEAST)
def test_incidents_of_a_kind_of_world_are_found_and_explained(scenario: str) -> None:
    scores = score_worlds(scenario, TUNING_SEEDS)
    values = scores.values()
    for name, least in LEAST[scenario].items():
        assert values[name] >= least, (name, values)
    assert values["right cause first"] >= 0.9, values
    assert values["begin in range"] >= 0.8, values
    assert values["end in range"] >= 0.75, values
    for name, most in {**MOST_ERROR_S, **UNSURE.get(scenario, {})}.items():
        assert values[name] <= most, (name, values)
    assert scores.significant_by_chance <= max(2, 0.15 * scores.significant)
