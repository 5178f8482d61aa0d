"""Files wherever Spark reaches them (local, HDFS, S3 …), through the same Hadoop file system that reads the Parquet."""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file: where, and how many bytes."""

    path: str
    size: int


class Files:
    """The file system under one address (a URI or a local path). Nothing here needs a rename."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001 - the JVM's file system is the one that Spark's readers use
        self._jvm = jvm
        jsc: Any = spark._jsc  # noqa: SLF001 - as above
        self._path = self._jvm.org.apache.hadoop.fs.Path
        path = self._path(root)
        self._system = path.getFileSystem(jsc.hadoopConfiguration())
        self.root: str = self._system.makeQualified(path).toString()

    def _at(self, name: str) -> Any:
        return self._path(f"{self.root}/{name}" if name else self.root)

    def walk(self, name: str = "") -> list[File]:
        """Every file below `name`, sorted by path; empty where there is nothing."""
        if not self._system.exists(self._at(name)):
            return []
        left = self._system.listFiles(self._at(name), True)
        found = []
        while left.hasNext():
            status = left.next()
            path = status.getPath().toString()
            found.append(File(path=path, size=status.getLen()))
        return sorted(found, key=lambda file: file.path)

    def read(self, name: str) -> str | None:
        """The text of a file; None where there is none."""
        path = self._at(name)
        if not self._system.exists(path):
            return None
        stream = self._system.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, content: str | bytes) -> None:
        """Write a whole file in one go, over the one that may be there."""
        stream = self._system.create(self._at(name), True)
        try:
            stream.write(bytearray(content.encode() if isinstance(content, str) else content))
        finally:
            stream.close()

    def make(self) -> None:
        """Make the address itself a folder."""
        self._system.mkdirs(self._at(""))

    def delete(self, name: str) -> None:
        """Remove everything at `name`; nothing happens where there is nothing."""
        self._system.delete(self._at(name), True)

    def folders(self, name: str) -> list[str]:
        """The names of the folders directly in `name`."""
        path = self._at(name)
        if not self._system.exists(path):
            return []
        return sorted(s.getPath().getName() for s in self._system.listStatus(path) if s.isDirectory())
