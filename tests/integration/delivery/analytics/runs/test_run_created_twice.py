"""Test that a delivery that was created twice does not stand in for one that was never made.

Oracle: the log has one message for each way in which the rows of two deliveries can be wrong.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from delivery.analytics.results.reader import AnalysisTables, read_reconciliation
from rooms.domain.state_machine import LogKind
from tests.support.aged_log import AgedLog, Step
from tests.support.analysis_run import Analyse, Analysed, AnalyseHere
from tests.support.sealed_segments import write

_MADE, _TRIED, _ENDED = LogKind.ENQUEUED, LogKind.ATTEMPTED, LogKind.DELIVERED


@pytest.fixture(params=["here", "spark"])
def engine(request: pytest.FixtureRequest, folder: Callable[[], Path]) -> Analyse:
    if request.param == "here":
        return AnalyseHere(folder, datetime(2026, 1, 9, tzinfo=UTC))
    found: Analyse = request.getfixturevalue("analyse")
    return found


def _delivered(*created_h: float) -> list[Step]:
    """Return the steps of a delivery that was created at each of these hours."""
    last = max(created_h)
    ends = [Step(kind=kind, at_h=last) for kind in (_TRIED, _ENDED)]
    return [*(Step(kind=_MADE, at_h=at) for at in created_h), *ends]


def _analysed(engine: Analyse, log: AgedLog, tmp_path: Path) -> Analysed:
    write(log.table(), tmp_path / "segments")
    return engine.again(Analysed(segments=tmp_path / "segments", out=tmp_path / "out", report=None))


def test_a_delivery_made_twice_does_not_hide_one_never_made(
    engine: Analyse, tmp_path: Path
) -> None:
    log = AgedLog()
    log.publish("push", "delivered", _delivered(1.0))
    log.publish("push", "delivered", _delivered(1.0, 1.0), fanout=2)
    # Its rows agree in the hour of the publish, and another one follows.
    log.publish("push", "delivered", _delivered(2.0, 2.0, 3.5), fanout=2)
    analysed = _analysed(engine, log, tmp_path)
    books = read_reconciliation(AnalysisTables.open(str(analysed.out)).rows)
    assert (books.missing, books.totals["enqueued_twice"]) == (2, 3)
    assert books.totals["excess"] == books.totals["unanchored"] == 0
    assert books.has_losses
    assert not books.is_balanced
    for row in analysed.rows("reconciliation"):
        assert (row["residual_fanout"], row["residual_outcome"]) == (0, 0), row
    absent = [
        (row["fanout"], row["enqueued"], row["found"], row["missing"])
        for row in analysed.rows("missing", "SELECT * FROM t ORDER BY message_id")
    ]
    assert absent == [(2, 2, 0, 1), (2, 3, 0, 1)]


def test_a_delivery_made_twice_is_no_further_delivery(engine: Analyse, tmp_path: Path) -> None:
    log = AgedLog()
    log.publish("push", "delivered", _delivered(1.0, 1.0))
    log.publish("push", "delivered", _delivered(2.0, 3.5))
    analysed = _analysed(engine, log, tmp_path)
    books = read_reconciliation(AnalysisTables.open(str(analysed.out)).rows)
    assert (books.missing, books.totals["enqueued_twice"]) == (0, 2)
    assert books.totals["excess"] == books.totals["unanchored"] == 0
    assert not books.has_losses
    assert not books.is_balanced
    assert [of["enqueued_twice"] for of in books.rooms.values()] == [2]
    for row in analysed.rows("reconciliation"):
        assert (row["residual_fanout"], row["residual_outcome"]) == (0, 0), row
