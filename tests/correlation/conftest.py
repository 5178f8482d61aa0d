"""One Spark for all tests of the analysis; without Java they are skipped on a desk and fail in CI."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.correlation.analysed import Analyse

NOW = datetime(2026, 1, 9, tzinfo=UTC)
# Short jobs: the quick compiler and the plain collector start fastest, and few partitions have least to schedule. Hadoop
# starts a process for each file that it makes; without its checksums beside them they are half as many.
SUBMIT = (
    "--master local[2] --driver-memory 1g "
    '--driver-java-options "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC" '
    "--conf spark.sql.shuffle.partitions=2 --conf spark.sql.adaptive.enabled=false "
    "--conf spark.hadoop.fs.file.impl=org.apache.hadoop.fs.RawLocalFileSystem "
    "--conf spark.ui.showConsoleProgress=false --conf spark.sql.sources.parallelPartitionDiscovery.threshold=10000 "
    "pyspark-shell"
)


@pytest.fixture(scope="session")
def java() -> None:
    """Java is there, or the wheel that brings one."""
    from delivery.correlation.errors import NoJavaError
    from delivery.correlation.java import find_java

    try:
        find_java()
    except NoJavaError as exc:
        if os.environ.get("CI"):
            pytest.fail(str(exc))
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def spark(java: None) -> Iterator["SparkSession"]:
    from delivery.correlation.session import spark_session

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", SUBMIT)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        with spark_session() as session:
            yield session


@pytest.fixture(scope="session")
def analyse(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> "Analyse":
    """Analyses rows, or what lies in a folder."""
    from tests.correlation.analysed import Analyse

    def folder() -> Path:
        return tmp_path_factory.mktemp("analysis")

    return Analyse(spark, folder, NOW)
