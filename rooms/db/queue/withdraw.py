"""Cancel a message or change its due time before it is delivered, as its publisher requests.

Each is one statement over the deliveries of a message, or over a page of them, through an isolated
writer. If another process takes one of them at the same moment, one of the two is first, and the
other starts again.
Work rows are changed before deliveries and in the order of their ids, as in every statement that
takes work. A delivery that a worker has claimed or a consumer has leased is in flight and stays as
it is.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rooms.db.queue.ordering import RELEASED_COUNT, advance_ordering, leave_line
from rooms.db.statement_parts import JOIN_MESSAGE, session_lives
from rooms.db.writer import LIVENESS_LOCK, LogWriter
from rooms.domain.ids import DeliveryId, MessageId, SubscriptionId, created_ms, first_id, room_of
from rooms.domain.message import DeliverySchedule
from rooms.domain.state_machine import UNFINISHED, LogKind, Reason, State, SubscriptionType
from rooms.domain.work_location import SCHEDULED, WorkLocation


class ChangeOutcome(StrEnum):
    """Say what became of one delivery.

    The change was made, it is in flight, or its state did not allow it.
    """

    DONE = "done"
    IN_FLIGHT = "in_flight"
    UNCHANGED = "left"


_OPEN: Final = "state IN ({})".format(", ".join(f"'{state}'" for state in sorted(UNFINISHED)))
_WAITING: Final = f"state IN ('{State.QUEUED}', '{State.SCHEDULED}')"

# A row that another broker's relay is about to send may be taken away: the copy is stale when it
# arrives. A copy for a `native` queue may not: its client does not ask PostgreSQL.
IN_FLIGHT: Final = f"""(o.kind = {WorkLocation.PULL_TO_RELAY:d} AND o.worker IS NOT NULL AND EXISTS (
            SELECT FROM subscriptions n WHERE n.room_id = o.room_id AND n.id = o.subscription_id
                AND (n.native_password IS NOT NULL) IS TRUE OFFSET 0)
        OR o.kind NOT IN ({WorkLocation.PUSH_TO_RELAY:d}, {WorkLocation.PULL_TO_RELAY:d}) AND o.claimed_until > now() AND {session_lives("o.worker")})"""
"""The condition that the work row `o` must stay as it is. Needs the parameter `life`."""
_DELIVERIES: Final = """c AS MATERIALIZED (
    SELECT d.room_id, d.id, d.subscription_id, d.state FROM deliveries d
    WHERE d.room_id = %(room)s::int4 AND d.id > %(after)s::uuid AND d.id < %(high)s::uuid
        AND d.message_id = %(message)s::uuid ORDER BY d.id LIMIT %(limit)s::int4
)"""
# The end of a statement, after the count of its log rows.
_RESULT_COLUMNS: Final = f""", NULL, NULL, NULL, NULL, NULL
UNION ALL
SELECT 0, c.id::text, c.subscription_id::text, c.state::text, s.type, CASE WHEN c.id IN (SELECT id FROM d) THEN '{ChangeOutcome.DONE}'
    WHEN c.{_OPEN} AND (EXISTS (SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND {IN_FLIGHT} OFFSET 0)
        OR EXISTS (SELECT FROM leases l WHERE l.room_id = c.room_id AND l.id = c.id AND l.until > now() OFFSET 0))
    THEN '{ChangeOutcome.IN_FLIGHT}' ELSE '{ChangeOutcome.UNCHANGED}' END
FROM c LEFT JOIN LATERAL (
    SELECT s.type FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
) s ON true
"""  # noqa: S608 - constants of this package

_CANCEL: Final = f"""
WITH {_DELIVERIES}, u AS MATERIALIZED (SELECT * FROM c WHERE {_OPEN}), o AS (
    DELETE FROM outbox o USING u WHERE o.room_id = ANY (ARRAY[u.room_id]) AND o.id = u.id AND NOT {IN_FLIGHT}
    RETURNING o.room_id, o.id
), l AS (
    DELETE FROM leases l USING u WHERE l.room_id = ANY (ARRAY[u.room_id]) AND l.id = u.id AND (l.until <= now()) IS TRUE
    RETURNING l.room_id, l.id
), h AS (
    DELETE FROM held h USING u WHERE h.room_id = ANY (ARRAY[u.room_id]) AND h.id = u.id
    RETURNING h.room_id, h.id
), w AS MATERIALIZED (
    SELECT * FROM o UNION ALL SELECT * FROM l UNION ALL SELECT * FROM h
), d AS (
    UPDATE deliveries t SET state = '{State.CANCELLED}', reason = '{Reason.WITHDRAWN}', due_at = NULL, updated_at = now()
    FROM w WHERE t.room_id = w.room_id AND t.id = w.id AND t.{_OPEN}
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), log AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.CANCELLED}', d.subscription_id,
        d.id, d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text, '{Reason.WITHDRAWN}'
    FROM d {JOIN_MESSAGE} RETURNING 1
){advance_ordering("SELECT room_id, id FROM d", logged="(SELECT count(*) FROM log)")}{leave_line("SELECT room_id, id FROM d WHERE id IN (SELECT id FROM h)")}
SELECT (SELECT count(*) FROM log) + {RELEASED_COUNT}{_RESULT_COLUMNS}"""  # noqa: S608 - constants of this package

# The lifetime stays: it is as long from the new due time as it was from the old one.
_RESCHEDULE: Final = f"""
WITH m AS MATERIALIZED (
    SELECT m.*, n.due, n.due + (m.expires_at - coalesce(m.due_at, m.published_at)) AS until,
        extract(epoch FROM n.due - now()) * 1000 > %(lookahead)s::int8 AS later
    FROM (SELECT CASE WHEN %(at_us)s::int8 IS NULL THEN now() + %(wait_ms)s::int8 * interval '1 ms'
        ELSE greatest(now(), timestamptz 'epoch' + %(at_us)s::int8 * interval '1 us') END AS due) n CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = %(room)s::int4 AND m.id = %(message)s::uuid LIMIT 1
    ) m
), {_DELIVERIES}, u AS MATERIALIZED (
    SELECT c.room_id, c.id, m.due, m.later FROM c, m WHERE c.{_WAITING}
), o AS (
    UPDATE outbox o SET generation = o.generation + 1, due_at = u.due, expires_at = o.expires_at + (u.due - o.due_at),
        kind = (o.kind & 1) + CASE WHEN u.later THEN {SCHEDULED[0]:d} ELSE %(push)s::int2 END, claimed_until = '-infinity',
        worker = NULL
    FROM u WHERE o.room_id = ANY (ARRAY[u.room_id]) AND o.id = u.id AND NOT {IN_FLIGHT}
    RETURNING o.room_id, o.id, o.generation, o.due_at, o.expires_at, u.later
), d AS (
    UPDATE deliveries t SET state = CASE WHEN o.later THEN '{State.SCHEDULED}' ELSE '{State.QUEUED}' END::delivery_state,
        generation = o.generation, due_at = o.due_at, expires_at = o.expires_at, updated_at = now()
    FROM o WHERE t.room_id = o.room_id AND t.id = o.id AND t.{_WAITING}
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt, t.due_at, o.later
), message AS (
    UPDATE messages t SET due_at = m.due, expires_at = m.until FROM m
    WHERE t.room_id = %(room)s::int4 AND t.id = %(message)s::uuid AND EXISTS (SELECT FROM d)
), log AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, delay_ms, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.RESTORED}', d.subscription_id,
        d.id, d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text,
        (extract(epoch FROM d.due_at - now()) * 1000)::int8, CASE WHEN d.later THEN 'moved, scheduled' ELSE 'moved' END
    FROM d, m RETURNING 1
)
SELECT (SELECT count(*) FROM log){_RESULT_COLUMNS}"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryChange:
    """Describe one delivery of the message. `state`: the one before the change."""

    delivery_id: DeliveryId
    subscription_id: SubscriptionId
    type: SubscriptionType | None
    state: State
    outcome: ChangeOutcome


MAX_CHANGED: Final = 20_000
"""The most deliveries of one statement. A message has more where it was replayed many times."""


async def cancel_message(
    writer: LogWriter,
    message: MessageId,
    *,
    after: DeliveryId | None = None,
    limit: int = MAX_CHANGED,
) -> list[DeliveryChange]:
    """Cancel the unfinished deliveries of a message that are not in flight.

    Return every delivery by id: the first `limit` of those after `after`. No attempt is started any
    more for those that are done. Errors: those of `LogWriter.run`.
    """
    return await _run(writer, _CANCEL, message, {"after": after, "limit": limit})


async def reschedule_message(
    writer: LogWriter,
    message: MessageId,
    due: DeliverySchedule,
    *,
    after: DeliveryId | None = None,
    limit: int = MAX_CHANGED,
) -> list[DeliveryChange]:
    """Change the due time of a message's waiting deliveries, and move their expiry by as much.

    Return every delivery by id: the first `limit` of those after `after`. A held delivery was due
    before, and stays. Those that are done are one generation on. Errors: those of `LogWriter.run`.
    """
    values = {"wait_ms": due.delay_ms, "at_us": due.at_us, "after": after, "limit": limit}
    return await _run(writer, _RESCHEDULE, message, values)


async def _run(
    writer: LogWriter, statement: str, message: MessageId, values: dict[str, Any]
) -> list[DeliveryChange]:
    at_ms = created_ms(message)
    parameters = {
        **values,
        "room": room_of(message),
        "message": message,
        # No id is the first of its millisecond, as an id has a version and a variant.
        "after": values["after"] or first_id(at_ms),
        "high": first_id(at_ms + 1),
        "life": LIVENESS_LOCK,
        "host": writer.host,
    }
    rows = await writer.run(statement, parameters)
    return sorted(map(_change, rows), key=lambda change: change.delivery_id)


def _change(row: Sequence[Any]) -> DeliveryChange:
    identity, subscription, state, kind, outcome = row
    return DeliveryChange(
        delivery_id=DeliveryId(identity),
        subscription_id=SubscriptionId(subscription),
        type=None if kind is None else SubscriptionType(kind),
        state=State(state),
        outcome=ChangeOutcome(outcome),
    )
