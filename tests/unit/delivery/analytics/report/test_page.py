"""Test charts and captions of the report on small tables, and that the page is self-contained."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from delivery.analytics.report import captions as report_captions
from delivery.analytics.report.charts import outage_timeline
from delivery.analytics.report.data import (
    FIRST_ATTEMPT,
    LOST,
    OPEN,
    PULLED,
    RETRIED,
    SIDELINED,
    read_history,
    wilson,
)
from delivery.analytics.report.live import LiveStatus, Names
from delivery.analytics.report.outages import by_cost, find_outages
from delivery.analytics.report.page import Figure, HtmlReport, Surroundings, render_png
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.usage import COUNTERS, UsageRow
from tests.support.report_tables import (
    FULL,
    JOURNEYS,
    NOON,
    A,
    B,
    C,
    Tables,
    cause,
    journey,
    rollup,
)


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


NAMES = {
    A: Names(name="crm", room="orders", organisation="North"),
    B: Names(name="<b>\u202eshop", room="orders", organisation="<script>alert(1)</script>"),
}


@pytest.fixture(scope="module")
def full() -> HtmlReport:
    return HtmlReport.from_tables(Tables(FULL, JOURNEYS), Surroundings(names=NAMES))


@pytest.fixture(scope="module")
def figures(full: HtmlReport) -> Sequence[Figure]:
    """Draw the figures once, as this is slow."""
    return list(full.figures())


def test_the_captions_name_the_pattern(full: HtmlReport, figures: Sequence[Figure]) -> None:
    captions = {figure.name: figure.caption for figure in figures}
    assert set(captions) == {"history", "latency", "outages", "cofailures", "success", "advice-1"}
    assert all(figure.chart is not None for figure in figures)
    assert "85 % at the first attempt, 9.4 % after retries" in captions["history"]
    assert "1 are lost" in captions["history"]
    assert captions["outages"] == "1 outage of several subscriptions."
    assert (
        "orders/crm and orders/<b>\\u202eshop share most, 4 of 4. "
        "A frame marks pairs that chance does not explain (1 of 1)" in captions["cofailures"]
    )
    assert (
        "60 % of 100 first attempts succeed; the most successful retry is number 1 (75 %), "
        "the least successful number 2 (20 %)" in captions["success"]
    )
    assert (
        "Recommended: 6 retries, the first after 1 s, each wait 2 times the last, at most 20 s. "
        "It would deliver 99.0 % (97.5 to 99.9 % in nine of ten periods), with 1.40 attempts"
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


def parsed(html: str) -> _Page:
    page = _Page()
    page.feed(html)
    assert page.open == []
    return page


def test_the_page_is_well_formed_and_self_contained(full: HtmlReport) -> None:
    html = full.html()
    page = parsed(html)
    # Links only lead to sections of the page itself.
    assert page.asked
    assert all(one.startswith("href=#") for one in page.asked)
    anchors = {one.removeprefix("href=#") for one in page.asked}
    assert all(re.search(f"id=['\"]{anchor}['\"]", html) for anchor in anchors)
    assert html.count("<svg") == 6 + 2
    assert "c&lt;&amp;&gt;.example" in html
    assert "c<&>" not in html
    # Colours come from the page, so that charts are readable on a dark one.
    assert "currentColor" in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r'fill="(#000|black)', html)


def test_hostile_names_are_escaped_everywhere(full: HtmlReport) -> None:
    html = full.html()
    assert "<script" not in html
    assert "<b>\\u202e" not in html
    assert "\u202e" not in html
    assert html.count("orders/&lt;b&gt;\\u202eshop") >= 4
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_what_fails_comes_first_then_the_worst_then_pictures(full: HtmlReport) -> None:
    html = full.html()
    places = [html.index(f"id='{name}'") for name in ("now", "worst", "pictures", "subscriptions")]
    assert places == sorted(places)
    # Without a service: the end of the log, and its time.
    assert "What failed at the end of the log" in html
    assert "No service answered" in html
    assert "(2026-03-01 12:01&nbsp;UTC)" in html
    assert "It had" not in html
    # One outage is described once, with its cost and causes.
    assert html.count("42 of 44 attempts failed") == 1 + 2
    assert html.count("<article") == 1
    assert "2026-03-01 12:00 to 12:04, 4&nbsp;min" in html
    assert (
        "host a.example (100&nbsp;% of these failures, 4.0&nbsp;% elsewhere) and status 503" in html
    )


def status_of(**subscriptions: dict[str, Any]) -> LiveStatus:
    troubled = [
        {
            "subscription_id": identity, "name": "crm", "room": "orders", "condition": "failing",
            "since": (NOON + timedelta(minutes=40)).isoformat(), "sidelined": 1234, "retrying": 2,
            "due": 0, "held": {}, "last_error": "<i>503</i>", **fields,
        }
        for identity, fields in subscriptions.items()
    ]  # fmt: skip
    answer = {
        "at": (NOON + timedelta(hours=1)).isoformat(),
        "health": {"parts": {"database": "up", "relay": "down"}},
        "subscriptions": troubled,
        "subscriptions_total": len(troubled),
    }
    return LiveStatus.from_answer("http://127.0.0.1:8080", answer)


def test_a_running_service_says_what_fails_now() -> None:
    live = status_of(**{A: {}, C: {"condition": "resting", "sidelined": 7, "name": "done"}})
    open_now = {**FULL, "incidents": [{**FULL["incidents"][0], "open": True}]}
    html = HtmlReport.from_tables(
        Tables(open_now, JOURNEYS), Surroundings(names={}, live=live)
    ).html()
    parsed(html)
    now = html[html.index("id='now'") : html.index("id='worst'")]
    assert "http://127.0.0.1:8080 said so at 2026-03-01 13:00:00&nbsp;UTC" in now
    assert "Down: relay" in now
    assert "✕ failing" in now
    assert "20&nbsp;min ago" in now
    assert "1,234 sidelined" in now
    assert "&lt;i&gt;503&lt;/i&gt;" in now
    assert "1 subscription works again, with 7 deliveries still in the sideline" in now
    # What goes on appears here, and not among what is over.
    assert "since 2026-03-01 12:00, and goes on" in now
    assert html.count("<article") == 1
    healthy = Surroundings(names={}, live=status_of())
    html = HtmlReport.from_tables(Tables(open_now, JOURNEYS), healthy).html()
    assert "Every subscription is healthy" in html
    now, _, rest = html.partition("id='worst'")
    assert "<article" not in now
    # It may be over, or of an organisation that the key does not see: it is not left out.
    assert "since 2026-03-01 12:00, and went on when the log ended" in rest
    assert html.count("<article") == 1
    assert "goes on" not in rest.replace("what goes on at the end of the log", "")


def test_times_of_the_service_are_in_utc() -> None:
    live = status_of(**{A: {"since": "2026-03-01T22:30:00+10:00"}})
    html = HtmlReport.from_tables(Tables({}, []), Surroundings(names={}, live=live)).html()
    assert "2026-03-01 12:30, 30&nbsp;min ago" in html


def test_what_the_service_did_not_list_is_not_called_healthy() -> None:
    live = replace(status_of(**{A: {"condition": "resting"}}), total=300)
    html = HtmlReport.from_tables(Tables({}, []), Surroundings(names={}, live=live)).html()
    assert "Every subscription is healthy" not in html
    assert "299 more" in html


def test_pieces_of_one_outage_are_one() -> None:
    first = FULL["incidents"][0]
    later = {**first, "incident": 2, "began": NOON + timedelta(minutes=8)}
    later |= {"ended": NOON + timedelta(minutes=15), "late": 5, "sidelined": 1}
    other = {**first, "incident": 3, "subscriptions": [C], "kind": "single"}
    apart = {**first, "incident": 4, "began": NOON + timedelta(hours=2)}
    apart |= {"ended": NOON + timedelta(hours=3)}
    found = find_outages([apart, other, later, first], NOON + timedelta(hours=9))
    assert [(one.number, one.pieces, one.failures) for one in found] == [
        (1, 2, 84), (3, 1, 42), (4, 1, 42),
    ]  # fmt: skip
    assert (found[0].late, found[0].sidelined, found[0].is_open) == (5, 1, False)
    assert [one.number for one in by_cost(found)] == [1, 3, 4]


def test_two_causes_at_a_time_are_two_outages() -> None:
    host = FULL["incidents"][0]
    version = {**host, "incident": 2, "began": NOON + timedelta(minutes=2), "failures": 900}
    version |= {"causes": [cause("event_version", "paid 2"), cause("http_status", "503")]}
    found = find_outages([host, version], NOON + timedelta(hours=9))
    assert [(one.number, one.causes[0]["attribute"]) for one in found] == [
        (1, "target_host"),
        (2, "event_version"),
    ]
    # What says nothing of the cause contradicts none.
    unknown = {**version, "causes": [cause("http_status", "503")]}
    (one,) = find_outages([host, unknown], NOON + timedelta(hours=9))
    assert one.pieces == 2


def test_intervals_of_begin_and_end_are_shown() -> None:
    row = {
        **FULL["incidents"][0],
        "began_from": NOON - timedelta(seconds=20), "began_to": NOON + timedelta(seconds=10),
        "ended_from": None, "ended_to": None,
    }  # fmt: skip
    html = HtmlReport.from_tables(Tables({**FULL, "incidents": [row]}, JOURNEYS)).html()
    assert "(began between 11:59:40 and 12:00:10)" in html
    # Nothing was tried for two days before it.
    row["began_from"] = NOON - timedelta(days=2)
    html = HtmlReport.from_tables(Tables({**FULL, "incidents": [row]}, JOURNEYS)).html()
    assert "(began between 2026-02-27 12:00:00 and 2026-03-01 12:00:10)" in html


def test_a_page_about_one_subscription(full: HtmlReport) -> None:
    html = full.subscription_html(A)
    assert html is not None
    page = parsed(html)
    assert page.asked == []
    assert "<h1>orders/crm</h1>" in html
    assert "2026-03-01 12:00 to 12:04" in html
    assert "20 (33&nbsp;%)" in html
    assert B not in html
    assert full.subscription_html("019b0000-0000-7000-8000-00000000000f") is None


def test_nothing_differs_by_colour_only(full: HtmlReport, figures: Sequence[Figure]) -> None:
    charts = {figure.name: figure.chart or "" for figure in figures}
    single = {**FULL["incidents"][0], "incident": 2, "kind": "single", "subscriptions": [C]}
    both = {**FULL, "incidents": [*FULL["incidents"], single]}
    names = HtmlReport.from_tables(Tables(both, JOURNEYS)).names
    pattern = r'fill="url\(#[a-z]+-\d\)"'
    assert len(set(re.findall(pattern, charts["history"]))) >= 5
    assert len(set(re.findall(pattern, outage_timeline(names)))) == 1
    assert len(set(re.findall(r'stroke-dasharray="([^"]+)"', charts["latency"]))) >= 2
    assert ">100<" in charts["cofailures"]
    # Every pattern that an area uses is defined, once in the page.
    html = full.html()
    for one in set(re.findall(r"url\(#([^)]+)\)", html)):
        assert html.count(f'id="{one}"') == 1


def test_many_subscriptions_have_bounded_sections() -> None:
    ids = [f"019b0000-0000-7000-8000-{number:012x}" for number in range(450)]
    tables = {
        **FULL,
        "rollups_daily": [rollup(one, "a.example", 9, at) for at, one in enumerate(ids)],
        "incidents": [], "cofailures": [], "hazards": [], "advice": [], "advice_front": [],
    }  # fmt: skip
    html = HtmlReport.from_tables(Tables(tables, JOURNEYS[:30])).html()
    assert html.count("id='subscription-") == 200
    assert "250 more, with fewer failures" in html


def test_the_page_without_failures() -> None:
    result = HtmlReport.from_tables(
        Tables({"reconciliation": [{"hour": NOON, "room_id": 1, "fanout": 0}]}, [])
    )
    assert [figure.chart for figure in result.figures()] == [None] * 6
    html = result.html()
    assert "There were no incidents" in html
    assert "No outage went on" in html
    assert "Nothing is lost" in html


def test_books_that_do_not_match_name_what_is_wrong() -> None:
    counts = {"fanout": 9, "enqueued": 12, "unanchored": 3}
    tables = Tables({"reconciliation": [{"hour": NOON, "room_id": 1, **counts}]}, [])
    html = HtmlReport.from_tables(tables).html()
    assert "The totals do not match: 3 of messages whose publish is not in the log." in html


def test_usage_is_a_table_of_its_own() -> None:
    row = UsageRow(
        start=NOON,
        organisation_id=OrganisationId(A),
        organisation_name="<north>",
        room_id=RoomId(7),
        room_name=None,
        event_type=None,
        application="registry",
        counts=dict.fromkeys(COUNTERS, 1234),
    )
    tables = Tables({"reconciliation": [{"hour": NOON, "room_id": 1, "fanout": 0}]}, [])
    html = HtmlReport.from_tables(tables, Surroundings(names={}, usage=[row])).html()
    parsed(html)
    assert "Usage since 2026-03-01" in html
    assert "&lt;north&gt;" in html
    assert ">registry</td>" in html
    assert html.count("1,234") == len(COUNTERS)
    assert "Usage since" not in HtmlReport.from_tables(tables).html()


def test_what_was_not_read_is_named_and_not_called_lost() -> None:
    tables = Tables({"reconciliation": [{"hour": NOON, "room_id": 1, "fanout": 0}]}, [])
    tables.set_aside = [
        {
            "path": "dt=2026-03-01/hr=12/a<b>.parquet",
            "reason": "damaged",
            "detail": "its bytes are not those that were sealed",
            "remedy": "restore it",
        }
    ]
    tables.set_aside_total = 1
    html = HtmlReport.from_tables(tables).html()
    parsed(html)
    assert "The result is incomplete" in html
    assert "Nothing is lost" not in html
    (aside,) = re.findall(r'<ul id="aside" class="wrong">(.*?)</ul>', html)
    assert "a&lt;b&gt;.parquet" in aside
    assert "sealed" in aside


def test_the_time_of_findings_is_named_where_it_is_another() -> None:
    tables = Tables({}, [])
    assert "Outages and retry advice are" not in HtmlReport.from_tables(tables).html()
    tables.findings_at = tables.at - timedelta(minutes=5)
    html = HtmlReport.from_tables(tables).html()
    assert "Outages and retry advice are of 2026-03-01 12:55:00. Times are UTC." in html
    tables.findings_at = None
    html = HtmlReport.from_tables(tables).html()
    parsed(html)
    assert "Outages and retry advice are not computed yet." in html


def test_open_deliveries_are_listed_with_the_oldest() -> None:
    ages = [
        {
            "room_id": 1,
            "subscription_id": one,
            "outcome": outcome,
            "deliveries": 1200,
            "oldest_since": NOON,
            "oldest_age_s": 60.0,
            "oldest_delivery_id": C,
        }
        for one, outcome in ((A, "stuck"), (None, "in_flight"))
    ]
    html = HtmlReport.from_tables(Tables({"ages": ages}, [])).html()
    parsed(html)
    section = html.partition("<section id='ages'>")[2].partition("</section>")[0]
    assert "stuck" in section
    assert "in flight" in section
    assert "1,200" in section
    assert A in section
    assert "id='ages'" not in HtmlReport.from_tables(Tables({}, [])).html()


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
