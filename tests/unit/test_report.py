"""The report: what its charts count and its captions say, of small tables made up here; and that it needs nothing but itself."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from delivery.report import words
from delivery.report.history import ASIDE, FIRST, LOST, OPEN, PULLED, RETRIED, Batch, history_of
from delivery.report.page import Figure, Report
from delivery.report.picture import picture
from delivery.report.retries import wilson

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
Rows = list[dict[str, Any]]
A, B, C = (f"019b0000-0000-7000-8000-00000000000{letter}" for letter in "abc")


def journey(
    second: float, outcome: str, *, attempts: int = 1, took_s: float | None = None
) -> tuple[int, str, int, float]:
    born_ms = round((NOON.timestamp() + second) * 1000)
    finished = np.nan if took_s is None else (born_ms + took_s * 1000) * 1000
    return born_ms << 16, outcome, attempts, finished


def batch(rows: Sequence[tuple[int, str, int, float]]) -> Batch:
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
    *(journey(100, outcome) for outcome in ("sidelined", "waiting", "in_flight", "lost", "acked", "expired")),
]


class Tables:
    """One run's tables, as far as they are given."""

    run = 7
    at = NOON + timedelta(hours=1)

    def __init__(self, tables: Mapping[str, Rows], journeys: Sequence[tuple[int, str, int, float]]) -> None:
        self._tables = tables
        self._journeys = journeys

    def rows(self, table: str) -> Rows:
        return self._tables.get(table, [])

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[Batch]:
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
    return {"attribute": attribute, "value": value, "inside": 1.0, "outside": 0.04, "log_odds": 5.0, "z": 9.0}


POLICY = {"delay_ms": 1000.0, "multiplier": 2.0, "redeliveries": 3}
EFFECT = {"delivered": 0.9, "attempts": 1.4, "mean_wait_s": 2.0, "p95_wait_s": 9.0}


def prefixed(prefix: str, values: Mapping[str, Any], **other: Any) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in {**values, **other}.items()}


FULL: dict[str, Rows] = {
    "reconciliation": [
        {
            "hour": NOON, "room_id": 1, "fanout": 106, "enqueued": 106, "delivered": 100, "lost": 1, "missing": 0,
            "never_enqueued": 0, "unanchored": 0,
        }
    ],
    "rollups_daily": [rollup(A, "a.example", 60, 20), rollup(B, "a.example", 60, 22), rollup(C, "c<&>.example", 60, 0)],
    "incidents": [
        {
            "incident": 1, "kind": "shared", "began": NOON, "ended": NOON + timedelta(minutes=4), "subscriptions": [A, B],
            "failures": 42, "attempts": 44, "causes": [cause("target_host", "a.example"), cause("http_status", "503")],
        }
    ],
    "cofailures": [
        {
            "first_id": A, "second_id": B, "bad_first": 4, "bad_second": 4, "bad_both": 4, "jaccard": 1.0, "lift": 9.0,
            "phi": 1.0, "pearson": 1.0, "p": 0.01, "q": 0.01, "significant": True,
        }
    ],
    "hazards": [
        {"room_id": 1, "subscription_id": A, "attempt": n, "attempts": count, "successes": well, "hazard": well / count, "mean_delay_ms": 1000.0}
        for n, count, well in ((0, 100, 60), (1, 40, 30), (2, 10, 2))
    ],
    "advice": [
        {
            "subscription_id": A, "deliveries": 100, "hopeless": 0.0, "reproduced": True, "held_up": True,
            **prefixed("deployed", POLICY), **prefixed("measured", EFFECT), **prefixed("replayed", EFFECT),
            **prefixed("recommended", POLICY, redeliveries=6), **prefixed("recommended", EFFECT, delivered=0.99),
        }
    ],
    "advice_front": [
        {"subscription_id": A, **prefixed("policy", POLICY, redeliveries=n), **prefixed("expected", EFFECT, delivered=0.8 + n / 50, attempts=1 + n / 9)}
        for n in range(8)
    ],
}  # fmt: skip


def test_deliveries_are_counted_where_they_were_published() -> None:
    told = history_of(lambda columns: Tables({}, JOURNEYS).batches("journeys", columns))
    assert told.step_s == 1
    assert told.total() == len(JOURNEYS)
    assert {fate: told.total(fate) for fate in (FIRST, RETRIED, ASIDE, OPEN, LOST, PULLED)} == {
        FIRST: 90, RETRIED: 10, ASIDE: 1, OPEN: 2, LOST: 1, PULLED: 1,
    }  # fmt: skip
    assert [moment.fates[RETRIED] for moment in told.moments][29:41] == [0, *[1] * 10, 0]
    # Half of the deliveries of second 30 took 0.1 s, the others a minute; a bin is 4.4 % wide.
    assert told.moments[30].took_s["p50"] == pytest.approx(0.1, rel=0.03)
    assert told.moments[30].took_s["p99"] == pytest.approx(60.0, rel=0.03)
    assert "p99" not in told.moments[100].took_s


def test_a_long_log_is_told_in_long_steps() -> None:
    span_s = 40 * 86_400
    rows = [journey(second, "delivered", took_s=1.0) for second in range(0, span_s, 3600)]
    told = history_of(lambda columns: Tables({}, rows).batches("journeys", columns))
    assert len(told.moments) <= 151
    assert told.total(FIRST) == len(rows)
    assert told.moments[0].at <= NOON < told.moments[1].at


@pytest.fixture(scope="module")
def full() -> Report:
    return Report.of(Tables(FULL, JOURNEYS))


@pytest.fixture(scope="module")
def figures(full: Report) -> Sequence[Figure]:
    """Drawn once: that is what takes time here."""
    return list(full.figures())


def test_the_captions_name_the_pattern(full: Report, figures: Sequence[Figure]) -> None:
    captions = {figure.name: figure.caption for figure in figures}
    assert set(captions) == {"history", "latency", "incidents", "cofailures", "hazard", "advice-1"}
    assert all(figure.chart is not None for figure in figures)
    assert "85 % at the first attempt, 9.4 % after retries" in captions["history"]
    assert "1 are lost" in captions["history"]
    assert "S1 and S2 failed together from 2026-03-01 12:00 to 12:04 UTC: 42 of 44 attempts" in captions["incidents"]
    assert (
        "target host a.example (100 % of these failures, 4.0 % elsewhere) and http status 503" in captions["incidents"]
    )
    assert "S1 and S2 share most, 4 of 4. A dot: more than chance explains (1 of 1 pairs)" in captions["cofailures"]
    assert (
        "60 % of 100 first tries succeed; of retries the best is number 1 (75 %), the least worth number 2 (20 %)"
        in captions["hazard"]
    )
    assert "6 retries, first after 1 s, each wait 2 times the last, would deliver 99.0%" in captions["advice-1"]
    assert "The books do not close: 1 lost" in words.of_books(full.books)


class _Page(HTMLParser):
    """Tags that are open, and what a page asks a browser to fetch or run."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [tag] if tag in {"script", "link", "iframe", "img", "object"} else []
        self.asked += [
            f"{name}={value}" for name, value in attrs if name in {"src", "href", "xlink:href"} or name.startswith("on")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_for_nothing(full: Report) -> None:
    html = full.html()
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert page.asked == []
    assert html.count("<svg") == 6
    assert "c&lt;&amp;&gt;.example" in html
    assert "c<&>" not in html
    # Ink comes from the page, so that the charts can be read on a dark one.
    assert "currentColor" in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r'fill="(#000|black)', html)


def test_without_any_failure_the_page_says_so() -> None:
    told = Report.of(Tables({"reconciliation": [{"hour": NOON, "room_id": 1, "fanout": 0}]}, []))
    assert [figure.chart for figure in told.figures()] == [None] * 6
    html = told.html()
    assert "Nothing failed for long" in html
    assert "Nothing is lost" in html


def test_the_picture_is_a_png(figures: Sequence[Figure]) -> None:
    drawn = picture(figures, scale=0.5)
    assert drawn.startswith(b"\x89PNG")
    assert int.from_bytes(drawn[16:20], "big") == 500


def test_an_interval_holds_its_share_and_narrows() -> None:
    low, high = wilson(8, 10)
    assert 0.44 < low < 0.8 < high < 0.95
    assert wilson(0, 5)[0] == 0.0
    narrow = wilson(800, 1000)
    assert narrow[1] - narrow[0] < (high - low) / 5
