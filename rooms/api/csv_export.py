"""Write tables as CSV, in which no cell is a formula to a program for tables."""

import csv
import io
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from rooms.api.openapi import CSV

CSV_MEDIA_TYPE: Final = f"{CSV}; charset=utf-8"
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", *"＝＋－＠")  # noqa: RUF001 - full-width
# Programs that take these as separators, as some countries' do, begin a cell after them.
_INNER_START: Final = re.compile(f"([;\t][\"' ]*)([{re.escape(''.join(_FORMULA_STARTS))}])")


def csv_lines(rows: Iterable[Iterable[object]]) -> bytes:
    """Return lines of cells: text as it is, None empty, times in RFC 3339, all else as JSON."""
    text = io.StringIO()
    csv.writer(text).writerows(map(_cell, row) for row in rows)
    return text.getvalue().encode()


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case str():
            text = _INNER_START.sub(r"\1'\2", value)
            return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
        case _:
            return msgspec.json.encode(value).decode().replace(";", "\\u003b")
