"""Test that Spark counts the attempts of a world as the simulation does."""

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from delivery.analytics.findings.cells import CELL_S, AttemptCells
from delivery.analytics.findings.results import CofailureResult
from delivery.analytics.spark import counts, segments
from delivery.analytics.spark.segments import HadoopFiles
from tests.support.analysis_logs import SHARING
from tests.support.analysis_run import Analysed
from tests.support.failure_scenarios import hosts
from tests.support.failure_worlds import World, simulate
from tests.support.sealed_segments import sealed_partitions, write
from tests.support.world_logs import log_rows, subscription_ids

_SALT = "a salt"


@pytest.fixture(scope="module")
def world() -> World:
    return simulate(hosts(5))


@pytest.fixture(scope="module")
def counted(
    spark: SparkSession, world: World, tmp_path_factory: pytest.TempPathFactory
) -> DataFrame:
    """Count the log of a world that is out of order, doubled in part, and late."""
    root = tmp_path_factory.mktemp("world")
    rows = log_rows(world)
    rng = np.random.default_rng(3)
    doubled = rng.choice(rows.num_rows, rows.num_rows // 20, replace=False)
    rows = pa.concat_tables([rows, rows.take(pa.array(doubled))])
    rows = rows.take(pa.array(rng.permutation(rows.num_rows)))
    late = rows.num_rows // 3
    write(rows.slice(late), root / "segments", files=2)
    write(rows.slice(0, late), root / "segments", name="late")
    files = HadoopFiles(spark, str(root / "segments"))
    found = sealed_partitions(files)
    read = segments.read_rows(spark, files.root, found)
    parts = {one.part for one in found}
    return counts.count_attributes(segments.with_keys(segments.deduplicate(read, parts), _SALT))


def test_spark_counts_as_the_simulation_does(
    spark: SparkSession, counted: DataFrame, world: World
) -> None:
    by_spark = counts.collect_cells(counted)
    by_simulation = AttemptCells.from_arrow(world.cells(CELL_S))
    ids = subscription_ids(world)
    keyed = spark.createDataFrame([(one,) for one in ids], "id string").select(
        "id", segments.text_key("id", _SALT).alias("key")
    )
    key_of = {row["id"]: row["key"] for row in keyed.collect()}
    number_of = {key_of[one]: number for number, one in enumerate(ids)}
    assert _plain(by_spark, number_of) == _plain(by_simulation, {n: n for n in range(len(ids))})


def _plain(cells: AttemptCells, numbers: dict[int, int]) -> set[tuple[object, ...]]:
    columns: list[list[object]] = [
        [numbers[key] for key in cells.keys[cells.subscription].tolist()],
        cells.bin.tolist(),
        cells.first.tolist(),
        cells.attempts.tolist(),
        cells.sidelined.tolist(),
    ]
    for name, attribute in sorted(cells.attributes.items()):
        texts = [*attribute.texts, None]
        columns.append([name, *(texts[code] for code in attribute.codes.tolist())][1:])
    return set(zip(*columns, strict=True))


def test_a_sample_of_a_large_log_finds_the_same_incidents(counted: DataFrame, world: World) -> None:
    whole = counts.collect_cells(counted)
    most = len(whole.bin) // 3
    sample = counts.collect_cells(counted, most=most)
    assert len(sample.bin) <= 1.1 * most
    assert sample.weight == 4
    attempts = whole.attempts.sum()
    assert sample.attempts.sum() * sample.weight == pytest.approx(attempts, rel=0.05)
    found = CofailureResult.from_cells(sample).incidents
    expected = CofailureResult.from_cells(whole).incidents
    assert len(expected) >= len(world.truth) - 2
    # Short ones of little traffic may be missed, and nothing is made up.
    assert {one.keys for one in found} <= {one.keys for one in expected}
    assert len(found) >= 0.7 * len(expected)


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
    held = [row for row in advised if row["held_up"] is not False]
    assert len(held) >= 0.8 * len(advised)
    chosen = [row for row in advised if row["recommended_delivered"] is not None]
    assert all(row["recommended_delivered"] >= row["replayed_delivered"] - 0.001 for row in chosen)
    # Four retries end after 11 minutes; more retries would outlast outages of half an hour.
    better = [
        row for row in chosen if row["recommended_delivered"] > row["measured_delivered"] + 0.005
    ]
    assert len(better) > len(advised) / 3
    for row in chosen:
        for name in ("delivered", "attempts", "mean_wait_s"):
            low, high = row[f"recommended_{name}_low"], row[f"recommended_{name}_high"]
            assert low <= row[f"recommended_{name}"] <= high
        assert row["recommended_max_delay_ms"] is not None


def test_refused_bodies_are_counted_as_such(together: Analysed) -> None:
    steady = [row for row in together.rows("advice") if row["measured_delivered"] > 0.9]
    share = sum(row["hopeless"] * row["deliveries"] for row in steady)
    assert share / sum(row["deliveries"] for row in steady) == pytest.approx(
        SHARING.hopeless, abs=0.004
    )


def test_the_front_has_only_optimal_policies(
    together: Analysed,
) -> None:
    fronts: dict[str, list[tuple[float, float, float]]] = {}
    for row in together.rows("advice_front"):
        result = (-row["expected_delivered"], row["expected_attempts"], row["expected_mean_wait_s"])
        fronts.setdefault(row["subscription_id"], []).append(result)
    for row in together.rows("advice"):
        if not row["reproduced"]:
            continue
        front = np.array(fronts[row["subscription_id"]])
        # Each policy is better than every other one in some respect.
        less = (front[:, None] < front).any(axis=2)
        assert (less == less.T).all()
