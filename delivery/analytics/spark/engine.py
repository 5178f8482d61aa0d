"""Compute runs with Spark."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from delivery.analytics.runs.engine import CountedPartitions, OnStatus, Publication
from delivery.analytics.runs.manifest import SPARK, Manifest, Partition
from delivery.analytics.spark import counts, journeys, reconciliation, rollups, segments
from delivery.analytics.spark.publish_results import RunPublisher
from delivery.analytics.spark.segments import HadoopFiles, open_segments
from delivery.analytics.spark.session import run_parallel, translate_spark_errors, tuned_for_size
from delivery.analytics.spark.state import PartialResults, write_table

_STATE_BUILDERS: Final[dict[str, Callable[[DataFrame], DataFrame]]] = {
    "deliveries": journeys.partial_journeys,
    "anchors": reconciliation.anchor_counts,
    "rollups": rollups.hourly_state,
    "cells": counts.count_attempts,
    "causes": counts.count_attributes,
}
_LOCAL_MASTER: Final = re.compile(r"local(\[.*\])?")
"""Master URLs for which tasks run in the driver process."""


class SparkEngine:
    """Compute runs in one Spark session."""

    name = SPARK

    def __init__(
        self, spark: SparkSession, *, segments_at: str, output: str, on_status: OnStatus
    ) -> None:
        self._spark = spark
        with translate_spark_errors(spark, segments_at):
            files = HadoopFiles(spark, segments_at)
            self.output = HadoopFiles(spark, output)
        self._root = files.root
        self.segments = open_segments(files)
        self.on_status = on_status
        self._small = False

    @contextmanager
    def running(self, size_bytes: int) -> Iterator[None]:
        """Plan queries for an input of this size."""
        with tuned_for_size(self._spark, size_bytes) as self._small:
            yield

    def translate_errors(self, where: str) -> AbstractContextManager[None]:
        """Raise errors of Spark and the JVM as SparkFailedError."""
        return translate_spark_errors(self._spark, where)

    def contradictions(
        self,
        manifest: Manifest,  # noqa: ARG002 - of the port
        partitions: Collection[Partition],
    ) -> dict[str, str]:
        """Return the segments whose rows are not what their manifests state."""
        return segments.contradictions(self._spark, self._root, partitions)

    def count(self, manifest: Manifest, partitions: Sequence[Partition]) -> CountedPartitions:
        """Write the state of partitions."""
        if not partitions:
            return CountedPartitions(doubled={}, schemas={})
        state = PartialResults(self._spark, self.output, manifest)
        run = manifest.next_run
        rows = segments.read_rows(self._spark, self._root, partitions)
        self.on_status(f"reading {len(partitions)} partitions")
        counted = reconciliation.sequence_words(rows)
        write_table(counted, state.table_path(run, "words"))
        words = self._spark.read.schema(counted.schema).parquet(state.table_path(run, "words"))
        schemas = {"words": counted.schema.json()}
        doubled = reconciliation.duplicate_partitions(words)
        keyed = segments.with_keys(segments.deduplicate(rows, doubled), manifest.salt)
        if self._small and _LOCAL_MASTER.fullmatch(self._spark.sparkContext.master or ""):
            # Five tables use the rows. A cluster reads them again, as it may lose an executor.
            keyed = keyed.localCheckpoint(eager=False)

        def count(name: str) -> None:
            self.on_status(f"counting {name}")
            made = _STATE_BUILDERS[name](keyed)
            write_table(made, state.table_path(run, name))
            schemas[name] = made.schema.json()

        with run_parallel(self._spark) as start:
            for name in _STATE_BUILDERS:
                start(partial(count, name))
        return CountedPartitions(doubled=doubled, schemas=schemas)

    def compact(self, manifest: Manifest) -> Manifest:
        """Merge the state of all runs into one."""
        return PartialResults(self._spark, self.output, manifest).compact(
            ("words", *_STATE_BUILDERS), into_run=manifest.next_run
        )

    def publish(self, publication: Publication) -> dict[str, int]:
        """Write the tables of one run."""
        state = PartialResults(self._spark, self.output, publication.manifest)
        publisher = RunPublisher(
            self._spark, self.output, run=publication.run, on_status=self.on_status
        )

        def read(parts: Sequence[int]) -> DataFrame | None:
            chosen = publication.whole(parts)
            if not chosen:
                return None
            rows = segments.read_rows(self._spark, self._root, chosen)
            repeated = {part for part in parts if publication.doubled.get(part)}
            if old := [one.part for one in chosen if one.part not in publication.fresh]:
                repeated |= set(
                    reconciliation.duplicate_partitions(
                        state.read_table("words").where(F.col("part").isin(*old))
                    )
                )
            return segments.with_keys(
                segments.deduplicate(rows, repeated), publication.manifest.salt
            )

        return publisher.publish(state, publication, read, small=self._small)
