"""Test that no organisation can choose names that stop the analysis, with both engines."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from delivery.analytics.runs.errors import StateError
from rooms.domain.state_machine import LogKind
from tests.support.aged_log import AgedLog, Step
from tests.support.analysis_run import Analyse, Analysed, AnalyseHere
from tests.support.sealed_segments import write

# These had one key while it was XXH64 with Spark's seed.
_COLLIDING = (f"orders.a{'a' * 24}payments{'a' * 24}", f"X1.LbZpI{'a' * 24}hO0lbZKj{'a' * 24}")


@pytest.fixture(params=["here", "spark"])
def engine(request: pytest.FixtureRequest, folder: Callable[[], Path]) -> Analyse:
    if request.param == "here":
        return AnalyseHere(folder, datetime(2026, 1, 9, tzinfo=UTC))
    found: Analyse = request.getfixturevalue("analyse")
    return found


def _write(segments: Path) -> Analysed:
    log = AgedLog()
    for number, name in enumerate((*_COLLIDING, "ä")):
        steps = [
            Step(kind=LogKind.ENQUEUED, at_h=number),
            Step(kind=LogKind.ATTEMPTED, at_h=number),
        ]
        log.publish("push", "in_flight", steps, event_type=name)
    write(log.table(), segments)
    return Analysed(segments=segments, out=segments.parent / "out", report=None)


def _document(analysed: Analysed) -> tuple[Path, dict[str, object]]:
    path = analysed.out / "state" / "manifest.json"
    return path, json.loads(path.read_text())


def test_names_that_were_chosen_to_collide_are_counted_apart(
    engine: Analyse, tmp_path: Path
) -> None:
    analysed = engine.again(_write(tmp_path / "segments"))
    attempts = {
        row["event_type"]: row["attempts"]
        for row in analysed.rows("rollups_daily")
        if row["target_host"]
    }
    assert attempts == dict.fromkeys((*_COLLIDING, "ä"), 1)
    assert {row["event_type"] for row in analysed.rows("journeys")} == {*_COLLIDING, "ä"}


def _remove_a_segment(segments: Path) -> None:
    gone = min(segments.rglob("*.parquet"))
    gone.unlink()
    gone.with_name(f"_{gone.name}.manifest").unlink()


def test_a_state_without_a_salt_is_counted_anew_and_names_what_is_gone(
    engine: Analyse, tmp_path: Path
) -> None:
    analysed = engine.again(_write(tmp_path / "segments"))
    path, document = _document(analysed)
    del document["salt"]
    # As the last versions without salts wrote it: it depends on the transitions of their time.
    meaning = "99c2016abd873341" if isinstance(engine, AnalyseHere) else "8d659187c5856f38"
    path.write_text(json.dumps({**document, "meaning": meaning}))
    _remove_a_segment(analysed.segments)
    again = engine.again(analysed)
    assert again.report is not None
    assert again.report.partitions == again.report.known == 2
    assert [one["reason"] for one in again.latest()["set_aside"]] == ["gone"]
    _, after = _document(again)
    assert len(str(after["salt"])) == 32
    assert engine.again(again).report is None


def test_a_full_run_over_the_state_of_another_version_names_what_is_gone(
    engine: Analyse, tmp_path: Path
) -> None:
    analysed = engine.again(_write(tmp_path / "segments"))
    path, document = _document(analysed)
    path.write_text(json.dumps({**document, "meaning": "of other transitions"}))
    _remove_a_segment(analysed.segments)
    with pytest.raises(StateError, match="--full"):
        engine.again(analysed)
    again = engine.again(analysed, full=True)
    assert [one["reason"] for one in again.latest()["set_aside"]] == ["gone"]


def test_a_full_run_keeps_the_salt(engine: Analyse, tmp_path: Path) -> None:
    analysed = engine.again(_write(tmp_path / "segments"))
    path, document = _document(analysed)
    other = {**document, "salt": "b7" * 16}
    path.write_text(json.dumps(other))
    _, after = _document(engine.again(analysed, full=True))
    assert after["salt"] == other["salt"]
