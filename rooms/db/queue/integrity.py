"""Check that work rows match the states of their deliveries, and repair them.

Every unfinished delivery has one row in outbox, held or leases, every other delivery has none. Each
transition changes state and work row in one statement, so that every snapshot sees them agree. If
they do not, rows were changed by hand, a backup was restored in part, or there is a bug; then the
state of the delivery decides.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rooms.db.operational.outbox import sidelined_ctes
from rooms.db.pg_arrays import number_array, word_array
from rooms.db.statement_parts import REPLACE_SIDELINED
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, RoomId
from rooms.domain.state_machine import LogKind, Reason, State
from rooms.domain.work_location import WorkLocation

BATCH: Final = 1000
START: Final = (RoomId(-(1 << 31)), "00000000-0000-0000-0000-000000000000")
"""A position before every row."""


class MismatchKind(StrEnum):
    """Say what is wrong with a delivery's work row."""

    MISSING = "missing"
    """It is unfinished or sidelined, and no process will ever find it."""
    OTHER_VERSION = "other_step"
    """Its work row has another generation or attempt: the process that takes it up finds it stale.
    """
    SURPLUS = "surplus"
    """It has a row besides the one of its state."""
    NO_MESSAGE = "no_message"
    """It waits to be sent, and its message is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Name a delivery whose work row does not match its state."""

    room_id: RoomId
    delivery_id: DeliveryId
    state: State
    generation: int
    attempt: int
    kind: MismatchKind


# `d` are deliveries. `place`: the table that the state requires; `…_right`: its row is at the
# version of the delivery. `empty`: it waits without a message. A worker that has a copy, or the
# broker, has the message with it.
_COMPARED: Final = f"""
    SELECT d.*, o.id IS NOT NULL AS in_outbox, h.id IS NOT NULL AS in_held, l.id IS NOT NULL AS in_leases,
        CASE WHEN d.state IN ('{State.QUEUED}', '{State.SCHEDULED}') THEN 'outbox' WHEN d.state = '{State.HELD}' THEN 'held'
            WHEN d.state = '{State.LEASED}' THEN 'leases' WHEN d.state = '{State.SIDELINED}' THEN 'sidelined' END AS place,
        o.generation = d.generation AND o.attempt = d.attempt AS outbox_right, l.generation = d.generation AS lease_right,
        s.generation = d.generation AS sidelined_right,
        (h.id IS NOT NULL OR o.claimed_until < now() AND o.kind <> {WorkLocation.PUSH_AT_BROKER:d}) AND NOT EXISTS (
            SELECT FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id OFFSET 0) AS empty
    FROM d LEFT JOIN LATERAL (
        SELECT o.id, o.generation, o.attempt, o.claimed_until, o.kind FROM outbox o WHERE o.room_id = d.room_id AND o.id = d.id LIMIT 1
    ) o ON true LEFT JOIN LATERAL (SELECT h.id FROM held h WHERE h.room_id = d.room_id AND h.id = d.id LIMIT 1) h ON true
    LEFT JOIN LATERAL (
        SELECT l.id, l.generation FROM leases l WHERE l.room_id = d.room_id AND l.id = d.id LIMIT 1
    ) l ON true LEFT JOIN LATERAL (
        SELECT s.generation FROM sidelined s WHERE s.room_id = d.room_id AND s.id = d.id LIMIT 1
    ) s ON true
"""  # noqa: S608 - constants of this package
_MISMATCH_KIND: Final = f"""
    CASE WHEN place = 'outbox' AND NOT in_outbox OR place = 'held' AND NOT in_held OR place = 'leases' AND NOT in_leases
            OR place = 'sidelined' AND sidelined_right IS NOT TRUE THEN '{MismatchKind.MISSING}'
        WHEN place = 'outbox' AND NOT outbox_right OR place = 'leases' AND NOT lease_right THEN '{MismatchKind.OTHER_VERSION}'
        WHEN in_outbox AND place IS DISTINCT FROM 'outbox' OR in_held AND place IS DISTINCT FROM 'held'
            OR in_leases AND place IS DISTINCT FROM 'leases' THEN '{MismatchKind.SURPLUS}'
        WHEN place IN ('outbox', 'held') AND empty THEN '{MismatchKind.NO_MESSAGE}' END
"""

# Spans rooms, by primary key: every delivery is checked.
_SCAN: Final = f"""
WITH d AS MATERIALIZED (
    SELECT room_id, id, message_id, state, generation, attempt FROM deliveries
    WHERE (room_id, id) > (%(room)s::int4, %(after)s::uuid) ORDER BY room_id, id LIMIT %(limit)s::int4
), j AS ({_COMPARED}), f AS (SELECT j.*, {_MISMATCH_KIND} AS fault FROM j)
SELECT 0, room_id, id::text, state::text, generation, attempt, fault FROM f WHERE fault IS NOT NULL
UNION ALL SELECT 0, room_id, id::text, NULL, count, NULL, NULL FROM (
    SELECT room_id, id, (SELECT count(*) FROM d) AS count FROM d ORDER BY room_id DESC, id DESC LIMIT 1
) last
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package

_FIND_ORPHAN_ROWS: Final = """
WITH w AS MATERIALIZED (
    SELECT room_id, id FROM {table} WHERE (room_id, id) > (%(room)s::int4, %(after)s::uuid)
    ORDER BY room_id, id LIMIT %(limit)s::int4
)
SELECT 0, w.room_id, w.id::text, EXISTS (
    SELECT FROM deliveries d WHERE d.room_id = w.room_id AND d.id = w.id OFFSET 0
) FROM w UNION ALL SELECT 0, NULL, NULL, NULL
"""

_SIDELINED_EVENTS: Final = sidelined_ctes(
    f"""SELECT room_id, id, message_id, subscription_id, '{Reason.ORPHAN}' AS reason FROM x
    WHERE becomes = '{State.SIDELINED}' AND state <> '{State.SIDELINED}'"""  # noqa: S608 - constants of this package
)
# Only rows that are as they were read and are not locked. A new generation makes every other copy
# stale.
_REPAIR: Final = f"""
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(state)s::delivery_state[], %(generation)s::int4[], %(attempt)s::int4[])
        AS v (room_id, id, state, generation, attempt)
), d AS MATERIALIZED (
    SELECT d.* FROM v CROSS JOIN LATERAL (
        SELECT d.room_id, d.id, d.message_id, d.subscription_id, d.state, d.generation, d.attempt, d.due_at, d.expires_at, d.reason
        FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id AND d.state = v.state
            AND d.generation = v.generation AND d.attempt = v.attempt LIMIT 1 FOR UPDATE SKIP LOCKED
    ) d
), j AS MATERIALIZED ({_COMPARED}), f AS MATERIALIZED (
    SELECT j.*, {_MISMATCH_KIND} AS fault, u.type, m.priority, m.event_type, m.event_version, m.correlation_id,
        CASE WHEN place IN ('outbox', 'held', 'leases') AND u.type IS NULL THEN '{State.CANCELLED}'
            WHEN place IN ('outbox', 'held') AND m.priority IS NULL THEN '{State.SIDELINED}'
            ELSE j.state::text END AS becomes
    FROM j LEFT JOIN LATERAL (
        SELECT * FROM subscriptions u WHERE u.room_id = j.room_id AND u.id = j.subscription_id AND u.status NOT IN ('deleted', 'rejected', 'terminated') LIMIT 1
    ) u ON true LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = j.room_id AND m.id = j.message_id LIMIT 1
    ) m ON true
), x AS MATERIALIZED (
    SELECT f.*, becomes = state::text AND place = 'outbox' AND fault IN ('{MismatchKind.MISSING}', '{MismatchKind.OTHER_VERSION}') AS again,
        becomes = state::text AND place = 'leases' AND fault IN ('{MismatchKind.MISSING}', '{MismatchKind.OTHER_VERSION}') AS ends
    FROM f WHERE fault IS NOT NULL
), moved AS (
    UPDATE deliveries t SET state = CASE WHEN x.again THEN '{State.QUEUED}' ELSE x.becomes END::delivery_state,
        generation = t.generation + x.again::int4, updated_at = now(),
        due_at = CASE WHEN x.again THEN coalesce(t.due_at, now()) WHEN x.becomes = x.state::text THEN t.due_at END,
        reason = CASE WHEN x.becomes = x.state::text THEN t.reason WHEN x.becomes = '{State.SIDELINED}' THEN '{Reason.ORPHAN}'
            ELSE '{Reason.SUBSCRIPTION_DELETED}' END
    FROM x WHERE t.room_id = x.room_id AND t.id = x.id AND (x.again OR x.becomes <> x.state::text)
), queue AS (
    INSERT INTO outbox AS o (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, CASE type WHEN 'PULL' THEN %(pull)s::int2 ELSE %(push)s::int2 END,
        priority, generation + 1, attempt, coalesce(due_at, now()), expires_at FROM x WHERE again
    ON CONFLICT (room_id, id) DO UPDATE SET kind = excluded.kind, generation = excluded.generation, attempt = excluded.attempt,
        due_at = excluded.due_at, claimed_until = '-infinity', worker = NULL
), hold AS (
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, 0, coalesce(reason, '{Reason.SATURATED}') FROM x
    WHERE place = 'held' AND becomes = state::text AND NOT in_held
), lease AS (
    INSERT INTO leases (room_id, id, subscription_id, generation, until)
    SELECT room_id, id, subscription_id, generation, now() FROM x WHERE ends
    ON CONFLICT (room_id, id) DO UPDATE SET generation = excluded.generation, until = excluded.until
), side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation,
        CASE WHEN state = '{State.SIDELINED}' THEN coalesce(reason, '{Reason.STUCK}') ELSE '{Reason.ORPHAN}' END FROM x
    WHERE becomes = '{State.SIDELINED}' AND sidelined_right IS NOT TRUE
    {REPLACE_SIDELINED}
){_SIDELINED_EVENTS}, no_outbox AS (
    DELETE FROM outbox o USING x WHERE o.room_id = ANY (ARRAY[x.room_id]) AND o.id = x.id
        AND (x.place IS DISTINCT FROM 'outbox' OR x.becomes <> x.state::text)
), no_held AS (
    DELETE FROM held h USING x WHERE h.room_id = ANY (ARRAY[x.room_id]) AND h.id = x.id
        AND (x.place IS DISTINCT FROM 'held' OR x.becomes <> x.state::text)
), no_lease AS (
    DELETE FROM leases l USING x WHERE l.room_id = ANY (ARRAY[x.room_id]) AND l.id = x.id
        AND (x.place IS DISTINCT FROM 'leases' OR x.becomes <> x.state::text)
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id,
        CASE WHEN again THEN '{LogKind.RESTORED}' ELSE becomes END, subscription_id, id, generation + again::int4, attempt,
        event_type, event_version, correlation_id, %(host)s::text, 'mended' FROM x WHERE again OR becomes <> state::text
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM x)
"""  # noqa: S608 - constants of this package

_DELETE_ORPHAN_ROWS: Final = """
WITH gone AS (
    DELETE FROM {table} t USING unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id)
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND NOT EXISTS (
        SELECT FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id OFFSET 0
    ) RETURNING 1
) SELECT 0, count(*) FROM gone
"""
WORK_TABLES: Final = ("outbox", "held", "leases")
_FIND_ORPHAN_ROWS_IN: Final = {
    table: _FIND_ORPHAN_ROWS.format(table=table) for table in WORK_TABLES
}
_DELETE_ORPHAN_ROWS_IN: Final = {
    table: _DELETE_ORPHAN_ROWS.format(table=table) for table in WORK_TABLES
}

RowPosition = tuple[RoomId, str]


class IntegrityCheck:
    """Check and repair through one writer.

    StorageUnavailableError: in doubt; StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def scan(
        self, after: RowPosition, *, limit: int = BATCH
    ) -> tuple[list[Mismatch], int, RowPosition | None]:
        """Return the mismatches among the next deliveries.

        Also return how many deliveries there were, and the last one (None: there were none).
        """
        rows = await self._writer.run(_SCAN, {"room": after[0], "after": after[1], "limit": limit})
        if not rows:
            return [], 0, None
        *found, (room, last, _, count, _, _) = rows
        return [_mismatch(row) for row in found], int(count), (RoomId(room), str(last))

    async def find_orphan_rows(
        self, table: str, after: RowPosition
    ) -> tuple[list[tuple[RoomId, DeliveryId]], RowPosition | None]:
        """Return the next rows of one of WORK_TABLES that have no delivery.

        Also return where to continue (None: at the end).
        """
        rows = await self._writer.run(
            _FIND_ORPHAN_ROWS_IN[table], {"room": after[0], "after": after[1], "limit": BATCH}
        )
        found = [
            (RoomId(room), DeliveryId(identity)) for room, identity, owned in rows if not owned
        ]
        return found, (rows[-1][0], rows[-1][1]) if rows else None

    async def repair(self, mismatches: Sequence[Mismatch]) -> int:
        """Repair these as far as they are as they were read; return how many.

        A delivery that cannot continue, because its subscription or its message is gone, is
        cancelled or sidelined as an orphan.
        """
        parameters = {
            "room": number_array(one.room_id for one in mismatches),
            "id": word_array(one.delivery_id for one in mismatches),
            "state": word_array(one.state for one in mismatches),
            "generation": number_array(one.generation for one in mismatches),
            "attempt": number_array(one.attempt for one in mismatches),
            "host": self._writer.host,
        }
        return int((await self._writer.run(_REPAIR, parameters))[0][0])

    async def delete_orphan_rows(
        self, table: str, rows: Sequence[tuple[RoomId, DeliveryId]]
    ) -> int:
        """Delete rows of one of WORK_TABLES that have no delivery; return how many."""
        parameters = {
            "room": number_array(room for room, _ in rows),
            "id": word_array(identity for _, identity in rows),
        }
        return int((await self._writer.run(_DELETE_ORPHAN_ROWS_IN[table], parameters))[0][0])


def _mismatch(row: tuple[Any, ...]) -> Mismatch:
    room, identity, state, generation, attempt, fault = row
    return Mismatch(
        room_id=RoomId(room),
        delivery_id=DeliveryId(identity),
        state=State(state),
        generation=generation,
        attempt=attempt,
        kind=MismatchKind(fault),
    )
