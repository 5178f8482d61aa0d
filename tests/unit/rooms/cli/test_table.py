"""Test that a table of any width can be read, and its ids copied."""

import sys

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rooms.cli.output import Output
from rooms.cli.table import fit, write_table

ID = "01900000-0000-7000-8000-0000000000aa"
TIME = "2026-01-31T12:00:00.123456Z"
COLUMNS = ("id", "at", "state", "error")
ROWS = ((ID, TIME, "sidelined", "connect: cannot connect to 127.0.0.1"), (ID, TIME, "queued", "-"))


def written(capsys: pytest.CaptureFixture[str], width: int | None) -> list[str]:
    write_table(COLUMNS, ROWS, width=width, empty="-")
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_wide_terminal_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = written(capsys, 130)
    assert len(lines) == 4
    assert lines == written(capsys, None)


def test_a_narrower_one_breaks_only_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    lines = written(capsys, 105)
    assert max(map(len, lines)) <= 105
    assert [line.split()[:2] for line in lines if ID in line] == [[ID, TIME]] * 2
    folded = " ".join(line[len(f"{ID}   {TIME}   sidelined") :].strip() for line in lines[2:-1])
    assert folded == ROWS[0][3]


def test_where_no_row_fits_each_is_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert written(capsys, 80) == [
        f"id     {ID}",
        f"at     {TIME}",
        "state  sidelined",
        "error  connect: cannot connect to 127.0.0.1",
        "",
        f"id     {ID}",
        f"at     {TIME}",
        "state  queued",
    ]


CELLS = st.text("ab 表", min_size=1, max_size=40).filter(str.strip)


@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4),
    st.integers(min_value=1, max_value=120),
)
def test_what_fits_is_no_wider_than_the_terminal_and_no_narrower_than_a_word(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    columns = ("one", "two", "three")
    found = fit(columns, rows, width)
    words = [
        max(cell_len(word) for cell in part for word in cell.split())
        for part in zip(columns, *rows, strict=True)
    ]
    if found is None:
        assert width < sum(max(word, 16) for word in words) + 6
    else:
        assert sum(found) + 6 <= width
        assert all(one >= word for one, word in zip(found, words, strict=True))


def test_a_listing_has_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    items = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    page = {"items": items, "next_cursor": None}
    Output(as_json=False).listing(page, {name: name for name in COLUMNS}, empty="nothing")
    assert f"id     {ID}" in map(click.unstyle, capsys.readouterr().out.splitlines())
