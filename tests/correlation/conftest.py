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
# A small cluster on this machine: its executor is a process of its own with nothing of ours on its path, so that whatever runs
# here runs on a cluster. Short jobs: the quick compiler and the plain collector start fastest, and few partitions have least to
# schedule. Hadoop starts a process for each file that it makes; without its checksums beside them they are half as many.
SUBMIT = (
    "--master local-cluster[1,2,640] --driver-memory 1g --conf spark.executor.memory=640m "
    '--driver-java-options "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC" '
    '--conf "spark.executor.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC" '
    "--conf spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs=false "
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
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    import pyspark

    from delivery.correlation.session import spark_session

    # The executor's logs go where Spark lives: a folder of links, for that may be nobody's to write to.
    home = tmp_path_factory.mktemp("spark")
    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name != "work":
            (home / part.name).symlink_to(part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
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
