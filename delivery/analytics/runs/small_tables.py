"""Make the Parquet files of tables that fit into one process."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from delivery.analytics.findings.results import arrow_type
from delivery.analytics.runs.tables import TABLES_BY_NAME


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
