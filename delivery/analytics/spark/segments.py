"""Read sealed segments: partitions, changed files, and rows without duplicates.

Files are accessed through the Hadoop file system that reads the Parquet (local, HDFS, S3 …), so
both need one configuration. Bytes stay in the JVM: it computes the checksums, and only manifests
and the ends of files reach Python. Files of this machine are read directly.
`delivery.analytics.sealing.layout` defines what segments contain.
"""

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast
from urllib.parse import unquote

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from delivery.analytics.runs.conformance import ATTEMPT_SHIFT, CODES, GENERATION_SHIFT, order_base
from delivery.analytics.runs.files import StoredFile
from delivery.analytics.runs.keys import KEY_DIGITS
from delivery.analytics.runs.manifest import Partition
from delivery.analytics.sealing.files import (
    EntryKind,
    FolderEntry,
    LocalFiles,
    SegmentFiles,
    replace_file,
)
from delivery.analytics.sealing.layout import LOG_VERSION, NEVER_NULL, SEGMENT_COLUMNS, ddl, part_of
from delivery.analytics.sealing.manifest import WriterRange
from delivery.analytics.spark.spark_internals import hadoop_configuration, jvm_of
from rooms.domain.state_machine import LogKind


class HadoopFiles:
    """Access the file system under one address (a URI or a local path). It needs no rename."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        # The JVM's file system is the one that Spark's readers use.
        self._jvm = jvm_of(spark)
        self._path_class = self._jvm.org.apache.hadoop.fs.Path
        path = self._path_class(root)
        self._system = path.getFileSystem(hadoop_configuration(spark))
        self.root: str = self._system.makeQualified(path).toString()

    @property
    def local_folder(self) -> str | None:
        """Return the folder if it is on this machine."""
        scheme, _, path = self.root.partition(":")
        return f"/{path.lstrip('/')}" if scheme == "file" else None

    def _hadoop_path(self, name: str) -> Any:
        return self._path_class(f"{self.root}/{name}" if name else self.root)

    def list_files(self, name: str = "") -> list[StoredFile]:
        """Return every file below `name`, sorted by path; empty if there is none."""
        if not self._system.exists(self._hadoop_path(name)):
            return []
        left = self._system.listFiles(self._hadoop_path(name), True)
        found = []
        while left.hasNext():
            status = left.next()
            path = status.getPath().toString()
            time = status.getModificationTime()
            found.append(StoredFile(path=path, size=status.getLen(), modified_ms=time))
        return sorted(found, key=lambda file: file.path)

    def read(self, name: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""
        if self.local_folder is not None:
            # Hadoop would compare it with a checksum file that an earlier version has left.
            local = Path(self.local_folder, name)
            return local.read_text(encoding="utf-8") if local.exists() else None
        path = self._hadoop_path(name)
        if not self._system.exists(path):
            return None
        stream = self._system.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, content: str | bytes) -> None:
        """Write a whole file, replacing an existing one; on this machine at once."""
        if self.local_folder is not None:
            replace_file(Path(self.local_folder, name), content)
            return
        stream = self._system.create(self._hadoop_path(name), True)
        try:
            stream.write(bytearray(content.encode() if isinstance(content, str) else content))
        finally:
            stream.close()

    def open(self, name: str) -> tuple[Any, int]:
        """Return the JVM's stream of a file, and the size of the file."""
        path = self._hadoop_path(name)
        size = int(self._system.getFileStatus(path).getLen())
        return self._system.open(path), size

    def copy_bytes(self, stream: Any, at: int, count: int) -> bytes:
        """Return bytes of a stream of `open`; all of them must exist."""
        stream.seek(at)
        return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream, count))

    def sha256(self, name: str) -> str:
        """Return the SHA-256 of a file as hexadecimal, computed by the JVM."""
        stream = self._system.open(self._hadoop_path(name))
        try:
            return str(self._jvm.org.apache.commons.codec.digest.DigestUtils.sha256Hex(stream))
        finally:
            stream.close()

    def make_root(self) -> None:
        """Create the root folder."""
        self._system.mkdirs(self._hadoop_path(""))

    def delete(self, name: str) -> None:
        """Delete everything at `name`, if it exists."""
        self._system.delete(self._hadoop_path(name), True)

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders directly in `name`."""
        path = self._hadoop_path(name)
        if not self._system.exists(path):
            return []
        return sorted(
            s.getPath().getName() for s in self._system.listStatus(path) if s.isDirectory()
        )


_FREQUENT_KINDS: Final = (
    LogKind.ATTEMPTED,
    LogKind.ENQUEUED,
    LogKind.DELIVERED,
    LogKind.PUBLISHED,
    LogKind.RETRY_SCHEDULED,
)
_HOUR_US: Final = 3_600_000_000


def contradictions(
    spark: SparkSession, root: str, partitions: Collection[Partition]
) -> dict[str, str]:
    """Return the segments whose rows are not what their manifests state, with the difference.

    Only segments that no earlier run has read are compared.
    """
    manifests = {path: one for part in partitions for path, one in part.manifests.items()}
    if not manifests:
        return {}
    known = ", ".join(f"'{kind.value}'" for kind in CODES)
    rows = (
        spark.read.schema(f"{ddl(SEGMENT_COLUMNS)}, dt date, hr int")
        .option("basePath", root)
        .parquet(*(f"{root}/{path}" for path in sorted(manifests)))
        .select("*", "_metadata.file_path")
    )
    hour = F.floor(F.unix_micros("ts") / F.lit(_HOUR_US)).cast("int")
    wrong = (
        F.expr(f"kind is null or kind not in ({known})")
        | (F.col("schema_version") > LOG_VERSION)
        | (F.col("writer_seq") < 1)
        | (hour != F.unix_date("dt") * 24 + F.col("hr"))
    )
    for name in NEVER_NULL:
        wrong |= F.col(name).isNull()
    found: dict[str, dict[int, WriterRange]] = {}
    refused: dict[str, str] = {}
    for row in (
        rows.groupBy("file_path", "writer_id")
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.min("writer_seq").alias("first"),
            F.max("writer_seq").alias("last"),
            F.count(F.when(F.coalesce(wrong, F.lit(True)), 1)).alias("wrong"),
        )
        .collect()
    ):
        path = _relative(unquote(row["file_path"]))
        if row["wrong"]:
            refused[path] = f"{row['wrong']} of its rows are not what its manifest states"
        else:
            found.setdefault(path, {})[row["writer_id"]] = WriterRange(
                rows=row["rows"], first=row["first"], last=row["last"]
            )
    for path, manifest in manifests.items():
        if path not in refused and found.get(path, {}) != dict(manifest.writers):
            refused[path] = "its writers and their numbers are not those of its manifest"
    return refused


def _relative(path: str) -> str:
    """Return the path of a segment below the address."""
    assert part_of(path) is not None, path
    return "/".join(path.split("/")[-3:])


def read_rows(spark: SparkSession, root: str, partitions: Collection[Partition]) -> DataFrame:
    """Read the raw rows of these partitions, with `part`."""
    schema = f"{ddl(SEGMENT_COLUMNS)}, dt date, hr int"
    paths = [path for partition in partitions for path in partition.paths]
    rows = spark.read.schema(schema).option("basePath", root).parquet(*paths)
    return rows.withColumn("part", F.unix_date("dt") * 24 + F.col("hr")).drop("dt", "hr")


def deduplicate(rows: DataFrame, duplicate_parts: Collection[int]) -> DataFrame:
    """Drop duplicate rows in `duplicate_parts`; other partitions stay unchanged.

    A row has one time, so its duplicates are in one partition.
    """
    if not duplicate_parts:
        return rows
    alone = rows.where(~F.col("part").isin(*duplicate_parts))
    # The number first: sorting then rarely compares the rest.
    window = Window.partitionBy("writer_seq", "writer_id", "part").orderBy("xid", "kind")
    some = rows.where(F.col("part").isin(*duplicate_parts)).withColumn(
        "copy", F.row_number().over(window)
    )
    return alone.unionByName(some.where("copy = 1").drop("copy"))


def with_keys(rows: DataFrame, salt: str) -> DataFrame:
    """Add the integer keys with which the jobs compute instead of text."""
    bases = F.array(
        F.lit(0).cast("bigint"), *(F.lit(order_base(kind)).cast("bigint") for kind in CODES)
    )
    return rows.withColumn("code", _kind_code()).select(
        "*",
        F.unix_micros("ts").alias("ts_us"),
        F.shiftrightunsigned("message_hi", 16).alias("born_ms"),
        text_key("subscription_id", salt).alias("sub_key"),
        text_key("event_type", salt).alias("type_key"),
        text_key("target_host", salt).alias("host_key"),
        (
            F.get(bases, F.col("code"))
            + F.shiftleft(F.coalesce("generation", F.lit(0)).cast("bigint"), GENERATION_SHIFT)
            + F.shiftleft(F.coalesce("attempt", F.lit(0)).cast("bigint"), ATTEMPT_SHIFT)
        ).alias("order_key"),
        # Spark's round() converts to decimal digits, ten times as slow.
        F.floor(F.col("latency_ms") * F.lit(1000.0) + F.lit(0.5)).alias("latency_us"),
    )


def text_key(column: str, salt: str) -> Column:
    """Return the key of a text, as `runs.keys` defines it; null for null."""
    digest = F.sha2(F.concat(F.lit(salt), F.col(column)), 256)
    return F.conv(F.substring(digest, 1, KEY_DIGITS), 16, 10).cast("bigint")


def _kind_code() -> Column:
    """Return the code of the row's kind, 0 if unknown. Frequent kinds are compared first."""
    kinds = (*_FREQUENT_KINDS, *(kind for kind in CODES if kind not in _FREQUENT_KINDS))
    cases = " ".join(f"WHEN '{kind.value}' THEN {CODES[kind]}" for kind in kinds)
    return F.expr(f"CASE kind {cases} ELSE 0 END")


_BUFFER: Final = 1 << 16


def open_segments(files: HadoopFiles) -> SegmentFiles:
    """Return the files below an address for their check."""
    folder = files.local_folder
    return HadoopSegments(files) if folder is None else LocalFiles(folder)


class HadoopSegments:
    """Access files below an address of a Hadoop file system."""

    def __init__(self, files: HadoopFiles) -> None:
        self._files = files
        self.root = files.root

    def entries(self) -> list[FolderEntry]:
        """Return what is below the address; empty if there is nothing."""
        with _as_os_errors():
            found = [
                FolderEntry(
                    path=file.path[len(self.root) :].lstrip("/"),
                    kind=EntryKind.FILE,
                    size=file.size,
                    modified_ms=file.modified_ms,
                )
                for file in self._files.list_files()
            ]
        # Files are listed without their folders, one of which may have the name of a segment.
        folders = {entry.folder for entry in found if part_of(entry.folder) is not None}
        named = [
            FolderEntry(path=path, kind=EntryKind.FOLDER, size=0, modified_ms=0) for path in folders
        ]
        inside = [entry for entry in found if entry.folder not in folders]
        return sorted([*inside, *named], key=lambda entry: entry.path)

    def read(self, path: str, limit: int) -> bytes:
        """Return up to `limit` bytes from the start of a file."""
        with self.open(path) as file:
            return file.read(limit)

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file as hexadecimal, in bounded memory."""
        with _as_os_errors():
            return self._files.sha256(path)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading at any position."""
        with _as_os_errors():
            raw = _HadoopStream(self._files, path)
        return cast("BinaryIO", io.BufferedReader(raw, _BUFFER))


class _HadoopStream(io.RawIOBase):
    """Read a file of Hadoop as a raw stream."""

    def __init__(self, files: HadoopFiles, path: str) -> None:
        self._file, self._size = files.open(path)
        self._copy = files.copy_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        count = min(len(into), max(0, self._size - self._at))
        if count:
            with _as_os_errors():
                into[:count] = self._copy(self._file, self._at, count)
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise the errors of the JVM as OSError, with their first line."""
    try:
        yield
    except Py4JJavaError as exc:
        raise OSError(str(exc.java_exception.toString()).splitlines()[0]) from exc
    except Py4JError as exc:
        raise OSError(str(exc).splitlines()[0]) from exc
