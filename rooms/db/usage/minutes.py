"""Count the last hour by the minute, for each subscription, organisation and the installation.

The rows are those that the count of usage reads anyway, so nothing that moves a message has a part
in it, and each row of the log is counted once. What is older than `KEPT_MINUTES` is deleted.

What a subscriber in another organisation's room may not know of is only counted for the
installation.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.connection import transaction
from rooms.domain.state_machine import SERVED_STATUSES
from rooms.domain.usage import BUCKETS, KEPT_MINUTES, MINUTE_COUNTERS, MINUTES, MinuteCounts

INSTALLATION: Final = "00000000-0000-0000-0000-000000000000"
"""The subject of the counts of all subscriptions."""
DELETE_BATCH: Final = 10_000
_RECENT: Final = f"minute >= date_trunc('minute', now(), 'UTC') - interval '{KEPT_MINUTES} minutes'"
_NAMES: Final = ", ".join(MINUTE_COUNTERS)
_ADDED: Final = ", ".join(f"{name} = a.{name} + excluded.{name}" for name in MINUTE_COUNTERS)
_SUMS: Final = ", ".join(f"sum({name})::int8" for name in MINUTE_COUNTERS)
MINUTE: Final = "date_bin('1 minute', ts, 'epoch')"
"""SQL for the minute of a row of the log; `date_trunc` in a time zone costs four times as much."""
BUCKET: Final = f"CASE WHEN latency_ms <= 1 THEN 0 WHEN latency_ms > 1 THEN least(ceil(2 * ln(latency_ms::float8) / ln(2::float8)), {BUCKETS - 1}) END::int4"
"""SQL for the bucket of a row's latency; NULL where it has none."""
IS_SERVED: Final = f"u.status IN ({', '.join(map(repr, sorted(map(str, SERVED_STATUSES))))})"
"""SQL for whether the subscription `u` gets what is published for it."""
_IS_GUEST: Final = (
    "u.organisation_id <> (SELECT r.organisation_id FROM rooms r WHERE r.id = u.room_id)"
)
_HISTOGRAM: Final = ", ".join(
    f"coalesce(sum(calls) FILTER (WHERE bucket = {bucket}), 0)::int4" for bucket in range(BUCKETS)
)


# Counts and calls are one list, and each subscription is looked up by its key. The planner takes a
# CTE for small, so a join of two of them would compare every row with every other one.
def activity_ctes(steps: str, groups: str) -> str:
    """Return CTEs that add the counts of steps and calls to their minutes.

    `steps`: counts by minute, room and subscription. `groups`: numbers `n` of rows of the log, by
    minute, room, subscription and bucket, among others. They follow other CTEs, without a comma
    before and after them.
    """
    return f"""facts AS (
    SELECT minute, room_id, subscription_id, sum(deliveries) AS deliveries, sum(delivered) AS delivered,
        sum(failed_attempts + returned) AS failed, sum(sidelined) AS sidelined, sum(expired) AS expired,
        sum(unseen_deliveries) AS unseen_deliveries, sum(unseen_expired) AS unseen_expired, NULL::int4 AS bucket, 0 AS calls
    FROM {steps} WHERE {_RECENT} AND subscription_id IS NOT NULL GROUP BY 1, 2, 3
    UNION ALL
    SELECT minute, room_id, subscription_id, 0, 0, 0, 0, 0, 0, 0, bucket, sum(n)::int8 FROM {groups}
    WHERE {_RECENT} AND subscription_id IS NOT NULL AND bucket IS NOT NULL GROUP BY 1, 2, 3, 11
), of_subjects AS (
    SELECT x.subject, f.minute, f.delivered, f.failed, f.sidelined, f.bucket, f.calls,
        f.deliveries - CASE WHEN x.hides THEN CASE WHEN u.served THEN f.unseen_deliveries ELSE f.deliveries END ELSE 0 END AS deliveries,
        f.expired - CASE WHEN x.hides AND NOT u.served THEN f.unseen_expired ELSE 0 END AS expired
    FROM facts f
        JOIN LATERAL (
            SELECT u.organisation_id, {IS_SERVED} AS served, coalesce({_IS_GUEST}, false) AS guest
            FROM subscriptions u WHERE u.room_id = f.room_id AND u.id = f.subscription_id LIMIT 1
        ) u ON true
        CROSS JOIN LATERAL (VALUES (f.subscription_id, u.guest), (u.organisation_id, u.guest), ('{INSTALLATION}'::uuid, false)) x (subject, hides)
), activity AS (
    INSERT INTO activity_minutes AS a (subject, minute, {_NAMES}, latencies)
    SELECT subject, minute, {_SUMS}, CASE WHEN sum(calls) = 0 THEN '{{}}' ELSE ARRAY[{_HISTOGRAM}] END
    FROM of_subjects GROUP BY 1, 2 HAVING {" + ".join(f"sum({name})" for name in MINUTE_COUNTERS)} + sum(calls) > 0
    ON CONFLICT (subject, minute) DO UPDATE SET {_ADDED}, latencies = CASE
        WHEN excluded.latencies = '{{}}' THEN a.latencies WHEN a.latencies = '{{}}' THEN excluded.latencies
        ELSE (SELECT array_agg(x.counted + x.more ORDER BY x.bucket)
            FROM unnest(a.latencies, excluded.latencies) WITH ORDINALITY x (counted, more, bucket)) END
)"""  # noqa: S608 - constants of this package


READ: Final = f"""
SELECT a.minute, {", ".join(f"a.{name}" for name in MINUTE_COUNTERS)}, a.latencies FROM activity_minutes a
WHERE subject = CAST(:subject AS uuid) AND minute >= CAST(:since AS timestamptz) AND minute < CAST(:until AS timestamptz) ORDER BY minute
"""  # noqa: S608 - constants of this package
_THIS_MINUTE: Final = text("SELECT date_trunc('minute', now(), 'UTC')")
_DELETE_OLD: Final = text(f"""
WITH gone AS (
    DELETE FROM activity_minutes WHERE ctid = ANY (ARRAY(SELECT ctid FROM activity_minutes WHERE NOT ({_RECENT}) LIMIT :limit)) RETURNING 1
) SELECT count(*) FROM gone
""")  # noqa: S608 - constants of this package


async def read_minutes(connection: AsyncConnection, subject: str) -> Sequence[MinuteCounts]:
    """Return the last `MINUTES` of a subscription, an organisation or `INSTALLATION`.

    Oldest first, those without counts included; the last one is the current minute.
    """
    this_minute: datetime = (await connection.execute(_THIS_MINUTE)).scalar_one().astimezone(UTC)
    until = this_minute + timedelta(minutes=1)
    since = until - timedelta(minutes=MINUTES)
    values = {"subject": subject, "since": since, "until": until}
    found = {
        row["minute"].astimezone(UTC): row
        for row in (await connection.execute(text(READ), values)).mappings()
    }
    return [
        MinuteCounts(
            start=start,
            counts={name: 0 if row is None else row[name] for name in MINUTE_COUNTERS},
            latencies=() if row is None else row["latencies"],
        )
        for start in (since + timedelta(minutes=number) for number in range(MINUTES))
        for row in (found.get(start),)
    ]


async def delete_old_minutes(engine: AsyncEngine) -> int:
    """Delete the next minutes that are too old; return how many, at most `DELETE_BATCH`.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        return int(await connection.scalar(_DELETE_OLD, {"limit": DELETE_BATCH}) or 0)
