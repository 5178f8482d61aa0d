"""Test runs of both engines over segments that are not as they were sealed.

Oracle: rows that were not read are never counted as loss, the result names every such segment, and
once the segments are whole again the tables equal those of a run that saw no damage.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from delivery.analytics.results.reader import AnalysisTables, read_reconciliation
from delivery.analytics.runs.errors import NoSegmentsError, StateError
from delivery.analytics.runs.run import LOCK
from delivery.analytics.runs.tables import TABLES_BY_NAME
from delivery.analytics.sealing.errors import BusyError
from delivery.analytics.sealing.lock import exclusive
from tests.support.analysis_run import Analyse, Analysed, AnalyseHere
from tests.support.compared_tables import differences
from tests.support.damaged_segments import flip, lie, other_writers, segments_of
from tests.support.planted_outages import Planted, Town, plant
from tests.support.sealed_segments import write_sealed

_HOLDER = """
import sys
from delivery.analytics.sealing.lock import exclusive
with exclusive(sys.argv[1], sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def town() -> Planted:
    return plant(Town(seed=9, minutes=230, rooms=2, per_room=2, a_minute=1.0, noise=0.1, lost=3))


@pytest.fixture(scope="module", params=["local", "spark"])
def analyse_by(request: pytest.FixtureRequest, folder: Callable[[], Path]) -> Analyse:
    """Return a function that analyses with one engine."""
    if request.param == "local":
        return AnalyseHere(folder, datetime(2026, 1, 9, tzinfo=UTC))
    spark: Analyse = request.getfixturevalue("analyse")
    return spark


@pytest.fixture(scope="module")
def clean(analyse_by: Analyse, town: Planted) -> Analysed:
    return analyse_by(town.rows, files=2)


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


def reasons(analysed: Analysed) -> dict[str, str]:
    """Return the reason of each segment that the last result names."""
    latest = analysed.latest()
    assert latest["incomplete"] is bool(latest["set_aside"])
    assert latest["set_aside_total"] == len(latest["set_aside"])
    return {one["path"]: one["reason"] for one in latest["set_aside"]}


def test_damage_is_named_and_never_counted_as_loss(
    analyse_by: Analyse, clean: Analysed, copied: Analysed
) -> None:
    """Of eight segments five are set aside; the rest of the log is analysed, and later all of it."""
    paths = segments_of(copied)
    assert len(paths) == 8
    kept = {path: path.read_bytes() for path in copied.segments.rglob("*") if path.is_file()}
    flip(paths[1])
    paths[3].write_bytes(b"")
    lie(paths[4], other_writers)
    paths[6].with_name(f"_{paths[6].name}.manifest").unlink()
    paths[7].unlink()
    found = analyse_by.again(copied)
    named = {str(path.relative_to(copied.segments)) for path in paths}
    assert reasons(found) == dict(
        zip(
            (str(paths[number].relative_to(copied.segments)) for number in (1, 3, 4, 6, 7)),
            ("damaged", "empty", "damaged", "unsealed", "gone"),
            strict=True,
        )
    )
    assert found.report is not None
    assert {one.path for one in found.report.set_aside} < named
    tables = AnalysisTables.open(str(found.out))
    books = read_reconciliation(tables.rows, is_incomplete=tables.is_incomplete)
    assert tables.is_incomplete
    assert (books.lost, books.missing, books.has_losses) == (0, 0, False)
    assert not books.is_balanced
    assert books.totals["unknown"] > 0
    rows = found.rows("reconciliation")
    assert {(row["residual_fanout"], row["residual_outcome"]) for row in rows} == {(0, 0)}
    # Nothing changes, so nothing is computed again.
    assert analyse_by.again(found).report is None
    assert reasons(found)

    for path, content in kept.items():
        path.write_bytes(content)
    healed = analyse_by.again(found)
    assert reasons(healed) == {}
    for table in TABLES_BY_NAME:
        leave = {c.name for c in TABLES_BY_NAME[table].columns if c.name.endswith("_ms")}
        leave = leave if table == "rollups_daily" else set()
        assert not differences(healed.rows(table), clean.rows(table), leave), table


def test_what_is_gone_keeps_its_numbers_and_is_named(
    analyse_by: Analyse, clean: Analysed, analysed: Analysed
) -> None:
    """A full run has no numbers of it, and names it all the same."""
    gone = segments_of(analysed)[0]
    name = str(gone.relative_to(analysed.segments))
    gone.unlink()
    gone.with_name(f"_{gone.name}.manifest").unlink()
    found = analyse_by.again(analysed)
    assert reasons(found) == {name: "gone"}
    assert found.latest()["set_aside"][0]["counted"] is True
    assert found.latest()["totals"] == clean.latest()["totals"]
    removed = analyse_by.again(found, accept_gone=True)
    assert reasons(removed) == {}
    assert removed.latest()["totals"] == clean.latest()["totals"]
    assert analyse_by.again(removed).report is None
    full = analyse_by.again(found, full=True)
    assert reasons(full) == {name: "gone"}
    assert full.latest()["set_aside"][0]["counted"] is False
    assert full.latest()["totals"]["enqueued"] < clean.latest()["totals"]["enqueued"]
    # And still after the next run.
    (full.segments / "notes.txt").write_text("hello")
    assert reasons(analyse_by.again(full)) == {name: "gone", "notes.txt": "foreign"}


def test_a_flipped_bit_of_an_analysed_segment_is_noticed_when_its_rows_are_read_again(
    analyse_by: Analyse, analysed: Analysed, town: Planted
) -> None:
    """Its size and time are as they were, so only its bytes can show it."""
    at = segments_of(analysed)[0]
    about = at.stat()
    flip(at)
    os.utime(at, ns=(about.st_atime_ns, about.st_mtime_ns))
    # New rows of deliveries of the first hour, two hours later.
    unfinished = town.rows.filter(
        pa.compute.equal(town.rows.column("kind"), pa.scalar("retry_scheduled"))
    ).sort_by("ts").slice(0, 5)  # fmt: skip
    late = unfinished.to_pylist()
    ts = max(town.rows.column("ts").to_pylist())
    for number, row in enumerate(late, 1):
        row.update(kind="sidelined", ts=ts, writer_id=90, writer_seq=number, attempt=9)
    folder = segments_of(analysed)[-1].parent.relative_to(analysed.segments)
    rows = pa.Table.from_pylist(late, schema=town.rows.schema)
    write_sealed(rows, analysed.segments, f"{folder}/late.parquet")
    found = analyse_by.again(analysed)
    name = str(at.relative_to(analysed.segments))
    assert reasons(found) == {name: "damaged"}
    assert analyse_by.again(found).report is None
    assert reasons(found) == {name: "damaged"}


def test_only_unsealed_segments_are_an_error_that_names_the_command(
    analyse_by: Analyse, copied: Analysed
) -> None:
    for at in copied.segments.rglob("*.manifest"):
        at.unlink()
    with pytest.raises(NoSegmentsError) as caught:
        analyse_by.again(copied)
    assert caught.value.is_incomplete
    what, where, remedy = str(caught.value).splitlines()
    assert "all 8 are set aside" in what
    assert "unsealed" in where
    assert "rooms segments seal" in remedy
    assert not (copied.out / "latest.json").exists()


def test_the_state_of_a_version_without_manifests_is_refused(
    analyse_by: Analyse, analysed: Analysed
) -> None:
    manifest = analysed.out / "state" / "manifest.json"
    document = json.loads(manifest.read_text())
    for content in (json.dumps({**document, "meaning": "before"}), manifest.read_text()[:100]):
        manifest.write_text(content)
        with pytest.raises(StateError, match="--full") as caught:
            analyse_by.again(analysed)
        assert len(str(caught.value).splitlines()) == 3
    found = analyse_by.again(analysed, full=True)
    assert found.report is not None
    assert found.report.run > document["published"]


def test_two_runs_exclude_each_other_and_a_killed_one_blocks_nothing(
    analyse_by: Analyse, analysed: Analysed
) -> None:
    with exclusive(str(analysed.out), LOCK), pytest.raises(BusyError) as caught:
        analyse_by.again(analysed)
    what, where, remedy = str(caught.value).splitlines()
    assert f"process {os.getpid()}" in what
    assert where.endswith("_analysis.lock")
    assert "wait" in remedy
    command = [sys.executable, "-c", _HOLDER, str(analysed.out), LOCK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match=f"process {holder.pid} on"):
            analyse_by.again(analysed)
        holder.kill()
        holder.wait()
    assert analyse_by.again(analysed).report is None
