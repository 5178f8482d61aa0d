"""Count the attempts of log rows as Spark does, by DuckDB."""

import duckdb
import numpy as np
import pyarrow as pa

from delivery.analytics.findings.cells import CELL_S, AttemptCells

_COUNTED = f"""
SELECT subscription_id, epoch_us(ts - to_microseconds(coalesce(floor(latency_ms * 1000.0 + 0.5), 0)::BIGINT
        * (kind = 'attempted')::BIGINT)) // {CELL_S * 1_000_000} AS bin,
    kind = 'attempted' AND attempt = 0 AS first, room_id::VARCHAR AS room_id, target_host, event_type,
    event_version::VARCHAR AS event_version, worker_host, NULL::VARCHAR AS worker_version, worker::VARCHAR AS worker,
    CASE WHEN kind = 'attempted' THEN error_class END AS error_class,
    CASE WHEN kind = 'attempted' AND error_class IS NOT NULL THEN http_status END::VARCHAR AS http_status, policy_version,
    count(*) FILTER (kind = 'attempted') AS attempts, count(*) FILTER (kind = 'sidelined') AS sidelined
FROM planted WHERE kind IN ('attempted', 'sidelined') GROUP BY ALL
"""


def counted_rows(rows: pa.Table) -> pa.Table:
    """Return the counts with the subscription's id in place of its key."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("planted", rows)
        return connection.sql(_COUNTED).to_arrow_table()


def count_cells(rows: pa.Table) -> tuple[AttemptCells, list[str]]:
    """Return the cells of log rows, and the subscriptions by key."""
    counted = counted_rows(rows)
    ids = counted.column("subscription_id").to_pylist()
    names = sorted(set(ids))
    places = {name: place for place, name in enumerate(names)}
    keys = np.array([places[one] for one in ids], dtype=np.int64)
    return AttemptCells.from_arrow(counted.append_column("sub_key", pa.array(keys))), names
