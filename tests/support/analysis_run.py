"""Run the analysis in a test, and read its output."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from delivery.analytics.local.engine import LocalEngine
from delivery.analytics.runs.engine import Engine
from delivery.analytics.runs.manifest import COMPACT_AFTER_RUNS
from delivery.analytics.runs.run import Analysis, AnalysisReport
from delivery.analytics.spark.engine import SparkEngine
from delivery.analytics.spark.follow import follow_segments
from tests.support.sealed_segments import write


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """Segments, output, and the report of the last run."""

    segments: Path
    out: Path
    report: AnalysisReport | None

    def latest(self) -> dict[str, Any]:
        """Return `latest.json`."""
        result: dict[str, Any] = json.loads((self.out / "latest.json").read_text())
        return result

    def rows(self, table: str, query: str = "SELECT * FROM t") -> list[dict[str, Any]]:
        """Return the rows of a published table, or of a query about it as `t`."""
        folder = self.latest()["tables"][table]
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(
                f"CREATE VIEW t AS SELECT * FROM read_parquet('{self.out}/{folder}/*.parquet')"
            )
            cursor = connection.execute(query)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


class Analyse:
    """Runs the analysis in the current Spark session, or in this process."""

    def __init__(
        self, spark: Callable[[], SparkSession], folder: Callable[[], Path], now: datetime
    ) -> None:
        self._spark = spark
        self._folder = folder
        self._now = now

    def _engine(self, *, segments_at: str, output: str) -> Engine:
        return SparkEngine(
            self._spark(), segments_at=segments_at, output=output, on_status=lambda _: None
        )

    def __call__(self, rows: pa.Table, *, files: int = 1) -> Analysed:
        """Seal the rows and analyse them."""
        root = self._folder()
        write(rows, root / "segments", files=files)
        return self.again(Analysed(segments=root / "segments", out=root / "out", report=None))

    def by_command(self, before: Analysed) -> None:
        """Analyse the segments as `spark-submit` does."""
        from delivery.analytics.spark import __main__ as job

        @contextmanager
        def shared(**_: object) -> Iterator[SparkSession]:
            yield self._spark()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "spark_session", shared)
            # Silenced, as a test captures the output of a command in another thread.
            patch.setattr(job, "print_status", lambda _: None)
            patch.setattr(
                sys,
                "argv",
                ["analysis", "--segments", str(before.segments), "--out", str(before.out)],
            )
            assert job.main() == 0

    def follow(self, before: Analysed, *, many: int = COMPACT_AFTER_RUNS) -> Analysed:
        """Analyse new segments through a stream."""
        places = {"segments_at": str(before.segments), "output": str(before.out)}
        engine = SparkEngine(self._spark(), **places, on_status=lambda _: None)
        analysis = Analysis(engine, compact_after_runs=many)
        reports: list[AnalysisReport] = []

        def work() -> None:
            report = analysis.run(now=self._now)
            if report is not None:
                reports.append(report)

        with follow_segments(self._spark(), **places, work=work, every_s=0.2) as stream:
            stream.catch_up()
        return Analysed(
            segments=before.segments, out=before.out, report=reports[0] if reports else None
        )

    def again(
        self,
        before: Analysed,
        *,
        full: bool = False,
        accept_gone: bool = False,
        many: int = COMPACT_AFTER_RUNS,
    ) -> Analysed:
        """Analyse the segments in the same folders again; `many` runs are compacted."""
        engine = self._engine(segments_at=str(before.segments), output=str(before.out))
        report = Analysis(engine, compact_after_runs=many).run(
            now=self._now, full=full, accept_gone=accept_gone
        )
        return Analysed(segments=before.segments, out=before.out, report=report)


class AnalyseHere(Analyse):
    """Runs the analysis in this process, without Spark."""

    def __init__(self, folder: Callable[[], Path], now: datetime) -> None:
        super().__init__(_no_spark, folder, now)

    def _engine(self, *, segments_at: str, output: str) -> Engine:
        return LocalEngine(segments_at=segments_at, output=output, on_status=lambda _: None)


def _no_spark() -> SparkSession:
    raise AssertionError("this engine needs no Spark")
