"""Write a table in the width of a terminal, or its rows as records where it does not fit.

An id, a name or a time is never broken: it could be neither read nor copied.
"""

import sys
from collections.abc import Sequence
from typing import Final

import click

# A table that goes to a file or a pipe must not fold its ids.
_UNBOUNDED: Final = 1000
_GAP: Final = 3
"""Characters between two columns."""
_PROSE: Final = 16
"""A column of several words is not made narrower."""


def write_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None, empty: str
) -> None:
    """Write rows below their headings to standard output.

    `width`: of the terminal, in characters; None: there is none. `empty`: the text of a cell
    without a value, which a record leaves out.
    """
    if width is None:
        _write_rows(columns, rows, None, _UNBOUNDED)
    elif (widths := fit(columns, rows, width)) is not None:
        _write_rows(columns, rows, widths, width)
    else:
        _write_records(columns, rows, empty)


def fit(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return the width of each column, so that no word is broken; None: the rows are too wide."""
    from rich.cells import cell_len

    parts = list(zip(columns, *rows, strict=True))
    whole = [max(map(cell_len, part)) for part in parts]
    words = [max(map(cell_len, " ".join(part).split()), default=0) for part in parts]
    least = [max(word, min(most, _PROSE)) for word, most in zip(words, whole, strict=True)]
    spare = width - _GAP * (len(columns) - 1) - sum(least)
    if spare < 0:
        return None
    wanted = sum(whole) - sum(least)
    share = min(1.0, spare / wanted) if wanted else 0.0
    return [low + int((most - low) * share) for low, most in zip(least, whole, strict=True)]


def _write_rows(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: list[int] | None, width: int
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", width=widths[number] if widths else None)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=sys.stdout, width=width).print(table)


def _write_records(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    heading = max(map(len, columns))
    for number, row in enumerate(rows):
        if number:
            click.echo()
        for column, cell in zip(columns, row, strict=True):
            if cell != empty:
                click.echo(f"{click.style(column.ljust(heading), bold=True)}  {cell}")
