"""Leases, the hot way: taking what is due for PULL subscriptions, and acknowledging it, many requests in one statement.

Values travel in arrays of PostgreSQL's binary form, as for a publish. A request names its subscription by an entry
(room, subscription, organisation): whose it is, and whether it may be pulled at all, is looked up in the very statement.

Locks are always taken in one order, work row (outbox, leases) before delivery and by id, so that no two statements can
wait for each other in a circle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, cast

from rooms.domain.ids import DeliveryId, OrganisationId, RoomId, SubscriptionId
from rooms.storage import arrays
from rooms.storage.order import CALLED, TURNS, pass_on, subscriptions_of
from rooms.storage.writer import Writer

MAX_BYTES: Final = 4 * 1024 * 1024
"""No more payload than this is taken by a statement, one message apart."""


class Standing(IntEnum):
    """What a subscription is to whoever asks."""

    NONE = 0
    """There is none, or it is another organisation's."""
    PUSH = 1
    STOPPED = 2
    """Paused or disabled: nothing is handed out, leases may still be settled."""
    OPEN = 3
    NATIVE = 4
    """Its queue is read at the broker, not here."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A subscription as somebody of an organisation asks for it, each part packed for a statement."""

    room: bytes
    subscription: bytes
    organisation: bytes

    @classmethod
    def of(cls, room: RoomId, subscription: SubscriptionId, organisation: OrganisationId) -> "Queue":
        """The entry for these ids."""
        return cls(arrays.room(room), arrays.uuid_of(subscription), arrays.uuid_of(organisation))


_ROW: Final = 6
_ORPHANS: Final = _ROW + 3
Row = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes | None, bytes]
"""(delivery id as 16 bytes, generation, attempt, delivery id as text, message id as text, event type, version,
correlation id, time of publish, headers, payload), each as PostgreSQL sends it in binary."""


PRIORITIES: Final = 10
Low = tuple[int, ...]
"""Due times in PostgreSQL's µs, for priorities from 9 down to 0, below which a take need not look."""
WHOLE: Final[Low] = (0,) * PRIORITIES


@dataclass(frozen=True, slots=True)
class Wanted:
    """At most so many messages of a queue, for so many ms."""

    queue: Queue
    most: int
    lease_ms: int
    low: Low = WHOLE


@dataclass(frozen=True, slots=True)
class Taken:
    """What a take got from one queue. `more`: there may be more right now.

    `at_us`: PostgreSQL's time; `last`: priority and due time (None: there was none) of the last message in its order;
    `orphans`: deliveries that are due and have no message row. They stay where they are, before all others.
    """

    standing: Standing
    rows: Sequence[Row]
    more: bool
    at_us: int
    last: tuple[int, int] | None
    orphans: Sequence[DeliveryId] = ()


# Plans are kept, and made anew whenever the tables were analysed, which may be while they are empty: then the planner
# would rather walk over "the one row" than look up a thousand, and goes on so when there are a million. So nothing here
# leaves it a choice. What is read is read by a LATERAL with a limit or a lock, one row at a time. What is changed in
# the work tables is joined by "= ANY (ARRAY[…])", which no order of an index serves but a look-up by it does, and in
# the others from what the planner takes for one row. Minus signs, "IS NOT DISTINCT FROM" and "IS TRUE" keep it from
# another index than the one that is meant.
STANDING: Final = """
    SELECT e.*, s.max_receives, s.version AS policy, coalesce(s.ordered, r.ordered) AS ordered,
        CASE WHEN r.ours IS NULL OR s.id IS NULL OR s.status = 'deleted' THEN 0
        WHEN s.type <> 'PULL' THEN 1 WHEN s.native_password IS NOT NULL THEN 4 WHEN s.status <> 'active' THEN 2 ELSE 3 END AS standing
    FROM ({entries}) e LEFT JOIN LATERAL (
        SELECT true AS ours, ordered FROM rooms r
        WHERE r.id = e.room_id AND r.organisation_id IS NOT DISTINCT FROM e.organisation_id AND NOT r.deleting LIMIT 1
    ) r ON true LEFT JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = e.room_id AND s.id = e.subscription_id LIMIT 1
    ) s ON true
"""

ONE_ROW: Final = "({0} # 0) = ({0} | 0) AND ({0} + 0) = ({0} - 0)"
"""Is true of every integer, which the planner thinks improbable."""

PICKED: Final = f"""
    SELECT v.k, l.* FROM (SELECT * FROM {{wanted}} WHERE {{may}} AND {ONE_ROW.format("v.generation")} ORDER BY v.id) v
    CROSS JOIN LATERAL (
        SELECT l.room_id, l.id, l.generation FROM leases l
        WHERE l.room_id = {{room}} AND l.id = v.id AND l.generation = v.generation
            AND l.subscription_id = {{subscription}}
            AND (l.until > now()) IS TRUE
        FOR UPDATE
    ) l
"""  # noqa: S608 - text of our own
"""Those leases of `wanted` that are not over. One whose time is up is over, whether or not upkeep has ended it yet."""

ENTRIES: Final = """SELECT unnest($1::int4[]) AS room_id, unnest($2::uuid[]) AS subscription_id,
    unnest($3::uuid[]) AS organisation_id, generate_subscripts($1::int4[], 1) AS n"""
_LEASES: Final = """(
    SELECT unnest($4::int4[]) AS n, unnest($5::uuid[]) AS id, unnest($6::int4[]) AS generation,
        generate_subscripts($4::int4[], 1) AS k
) v"""
_EPOCH: Final = "'2000-01-01 00:00:00+00'::timestamptz"
"""Where PostgreSQL's timestamps begin."""
_OPEN: Final = STANDING.format(entries=ENTRIES + ", unnest($4::int4[]) AS most, unnest($5::int8[]) AS lease_ms")
_ASKED: Final = STANDING.format(entries=ENTRIES)
_WANTED: Final = PICKED.format(
    wanted=_LEASES, room="($1::int4[])[v.n]", subscription="($2::uuid[])[v.n]", may="((SELECT may FROM a))[v.n]"
)

# A lease never outlasts its message: what expires under it comes to nobody again.
_TAKE: Final = f"""
WITH e AS MATERIALIZED ({_OPEN}), picked AS MATERIALIZED (
    SELECT * FROM (SELECT e.n, e.lease_ms, row_number() OVER () AS k, o.* FROM e, LATERAL (
        SELECT o.* FROM generate_series(9, 0, -1) p (priority), LATERAL (
            SELECT o.room_id, o.id, o.message_id, o.subscription_id, o.generation, o.attempt, o.expires_at, o.priority,
                o.due_at FROM outbox o
            WHERE o.kind = 1 AND -o.room_id = -e.room_id AND o.subscription_id = e.subscription_id
                AND o.priority = p.priority
                AND o.due_at >= {_EPOCH} + ($6::int8[])[e.n * 10 - p.priority] * interval '1 us' AND o.due_at <= now() AND coalesce(o.expires_at, 'infinity') > now()
            ORDER BY o.due_at LIMIT e.most FOR UPDATE SKIP LOCKED
        ) o LIMIT e.most
    ) o WHERE e.standing = 3) p WHERE {ONE_ROW.format("generation")}
), read AS MATERIALIZED (
    SELECT p.*, m.event_type, m.event_version, m.correlation_id, m.published_at, m.headers, m.payload,
        coalesce(sum(octet_length(m.payload)) OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) < {MAX_BYTES} AS fits
    FROM picked p CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m
), gone AS (
    DELETE FROM outbox o USING read p WHERE p.fits AND o.room_id = ANY (ARRAY[p.room_id]) AND o.id = p.id
), d AS (
    UPDATE deliveries t SET state = 'leased', due_at = NULL, updated_at = now()
    FROM read p WHERE p.fits AND t.room_id = p.room_id AND t.id = p.id AND t.generation = p.generation
        AND t.attempt = p.attempt AND t.state = 'queued'
    RETURNING p.*
), lease AS (
    INSERT INTO leases (room_id, id, subscription_id, generation, until)
    SELECT room_id, id, subscription_id, generation, least(now() + lease_ms * interval '1 ms', expires_at) FROM d
), l AS (
    INSERT INTO delivery_log (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id)
    SELECT $7::int4, $8::int8 - 1 + row_number() OVER (), room_id, message_id, 'leased', subscription_id, id, generation,
        attempt, event_type, event_version, correlation_id FROM d
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), n, standing, now(), (SELECT p.priority FROM read p WHERE p.n = e.n AND p.fits ORDER BY k DESC LIMIT 1),
    (SELECT p.due_at FROM read p WHERE p.n = e.n AND p.fits ORDER BY k DESC LIMIT 1), 0::int8, NULL::uuid, NULL::int4, NULL::int4,
    CASE WHEN (SELECT count(*) FROM picked) > (SELECT count(*) FROM read) THEN (
        SELECT string_agg(p.id::text, ',') FROM picked p WHERE p.n = e.n AND NOT EXISTS (SELECT FROM read r WHERE r.k = p.k)
    ) END, NULL, NULL, NULL::int4, NULL, NULL::timestamptz, NULL::bytea, NULL::bytea FROM e
UNION ALL
SELECT 0, n, NULL, NULL, NULL, NULL, k, id, generation, attempt, id::text, message_id::text, event_type, event_version, correlation_id,
    published_at, headers, payload FROM d
"""  # noqa: S608 - text of our own

_ACKING: Final = """
WITH e AS MATERIALIZED ({asked}), a AS MATERIALIZED (
    SELECT array_agg(standing >= 2 ORDER BY n) AS may FROM e
), picked AS MATERIALIZED ({wanted}), gone AS (
    DELETE FROM leases l USING picked p WHERE l.room_id = ANY (ARRAY[p.room_id]) AND l.id = p.id
), d AS (
    UPDATE deliveries t SET state = 'delivered', attempts = t.attempts + 1, updated_at = now()
    FROM picked p WHERE t.room_id = p.room_id AND t.id = p.id AND t.generation = p.generation AND t.state = 'leased'
    RETURNING p.k, t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), l AS (
    INSERT INTO delivery_log (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id)
    SELECT {writer}, {seq} - 1 + row_number() OVER (), d.room_id, d.message_id, 'pull_acked', d.subscription_id, d.id,
        d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true
    RETURNING 1
){onward}
SELECT (SELECT count(*) FROM l) + {turns}, (SELECT string_agg(standing::text, '' ORDER BY n) FROM e),
    CASE WHEN (SELECT count(*) FROM d) < cardinality($5::uuid[])
        THEN coalesce((SELECT string_agg(k::text, ',') FROM d), '') END,
    (SELECT string_agg(subscription_id::text, ',') FROM e WHERE ordered), {called}
"""


def _ack_statement(*, ordered: bool) -> str:
    writer, seq = ("$10::int4", "$11::int8") if ordered else ("$7::int4", "$8::int8")
    onward, turns, called = "", "0", "NULL::text"
    if ordered:
        onward = pass_on("SELECT room_id, id FROM d", places=("$7::int2", "$8::int2", "$9::int8"), writer=(writer, seq))
        turns, called = TURNS, CALLED
    return _ACKING.format(
        asked=_ASKED, wanted=_WANTED, writer=writer, seq=seq, onward=onward, turns=turns, called=called
    )


_ACK: Final = _ack_statement(ordered=False)
_ACK_ORDERED: Final = _ack_statement(ordered=True)


async def take(writer: Writer, wanted: Sequence[Wanted]) -> list[Taken]:
    """Lease what is due, by priority and due time. No queue comes twice.

    StorageUnavailableError: in doubt; what was taken for nobody comes back when its lease ends.
    """
    rows = await writer.run_packed(
        _TAKE,
        (
            arrays.array("int4", [one.queue.room for one in wanted]),
            arrays.array("uuid", [one.queue.subscription for one in wanted]),
            arrays.array("uuid", [one.queue.organisation for one in wanted]),
            arrays.array("int4", [arrays.int4(one.most) for one in wanted]),
            arrays.array("int8", [arrays.int8(one.lease_ms) for one in wanted]),
            arrays.array("int8", [arrays.int8(low) for one in wanted for low in one.low]),
        ),
    )
    heads, found = rows[: len(wanted)], rows[len(wanted) :]
    found.sort(key=_place)
    full = sum([len(row[-1] or b"") for row in found]) >= MAX_BYTES
    of_queue: list[list[Row]] = [[] for _ in wanted]
    if len(wanted) == 1:
        of_queue[0] = cast("list[Row]", [row[_ROW:] for row in found])
    else:
        for row in found:
            of_queue[_number(row[0]) - 1].append(cast("Row", row[_ROW:]))
    return [
        Taken(
            Standing(_number(head[1])),
            own,
            full or len(own) >= one.most or head[_ORPHANS] is not None,
            _number(head[2]),
            None if head[3] is None else (_number(head[3]), _number(head[4])),
            () if head[_ORPHANS] is None else [DeliveryId(name) for name in head[_ORPHANS].decode().split(",")],
        )
        for head, own, one in zip(heads, of_queue, wanted, strict=True)
    ]


def _number(packed: bytes | None) -> int:
    return int.from_bytes(packed or b"", "big", signed=True)


def _place(row: tuple[bytes | None, ...]) -> bytes:
    return row[_ROW - 1] or b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acked:
    """What came of an `ack`: the standing of every queue, the indexes of the leases that ended as delivered (None: all),
    which of the queues are ordered, and in which of them something else was queued for it.
    """

    standings: Sequence[Standing]
    done: frozenset[int] | None
    ordered: frozenset[SubscriptionId]
    called: frozenset[SubscriptionId]


async def ack(
    writer: Writer, queues: Sequence[Queue], leases: Sequence[tuple[int, bytes, bytes]], *, ordered: bool = False
) -> Acked:
    """Finish leases, each (index of its queue, delivery id as 16 bytes, generation as 4), none of them twice.

    `ordered`: let the next of each key go as well; where a queue is that and it was not known, `Order.advance` does it.
    StorageUnavailableError: in doubt; the same again tells.
    """
    values = [
        arrays.array("int4", [queue.room for queue in queues]),
        arrays.array("uuid", [queue.subscription for queue in queues]),
        arrays.array("uuid", [queue.organisation for queue in queues]),
        arrays.array("int4", [arrays.int4(index + 1) for index, _, _ in leases]),
        arrays.array("uuid", [arrays.octets(delivery) for _, delivery, _ in leases]),
        arrays.array("int4", [arrays.octets(generation) for _, _, generation in leases]),
    ]
    if ordered:
        shape = writer.shape
        values += [
            int(shape.push).to_bytes(2, "big"),
            int(shape.pull).to_bytes(2, "big"),
            shape.horizon_ms.to_bytes(8, "big"),
        ]
    rows = await writer.run_packed(_ACK_ORDERED if ordered else _ACK, values)
    standings, settled, found, called = rows[0]
    return Acked(
        standings=[Standing(int(digit)) for digit in (standings or b"").decode()],
        done=indexes(settled),
        ordered=subscriptions_of(found),
        called=subscriptions_of(called),
    )


def indexes(settled: bytes | str | None) -> frozenset[int] | None:
    """The indexes in a statement's list of ordinals; None: all."""
    if settled is None:
        return None
    text = settled.decode() if isinstance(settled, bytes) else settled
    return frozenset(int(ordinal) - 1 for ordinal in text.split(",") if ordinal)
