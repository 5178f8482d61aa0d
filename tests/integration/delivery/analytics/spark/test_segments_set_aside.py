"""Test how Spark meets segments that are not as they were sealed: its errors, output and files."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from delivery.analytics.runs.errors import SparkFailedError
from delivery.analytics.sealing import check
from delivery.analytics.sealing.check import check_segments
from delivery.analytics.sealing.files import EntryKind, LocalFiles
from delivery.analytics.spark import __main__ as job
from delivery.analytics.spark.engine import SparkEngine
from delivery.analytics.spark.segments import HadoopFiles, HadoopSegments
from tests.support.analysis_run import Analyse, Analysed
from tests.support.damaged_segments import flip, segments_of
from tests.support.planted_outages import Planted, Town, plant
from tests.support.spark_sessions import HERE


@pytest.fixture(scope="module")
def town() -> Planted:
    return plant(Town(seed=9, minutes=230, rooms=2, per_room=2, a_minute=1.0, noise=0.1, lost=3))


@pytest.fixture(scope="module")
def clean(analyse: Analyse, town: Planted) -> Analysed:
    return analyse(town.rows, files=2)


@pytest.fixture
def copied(clean: Analysed, tmp_path: Path) -> Analysed:
    """Return the segments, without any output."""
    shutil.copytree(clean.segments, tmp_path / "segments")
    return Analysed(segments=tmp_path / "segments", out=tmp_path / "out", report=None)


@pytest.fixture
def analysed(clean: Analysed, copied: Analysed) -> Analysed:
    """Return the segments with the output of their analysis."""
    shutil.copytree(clean.out, copied.out)
    return replace(copied, report=clean.report)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let damage pass, as if it came between the check and the reading."""
    monkeypatch.setattr(check, "verify_bytes", lambda *_: None)


@pytest.mark.usefixtures("unchecked")
def test_damage_after_the_check_fails_in_three_lines(analyse: Analyse, copied: Analysed) -> None:
    """Spark verifies the checksums of pages, which it does not by default."""
    at = segments_of(copied)[0]
    flip(at)
    with pytest.raises(SparkFailedError) as caught:
        analyse.again(copied)
    what, where, remedy = str(caught.value).splitlines()
    assert "CRC" in what
    assert where.endswith(str(at.relative_to(copied.segments)))
    assert "--debug" in remedy
    assert not (copied.out / "latest.json").exists()


def test_an_unknown_file_system_is_an_error_of_three_lines(
    copied: Analysed, spark: SparkSession
) -> None:
    with pytest.raises(SparkFailedError) as caught:
        SparkEngine(
            spark,
            segments_at="gopher://here/segments",
            output=str(copied.out),
            on_status=lambda _: None,
        )
    assert len(str(caught.value).splitlines()) == 3


def test_the_command_exits_with_3_and_names_the_segment(
    analysed: Analysed, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def shared(**_: object) -> Iterator[SparkSession]:
        yield spark

    said: list[str] = []
    monkeypatch.setattr(job, "spark_session", shared)
    monkeypatch.setattr(job, "print_status", said.append)
    places = ["--segments", str(analysed.segments), "--out", str(analysed.out)]
    monkeypatch.setattr(sys, "argv", ["analysis", *places])
    flip(segments_of(analysed)[2])
    assert job.main() == 3
    assert any("set aside" in line and "damaged" in line for line in said)


def test_the_files_of_hadoop_are_checked_as_local_ones(
    spark: SparkSession, copied: Analysed
) -> None:
    flip(segments_of(copied)[1])
    segments_of(copied)[2].write_bytes(b"")
    folder = copied.segments / "dt=2026-01-01" / "hr=09" / "a.parquet"
    folder.mkdir(parents=True)
    (folder / "x").write_text("y")
    local = LocalFiles(str(copied.segments))
    remote = HadoopSegments(HadoopFiles(spark, str(copied.segments)))
    ours, theirs = (
        {one.path: (one.kind, one.size) for one in files.entries() if one.kind is EntryKind.FILE}
        for files in (local, remote)
    )
    assert {path: one for path, one in ours.items() if "a.parquet/" not in path} == theirs
    at = str(segments_of(copied)[0].relative_to(copied.segments))
    assert local.sha256(at) == remote.sha256(at)
    assert local.read(at, 10) == remote.read(at, 10)
    here, there = (
        check_segments(files, {}, now_ms=0, trust_known=True) for files in (local, remote)
    )
    assert [one.path for one in here.sound] == [one.path for one in there.sound]
    assert here.set_aside == there.set_aside
    assert len(here.set_aside) == 3
    with pytest.raises(OSError, match="nothing"):
        remote.sha256("nothing")


@pytest.mark.parametrize("master", ["local[1]", "nonsense"])
def test_the_process_prints_no_java(copied: Analysed, master: str) -> None:
    """Its output is a few lines; Spark's goes to a file that an error names."""
    flip(segments_of(copied)[1])
    places = ["--segments", str(copied.segments), "--out", str(copied.out)]
    options = os.environ["PYSPARK_SUBMIT_ARGS"]
    assert HERE in options
    environment = {**os.environ, "PYSPARK_SUBMIT_ARGS": options.replace(HERE, master)}
    found = subprocess.run(
        [sys.executable, "-m", "delivery.analytics.spark", *places],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""
    lines = found.stderr.splitlines()
    if master == "nonsense":
        assert found.returncode == 1
        what, where, remedy = lines
        assert "Java did not start" in what
        assert "SparkException" in Path(where).read_text()
        assert "--debug" in remedy
        shutil.rmtree(Path(where).parent)
    else:
        assert found.returncode == 3
        assert all(line[2] == ":" for line in lines), lines
        assert "set aside" in lines[-1]
