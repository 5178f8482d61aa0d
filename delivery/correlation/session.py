"""The Spark session of the analysis. Where it runs is never said here: `spark-submit`, or `local[*]` by default."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from py4j.java_gateway import java_import
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from delivery.correlation.archive import archive_options, default_folder
from delivery.correlation.java import find_java, java_options

# What is not set by whoever submits the job. Partitions are many at first, so that one fits in a small heap, and put
# together again where they are small.
_DEFAULTS: Final = {
    "spark.app.name": "rooms analysis",
    "spark.ui.enabled": "false",
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "32",
    "spark.sql.adaptive.coalescePartitions.minPartitionSize": "8m",
    "spark.sql.files.maxPartitionBytes": "32m",
    # A small table before the table of groups: of groups as many as deliveries it holds few, and it doubles what is compiled.
    "spark.sql.codegen.aggregate.map.twolevel.enabled": "false",
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "16384",
    "spark.sql.parquet.compression.codec": "zstd",
    # Listing some files in a job of tasks takes longer than the files.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000",
    "spark.hadoop.parquet.compression.codec.zstd.level": "1",
    "spark.sql.parquet.enableVectorizedReader": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.log.level": "ERROR",
    # Otherwise every expression tells the JVM which of our lines it came from, in four calls more.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Our texts in small letters are hexadecimal; for all others a JVM first works out the letters of every script, for a second.
    "spark.sql.icu.caseMappings.enabled": "false",
}
_ALWAYS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # Not the old form without a zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
# What a log of a few megabytes gets: there the compiling of queries and the starting of tasks take longer than all rows.
_SMALL: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.ui.explainMode": "simple",
}
SMALL_BYTES: Final = 4 * 2**20
# Named by themselves: else Java looks for them through every archive on its path, each time that a list is handed over.
_IMPORTED: Final = ("org.apache.spark.api.python.PythonUtils", "org.apache.spark.sql.api.python.PythonSQLUtils")
# The shell that a plain start of Python launches has one of its own, which would run through our lines.
_QUIET: Final = {"spark.ui.showConsoleProgress": "false"}


@contextmanager
def spark_session(settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A session for one run, stopped at the end. `settings` go before the defaults. NoJavaError."""
    home = find_java()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "--master" in os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    if not submitted:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Only a started gateway knows what spark-submit was told; without it our defaults would win over its --conf.
    starting = None
    if not submitted:
        options = f"{java_options(os.environ)} {archive_options(home, default_folder())}".rstrip()
        starting = SparkConf().set("spark.driver.defaultJavaOptions", options)
    SparkContext._ensure_initialized(conf=starting)  # noqa: SLF001 - there is no public way
    conf = SparkConf()
    for name, value in _DEFAULTS.items():
        conf.setIfMissing(name, value)
    for name, value in {**({} if submitted else _QUIET), **(settings or {}), **_ALWAYS}.items():
        conf.set(name, value)
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    for name in _IMPORTED:
        java_import(session._jvm, name)  # noqa: SLF001 - there is no public way
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="first query") as beside:
            if not submitted:
                beside.submit(_first_query, session)
            yield session
    finally:
        session.stop()


def _first_query(session: SparkSession) -> None:
    """Ask something small: a Java's first query spends seconds, on one core, loading what all others then find."""
    session.range(1).groupBy("id").count().collect()


@contextmanager
def sized(session: SparkSession, size_bytes: int) -> Iterator[bool]:
    """Inside, queries are planned for so much input; afterwards everything is as it was. Gives whether it is small."""
    small = size_bytes <= SMALL_BYTES
    before = {name: session.conf.get(name, None) for name in _SMALL} if small else {}
    for name in before:
        session.conf.set(name, _SMALL[name])
    try:
        yield small
    finally:
        for name, was in before.items():
            if was is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, was)
