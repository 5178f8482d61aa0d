"""Move the work rows that the former broker mode left when an installation changes its broker.

They have locations that no process of the new mode reads: rows for workers that now take only
copies, rows for a relay that is gone, or rows of copies that are not read any more. They move under
a new generation, so that a copy that the former broker may have is stale if that broker is ever
used again.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rooms.db.pg_arrays import number_array
from rooms.db.statement_parts import JOIN_MESSAGE, session_lives
from rooms.db.writer import LIVENESS_LOCK, LogWriter
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.state_machine import LogKind, State
from rooms.domain.work_location import SCHEDULED, TO_RELAY, WorkLocation

START: Final = (RoomId(-(1 << 31)), "00000000-0000-0000-0000-000000000000")
"""A position before every row."""
EMBEDDED_LOCATIONS: Final = frozenset({WorkLocation.PUSH_LOCAL, WorkLocation.PULL_LOCAL})

# Spans rooms: a page of the key, whatever the locations, so that no statement reads a million rows
# of this mode. Rows that a living process has claimed are left. What is due beyond the lookahead of
# this mode is scheduled.
_MIGRATE: Final = f"""
WITH page AS MATERIALIZED (
    SELECT o.room_id, o.id, o.kind FROM outbox o WHERE (o.room_id, o.id) > (%(room)s::int4, %(id)s::uuid)
    ORDER BY o.room_id, o.id LIMIT %(limit)s::int4
), c AS MATERIALIZED (
    SELECT * FROM page WHERE kind = ANY (%(kinds)s::int2[])
), free AS MATERIALIZED (
    SELECT o.*, (CASE o.kind & 1 WHEN 1 THEN %(pull)s::int2 ELSE %(push)s::int2 END) + CASE WHEN o.beyond THEN {SCHEDULED[0] - TO_RELAY[0]:d}
        ELSE 0 END AS place, CASE WHEN o.beyond THEN '{State.SCHEDULED}' ELSE '{State.QUEUED}' END::delivery_state AS state
    FROM c CROSS JOIN LATERAL (
        SELECT o.room_id, o.id, o.kind, o.generation, o.attempt,
            extract(epoch FROM o.due_at - now()) * 1000 > %(lookahead)s::int8 AS beyond
        FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND o.kind + 0 = c.kind
            AND (o.claimed_until < now() OR NOT {session_lives("o.worker")})
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) o
), d AS (
    UPDATE deliveries t SET state = f.state, generation = t.generation + 1, updated_at = now()
    FROM free f WHERE t.room_id = f.room_id AND t.id = f.id AND t.generation = f.generation AND t.attempt = f.attempt
        AND t.state IN ('{State.QUEUED}', '{State.SCHEDULED}')
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt, f.place
), o AS (
    UPDATE outbox o SET kind = d.place, generation = d.generation, claimed_until = '-infinity', worker = NULL
    FROM d WHERE o.room_id = ANY (ARRAY[d.room_id]) AND o.id = d.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, worker_host, correlation_id, event_type, event_version, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.RESTORED}', d.subscription_id,
        d.id, d.generation, d.attempt, %(host)s::text, m.correlation_id, m.event_type, m.event_version, 'another_broker'
    FROM d {JOIN_MESSAGE} RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d), (SELECT count(*) FROM c) - (SELECT count(*) FROM d),
    last.room_id, last.id::text, (SELECT count(*) FROM page) < %(limit)s::int4,
    (SELECT string_agg(DISTINCT subscription_id::text, ',') FROM d WHERE place & 1 = 1)
FROM (SELECT 1) one LEFT JOIN (SELECT room_id, id FROM page ORDER BY room_id DESC, id DESC LIMIT 1) last ON true
"""  # noqa: S608 - constants of this package

# The check costs nothing if there is nothing: each location has an index of its own, except for
# sent rows. While another broker is in use, a mark says so; a day after it was last set, no process
# of that mode is alive.
_ANY_EMBEDDED: Final = """
SELECT 0, EXISTS (SELECT FROM outbox WHERE kind = 0) OR EXISTS (SELECT FROM outbox WHERE kind = 1)
"""
_ANY_RELAYED: Final = """
SELECT 0, EXISTS (SELECT FROM outbox WHERE kind IN (2, 3)) OR EXISTS (SELECT FROM outbox WHERE kind IN (3, 5))
    OR EXISTS (SELECT FROM outbox WHERE kind IN (6, 7)) OR EXISTS (SELECT FROM upkeep_marks WHERE name = 'relayed')
"""
_SET_MARK: Final = """
WITH m AS (
    INSERT INTO upkeep_marks AS m (name, at) VALUES ('relayed', now()) ON CONFLICT (name) DO UPDATE SET at = excluded.at
) SELECT 0
"""
_CLEAR_MARK: Final = """
WITH m AS (DELETE FROM upkeep_marks WHERE name = 'relayed' AND at < now() - interval '1 day') SELECT 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPage:
    """Hold one page of the outbox: the last row (None: there was none), and whether it is the end.

    `migrated` rows moved, `claimed` rows are claimed, and `pull_subscriptions` got some of those
    that moved.
    """

    migrated: int
    claimed: int
    pull_subscriptions: Sequence[SubscriptionId]
    last: tuple[RoomId, str] | None
    end: bool


async def migrate_page(
    writer: LogWriter, after: tuple[RoomId, str], *, limit: int
) -> MigrationPage:
    """Move rows out of the locations of other broker modes, of the `limit` rows after one.

    Errors: those of `LogWriter.run`.
    """
    wanted = (
        frozenset(WorkLocation) - EMBEDDED_LOCATIONS
        if writer.broker_mode.is_relayed
        else EMBEDDED_LOCATIONS
    )
    parameters = {
        "room": after[0],
        "id": after[1],
        "limit": limit,
        "kinds": number_array(sorted(set(WorkLocation) - wanted)),
        "life": LIVENESS_LOCK,
        "host": writer.host,
    }
    ((moved, left, room, identity, end, pulls),) = await writer.run(_MIGRATE, parameters)
    return MigrationPage(
        migrated=moved,
        claimed=left,
        pull_subscriptions=[SubscriptionId(name) for name in (pulls or "").split(",") if name],
        last=None if room is None else (RoomId(room), identity),
        end=end,
    )


async def may_need_migration(writer: LogWriter) -> bool:
    """Return whether rows may be in locations of another broker mode.

    Errors: those of `LogWriter.run`.
    """
    if writer.broker_mode.is_relayed:
        await writer.run(_SET_MARK, {})
    return bool(
        (await writer.run(_ANY_EMBEDDED if writer.broker_mode.is_relayed else _ANY_RELAYED, {}))[0][
            0
        ]
    )


async def clear_migration_mark(writer: LogWriter) -> None:
    """Record that a full walk has found nothing. Errors: those of `LogWriter.run`."""
    await writer.run(_CLEAR_MARK, {})
