"""Test that a run publishes its books before its findings, and what holds if it dies in between.

Oracle: the tables of a run that was not disturbed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from delivery.analytics.local.engine import LocalEngine
from delivery.analytics.local.publish import LocalPublisher
from delivery.analytics.results.reader import AnalysisTables
from delivery.analytics.runs.run import Analysis
from delivery.analytics.runs.tables import FINDING_TABLES, TABLES_BY_NAME
from delivery.analytics.spark.publish_results import RunPublisher
from tests.support.analysis_run import Analyse, Analysed, AnalyseHere
from tests.support.compared_tables import SKETCHED, differences
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import hours, write

NOW = datetime(2026, 1, 9, tzinfo=UTC)
_BOOKS = frozenset(TABLES_BY_NAME) - FINDING_TABLES


class KilledError(Exception):
    """The process ends here."""


@contextmanager
def killed_in_findings(publisher: type, method: str) -> Iterator[None]:
    """Expect that a run ends where it begins with its findings."""

    def die(*_: object) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, method, die)
        with pytest.raises(KilledError):
            yield


@contextmanager
def killed() -> Iterator[None]:
    with killed_in_findings(LocalPublisher, "_write_findings"):
        yield


@pytest.fixture(scope="module")
def two_hours() -> tuple[pa.Table, pa.Table]:
    """Return the rows of the first hour, and those of the rest."""
    town = Town(seed=9, minutes=110, rooms=1, per_room=2, a_minute=1.0, noise=0.1)
    first, *rest = hours(plant(town).rows).values()
    return first, pa.concat_tables(rest)


@pytest.fixture
def analyse_here(folder: Callable[[], Path]) -> AnalyseHere:
    return AnalyseHere(folder, NOW)


@pytest.fixture
def unread(folder: Callable[[], Path], two_hours: tuple[pa.Table, pa.Table]) -> Analysed:
    """Return segments of an hour that no run has read."""
    root = folder()
    write(two_hours[0], root / "segments")
    return Analysed(segments=root / "segments", out=root / "out", report=None)


def undisturbed(analyse: Analyse, like: Analysed, folder: Callable[[], Path]) -> Analysed:
    return analyse.again(Analysed(segments=like.segments, out=folder() / "out", report=None))


def assert_same(ours: Analysed, theirs: Analysed, tables: frozenset[str]) -> None:
    for table in sorted(tables):
        leave = SKETCHED if table == "rollups_daily" else set()
        assert not differences(ours.rows(table), theirs.rows(table), leave), table


def test_the_first_books_are_there_before_any_findings(
    analyse_here: AnalyseHere, unread: Analysed, folder: Callable[[], Path]
) -> None:
    wanted = undisturbed(analyse_here, unread, folder)
    assert wanted.rows("hazards")
    with killed():
        analyse_here.again(unread)
    assert unread.latest()["findings"] is None
    assert unread.latest()["totals"] == wanted.latest()["totals"]
    assert set(unread.latest()["tables"]) == _BOOKS
    assert_same(unread, wanted, _BOOKS)
    tables = AnalysisTables.open(str(unread.out))
    assert tables.findings_at is None
    assert tables.at == NOW
    assert tables.rows("incidents") == tables.rows("advice") == []
    assert tables.rows("journeys")

    # No segment is new, but the findings are.
    after = analyse_here.again(unread)
    assert after.report is not None
    assert after.report.partitions == 0
    assert AnalysisTables.open(str(unread.out)).findings_at == NOW
    assert_same(unread, wanted, frozenset(TABLES_BY_NAME))
    assert analyse_here.again(unread).report is None


@pytest.mark.parametrize("engine", ["local", "spark"])
def test_new_books_stand_beside_earlier_findings(
    engine: str,
    request: pytest.FixtureRequest,
    unread: Analysed,
    two_hours: tuple[pa.Table, pa.Table],
    folder: Callable[[], Path],
) -> None:
    analyse: Analyse = request.getfixturevalue("analyse" if engine == "spark" else "analyse_here")
    analyse.again(unread)
    before = unread.latest()
    earlier = {table: unread.rows(table) for table in FINDING_TABLES}
    write(two_hours[1], unread.segments)
    wanted = undisturbed(analyse, unread, folder)
    assert differences(wanted.rows("hazards"), earlier["hazards"])

    with (
        killed_in_findings(RunPublisher, "_write_cofailures")
        if engine == "spark"
        else killed_in_findings(LocalPublisher, "_write_findings")
    ):
        analyse.again(unread)
    latest = unread.latest()
    assert latest["run"] > before["run"]
    assert latest["findings"] == before["findings"]
    assert latest["totals"] == wanted.latest()["totals"]
    assert_same(unread, wanted, _BOOKS)
    assert {table: unread.rows(table) for table in FINDING_TABLES} == earlier

    analyse.again(unread)
    assert unread.latest()["findings"]["run"] == unread.latest()["run"]
    assert_same(unread, wanted, frozenset(TABLES_BY_NAME))


@pytest.mark.parametrize("damage", ["{}", "[]", '{"findings": 7}', '{"findings": {"run": 1}}', "{"])
def test_a_damaged_result_is_computed_again(
    analyse_here: AnalyseHere, unread: Analysed, folder: Callable[[], Path], damage: str
) -> None:
    wanted = analyse_here.again(unread).latest()
    (unread.out / "latest.json").write_text(damage)
    after = analyse_here.again(unread)
    assert after.report is not None
    assert unread.latest()["totals"] == wanted["totals"]
    assert unread.latest()["findings"]["run"] == unread.latest()["run"]
    assert_same(unread, undisturbed(analyse_here, unread, folder), frozenset(TABLES_BY_NAME))


def test_a_full_run_publishes_all_or_nothing(analyse_here: AnalyseHere, unread: Analysed) -> None:
    """Its tables may have other columns than those of the run before, of an earlier version."""
    analyse_here.again(unread)
    before = unread.latest()
    with killed():
        analyse_here.again(unread, full=True)
    assert unread.latest() == before
    assert analyse_here.again(unread).report is None
    assert unread.rows("journeys")


def test_runs_that_die_in_their_findings_leave_few_folders(
    analyse_here: AnalyseHere, unread: Analysed, two_hours: tuple[pa.Table, pa.Table]
) -> None:
    analyse_here.again(unread)
    findings = unread.latest()["findings"]
    some = two_hours[1].num_rows // 5
    for number in range(5):
        write(two_hours[1].slice(number * some, some), unread.segments, name=f"later-{number}")
        with killed():
            analyse_here.again(unread)
        assert unread.latest()["findings"] == findings
        assert unread.rows("hazards")
    found = {int(path.name) for path in (unread.out / "runs").iterdir()}
    latest = unread.latest()["run"]
    assert found == {findings["run"], latest - 1, latest}


def test_findings_of_a_time_to_come_are_computed_again(
    unread: Analysed, two_hours: tuple[pa.Table, pa.Table]
) -> None:
    engine = LocalEngine(
        segments_at=str(unread.segments), output=str(unread.out), on_status=lambda _: None
    )
    # The clock of the machine was wrong by a year, and is right again.
    assert Analysis(engine).run(now=NOW + timedelta(days=365)) is not None
    write(two_hours[1], unread.segments)
    assert Analysis(engine).run(now=NOW, stale_s=300.0) is not None
    assert unread.latest()["findings"] == {"run": 2, "at": NOW.isoformat()}


def test_folders_of_others_among_the_runs_and_in_the_state_stay_and_do_no_harm(
    analyse_here: AnalyseHere, unread: Analysed
) -> None:
    others = [unread.out / place / ".snapshot" for place in ("runs", "state")]
    for other in others:
        other.mkdir(parents=True)
    assert analyse_here.again(unread).report is not None
    assert all(other.is_dir() for other in others)
