"""No plan sorts in order to aggregate, and a cluster of separate processes gives what one process gives."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
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
    "failures": cells.failures,
    "totals": cells.totals,
    "hazards": cells.hazards,
    "journeys": lambda rows: journeys.merge(journeys.partial(rows)),
    "days": lambda rows: rollups.daily(rollups.hourly_state(rows)),
    "paths": journeys.paths,
    "missing": lambda rows: reconciliation.missing(reconciliation.anchors(rows)),
}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plans")
    write(plant(Town(seed=2, minutes=80, a_minute=2.0, lost=2, missing=1)).rows, root / "segments")
    return root


def _rows(spark: SparkSession, sealed: Path) -> DataFrame:
    files = Files(spark, str(sealed / "segments"))
    return segments.keyed(segments.read(spark, files.root, list(segments.partitions(files).values())))


@pytest.mark.parametrize("job", JOBS)
def test_no_job_sorts_to_aggregate(spark: SparkSession, sealed: Path, job: str) -> None:
    made = JOBS[job](_rows(spark, sealed))
    frame: Any = made._jdf
    plan = str(frame.queryExecution().executedPlan())
    assert "HashAggregate" in plan
    assert "SortAggregate" not in plan


def test_a_cluster_of_processes_gives_the_same(java: None, sealed: Path) -> None:
    """spark-submit on local-cluster: executors are processes of their own, without anything of ours on their path."""
    import pyspark

    from delivery.correlation import __main__ as job

    home = Path(pyspark.__file__).parent
    told = subprocess.run(
        [
            home / "bin" / "spark-submit", "--master", "local-cluster[1,2,512]", "--conf", "spark.executor.memory=512m",
            "--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.sql.adaptive.enabled=false",
            "--conf", "spark.hadoop.fs.file.impl=org.apache.hadoop.fs.RawLocalFileSystem",
            "--driver-java-options", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "--conf", "spark.executor.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            job.__file__, "--segments", str(sealed / "segments"), "--out", str(sealed / "out"),
        ],
        env={
            **os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home),
            "PYTHONPATH": str(Path(job.__file__).parents[2]),
        },
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    latest = json.loads((sealed / "out" / "latest.json").read_text())
    assert latest["totals"]["missing"] == 1
    assert latest["totals"]["residual_fanout"] == latest["totals"]["residual_outcome"] == 0
    folder = sealed / "out" / latest["tables"]["journeys"]
    (journeys_told,) = duckdb.execute(f"SELECT count(*) FROM '{folder}/*.parquet'").fetchall()
    (born,) = duckdb.execute(
        f"SELECT count(DISTINCT delivery_id) FROM '{sealed}/segments/*/*/*.parquet' WHERE kind = 'enqueued'"
    ).fetchall()
    assert journeys_told == born
