"""Make the Parquet files of tables that fit into one process, and check their names of keys."""

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from delivery.analytics.findings.results import arrow_type
from delivery.analytics.runs.errors import name_collision
from delivery.analytics.runs.tables import TABLES_BY_NAME


def checked_names(names: pa.Table) -> list[tuple[str, int, str]]:
    """Return (what, key, name) of every name. Raise CollisionError if two names share a key."""
    columns = names.to_pydict()
    known = sorted(zip(columns["what"], columns["key"], columns["name"], strict=True))
    for first, second in pairwise(known):
        if first[:2] == second[:2]:
            raise name_collision(first[0], first[2], second[2])
    return known


def rows_of_table(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows with the columns, order and types of a result table."""
    columns = TABLES_BY_NAME[table].columns
    schema = pa.schema([(one.name, arrow_type(one)) for one in columns])
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)


def small_file(rows: pa.Table) -> bytes:
    """Return a Parquet file of these rows."""
    file = io.BytesIO()
    pq.write_table(rows, file, compression="zstd")
    return file.getvalue()
