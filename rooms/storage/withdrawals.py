"""What its publisher takes back or puts off before it is delivered: withdrawing a message, and moving its due time.

Each is one statement over the deliveries of a message, through an isolated writer: where somebody takes one of them in the
same moment, one of the two comes first, and the other starts again. Work rows are changed before deliveries and in the order
of their ids, as everybody does who takes work. What somebody has (a worker its claim, a consumer its lease) is in flight and
stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rooms.domain.due import Due
from rooms.domain.ids import DeliveryId, MessageId, SubscriptionId, born_ms, first_id, room_of
from rooms.domain.place import LATER, Place
from rooms.domain.states import UNFINISHED, LogKind, Reason, State, SubscriptionType
from rooms.storage.order import TURNS, pass_on
from rooms.storage.writer import LIFE_LOCK, Writer


class Fate(StrEnum):
    """What came of one delivery: it did what was asked for, somebody has it, or neither (its state says why)."""

    DONE = "done"
    IN_FLIGHT = "in_flight"
    LEFT = "left"


_OPEN: Final = "state IN ({})".format(", ".join(f"'{state}'" for state in sorted(UNFINISHED)))
_WAITS: Final = f"state IN ('{State.QUEUED}', '{State.SCHEDULED}')"

# What another broker's relay is about to send may be taken away: the copy is stale when it arrives. A copy for a `native`
# queue is not: its client asks nobody whether it is.
_TAKEN: Final = f"""(o.kind = {Place.PULL_TO_SEND:d} AND o.worker IS NOT NULL AND EXISTS (
            SELECT FROM subscriptions n WHERE n.room_id = o.room_id AND n.id = o.subscription_id
                AND (n.native_password IS NOT NULL) IS TRUE OFFSET 0)
        OR o.kind NOT IN ({Place.PUSH_TO_SEND:d}, {Place.PULL_TO_SEND:d}) AND o.claimed_until > now() AND EXISTS (
            SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid = %(life)s
                AND l.objid::int8 = o.worker
                AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())))"""  # noqa: S608
_C: Final = """c AS MATERIALIZED (
    SELECT d.room_id, d.id, d.subscription_id, d.state FROM deliveries d
    WHERE d.room_id = %(room)s::int4 AND d.id >= %(low)s::uuid AND d.id < %(high)s::uuid
        AND d.message_id = %(message)s::uuid ORDER BY d.id
)"""
# How a statement ends, after the count of its log rows.
_TOLD: Final = f""", NULL, NULL, NULL, NULL, NULL
UNION ALL
SELECT 0, c.id::text, c.subscription_id::text, c.state::text, s.type, CASE WHEN c.id IN (SELECT id FROM d) THEN '{Fate.DONE}'
    WHEN c.{_OPEN} AND (EXISTS (SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND {_TAKEN} OFFSET 0)
        OR EXISTS (SELECT FROM leases l WHERE l.room_id = c.room_id AND l.id = c.id AND l.until > now() OFFSET 0))
    THEN '{Fate.IN_FLIGHT}' ELSE '{Fate.LEFT}' END
FROM c LEFT JOIN LATERAL (
    SELECT s.type FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
) s ON true
"""  # noqa: S608 - words of our own

_WITHDRAW: Final = f"""
WITH {_C}, u AS MATERIALIZED (SELECT * FROM c WHERE {_OPEN}), o AS (
    DELETE FROM outbox o USING u WHERE o.room_id = ANY (ARRAY[u.room_id]) AND o.id = u.id AND NOT {_TAKEN}
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
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true RETURNING 1
){pass_on("SELECT room_id, id FROM d", logged="(SELECT count(*) FROM log)")}
SELECT (SELECT count(*) FROM log) + {TURNS}{_TOLD}"""  # noqa: S608 - words of our own

# The lifetime stays: it is as long from the new due time on as it was from the old one.
_MOVE: Final = f"""
WITH m AS MATERIALIZED (
    SELECT m.*, n.due, n.due + (m.expires_at - coalesce(m.due_at, m.published_at)) AS until,
        extract(epoch FROM n.due - now()) * 1000 > %(horizon)s::int8 AS later
    FROM (SELECT CASE WHEN %(at_us)s::int8 IS NULL THEN now() + %(wait_ms)s::int8 * interval '1 ms'
        ELSE greatest(now(), timestamptz 'epoch' + %(at_us)s::int8 * interval '1 us') END AS due) n CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = %(room)s::int4 AND m.id = %(message)s::uuid LIMIT 1
    ) m
), {_C}, u AS MATERIALIZED (
    SELECT c.room_id, c.id, m.due, m.later FROM c, m WHERE c.{_WAITS}
), o AS (
    UPDATE outbox o SET generation = o.generation + 1, due_at = u.due, expires_at = o.expires_at + (u.due - o.due_at),
        kind = (o.kind & 1) + CASE WHEN u.later THEN {LATER[0]:d} ELSE %(push)s::int2 END, claimed_until = '-infinity',
        worker = NULL
    FROM u WHERE o.room_id = ANY (ARRAY[u.room_id]) AND o.id = u.id AND NOT {_TAKEN}
    RETURNING o.room_id, o.id, o.generation, o.due_at, o.expires_at, u.later
), d AS (
    UPDATE deliveries t SET state = CASE WHEN o.later THEN '{State.SCHEDULED}' ELSE '{State.QUEUED}' END::delivery_state,
        generation = o.generation, due_at = o.due_at, expires_at = o.expires_at, updated_at = now()
    FROM o WHERE t.room_id = o.room_id AND t.id = o.id AND t.{_WAITS}
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
SELECT (SELECT count(*) FROM log){_TOLD}"""  # noqa: S608 - words of our own


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One delivery of the message. `state`: the one it was found in, before whatever was done."""

    delivery_id: DeliveryId
    subscription_id: SubscriptionId
    type: SubscriptionType | None
    state: State
    fate: Fate


async def withdraw(writer: Writer, message: MessageId) -> list[Told]:
    """Cancel what is unfinished of a message and what nobody has; every delivery, in the order of their ids.

    From then on no attempt is started for those that are done. Errors are `Writer.run`'s.
    """
    return await _run(writer, _WITHDRAW, message, {})


async def move(writer: Writer, message: MessageId, due: Due) -> list[Told]:
    """Have what waits of a message come due then, and expire as much later; every delivery. What is held came due before,
    and is left. Those that are done are one generation on. Errors are `Writer.run`'s.
    """
    return await _run(writer, _MOVE, message, {"wait_ms": due.wait_ms, "at_us": due.at_us})


async def _run(writer: Writer, statement: str, message: MessageId, asked: dict[str, Any]) -> list[Told]:
    at_ms = born_ms(message)
    parameters = {
        **asked,
        "room": room_of(message),
        "message": message,
        "low": first_id(at_ms),
        "high": first_id(at_ms + 1),
        "life": LIFE_LOCK,
        "host": writer.host,
    }
    return sorted(map(_told, await writer.run(statement, parameters)), key=lambda told: told.delivery_id)


def _told(row: Sequence[Any]) -> Told:
    identity, subscription, state, kind, fate = row
    return Told(
        delivery_id=DeliveryId(identity),
        subscription_id=SubscriptionId(subscription),
        type=None if kind is None else SubscriptionType(kind),
        state=State(state),
        fate=Fate(fate),
    )
