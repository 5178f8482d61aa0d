"""Taking what is due for PULL subscriptions: many requests in one statement. `rooms.storage.leases` says how."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from rooms.domain.copy import PRIORITIES
from rooms.domain.ids import DeliveryId
from rooms.storage import arrays
from rooms.storage.leases import ENTRIES, MAX_BYTES, ONE_ROW, STANDING, Queue, Row, Standing, number
from rooms.storage.writer import Writer

_ROW: Final = 6
_ORPHANS: Final = _ROW + 3
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


_EPOCH: Final = "'2000-01-01 00:00:00+00'::timestamptz"
"""Where PostgreSQL's timestamps begin."""
_OPEN: Final = STANDING.format(entries=ENTRIES + ", unnest($4::int4[]) AS most, unnest($5::int8[]) AS lease_ms")

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
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
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
            of_queue[number(row[0]) - 1].append(cast("Row", row[_ROW:]))
    return [
        Taken(
            Standing(number(head[1])),
            own,
            full or len(own) >= one.most or head[_ORPHANS] is not None,
            number(head[2]),
            None if head[3] is None else (number(head[3]), number(head[4])),
            () if head[_ORPHANS] is None else [DeliveryId(name) for name in head[_ORPHANS].decode().split(",")],
        )
        for head, own, one in zip(heads, of_queue, wanted, strict=True)
    ]


def _place(row: tuple[bytes | None, ...]) -> bytes:
    return row[_ROW - 1] or b""
