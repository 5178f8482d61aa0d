"""Test that no cell of a table is a formula, also to programs with other separators."""

import csv
import io
import json
import re

import pytest

from rooms.api.exports import csv_lines


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])  # noqa: RUF001 - full-width
def test_text_that_begins_like_a_formula_is_text(start: str) -> None:
    text = f"{start}1+1"
    ((cell,),) = csv.reader(io.StringIO(csv_lines([[text]]).decode(), newline=""))
    assert cell == f"'{text}"


@pytest.mark.parametrize("text", ["x;=1+1", "x\t=1+1", 'x;"=1+1', "x;@SUM(1)", "a;b; =1+1"])
def test_what_another_separator_would_begin_is_no_formula(text: str) -> None:
    assert not re.search(r"[;\t][\" ]*[=+\-@]", csv_lines([["first", text]]).decode())


def test_a_separator_in_json_is_escaped_and_means_the_same() -> None:
    value = {"name": "x;=1+1"}
    written = csv_lines([[value]]).decode()
    assert ";" not in written
    ((cell,),) = csv.reader([written])
    assert json.loads(cell) == value


@pytest.mark.parametrize("text", ["a; b", "1;2", "plain", "a = b", "x-y", ""])
def test_other_text_stays_as_it_is(text: str) -> None:
    ((_, cell),) = csv.reader([csv_lines([["", text]]).decode()])
    assert cell == text
