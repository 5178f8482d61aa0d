"""Test shared outages in noise: pairs, incidents and causes."""

from datetime import UTC, datetime
from itertools import combinations

from tests.support.analysis_logs import CHRONIC, HOSTS, SHARED
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
