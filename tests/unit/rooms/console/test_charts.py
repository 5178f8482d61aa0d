"""Test that charts are drawn within their frame, whatever the values, and a message's timeline."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.console import charts
from rooms.console.charts import MAX_LINES, TimelineLine, draw_timeline, step_kind, worst_first
from rooms.domain.state_machine import LogKind

VALUES = st.lists(st.floats(0, 1e12), max_size=600)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def numbers(drawing: str) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?", drawing.partition("</title>")[2])]


@given(values=st.lists(st.none() | st.floats(0, 1e12), max_size=600))
def test_a_line_stays_within_its_frame(values: list[float | None]) -> None:
    drawing = charts.sparkline(values, "title")
    ET.fromstring(drawing)
    assert all(-1 <= one <= 241 for one in numbers(drawing))


@given(good=VALUES, bad=VALUES)
def test_bars_stay_within_their_frame(good: list[float], bad: list[float]) -> None:
    drawing = charts.stacked_bars([("good", good), ("bad", bad)], "title")
    ET.fromstring(drawing)
    for bar in re.findall(r'y="(-?[\d.]+)"', drawing):
        assert float(bar) >= -3


def test_a_title_is_text() -> None:
    drawing = charts.sparkline([1, 2], "<script>&")
    assert "<script>" not in drawing
    assert "&lt;script&gt;&amp;" in drawing


@pytest.mark.parametrize("times", [[], [(0, 0)], [(0, 1), (5, 3600 * 24 * 365)]])
def test_attempts_are_in_order(times: list[tuple[float, float]]) -> None:
    drawing = charts.retry_schedule(times, "title")
    ET.fromstring(drawing)
    at = [float(one) for one in re.findall(r'cx="([\d.]+)"', drawing)]
    assert len(at) == len(times)
    assert at == sorted(at)
    assert all(0 < one < 240 for one in at)


def test_lines_have_one_scale_and_show_single_points() -> None:
    drawing = charts.lines([("p50", [1, None, 2]), ("p99", [None, 4, None]), ("p95", [])], "title")
    assert drawing.count("<path") == 2
    assert 'class="line p50 point" d="M2.0 29.0h0 M238.0 20.0h0"' in drawing
    assert 'class="line p99 point" d="M120.0 2.0h0"' in drawing


def step(kind: str, after_s: float, **fields: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "ts": (BEGAN + timedelta(seconds=after_s)).isoformat(),
        "http_status": None,
        "error_class": None,
        "latency_ms": None,
        **fields,
    }


def places(drawn: str) -> list[float]:
    return [float(found) for found in re.findall(r'class="mark \w+" d="M([0-9.]+) ', drawn)]


def test_later_steps_are_further_to_the_right_and_within_the_drawing() -> None:
    steps = [step("retry_scheduled", after_s) for after_s in (0, 0.005, 0.2, 3, 400, 86_400 * 9)]
    found = places(str(draw_timeline(BEGAN, [TimelineLine(name="a", steps=steps)], "title")))
    assert found == sorted(found)
    assert len(set(found)) == len(steps)
    assert found[-1] <= 900


def test_a_step_before_the_publish_by_the_clock_of_another_host_is_at_its_begin() -> None:
    early = draw_timeline(BEGAN, [TimelineLine(name="a", steps=[step("enqueued", -5)])], "t")
    exact = draw_timeline(BEGAN, [TimelineLine(name="a", steps=[step("enqueued", 0)])], "t")
    assert places(str(early)) == places(str(exact))


def test_the_number_of_lines_is_bounded() -> None:
    lines = [TimelineLine(name=f"s{n}", steps=[step("enqueued", n)]) for n in range(100)]
    assert str(draw_timeline(BEGAN, lines, "t")).count('class="name"') == MAX_LINES


def test_what_failed_is_drawn_before_what_arrived() -> None:
    last = ("delivered", "enqueued", "held", "sidelined", "cancelled", "delivered")
    lines = [
        TimelineLine(name=str(number), steps=[step("enqueued", 0), step(kind, 1)])
        for number, kind in enumerate(last)
    ]
    assert [line.name for line in worst_first(lines)] == ["3", "2", "1", "4", "0", "5"]


def test_names_are_text() -> None:
    drawn = draw_timeline(BEGAN, [TimelineLine(name="<script>", steps=[])], "<b>")
    assert "<script>" not in drawn
    assert "<b>" not in drawn
    assert "&lt;script&gt;" in drawn


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (step("attempted", 1, http_status=200), "busy"),
        (step("attempted", 1, http_status=503), "bad"),
        (step("attempted", 1, error_class="timeout"), "bad"),
        (step("delivered", 1), "good"),
        (step("sidelined", 1), "bad"),
        (step("held", 1), "warn"),
        (step("cancelled", 1), "off"),
    ],
)
def test_the_shape_follows_the_step(found: dict[str, Any], kind: str) -> None:
    assert step_kind(found) == kind


def test_every_step_of_the_log_has_a_shape() -> None:
    for kind in LogKind:
        assert step_kind(step(kind.value, 0)) in {"good", "bad", "warn", "busy", "off"}
