"""Test the verdicts on open deliveries, and that every place states the same numbers.

Oracle: the log says of each delivery what it must be; DuckDB computes it again from the rows.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

from delivery.analytics.report.data import LOST, STUCK, read_history
from delivery.analytics.results.by_organisation import findings_by_organisation
from delivery.analytics.results.reader import AnalysisTables, read_reconciliation
from rooms.db.queries.analytics import Owners
from rooms.domain.ids import OrganisationId, RoomId
from tests.support.aged_log import ROOM, AgedLog, aged_log, subscription_id
from tests.support.analysis_run import Analyse, Analysed
from tests.support.duckdb_oracle import JOURNEYS, MISSING, Oracle


@pytest.fixture(scope="module")
def log() -> AgedLog:
    return aged_log()


@pytest.fixture(scope="module")
def aged(analyse: Analyse, log: AgedLog) -> Analysed:
    return analyse(log.table())


@pytest.fixture(scope="module")
def oracle(aged: Analysed) -> Iterator[Oracle]:
    found = Oracle(aged.segments)
    yield found
    found.close()


def test_every_delivery_has_its_verdict(aged: Analysed, log: AgedLog, oracle: Oracle) -> None:
    found = {row["delivery_id"]: row["outcome"] for row in aged.rows("journeys")}
    assert found == log.expected
    assert {row["delivery_id"]: row["outcome"] for row in oracle.rows(JOURNEYS)} == log.expected
    assert len(oracle.rows(MISSING)) == 1


def test_the_books_are_exact_in_every_hour(aged: Analysed) -> None:
    rows = aged.rows("reconciliation")
    assert {(row["residual_fanout"], row["residual_outcome"]) for row in rows} == {(0, 0)}
    for row in rows:
        assert row["fanout"] + row["unanchored"] + row["excess"] == (
            row["enqueued"]
            - row["enqueued_twice"]
            + row["never_enqueued"]
            + row["missing"]
            + row["unread"]
        )


def test_a_delivery_without_beginning_is_a_hole_and_no_loss(aged: Analysed) -> None:
    """Its message lacks no delivery: only the one that has no row at all is missing."""
    books = read_reconciliation(AnalysisTables.open(str(aged.out)).rows)
    assert (books.missing, books.lost, books.holes) == (1, 1, 1)
    (absent,) = aged.rows("missing")
    assert (absent["fanout"], absent["enqueued"], absent["found"], absent["missing"]) == (
        1,
        0,
        0,
        1,
    )


@pytest.mark.parametrize("outcome", ["lost", "stuck", "waiting", "held", "in_flight", "unknown"])
def test_one_number_in_all_places(aged: Analysed, log: AgedLog, outcome: str) -> None:
    expected = Counter(log.expected.values())[outcome]
    tables = AnalysisTables.open(str(aged.out))
    books = read_reconciliation(tables.rows)
    owner = OrganisationId("019b0000-0000-7000-8000-000000000000")
    owners = Owners(rooms={RoomId(ROOM): owner})
    api = [one for one in findings_by_organisation(tables, owners) if one.kind == "reconciliation"]
    history = read_history(lambda columns: tables.batches("journeys", columns))
    found = {
        "journeys": sum(row["outcome"] == outcome for row in tables.rows("journeys")),
        "outcomes": sum(
            row["deliveries"] for row in tables.rows("outcomes") if row["outcome"] == outcome
        ),
        "ages": sum(row["deliveries"] for row in tables.rows("ages") if row["outcome"] == outcome),
        "reconciliation": sum(row[outcome] for row in tables.rows("reconciliation")),
        "command": books.describe()[outcome],
        "API": sum(one.body[outcome] for one in api),
    }
    if outcome in tables.totals:
        found["latest.json"] = tables.totals[outcome]
    if outcome in {"lost", "stuck"}:
        found["report"] = history.total({"lost": LOST, "stuck": STUCK}[outcome])
    assert found == dict.fromkeys(found, expected)


def test_the_oldest_of_each_state_is_named(aged: Analysed, log: AgedLog) -> None:
    rows = {(row["subscription_id"], row["outcome"]): row for row in aged.rows("ages")}
    pull = subscription_id("pull")
    assert rows[pull, "stuck"]["deliveries"] == 2
    assert rows[pull, "stuck"]["oldest_age_s"] == pytest.approx(25 * 3600)
    assert log.expected[rows[pull, "stuck"]["oldest_delivery_id"]] == "stuck"
    assert rows[pull, "in_flight"]["oldest_age_s"] == pytest.approx(12 * 3600)
    # What is due later has no age.
    assert rows[subscription_id("push"), "waiting"]["oldest_age_s"] == 0
    assert all(row["room_id"] == ROOM for row in rows.values())
