"""Test which engine a run gets, by the rows and the place of the log, and when findings are loaded."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from delivery.analytics.local.files import LocalOutput
from delivery.analytics.results import pipeline as module
from delivery.analytics.results.pipeline import (
    AUTO,
    SMALL_ROWS,
    AnalysisPipeline,
    EngineChoice,
    choose_engine,
    count_rows,
)
from delivery.analytics.results.reader import AnalysisTables
from delivery.analytics.runs.errors import AnalysisError
from delivery.analytics.runs.manifest import (
    LOCAL,
    SPARK,
    DonePartition,
    Manifest,
    save_manifest,
)
from delivery.analytics.runs.run import Analysis
from delivery.analytics.sealing.check import KnownSegment
from delivery.analytics.sealing.manifest import SegmentManifest, WriterRange
from tests.support.analysis_tables import write_tables

_HOUR = 490_896


def seal(root: Path, name: str, rows: int) -> Path:
    """Write a manifest that states so many rows, and a file with no content beside it."""
    at = root / "segments" / "dt=2026-01-01" / "hr=00" / f"{name}.parquet"
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_bytes(b"")
    stated = SegmentManifest(
        segment=at.name, part=_HOUR, rows=rows, size=0, sha256="0" * 64, layout=1, log_version=1,
        kinds=(), columns=(), writers={1: WriterRange(rows=rows, first=1, last=rows)},
    )  # fmt: skip
    at.with_name(f"_{at.name}.manifest").write_text(stated.text())
    return at


def chosen(
    root: Path,
    asked: str = AUTO,
    environment: Mapping[str, str] | None = None,
    *,
    full: bool = False,
) -> EngineChoice:
    return choose_engine(
        asked,
        segments_at=f"{root}/segments",
        output=f"{root}/tables",
        full=full,
        environment=environment or {},
    )


def test_the_rows_that_manifests_state_decide(tmp_path: Path) -> None:
    assert chosen(tmp_path).engine == LOCAL
    seal(tmp_path, "a", SMALL_ROWS - 1)
    assert chosen(tmp_path).engine == LOCAL
    assert "999,999 rows" in chosen(tmp_path).why
    seal(tmp_path, "b", 1)
    assert chosen(tmp_path).engine == SPARK
    assert "1,000,000" in chosen(tmp_path).why
    assert chosen(tmp_path, LOCAL).engine == LOCAL
    assert count_rows(f"{tmp_path}/segments") == SMALL_ROWS


def test_a_damaged_manifest_counts_nothing(tmp_path: Path) -> None:
    at = seal(tmp_path, "a", 7)
    at.with_name("_b.parquet.manifest").write_bytes(b"\xff{")
    os.mkfifo(at.with_name("_c.parquet.manifest"))
    assert count_rows(f"{tmp_path}/segments") == 7


@pytest.mark.parametrize(
    "environment",
    [
        {"PYSPARK_SUBMIT_ARGS": "--master spark://here:7077 pyspark-shell"},
        {"PYSPARK_GATEWAY_PORT": "4040"},
    ],
)
def test_a_named_master_gets_spark(tmp_path: Path, environment: dict[str, str]) -> None:
    assert chosen(tmp_path, AUTO, environment).engine == SPARK
    assert chosen(tmp_path, LOCAL, environment).engine == LOCAL
    heap = {"PYSPARK_SUBMIT_ARGS": "--driver-memory 1g pyspark-shell"}
    assert chosen(tmp_path, AUTO, heap).engine == LOCAL


def test_what_is_not_on_this_machine_gets_spark(tmp_path: Path) -> None:
    far, tables = "s3://logs/segments", f"{tmp_path}/tables"
    assert choose_engine(AUTO, segments_at=far, output=tables).engine == SPARK
    with pytest.raises(AnalysisError) as caught:
        choose_engine(LOCAL, segments_at=far, output=tables)
    assert len(str(caught.value).splitlines()) == 3
    near = f"file://{tmp_path}/segments"
    assert (
        choose_engine(AUTO, segments_at=near, output=f"file://{tables}", environment={}).engine
        == LOCAL
    )


def test_without_duckdb_there_is_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert chosen(tmp_path).engine == SPARK


@pytest.mark.parametrize("engine", [LOCAL, SPARK])
def test_the_engine_that_counted_what_is_gone_goes_on(tmp_path: Path, engine: str) -> None:
    """Only its state has these numbers, and the other one would start over without them."""
    at = seal(tmp_path, "a", SMALL_ROWS if engine == LOCAL else 5)
    path = str(at.relative_to(tmp_path / "segments"))
    known = {path: KnownSegment(size=0, modified_ms=0, sha256="0" * 64)}
    manifest = Manifest(done_partitions={_HOUR: DonePartition(run=1, files=known)}, published=1)
    save_manifest(LocalOutput(f"{tmp_path}/tables"), manifest, engine)
    other = SPARK if engine == LOCAL else LOCAL
    assert chosen(tmp_path).engine == other
    at.unlink()
    at.with_name(f"_{at.name}.manifest").unlink()
    seal(tmp_path, "b", SMALL_ROWS if engine == LOCAL else 5)
    assert chosen(tmp_path).engine == engine
    assert "1 segments that are gone" in chosen(tmp_path).why
    assert chosen(tmp_path, full=True).engine == other
    # A damaged state says nothing.
    state = tmp_path / "tables" / "state" / "manifest.json"
    state.write_text(json.dumps({"meaning": "before"}))
    assert chosen(tmp_path).engine == other


def test_findings_are_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round without new segments is not a new run to the API, whose cursors name the run."""
    loads: list[int] = []

    def load(published: AnalysisTables, _: str) -> bool:
        loads.append(published.run)
        return True

    monkeypatch.setattr(module, "load_results", load)
    monkeypatch.setattr(AnalysisPipeline, "_choose", lambda *_, **__: None)
    monkeypatch.setattr(AnalysisPipeline, "_engine", lambda *_: MagicMock())
    monkeypatch.setattr(Analysis, "run", lambda *_, **__: None)
    pipeline = AnalysisPipeline(
        database_url="",
        root_url=str(tmp_path),
        on_status=lambda _: None,
        engine=LOCAL,
        spark=lambda _: None,
    )
    (tmp_path / "tables").mkdir()
    write_tables(tmp_path / "tables", {})
    assert [pipeline.run_once(export=False).loaded for _ in range(3)] == [True] * 3
    assert loads == [1]
    latest = tmp_path / "tables" / "latest.json"
    latest.write_text(json.dumps({**json.loads(latest.read_text()), "run": 2}))
    pipeline.run_once(export=False)
    assert loads == [1, 2]
