"""Follow the log within a minute, by a Structured Streaming job over the sealed segments.

The stream only signals new files, and its checkpoint records them. The same run as in batch mode
then processes the changed partitions. A partition is done as long as its files are unchanged, so a
batch repeated after a crash finds nothing to do. Nothing is counted twice, whatever the checkpoint
says. A deleted checkpoint costs one scan.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from delivery.analytics.sealing.layout import SEGMENT_COLUMNS, ddl
from delivery.analytics.sealing.lock import exclusive
from delivery.analytics.spark.segments import HadoopFiles
from delivery.analytics.spark.session import translate_spark_errors
from rooms.errors import DeliveryError

CHECKPOINT: Final = "stream"
"""Folder of the checkpoint under the output address."""

Work = Callable[[], None]


class SegmentStream(Protocol):
    """Control a running stream."""

    def catch_up(self) -> None:
        """Wait until all sealed files are analysed. Raise AnalysisError if the stream ended."""
        ...


class _StructuredStream:
    def __init__(
        self, spark: SparkSession, *, segments_at: str, checkpoint: str, work: Work, every_s: float
    ) -> None:
        self._spark = spark
        self._segments_at = segments_at
        self._work = work
        self._error: DeliveryError | None = None
        # Opens no file: the run reads the rows of the changed partitions.
        files = spark.readStream.schema(ddl(SEGMENT_COLUMNS)).parquet(
            # Without partitions, as folders that are none would end the stream.
            segments_at,
            recursiveFileLookup=True,
        )
        writer = files.select("writer_seq").writeStream.foreachBatch(self._on_batch)
        writer = writer.option("checkpointLocation", checkpoint).queryName("rooms analysis")
        self.query = writer.trigger(processingTime=f"{every_s} seconds").start()

    def _on_batch(self, _: DataFrame, __: int) -> None:
        try:
            self._work()
        except DeliveryError as exc:
            self._error = exc
            raise

    def catch_up(self) -> None:
        try:
            self.query.processAllAvailable()
        except StreamingQueryException as exc:
            if self._error is not None:
                raise self._error from exc
            with translate_spark_errors(self._spark, self._segments_at):
                raise


@contextmanager
def follow_segments(
    spark: SparkSession, *, segments_at: str, output: str, work: Work, every_s: float
) -> Iterator[SegmentStream]:
    """Call `work` after segments were sealed; scan for them every `every_s` seconds.

    `work` runs in a thread of the stream. An error in it ends the stream. Raise BusyError if
    another stream works on the same local folder.
    """
    with translate_spark_errors(spark, segments_at):
        segments, tables = HadoopFiles(spark, segments_at), HadoopFiles(spark, output)
    with exclusive(tables.local_folder, CHECKPOINT):
        with translate_spark_errors(spark, segments.root):
            segments.make_root()
            stream = _StructuredStream(
                spark,
                segments_at=segments.root,
                checkpoint=f"{tables.root}/{CHECKPOINT}",
                work=work,
                every_s=every_s,
            )
        try:
            yield stream
        finally:
            stream.query.stop()
