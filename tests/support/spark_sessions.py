"""Provide Spark for tests, locally or on a small cluster, in one warmed-up JVM."""

import re
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE: Final = "local[2]"
CLUSTER: Final = "local-cluster[1,2,640]"
"""A master and a worker, whose executor is a separate process without this code on its path."""
# For short jobs: the C1 compiler and the serial collector start fastest, classes are not verified,
# memory is reserved at the start, and few partitions need little scheduling. Hadoop starts a
# process for each file that it makes; without checksums there are half as many.
_JAVA: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xms640m -Xmn320m -XX:MetaspaceSize=256m "
    "-XX:ReservedCodeCacheSize=160m -XX:-UseCodeCacheFlushing "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
_SUBMIT: Final = (
    f"--master {HERE} --driver-memory 1536m --conf spark.executor.memory=640m "
    "--conf spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs=false "
    "--conf spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version=2 "
    "--conf spark.sql.shuffle.partitions=2 --conf spark.sql.adaptive.enabled=false "
    "--conf spark.hadoop.fs.file.impl=org.apache.hadoop.fs.RawLocalFileSystem "
    "--conf spark.ui.showConsoleProgress=false --conf spark.sql.sources.parallelPartitionDiscovery.threshold=10000 "
    "pyspark-shell"
)


# Jars that no query here needs: Java searches all on its path for each class.
_UNUSED: Final = re.compile(
    "kubernetes|spark-(kubernetes|yarn|connect|mllib|graphx|streaming|repl|ganglia|hive)|hive-(?!storage)|datanucleus|derby|breeze|spire|"
    "algebra|cats|vertx|scala-compiler|tink|lapack|blas|arpack|rocksdbjni|curator|zookeeper|jline|JTransforms|libthrift"
)


def environment(home: Path) -> dict[str, str]:
    """Return the environment for Java. `home` is filled with links to Spark's files.

    An executor's logs go below it, as Spark's own folder may be read-only.
    """
    import pyspark

    spark = Path(pyspark.__file__).parent
    for part in spark.iterdir():
        if part.name not in ("work", "jars"):
            (home / part.name).symlink_to(part)
    (home / "jars").mkdir()
    for jar in (spark / "jars").iterdir():
        if not _UNUSED.match(jar.name):
            (home / "jars" / jar.name).symlink_to(jar)
    options = shlex.join(
        ["--driver-java-options", _JAVA, "--conf", f"spark.executor.extraJavaOptions={_JAVA}"]
    )
    return {
        "SPARK_HOME": str(home),
        "PYSPARK_SUBMIT_ARGS": f"{options} {_SUBMIT}",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


class Sparks:
    """The current session, if any. For one thread."""

    def __init__(self) -> None:
        from delivery.analytics.spark.session import spark_session

        # The original, even if a test replaces it.
        self._start = spark_session
        self._master: str | None = None
        self._session: SparkSession | None = None
        self._open = ExitStack()

    def at(self, master: str) -> "SparkSession":
        """Return a session at this master, after stopping another one."""
        if self._session is None or master != self._master:
            self.close()
            self._session = self._open.enter_context(self._start({"spark.master": master}))
            self._master = master
        return self._session

    def close(self) -> None:
        """Stop the session."""
        self._session = None
        self._open.close()
