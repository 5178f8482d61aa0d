"""Test that memory does not grow with the days, hours and subscriptions of the analysis."""

import tracemalloc
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from delivery.analytics.report.page import HtmlReport
from delivery.analytics.results.by_organisation import findings_by_organisation
from rooms.db.queries.analytics import Owners
from rooms.domain.ids import IdGenerator, OrganisationId, RoomId, SubscriptionId
from tests.support.analysis_tables import write_tables

_ROWS = 40_000
_ADVISED = IdGenerator(lambda _: 5).generate(RoomId(1), 1_000)


def test_a_report_holds_no_rows_of_days_hours_and_subscriptions(tmp_path: Path) -> None:
    first = datetime(2026, 5, 1, tzinfo=UTC)
    daily = [
        {
            "day": date(2026, 5, 1) + timedelta(days=number // 100), "room_id": 1,
            "subscription_id": f"subscription-{number % 100}", "target_host": "a.test",
            "attempts": 10, "failures": number % 3,
        }
        for number in range(_ROWS)
    ]  # fmt: skip
    books = [
        {"hour": first + timedelta(hours=number), "room_id": 1, "fanout": 2, "delivered": 2}
        for number in range(_ROWS)
    ]
    hazards = [
        {
            "subscription_id": f"subscription-{number // 10}", "attempt": number % 10, "attempts": 4,
            "successes": 2, "mean_delay_ms": 5.0,
        }
        for number in range(_ROWS)
    ]  # fmt: skip
    tables = write_tables(
        tmp_path, {"rollups_daily": daily, "reconciliation": books, "hazards": hazards}
    )
    del daily, books, hazards
    tracemalloc.start()
    try:
        report = HtmlReport.from_tables(tables)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.reconciliation.totals["fanout"] == 2 * _ROWS
    assert sum(one.attempts for one in report.names.subscribers.values()) == 10 * _ROWS
    assert len(report.names.subscribers) == 100
    assert [one.attempts for one in report.retries.attempts] == [4 * _ROWS // 10] * 10
    assert most < 4 << 20


def test_findings_hold_no_hazards_of_subscriptions_without_advice(tmp_path: Path) -> None:
    hazards = [
        {
            "subscription_id": _ADVISED if number // 10 == 7 else f"subscription-{number // 10}",
            "attempt": 9 - number % 10, "attempts": 4,
            "successes": 2, "hazard": 0.5, "mean_delay_ms": 5.0,
        }
        for number in range(_ROWS)
    ]  # fmt: skip
    advice = dict.fromkeys(("deliveries", "hopeless", "reproduced", "held_up"), None)
    tables = write_tables(
        tmp_path,
        {"hazards": hazards, "advice": [{**advice, "subscription_id": _ADVISED}]},
    )
    del hazards
    owner = OrganisationId("ours")
    owners = Owners(rooms={}, subscribers={SubscriptionId(_ADVISED): owner})
    tracemalloc.start()
    try:
        (found,) = findings_by_organisation(tables, owners)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [one["attempt"] for one in found.body["hazards"]] == list(range(10))
    assert most < 4 << 20
