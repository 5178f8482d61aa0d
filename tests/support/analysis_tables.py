"""Tables of an analysis with the rows of a test."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from delivery.analytics.results.reader import AnalysisTables


def write_tables(folder: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> AnalysisTables:
    """Write the tables as a run does, and open them. Columns without a value are text."""
    for name, rows in tables.items():
        (folder / name).mkdir(parents=True)
        found = pa.Table.from_pylist([dict(row) for row in rows])
        fields = [
            pa.field(field.name, pa.string()) if pa.types.is_null(field.type) else field
            for field in found.schema
        ]
        pq.write_table(found.cast(pa.schema(fields)), folder / name / "rows.parquet")
    latest = {
        "run": 1,
        "at": "2026-05-01T12:00:00+00:00",
        "totals": {},
        "tables": {name: name for name in tables},
    }
    (folder / "latest.json").write_text(json.dumps(latest))
    return AnalysisTables.open(str(folder))
