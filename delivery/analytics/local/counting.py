"""Count rows into the state of their partitions, by SQL, and store the state as Parquet.

Each query is about the view `rows`. Sums, minima and ORs of integers merge exactly, as in Spark.
Ranges of numbers and sorted latencies take the place of Spark's words of bits and sketches.
"""

import os
from typing import Final

import duckdb

from delivery.analytics.findings.cells import CELL_S, LOGGED
from delivery.analytics.findings.series import BIN_S
from delivery.analytics.local.files import LocalOutput
from delivery.analytics.runs.conformance import CODES, FINAL_KINDS, STEP_STARTS
from delivery.analytics.runs.manifest import Manifest, state_folder
from delivery.analytics.runs.outcomes import CREATION_KINDS, END_KINDS
from delivery.analytics.runs.tables import COUNTED, SERVICE
from rooms.domain.state_machine import LogKind

ROLLUP_KEYS: Final = ("room_id", "sub_key", "type_key", "host_key")
"""Columns by which rollups are grouped."""
CAUSE_COLUMNS: Final = tuple(
    {"target_host": "host_key", "event_type": "type_key"}.get(name, name) for name in LOGGED
)
"""Columns of the attributes of attempts, names by their keys."""


def _is(*kinds: LogKind) -> str:
    return f"code IN ({', '.join(str(CODES[kind]) for kind in kinds)})"


_ATTEMPTED: Final = _is(LogKind.ATTEMPTED)
_RETRIED: Final = _is(LogKind.RETRY_SCHEDULED)
_FAILED: Final = f"({_ATTEMPTED} AND error_class IS NOT NULL)"

_NUMBERS: Final = """
SELECT part, writer_id, min(writer_seq) AS first_seq, max(writer_seq) AS last_seq,
    sum(copies)::BIGINT AS rows
FROM (SELECT *, writer_seq - row_number() OVER (PARTITION BY part, writer_id ORDER BY writer_seq)
    AS island FROM rows_numbers)
GROUP BY part, writer_id, island
"""
_DELIVERIES: Final = f"""
SELECT part, delivery_hi, delivery_lo, count(*) AS events,
    count(*) FILTER ({_is(*CREATION_KINDS)}) AS enqueued,
    count(*) FILTER ({_ATTEMPTED}) AS attempts,
    count(*) FILTER ({_ATTEMPTED} AND error_class IS NULL) AS successes,
    count(*) FILTER ({_RETRIED}) AS retries,
    sum(CASE WHEN {_RETRIED} THEN attempt ELSE 0 END)::BIGINT AS retry_steps,
    count(*) FILTER ({_is(LogKind.LEASED)}) AS leases,
    count(*) FILTER ({_is(*END_KINDS)}) AS ends,
    count(*) FILTER ({_is(*sorted(FINAL_KINDS))}) AS finals,
    sum(CASE WHEN {_RETRIED} THEN delay_ms ELSE 0 END)::BIGINT AS backoff_ms,
    sum(CASE WHEN {_ATTEMPTED} THEN latency_us ELSE 0 END)::BIGINT AS latency_us,
    min(ts_us) FILTER ({_is(*CREATION_KINDS)}) AS enqueued_us,
    min(ts_us) AS first_us,
    min(ts_us) FILTER ({_ATTEMPTED}) AS first_attempt_us,
    min(ts_us) FILTER ({_is(*sorted(FINAL_KINDS), *END_KINDS, LogKind.HANDED_OVER)}) AS finished_us,
    max(room_id) AS room_id, max(message_hi) AS message_hi, max(message_lo) AS message_lo,
    max(sub_key) AS sub_key, max(type_key) AS type_key, max(host_key) AS host_key,
    max(event_version) AS event_version, max(ts_us) AS last_us, max(order_key) AS last_key,
    max(ts_us + coalesce(delay_ms, 0) * 1000) FILTER ({_is(*sorted(STEP_STARTS))}) AS due_us,
    max(generation) AS generation, bit_or(1 << code::INTEGER) AS kinds
FROM rows WHERE delivery_hi IS NOT NULL
GROUP BY part, delivery_hi, delivery_lo
"""
_ANCHOR: Final = f"{_is(LogKind.PUBLISHED, LogKind.REPLAYED)} AND fanout IS NOT NULL"
_BORN: Final = _is(*CREATION_KINDS)
_ANCHORS: Final = f"""
WITH by_message AS (
    SELECT part, room_id, message_hi, message_lo,
        count(*) FILTER ({_ANCHOR}) AS anchored,
        sum(CASE WHEN {_ANCHOR} THEN fanout ELSE 0 END)::BIGINT AS fanout,
        count(*) FILTER ({_BORN}) AS enqueued
    FROM rows WHERE ({_ANCHOR}) OR {_BORN} GROUP BY ALL
)
SELECT part, room_id,
    CASE WHEN NOT (anchored > 0 AND fanout = enqueued) THEN message_hi END AS message_hi,
    CASE WHEN NOT (anchored > 0 AND fanout = enqueued) THEN message_lo END AS message_lo,
    count(*) AS messages, sum(anchored)::BIGINT AS anchored, sum(fanout)::BIGINT AS fanout,
    sum(enqueued)::BIGINT AS enqueued
FROM by_message GROUP BY ALL
"""
_COUNTS: Final = ", ".join(
    f"count(*) FILTER ({_is(*kinds)}) AS {name}" for name, kinds in COUNTED.items()
)
_END_TO_END: Final = "greatest((ts_us - born_ms * 1000) / 1e3, 0.0)"
_ROLLUPS: Final = f"""
SELECT part, {", ".join(ROLLUP_KEYS)}, {_COUNTS},
    count(*) FILTER ({_FAILED}) AS failures,
    count(*) FILTER ({_ATTEMPTED} AND http_status IS NULL) AS unanswered,
    max(born_ms) FILTER ({_ATTEMPTED} AND generation = 0 AND attempt = 0) AS served_ms,
    max(ts_us) FILTER ({_is(*SERVICE)}) AS serviced_us,
    list_sort(list(latency_us / 1e3) FILTER ({_ATTEMPTED} AND latency_us IS NOT NULL)) AS latency,
    list_sort(list({_END_TO_END}) FILTER ({_is(LogKind.DELIVERED, LogKind.PULL_ACKED)}))
        AS end_to_end
FROM rows GROUP BY ALL
"""
_CELLS: Final = f"""
SELECT part, room_id, sub_key, ts_us // {BIN_S * 1_000_000} AS bin,
    CASE WHEN {_RETRIED} THEN attempt - 1 ELSE attempt END AS attempt,
    count(*) FILTER ({_ATTEMPTED}) AS attempts,
    count(*) FILTER ({_ATTEMPTED} AND error_class IS NULL) AS successes,
    sum(CASE WHEN {_ATTEMPTED} THEN latency_us ELSE 0 END)::BIGINT AS latency_us,
    count(*) FILTER ({_RETRIED}) AS retries,
    sum(CASE WHEN {_RETRIED} THEN delay_ms ELSE 0 END)::BIGINT AS delay_ms
FROM rows WHERE {_ATTEMPTED} OR {_RETRIED}
GROUP BY ALL
"""
_OF_FAILURES: Final = frozenset({"error_class", "http_status"})
_CAUSES: Final = f"""
SELECT part, sub_key,
    (ts_us - CASE WHEN {_ATTEMPTED} THEN coalesce(latency_us, 0) ELSE 0 END)
        // {CELL_S * 1_000_000} AS bin,
    ({_ATTEMPTED} AND attempt = 0) AS first,
    {
    ", ".join(
        f"CASE WHEN {_FAILED} THEN {name} END AS {name}" if name in _OF_FAILURES else name
        for name in CAUSE_COLUMNS
    )
},
    policy_version,
    count(*) FILTER ({_ATTEMPTED}) AS attempts,
    count(*) FILTER ({_is(LogKind.SIDELINED)}) AS sidelined
FROM rows WHERE ({_is(LogKind.ATTEMPTED, LogKind.SIDELINED)}) AND sub_key IS NOT NULL
GROUP BY ALL
"""
STATE_QUERIES: Final = {
    "numbers": _NUMBERS,
    "deliveries": _DELIVERIES,
    "anchors": _ANCHORS,
    "rollups": _ROLLUPS,
    "cells": _CELLS,
    "causes": _CAUSES,
}
"""The query of each table of the state, but for `names`."""
NAMES: Final = "names"
"""The table of the names of keys: (part, what, key, name)."""
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
