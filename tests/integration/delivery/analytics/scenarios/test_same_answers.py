"""Test that both engines answer the same about every log: each table, to the last row.

Daily percentiles are exact in this process, and from sketches in Spark: there the rank error that
Spark states is allowed.
"""

import math
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from delivery.analytics.findings import cells
from delivery.analytics.runs import manifest
from delivery.analytics.runs.errors import NoSegmentsError
from delivery.analytics.runs.tables import MEASURES, SHARES, TABLES_BY_NAME
from tests.support.aged_log import aged_log
from tests.support.analysis_logs import Mixed
from tests.support.analysis_run import Analyse, Analysed, AnalyseHere
from tests.support.compared_tables import SKETCHED, differences
from tests.support.duckdb_oracle import Oracle
from tests.support.failure_scenarios import SCENARIOS
from tests.support.failure_worlds import joined, simulate
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import START_S, hours, write, write_sealed
from tests.support.world_logs import log_rows

_NOW = datetime(2026, 1, 9, tzinfo=UTC)
_RANK_ERROR = 0.01
_WORLD_HOURS = 3
_WORLD_SEED = 10
"""Of it the trouble of each world begins in the first two and a half hours."""


@pytest.fixture(scope="session")
def analyse_here(folder: Callable[[], Path]) -> AnalyseHere:
    return AnalyseHere(folder, _NOW)


def unlike(ours: Analysed, theirs: Analysed) -> dict[str, list[str]]:
    """Return the first differences of each table that differs."""
    found = {
        table: differences(
            ours.rows(table), theirs.rows(table), SKETCHED if table == "rollups_daily" else set()
        )
        for table in TABLES_BY_NAME
    }
    return {table: some for table, some in found.items() if some}


def assert_same(ours: Analysed, theirs: Analysed) -> None:
    found = unlike(ours, theirs)
    assert not found, found
    assert ours.latest()["totals"] == theirs.latest()["totals"]
    assert ours.latest()["set_aside"] == theirs.latest()["set_aside"]
    assert (ours.report is None) == (theirs.report is None)
    if ours.report is not None and theirs.report is not None:
        assert ours.report.repeated_rows == theirs.report.repeated_rows


def on_both(
    analyse: Analyse, analyse_here: AnalyseHere, segments: Path, root: Path
) -> tuple[Analysed, Analysed]:
    here, spark = (
        engine.again(Analysed(segments=segments, out=root / name, report=None))
        for name, engine in (("here", analyse_here), ("spark", analyse))
    )
    return here, spark


@pytest.fixture(scope="module")
def mixed_here(whole: Analysed, analyse_here: AnalyseHere, folder: Callable[[], Path]) -> Analysed:
    return analyse_here.again(Analysed(segments=whole.segments, out=folder() / "out", report=None))


def test_a_log_with_every_kind_of_fault(whole: Analysed, mixed_here: Analysed) -> None:
    """Skewed clocks, repeated rows, gaps, losses, and walks through the transition table."""
    assert_same(mixed_here, whole)


_VALUES = """
SELECT ts::DATE AS day, room_id, subscription_id, event_type, target_host,
    list_sort(list(round(latency_ms::DOUBLE * 1000) / 1000) FILTER (kind = 'attempted')) AS latency,
    list_sort(list(greatest((us - born_ms * 1000) / 1000, 0))
        FILTER (kind IN ('delivered', 'pull_acked'))) AS end_to_end
FROM events GROUP BY ALL
"""


def test_daily_percentiles_are_those_of_spark_within_its_rank_error(
    whole: Analysed, mixed_here: Analysed
) -> None:
    keys = ("day", "room_id", "subscription_id", "event_type", "target_host")
    here, spark = (
        {tuple(row[key] for key in keys): row for row in one.rows("rollups_daily")}
        for one in (mixed_here, whole)
    )
    with closing(Oracle(whole.segments)) as oracle:
        values = oracle.rows(_VALUES)
    assert len(here) == len(spark) == len(values)
    compared = 0
    for row in values:
        of = tuple(row[key] for key in keys)
        for name, (percentile, share) in product(MEASURES, SHARES.items()):
            column = f"{name}_{percentile}_ms"
            if not row[name]:
                assert here[of][column] is None
                assert spark[of][column] is None
                continue
            compared += 1
            ascending = np.asarray(row[name], dtype=np.float64)
            assert here[of][column] == pytest.approx(
                ascending[max(math.ceil(len(ascending) * share), 1) - 1], abs=1e-6
            )
            below, upto = (
                np.searchsorted(ascending, spark[of][column] + shift) / len(ascending)
                for shift in (-1e-6, 1e-6)
            )
            assert below - _RANK_ERROR <= share <= upto + _RANK_ERROR
    assert compared > 20


def test_a_log_of_shared_outages(
    together: Analysed, analyse_here: AnalyseHere, tmp_path: Path
) -> None:
    """Incidents, causes, pairs and advice of a day."""
    here = analyse_here.again(
        Analysed(segments=together.segments, out=tmp_path / "out", report=None)
    )
    assert_same(here, together)
    assert here.rows("incidents")
    assert here.rows("advice")


def test_a_sample_of_a_large_log(
    together: Analysed,
    analyse: Analyse,
    analyse_here: AnalyseHere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both keep the same rows, so that neither memory nor answers depend on the engine."""
    most, seen = 4_000, []
    encode = cells.AttemptCells.from_arrow

    def recorded(rows: pa.Table, *, weight: int = 1) -> cells.AttemptCells:
        seen.append((rows.num_rows, weight))
        return encode(rows, weight=weight)

    monkeypatch.setattr(cells, "MAX_CELLS", most)
    monkeypatch.setattr(cells.AttemptCells, "from_arrow", recorded)
    # Rows are sampled by their keys, which have the salt of their state.
    monkeypatch.setattr(manifest, "new_salt", lambda: "5" * 32)
    here, spark = on_both(analyse, analyse_here, together.segments, tmp_path)
    assert seen[0] == seen[1]
    rows, weight = seen[0]
    assert weight > 1
    assert rows <= 1.1 * most
    assert_same(here, spark)
    assert here.rows("incidents")


def test_a_log_of_stopped_deliveries(
    analyse: Analyse, analyse_here: AnalyseHere, tmp_path: Path
) -> None:
    write(aged_log().table(), tmp_path / "segments")
    here, spark = on_both(analyse, analyse_here, tmp_path / "segments", tmp_path)
    assert_same(here, spark)
    assert here.rows("ages")


def test_simulated_worlds_of_attempts_only(
    analyse: Analyse, analyse_here: AnalyseHere, tmp_path: Path
) -> None:
    """Deliveries without beginnings: the first hours of each world, as one log.

    One log takes one start of each engine, and a tenth of the time.
    """
    worlds = [simulate(plan(_WORLD_SEED)) for plan in SCENARIOS.values()]
    write(log_rows(joined(worlds, hours=_WORLD_HOURS)), tmp_path / "segments")
    here, spark = on_both(analyse, analyse_here, tmp_path / "segments", tmp_path)
    assert_same(here, spark)
    found = {
        int((row["began"].timestamp() - START_S) // (3600 * _WORLD_HOURS))
        for row in here.rows("incidents")
    }
    quiet = list(SCENARIOS).index("noise")
    assert found >= set(range(len(SCENARIOS))) - {quiet}


def small_town() -> pa.Table:
    return plant(
        Town(seed=17, minutes=150, rooms=2, per_room=3, a_minute=2.0, noise=0.1, lost=2, missing=2)
    ).rows


def test_doubled_late_and_unordered_segments(
    analyse: Analyse, analyse_here: AnalyseHere, tmp_path: Path
) -> None:
    """Each hour comes in three files in no order, and one of them twice under another name."""
    rows = small_town()
    shuffled = rows.take(pa.array(np.random.default_rng(3).permutation(rows.num_rows)))
    write(shuffled, tmp_path / "segments", files=3)
    for folder, some in hours(shuffled).items():
        write_sealed(
            some.slice(0, some.num_rows // 3), tmp_path / "segments", f"{folder}/again.parquet"
        )
    here, spark = on_both(analyse, analyse_here, tmp_path / "segments", tmp_path)
    assert_same(here, spark)
    assert here.report is not None
    assert here.report.repeated_rows > 0


def test_segments_that_are_set_aside(
    analyse: Analyse, analyse_here: AnalyseHere, tmp_path: Path
) -> None:
    write(small_town(), tmp_path / "segments", files=2)
    paths = sorted((tmp_path / "segments").rglob("*.parquet"))
    content = bytearray(paths[1].read_bytes())
    content[len(content) // 3] ^= 8
    paths[1].write_bytes(content)
    paths[-1].write_bytes(b"")
    here, spark = on_both(analyse, analyse_here, tmp_path / "segments", tmp_path)
    assert_same(here, spark)
    assert here.latest()["incomplete"]
    assert {one["reason"] for one in here.latest()["set_aside"]} == {"damaged", "empty"}


def test_no_segments_is_an_error_in_both(
    analyse: Analyse, analyse_here: AnalyseHere, tmp_path: Path
) -> None:
    where = tmp_path / "segments"
    for engine in (analyse, analyse_here):
        with pytest.raises(NoSegmentsError) as caught:
            engine.again(Analysed(segments=where, out=tmp_path / "out", report=None))
        assert str(caught.value) in {
            f"there are no sealed segments at {place}" for place in (where, where.as_uri())
        }


def test_pieces_give_the_same_as_one_run(
    mixed: Mixed, mixed_here: Analysed, analyse_here: AnalyseHere, tmp_path: Path
) -> None:
    """Hours come one after another, each with rows that are late; the state is compacted too."""
    found = Analysed(segments=tmp_path / "segments", out=tmp_path / "out", report=None)
    held_back: list[pa.Table] = []
    for number, some in enumerate(hours(mixed.rows).values()):
        late = some.num_rows // 10
        write(some.slice(late), found.segments, name=f"n{number}")
        held_back.append(some.slice(0, late))
        found = analyse_here.again(found, many=2)
        assert found.report is not None
        assert found.report.partitions == 1
    for some in held_back:
        write(some, found.segments, name="late")
    found = analyse_here.again(found)
    assert unlike(found, mixed_here) == {}
    assert unlike(analyse_here.again(found, full=True), mixed_here) == {}
    assert analyse_here.again(found).report is None
    assert not list(found.out.glob("_scratch-*"))


def test_the_other_engine_starts_over_and_names_what_is_gone(
    analyse: Analyse, analyse_here: AnalyseHere, tmp_path: Path
) -> None:
    """Nothing of the other engine's state is misread, and no number vanishes unsaid."""
    write(small_town(), tmp_path / "segments")
    found = Analysed(segments=tmp_path / "segments", out=tmp_path / "out", report=None)
    spark = analyse.again(found)
    wanted = {table: spark.rows(table) for table in TABLES_BY_NAME}
    here = analyse_here.again(found)
    assert here.report is not None
    assert here.report.partitions == here.report.known
    for table, rows in wanted.items():
        assert not differences(
            here.rows(table), rows, SKETCHED if table == "rollups_daily" else set()
        )
    gone = min(found.segments.rglob("*.parquet"))
    gone.unlink()
    gone.with_name(f"_{gone.name}.manifest").unlink()
    named = str(gone.relative_to(found.segments))
    kept = analyse_here.again(found).latest()
    assert [(one["path"], one["counted"]) for one in kept["set_aside"]] == [(named, True)]
    again = analyse.again(found).latest()
    assert [(one["path"], one["reason"]) for one in again["set_aside"]] == [(named, "gone")]
    assert again["set_aside"][0]["counted"] is False
    assert again["incomplete"]
