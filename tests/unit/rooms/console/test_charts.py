"""Test that charts are drawn within their frame, whatever the values are."""

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.console import charts

VALUES = st.lists(st.floats(0, 1e12), max_size=600)


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
