"""Test that a delivery which goes on after months has only the hours read in which it has rows.

Oracle: the log, whose hours between have other deliveries, and a run that counts everything anew.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from delivery.analytics.runs.run import Analysis
from rooms.domain.state_machine import LogKind
from tests.support.aged_log import AgedLog, Step
from tests.support.analysis_run import Analyse, Analysed, AnalyseHere
from tests.support.sealed_segments import START_S, write

_HOURS = 40
_FIRST = START_S // 3600


@pytest.fixture(params=["here", "spark"])
def engine(request: pytest.FixtureRequest, folder: Callable[[], Path]) -> Analyse:
    if request.param == "here":
        return AnalyseHere(folder, datetime(2026, 1, 9, tzinfo=UTC))
    found: Analyse = request.getfixturevalue("analyse")
    return found


@pytest.fixture
def read_parts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the hours whose rows each run has read for paths, from the first of the log."""
    found: list[list[int]] = []
    whole = Analysis._whole_partitions

    def record(
        self: Analysis, given: Any, parts: Sequence[int], fresh: Collection[int], changed: list[Any]
    ) -> Any:
        found.append([part - _FIRST for part in parts])
        return whole(self, given, parts, fresh, changed)

    monkeypatch.setattr(Analysis, "_whole_partitions", record)
    return found


def _log() -> pa.Table:
    made, tried, ended = LogKind.ENQUEUED, LogKind.ATTEMPTED, LogKind.DELIVERED
    log = AgedLog()
    for hour in range(1, _HOURS):
        steps = [Step(kind=kind, at_h=hour + 0.2) for kind in (made, tried, ended)]
        log.publish("push", "delivered", steps)
    log.publish(
        "other",
        "delivered",
        [
            Step(kind=made, at_h=0.1),
            Step(kind=tried, at_h=0.2, failed=True),
            Step(kind=LogKind.SIDELINED, at_h=0.2),
            Step(kind=LogKind.SHOVELED, at_h=_HOURS + 0.1),
            Step(kind=tried, at_h=_HOURS + 0.2),
            Step(kind=ended, at_h=_HOURS + 0.2),
        ],
    )
    return log.table()


def test_only_the_hours_with_its_rows_are_read(
    engine: Analyse, tmp_path: Path, read_parts: list[list[int]]
) -> None:
    rows = _log()
    late = pc.greater_equal(
        rows.column("ts"), pa.scalar(datetime.fromtimestamp(START_S + _HOURS * 3600, UTC))
    )
    place = Analysed(segments=tmp_path / "segments", out=tmp_path / "out", report=None)
    write(rows.filter(pc.invert(late)), place.segments)
    engine.again(place)
    write(rows.filter(late), place.segments)
    engine.again(place)
    assert read_parts[-1] == [0, _HOURS]

    def paths() -> Sequence[Mapping[str, Any]]:
        return place.rows("paths", "SELECT * FROM t ORDER BY delivery_hi, delivery_lo")

    found = paths()
    # All rows are of generation 0 here, so their order is that of the kinds.
    (path,) = (row["path"] for row in found)
    assert sorted(path.split()) == sorted(
        ["enqueued", "attempted", "sidelined", "shoveled", "attempted", "delivered"]
    )
    engine.again(place, full=True)
    assert paths() == found
