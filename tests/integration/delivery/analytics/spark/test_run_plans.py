"""Test that no query plan sorts in order to aggregate."""

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from delivery.analytics.runs.outcomes import UnreadHours
from delivery.analytics.spark import counts, journeys, reconciliation, rollups, segments
from delivery.analytics.spark.segments import HadoopFiles
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import sealed_partitions, write

JOBS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "words": reconciliation.sequence_words,
    "deliveries": journeys.partial_journeys,
    "anchors": reconciliation.anchor_counts,
    "rollups": rollups.hourly_state,
    "cells": counts.count_attempts,
    "causes": counts.count_attributes,
    "journeys": lambda rows: journeys.merge_journeys(journeys.partial_journeys(rows)),
    "days": lambda rows: rollups.daily(rollups.hourly_state(rows)),
    "paths": journeys.kind_paths,
    "missing": lambda rows: reconciliation.missing_deliveries(
        reconciliation.anchor_counts(rows),
        journeys.merge_journeys(journeys.partial_journeys(rows)),
        UnreadHours(),
    ),
}


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    root = tmp_path_factory.mktemp("plans")
    write(plant(Town(seed=2, minutes=80, a_minute=2.0, lost=2, missing=1)).rows, root / "segments")
    files = HadoopFiles(spark, str(root / "segments"))
    return segments.with_keys(
        segments.read_rows(spark, files.root, sealed_partitions(files)), "a salt"
    )


@pytest.mark.parametrize("job", JOBS)
def test_no_job_sorts_to_aggregate(rows: DataFrame, job: str) -> None:
    frame: Any = JOBS[job](rows)._jdf
    plan = str(frame.queryExecution().executedPlan())
    assert "HashAggregate" in plan
    assert "SortAggregate" not in plan
