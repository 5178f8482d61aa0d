"""Test charts and captions of the report on small tables, and that the page is self-contained."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from delivery.analytics.report import captions as report_captions
from delivery.analytics.report.data import (
    FIRST_ATTEMPT,
    LOST,
    OPEN,
    PULLED,
    RETRIED,
    SIDELINED,
    ColumnBatch,
    read_history,
    wilson,
)
from delivery.analytics.report.page import Figure, HtmlReport, render_png
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.usage import COUNTERS, UsageRow

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
Rows = list[dict[str, Any]]
A, B, C = (f"019b0000-0000-7000-8000-00000000000{letter}" for letter in "abc")


def journey(
    second: float, outcome: str, *, attempts: int = 1, took_s: float | None = None
) -> tuple[int, str, int, float]:
    born_ms = round((NOON.timestamp() + second) * 1000)
    finished = np.nan if took_s is None else (born_ms + took_s * 1000) * 1000
    return born_ms << 16, outcome, attempts, finished


def batch(rows: Sequence[tuple[int, str, int, float]]) -> ColumnBatch:
    columns = list(zip(*rows, strict=True))
    return {
        "message_hi": np.array(columns[0], dtype=np.int64),
        "outcome": np.array(columns[1], dtype=object),
        "attempts": np.array(columns[2], dtype=np.int64),
        "finished_us": np.array(columns[3], dtype=np.float64),
    }


JOURNEYS = [
    *(journey(second, "delivered", took_s=0.1) for second in range(90)),
    *(journey(30 + n, "delivered", attempts=3, took_s=60.0) for n in range(10)),
    *(
        journey(100, outcome)
        for outcome in ("sidelined", "waiting", "in_flight", "lost", "acked", "expired")
    ),
]


class Tables:
    """Some tables of one run."""

    run = 7
    at = NOON + timedelta(hours=1)

    def __init__(
        self, tables: Mapping[str, Rows], journeys: Sequence[tuple[int, str, int, float]]
    ) -> None:
        self._tables = tables
        self._journeys = journeys

    def rows(self, table: str) -> Rows:
        return self._tables.get(table, [])

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[ColumnBatch]:
        assert table == "journeys"
        for start in range(0, len(self._journeys), 13):
            part = batch(self._journeys[start : start + 13])
            yield {name: part[name] for name in columns}


def rollup(subscription: str, host: str, attempts: int, failures: int) -> dict[str, Any]:
    return {
        "subscription_id": subscription,
        "room_id": 1,
        "target_host": host,
        "attempts": attempts,
        "failures": failures,
    }


def cause(attribute: str, value: str) -> dict[str, Any]:
    return {
        "attribute": attribute,
        "value": value,
        "inside": 1.0,
        "outside": 0.04,
        "log_odds": 5.0,
        "z": 9.0,
    }


POLICY = {"delay_ms": 1000.0, "multiplier": 2.0, "redeliveries": 3}
EFFECT = {"delivered": 0.9, "attempts": 1.4, "mean_wait_s": 2.0, "p95_wait_s": 9.0}


def prefixed(prefix: str, values: Mapping[str, Any], **other: Any) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in {**values, **other}.items()}


FULL: dict[str, Rows] = {
    "reconciliation": [
        {
            "hour": NOON,
            "room_id": 1,
            "fanout": 106,
            "enqueued": 106,
            "delivered": 100,
            "lost": 1,
            "missing": 0,
            "never_enqueued": 0,
            "unanchored": 0,
        }
    ],
    "rollups_daily": [
        rollup(A, "a.example", 60, 20),
        rollup(B, "a.example", 60, 22),
        rollup(C, "c<&>.example", 60, 0),
    ],
    "incidents": [
        {
            "incident": 1,
            "kind": "shared",
            "began": NOON,
            "ended": NOON + timedelta(minutes=4),
            "open": False,
            "subscriptions": [A, B],
            "failures": 42,
            "attempts": 44,
            "causes": [cause("target_host", "a.example"), cause("http_status", "503")],
        }
    ],
    "cofailures": [
        {
            "first_id": A,
            "second_id": B,
            "bad_first": 4,
            "bad_second": 4,
            "bad_both": 4,
            "jaccard": 1.0,
            "lift": 9.0,
            "phi": 1.0,
            "pearson": 1.0,
            "p": 0.01,
            "q": 0.01,
            "significant": True,
        }
    ],
    "hazards": [
        {
            "room_id": 1,
            "subscription_id": A,
            "attempt": n,
            "attempts": count,
            "successes": well,
            "hazard": well / count,
            "mean_delay_ms": 1000.0,
        }
        for n, count, well in ((0, 100, 60), (1, 40, 30), (2, 10, 2))
    ],
    "advice": [
        {
            "subscription_id": A,
            "deliveries": 100,
            "hopeless": 0.0,
            "reproduced": True,
            "held_up": True,
            **prefixed("deployed", POLICY),
            **prefixed("measured", EFFECT),
            **prefixed("replayed", EFFECT),
            **prefixed("recommended", POLICY, redeliveries=6),
            **prefixed("recommended", EFFECT, delivered=0.99),
        }
    ],
    "advice_front": [
        {
            "subscription_id": A,
            **prefixed("policy", POLICY, redeliveries=n),
            **prefixed("expected", EFFECT, delivered=0.8 + n / 50, attempts=1 + n / 9),
        }
        for n in range(8)
    ],
}


def test_deliveries_are_counted_by_time_of_publish() -> None:
    result = read_history(lambda columns: Tables({}, JOURNEYS).batches("journeys", columns))
    assert result.step_s == 1
    assert result.total() == len(JOURNEYS)
    assert {
        fate: result.total(fate) for fate in (FIRST_ATTEMPT, RETRIED, SIDELINED, OPEN, LOST, PULLED)
    } == {
        FIRST_ATTEMPT: 90,
        RETRIED: 10,
        SIDELINED: 1,
        OPEN: 2,
        LOST: 1,
        PULLED: 1,
    }
    assert [moment.outcomes[RETRIED] for moment in result.buckets][29:41] == [0, *[1] * 10, 0]
    # Half of the deliveries of second 30 took 0.1 s, the others a minute; bins are 4.4 % wide.
    assert result.buckets[30].latency_s["p50"] == pytest.approx(0.1, rel=0.03)
    assert result.buckets[30].latency_s["p99"] == pytest.approx(60.0, rel=0.03)
    assert "p99" not in result.buckets[100].latency_s


def test_a_long_log_has_long_buckets() -> None:
    span_s = 40 * 86_400
    rows = [journey(second, "delivered", took_s=1.0) for second in range(0, span_s, 3600)]
    result = read_history(lambda columns: Tables({}, rows).batches("journeys", columns))
    assert len(result.buckets) <= 151
    assert result.total(FIRST_ATTEMPT) == len(rows)
    assert result.buckets[0].at <= NOON < result.buckets[1].at


@pytest.fixture(scope="module")
def full() -> HtmlReport:
    return HtmlReport.from_tables(Tables(FULL, JOURNEYS))


@pytest.fixture(scope="module")
def figures(full: HtmlReport) -> Sequence[Figure]:
    """Draw the figures once, as this is slow."""
    return list(full.figures())


def test_the_captions_name_the_pattern(full: HtmlReport, figures: Sequence[Figure]) -> None:
    captions = {figure.name: figure.caption for figure in figures}
    assert set(captions) == {"history", "latency", "incidents", "cofailures", "hazard", "advice-1"}
    assert all(figure.chart is not None for figure in figures)
    assert "85 % at the first attempt, 9.4 % after retries" in captions["history"]
    assert "1 are lost" in captions["history"]
    assert (
        "S1 and S2 failed together from 2026-03-01 12:00 to 12:04 UTC: 42 of 44 attempts"
        in captions["incidents"]
    )
    assert (
        "target host a.example (100 % of these failures, 4.0 % elsewhere) and http status 503"
        in captions["incidents"]
    )
    assert (
        "S1 and S2 share most, 4 of 4. A dot marks significant pairs (1 of 1)"
        in captions["cofailures"]
    )
    assert (
        "60 % of 100 first attempts succeed; the most successful retry is number 1 (75 %), "
        "the least successful number 2 (20 %)" in captions["hazard"]
    )
    assert (
        "6 retries, first after 1 s, each wait 2 times the last, would deliver 99.0%"
        in captions["advice-1"]
    )
    assert "The totals do not match: 1 lost" in report_captions.reconciliation_caption(
        full.reconciliation
    )


class _Page(HTMLParser):
    """Tracks open tags, and everything that a page makes a browser fetch or run."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [tag] if tag in {"script", "link", "iframe", "img", "object"} else []
        self.asked += [
            f"{name}={value}"
            for name, value in attrs
            if name in {"src", "href", "xlink:href"} or name.startswith("on")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_self_contained(full: HtmlReport) -> None:
    html = full.html()
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert page.asked == []
    assert html.count("<svg") == 6
    assert "c&lt;&amp;&gt;.example" in html
    assert "c<&>" not in html
    # Colours come from the page, so that charts are readable on a dark one.
    assert "currentColor" in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r'fill="(#000|black)', html)


def test_the_page_without_failures() -> None:
    result = HtmlReport.from_tables(
        Tables({"reconciliation": [{"hour": NOON, "room_id": 1, "fanout": 0}]}, [])
    )
    assert [figure.chart for figure in result.figures()] == [None] * 6
    html = result.html()
    assert "There were no incidents" in html
    assert "Nothing is lost" in html


def test_usage_is_a_table_of_its_own() -> None:
    row = UsageRow(
        start=NOON,
        organisation_id=OrganisationId(A),
        organisation_name="<north>",
        room_id=RoomId(7),
        room_name=None,
        event_type=None,
        counts=dict.fromkeys(COUNTERS, 1234),
    )
    tables = Tables({"reconciliation": [{"hour": NOON, "room_id": 1, "fanout": 0}]}, [])
    html = HtmlReport.from_tables(tables, [row]).html()
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert "Usage since 2026-03-01" in html
    assert "&lt;north&gt;" in html
    assert html.count("1,234") == len(COUNTERS)
    assert "Usage since" not in HtmlReport.from_tables(tables).html()


def test_the_picture_is_a_png(figures: Sequence[Figure]) -> None:
    drawn = render_png(figures, scale=0.5)
    assert drawn.startswith(b"\x89PNG")
    assert int.from_bytes(drawn[16:20], "big") == 500


def test_an_interval_contains_its_share_and_narrows() -> None:
    low, high = wilson(8, 10)
    assert 0.44 < low < 0.8 < high < 0.95
    assert wilson(0, 5)[0] == 0.0
    narrow = wilson(800, 1000)
    assert narrow[1] - narrow[0] < (high - low) / 5
