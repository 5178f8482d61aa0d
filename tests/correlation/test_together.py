"""Shared outages in noise: who fails with whom, when, why, and how retries should be set."""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import combinations

import numpy as np
import pytest

from tests.correlation.analysed import Analyse, Analysed
from tests.correlation.planted import Outage, Planted, Town, plant
from tests.correlation.sealed import START_S

_HOSTS = {0: 0, 6: 0, 12: 0, 18: 0, 1: 1, 7: 1, 13: 1, 2: 2, 8: 2, 14: 2, 20: 2, 3: 3, 9: 3, 27: 3, 28: 3}
SHARED = {host: tuple(number for number, of in _HOSTS.items() if of == host) for host in range(4)}
_CHRONIC = {5: 0.9, 11: 0.7, 17: 0.6}
_MINUTES = 60 * 48


def outages(seed: int) -> list[Outage]:
    """Each shared host is out five times, some of them partly, some overlapping; others fail alone."""
    rng = np.random.default_rng(seed)
    found = []
    for slot in range(20):
        host = slot % 4
        begin = (120 + slot * 128 + int(rng.integers(0, 40))) * 60 + int(rng.integers(0, 60))
        share = 1.0 if slot % 3 else 0.75
        length = int(rng.integers(14, 30)) * 60
        found.append(Outage(begin_s=begin, end_s=begin + length, subscriptions=SHARED[host], share=share))
    # Two that overlap: the second begins in the middle of the first.
    found.append(Outage(begin_s=2705 * 60, end_s=2730 * 60, subscriptions=SHARED[0]))
    found.append(Outage(begin_s=2717 * 60, end_s=2745 * 60, subscriptions=SHARED[1]))
    alone = [4, 10, 15, 16, 19, 21, 22, 23, 24, 25]
    for number in alone:
        begins = rng.integers(60, _MINUTES - 90, 4).tolist()
        found += [Outage(begin_s=at * 60, end_s=(at + 12) * 60, subscriptions=(number,)) for at in begins]
    return found


TOWN = Town(
    seed=23, minutes=_MINUTES, rooms=5, per_room=6, a_minute=[1.5, 1.2, 1.5, 1.2, 0.5], hosts=_HOSTS, outages=outages(77),
    chronic=_CHRONIC, noise=0.02, hopeless=0.004, attempts=4, delay_s=45.0, skew_s=(0.0, 30.0, -30.0, 0.0, 45.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def planted() -> Planted:
    return plant(TOWN)


@pytest.fixture(scope="module")
def analysed(analyse: Analyse, planted: Planted) -> Iterator[Analysed]:
    with pytest.MonkeyPatch.context() as patch:
        yield analyse.by_command(planted.rows, patch)


def test_pairs_that_share_a_host_come_before_all_others(analysed: Analysed, planted: Planted) -> None:
    ids = planted.truth.subscriptions
    true = {tuple(sorted((ids[a], ids[b]))) for some in SHARED.values() for a, b in combinations(some, 2)}
    ranked = [(row["first_id"], row["second_id"]) for row in analysed.rows("cofailures")]
    hits, precision = 0, 0.0
    for place, pair in enumerate(ranked, 1):
        if pair in true:
            hits += 1
            precision += hits / place
    assert precision / len(true) >= 0.95
    called = [row for row in analysed.rows("cofailures") if row["significant"]]
    chance = [row for row in called if (row["first_id"], row["second_id"]) not in true]
    assert len(chance) <= 0.1 * len(called)


def test_nine_of_ten_shared_outages_are_found_with_exactly_their_subscriptions(
    analysed: Analysed, planted: Planted
) -> None:
    ids = planted.truth.subscriptions
    found = analysed.rows("incidents", "SELECT * FROM t WHERE kind = 'shared'")
    shared = [outage for outage in planted.truth.outages if len(outage.subscriptions) > 1]
    recovered = 0
    for outage in shared:
        wanted = {ids[number] for number in outage.subscriptions}
        began, ended = (datetime.fromtimestamp(START_S + at, UTC) for at in (outage.begin_s, outage.end_s))
        recovered += any(
            set(row["subscriptions"]) == wanted
            and (min(row["ended"], ended) - max(row["began"], began)) >= 0.6 * (ended - began)
            and (row["ended"] - row["began"]) <= 1.6 * (ended - began)
            for row in found
        )
    assert recovered >= 0.9 * len(shared)
    assert len(found) <= 1.3 * len(shared)


def test_chronic_failures_stand_apart(analysed: Analysed, planted: Planted) -> None:
    ids = planted.truth.subscriptions
    chronic = {ids[number] for number in _CHRONIC}
    told = analysed.rows("incidents")
    assert {one for row in told if row["kind"] == "chronic" for one in row["subscriptions"]} == chronic
    assert not any(set(row["subscriptions"]) & chronic for row in told if row["kind"] != "chronic")


def test_incidents_are_explained_by_the_host_that_was_out(analysed: Analysed, planted: Planted) -> None:
    ids = planted.truth.subscriptions
    hosts = {ids[number]: f"host-{host}.example" for number, host in _HOSTS.items()}
    right = seen = 0
    for row in analysed.rows("incidents", "SELECT * FROM t WHERE kind = 'shared'"):
        of = {hosts.get(one) for one in row["subscriptions"]}
        if len(of) == 1 and None not in of:  # what fails at the same time by chance has nothing in common
            seen += 1
            causes = [cause for cause in row["causes"] if cause["attribute"] == "target_host"]
            right += bool(causes) and causes[0]["value"] in of and causes[0]["inside"] > 0.9
    assert seen >= 15
    assert right >= 0.9 * seen


def test_advice_rests_on_a_replay_that_gives_what_was_measured(analysed: Analysed) -> None:
    advised = analysed.rows("advice")
    assert len(advised) >= 25
    for row in advised:
        assert abs(row["measured_delivered"] - row["replayed_delivered"]) <= 0.01, row["subscription_id"]
        assert abs(row["measured_attempts"] - row["replayed_attempts"]) <= 0.05 * row["measured_attempts"]
        assert row["reproduced"]
        assert row["deployed_redeliveries"] == TOWN.attempts
        assert row["deployed_delay_ms"] == pytest.approx(TOWN.delay_s * 1000)
        assert row["deployed_multiplier"] == pytest.approx(TOWN.multiplier, rel=0.05)


def test_advice_is_no_worse_and_stands_the_test_of_later_data(analysed: Analysed) -> None:
    advised = analysed.rows("advice")
    held = [row for row in advised if row["held_up"]]
    assert len(held) >= 0.9 * len(advised)
    assert all(row["recommended_delivered"] >= row["replayed_delivered"] - 0.001 for row in advised)
    # Four retries end after 11 minutes: outages of half an hour are what longer ones would have outlived.
    better = [row for row in advised if row["recommended_delivered"] > row["measured_delivered"] + 0.005]
    assert len(better) > len(advised) / 3


def test_the_front_holds_the_recommendation_and_no_policy_that_another_beats(analysed: Analysed) -> None:
    fronts: dict[str, list[tuple[float, float, float]]] = {}
    for row in analysed.rows("advice_front"):
        told = (-row["expected_delivered"], row["expected_attempts"], row["expected_mean_wait_s"])
        fronts.setdefault(row["subscription_id"], []).append(told)
    for row in analysed.rows("advice"):
        front = fronts[row["subscription_id"]]
        assert any(one[0] == -row["recommended_delivered"] for one in front)
        for one, other in combinations(front, 2):
            assert any(a < b for a, b in zip(one, other, strict=True)) == any(
                b < a for a, b in zip(one, other, strict=True)
            )
