"""Compute the same results with DuckDB over the raw segments, independently of the jobs."""

from pathlib import Path
from typing import Any

import duckdb

_EVENTS = """
CREATE TABLE events AS SELECT DISTINCT ON (writer_id, writer_seq) *, epoch_us(ts) AS us,
    ('0x' || replace(message_id, '-', '')[1:12])::BIGINT AS born_ms
FROM read_parquet('{segments}/*/*/*.parquet', hive_partitioning = false)
"""
_STANDS = """
CREATE TABLE stands AS
WITH ranked AS (
    SELECT delivery_id, arg_max(kind, (generation, attempt, CASE
        WHEN kind IN ('delivered', 'pull_acked', 'purged') THEN 1000000000
        WHEN kind IN ('expired', 'cancelled', 'dropped') THEN 6 WHEN kind = 'sidelined' THEN 5 WHEN kind IN ('held', 'handed_over') THEN 4
        WHEN kind = 'attempted' THEN 3 WHEN kind = 'leased' THEN 2 WHEN kind = 'coming_due' THEN 1 ELSE 0 END)) AS last_kind
    FROM events WHERE delivery_id IS NOT NULL GROUP BY ALL
), ended AS (
    SELECT DISTINCT ON (delivery_id) delivery_id, kind FROM events
    WHERE kind IN ('delivered', 'pull_acked', 'purged') ORDER BY delivery_id, kind
), served AS (
    SELECT subscription_id, max(born_ms) AS served_ms FROM events
    WHERE kind = 'attempted' AND generation = 0 AND attempt = 0 GROUP BY ALL
), serviced AS (
    SELECT subscription_id, max(us) AS serviced_us FROM events WHERE kind IN ('attempted', 'leased', 'handed_over') GROUP BY ALL
), ending AS (SELECT max(us) AS end_us FROM events WHERE delivery_id IS NOT NULL
), due AS (
    SELECT delivery_id, any_value(subscription_id) AS subscription_id, any_value(room_id) AS room_id,
        max(us + coalesce(delay_ms, 0) * 1000) FILTER (kind IN ('enqueued', 'replayed', 'retry_scheduled', 'released',
            'lease_ended', 'nacked', 'shoveled', 'restored')) AS due_us,
        count(*) FILTER (kind = 'attempted') AS attempts,
        count(*) FILTER (kind = 'attempted' AND error_class IS NULL) AS successes,
        min(us) FILTER (kind = 'enqueued') AS enqueued_us, max(us) AS last_us
    FROM events WHERE delivery_id IS NOT NULL GROUP BY ALL
)
SELECT due.*, CASE coalesce(ended.kind, last_kind)
    WHEN 'delivered' THEN 'delivered' WHEN 'pull_acked' THEN 'acked' WHEN 'handed_over' THEN 'handed_over'
    WHEN 'purged' THEN 'purged' WHEN 'sidelined' THEN 'sidelined' WHEN 'expired' THEN 'expired'
    WHEN 'cancelled' THEN 'cancelled' WHEN 'dropped' THEN 'dropped'
    WHEN 'held' THEN CASE WHEN end_us - last_us > 24 * 3600000000 THEN 'stuck'
        WHEN end_us - last_us > 6 * 3600000000 AND end_us - coalesce(serviced_us, 0) > 6 * 3600000000 THEN 'stuck' ELSE 'held' END
    WHEN 'leased' THEN CASE WHEN end_us - last_us > 13 * 3600000000 THEN 'stuck' ELSE 'in_flight' END
    WHEN 'attempted' THEN CASE WHEN end_us - last_us > 3600000000 THEN 'stuck' ELSE 'in_flight' END
    ELSE CASE WHEN due_us + 3600000000 < served_ms * 1000 THEN 'lost'
        WHEN end_us - coalesce(due_us, last_us) > 24 * 3600000000 THEN 'stuck'
        WHEN end_us - coalesce(due_us, last_us) > 6 * 3600000000 AND end_us - coalesce(serviced_us, 0) > 6 * 3600000000
        THEN 'stuck' ELSE 'waiting' END END AS outcome
FROM due JOIN ranked USING (delivery_id) LEFT JOIN ended USING (delivery_id) LEFT JOIN served USING (subscription_id)
    LEFT JOIN serviced USING (subscription_id), ending
"""
JOURNEYS = "SELECT delivery_id, outcome, attempts, successes, enqueued_us FROM stands"
MISSING = """
WITH without_start AS (
    SELECT message_id, count(*) AS found FROM (
        SELECT message_id, delivery_id FROM events WHERE delivery_id IS NOT NULL
        GROUP BY ALL HAVING count(*) FILTER (kind IN ('enqueued', 'replayed')) = 0
    ) GROUP BY ALL
)
SELECT message_id, max(fanout) - count(DISTINCT delivery_id) FILTER (kind = 'enqueued') - coalesce(any_value(found), 0) AS missing
FROM events LEFT JOIN without_start USING (message_id)
WHERE kind IN ('published', 'enqueued') GROUP BY ALL HAVING missing > 0
"""
HOURLY = """
SELECT date_trunc('hour', ts) AS hour, room_id, subscription_id, event_type, target_host,
    count(*) FILTER (kind = 'attempted') AS attempts,
    count(*) FILTER (kind = 'attempted' AND error_class IS NOT NULL) AS failures,
    count(*) FILTER (kind = 'delivered') AS delivered,
    quantile_cont(round(latency_ms::DOUBLE * 1000) / 1000, 0.95) FILTER (kind = 'attempted') AS latency_p95_ms,
    quantile_cont(greatest((us - born_ms * 1000) / 1000, 0), 0.5) FILTER (kind IN ('delivered', 'pull_acked'))
        AS end_to_end_p50_ms
FROM events GROUP BY ALL
"""
PAIRS = """
WITH minutes AS (
    SELECT subscription_id, us // 60000000 AS minute, count(*) AS n, count(error_class) AS f FROM events
    WHERE kind = 'attempted' GROUP BY ALL
), bad AS (SELECT subscription_id, minute FROM minutes WHERE f >= 2 AND f >= 0.5 * n),
counted AS (SELECT subscription_id, count(*) AS c FROM bad GROUP BY ALL HAVING c >= 3),
span AS (SELECT max(minute) - min(minute) + 1 AS t FROM minutes)
SELECT a.subscription_id AS first_id, b.subscription_id AS second_id, count(*) AS bad_both,
    count(*) / (any_value(ca.c) + any_value(cb.c) - count(*)) AS jaccard,
    (count(*) * any_value(t) - any_value(ca.c) * any_value(cb.c)) / sqrt(any_value(ca.c)::DOUBLE * any_value(cb.c)
        * (any_value(t) - any_value(ca.c)) * (any_value(t) - any_value(cb.c))) AS phi
FROM bad a JOIN bad b ON a.minute = b.minute AND a.subscription_id < b.subscription_id
    JOIN counted ca ON ca.subscription_id = a.subscription_id JOIN counted cb ON cb.subscription_id = b.subscription_id, span
GROUP BY ALL HAVING bad_both >= 2
"""


class Oracle:
    """Runs queries over segments."""

    def __init__(self, segments: Path) -> None:
        self._connection = duckdb.connect()
        self._connection.execute("SET TimeZone = 'UTC'")
        self._connection.execute(_EVENTS.format(segments=segments))
        self._connection.execute(_STANDS)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a query."""
        cursor = self._connection.execute(query)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def count(self, query: str) -> int:
        """Return the number of rows of a query."""
        return int(self._connection.execute(f"SELECT count(*) FROM ({query})").fetchall()[0][0])

    def close(self) -> None:
        """Release the memory."""
        self._connection.close()
