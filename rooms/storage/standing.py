"""Where deliveries stand: every unfinished one in exactly one of outbox, held and leases, every other one in none.

Each transition moves state and work row in one statement, so that one statement always sees them agree. Where they do
not, somebody wrote by hand, restored a part of a backup, or there is a bug; then the state of the delivery wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rooms.domain.ids import DeliveryId, RoomId
from rooms.domain.place import Place
from rooms.domain.states import LogKind, Reason, State
from rooms.storage.literals import numbers, plain
from rooms.storage.writer import Writer

BATCH: Final = 1000
START: Final = (RoomId(-(1 << 31)), "00000000-0000-0000-0000-000000000000")
"""Before every row."""


class Fault(StrEnum):
    """What is wrong with a delivery's work row."""

    MISSING = "missing"
    """Unfinished (or sidelined), and nobody will ever take it up."""
    OTHER_STEP = "other_step"
    """Its work row stands for another generation or attempt: whoever takes it up finds it stale."""
    SURPLUS = "surplus"
    """It has a row besides the one that its state means."""
    NO_MESSAGE = "no_message"
    """It waits for whoever sends it, and its message is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """A delivery that does not stand where its state says."""

    room_id: RoomId
    delivery_id: DeliveryId
    state: State
    generation: int
    attempt: int
    fault: Fault


# `d` are deliveries. `place`: where the state means them to stand; `right`: they do, at the step of the delivery. `empty`: they
# wait without a message. Who has a copy at hand, or the broker, has the message with it.
_JUDGED: Final = f"""
    SELECT d.*, o.id IS NOT NULL AS in_outbox, h.id IS NOT NULL AS in_held, l.id IS NOT NULL AS in_leases,
        CASE WHEN d.state IN ('{State.QUEUED}', '{State.SCHEDULED}') THEN 'outbox' WHEN d.state = '{State.HELD}' THEN 'held'
            WHEN d.state = '{State.LEASED}' THEN 'leases' WHEN d.state = '{State.SIDELINED}' THEN 'sidelined' END AS place,
        o.generation = d.generation AND o.attempt = d.attempt AS outbox_right, l.generation = d.generation AS lease_right,
        s.generation = d.generation AS sidelined_right,
        (h.id IS NOT NULL OR o.claimed_until < now() AND o.kind <> {Place.PUSH_SENT:d}) AND NOT EXISTS (
            SELECT FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id OFFSET 0) AS empty
    FROM d LEFT JOIN LATERAL (
        SELECT o.id, o.generation, o.attempt, o.claimed_until, o.kind FROM outbox o WHERE o.room_id = d.room_id AND o.id = d.id LIMIT 1
    ) o ON true LEFT JOIN LATERAL (SELECT h.id FROM held h WHERE h.room_id = d.room_id AND h.id = d.id LIMIT 1) h ON true
    LEFT JOIN LATERAL (
        SELECT l.id, l.generation FROM leases l WHERE l.room_id = d.room_id AND l.id = d.id LIMIT 1
    ) l ON true LEFT JOIN LATERAL (
        SELECT s.generation FROM sidelined s WHERE s.room_id = d.room_id AND s.id = d.id LIMIT 1
    ) s ON true
"""  # noqa: S608 - words of our own
_FAULT: Final = f"""
    CASE WHEN place = 'outbox' AND NOT in_outbox OR place = 'held' AND NOT in_held OR place = 'leases' AND NOT in_leases
            OR place = 'sidelined' AND sidelined_right IS NOT TRUE THEN '{Fault.MISSING}'
        WHEN place = 'outbox' AND NOT outbox_right OR place = 'leases' AND NOT lease_right THEN '{Fault.OTHER_STEP}'
        WHEN in_outbox AND place IS DISTINCT FROM 'outbox' OR in_held AND place IS DISTINCT FROM 'held'
            OR in_leases AND place IS DISTINCT FROM 'leases' THEN '{Fault.SURPLUS}'
        WHEN place IN ('outbox', 'held') AND empty THEN '{Fault.NO_MESSAGE}' END
"""

# Spans rooms, by primary key: everything is looked at.
_LOOK: Final = f"""
WITH d AS MATERIALIZED (
    SELECT room_id, id, message_id, state, generation, attempt FROM deliveries
    WHERE (room_id, id) > (%(room)s::int4, %(after)s::uuid) ORDER BY room_id, id LIMIT %(limit)s::int4
), j AS ({_JUDGED}), f AS (SELECT j.*, {_FAULT} AS fault FROM j)
SELECT 0, room_id, id::text, state::text, generation, attempt, fault FROM f WHERE fault IS NOT NULL
UNION ALL SELECT 0, room_id, id::text, NULL, count, NULL, NULL FROM (
    SELECT room_id, id, (SELECT count(*) FROM d) AS count FROM d ORDER BY room_id DESC, id DESC LIMIT 1
) last
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - words of our own

_NOBODYS: Final = """
WITH w AS MATERIALIZED (
    SELECT room_id, id FROM {table} WHERE (room_id, id) > (%(room)s::int4, %(after)s::uuid)
    ORDER BY room_id, id LIMIT %(limit)s::int4
)
SELECT 0, w.room_id, w.id::text, EXISTS (
    SELECT FROM deliveries d WHERE d.room_id = w.room_id AND d.id = w.id OFFSET 0
) FROM w UNION ALL SELECT 0, NULL, NULL, NULL
"""

# Only what is as it was seen, and what nobody holds. A new generation makes whatever else is on its way stale.
_MEND: Final = f"""
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(state)s::delivery_state[], %(generation)s::int4[], %(attempt)s::int4[])
        AS v (room_id, id, state, generation, attempt)
), d AS MATERIALIZED (
    SELECT d.* FROM v CROSS JOIN LATERAL (
        SELECT d.room_id, d.id, d.message_id, d.subscription_id, d.state, d.generation, d.attempt, d.due_at, d.expires_at, d.reason
        FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id AND d.state = v.state
            AND d.generation = v.generation AND d.attempt = v.attempt LIMIT 1 FOR UPDATE SKIP LOCKED
    ) d
), j AS MATERIALIZED ({_JUDGED}), f AS MATERIALIZED (
    SELECT j.*, {_FAULT} AS fault, u.type, m.priority, m.event_type, m.event_version, m.correlation_id,
        CASE WHEN place IN ('outbox', 'held', 'leases') AND u.type IS NULL THEN '{State.CANCELLED}'
            WHEN place IN ('outbox', 'held') AND m.priority IS NULL THEN '{State.SIDELINED}'
            ELSE j.state::text END AS becomes
    FROM j LEFT JOIN LATERAL (
        SELECT * FROM subscriptions u WHERE u.room_id = j.room_id AND u.id = j.subscription_id AND u.status <> 'deleted' LIMIT 1
    ) u ON true LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = j.room_id AND m.id = j.message_id LIMIT 1
    ) m ON true
), x AS MATERIALIZED (
    SELECT f.*, becomes = state::text AND place = 'outbox' AND fault IN ('{Fault.MISSING}', '{Fault.OTHER_STEP}') AS again,
        becomes = state::text AND place = 'leases' AND fault IN ('{Fault.MISSING}', '{Fault.OTHER_STEP}') AS ends
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
    ON CONFLICT (room_id, id) DO UPDATE SET generation = excluded.generation, since = excluded.since,
        reason = excluded.reason, shard = NULL, pointer = NULL
), no_outbox AS (
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
"""  # noqa: S608 - words of our own

_FORGET: Final = """
WITH gone AS (
    DELETE FROM {table} t USING unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id)
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND NOT EXISTS (
        SELECT FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id OFFSET 0
    ) RETURNING 1
) SELECT 0, count(*) FROM gone
"""
TABLES: Final = ("outbox", "held", "leases")
_NOBODYS_OF: Final = {table: _NOBODYS.format(table=table) for table in TABLES}
_FORGET_OF: Final = {table: _FORGET.format(table=table) for table in TABLES}

Position = tuple[RoomId, str]


class Standing:
    """Looks and mends through one writer. StorageUnavailableError: in doubt; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def look(self, after: Position, *, limit: int = BATCH) -> tuple[list[Misplaced], int, Position | None]:
        """What is misplaced among the next deliveries; how many those were, and the last of them (None: there were none)."""
        rows = await self._writer.run(_LOOK, {"room": after[0], "after": after[1], "limit": limit})
        if not rows:
            return [], 0, None
        *found, (room, last, _, count, _, _) = rows
        return [_misplaced(row) for row in found], int(count), (RoomId(room), str(last))

    async def nobodys(
        self, table: str, after: Position, *, limit: int = BATCH
    ) -> tuple[list[tuple[RoomId, DeliveryId]], Position | None]:
        """The next rows of one of TABLES that have no delivery, and where the look came to (None: to the end)."""
        rows = await self._writer.run(_NOBODYS_OF[table], {"room": after[0], "after": after[1], "limit": limit})
        found = [(RoomId(room), DeliveryId(identity)) for room, identity, owned in rows if not owned]
        return found, (rows[-1][0], rows[-1][1]) if rows else None

    async def mend(self, misplaced: Sequence[Misplaced]) -> int:
        """Put these where their state says, each as far as it is as it was seen; how many. What could not be moved on (its
        subscription or its message is gone) ends as `cancelled`, or rests as an orphan.
        """
        parameters = {
            "room": numbers(one.room_id for one in misplaced),
            "id": plain(one.delivery_id for one in misplaced),
            "state": plain(one.state for one in misplaced),
            "generation": numbers(one.generation for one in misplaced),
            "attempt": numbers(one.attempt for one in misplaced),
            "host": self._writer.host,
        }
        return int((await self._writer.run(_MEND, parameters))[0][0])

    async def forget(self, table: str, rows: Sequence[tuple[RoomId, DeliveryId]]) -> int:
        """Delete rows of one of TABLES that have no delivery; how many."""
        parameters = {"room": numbers(room for room, _ in rows), "id": plain(identity for _, identity in rows)}
        return int((await self._writer.run(_FORGET_OF[table], parameters))[0][0])


def _misplaced(row: tuple[Any, ...]) -> Misplaced:
    room, identity, state, generation, attempt, fault = row
    return Misplaced(
        room_id=RoomId(room),
        delivery_id=DeliveryId(identity),
        state=State(state),
        generation=generation,
        attempt=attempt,
        fault=Fault(fault),
    )
