"""Test with unseen seeds, without Spark, how many planted incidents are found."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest

from delivery.analytics.findings import scan
from delivery.analytics.findings.cells import LOGGED, AttemptCells
from delivery.analytics.findings.incidents import CHRONIC, SHARED, SINGLE, Incident
from delivery.analytics.findings.results import CofailureResult, incident_rows
from tests.support.analysis_logs import CHRONIC as CHRONIC_SUBSCRIPTIONS
from tests.support.analysis_logs import SHARED as GROUPS
from tests.support.analysis_logs import SHARING, outages
from tests.support.counted_logs import count_cells
from tests.support.planted_outages import Outage, plant
from tests.support.sealed_segments import START_S


@pytest.mark.parametrize("seed", [901, 902])
def test_finds_incidents_with_other_seeds(seed: int) -> None:
    planted = plant(replace(SHARING, seed=seed, outages=outages(seed + 100)))
    cells, ids = count_cells(planted.rows)
    found = CofailureResult.from_cells(cells)
    sub = planted.truth.subscriptions
    true = {
        tuple(sorted((sub[a], sub[b])))
        for some in GROUPS.values()
        for a, b in combinations(some, 2)
    }
    hits, precision = 0, 0.0
    for place, pair in enumerate(found.pairs, 1):
        if (ids[pair.first], ids[pair.second]) in true:
            hits += 1
            precision += hits / place
    assert precision / len(true) >= 0.95
    shared = [outage for outage in planted.truth.outages if len(outage.subscriptions) > 1]
    keys = [ids.index(one) for one in sub]
    assert sum(_recovered(outage, found.incidents, keys) for outage in shared) >= 0.9 * len(shared)
    assert sum(one.kind == SHARED for one in found.incidents) <= 1.1 * len(shared)
    chronic = {one.keys for one in found.incidents if one.kind == CHRONIC}
    assert chronic == {(keys[number],) for number in CHRONIC_SUBSCRIPTIONS}


def _recovered(outage: Outage, found: Sequence[Incident], keys: Sequence[int]) -> bool:
    wanted = tuple(sorted(keys[number] for number in outage.subscriptions))
    begin, end = START_S + outage.begin_s, START_S + outage.end_s
    return any(
        incident.keys == wanted
        and min(incident.end.at, end) - max(incident.begin.at, begin) >= 0.9 * (end - begin)
        and incident.end.at - incident.begin.at <= 1.1 * (end - begin)
        for incident in found
    )


_PLAIN = {
    "room_id": "1", "target_host": "a.example", "event_type": "made", "event_version": "1",
    "worker_host": "machine", "worker_version": "1.0", "worker": "1", "error_class": None, "http_status": None,
}  # fmt: skip
Attempts = Sequence[tuple[int, float, bool]]
"""Subscription, second and whether it failed, of first attempts."""


_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in LOGGED),
        ("first", pa.bool_()),
        *(
            (name, pa.int64())
            for name in ("sub_key", "bin", "attempts", "sidelined", "policy_version")
        ),
    ]
)


def cells_of(tried: Attempts, **columns: Sequence[object]) -> AttemptCells:
    count = len(tried)
    data: dict[str, object] = {name: [_PLAIN[name]] * count for name in LOGGED}
    data |= {
        "error_class": ["timeout" if failed else None for _, _, failed in tried],
        "target_host": [f"host-{key}.example" for key, _, _ in tried],
        "first": [True] * count,
        "sub_key": [key for key, _, _ in tried],
        "bin": [int((START_S + at) // 5) for _, at, _ in tried],
        "attempts": [1] * count,
        "sidelined": [0] * count,
        "policy_version": [1] * count,
    }
    return AttemptCells.from_arrow(pa.table({**data, **columns}, schema=_SCHEMA))


def steady(key: int, *, until: float, every: float, fails: tuple[float, float]) -> Attempts:
    return [(key, at, fails[0] <= at < fails[1]) for at in np.arange(key, until, every).tolist()]


def found_in(attempts: Attempts, **columns: Sequence[object]) -> list[Incident]:
    return list(CofailureResult.from_cells(cells_of(attempts, **columns)).incidents)


def test_an_incident_ends_at_a_success_and_not_after_silence() -> None:
    # One message in half an hour: silence goes on longer than any outage of others.
    quiet = steady(1, until=90_000, every=1800, fails=(35_000, 50_000))
    (one,) = found_in([*quiet, *steady(2, until=90_000, every=60, fails=(-1, -1))])
    assert one.kind == SINGLE
    assert one.begin.low <= START_S + 35_000 <= one.begin.high
    assert one.end.low <= START_S + 50_000 <= one.end.high
    assert not one.open


def test_chronic_subscriptions_are_listed_up_to_a_limit_the_rooms_in_turns() -> None:
    # One room of a thousand dead endpoints, and another one with a single one, which fails less often.
    dead = [(key, at, True) for key in range(1000) for at in range(0, 36_000, 3000)]
    other = [(5000, at, at > 0) for at in range(0, 36_000, 3000)]
    well = steady(6000, until=36_000, every=60, fails=(-1, -1))
    tried = [*dead, *other, *well]
    found = found_in(tried, room_id=["2" if key == 5000 else "1" for key, _, _ in tried])
    chronic = [one for one in found if one.kind == CHRONIC]
    assert len(chronic) == 500
    assert (5000,) in {one.keys for one in chronic}
    # What is not listed is chronic all the same: it joins no incident.
    assert [one for one in found if one.kind != CHRONIC] == []


def test_a_room_with_too_many_incidents_hides_none_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "MAX_EXPLANATIONS", 20)
    many = [
        attempt
        for key in range(24)
        for attempt in steady(
            key, until=80_000, every=100, fails=(3000 * key + 500, 3000 * key + 5000)
        )
    ]
    # Another room has a single one, with less evidence than any of these.
    other = steady(50, until=80_000, every=500, fails=(40_000, 46_000))
    tried = [*many, *other]
    found = found_in(tried, room_id=["2" if key == 50 else "1" for key, _, _ in tried])
    assert len(found) == 20
    assert (50,) in {one.keys for one in found}


def test_chronic_incidents_have_the_failures_of_their_own_subscription() -> None:
    tried = [(key, at, at % 6000 < key * 1000) for key in (3, 5) for at in range(0, 72_000, 500)]
    for one in found_in(tried):
        assert one.kind == CHRONIC
        (key,) = one.keys
        assert len(one.rows) == one.failures == sum(failed for of, _, failed in tried if of == key)


@pytest.mark.parametrize(
    ("fails", "is_open"),
    [((0, 72_000), False), ((24_000, 90_000), True), ((0, 90_000), True)],
    ids=["recovered", "begun later", "always"],
)
def test_a_chronic_subscription_begins_and_ends_with_its_failures(
    *, fails: tuple[float, float], is_open: bool
) -> None:
    well = steady(2, until=86_400, every=30, fails=(-1, -1))
    (one,) = found_in([*steady(1, until=86_400, every=30, fails=fails), *well])
    assert one.kind == CHRONIC
    assert one.open is is_open
    assert one.begin.low - 60 <= START_S + fails[0] <= one.begin.high
    assert one.end.low - 60 <= START_S + min(fails[1], 86_400) <= one.end.high + 60


def test_a_chronic_subscription_that_fails_now_and_then_goes_on_in_a_pause() -> None:
    tried = [(1, at, at % 2000 < 600) for at in range(0, 86_400, 50)]
    well = steady(2, until=86_400, every=30, fails=(-1, -1))
    (one,) = found_in([*tried, *well])
    assert (one.kind, one.open) == (CHRONIC, True)


def test_what_goes_on_is_open() -> None:
    (one,) = found_in(
        [
            *steady(1, until=7200, every=30, fails=(6000, 9999)),
            *steady(2, until=7200, every=30, fails=(-1, -1)),
        ]
    )
    assert one.open
    assert one.end.at >= START_S + 7100


def test_what_stopped_long_before_the_log_ends_is_not_open() -> None:
    (one,) = found_in(
        [
            *steady(1, until=7200, every=30, fails=(6000, 9999)),
            *steady(2, until=40_000, every=30, fails=(-1, -1)),
        ]
    )
    assert not one.open


def test_unrelated_hosts_that_fail_and_recover_together_are_one_incident() -> None:
    rows = [
        attempt
        for key in range(6)
        for attempt in steady(
            key, until=40_000, every=30, fails=(9000, 10_800) if key in {1, 4} else (-1, -1)
        )
    ]
    (one,) = found_in(rows)
    assert (one.kind, one.keys, one.explained_by) == (SHARED, (1, 4), None)


def test_a_habit_of_failing_separately_keeps_incidents_apart() -> None:
    rows = []
    for key in range(6):
        spans = {1: (9000, 10_800), 4: (9000, 10_800)}
        own = steady(key, until=40_000, every=30, fails=spans.get(key, (-1, -1)))
        rows += [(k, at, failed or (key == 4 and 20_000 <= at < 22_000)) for k, at, failed in own]
    assert [one.keys for one in found_in(rows)] == [(1,), (4,), (4,)]


def test_retries_of_two_deliveries_are_no_incident() -> None:
    cells = cells_of(
        [
            *steady(1, until=3600, every=60, fails=(-1, -1)),
            *((1, 1801 + 10 * number, True) for number in range(12)),
        ],
        first=[*[True] * 60, *([True] * 2 + [False] * 10)],
    )
    assert CofailureResult.from_cells(cells).incidents == []


def test_costs_and_changes_are_of_the_incident() -> None:
    attempts = [
        *steady(1, until=7200, every=30, fails=(5400, 6600)),
        *steady(2, until=7200, every=30, fails=(-1, -1)),
    ]
    version = [2 if key == 1 and at >= 5300 else 1 for key, at, _ in attempts]
    # A sidelined delivery is a row without an attempt.
    sidelined = [(1, 6000.0, False), (2, 6000.0, False), (1, 7000.0, False)]
    whole = [*attempts, *sidelined]
    cells = cells_of(
        whole,
        policy_version=[*version, 2, 1, 2],
        attempts=[*[1] * len(attempts), 0, 0, 0],
        sidelined=[*[0] * len(attempts), 1, 1, 1],
        first=[*[True] * len(attempts), False, False, False],
    )
    found = CofailureResult.from_cells(cells)
    (row,) = incident_rows(found, {1: "one", 2: "two"})
    assert (row["failures"], row["late"], row["sidelined"], row["earlier"]) == (40, 40, 1, 0)
    (change,) = row["changes"]
    assert (change["attribute"], change["value"]) == ("policy_version", "2")
    assert change["subscription_id"] == "one"
    assert row["causes"][0]["value"] == "host-1.example"
    assert row["began_from"] <= row["began"] <= row["began_to"]


def test_deliveries_whose_last_attempt_outlasts_the_incident_are_sidelined_by_it() -> None:
    # The endpoint hangs for a moment, and answers long before these attempts time out.
    well = [
        *steady(1, until=7200, every=10, fails=(-1, -1)),
        *steady(2, until=7200, every=10, fails=(-1, -1)),
    ]
    hung = [(1, 3600.0 + number / 5, True) for number in range(30)]
    sidelined = [(1, at + 30.0, False) for _, at, _ in hung]
    tried, count = [*well, *hung], len(hung)
    cells = cells_of(
        [*tried, *sidelined],
        attempts=[1] * len(tried) + [0] * count,
        sidelined=[0] * len(tried) + [1] * count,
        first=[True] * len(tried) + [False] * count,
    )
    (row,) = incident_rows(CofailureResult.from_cells(cells), {1: "one", 2: "two"})
    assert (row["late"], row["sidelined"]) == (30, 30)


def test_a_broken_version_of_ours_is_the_cause_and_the_change() -> None:
    """Half the processes of each machine run it for a while: no machine explains the failures."""
    attempts = [
        (key, at) for key in range(6) for at in np.arange(key, 40_000, 10).tolist()
    ]  # fmt: skip
    number = [place % 4 for place in range(len(attempts))]
    new = [9000 <= at < 10_800 and n in {0, 2} for n, (_, at) in zip(number, attempts, strict=True)]
    cells = cells_of(
        [(key, at, bad) for (key, at), bad in zip(attempts, new, strict=True)],
        worker_version=["2.0" if bad else "1.0" for bad in new],
        worker_host=["m-1" if n < 2 else "m-2" for n in number],
        worker=[str(n + 10 * bad) for n, bad in zip(number, new, strict=True)],
    )
    found = CofailureResult.from_cells(cells)
    (row,) = incident_rows(found, {key: str(key) for key in range(6)})
    assert row["subscriptions"] == [str(key) for key in range(6)]
    cause = row["causes"][0]
    assert (cause["attribute"], cause["value"]) == ("worker_version", "2.0")
    assert cause["inside"] == pytest.approx(1.0)
    assert ("worker_version", "2.0") in {
        (change["attribute"], change["value"]) for change in row["changes"]
    }


def test_attributes_that_an_earlier_state_lacks_are_unknown() -> None:
    whole = cells_of(steady(1, until=7200, every=30, fails=(5400, 6600)))
    table = pa.table(
        {
            "sub_key": pa.array([1], pa.int64()), "bin": pa.array([7], pa.int64()),
            "attempts": pa.array([1], pa.int64()), "sidelined": pa.array([0], pa.int64()),
            "policy_version": pa.array([1], pa.int64()), "first": pa.array([True]),
            **{name: pa.array([_PLAIN[name]]) for name in LOGGED if name != "worker_version"},
        }
    )  # fmt: skip
    assert whole.attributes["worker_version"].texts == ["1.0"]
    earlier = AttemptCells.from_arrow(table).attributes["worker_version"]
    assert (earlier.codes.tolist(), list(earlier.texts)) == ([-1], [])


def test_an_incident_counts_its_like_before_it() -> None:
    spans = [(5400, 6600), (15_000, 16_000), (30_000, 31_000)]
    rows = [
        (key, at, key == 1 and any(a <= at < b for a, b in spans))
        for key in (1, 2, 3)
        for at in np.arange(key, 40_000, 30).tolist()
    ]
    found = CofailureResult.from_cells(cells_of(rows))
    numbered = incident_rows(found, {1: "one", 2: "two", 3: "three"})
    assert [row["earlier"] for row in numbered] == [0, 1, 2]


def test_nothing_is_found_in_an_empty_log() -> None:
    found = CofailureResult.from_cells(cells_of([]))
    assert (found.incidents, found.pairs) == ((), ())


def test_failing_in_part_during_a_whole_short_log_is_usual() -> None:
    rng = np.random.default_rng(4)
    rows = [
        *((1, 0.1 * number, bool(rng.random() < 0.3)) for number in range(160)),
        *((key, 0.5 * number, key < 4) for key in (2, 3, 4, 5) for number in range(24)),
    ]
    assert [one.keys for one in found_in(rows)] == [(2, 3)]
