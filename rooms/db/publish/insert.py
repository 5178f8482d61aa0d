"""Write everything of a group of publish requests in one statement, or nothing.

All values travel in arrays of PostgreSQL's binary form. A message's row is a tuple of packed
elements, most of them packed once for a room's plan. All deliveries of a message are one tuple too.
A column is the concatenation of its elements.

A group is written only if every plan in it is current, and no idempotency key and no caller's id in
it is used. Else the publish statement writes nothing and returns what was in conflict. So the
common case joins nothing, and the rare one costs a second round.

The text of the statement depends on the group: with or without Idempotency-Keys, and with or
without seldom features. What a publish seldom has (a due time, a business key, a caller's id,
chosen destinations) is `extended`, and so is a publisher that is not the room's owner or has an
application. It has columns of its own behind those of every message, so that a group without it
runs a statement without them.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg

from rooms.db import pg_arrays
from rooms.db.operational.completion import TRACK_PUBLISHED
from rooms.db.pg_arrays import bytes_element, uuid_element
from rooms.db.publish.request_rows import CallerId, InsertRows, PackedRow
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId
from rooms.domain.work_location import SCHEDULED, TO_RELAY, WorkLocation

IDEMPOTENCY_TTL: Final = "24 hours"
"""The time for which an idempotency key answers. An older one is free again, even before cleanup.
"""

Columns = tuple[tuple[str, str], ...]

PLAN_COLUMNS: Final[Columns] = (("room_id", "int4"), ("version", "int8"))
MESSAGE_COLUMNS: Final[Columns] = (
    ("n", "int4"), ("room_id", "int4"), ("id", "uuid"), ("event_type", "text"), ("event_version", "int4"),
    ("priority", "int2"), ("fanout", "int4"), ("life_ms", "int8"), ("publisher_id", "uuid"), ("correlation_id", "text"),
    ("ordering_key", "text"), ("headers", "bytea"), ("payload", "bytea"), ("enqueued", "bytea"),
)  # fmt: skip
"""`n`: how many log rows the messages before it have; `enqueued`: its deliveries, as the log has
them.
"""
DELIVERY_COLUMNS: Final[Columns] = (
    ("room_id", "int4"), ("id", "uuid"), ("message_id", "uuid"), ("subscription_id", "uuid"),
    ("kind", "int2"), ("priority", "int2"), ("life_ms", "int8"),
)  # fmt: skip
HELD_LOG_COLUMNS: Final[Columns] = (
    ("policy_version", "int4"), ("event_type", "text"), ("event_version", "int4"), ("correlation_id", "text"),
)  # fmt: skip
"""The log columns of a delivery that is held at once."""
NUMBER_COLUMN: Final[Columns] = (("n", "int4"),)
KEY_COLUMNS: Final[Columns] = (
    ("room_id", "int4"), ("key", "text"), ("message_id", "uuid"), ("request_hash", "bytea"), ("answer", "bytea"),
)  # fmt: skip
DUE_COLUMNS: Final[Columns] = (("wait_ms", "int8"), ("at_us", "int8"))
"""When a message is due: so many ms after the commit, or (not null) at an epoch microsecond, which
may be past.
"""
EXTENDED_MESSAGE_COLUMNS: Final[Columns] = (
    *DUE_COLUMNS,
    ("business_key", "text"),
    ("caller_id", "text"),
    ("publisher_organisation_id", "uuid"),
    ("application", "text"),
    ("directed", "bool"),
)
"""The last three: the publisher, if it is not the room's owner, its key's application, and whether
it chose destinations.
"""
EXTENDED_DELIVERY_COLUMNS: Final = DUE_COLUMNS
ORDERING_COLUMNS: Final[Columns] = (("ordering", "bytea"),)
"""The digest of the ordering key of a delivery that is ordered; null: it is not."""
HOLD_COLUMNS: Final[Columns] = (("waits", "bool"),)
"""True if a delivery is held at once, because its endpoint is saturated."""
CALLER_ID_COLUMNS: Final[Columns] = (
    ("room_id", "int4"), ("caller_id", "text"), ("message_id", "uuid"), ("content_hash", "bytea"), ("answer", "bytea"),
)  # fmt: skip

# A key that is taken between the look-up and the insert makes the insert fail by its null: the
# group is tried again.
_FIND_USED_KEYS: Final = f""", taken AS MATERIALIZED (
    SELECT t.room_id, t.key, t.request_hash, t.answer
    FROM ({{keys}}) k JOIN idempotency_keys t ON t.room_id = k.room_id AND t.key = k.key
    WHERE t.created_at > now() - interval '{IDEMPOTENCY_TTL}'
)"""  # noqa: S608 - constants of this package
_INSERT_KEYS: Final = f""", taking AS (
    INSERT INTO idempotency_keys AS old (room_id, key, message_id, request_hash, answer)
    SELECT room_id, key, message_id, request_hash, answer FROM ({{keys}}) k WHERE (SELECT yes FROM clear)
    ON CONFLICT (room_id, key) DO UPDATE SET request_hash = excluded.request_hash, answer = excluded.answer,
        created_at = excluded.created_at, message_id = CASE
            WHEN old.created_at <= now() - interval '{IDEMPOTENCY_TTL}' THEN excluded.message_id END
)"""  # noqa: S608 - constants of this package
_FIND_USED_IDS: Final = """, named AS MATERIALIZED (
    SELECT t.room_id, t.caller_id, t.content_hash, t.answer
    FROM ({names}) k JOIN message_ids t ON t.room_id = k.room_id AND t.caller_id = k.caller_id
)"""
_INSERT_IDS: Final = """, naming AS (
    INSERT INTO message_ids (room_id, caller_id, message_id, content_hash, answer)
    SELECT room_id, caller_id, message_id, content_hash, answer FROM ({names}) k WHERE (SELECT yes FROM clear)
    ON CONFLICT (room_id, caller_id) DO UPDATE SET message_id = NULL
)"""
_DUE_SQL: Final = """CASE WHEN at_us IS NULL THEN now() + wait_ms * interval '1 ms'
        ELSE greatest(now(), timestamptz 'epoch' + at_us * interval '1 us') END AS due"""
_WAIT_MS_SQL: Final = "nullif((extract(epoch FROM due - now()) * 1000)::int8, 0)"


# Publishes move a key's row one after the other, in the order of their commits, and every statement
# locks such rows in one order. If there is no row, the first delivery of the group becomes its
# head; `waits` marks those behind a head. A key's sequence goes on in a row that stays when the key
# has nothing in progress; it is locked after all keys, of which `lines` holds the locks, so two
# publishes never wait for each other. The result for each row is found by its number: a group may
# be large, and these sessions only join by nested loops.
_ENQUEUE_ORDERED: Final = """, line AS (
    INSERT INTO ordered_keys AS k (room_id, subscription_id, key, tail, head, head_id)
    SELECT room_id, subscription_id, ordering, count(*), 1, (array_agg(id ORDER BY n))[1]
    FROM d WHERE ordering IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (room_id, subscription_id, key) DO UPDATE SET tail = k.tail + excluded.tail
    RETURNING k.room_id, k.subscription_id, k.key, k.tail, k.head_id
), lines AS MATERIALIZED (
    SELECT array_agg(tail ORDER BY room_id, subscription_id, key) AS tails,
        array_agg(head_id ORDER BY room_id, subscription_id, key) AS heads FROM line
), numbered AS (
    INSERT INTO sequences AS s (room_id, subscription_id, key, last)
    SELECT room_id, subscription_id, ordering, count(*)
    FROM d WHERE ordering IS NOT NULL AND (SELECT tails IS NOT NULL FROM lines) GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (room_id, subscription_id, key) DO UPDATE SET last = s.last + excluded.last, updated_at = now()
    RETURNING s.room_id, s.subscription_id, s.key, s.last
), numbers AS MATERIALIZED (
    SELECT array_agg(last ORDER BY room_id, subscription_id, key) AS lasts FROM numbered
), o AS MATERIALIZED (
    SELECT d.*, l.heads[d.line] <> d.id IS TRUE AS waits,
        l.tails[d.line] - d.behind AS position, s.lasts[d.line] - d.behind AS sequence
    FROM (
        SELECT *, count(*) OVER (PARTITION BY line) - row_number() OVER (PARTITION BY line ORDER BY n) AS behind FROM (
            SELECT *, CASE WHEN ordering IS NOT NULL THEN dense_rank() OVER (
                PARTITION BY ordering IS NULL ORDER BY room_id, subscription_id, ordering) END AS line FROM d
        ) d
    ) d, lines l, numbers s
), behind AS (
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, 0, 'order' FROM o WHERE waits
), place AS (
    INSERT INTO ordered_waiting (room_id, subscription_id, key, position, id)
    SELECT room_id, subscription_id, ordering, position, id FROM o WHERE waits
)"""


_HOLD_SATURATED: Final = """, aside AS (
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, 0, 'saturated' FROM d WHERE waits
)"""


@functools.cache
def publish_statement(
    *,
    keyed: bool,
    extended: bool,
    relayed: bool,
    ordered: bool = False,
    holding: bool = False,
    tracked: bool = False,
) -> str:
    """Return the publish statement for a group.

    `keyed`: with Idempotency-Keys; `relayed`: another broker carries the copies; `ordered`: a
    delivery in it keeps its order behind others; `holding`: a delivery in it is held at once.
    `holding` is only for groups that are neither extended nor ordered. `tracked`: a room in it
    asked for the completion of its messages.

    Parameters are arrays in the order of PLAN_COLUMNS, MESSAGE_COLUMNS (`extended`:
    EXTENDED_MESSAGE_COLUMNS), DELIVERY_COLUMNS (`ordered` or `holding`: HELD_LOG_COLUMNS;
    `extended`: EXTENDED_DELIVERY_COLUMNS; `ordered`: ORDERING_COLUMNS, NUMBER_COLUMN; `holding`:
    HOLD_COLUMNS), CALLER_ID_COLUMNS if extended, KEY_COLUMNS if keyed. Then come, if extended and
    relayed, the lookahead in ms; the number of log rows, the writer's id and its next number.
    """
    numbers = itertools.count(1)

    def rows(columns: Columns) -> str:
        return "SELECT " + ", ".join(
            f"unnest(${next(numbers)}::{kind}[]) AS {name}" for name, kind in columns
        )

    plans = rows(PLAN_COLUMNS)
    messages = rows((*MESSAGE_COLUMNS, *EXTENDED_MESSAGE_COLUMNS) if extended else MESSAGE_COLUMNS)
    extra_columns = (
        HELD_LOG_COLUMNS if ordered or holding else (),
        EXTENDED_DELIVERY_COLUMNS if extended else (),
        (*ORDERING_COLUMNS, *NUMBER_COLUMN) if ordered else (),
        HOLD_COLUMNS if holding else (),
    )
    deliveries = rows((*DELIVERY_COLUMNS, *itertools.chain.from_iterable(extra_columns)))
    lookups, key_inserts, no_conflict, found = "", "", "", ""
    if extended:
        names = rows(CALLER_ID_COLUMNS)
        lookups, key_inserts = _FIND_USED_IDS.format(names=names), _INSERT_IDS.format(names=names)
        no_conflict = " AND NOT EXISTS (SELECT FROM named)"
        found = " UNION ALL SELECT room_id, -1, caller_id, content_hash, answer FROM named"
    if keyed:
        keys = rows(KEY_COLUMNS)
        lookups, key_inserts = (
            lookups + _FIND_USED_KEYS.format(keys=keys),
            key_inserts + _INSERT_KEYS.format(keys=keys),
        )
        no_conflict += " AND NOT EXISTS (SELECT FROM taken)"
        found += " UNION ALL SELECT room_id, NULL, key, request_hash, answer FROM taken"
    location = f"kind + {TO_RELAY[0] - WorkLocation.PUSH_LOCAL:d}" if relayed else "kind"
    state, due, message_columns, message_values, wait, detail = (
        "'queued'",
        "now()",
        "",
        "",
        "NULL::int8",
        "NULL::text",
    )
    due_column = ""
    if extended:
        due_column, due = f", {_DUE_SQL}", "due"
        message_columns, message_values = (
            ", due_at, business_key, caller_id, publisher_organisation_id, application, directed",
            ", nullif(due, now()), business_key, caller_id, publisher_organisation_id, application, directed",
        )
        wait = _WAIT_MS_SQL
        if relayed:
            later = f"extract(epoch FROM due - now()) * 1000 > ${next(numbers)}::int8"
            location = f"kind + CASE WHEN {later} THEN {SCHEDULED[0] - WorkLocation.PUSH_LOCAL:d} ELSE {TO_RELAY[0] - WorkLocation.PUSH_LOCAL:d} END"
            state = f"CASE WHEN {later} THEN 'scheduled' ELSE 'queued' END::delivery_state"
            detail = f"CASE WHEN {later} THEN 'scheduled' END"
    count, writer, seq = (next(numbers) for _ in range(3))
    of, out, columns, values, holding_ctes, held, held_count = "d", "", "", "", "", "", ""
    if ordered or holding:
        out = " WHERE NOT waits"
        of, holding_ctes, held_reason = (
            ("o", _ENQUEUE_ORDERED, "order") if ordered else ("d", _HOLD_SATURATED, "saturated")
        )
        state = f"CASE WHEN waits THEN 'held' ELSE {state} END::delivery_state"
        columns, values = ", reason", f", CASE WHEN waits THEN '{held_reason}' END"
        if ordered:
            columns, values = f"{columns}, sequence", f"{values}, sequence"
        held_count = f" + (SELECT count(*) FROM {of} WHERE waits)"  # noqa: S608 - constants of this package
        held = f"""
    UNION ALL
    SELECT room_id, message_id, ${writer}::int4, ${seq}::int8 + ${count}::int8 - 1 + row_number() OVER (), 'held',
        subscription_id, id, 0, 0, event_version, NULL, NULL, policy_version, correlation_id, event_type, NULL, '{held_reason}', NULL
        FROM {of} WHERE waits"""  # noqa: S608 - constants of this package
    return f"""
WITH stale AS MATERIALIZED (
    SELECT p.room_id, p.version FROM ({plans}) p WHERE NOT EXISTS (
        SELECT FROM rooms r WHERE r.id = p.room_id AND r.plan_version = p.version AND NOT r.deleting)
){lookups}, clear AS MATERIALIZED (
    SELECT NOT EXISTS (SELECT FROM stale){no_conflict} AS yes
), m AS MATERIALIZED (
    SELECT *, {due} + life_ms * interval '1 ms' AS expires_at FROM (SELECT *{due_column} FROM ({messages}) m) m
    WHERE (SELECT yes FROM clear)
), d AS MATERIALIZED (
    SELECT *, {due} + life_ms * interval '1 ms' AS expires_at FROM (SELECT *{due_column} FROM ({deliveries}) d) d
    WHERE (SELECT yes FROM clear)
){key_inserts}{holding_ctes}, message AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, expires_at, publisher_id,
        correlation_id, ordering_key, headers, payload{message_columns})
    SELECT room_id, id, event_type, event_version, priority, fanout, expires_at, publisher_id, correlation_id,
        ordering_key, headers, payload{message_values} FROM m
), delivery AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at, expires_at{columns})
    SELECT room_id, id, message_id, subscription_id, {state}, {due}, expires_at{values} FROM {of}
), work AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, {location}, priority, 0, 0, {due}, expires_at FROM {of}{out}
), log AS (
    INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind, subscription_id, delivery_id,
        generation, attempt, event_version, fanout, payload_bytes, policy_version, correlation_id, event_type, delay_ms, detail,
        enqueued)
    SELECT room_id, id, ${writer}::int4, ${seq}::int8 + n, 'published', NULL::uuid, NULL::uuid, NULL::int4, NULL::int4,
        event_version, fanout, octet_length(payload), NULL::int4, correlation_id, event_type, {wait}, {detail}, enqueued
    FROM m{held}
){TRACK_PUBLISHED if tracked else ""}
SELECT CASE WHEN c.yes THEN ${count}::int8{held_count} ELSE 0 END, x.* FROM clear c LEFT JOIN (
    SELECT room_id, version, NULL::text AS key, NULL::bytea AS request_hash, NULL::bytea AS answer FROM stale{found}
) x ON true
"""  # noqa: S608 - constants of this package


_NO_MESSAGE: Final = uuid_element(bytes(16))
"""For a key whose request published nothing, because all its messages had been published before
under caller's ids.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertConflict:
    """Hold what was in conflict with a group; without a conflict the group is written."""

    stale_plans: frozenset[tuple[int, int]] = frozenset()
    """(room, plan version) that is no longer current."""
    used_keys: Mapping[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """(room, idempotency key) → (hash of the request that took it, its answer)."""
    used_ids: Mapping[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """(room, caller's id) → (hash of the content that has it, its answer)."""
    raced: bool = False
    """Another request took a key or an id at the same moment: the next try of this group will find
    it taken.
    """

    @property
    def has_conflict(self) -> bool:
        """Return whether there was a conflict, so that nothing is written."""
        return bool(self.stale_plans or self.used_keys or self.used_ids or self.raced)


NO_CONFLICT: Final = InsertConflict()
_RACE_LOST: Final = InsertConflict(raced=True)


async def write_group(writer: LogWriter, group: Sequence[InsertRows]) -> InsertConflict:
    """Write all requests in one transaction, or none.

    No two of them may have a claim in common.

    StorageUnavailableError: in doubt. StorageRefusedError: nothing was written.
    """
    plans = sorted({(submission.room_id, submission.plan_version) for submission in group})
    # Two processes that take the same keys in the same order cannot deadlock.
    keyed = sorted(
        (submission for submission in group if submission.key is not None),
        key=lambda one: (one.room_id, one.key),
    )
    extended = any(submission.extended_messages for submission in group)
    ordered = any(submission.delivery_ordering for submission in group)
    # With extended or ordered messages in the group nothing is held here: a worker holds it when it
    # takes it up.
    holding = not (extended or ordered) and any(submission.delivery_holds for submission in group)
    messages = [row for submission in group for row in submission.messages]
    deliveries = [row for submission in group for row in submission.deliveries]
    # A message's deliveries are numbered behind it in the log.
    *numbers, count = itertools.accumulate(
        (1 + each for submission in group for each in submission.fanouts), initial=0
    )
    fanout = count - len(messages)
    values = [
        *_pack_columns(
            PLAN_COLUMNS,
            [
                (pg_arrays.room_element(room), pg_arrays.int8_element(version))
                for room, version in plans
            ],
        ),
        pg_arrays.binary_array("int4", [pg_arrays.int4_element(n) for n in numbers]),
        *_pack_columns(MESSAGE_COLUMNS[1:], messages),
    ]
    more = [submission.all_extended() for submission in group] if extended else []
    if extended:
        values += _pack_columns(EXTENDED_MESSAGE_COLUMNS, [row for rows, _ in more for row in rows])
    values += _pack_columns(
        (*DELIVERY_COLUMNS, *HELD_LOG_COLUMNS) if ordered or holding else DELIVERY_COLUMNS,
        deliveries,
        fanout,
    )
    if extended:
        values += _pack_columns(
            EXTENDED_DELIVERY_COLUMNS, [row for _, rows in more for row in rows], fanout
        )
    if ordered:
        values += _pack_columns(
            ORDERING_COLUMNS,
            [row for submission in group for row in submission.all_ordering()],
            fanout,
        )
        values.append(
            pg_arrays.binary_array("int4", [pg_arrays.int4_element(n) for n in range(fanout)])
        )
    if holding:
        values += _pack_columns(
            HOLD_COLUMNS, [row for submission in group for row in submission.all_holds()], fanout
        )
    if extended:
        values += _pack_columns(CALLER_ID_COLUMNS, _caller_id_rows(group))
    if keyed:
        values += _pack_columns(KEY_COLUMNS, [_key_row(submission) for submission in keyed])
    if extended and writer.broker_mode.is_relayed:
        values.append(writer.broker_mode.lookahead_ms.to_bytes(8, "big"))
    values.append(count.to_bytes(8, "big"))
    statement = publish_statement(
        keyed=bool(keyed),
        extended=extended,
        relayed=writer.broker_mode.is_relayed,
        ordered=ordered,
        holding=holding,
        tracked=any(submission.tracks_completion for submission in group),
    )
    try:
        found = await writer.run_packed(statement, values)
    except psycopg.errors.NotNullViolation as exc:
        if exc.diag.table_name in {"idempotency_keys", "message_ids"}:
            return _RACE_LOST
        raise
    return _conflict(found) if found else NO_CONFLICT


def _pack_columns(
    columns: Columns, rows: Sequence[PackedRow], count: int | None = None
) -> list[bytes]:
    """Return the rows as one array a column, of `count` elements if one item holds several."""
    values: Iterable[Sequence[bytes]] = zip(*rows, strict=True) if rows else itertools.repeat(())
    return [
        pg_arrays.binary_array(kind, column, count)
        for (_, kind), column in zip(columns, values, strict=False)
    ]


def _caller_id_rows(group: Sequence[InsertRows]) -> list[PackedRow]:
    named: list[tuple[RoomId, str, CallerId]] = [
        (submission.room_id, name.caller_id, name)
        for submission in group
        for name in submission.caller_ids
    ]
    named.sort(key=lambda row: row[:2])
    return [
        (
            pg_arrays.room_element(room),
            bytes_element(caller_id.encode()),
            name.message_id,
            bytes_element(name.content_hash),
            bytes_element(name.answer),
        )
        for room, caller_id, name in named
    ]


def _key_row(submission: InsertRows) -> PackedRow:
    return (
        pg_arrays.room_element(submission.room_id),
        pg_arrays.bytes_element((submission.key or "").encode()),
        submission.messages[0][1] if submission.messages else _NO_MESSAGE,
        pg_arrays.bytes_element(submission.request_hash),
        pg_arrays.bytes_element(submission.answer),
    )


def _conflict(found: Sequence[tuple[bytes | None, ...]]) -> InsertConflict:
    stale: set[tuple[int, int]] = set()
    taken: dict[tuple[int, str], tuple[bytes, bytes]] = {}
    named: dict[tuple[int, str], tuple[bytes, bytes]] = {}
    for room, version, key, request_hash, answer in found:
        identity = int.from_bytes(room or b"", "big")
        if key is None:
            stale.add((identity, int.from_bytes(version or b"", "big")))
        else:
            (taken if version is None else named)[identity, key.decode()] = (
                request_hash or b"",
                answer or b"",
            )
    return InsertConflict(stale_plans=frozenset(stale), used_keys=taken, used_ids=named)
