"""Deliveries with rows of several hours are brought together; those of one hour stay where they are."""

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.correlation import journeys, segments
from delivery.correlation.files import Files
from tests.correlation.planted import Town, plant
from tests.correlation.sealed import write


@pytest.fixture(scope="module")
def partials(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Of two hours; clocks are wrong, so that some have no row in the hour of their message."""
    root: Path = tmp_path_factory.mktemp("hours")
    town = Town(
        seed=4, minutes=70, rooms=2, a_minute=2.0, noise=0.3, attempts=3, skew_s=(200.0, 200.0, -100.0, 200.0, 200.0)
    )
    write(plant(town).rows, root / "segments")
    files = Files(spark, str(root / "segments"))
    rows = segments.keyed(segments.read(spark, files.root, list(segments.partitions(files).values())))
    journeys.partial(rows).write.parquet(str(root / "partials"))
    return spark.read.parquet(str(root / "partials"))


@pytest.mark.parametrize("few", [0, 1_000])
def test_apart_or_all_at_once_they_are_the_same(partials: DataFrame, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journeys, "_FEW", few)
    expected = journeys.merge(partials)
    found = journeys.merge_hours(partials).select(*expected.columns)
    deliveries, torn = (
        expected.count(),
        partials.groupBy("delivery_hi", "delivery_lo").count().where("count > 1").count(),
    )
    assert 0 < torn < deliveries / 2
    assert partials.where(journeys._astray()).count() > torn
    both = expected.withColumn("one", F.lit(1)).unionByName(found.withColumn("one", F.lit(2)))
    sides = both.groupBy(*expected.columns).agg(F.sum("one").alias("sides"))
    assert sides.where("sides = 3").count() == sides.count() == deliveries
