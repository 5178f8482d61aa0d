"""Sealed segments as Spark sees them: which partitions there are, which changed, and their rows, each once."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from delivery.correlation.columns import SEGMENT, ddl
from delivery.correlation.conformance import ATTEMPT_SHIFT, CODES, GENERATION_SHIFT, order_base
from delivery.correlation.files import File
from rooms.domain.states import LogKind

_PARTITION: Final = re.compile(r"/dt=(\d{4})-(\d{2})-(\d{2})/hr=(\d{2})/([^/_.][^/]*\.parquet)$")
_FREQUENT: Final = (LogKind.ATTEMPTED, LogKind.ENQUEUED, LogKind.DELIVERED, LogKind.PUBLISHED, LogKind.RETRY_SCHEDULED)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """An hour of the log. `part` counts hours since 1970; the fingerprint changes whenever its files do."""

    part: int
    paths: tuple[str, ...]
    fingerprint: str


def partitions(files: Iterable[File]) -> Mapping[int, Partition]:
    """The partitions that have sealed segments. Files whose names begin with a dot or underscore are not sealed yet."""
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
            fingerprint=" ".join(sorted(told for _, told in of_part)),
        )
        for part, of_part in sorted(found.items())
    }


def read(spark: SparkSession, root: str, chosen: Collection[Partition]) -> DataFrame:
    """The rows of these partitions as they lie there, with `part`."""
    schema = f"{ddl(SEGMENT)}, dt date, hr int"
    paths = [path for partition in chosen for path in partition.paths]
    rows = spark.read.schema(schema).option("basePath", root).parquet(*paths)
    return rows.withColumn("part", F.unix_date("dt") * 24 + F.col("hr")).drop("dt", "hr")


def once(rows: DataFrame, doubled: Collection[int]) -> DataFrame:
    """Each row of a writer once. `doubled` are the partitions in which one comes twice; the others are left in peace.

    A row has one time, so its copies lie in one partition.
    """
    if not doubled:
        return rows
    alone = rows.where(~F.col("part").isin(*doubled))
    # The number first: what sorts by it hardly ever has to look at the rest.
    window = Window.partitionBy("writer_seq", "writer_id", "part").orderBy("xid", "kind")
    some = rows.where(F.col("part").isin(*doubled)).withColumn("copy", F.row_number().over(window))
    return alone.unionByName(some.where("copy = 1").drop("copy"))


def keyed(rows: DataFrame) -> DataFrame:
    """The rows with what the jobs compute with: whole numbers instead of text, wherever a text would be a key."""
    bases = F.array(F.lit(0).cast("bigint"), *(F.lit(order_base(kind)).cast("bigint") for kind in CODES))
    return rows.withColumn("code", _code()).select(
        "*",
        F.unix_micros("ts").alias("ts_us"),
        F.shiftrightunsigned("message_hi", 16).alias("born_ms"),
        key("subscription_id").alias("sub_key"),
        key("event_type").alias("type_key"),
        key("target_host").alias("host_key"),
        (
            F.get(bases, F.col("code"))
            + F.shiftleft(F.coalesce("generation", F.lit(0)).cast("bigint"), GENERATION_SHIFT)
            + F.shiftleft(F.coalesce("attempt", F.lit(0)).cast("bigint"), ATTEMPT_SHIFT)
        ).alias("order_key"),
        # Spark's round() goes by way of the decimal digits, ten times as slow.
        F.floor(F.col("latency_ms") * F.lit(1000.0) + F.lit(0.5)).alias("latency_us"),
    )


def key(column: str) -> Column:
    """A 64-bit key of a text; null where the text is. `names` makes sure that no two texts share one."""
    return F.when(F.col(column).isNotNull(), F.xxhash64(column))


def _code() -> Column:
    """The code of the row's kind, 0 for one that this version does not know. Each comparison costs: what is frequent first."""
    kinds = (*_FREQUENT, *(kind for kind in CODES if kind not in _FREQUENT))
    cases = " ".join(f"WHEN '{kind.value}' THEN {CODES[kind]}" for kind in kinds)
    return F.expr(f"CASE kind {cases} ELSE 0 END")
