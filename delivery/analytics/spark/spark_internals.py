"""Use what is private to PySpark: the one module that says what is assumed of it.

PySpark has no public way to start its JVM with chosen options, or to call classes of the JVM.
`ASSUMED` lists the names. The unit test `test_spark_internals.py` names each that a new version
lacks.
"""

from collections.abc import Mapping
from typing import IO, Any, Final

from py4j.java_gateway import java_import
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

ASSUMED: Final[Mapping[type, frozenset[str]]] = {
    SparkContext: frozenset(["_ensure_initialized", "_gateway"]),
    SparkSession: frozenset(["_jsc", "_jvm"]),
}


def java_is_started() -> bool:
    """Return whether this process has a JVM."""
    return SparkContext._gateway is not None  # noqa: SLF001 - see above


def start_java(conf: SparkConf | None, log: IO[bytes]) -> Any:
    """Start a JVM with its output in a file, and return its gateway.

    Raise PySparkException if it does not start.
    """
    launch: Any = launch_gateway
    return launch(conf, {"stdout": log, "stderr": log})


def use_java(gateway: Any) -> None:
    """Make this process use a JVM that was started."""
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - see above


def ensure_java(conf: SparkConf | None) -> None:
    """Start a JVM if this process has none; only one that is started reads `conf`."""
    SparkContext._ensure_initialized(conf=conf)  # noqa: SLF001 - see above


def import_java(session: SparkSession, name: str) -> None:
    """Make the class, or the classes of `package.*`, attributes of the JVM."""
    java_import(session._jvm, name)  # noqa: SLF001 - see above


def jvm_of(session: SparkSession) -> Any:
    """Return the JVM; classes are its attributes."""
    return session._jvm  # noqa: SLF001 - see above


def hadoop_configuration(session: SparkSession) -> Any:
    """Return the configuration with which Spark's readers open files."""
    context: Any = session._jsc  # noqa: SLF001 - see above
    return context.hadoopConfiguration()
