"""The Spark of the tests: here, or on a small cluster, one at a time, in one Java that keeps what it has warmed up."""

import re
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delivery.correlation.archive import archive_options, default_folder
from delivery.correlation.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE: Final = "local[2]"
CLUSTER: Final = "local-cluster[1,2,640]"
"""A master and a worker, whose executor is a process of its own with nothing of ours on its path: what runs there runs on any."""
# Short jobs: the quick compiler and the plain collector start fastest, classes are taken unverified, whatever grows has its
# room from the beginning, and few partitions have least to schedule. Hadoop starts a process for each file that it makes;
# without its checksums beside them they are half as many.
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


# Archives of other ways to run Spark, and of what no query here asks for: Java looks for each class through all on its path.
_UNUSED: Final = re.compile(
    "kubernetes|spark-(kubernetes|yarn|connect|mllib|graphx|streaming|repl|ganglia|hive)|hive-(?!storage)|datanucleus|derby|breeze|spire|"
    "algebra|cats|vertx|scala-compiler|tink|lapack|blas|arpack|rocksdbjni|curator|zookeeper|jline|JTransforms|libthrift"
)


def environment(home: Path) -> dict[str, str]:
    """What has to be set before Java starts. Its folder is `home`, which is filled with links to where Spark lies.

    An executor's logs go below it, and where Spark lies nobody may be allowed to write. An archive of Java's classes, where there
    is one, spares both Javas more than fewer jars do, and is for all of them.
    """
    import pyspark

    spark = Path(pyspark.__file__).parent
    archive = archive_options(find_java(), default_folder())
    for part in spark.iterdir():
        if part.name != "work" and (archive or part.name != "jars"):
            (home / part.name).symlink_to(part)
    if not archive:
        (home / "jars").mkdir()
        for jar in (spark / "jars").iterdir():
            if not _UNUSED.match(jar.name):
                (home / "jars" / jar.name).symlink_to(jar)
    java = f"{_JAVA} {archive}".rstrip()
    options = shlex.join(["--driver-java-options", java, "--conf", f"spark.executor.extraJavaOptions={java}"])
    return {"SPARK_HOME": str(home), "PYSPARK_SUBMIT_ARGS": f"{options} {_SUBMIT}", "SPARK_LOCAL_IP": "127.0.0.1"}


class Sparks:
    """The session that there is, if any. For one thread."""

    def __init__(self) -> None:
        from delivery.correlation.session import spark_session

        # This one, whatever a test puts in its place meanwhile.
        self._start = spark_session
        self._master: str | None = None
        self._session: SparkSession | None = None
        self._open = ExitStack()

    def at(self, master: str) -> "SparkSession":
        """The session there; one that is elsewhere is stopped."""
        if self._session is None or master != self._master:
            self.close()
            self._session = self._open.enter_context(self._start({"spark.master": master}))
            self._master = master
        return self._session

    def close(self) -> None:
        """Stop it."""
        self._session = None
        self._open.close()
