"""Insert many rows by one statement with one parameter, whatever their number.

A statement with a parameter for each value differs for each number of rows, so that it is built,
parsed and planned every time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Table, column, func, select, text
from sqlalchemy.dialects.postgresql import Insert, insert


def insert_from_json(table: Table, names: tuple[str, ...]) -> Insert:
    """Return the statement that inserts these columns of the parameter `rows`."""
    record = func.json_populate_recordset(text(f"NULL::{table.name}"), text("CAST(:rows AS json)"))
    found: Any = select(*[column(name) for name in names]).select_from(record.alias("r"))
    return insert(table).from_select(names, found, include_defaults=False)


def rows_as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the parameter `rows`: JSON, with bytes as PostgreSQL reads them.

    ValueError: the rows have different columns, so the statement of one would lose those of others.
    """
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError("the rows have different columns")
    return msgspec.json.encode(
        [
            {
                name: f"\\x{value.hex()}" if isinstance(value, bytes) else value
                for name, value in row.items()
            }
            for row in rows
        ]
    ).decode()
