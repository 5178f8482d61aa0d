"""Count usage: add the log's rows to hours, each of them exactly once.

A writer's transaction that began early may commit late, so neither time nor any number says which
rows are new. As for the export of the log, transactions do: all of them below `pg_snapshot_xmin`
are over, and their rows never change. One statement adds the rows of the transactions
[counted_xid, end) to their hours and moves the mark to `end`. It does both or neither, whatever
dies, and two processes cannot both move the mark. A row that comes late is added to the hour of its
time, however long ago that is.

An hour is **complete** once no transaction is open that began before its end: its rows would have
an earlier time. The oldest begin is read first, then the next transaction's id; when the mark has
reached this id, everything before that begin is counted.

Publisher and subscriber, and their applications, are looked up while the rows are counted, which is
seconds after they were written. What deletes rooms, subscriptions or old days therefore counts
first.

A caller may name any application, so their number is bounded: an hour has `MAX_APPLICATIONS` of an
organisation, and what others do is counted as `OTHER_APPLICATIONS`. Whether one is new is looked up
by the index of organisations; only then are those of the hour counted.

What a subscriber in another organisation's room may not know of is counted apart, too: its filter
was evaluated when the message was published, so a count of deliveries would show what it matched.

The same statement adds what is recent to the counts by minute (`minutes`).
"""

# ruff: noqa: E501 - SQL statements keep their lines

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.connection import transaction
from rooms.db.usage.minutes import BUCKET, IS_SERVED, MINUTE, activity_ctes
from rooms.domain.ids import first_id
from rooms.domain.usage import COUNTERS, HIDDEN_COLUMNS, MAX_APPLICATIONS, OTHER_APPLICATIONS

MAX_TRANSACTIONS: Final = 2000
"""Transactions that one statement counts: at most a second's work of a busy installation."""
DELETE_BATCH: Final = 5000
_DELETED_ORGANISATION: Final = first_id(0)
"""Stands for an organisation that was deleted before its last rows were counted."""
_XID: Final = "(xid::text::bigint)"
_COLUMNS: Final = (*COUNTERS, *HIDDEN_COLUMNS.values())
_SUMS: Final = ", ".join(f"sum({name})::int8 AS {name}" for name in _COLUMNS)
_ADDED: Final = ", ".join(f"{name} = u.{name} + excluded.{name}" for name in _COLUMNS)
_NAMES: Final = ", ".join(_COLUMNS)
_MARK: Final = text("""
SELECT m.system, (SELECT system_identifier::text FROM pg_control_system()) AS here, m.counted_xid,
    pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS settled_xid
FROM usage_mark m
""")
# A transaction reports its begin a moment after it took its time from the clock.
_OLDEST_BEGIN: Final = text("""
SELECT least(clock_timestamp(), min(xact_start)) - interval '1 second' FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
""")
_NEXT_XID: Final = text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
_HAS_ROWS: Final = text(f"""
SELECT EXISTS (SELECT FROM log_entries WHERE {_XID} >= :first AND {_XID} < :end)
""")  # noqa: S608 - constants of this package
# The index of transactions finds the rows. Every other plan would read whole days. The planner
# takes them for few, and would sort them where hashing is meant.
_PLAN_SETTINGS: Final = text("""
SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true),
    set_config('max_parallel_workers_per_gather', '0', true), set_config('synchronous_commit', 'off', true),
    set_config('work_mem', '32MB', true), set_config('enable_sort', 'off', true)
""")
_MOVE: Final = (
    "UPDATE usage_mark SET counted_xid = :end WHERE counted_xid = :first AND system = :system"
    " RETURNING since"
)
_OF_RANGE: Final = f"{_XID} >= :first AND {_XID} < :end AND l.ts >= (SELECT since FROM moved)"  # noqa: S608 - constants of this package
# In a database that was restored into another server, ids of transactions begin anew.
_ADOPT: Final = (
    "UPDATE usage_mark SET counted_xid = :end, system = :system, since = :until, next_xid = NULL,"
    " next_until = NULL WHERE counted_xid = :first AND system IS DISTINCT FROM :system RETURNING complete_until"
)
_OF_BOTH: Final = (
    f"EXISTS (SELECT FROM moved) AND ({_XID} >= :first"  # noqa: S608 - constants of this package
    f" OR {_XID} < :end AND l.ts >= (SELECT complete_until FROM moved))"
)


# Most installations have no message with either, and then none is looked up. Partial indexes show
# that.
_ANY_NAMED: Final = (
    "SELECT EXISTS (SELECT FROM messages WHERE publisher_organisation_id IS NOT NULL)"
    " OR EXISTS (SELECT FROM messages WHERE application IS NOT NULL)"
)
# "publisher:application", each empty where there is none.
_NAME: Final = """CASE WHEN kind = 'published' THEN (
            SELECT concat(publisher_organisation_id, ':', application) FROM messages m WHERE m.room_id = l.room_id AND m.id = l.message_id LIMIT 1
        ) END"""
# `enqueued` has 36 bytes for each delivery, of which the first 16 are the subscription. Publishes
# to the same subscriptions are one group, which is taken apart once.
_RECIPIENTS: Final = """CASE WHEN octet_length(enqueued) = 36 THEN substr(enqueued, 1, 16) WHEN enqueued IS NOT NULL THEN (
            SELECT string_agg(substr(l.enqueued, 36 * i - 35, 16), '') FROM generate_series(1, octet_length(l.enqueued) / 36) i
        ) END"""


# What was not due when it was published or replayed, and what ended without an attempt, which may
# have been before it was due: a subscriber in another organisation's room may not know of it.
_IS_UNSEEN: Final = """CASE WHEN kind IN ('cancelled', 'expired') THEN coalesce(attempt, 0) = 0
            ELSE coalesce(delay_ms, 0) > 0 AND (enqueued IS NOT NULL OR kind = 'replayed') END"""
_IS_GUEST: Final = "u.organisation_id <> r.organisation_id"


def _count(condition: str) -> str:
    return f"coalesce(sum(n) FILTER (WHERE {condition}), 0)::int8"


def _count_statement(moved: str, rows: str, *, named: bool) -> str:
    return f"""
WITH moved AS (
    {moved}
), groups AS MATERIALIZED (
    SELECT {MINUTE} AS minute, room_id, coalesce(event_type, '') AS event_type, subscription_id, kind, http_status IS NOT NULL AS answered,
        error_class IS NOT NULL AS failed, CASE WHEN kind IN ('attempted', 'delivered') THEN {BUCKET} END AS bucket,
        {_NAME if named else "NULL::text"} AS name, {_RECIPIENTS} AS recipients, {_IS_UNSEEN} AS unseen, count(*) AS n, sum(payload_bytes) AS bytes
    FROM log_entries l WHERE {rows} GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
), published AS (
    SELECT date_trunc('hour', minute, 'UTC') AS hour, room_id, nullif(split_part(name, ':', 1), '')::uuid AS publisher_organisation_id, event_type,
        substr(name, strpos(name, ':') + 1) AS application, sum(n)::int8 AS messages, sum(bytes) AS bytes
    FROM groups WHERE kind = 'published' GROUP BY 1, 2, 3, 4, 5
), enqueued AS (
    SELECT minute, room_id, event_type, substr(recipients, 16 * i - 15, 16) AS subscription, sum(n)::int8 AS n,
        coalesce(sum(n) FILTER (WHERE unseen), 0)::int8 AS unseen
    FROM (SELECT minute, room_id, event_type, recipients, n, unseen, generate_series(1, octet_length(recipients) / 16) AS i FROM groups) e GROUP BY 1, 2, 3, 4
), steps AS (
    SELECT minute, room_id, event_type, subscription_id,
        {_count("kind IN ('enqueued', 'replayed')")} AS deliveries,
        {_count("kind = 'attempted' OR kind = 'delivered' AND answered")} AS attempts,
        {_count("kind = 'attempted' AND failed")} AS failed_attempts,
        {_count("kind IN ('delivered', 'pull_acked', 'handed_over')")} AS delivered,
        {_count("kind = 'sidelined'")} AS sidelined, {_count("kind = 'expired'")} AS expired,
        {_count("kind = 'cancelled'")} AS cancelled, {_count("kind = 'dropped'")} AS dropped,
        {_count("kind = 'purged'")} AS purged, {_count("kind IN ('nacked', 'lease_ended')")} AS returned,
        {_count("kind = 'replayed' AND unseen")} AS unseen_deliveries, {_count("kind = 'expired' AND unseen")} AS unseen_expired, {_count("kind = 'cancelled' AND unseen")} AS unseen_cancelled
    FROM groups WHERE kind <> 'published' GROUP BY 1, 2, 3, 4
    UNION ALL
    SELECT minute, room_id, event_type, encode(subscription, 'hex')::uuid, n, 0, 0, 0, 0, 0, 0, 0, 0, 0, unseen, 0, 0 FROM enqueued
), parts AS (
    SELECT p.hour, p.room_id, coalesce(r.organisation_id, '{_DELETED_ORGANISATION}') AS owner_id,
        coalesce(p.publisher_organisation_id, r.organisation_id, '{_DELETED_ORGANISATION}') AS organisation_id, p.event_type,
        coalesce(p.application, '') AS application, p.messages, coalesce(p.bytes, 0) AS bytes, 0 AS deliveries, 0 AS attempts, 0 AS failed_attempts, 0 AS delivered,
        0 AS sidelined, 0 AS expired, 0 AS cancelled, 0 AS dropped, 0 AS purged, 0 AS kept_deliveries, 0 AS kept_expired, 0 AS kept_cancelled
    FROM published p LEFT JOIN rooms r ON r.id = p.room_id
    UNION ALL
    SELECT date_trunc('hour', s.minute, 'UTC'), s.room_id, coalesce(r.organisation_id, '{_DELETED_ORGANISATION}'), coalesce(u.organisation_id, '{_DELETED_ORGANISATION}'), s.event_type,
        coalesce(u.application, ''), 0, 0, s.deliveries, s.attempts, s.failed_attempts, s.delivered, s.sidelined, s.expired, s.cancelled, s.dropped, s.purged,
        CASE WHEN {_IS_GUEST} THEN CASE WHEN {IS_SERVED} THEN s.unseen_deliveries ELSE s.deliveries END ELSE 0 END,
        CASE WHEN {_IS_GUEST} AND NOT {IS_SERVED} THEN s.unseen_expired ELSE 0 END, CASE WHEN {_IS_GUEST} THEN s.unseen_cancelled ELSE 0 END
    FROM steps s LEFT JOIN rooms r ON r.id = s.room_id
        LEFT JOIN subscriptions u ON u.room_id = s.room_id AND u.id = s.subscription_id
), counted AS MATERIALIZED (
    SELECT * FROM parts WHERE {" + ".join(COUNTERS)} > 0
), new_ones AS MATERIALIZED (
    SELECT n.*, row_number() OVER (PARTITION BY organisation_id, hour ORDER BY application) AS place
    FROM (SELECT DISTINCT organisation_id, hour, application FROM counted WHERE application <> '') n
    WHERE NOT EXISTS (SELECT FROM usage_hours k WHERE k.organisation_id = n.organisation_id AND k.hour = n.hour AND k.application = n.application)
), known AS MATERIALIZED (
    SELECT g.organisation_id, g.hour, (
        SELECT count(DISTINCT k.application) FROM usage_hours k
        WHERE k.organisation_id = g.organisation_id AND k.hour = g.hour AND k.application NOT IN ('', '{OTHER_APPLICATIONS}')
    ) AS applications FROM (SELECT DISTINCT organisation_id, hour FROM new_ones) g
), beyond AS (
    SELECT n.organisation_id, n.hour, n.application FROM new_ones n JOIN known k USING (organisation_id, hour)
    WHERE n.place + k.applications > {MAX_APPLICATIONS}
), sums AS (
    SELECT hour, room_id, owner_id, organisation_id, event_type,
        CASE WHEN b.application IS NULL THEN c.application ELSE '{OTHER_APPLICATIONS}' END AS application, {_SUMS}
    FROM counted c LEFT JOIN beyond b USING (organisation_id, hour, application) GROUP BY 1, 2, 3, 4, 5, 6
), added AS (
    INSERT INTO usage_hours AS u (hour, room_id, owner_id, organisation_id, event_type, application, {_NAMES})
    SELECT hour, room_id, owner_id, organisation_id, event_type, application, {_NAMES} FROM sums
    ON CONFLICT (room_id, hour, owner_id, organisation_id, event_type, application) DO UPDATE SET {_ADDED}
), {activity_ctes("steps", "groups")}
SELECT EXISTS (SELECT FROM moved)
"""  # noqa: S608 - constants of this package


_COUNT: Final = text(_count_statement(_MOVE, _OF_RANGE, named=False))
_COUNT_NAMED: Final = text(_count_statement(_MOVE, _OF_RANGE, named=True))
_COUNT_OTHER_SYSTEM: Final = text(_count_statement(_ADOPT, _OF_BOTH, named=True))
_COMPLETE: Final = text("""
UPDATE usage_mark SET
    complete_until = greatest(complete_until, CASE WHEN counted_xid >= :xid THEN CAST(:until AS timestamptz)
        WHEN counted_xid >= next_xid THEN next_until END),
    next_until = CASE WHEN counted_xid >= :xid THEN NULL
        WHEN next_xid IS NULL OR counted_xid >= next_xid THEN CAST(:until AS timestamptz) ELSE next_until END,
    next_xid = CASE WHEN counted_xid >= :xid THEN NULL
        WHEN next_xid IS NULL OR counted_xid >= next_xid THEN CAST(:xid AS bigint) ELSE next_xid END
""")
_COMPLETE_UNTIL: Final = text("SELECT nullif(complete_until, '-infinity') FROM usage_mark")
_DELETE_OLD: Final = text("""
WITH gone AS (
    DELETE FROM usage_hours WHERE ctid = ANY (ARRAY(SELECT ctid FROM usage_hours WHERE hour < :before LIMIT :limit)) RETURNING 1
) SELECT count(*) FROM gone
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """Hold what was open at one time.

    `until`: no transaction that is open began before it; `next_xid`: the id that the next one gets;
    `settled_xid`: all before it are over.
    """

    until: datetime
    next_xid: int
    settled_xid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    system: str | None
    here: str
    counted_xid: int


async def read_horizon(engine: AsyncEngine) -> Horizon:
    """Return what is open now. StorageUnavailableError, StorageRefusedError.

    The begin is read in a statement of its own: the snapshot of the next one is later.
    """
    async with transaction(engine) as connection:
        until = await connection.scalar(_OLDEST_BEGIN)
    async with transaction(engine) as connection:
        next_xid = await connection.scalar(_NEXT_XID)
        row = (await connection.execute(_MARK)).one()
    return Horizon(until=until, next_xid=next_xid, settled_xid=row.settled_xid)


async def count_next(
    engine: AsyncEngine, horizon: Horizon, *, max_transactions: int = MAX_TRANSACTIONS
) -> bool:
    """Count the next transactions; return whether more are left below the settled one.

    StorageUnavailableError: in doubt. StorageRefusedError: nothing happened.
    """
    async with transaction(engine) as connection:
        await connection.execute(_PLAN_SETTINGS)
        row = (await connection.execute(_MARK)).one()
        mark = _Mark(system=row.system, here=row.here, counted_xid=row.counted_xid)
        if mark.system != mark.here:
            await _adopt(connection, mark, horizon)
            return True
        if mark.counted_xid >= horizon.settled_xid:
            return False
        end = await _find_end(connection, mark.counted_xid, horizon.settled_xid, max_transactions)
        values = {"first": mark.counted_xid, "end": end, "system": mark.here}
        # The messages of what is counted are committed, so this snapshot has them.
        named = await connection.scalar(text(_ANY_NAMED))
        counted = await connection.scalar(_COUNT_NAMED if named else _COUNT, values)
        # Another process may have moved the mark meanwhile, and less far.
        return not counted or end < horizon.settled_xid


async def _adopt(connection: AsyncConnection, mark: _Mark, horizon: Horizon) -> None:
    """Begin in a database that is new, or that was restored into another server.

    Then what the old server had not counted, and what the new one has written, are counted at once:
    rows that were counted have an old transaction and an old time.
    """
    values: dict[str, Any] = {"first": mark.counted_xid, "system": mark.here}
    if mark.system is None:
        await connection.execute(
            text("UPDATE usage_mark SET system = :system WHERE system IS NULL"),
            {"system": mark.here},
        )
        return
    values |= {"end": horizon.settled_xid, "until": horizon.until}
    await connection.execute(_COUNT_OTHER_SYSTEM, values)


async def _find_end(
    connection: AsyncConnection, first: int, settled: int, max_transactions: int
) -> int:
    """Return the end of a range that has rows of at most `max_transactions`.

    What is empty before them is skipped: most ids are of transactions that wrote no log.
    """
    empty, width = first, max_transactions
    while empty + width < settled and not await _has_rows(connection, empty, empty + width):
        empty, width = empty + width, 2 * width
    end = min(empty + width, settled)
    while end - empty > max_transactions:
        middle = (empty + end) // 2
        if await _has_rows(connection, empty, middle):
            end = middle
        else:
            empty = middle
    return end


async def _has_rows(connection: AsyncConnection, first: int, end: int) -> bool:
    return bool(await connection.scalar(_HAS_ROWS, {"first": first, "end": end}))


async def mark_complete(engine: AsyncEngine, horizon: Horizon) -> None:
    """Record up to which time everything is counted, as far as `horizon` shows it.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        values = {"until": horizon.until, "xid": horizon.next_xid}
        await connection.execute(_COMPLETE, values)


async def complete_until(connection: AsyncConnection) -> datetime | None:
    """Return the time up to which usage is complete; None: nothing was counted yet."""
    found: datetime | None = await connection.scalar(_COMPLETE_UNTIL)
    return found


async def delete_before(engine: AsyncEngine, before: datetime) -> int:
    """Delete the next rows of hours before `before`; return how many, at most `DELETE_BATCH`.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        values = {"before": before, "limit": DELETE_BATCH}
        return int(await connection.scalar(_DELETE_OLD, values) or 0)
