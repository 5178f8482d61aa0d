"""The text of THE statement, in its shapes: with Idempotency-Keys or without, with what is seldom asked for or without.

What a publish seldom has (a due time, a business key, an id of the publisher's own) is `extended`: columns of their own
behind those of every message, so that a group without any of it runs a statement that does not know of them.
"""

import functools
import itertools
from typing import Final

from rooms.domain.place import LATER, TO_SEND, Place

KEYS_KEPT: Final = "24 hours"
"""How long an idempotency key answers; an older one is free again, whether or not upkeep has come by."""

Columns = tuple[tuple[str, str], ...]

PLANS: Final[Columns] = (("room_id", "int4"), ("version", "int8"))
MESSAGES: Final[Columns] = (
    ("n", "int4"), ("room_id", "int4"), ("id", "uuid"), ("event_type", "text"), ("event_version", "int4"),
    ("priority", "int2"), ("fanout", "int4"), ("life_ms", "int8"), ("publisher_id", "uuid"), ("correlation_id", "text"),
    ("ordering_key", "text"), ("headers", "bytea"), ("payload", "bytea"), ("enqueued", "bytea"),
)  # fmt: skip
"""`n`: how many log rows the messages before it have; `enqueued`: its deliveries, as the log has them."""
DELIVERIES: Final[Columns] = (
    ("room_id", "int4"), ("id", "uuid"), ("message_id", "uuid"), ("subscription_id", "uuid"),
    ("kind", "int2"), ("priority", "int2"), ("life_ms", "int8"),
)  # fmt: skip
LOGGED: Final[Columns] = (
    ("policy_version", "int4"), ("event_type", "text"), ("event_version", "int4"), ("correlation_id", "text"),
)  # fmt: skip
"""What the log has of a delivery that is held at once."""
NUMBER: Final[Columns] = (("n", "int4"),)
KEYS: Final[Columns] = (
    ("room_id", "int4"), ("key", "text"), ("message_id", "uuid"), ("request_hash", "bytea"), ("answer", "bytea"),
)  # fmt: skip
DUE: Final[Columns] = (("wait_ms", "int8"), ("at_us", "int8"))
"""When a message is due: so many ms from the commit on, or (not null) at an epoch microsecond, which may be past."""
MORE_OF_MESSAGES: Final[Columns] = (*DUE, ("business_key", "text"), ("caller_id", "text"))
MORE_OF_DELIVERIES: Final = DUE
ORDER: Final[Columns] = (("ordering", "bytea"),)
"""What stands for the ordering key of a delivery that keeps its place; null: it has none."""
HOLD: Final[Columns] = (("waits", "bool"),)
"""Whether a delivery is held at once, because its endpoint has far more than it can do."""
NAMES: Final[Columns] = (
    ("room_id", "int4"), ("caller_id", "text"), ("message_id", "uuid"), ("content_hash", "bytea"), ("answer", "bytea"),
)  # fmt: skip

# A key taken between the look and the insert makes the insert fail for its null, and the group is tried again.
_TAKEN: Final = f""", taken AS MATERIALIZED (
    SELECT t.room_id, t.key, t.request_hash, t.answer
    FROM ({{keys}}) k JOIN idempotency_keys t ON t.room_id = k.room_id AND t.key = k.key
    WHERE t.created_at > now() - interval '{KEYS_KEPT}'
)"""  # noqa: S608 - a constant of our own
_TAKE: Final = f""", taking AS (
    INSERT INTO idempotency_keys AS old (room_id, key, message_id, request_hash, answer)
    SELECT room_id, key, message_id, request_hash, answer FROM ({{keys}}) k WHERE (SELECT yes FROM clear)
    ON CONFLICT (room_id, key) DO UPDATE SET request_hash = excluded.request_hash, answer = excluded.answer,
        created_at = excluded.created_at, message_id = CASE
            WHEN old.created_at <= now() - interval '{KEYS_KEPT}' THEN excluded.message_id END
)"""  # noqa: S608 - a constant of our own
_NAMED: Final = """, named AS MATERIALIZED (
    SELECT t.room_id, t.caller_id, t.content_hash, t.answer
    FROM ({names}) k JOIN message_ids t ON t.room_id = k.room_id AND t.caller_id = k.caller_id
)"""
_NAME: Final = """, naming AS (
    INSERT INTO message_ids (room_id, caller_id, message_id, content_hash, answer)
    SELECT room_id, caller_id, message_id, content_hash, answer FROM ({names}) k WHERE (SELECT yes FROM clear)
    ON CONFLICT (room_id, caller_id) DO UPDATE SET message_id = NULL
)"""
_DUE: Final = """CASE WHEN at_us IS NULL THEN now() + wait_ms * interval '1 ms'
        ELSE greatest(now(), timestamptz 'epoch' + at_us * interval '1 us') END AS due"""
_WAIT_MS: Final = "nullif((extract(epoch FROM due - now()) * 1000)::int8, 0)"


# A key's row is moved by one publish after the other, in the order of their commits, and everybody moves rows in one
# order. Where it was not there, the first of the group is its head; `waits` is who stands behind. What came of each row
# is looked up by its number, as a group may be large and these sessions join by loops alone.
_QUEUE_UP: Final = """, line AS (
    INSERT INTO ordered_keys AS k (room_id, subscription_id, key, tail, head, head_id)
    SELECT room_id, subscription_id, ordering, count(*), 1, (array_agg(id ORDER BY n))[1]
    FROM d WHERE ordering IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (room_id, subscription_id, key) DO UPDATE SET tail = k.tail + excluded.tail
    RETURNING k.room_id, k.subscription_id, k.key, k.tail, k.head_id
), lines AS MATERIALIZED (
    SELECT array_agg(tail ORDER BY room_id, subscription_id, key) AS tails,
        array_agg(head_id ORDER BY room_id, subscription_id, key) AS heads FROM line
), o AS MATERIALIZED (
    SELECT d.*, l.heads[d.line] <> d.id IS TRUE AS waits,
        l.tails[d.line] - count(*) OVER (PARTITION BY d.line) + row_number() OVER (PARTITION BY d.line ORDER BY d.n) AS position
    FROM (
        SELECT *, CASE WHEN ordering IS NOT NULL THEN dense_rank() OVER (
            PARTITION BY ordering IS NULL ORDER BY room_id, subscription_id, ordering) END AS line FROM d
    ) d, lines l
), behind AS (
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, 0, 'order' FROM o WHERE waits
), place AS (
    INSERT INTO ordered_waiting (room_id, subscription_id, key, position, id)
    SELECT room_id, subscription_id, ordering, position, id FROM o WHERE waits
)"""


_SET_ASIDE: Final = """, aside AS (
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, 0, 'saturated' FROM d WHERE waits
)"""


@functools.cache
def publish_statement(
    *, keyed: bool, extended: bool, relayed: bool, ordered: bool = False, holding: bool = False
) -> str:
    """The statement for a group. `keyed`: with Idempotency-Keys; `relayed`: another broker carries the copies; `ordered`:
    something in it keeps its place behind others; `holding`: something in it is held at once, which is for groups that are
    neither extended nor ordered.

    Parameters are arrays in the order of PLANS, MESSAGES (`extended`: MORE_OF_MESSAGES), DELIVERIES (`ordered` or `holding`:
    LOGGED; MORE_OF_DELIVERIES; `ordered`: ORDER, NUMBER; `holding`: HOLD), NAMES where extended, KEYS where keyed; then, where extended and relayed, the horizon in ms; how many log rows it writes,
    the writer and its next number.
    """
    numbers = itertools.count(1)

    def rows(columns: Columns) -> str:
        return "SELECT " + ", ".join(f"unnest(${next(numbers)}::{kind}[]) AS {name}" for name, kind in columns)

    plans = rows(PLANS)
    messages = rows((*MESSAGES, *MORE_OF_MESSAGES) if extended else MESSAGES)
    more_of_deliveries = (
        LOGGED if ordered or holding else (),
        MORE_OF_DELIVERIES if extended else (),
        (*ORDER, *NUMBER) if ordered else (),
        HOLD if holding else (),
    )
    deliveries = rows((*DELIVERIES, *itertools.chain.from_iterable(more_of_deliveries)))
    looks, takes, none_taken, found = "", "", "", ""
    if extended:
        names = rows(NAMES)
        looks, takes = _NAMED.format(names=names), _NAME.format(names=names)
        none_taken = " AND NOT EXISTS (SELECT FROM named)"
        found = " UNION ALL SELECT room_id, -1, caller_id, content_hash, answer FROM named"
    if keyed:
        keys = rows(KEYS)
        looks, takes = looks + _TAKEN.format(keys=keys), takes + _TAKE.format(keys=keys)
        none_taken += " AND NOT EXISTS (SELECT FROM taken)"
        found += " UNION ALL SELECT room_id, NULL, key, request_hash, answer FROM taken"
    place = f"kind + {TO_SEND[0] - Place.PUSH_HERE:d}" if relayed else "kind"
    state, due, of_message, more_values, wait, detail = "'queued'", "now()", "", "", "NULL::int8", "NULL::text"
    due_of_rows = ""
    if extended:
        due_of_rows, due = f", {_DUE}", "due"
        of_message, more_values = ", due_at, business_key, caller_id", ", nullif(due, now()), business_key, caller_id"
        wait = _WAIT_MS
        if relayed:
            later = f"extract(epoch FROM due - now()) * 1000 > ${next(numbers)}::int8"
            place = f"kind + CASE WHEN {later} THEN {LATER[0] - Place.PUSH_HERE:d} ELSE {TO_SEND[0] - Place.PUSH_HERE:d} END"
            state = f"CASE WHEN {later} THEN 'scheduled' ELSE 'queued' END::delivery_state"
            detail = f"CASE WHEN {later} THEN 'scheduled' END"
    count, writer, seq = (next(numbers) for _ in range(3))
    of, out, reason, no_reason, queue_up, held, more_rows = "d", "", "", "", "", "", ""
    if ordered or holding:
        out = " WHERE NOT waits"
        of, queue_up, why = ("o", _QUEUE_UP, "order") if ordered else ("d", _SET_ASIDE, "saturated")
        state = f"CASE WHEN waits THEN 'held' ELSE {state} END::delivery_state"
        reason, no_reason = ", reason", f", CASE WHEN waits THEN '{why}' END"
        more_rows = f" + (SELECT count(*) FROM {of} WHERE waits)"  # noqa: S608 - names of our own
        held = f"""
    UNION ALL
    SELECT room_id, message_id, ${writer}::int4, ${seq}::int8 + ${count}::int8 - 1 + row_number() OVER (), 'held',
        subscription_id, id, 0, 0, event_version, NULL, NULL, policy_version, correlation_id, event_type, NULL, '{why}', NULL
        FROM {of} WHERE waits"""  # noqa: S608 - numbers of our own
    return f"""
WITH stale AS MATERIALIZED (
    SELECT p.room_id, p.version FROM ({plans}) p WHERE NOT EXISTS (
        SELECT FROM rooms r WHERE r.id = p.room_id AND r.plan_version = p.version AND NOT r.deleting)
){looks}, clear AS MATERIALIZED (
    SELECT NOT EXISTS (SELECT FROM stale){none_taken} AS yes
), m AS MATERIALIZED (
    SELECT *, {due} + life_ms * interval '1 ms' AS expires_at FROM (SELECT *{due_of_rows} FROM ({messages}) m) m
    WHERE (SELECT yes FROM clear)
), d AS MATERIALIZED (
    SELECT *, {due} + life_ms * interval '1 ms' AS expires_at FROM (SELECT *{due_of_rows} FROM ({deliveries}) d) d
    WHERE (SELECT yes FROM clear)
){takes}{queue_up}, message AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, expires_at, publisher_id,
        correlation_id, ordering_key, headers, payload{of_message})
    SELECT room_id, id, event_type, event_version, priority, fanout, expires_at, publisher_id, correlation_id,
        ordering_key, headers, payload{more_values} FROM m
), delivery AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at, expires_at{reason})
    SELECT room_id, id, message_id, subscription_id, {state}, {due}, expires_at{no_reason} FROM {of}
), work AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, {place}, priority, 0, 0, {due}, expires_at FROM {of}{out}
), log AS (
    INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, subscription_id, delivery_id,
        generation, attempt, event_version, fanout, payload_bytes, policy_version, correlation_id, event_type, delay_ms, detail,
        enqueued)
    SELECT room_id, id, ${writer}::int4, ${seq}::int8 + n, 'published', NULL::uuid, NULL::uuid, NULL::int4, NULL::int4,
        event_version, fanout, octet_length(payload), NULL::int4, correlation_id, event_type, {wait}, {detail}, enqueued
    FROM m{held}
)
SELECT CASE WHEN c.yes THEN ${count}::int8{more_rows} ELSE 0 END, x.* FROM clear c LEFT JOIN (
    SELECT room_id, version, NULL::text AS key, NULL::bytea AS request_hash, NULL::bytea AS answer FROM stale{found}
) x ON true
"""  # noqa: S608 - names of our own columns


PUBLISH: Final = publish_statement(keyed=False, extended=False, relayed=False)
"""The one that every plain publish runs."""
