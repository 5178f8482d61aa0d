"""Write tables and lines for people, or JSON for programs. Notes go to standard error."""

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click

from rooms.cli.errors import CliError
from rooms.safe_text import json_safe, lines_safe, terminal_safe

_EMPTY_CELL = "-"
_MAX_HEADING_WIDTH = 40
_SECRETS = ("secret", "login")
"""Fields of settings that are shown only once."""

Column = str | Callable[[Mapping[str, Any]], object]
"""A field of an item, or a function of the item that returns a cell."""


def format_cell(value: object) -> str:
    """Return a value as a table shows it."""
    match value:
        case None:
            return _EMPTY_CELL
        case bool():
            return "yes" if value else "no"
        case list() | dict():
            return terminal_safe(json.dumps(value, ensure_ascii=False)) if value else _EMPTY_CELL
        case _:
            return terminal_safe(str(value))


class Output:
    """Write the standard output of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, value: object) -> None:
        """Write one JSON document for programs."""
        text = json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None)
        print(json_safe(text), flush=True)

    def json_line(self, text: str) -> None:
        """Write JSON text as one line for programs."""
        sys.stdout.write(json_safe(text).replace("\n", " ") + "\n")

    def heading(self, text: str) -> None:
        """Write a heading for people."""
        click.secho(terminal_safe(text), bold=True)

    def line(self, text: str) -> None:
        """Write a line for people."""
        click.echo(terminal_safe(text))

    def content(self, text: str) -> None:
        """Write text of several lines below a heading, indented so that no line looks like one."""
        click.echo("  " + lines_safe(text).replace("\n", "\n    "))

    def note(self, text: str) -> None:
        """Write a line for people to standard error."""
        click.echo(terminal_safe(text), err=True)

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str = "nothing"
    ) -> None:
        """Write a table for people, or `empty` as a note if it has no rows.

        On a terminal that is too narrow for it, each row is a record of several lines.
        """
        if not rows:
            self.note(empty)
            return
        from rooms.cli.table import write_table

        cells = [[format_cell(value) for value in row] for row in rows]
        width = get_terminal_size().columns if sys.stdout.isatty() else None
        write_table(columns, cells, width=width, empty=_EMPTY_CELL)

    def listing(
        self, page: Mapping[str, Any], columns: Mapping[str, Column], *, empty: str
    ) -> None:
        """Write a page {items, next_cursor}. `columns` maps the headings of the table to fields."""
        if self.as_json:
            self.document(page)
            return
        fields = list(columns.values())
        self.table(
            list(columns),
            [
                [one.get(field) if isinstance(field, str) else field(one) for field in fields]
                for one in page["items"]
            ],
            empty="nothing on this page" if page.get("next_cursor") else empty,
        )
        if page.get("next_cursor"):
            self.note(f"more: --cursor {page['next_cursor']}, or --all")

    def resource(self, value: Mapping[str, Any]) -> None:
        """Write one resource: JSON for programs, one line per field for people."""
        if self.as_json:
            self.document(value)
            return
        self._fields(value)

    def settings(self, value: Mapping[str, Any], *, every: bool = False) -> None:
        """Write a room or subscription: for people only what is set, and a secret last.

        `every`: for people, too, each field.
        """
        if self.as_json or every:
            self.resource(value)
            return
        shown = {field: content for field, content in value.items() if _is_set(field, content)}
        secrets = {field: shown.pop(field) for field in _SECRETS if field in shown}
        self._fields(shown)
        if secrets:
            click.echo()
            self._fields(secrets)
            self.note("It is shown only now: keep it where your program reads it.")

    def _fields(self, value: Mapping[str, Any]) -> None:
        width = min(_MAX_HEADING_WIDTH, max(map(len, value), default=0))
        for field, content in value.items():
            name = click.style(terminal_safe(field).ljust(width), bold=True)
            click.echo(f"{name}  {format_cell(content)}")


def _is_set(field: str, content: object) -> bool:
    """Return whether a setting says something: `ordered` may be off where the room's is on."""
    return field == "ordered" if content is False else content not in (None, [], {})


def write_export(chunks: Iterator[bytes], out: Path | None) -> None:
    """Write an export to a file, or to standard output if `out` is None. CliError.

    On a terminal, characters that could control it are escaped: anyone may have sent them.
    """
    if out is not None:
        write_whole(out, chunks)
    elif sys.stdout.isatty():
        decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
        for chunk in chunks:
            *lines, rest = (rest + decoder.decode(chunk)).split("\n")
            for line in lines:
                click.echo(json_safe(line.removesuffix("\r")))
        if rest:
            click.echo(json_safe(rest))
    else:
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)


def write_whole(path: Path, chunks: Iterator[bytes]) -> None:
    """Write a file that appears under its name only when it is complete. CliError."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as exc:
        raise CliError(f"{path} cannot be written: {exc.strerror}") from exc
    finally:
        part.unlink(missing_ok=True)
