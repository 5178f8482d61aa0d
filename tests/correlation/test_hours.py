"""Deliveries with rows of several hours are brought together; those of one hour stay where they are."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from delivery.correlation import journeys, segments
from delivery.correlation.files import Files
from delivery.correlation.session import sized
from tests.correlation.planted import Town, plant
from tests.correlation.sealed import write


@pytest.fixture(scope="module")
def partials(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataFrame]:
    """Of two hours; clocks are wrong, so that some have no row in the hour of their message."""
    root: Path = tmp_path_factory.mktemp("hours")
    town = Town(
        seed=4, minutes=70, rooms=2, a_minute=2.0, noise=0.3, attempts=3, skew_s=(200.0, 200.0, -100.0, 200.0, 200.0)
    )
    write(plant(town).rows, root / "segments")
    files = Files(spark, str(root / "segments"))
    with sized(spark, 0):
        rows = segments.keyed(segments.read(spark, files.root, list(segments.partitions(files.walk()).values())))
        journeys.partial(rows).write.parquet(str(root / "partials"))
        yield spark.read.parquet(str(root / "partials"))


@pytest.fixture(scope="module")
def expected(partials: DataFrame) -> DataFrame:
    return journeys.merge(partials)


@pytest.fixture(scope="module")
def at_once(expected: DataFrame) -> "Counter[tuple[object, ...]]":
    return Counter(map(tuple, expected.collect()))


def test_some_deliveries_are_torn(partials: DataFrame, at_once: "Counter[tuple[object, ...]]") -> None:
    found = partials.select("delivery_hi", "delivery_lo", journeys._astray().alias("astray")).collect()
    rows = Counter(row[:2] for row in found)
    torn = sum(many > 1 for many in rows.values())
    assert 0 < torn < len(rows) / 2
    assert sum(row["astray"] for row in found) > torn
    assert at_once.total() == len(rows)


@pytest.mark.parametrize("few", [0, 1_000])
def test_apart_or_all_at_once_they_are_the_same(
    partials: DataFrame,
    expected: DataFrame,
    at_once: "Counter[tuple[object, ...]]",
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journeys, "_FEW", few)
    found = journeys.merge_hours(partials).select(*expected.columns)
    assert Counter(map(tuple, found.collect())) == at_once
