"""Test that only deliveries with rows in several hours are merged."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from delivery.analytics.spark import journeys, segments
from delivery.analytics.spark.segments import HadoopFiles
from delivery.analytics.spark.session import tuned_for_size
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import sealed_partitions, write


@pytest.fixture(scope="module")
def partials(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataFrame]:
    """Return partials of two hours, with skewed clocks, so that rows miss their message's hour."""
    root: Path = tmp_path_factory.mktemp("hours")
    town = Town(
        seed=4,
        minutes=70,
        rooms=2,
        a_minute=2.0,
        noise=0.3,
        attempts=3,
        skew_s=(200.0, 200.0, -100.0, 200.0, 200.0),
    )
    write(plant(town).rows, root / "segments")
    files = HadoopFiles(spark, str(root / "segments"))
    with tuned_for_size(spark, 0):
        rows = segments.with_keys(
            segments.read_rows(spark, files.root, sealed_partitions(files)), "a salt"
        )
        journeys.partial_journeys(rows).write.parquet(str(root / "partials"))
        yield spark.read.parquet(str(root / "partials"))


@pytest.fixture(scope="module")
def expected(partials: DataFrame) -> DataFrame:
    return journeys.merge_journeys(partials)


@pytest.fixture(scope="module")
def at_once(expected: DataFrame) -> "Counter[tuple[object, ...]]":
    return Counter(map(tuple, expected.collect()))


def test_some_deliveries_span_hours(
    partials: DataFrame, at_once: "Counter[tuple[object, ...]]"
) -> None:
    found = partials.select(
        "delivery_hi", "delivery_lo", journeys._is_other_hour().alias("astray")
    ).collect()
    rows = Counter(row[:2] for row in found)
    torn = sum(many > 1 for many in rows.values())
    assert 0 < torn < len(rows) / 2
    assert sum(row["astray"] for row in found) > torn
    assert at_once.total() == len(rows)


@pytest.mark.parametrize("few", [0, 1_000])
def test_both_merges_give_the_same_rows(
    partials: DataFrame,
    expected: DataFrame,
    at_once: "Counter[tuple[object, ...]]",
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journeys, "_MAX_BROADCAST_ROWS", few)
    found = journeys.merge_journeys_by_hour(partials).select(*expected.columns)
    assert Counter(map(tuple, found.collect())) == at_once
