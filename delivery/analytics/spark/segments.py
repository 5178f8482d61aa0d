"""Find and read sealed segments: partitions, changed files, and rows without duplicates.

A sealed segment has the columns of `delivery_log` and integer keys of its ids. Segments are in
`dt=YYYY-MM-DD/hr=HH` by the UTC hour of `ts`, and a file never changes. Ids are stored as text for
readers and as two 64-bit halves for joins, since text keys make joins slower by half. Writer and
reader share this definition, so the module imports neither Spark nor Arrow. Files are accessed
through the Hadoop file system that reads the Parquet (local, HDFS, S3 …).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from delivery.analytics.spark.conformance import ATTEMPT_SHIFT, CODES, GENERATION_SHIFT, order_base
from rooms.domain.state_machine import LogKind

SEGMENT_VERSION: Final = 1
"""Version of this layout. Columns may be added; their meaning never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """A column; `type` is a Spark type (int, bigint, float, double, boolean, string …)."""

    name: str
    type: str
    says: str
    nullable: bool = True


def _column(name: str, kind: str, description: str) -> ColumnSpec:
    return ColumnSpec(
        name=name, type=kind.rstrip("!"), says=description, nullable=not kind.endswith("!")
    )


SEGMENT_COLUMNS: Final = (
    _column("room_id", "int!", "the room"),
    _column("message_id", "string!", "UUIDv7 of the message"),
    _column("message_hi", "bigint!", "its first 64 bits, signed; the first 48 are its millisecond"),
    _column("message_lo", "bigint!", "its last 64 bits, signed"),
    _column("writer_id", "int!", "who wrote the row"),
    _column("writer_seq", "bigint!", "counts the writer's rows from 1 without a gap"),
    _column("xid", "bigint!", "transaction that wrote it"),
    _column("ts", "timestamp!", "when it began, by PostgreSQL's clock; µs, UTC"),
    _column("kind", "string!", "what happened: a value of LogKind"),
    _column("subscription_id", "string", "null: it is about the message"),
    _column("delivery_id", "string", "null: it is about the message"),
    _column("delivery_hi", "bigint", "first half of delivery_id"),
    _column("delivery_lo", "bigint", "last half of delivery_id"),
    _column("generation", "int", "of the delivery's step"),
    _column("attempt", "int", "of the delivery's step"),
    _column("event_version", "int", "of the message"),
    _column("fanout", "int", "deliveries that the transaction made; on published and replayed"),
    _column("payload_bytes", "int", "size of the payload; on published"),
    _column("policy_version", "int", "version of the subscription that decided"),
    _column("delay_ms", "bigint", "wait before the step"),
    _column("latency_ms", "float", "duration of an attempt"),
    _column("worker", "int", "writer id of the worker that attempted"),
    _column("http_status", "int", "null: no complete answer"),
    _column("schema_version", "int!", "layout of the log row"),
    _column("correlation_id", "string", "as the publisher gave it"),
    _column("event_type", "string", "of the message"),
    _column("target_host", "string", "host of the webhook"),
    _column("worker_host", "string", "machine that wrote it"),
    _column("error_class", "string", "why an attempt failed; null on success"),
    _column("detail", "string", "reason or message for people"),
    _column("publisher_id", "string", "key that published it; on published"),
    _column("publisher_organisation_id", "string", "its organisation; on published"),
    _column("application", "string", "application of the key; on published"),
)
"""Older segments end at `detail`; readers find null in the columns that they lack."""


def ddl(columns: tuple[ColumnSpec, ...]) -> str:
    """Return the columns as Spark schema text."""
    return ", ".join(f"`{column.name}` {column.type}" for column in columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file with its path and size in bytes."""

    path: str
    size: int


class HadoopFiles:
    """The file system under one address (a URI or a local path). It needs no rename."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001 - the JVM's file system is the one that Spark's readers use
        self._jvm = jvm
        jsc: Any = spark._jsc  # noqa: SLF001 - as above
        self._path_class = self._jvm.org.apache.hadoop.fs.Path
        path = self._path_class(root)
        self._system = path.getFileSystem(jsc.hadoopConfiguration())
        self.root: str = self._system.makeQualified(path).toString()

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
            found.append(StoredFile(path=path, size=status.getLen()))
        return sorted(found, key=lambda file: file.path)

    def read(self, name: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""
        path = self._hadoop_path(name)
        if not self._system.exists(path):
            return None
        stream = self._system.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, content: str | bytes) -> None:
        """Write a whole file, replacing an existing one."""
        stream = self._system.create(self._hadoop_path(name), True)
        try:
            stream.write(bytearray(content.encode() if isinstance(content, str) else content))
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


_PARTITION: Final = re.compile(r"/dt=(\d{4})-(\d{2})-(\d{2})/hr=(\d{2})/([^/_.][^/]*\.parquet)$")
_FREQUENT_KINDS: Final = (
    LogKind.ATTEMPTED,
    LogKind.ENQUEUED,
    LogKind.DELIVERED,
    LogKind.PUBLISHED,
    LogKind.RETRY_SCHEDULED,
)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """An hour of the log. `part` counts hours from 1970; the fingerprint covers its files."""

    part: int
    paths: tuple[str, ...]
    fingerprint: str


def find_partitions(files: Iterable[StoredFile]) -> Mapping[int, Partition]:
    """Return the partitions with sealed segments, without files whose name begins with . or _."""
    found: dict[int, list[tuple[str, str]]] = {}
    for file in files:
        match = _PARTITION.search(file.path)
        if match is not None:
            year, month, day, hour, name = match.groups()
            part = (date(int(year), int(month), int(day)).toordinal() - _EPOCH_DAY) * 24 + int(hour)
            found.setdefault(part, []).append((file.path, f"{name}:{file.size}"))
    return {
        part: Partition(
            part=part,
            paths=tuple(path for path, _ in sorted(of_part)),
            fingerprint=" ".join(sorted(label for _, label in of_part)),
        )
        for part, of_part in sorted(found.items())
    }


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


def with_keys(rows: DataFrame) -> DataFrame:
    """Add the integer keys with which the jobs compute instead of text."""
    bases = F.array(
        F.lit(0).cast("bigint"), *(F.lit(order_base(kind)).cast("bigint") for kind in CODES)
    )
    return rows.withColumn("code", _kind_code()).select(
        "*",
        F.unix_micros("ts").alias("ts_us"),
        F.shiftrightunsigned("message_hi", 16).alias("born_ms"),
        text_key("subscription_id").alias("sub_key"),
        text_key("event_type").alias("type_key"),
        text_key("target_host").alias("host_key"),
        (
            F.get(bases, F.col("code"))
            + F.shiftleft(F.coalesce("generation", F.lit(0)).cast("bigint"), GENERATION_SHIFT)
            + F.shiftleft(F.coalesce("attempt", F.lit(0)).cast("bigint"), ATTEMPT_SHIFT)
        ).alias("order_key"),
        # Spark's round() converts to decimal digits, ten times as slow.
        F.floor(F.col("latency_ms") * F.lit(1000.0) + F.lit(0.5)).alias("latency_us"),
    )


def text_key(column: str) -> Column:
    """Return a 64-bit key of a text, null for null. `name_keys` detects collisions."""
    return F.when(F.col(column).isNotNull(), F.xxhash64(column))


def _kind_code() -> Column:
    """Return the code of the row's kind, 0 if unknown. Frequent kinds are compared first."""
    kinds = (*_FREQUENT_KINDS, *(kind for kind in CODES if kind not in _FREQUENT_KINDS))
    cases = " ".join(f"WHEN '{kind.value}' THEN {CODES[kind]}" for kind in kinds)
    return F.expr(f"CASE kind {cases} ELSE 0 END")
