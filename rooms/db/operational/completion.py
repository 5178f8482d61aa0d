"""Find messages all of whose deliveries have ended, each once.

A publish into a room that asked for `rooms.message.completed` writes a row for each message with
the ids of its deliveries, in its own transaction. The statement that finds them all ended deletes
that row and writes the event. So each message has exactly one such event, whatever dies when.

A message that is not completed is looked at again after a quarter of its age, between `MIN_WAIT_S`
and `MAX_WAIT_S`.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from typing import Final

from rooms.db.operational.outbox import HAS_RECIPIENT, STORE_EVENTS, WRITER_SLOT
from rooms.db.writer import LogWriter
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.state_machine import UNFINISHED

BATCH: Final = 500
MIN_WAIT_S: Final = 1
MAX_WAIT_S: Final = 300
_OPEN: Final = ", ".join(f"'{state}'" for state in sorted(UNFINISHED))

# `enqueued` has 36 octets for each delivery, of which 16 to 31 are its id (migration 0019).
_DELIVERY_ID: Final = "encode(substr(c.enqueued, 36 * k - 19, 16), 'hex')::uuid"
_COMPLETE: Final = f"""
WITH c AS MATERIALIZED (
    SELECT room_id, id, enqueued, since FROM operational_messages WHERE check_at <= now() ORDER BY check_at LIMIT %(limit)s::int4
), x AS MATERIALIZED (
    SELECT c.room_id, c.id, c.since, x.unfinished, x.states, x.ended_at FROM c CROSS JOIN LATERAL (
        SELECT coalesce(bool_or(state IN ({_OPEN})), false) AS unfinished, coalesce(jsonb_object_agg(state, n) FILTER (WHERE n > 0), '{{}}') AS states,
            max(at) AS ended_at
        FROM (
            SELECT d.state, count(*) AS n, max(d.updated_at) AS at FROM generate_series(1, octet_length(c.enqueued) / 36) k CROSS JOIN LATERAL (
                SELECT d.state, d.updated_at FROM deliveries d WHERE d.room_id = c.room_id AND d.id = {_DELIVERY_ID} LIMIT 1
            ) d GROUP BY d.state
        ) d
    ) x
), done AS (
    DELETE FROM operational_messages t USING x WHERE NOT x.unfinished AND t.room_id = ANY (ARRAY[x.room_id]) AND t.id = x.id
    RETURNING x.*
), later AS (
    UPDATE operational_messages t
    SET check_at = now() + least(greatest((now() - t.since) / 4, interval '{MIN_WAIT_S} s'), interval '{MAX_WAIT_S} s')
    FROM x WHERE x.unfinished AND t.room_id = ANY (ARRAY[x.room_id]) AND t.id = x.id
), event_of AS MATERIALIZED (
    SELECT e.room_id, NULL::uuid AS subscription_id, r.organisation_id, jsonb_build_object('message_id', e.id,
        'event_type', m.event_type, 'completed_at', coalesce(e.ended_at, e.since), 'deliveries', e.states) AS data
    FROM done e CROSS JOIN LATERAL (
        SELECT r.id, r.organisation_id FROM rooms r
        WHERE r.id = e.room_id AND NOT r.deleting AND '{OperationalEvent.MESSAGE_COMPLETED}' = ANY (r.operational_events) LIMIT 1
    ) r CROSS JOIN LATERAL (
        SELECT m.event_type FROM messages m WHERE m.room_id = e.room_id AND m.id = e.id LIMIT 1
    ) m WHERE {HAS_RECIPIENT.format(condition="o.organisation_id = r.organisation_id")}
){STORE_EVENTS.format(event=OperationalEvent.MESSAGE_COMPLETED, slot=WRITER_SLOT)}
SELECT 0, (SELECT count(*) FROM c)
"""  # noqa: S608 - constants of this package

# Most installations await none, and the large statement takes longer to find that out.
_ANY_DUE: Final = "SELECT 0, EXISTS (SELECT FROM operational_messages WHERE check_at <= now())"

TRACK_PUBLISHED: Final = f""", tracked AS (
    INSERT INTO operational_messages (room_id, id, enqueued)
    SELECT m.room_id, m.id, m.enqueued FROM m WHERE EXISTS (
        SELECT FROM rooms r WHERE r.id = m.room_id AND '{OperationalEvent.MESSAGE_COMPLETED}' = ANY (r.operational_events))
)"""  # noqa: S608 - constants of this package
"""A CTE of the publish statement, for a group with a room that asked for the event."""


async def find_completed(writer: LogWriter) -> int:
    """Write the events of messages that are completed; return how many were looked at.

    Errors: those of `LogWriter.run`.
    """
    if not (await writer.run(_ANY_DUE, {}))[0][0]:
        return 0
    return int((await writer.run(_COMPLETE, {"limit": BATCH}))[0][0])
