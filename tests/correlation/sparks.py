"""The Spark of the tests: here, or on a small cluster, one at a time, in one Java that keeps what it has warmed up."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
    f'--driver-java-options "{_JAVA}" --conf "spark.executor.extraJavaOptions={_JAVA}" '
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

    An executor's logs go below it, and where Spark lies nobody may be allowed to write.
    """
    import pyspark

    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name not in {"work", "jars"}:
            (home / part.name).symlink_to(part)
    (home / "jars").mkdir()
    for archive in (Path(pyspark.__file__).parent / "jars").iterdir():
        if not _UNUSED.match(archive.name):
            (home / "jars" / archive.name).symlink_to(archive)
    return {"SPARK_HOME": str(home), "PYSPARK_SUBMIT_ARGS": _SUBMIT, "SPARK_LOCAL_IP": "127.0.0.1"}


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
