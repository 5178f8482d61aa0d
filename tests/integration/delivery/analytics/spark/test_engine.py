"""Test that results are correct and equal in whatever order the log arrives.

Analysed at once on a small cluster, and in halves, late and twice without one. No query plan sorts
in order to aggregate.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from delivery.analytics.runs.errors import NoSegmentsError
from delivery.analytics.runs.outcomes import UnreadHours
from delivery.analytics.runs.tables import TABLES_BY_NAME
from delivery.analytics.spark import counts, journeys, reconciliation, rollups, segments
from delivery.analytics.spark.segments import HadoopFiles
from tests.support.analysis_logs import MIXED, Mixed
from tests.support.analysis_run import Analyse, Analysed
from tests.support.compared_tables import SKETCHED, differences
from tests.support.duckdb_oracle import HOURLY, JOURNEYS, MISSING, PAIRS, Oracle
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import sealed_partitions, write

JOBS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "words": reconciliation.sequence_words,
    "deliveries": journeys.partial_journeys,
    "anchors": reconciliation.anchor_counts,
    "rollups": rollups.hourly_state,
    "cells": counts.count_attempts,
    "causes": counts.count_attributes,
    "journeys": lambda rows: journeys.merge_journeys(journeys.partial_journeys(rows)),
    "days": lambda rows: rollups.daily(rollups.hourly_state(rows)),
    "paths": journeys.kind_paths,
    "missing": lambda rows: reconciliation.missing_deliveries(
        reconciliation.anchor_counts(rows),
        journeys.merge_journeys(journeys.partial_journeys(rows)),
        UnreadHours(),
    ),
}


def test_no_segments_is_an_error(analyse: Analyse, tmp_path: Path) -> None:
    with pytest.raises(NoSegmentsError):
        analyse.again(Analysed(segments=tmp_path / "segments", out=tmp_path / "out", report=None))


def test_finds_the_planted_lost_deliveries(whole: Analysed, mixed: Mixed) -> None:
    found = whole.rows("journeys", "SELECT delivery_id FROM t WHERE outcome = 'lost'")
    assert {row["delivery_id"] for row in found} == mixed.planted.truth.lost
    assert len(mixed.planted.truth.lost) == MIXED.lost


def test_finds_the_planted_missing_deliveries(whole: Analysed, mixed: Mixed) -> None:
    found = {row["message_id"]: row["missing"] for row in whole.rows("missing")}
    assert found == mixed.planted.truth.missing
    assert sum(found.values()) == MIXED.missing


def test_counts_duplicates_and_repeated_rows_separately(whole: Analysed, mixed: Mixed) -> None:
    assert whole.report is not None
    assert whole.report.repeated_rows == mixed.planted.truth.repeated == MIXED.repeated
    (found,) = whole.rows(
        "reconciliation", "SELECT sum(duplicates) AS n FROM t WHERE room_id >= 1000"
    )
    assert found["n"] == mixed.planted.truth.duplicates == MIXED.doubled


def test_reconciliation_has_no_residuals(whole: Analysed) -> None:
    (found,) = whole.rows(
        "reconciliation",
        "SELECT sum(abs(residual_fanout)) + sum(abs(residual_outcome)) AS over, sum(fanout) AS fanout,"
        " sum(enqueued) + sum(missing) AS accounted, sum(lost) AS lost FROM t",
    )
    assert found["over"] == 0
    assert found["fanout"] == found["accounted"]
    assert found["lost"] == MIXED.lost


def test_finds_the_planted_gaps(whole: Analysed, mixed: Mixed) -> None:
    found = {
        (row["writer_id"], number)
        for row in whole.rows("gaps")
        for number in range(row["first_seq"], row["last_seq"] + 1)
    }
    assert found == mixed.planted.truth.gaps
    assert found


def test_only_illegal_walks_are_anomalies(whole: Analysed, mixed: Mixed) -> None:
    found = {row["delivery_id"]: row["anomaly"] for row in whole.rows("anomalies")}
    assert {
        identity for identity, anomaly in found.items() if anomaly == "illegal_path"
    } == mixed.walks.illegal
    assert len(mixed.walks.illegal) == 20
    # Late successes of pulled walks have no attempt in the log.
    assert set(found.values()) <= {"illegal_path", "delivered_without_success"}
    result = whole.rows(
        "paths", "SELECT count(*) AS n, count(*) FILTER (legal IS NULL) AS unknown FROM t"
    )
    assert result[0]["n"] > 50
    assert result[0]["unknown"] == 0


def test_the_schema_file_matches_the_tables(whole: Analysed) -> None:
    result = json.loads((whole.out / "schema.json").read_text())["tables"]
    assert set(result) == set(TABLES_BY_NAME)
    for table, about in result.items():
        assert about["says"]
        assert all(column["says"] for column in about["columns"])
        found = whole.rows(table, "DESCRIBE SELECT * FROM t")
        assert [row["column_name"] for row in found] == [
            column["name"] for column in about["columns"]
        ]


@pytest.fixture(scope="module")
def oracle(whole: Analysed) -> Any:
    found = Oracle(whole.segments)
    yield found
    found.close()


def test_journeys_match_duckdb(whole: Analysed, oracle: Oracle) -> None:
    ours = whole.rows(
        "journeys", "SELECT delivery_id, outcome, attempts, successes, enqueued_us FROM t"
    )
    assert not differences(ours, oracle.rows(JOURNEYS))


def test_missing_deliveries_match_duckdb(whole: Analysed, oracle: Oracle) -> None:
    ours = whole.rows("missing", "SELECT message_id, missing FROM t")
    assert not differences(ours, oracle.rows(MISSING))


def test_hourly_rollups_match_duckdb(whole: Analysed, oracle: Oracle) -> None:
    theirs = oracle.rows(HOURLY)
    ours = whole.rows("rollups_hourly", f"SELECT {', '.join(theirs[0])} FROM t")
    assert not differences(ours, theirs)


def test_pairs_match_duckdb(whole: Analysed, oracle: Oracle) -> None:
    theirs = oracle.rows(PAIRS)
    ours = whole.rows("cofailures", f"SELECT {', '.join(theirs[0])} FROM t")
    assert not differences(ours, theirs)
    assert ours


def test_daily_percentiles_have_at_most_one_percent_rank_error(
    whole: Analysed, oracle: Oracle
) -> None:
    days = whole.rows("rollups_daily", "SELECT * FROM t WHERE attempts > 200")
    assert days
    for day in days:
        (rank,) = oracle.rows(
            f"SELECT avg((latency_ms <= {day['latency_p95_ms']} + 0.001)::INT) AS share, count(*) AS n FROM events"
            f" WHERE kind = 'attempted' AND subscription_id = '{day['subscription_id']}'"
            f" AND event_type = '{day['event_type']}' AND target_host = '{day['target_host']}'"
        )
        assert rank["n"] == day["attempts"]
        assert abs(rank["share"] - 0.95) <= 0.01 + 1 / rank["n"]


@pytest.mark.parametrize("table", TABLES_BY_NAME)
def test_halves_give_the_same_as_one_run(whole: Analysed, by_halves: Analysed, table: str) -> None:
    leave = SKETCHED if table == "rollups_daily" else set()
    assert not differences(by_halves.rows(table), whole.rows(table), leave)


def test_no_new_segments_start_no_run(analyse: Analyse, by_halves: Analysed) -> None:
    assert by_halves.report is not None
    assert analyse.again(by_halves).report is None
    # The same stream continues from its checkpoint and has seen everything.
    assert analyse.follow(by_halves).report is None


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    root = tmp_path_factory.mktemp("plans")
    write(plant(Town(seed=2, minutes=80, a_minute=2.0, lost=2, missing=1)).rows, root / "segments")
    files = HadoopFiles(spark, str(root / "segments"))
    return segments.with_keys(
        segments.read_rows(spark, files.root, sealed_partitions(files)), "a salt"
    )


@pytest.mark.parametrize("job", JOBS)
def test_no_job_sorts_to_aggregate(rows: DataFrame, job: str) -> None:
    frame: Any = JOBS[job](rows)._jdf
    plan = str(frame.queryExecution().executedPlan())
    assert "HashAggregate" in plan
    assert "SortAggregate" not in plan
