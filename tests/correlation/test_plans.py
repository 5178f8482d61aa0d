"""No plan sorts in order to aggregate."""

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from delivery.correlation import cells, journeys, reconciliation, rollups, segments, sequences
from delivery.correlation.files import Files
from tests.correlation.planted import Town, plant
from tests.correlation.sealed import write

JOBS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "words": sequences.words,
    "deliveries": journeys.partial,
    "anchors": reconciliation.anchors,
    "rollups": rollups.hourly_state,
    "cells": cells.cells,
    "causes": cells.causes,
    "journeys": lambda rows: journeys.merge(journeys.partial(rows)),
    "days": lambda rows: rollups.daily(rollups.hourly_state(rows)),
    "paths": journeys.paths,
    "missing": lambda rows: reconciliation.missing(reconciliation.anchors(rows)),
}


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    root = tmp_path_factory.mktemp("plans")
    write(plant(Town(seed=2, minutes=80, a_minute=2.0, lost=2, missing=1)).rows, root / "segments")
    files = Files(spark, str(root / "segments"))
    return segments.keyed(segments.read(spark, files.root, list(segments.partitions(files.walk()).values())))


@pytest.mark.parametrize("job", JOBS)
def test_no_job_sorts_to_aggregate(rows: DataFrame, job: str) -> None:
    frame: Any = JOBS[job](rows)._jdf
    plan = str(frame.queryExecution().executedPlan())
    assert "HashAggregate" in plan
    assert "SortAggregate" not in plan
