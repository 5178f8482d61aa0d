"""Read and write the partial results of partitions as Parquet, with DuckDB."""

import os
from typing import Final

import duckdb

from delivery.analytics.local.counting import NAMES, STATE_QUERIES
from delivery.analytics.local.files import LocalOutput
from delivery.analytics.runs.manifest import Manifest, state_folder

STATE_TABLES: Final = (*STATE_QUERIES, NAMES)


def write_query(
    connection: duckdb.DuckDBPyConnection, query: str, files: LocalOutput, folder: str
) -> None:
    """Write the rows of a query as the table in a folder below the output."""
    path = files.path(f"{folder}/part-0.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    connection.execute(f"COPY ({query}) TO {quoted(str(path))} (FORMAT parquet, COMPRESSION zstd)")
    with path.open("rb") as file:
        os.fsync(file.fileno())  # or a manifest could outlive its table at a loss of power


def quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def make_views(
    connection: duckdb.DuckDBPyConnection, files: LocalOutput, manifest: Manifest
) -> None:
    """Make a view for each table of the state: the rows of all partitions, from their last runs."""
    for table in STATE_TABLES:
        connection.execute(f"CREATE OR REPLACE VIEW {table} AS {_current(files, manifest, table)}")


def _current(files: LocalOutput, manifest: Manifest, table: str) -> str:
    found = (
        f"SELECT * FROM read_parquet({quoted(_path(files, run, table))})"
        f" WHERE part IN ({', '.join(map(str, parts))})"
        for run, parts in manifest.parts_by_run().items()
    )
    return " UNION ALL BY NAME ".join(found)


def _path(files: LocalOutput, run: int, table: str) -> str:
    return str(files.path(f"{state_folder(run)}/{table}/part-0.parquet"))


def compact(
    connection: duckdb.DuckDBPyConnection, files: LocalOutput, manifest: Manifest
) -> Manifest:
    """Merge the rows of all runs into the next one. Return the manifest, which the caller saves."""
    into = manifest.next_run
    for table in STATE_TABLES:
        query = _current(files, manifest, table)
        write_query(connection, query, files, f"{state_folder(into)}/{table}")
    return manifest.compacted(into)
