"""Running the analysis in a test, and reading what it gave out."""

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

from delivery.correlation.analysis import Analysis, Report
from delivery.correlation.follow import following
from delivery.correlation.state import MANY
from tests.correlation.sealed import write


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """The segments, the output, and what the last run reported."""

    segments: Path
    out: Path
    report: Report | None

    def latest(self) -> dict[str, Any]:
        """What the last run told readers."""
        told: dict[str, Any] = json.loads((self.out / "latest.json").read_text())
        return told

    def rows(self, table: str, query: str = "SELECT * FROM t") -> list[dict[str, Any]]:
        """Rows of a table as readers find it, or of a query about `t`."""
        folder = self.latest()["tables"][table]
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(f"CREATE VIEW t AS SELECT * FROM read_parquet('{self.out}/{folder}/*.parquet')")
            cursor = connection.execute(query)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


class Analyse:
    """Runs the analysis in the Spark that is there then."""

    def __init__(self, spark: Callable[[], SparkSession], folder: Callable[[], Path], now: datetime) -> None:
        self._spark = spark
        self._folder = folder
        self._now = now

    def __call__(self, rows: pa.Table, *, files: int = 1) -> Analysed:
        """Seal the rows and analyse them."""
        root = self._folder()
        write(rows, root / "segments", files=files)
        return self.again(Analysed(segments=root / "segments", out=root / "out", report=None))

    def by_command(self, before: Analysed) -> None:
        """Analyse what lies there as `spark-submit` does."""
        from delivery.correlation import __main__ as job

        @contextmanager
        def shared() -> Iterator[SparkSession]:
            yield self._spark()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "spark_session", shared)
            # Nobody reads it here, and what a command writes in another thread at that time is read.
            patch.setattr(job, "_tell", lambda _: None)
            patch.setattr(sys, "argv", ["analysis", "--segments", str(before.segments), "--out", str(before.out)])
            assert job.main() == 0

    def follow(self, before: Analysed, *, many: int = MANY) -> Analysed:
        """Have a stream analyse what was sealed since."""
        places = {"segments_at": str(before.segments), "out": str(before.out)}
        analysis = Analysis(self._spark(), **places, tell=lambda _: None, many=many)
        reports: list[Report] = []

        def work() -> None:
            report = analysis.run(now=self._now)
            if report is not None:
                reports.append(report)

        with following(self._spark(), **places, work=work, every_s=0.2) as stream:
            stream.catch_up()
        return Analysed(segments=before.segments, out=before.out, report=reports[0] if reports else None)

    def again(self, before: Analysed, *, full: bool = False) -> Analysed:
        """Analyse what lies in the same folders now."""
        analysis = Analysis(self._spark(), segments_at=str(before.segments), out=str(before.out), tell=lambda _: None)
        report = analysis.run(now=self._now, full=full)
        return Analysed(segments=before.segments, out=before.out, report=report)
