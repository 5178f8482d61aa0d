"""Following: the analysis within a minute of now, by a Structured Streaming job over the sealed segments.

The stream only tells that there are new files, and its checkpoint remembers which; what they change is worked out partition by
partition, by the very run that a batch makes. A partition is done while its files are the ones it was done from, so a batch that
comes again after a crash finds nothing to do: nothing is counted twice, whatever the checkpoint says. A checkpoint that was
deleted costs one look.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from delivery.correlation.columns import SEGMENT, ddl
from delivery.correlation.errors import AnalysisError, FollowError
from delivery.correlation.files import Files

CHECKPOINT: Final = "stream"
"""Where the checkpoint lies, below the address of the output."""

Work = Callable[[], None]


class Following(Protocol):
    """A stream that runs."""

    def catch_up(self) -> None:
        """Come back when all files that are sealed by now are analysed. AnalysisError: the stream is over."""
        ...


class _Stream:
    def __init__(self, spark: SparkSession, *, segments_at: str, checkpoint: str, work: Work, every_s: float) -> None:
        self._work = work
        self._failed: AnalysisError | None = None
        # No file is opened: the rows are read by the run, of the partitions that it finds to have changed.
        files = spark.readStream.schema(f"{ddl(SEGMENT)}, dt date, hr int").parquet(segments_at)
        writer = files.select("writer_seq").writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", checkpoint).queryName("rooms analysis")
        self.query = writer.trigger(processingTime=f"{every_s} seconds").start()

    def _batch(self, _: DataFrame, __: int) -> None:
        try:
            self._work()
        except AnalysisError as exc:
            self._failed = exc
            raise

    def catch_up(self) -> None:
        try:
            self.query.processAllAvailable()
        except StreamingQueryException as exc:
            raise self._failed or FollowError(f"the stream ended: {exc}") from exc


@contextmanager
def following(spark: SparkSession, *, segments_at: str, out: str, work: Work, every_s: float) -> Iterator[Following]:
    """Have `work` done whenever segments were sealed, looked for every `every_s` seconds.

    `work` runs in a thread of the stream's. What it raises ends the stream.
    """
    segments = Files(spark, segments_at)
    segments.make()
    stream = _Stream(
        spark,
        segments_at=segments.root,
        checkpoint=f"{Files(spark, out).root}/{CHECKPOINT}",
        work=work,
        every_s=every_s,
    )
    try:
        yield stream
    finally:
        stream.query.stop()
