"""Test shared outages in noise: pairs, incidents, causes and retry advice."""

from datetime import UTC, datetime
from itertools import combinations

import numpy as np
import pytest

from tests.support.analysis_logs import CHRONIC, HOSTS, SHARED, SHARING
from tests.support.analysis_run import Analysed
from tests.support.planted_outages import Planted
from tests.support.sealed_segments import START_S


def test_pairs_of_a_shared_host_rank_first(together: Analysed, sharing: Planted) -> None:
    ids = sharing.truth.subscriptions
    true = {
        tuple(sorted((ids[a], ids[b])))
        for some in SHARED.values()
        for a, b in combinations(some, 2)
    }
    ranked = [(row["first_id"], row["second_id"]) for row in together.rows("cofailures")]
    hits, precision = 0, 0.0
    for place, pair in enumerate(ranked, 1):
        if pair in true:
            hits += 1
            precision += hits / place
    assert precision / len(true) >= 0.95
    called = [row for row in together.rows("cofailures") if row["significant"]]
    chance = [row for row in called if (row["first_id"], row["second_id"]) not in true]
    assert len(chance) <= 0.1 * len(called)


def test_finds_nine_of_ten_shared_outages_exactly(together: Analysed, sharing: Planted) -> None:
    ids = sharing.truth.subscriptions
    found = together.rows("incidents", "SELECT * FROM t WHERE kind = 'shared'")
    shared = [outage for outage in sharing.truth.outages if len(outage.subscriptions) > 1]
    recovered = 0
    for outage in shared:
        wanted = {ids[number] for number in outage.subscriptions}
        began, ended = (
            datetime.fromtimestamp(START_S + at, UTC) for at in (outage.begin_s, outage.end_s)
        )
        recovered += any(
            set(row["subscriptions"]) == wanted
            and (min(row["ended"], ended) - max(row["began"], began)) >= 0.6 * (ended - began)
            and (row["ended"] - row["began"]) <= 1.6 * (ended - began)
            for row in found
        )
    assert recovered >= 0.9 * len(shared)
    assert len(found) <= 1.3 * len(shared)


def test_chronic_failures_are_separate(together: Analysed, sharing: Planted) -> None:
    ids = sharing.truth.subscriptions
    chronic = {ids[number] for number in CHRONIC}
    result = together.rows("incidents")
    assert {
        one for row in result if row["kind"] == "chronic" for one in row["subscriptions"]
    } == chronic
    assert not any(
        set(row["subscriptions"]) & chronic for row in result if row["kind"] != "chronic"
    )


def test_the_root_cause_is_the_failed_host(together: Analysed, sharing: Planted) -> None:
    ids = sharing.truth.subscriptions
    hosts = {ids[number]: f"host-{host}.example" for number, host in HOSTS.items()}
    right = seen = 0
    for row in together.rows("incidents", "SELECT * FROM t WHERE kind = 'shared'"):
        of = {hosts.get(one) for one in row["subscriptions"]}
        if len(of) == 1 and None not in of:  # failures that coincide by chance have no common cause
            seen += 1
            causes = [cause for cause in row["causes"] if cause["attribute"] == "target_host"]
            right += bool(causes) and causes[0]["value"] in of and causes[0]["inside"] > 0.9
    assert seen >= 15
    assert right >= 0.9 * seen


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
    held = [row for row in advised if row["held_up"]]
    assert len(held) >= 0.9 * len(advised)
    assert all(row["recommended_delivered"] >= row["replayed_delivered"] - 0.001 for row in advised)
    # Four retries end after 11 minutes; more retries would outlast outages of half an hour.
    better = [
        row for row in advised if row["recommended_delivered"] > row["measured_delivered"] + 0.005
    ]
    assert len(better) > len(advised) / 3


def test_the_front_has_the_recommendation_and_only_optimal_policies(
    together: Analysed,
) -> None:
    fronts: dict[str, list[tuple[float, float, float]]] = {}
    for row in together.rows("advice_front"):
        result = (-row["expected_delivered"], row["expected_attempts"], row["expected_mean_wait_s"])
        fronts.setdefault(row["subscription_id"], []).append(result)
    for row in together.rows("advice"):
        front = np.array(fronts[row["subscription_id"]])
        assert (front[:, 0] == -row["recommended_delivered"]).any()
        # Each policy is better than every other one in some respect.
        less = (front[:, None] < front).any(axis=2)
        assert (less == less.T).all()
