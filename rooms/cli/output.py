"""What a command says: tables and lines for people, JSON for programs; notes go to standard error."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from rooms.terminal import json_safe, lines_safe, terminal_safe

# A table that nobody's terminal has to fit must not fold its ids.
_WIDE = 1000
_NOTHING = "-"
_MOST_COLUMNS = 40


def cell(value: object) -> str:
    """A value as a table shows it."""
    match value:
        case None:
            return _NOTHING
        case bool():
            return "yes" if value else "no"
        case list() | dict():
            return terminal_safe(json.dumps(value, ensure_ascii=False)) if value else _NOTHING
        case _:
            return terminal_safe(str(value))


class Output:
    """Standard output of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, value: object) -> None:
        """One JSON document for programs."""
        text = json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None)
        print(json_safe(text), flush=True)

    def json_line(self, text: str) -> None:
        """Write a JSON text that is there already, as one line for programs."""
        sys.stdout.write(json_safe(text).replace("\n", " ") + "\n")

    def heading(self, text: str) -> None:
        """Write a line for people that begins something new."""
        click.secho(terminal_safe(text), bold=True)

    def line(self, text: str) -> None:
        """A line for people."""
        click.echo(terminal_safe(text))

    def content(self, text: str) -> None:
        """Write text of several lines below a heading; none of them looks like a heading, or like a line of its own."""
        click.echo("  " + lines_safe(text).replace("\n", "\n    "))

    def note(self, text: str) -> None:
        """A line for people beside the output, on standard error."""
        click.echo(terminal_safe(text), err=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "nothing") -> None:
        """A table for people; `empty` where it has no rows."""
        if not rows:
            self.note(empty)
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell(value)) for value in row))
        with_terminal = sys.stdout.isatty()
        Console(file=sys.stdout, width=None if with_terminal else _WIDE).print(table)

    def listing(self, page: Mapping[str, Any], columns: Mapping[str, str], *, empty: str) -> None:
        """A page `{items, next_cursor}`: as it is for programs, a table of `columns` (heading: field) for people."""
        if self.as_json:
            self.document(page)
            return
        self.table(
            list(columns), [[item.get(field) for field in columns.values()] for item in page["items"]], empty=empty
        )
        if page.get("next_cursor"):
            self.note(f"more: --cursor {page['next_cursor']}, or --all")

    def resource(self, value: Mapping[str, Any]) -> None:
        """One thing: as it is for programs, a line a field for people."""
        if self.as_json:
            self.document(value)
            return
        width = min(_MOST_COLUMNS, max(map(len, value), default=0))
        for field, content in value.items():
            click.echo(f"{click.style(terminal_safe(field).ljust(width), bold=True)}  {cell(content)}")
