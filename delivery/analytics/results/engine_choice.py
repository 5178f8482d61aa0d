"""Choose the engine of a run: DuckDB in this process for small logs, Spark for all others.

The rows are counted in the manifests of the segments, without reading a row.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from delivery.analytics.local.files import LocalOutput
from delivery.analytics.runs.errors import AnalysisError
from delivery.analytics.runs.manifest import LOCAL, SPARK, load_known, state_engine
from delivery.analytics.sealing.arrow_files import local_folder
from delivery.analytics.sealing.errors import ManifestError
from delivery.analytics.sealing.manifest import MAX_BYTES, parse_manifest

AUTO: Final = "auto"
SMALL_ROWS: Final = 1_000_000
"""Rows of the log from which Spark analyses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine of a run, and for people why."""

    engine: str
    why: str


def choose_engine(
    asked: str,
    *,
    segments_at: str,
    output: str,
    full: bool = False,
    environment: Mapping[str, str] = os.environ,
    small_rows: int = SMALL_ROWS,
) -> EngineChoice:
    """Return the engine for these addresses. `full`: the run starts over.

    Raise AnalysisError if the engine of this process is asked for where it cannot work.
    """
    segments, tables = local_folder(segments_at), local_folder(output)
    if segments is None or tables is None:
        if asked == LOCAL:
            raise AnalysisError(
                "the engine `local` reads folders of this machine only",
                where=segments_at,
                remedy="use --engine spark",
            )
        return EngineChoice(engine=SPARK, why="the log is not on this machine")
    if asked != AUTO:
        return EngineChoice(engine=asked, why="as --engine says")
    if _is_submitted(environment):
        return EngineChoice(engine=SPARK, why="spark-submit or PYSPARK_SUBMIT_ARGS names a master")
    if find_spec("duckdb") is None:
        return EngineChoice(engine=SPARK, why="the package duckdb is not installed")
    if not full and (kept := _only_state(segments, tables)) is not None:
        return kept
    rows = count_rows(segments)
    if rows < small_rows:
        return EngineChoice(engine=LOCAL, why=f"the log has {rows:,} rows, under {small_rows:,}")
    return EngineChoice(
        engine=SPARK, why=f"the log has {rows:,} rows, and from {small_rows:,} on Spark takes it"
    )


def _is_submitted(environment: Mapping[str, str]) -> bool:
    return "PYSPARK_GATEWAY_PORT" in environment or "--master" in environment.get(
        "PYSPARK_SUBMIT_ARGS", ""
    )


def _only_state(segments: str, tables: str) -> EngineChoice | None:
    """Return the engine whose state has numbers that the other one could not count again."""
    files = LocalOutput(tables)
    engine = state_engine(files)
    if engine is None:
        return None
    gone = sum(not Path(segments, path).exists() for path in load_known(files))
    if not gone:
        return None
    return EngineChoice(
        engine=engine, why=f"only its state has the numbers of {gone:,} segments that are gone"
    )


def count_rows(segments: str) -> int:
    """Return how many rows the manifests below a folder state; damaged ones count nothing."""
    rows = 0
    for path in Path(segments).rglob("_*.parquet.manifest"):
        try:
            with path.open("rb") as file:
                rows += parse_manifest(file.read(MAX_BYTES).decode()).rows
        except (OSError, ValueError, ManifestError):
            # Its segment is set aside by the run, which names it.
            continue
    return rows
