"""Find messages all of whose deliveries have ended, each once.

A publish into a room that asked for `rooms.message.completed` writes a row for each message with
the ids of its deliveries, in its own transaction. The statement that finds them all ended deletes
that row and writes the event. So each message has exactly one such event, whatever dies when.

A message that is not completed is looked at again after a quarter of its age, between `MIN_WAIT_S`
and `MAX_WAIT_S`. A look ends at the first delivery that has not ended; only if there is none, they
are counted.

A batch has `MAX_DELIVERIES` at most, or one message. While more is due than a batch takes,
organisations take turns. So the messages of one delay those of another by one batch.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from typing import Final

from rooms.db.operational.outbox import HAS_RECIPIENT, STORE_EVENTS, WRITER_SLOT
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.state_machine import UNFINISHED

MAX_MESSAGES: Final = 500
MAX_DELIVERIES: Final = 20_000
"""Bound the messages of a batch, and their deliveries."""
TURN: Final = 1000
"""Deliveries that an organisation has in each turn of a batch, or one message."""
MIN_WAIT_S: Final = 1
MAX_WAIT_S: Final = 300
_OPEN: Final = ", ".join(f"'{state}'" for state in sorted(UNFINISHED))
_NO_ORGANISATION: Final = OrganisationId("00000000-0000-0000-0000-000000000000")

# `enqueued` has 36 octets for each delivery, of which 16 to 31 are its id (migration 0019). It is
# stored plainly, so the length and a slice are read without the rest (migration 0056).
_DELIVERIES: Final = "octet_length(w.enqueued) / 36"
_NTH_DELIVERY: Final = """
            SELECT d.state, d.updated_at FROM deliveries d
            WHERE d.room_id = c.room_id AND d.id = encode(substr(c.enqueued, 36 * k.k - 19, 16), 'hex')::uuid LIMIT 1"""
_COMPLETE_TEMPLATE: Final = f"""
WITH RECURSIVE {{due}}, c AS MATERIALIZED (
    SELECT p.*, w.enqueued, w.since FROM (
        SELECT d.*, sum(d.deliveries) OVER (ORDER BY d.place) AS total FROM due d
    ) p CROSS JOIN LATERAL (
        SELECT w.enqueued, w.since FROM operational_messages w WHERE w.room_id = p.room_id AND w.id = p.id LIMIT 1
    ) w WHERE p.place = 1 OR p.place <= {MAX_MESSAGES} AND p.total <= {MAX_DELIVERIES}
), looked AS MATERIALIZED (
    SELECT c.*, EXISTS (
        SELECT FROM (SELECT generate_series(1, c.deliveries) AS k) k CROSS JOIN LATERAL ({_NTH_DELIVERY}
        ) d WHERE d.state IN ({_OPEN})
    ) AS unfinished FROM c
), x AS MATERIALIZED (
    SELECT c.room_id, c.id, c.since, c.unfinished, x.states, x.ended_at FROM looked c CROSS JOIN LATERAL (
        SELECT coalesce(jsonb_object_agg(state, n), '{{{{}}}}') AS states, max(at) AS ended_at FROM (
            SELECT d.state, count(*) AS n, max(d.updated_at) AS at
            FROM (SELECT generate_series(1, c.deliveries) AS k) k CROSS JOIN LATERAL ({_NTH_DELIVERY}
            ) d WHERE NOT c.unfinished GROUP BY d.state
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
SELECT 0, (SELECT count(*) FROM c), (SELECT organisation_id::text FROM c ORDER BY place DESC LIMIT 1)
"""  # noqa: S608 - constants of this package
_COMPLETE: Final = _COMPLETE_TEMPLATE.format(
    due=f"""due AS MATERIALIZED (
    SELECT w.room_id, w.id, NULL::uuid AS organisation_id, {_DELIVERIES} AS deliveries, row_number() OVER (ORDER BY w.check_at, w.id) AS place
    FROM (SELECT * FROM operational_messages WHERE check_at <= now() ORDER BY check_at LIMIT {MAX_MESSAGES}) w
)"""  # noqa: S608 - constants of this package
)
# A loose index scan: it reads one row of each room, however many are awaited. Each organisation has
# an equal share of the messages that are chosen from.
_COMPLETE_IN_TURN: Final = _COMPLETE_TEMPLATE.format(
    due=f"""g AS (
    (SELECT room_id FROM operational_messages ORDER BY room_id, check_at LIMIT 1)
    UNION ALL
    SELECT n.room_id FROM g CROSS JOIN LATERAL (
        SELECT w.room_id FROM operational_messages w WHERE w.room_id > g.room_id ORDER BY w.room_id, w.check_at LIMIT 1
    ) n
), of_room AS MATERIALIZED (
    SELECT g.room_id, coalesce(r.organisation_id, '{_NO_ORGANISATION}') AS organisation_id FROM g LEFT JOIN LATERAL (
        SELECT r.organisation_id FROM rooms r WHERE r.id = g.room_id LIMIT 1
    ) r ON true WHERE EXISTS (
        SELECT FROM operational_messages w WHERE w.room_id = g.room_id AND w.check_at <= now() OFFSET 0)
), share AS MATERIALIZED (
    SELECT room_id, organisation_id, greatest(1, {MAX_MESSAGES} / count(*) OVER (PARTITION BY organisation_id)
        / (SELECT count(DISTINCT organisation_id) FROM of_room)) AS messages FROM of_room
), by_turn AS MATERIALIZED (
    SELECT w.*, s.organisation_id, (sum(w.deliveries) OVER (PARTITION BY s.organisation_id ORDER BY w.check_at, w.id)
        - w.deliveries) / {TURN} AS turn
    FROM share s CROSS JOIN LATERAL (
        SELECT w.room_id, w.id, w.check_at, {_DELIVERIES} AS deliveries FROM operational_messages w
        WHERE w.room_id = s.room_id AND w.check_at <= now() ORDER BY w.check_at LIMIT s.messages
    ) w
), due AS MATERIALIZED (
    SELECT room_id, id, organisation_id, deliveries, row_number() OVER (
        ORDER BY turn, organisation_id <= %(after)s::uuid, organisation_id, check_at, id) AS place FROM by_turn
)"""  # noqa: S608 - constants of this package
)

# Most installations await none, and the large statements take longer to find that out.
_COUNT_DUE: Final = f"""
SELECT 0, count(*), coalesce(sum({_DELIVERIES}), 0)::int8 FROM (
    SELECT * FROM operational_messages WHERE check_at <= now() ORDER BY check_at LIMIT {MAX_MESSAGES + 1}
) w
"""  # noqa: S608 - constants of this package

TRACK_PUBLISHED: Final = f""", tracked AS (
    INSERT INTO operational_messages (room_id, id, enqueued)
    SELECT m.room_id, m.id, m.enqueued FROM m WHERE EXISTS (
        SELECT FROM rooms r WHERE r.id = m.room_id AND '{OperationalEvent.MESSAGE_COMPLETED}' = ANY (r.operational_events))
)"""  # noqa: S608 - constants of this package
"""A CTE of the publish statement, for a group with a room that asked for the event."""


class CompletionQueries:
    """Find completed messages through one writer. It keeps whose turn was the last."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._after = _NO_ORGANISATION

    async def find(self) -> int:
        """Write the events of the next messages that are completed.

        Return how many messages were looked at; 0: none is due. Errors: those of `LogWriter.run`.
        """
        ((messages, deliveries),) = await self._writer.run(_COUNT_DUE, {})
        if not messages:
            return 0
        if messages <= MAX_MESSAGES and deliveries <= MAX_DELIVERIES:
            return int((await self._writer.run(_COMPLETE, {}))[0][0])
        rows = await self._writer.run(_COMPLETE_IN_TURN, {"after": self._after})
        looked_at, last = rows[0]
        self._after = last or _NO_ORGANISATION
        return int(looked_at)
