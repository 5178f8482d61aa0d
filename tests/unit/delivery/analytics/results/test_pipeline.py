"""Test when the pipeline loads findings."""

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from delivery.analytics.results import pipeline as module
from delivery.analytics.results.pipeline import AnalysisPipeline
from delivery.analytics.results.reader import AnalysisTables
from delivery.analytics.runs.manifest import LOCAL
from delivery.analytics.runs.run import Analysis
from tests.support.analysis_tables import write_tables


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
