"""Test that runs in the process fail in three lines, and leave nothing behind.

Oracle: after a failed run `latest.json` names the previous one, and the next run succeeds.
"""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from delivery.analytics.local import engine, queries
from delivery.analytics.local.engine import LocalEngine
from delivery.analytics.runs.errors import LocalFailedError, StateError
from delivery.analytics.runs.run import LOCK, Analysis
from delivery.analytics.runs.tables import TABLES_BY_NAME
from delivery.analytics.sealing import check
from delivery.analytics.sealing.errors import BusyError
from delivery.analytics.sealing.lock import exclusive
from tests.support.analysis_run import Analysed, AnalyseHere
from tests.support.compared_tables import differences
from tests.support.damaged_segments import flip
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import write

NOW = datetime(2026, 1, 9, tzinfo=UTC)
_TOWN = Town(seed=9, minutes=130, rooms=1, per_room=2, a_minute=1.0, noise=0.1)


@pytest.fixture
def analyse(tmp_path: Path) -> AnalyseHere:
    return AnalyseHere(lambda: tmp_path, NOW)


@pytest.fixture
def copied(tmp_path: Path) -> Analysed:
    write(plant(_TOWN).rows, tmp_path / "segments")
    return Analysed(segments=tmp_path / "segments", out=tmp_path / "out", report=None)


def test_damage_after_the_check_fails_in_three_lines(
    analyse: AnalyseHere, copied: Analysed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "verify_bytes", lambda *_: None)
    at = min(copied.segments.rglob("*.parquet"))
    flip(at)
    with pytest.raises(LocalFailedError) as caught:
        analyse.again(copied)
    what, where, _ = str(caught.value).splitlines()
    assert "CRC" in what
    assert where == str(at)
    assert not (copied.out / "latest.json").exists()
    assert not list(copied.out.glob("_scratch-*"))


def test_a_failed_query_leaves_the_result_of_the_run_before(
    analyse: AnalyseHere, copied: Analysed, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = analyse.again(copied)
    latest = before.latest()
    wanted = before.rows("journeys")
    with monkeypatch.context() as patch:
        patch.setattr(queries, "HOURLY", "SELECT nothing FROM nowhere")
        with pytest.raises(LocalFailedError) as caught:
            analyse.again(copied, full=True)
    assert len(str(caught.value).splitlines()) == 3
    assert before.latest() == latest
    (copied.out / "_scratch-of-a-killed-run").mkdir()
    after = analyse.again(copied, full=True)
    assert after.report is not None
    assert after.report.run > latest["run"]
    assert not differences(after.rows("journeys"), wanted)
    assert not list(copied.out.glob("_scratch-*"))


def test_a_state_of_another_version_is_refused(analyse: AnalyseHere, copied: Analysed) -> None:
    analyse.again(copied)
    manifest = copied.out / "state" / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    with pytest.raises(StateError, match="--full"):
        analyse.again(copied)
    assert analyse.again(copied, full=True).report is not None


def test_two_runs_exclude_each_other(analyse: AnalyseHere, copied: Analysed) -> None:
    with exclusive(str(copied.out), LOCK), pytest.raises(BusyError):
        analyse.again(copied)


def test_memory_is_limited(
    analyse: AnalyseHere, copied: Analysed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is DuckDB's own; what exceeds it goes to the folder of temporary files."""
    seen: list[tuple[str, str, int]] = []
    original = LocalEngine.contradictions

    def looked(self: LocalEngine, manifest: object, partitions: object) -> dict[str, str]:
        rows = self._connection.execute(
            "SELECT current_setting('memory_limit'), current_setting('temp_directory'),"
            " current_setting('threads')"
        ).fetchall()
        seen.extend(rows)
        return original(self, manifest, partitions)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalEngine, "contradictions", looked)
    analyse.again(copied)
    ((memory, folder, threads),) = seen
    assert memory in {"953.6 MiB", "1.0 GB"}
    assert folder.startswith(str(copied.out / "_scratch-"))
    assert 1 <= threads <= 4


_WITHOUT_JAVA = """
import sys
from delivery.analytics.local.__main__ import main
code = main()
assert not {"pyspark", "py4j"} & set(sys.modules)
sys.exit(code)
"""


@pytest.mark.parametrize(("damaged", "expected"), [(False, 0), (True, 3)], ids=["whole", "damaged"])
def test_the_job_needs_no_java(copied: Analysed, *, damaged: bool, expected: int) -> None:
    if damaged:
        flip(max(copied.segments.rglob("*.parquet")))
    places = ["--segments", str(copied.segments), "--out", str(copied.out)]
    environment = {**os.environ, "PATH": "/nowhere", "JAVA_HOME": "/nowhere"}
    found = subprocess.run(
        [sys.executable, "-c", _WITHOUT_JAVA, *places],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == expected, found.stderr
    lines = found.stderr.splitlines()
    assert all(line[2] == ":" for line in lines), lines
    assert ("set aside" in lines[-1]) is damaged


def test_a_folder_without_segments_is_an_error_of_the_job(tmp_path: Path) -> None:
    places = ["--segments", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    found = subprocess.run(
        [sys.executable, "-m", "delivery.analytics.local", *places],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert "no sealed segments" in found.stderr


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Analysed:
    """Return a log whose rows need about 60 MB, analysed with memory enough."""
    root = tmp_path_factory.mktemp("large")
    town = Town(seed=3, minutes=100, rooms=6, per_room=5, a_minute=6.0, noise=0.05)
    write(plant(town).rows, root / "segments")
    found = Analysed(segments=root / "segments", out=root / "out", report=None)
    return AnalyseHere(lambda: root, NOW).again(found)


def test_what_does_not_fit_into_memory_goes_to_temporary_files(
    large: Analysed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_MEMORY", "32MB")
    monkeypatch.setattr(engine, "_MAX_THREADS", 2)
    found = Analysed(segments=large.segments, out=tmp_path, report=None)
    spilled = 0

    def look(_: str) -> None:
        nonlocal spilled
        spilled += sum(path.stat().st_size for path in tmp_path.glob("_scratch-*/*.tmp"))

    places = {"segments_at": str(found.segments), "output": str(found.out)}
    Analysis(LocalEngine(**places, on_status=look)).run(now=NOW)
    assert spilled > 0
    assert not list(tmp_path.glob("_scratch-*"))
    for table in TABLES_BY_NAME:
        assert not differences(found.rows(table), large.rows(table)), table


def test_too_little_memory_fails_in_three_lines(
    analyse: AnalyseHere, large: Analysed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Analysed(segments=large.segments, out=tmp_path, report=None)
    monkeypatch.setattr(engine, "_MEMORY", "4MB")
    with pytest.raises(LocalFailedError) as caught:
        analyse.again(found)
    what, _, remedy = str(caught.value).splitlines()
    assert "Out of Memory" in what
    assert "--engine spark" in remedy
    assert list(tmp_path.glob("*.json")) == list(tmp_path.glob("_scratch-*")) == []
