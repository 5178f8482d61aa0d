"""Test with unseen seeds, without Spark, how many planted incidents are found."""

from dataclasses import replace
from itertools import combinations

import duckdb
import numpy as np
import pytest

from delivery.analytics.spark.counts import to_series
from delivery.analytics.spark.results import CofailureResult, FailureMinutes
from tests.support.analysis_logs import SHARED, SHARING, outages
from tests.support.planted_outages import Outage, Planted, plant
from tests.support.sealed_segments import START_S

_MINUTES = """
SELECT subscription_id, epoch_us(ts) // 60000000 AS minute, count(*) AS attempts, count(error_class) AS failures,
    count(*) FILTER (attempt = 0 AND error_class IS NOT NULL) AS fresh
FROM planted WHERE kind = 'attempted' GROUP BY ALL
"""


def _minutes(planted: Planted) -> tuple[FailureMinutes, list[str]]:
    """Return the minutes of a log, and the subscriptions by key."""
    ids = sorted(planted.truth.subscriptions)
    with duckdb.connect() as connection:
        connection.register("planted", planted.rows)
        found = connection.execute(_MINUTES).fetchnumpy()
    columns = {
        name: np.asarray(found[name]).astype(np.int64)
        for name in ("minute", "attempts", "failures", "fresh")
    }
    columns["sub_key"] = np.searchsorted(ids, list(found["subscription_id"])).astype(np.int64)
    first = int(columns["minute"].min())
    span = int(columns["minute"].max()) - first + 1
    return FailureMinutes(series=list(to_series(columns)), first=first, span=span), ids


@pytest.mark.parametrize("seed", [901, 902])
def test_finds_incidents_with_other_seeds(seed: int) -> None:
    planted = plant(replace(SHARING, seed=seed, outages=outages(seed + 100)))
    minutes, ids = _minutes(planted)
    found = CofailureResult.from_minutes(minutes)
    sub = planted.truth.subscriptions
    true = {
        tuple(sorted((sub[a], sub[b])))
        for some in SHARED.values()
        for a, b in combinations(some, 2)
    }
    hits, precision = 0, 0.0
    for place, pair in enumerate(found.pairs, 1):
        if (ids[pair.first], ids[pair.second]) in true:
            hits += 1
            precision += hits / place
    assert precision / len(true) >= 0.95
    shared = [outage for outage in planted.truth.outages if len(outage.subscriptions) > 1]
    assert sum(
        _recovered(outage, found, [ids.index(one) for one in sub]) for outage in shared
    ) >= 0.9 * len(shared)
    assert sum(one.kind == "shared" for one in found.incidents) <= 1.35 * len(shared)


def _recovered(outage: Outage, found: CofailureResult, keys: list[int]) -> bool:
    wanted = tuple(sorted(keys[number] for number in outage.subscriptions))
    begin, end = (START_S + outage.begin_s) / 60, (START_S + outage.end_s) / 60
    return any(
        incident.keys == wanted
        and min(incident.end + 1, end) - max(incident.begin, begin) >= 0.6 * (end - begin)
        and incident.end + 1 - incident.begin <= 1.6 * (end - begin)
        for incident in found.incidents
    )
