"""Leases of exactly these messages: copies that another broker handed out, or what a look through the queue chose.

A copy is a hint, its row the truth: whether the step it stands for still waits to be taken. The payload and the
publisher's headers come from the copy, everything else from the rows. Locks are taken in the order of
`rooms.storage.leases`; this statement waits for them, because a copy may be here before the relay's mark that it was
sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from rooms.domain.copy import Copy
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.storage import arrays
from rooms.storage.leases import ENTRIES, ONE_ROW, STANDING, Queue, Row, Standing, number
from rooms.storage.literals import array
from rooms.storage.writer import Writer

AWAY: Final = "kind IN (3, 5)"
"""Rows that are due to PULL, on their way or in the broker (Place.PULL_TO_SEND and PULL_SENT)."""

_OPEN: Final = STANDING.format(entries=ENTRIES + ", unnest($4::int8[]) AS lease_ms, unnest($5::int4[]) AS expected")

_LEASE: Final = f"""
WITH e AS MATERIALIZED ({_OPEN}), a AS MATERIALIZED (
    SELECT array_agg(standing = 3 ORDER BY n) AS may FROM e
), picked AS MATERIALIZED (
    SELECT v.k, v.n, o.* FROM (
        SELECT * FROM (
            SELECT unnest($6::int4[]) AS n, unnest($7::uuid[]) AS id, unnest($8::int4[]) AS generation,
                unnest($9::int4[]) AS attempt, generate_subscripts($6::int4[], 1) AS k
        ) v WHERE ((SELECT may FROM a))[v.n] AND {ONE_ROW.format("v.generation")} ORDER BY v.id
    ) v CROSS JOIN LATERAL (
        SELECT o.room_id, o.id, o.message_id, o.subscription_id, o.generation, o.attempt, o.expires_at FROM outbox o
        WHERE o.room_id = ($1::int4[])[v.n] AND o.id = v.id AND o.generation = v.generation AND o.attempt = v.attempt
            AND o.subscription_id = ($2::uuid[])[v.n] AND (o.kind IN (1, 3, 5)) IS TRUE
            AND (coalesce(o.expires_at, 'infinity') > now()) IS TRUE AND (o.due_at <= now()) IS TRUE
        FOR UPDATE
    ) o
), read AS MATERIALIZED (
    SELECT p.*, m.event_type, m.event_version, m.correlation_id, m.published_at FROM picked p CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m
), gone AS (
    DELETE FROM outbox o USING read p WHERE o.room_id = ANY (ARRAY[p.room_id]) AND o.id = p.id
), d AS (
    UPDATE deliveries t SET state = 'leased', due_at = NULL, updated_at = now()
    FROM read p WHERE t.room_id = p.room_id AND t.id = p.id AND t.generation = p.generation
        AND t.attempt = p.attempt AND t.state = 'queued'
    RETURNING p.*
), lease AS (
    INSERT INTO leases (room_id, id, subscription_id, generation, until)
    SELECT room_id, id, subscription_id, generation,
        least(now() + ($4::int8[])[n] * interval '1 ms', expires_at) FROM d
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id)
    SELECT $10::int4, $11::int8 - 1 + row_number() OVER (), room_id, message_id, 'leased', subscription_id, id,
        generation, attempt, event_type, event_version, correlation_id FROM d
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), n, standing, due, sent, NULL::uuid, NULL::int4, NULL::int4, NULL, NULL, NULL, NULL::int4,
    NULL, NULL::timestamptz
FROM e CROSS JOIN LATERAL (
    SELECT count(*) AS due, count(*) FILTER (WHERE kind = 5) AS sent FROM (
        SELECT o.kind FROM outbox o
        WHERE o.{AWAY} AND -o.room_id = -e.room_id AND o.subscription_id = e.subscription_id
            AND o.due_at <= now() AND coalesce(o.expires_at, 'infinity') > now() LIMIT e.expected
    ) o
) due
UNION ALL
SELECT 0, k, NULL, NULL, NULL, id, generation, attempt, id::text, message_id::text, event_type, event_version, correlation_id,
    published_at FROM d
"""  # noqa: S608 - text of our own

_LOOK: Final = f"""
SELECT 0, v.k, EXISTS (
    SELECT FROM outbox o WHERE o.{AWAY} AND -o.room_id = -v.room_id AND o.subscription_id = v.subscription_id
        AND o.due_at <= now() AND coalesce(o.expires_at, 'infinity') > now()
)
FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) WITH ORDINALITY AS v (room_id, subscription_id, k)
    CROSS JOIN LATERAL (SELECT FROM rooms r WHERE r.id = v.room_id AND NOT r.deleting LIMIT 1) r
    CROSS JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = v.room_id AND s.id = v.subscription_id LIMIT 1
    ) s
WHERE s.status = 'active'
UNION ALL SELECT 0, NULL, NULL
"""  # noqa: S608 - text of our own

_OVER: Final = """
SELECT 0, v.k FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])
    WITH ORDINALITY AS v (room_id, id, generation, attempt, k)
WHERE EXISTS (SELECT FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id) AND NOT EXISTS (
    SELECT FROM outbox o
    WHERE o.room_id = v.room_id AND o.id = v.id AND o.generation = v.generation AND o.attempt = v.attempt
)
UNION ALL SELECT 0, NULL
"""


_TO_COME: Final = """
SELECT 0, v.k, greatest(extract(epoch FROM o.due_at - now()), 0)::float8
FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])
    WITH ORDINALITY AS v (room_id, id, generation, attempt, k) CROSS JOIN LATERAL (
        SELECT * FROM outbox o WHERE o.room_id = v.room_id AND o.id = v.id AND o.generation = v.generation
            AND o.attempt = v.attempt AND coalesce(o.expires_at, 'infinity') > now() LIMIT 1
    ) o
UNION ALL SELECT 0, NULL, NULL
"""


@dataclass(frozen=True, slots=True)
class Handed:
    """What a broker handed out of a queue, to be leased for so many ms; `expected`: count what is due, up to so many."""

    queue: Queue
    lease_ms: int
    copies: Sequence[Copy]
    expected: int


@dataclass(frozen=True, slots=True)
class Leased:
    """What became of it. `rows`: the copies that are leased now, and `taken` their indexes, in their order.

    Where the standing is OPEN, the other copies are of steps that are over, so that nobody can lease them any more, or
    that are not due by PostgreSQL's clock (`to_come` tells). Otherwise nothing is known of any of them.
    """

    standing: Standing
    due: int
    sent: int
    """How many of those due are in the broker already, as far as the relay has marked them."""
    rows: Sequence[Row]
    taken: Sequence[int]

    def left(self, copies: Sequence[Copy]) -> list[Copy]:
        """Those of the copies that were handed out which were not taken."""
        if len(self.taken) == len(copies):
            return []
        taken = frozenset(self.taken)
        return [copy for index, copy in enumerate(copies) if index not in taken]


async def lease(writer: Writer, handed: Sequence[Handed]) -> list[Leased]:
    """Lease these very copies. No queue comes twice; one copy may.

    StorageUnavailableError: in doubt; what was leased for nobody comes back when its lease ends.
    """
    copies = [(index, at, copy) for index, one in enumerate(handed) for at, copy in enumerate(one.copies)]
    rows = await writer.run_packed(
        _LEASE,
        (
            arrays.array("int4", [one.queue.room for one in handed]),
            arrays.array("uuid", [one.queue.subscription for one in handed]),
            arrays.array("uuid", [one.queue.organisation for one in handed]),
            arrays.array("int8", [arrays.int8(one.lease_ms) for one in handed]),
            arrays.array("int4", [arrays.int4(one.expected) for one in handed]),
            arrays.array("int4", [arrays.int4(index + 1) for index, _, _ in copies]),
            arrays.array("uuid", [arrays.uuid_of(copy.delivery_id) for _, _, copy in copies]),
            arrays.array("int4", [arrays.int4(copy.generation) for _, _, copy in copies]),
            arrays.array("int4", [arrays.int4(copy.attempt) for _, _, copy in copies]),
        ),
    )
    heads, found = rows[: len(handed)], rows[len(handed) :]
    of_queue: list[list[Row]] = [[] for _ in handed]
    taken: list[list[int]] = [[] for _ in handed]
    for ordinal, row in sorted((number(row[0]), row[4:]) for row in found):
        index, at, copy = copies[ordinal - 1]
        of_queue[index].append(cast("Row", (*row, copy.headers, copy.payload)))
        taken[index].append(at)
    return [
        Leased(Standing(number(head[1])), number(head[2]), number(head[3]), own, indexes)
        for head, own, indexes in zip(heads, of_queue, taken, strict=True)
    ]


async def over(writer: Writer, copies: Sequence[Copy]) -> list[Copy]:
    """Those of the copies whose step nobody can take any more; not those of deliveries without a row."""
    return [copies[ordinal - 1] for (ordinal,) in await writer.run(_OVER, _steps(copies))]


async def to_come(writer: Writer, copies: Sequence[Copy]) -> dict[int, float]:
    """By index, those of the copies that can be leased still, and in how many seconds."""
    return {ordinal - 1: wait_s for ordinal, wait_s in await writer.run(_TO_COME, _steps(copies))}


async def look(writer: Writer, queues: Sequence[tuple[RoomId, SubscriptionId]]) -> dict[int, bool]:
    """By index, those queues that hand messages out; true where one is due that is not leased."""
    asked = {"room": array(room for room, _ in queues), "subscription": array(identity for _, identity in queues)}
    return {ordinal - 1: due for ordinal, due in await writer.run(_LOOK, asked)}


def _steps(copies: Sequence[Copy]) -> dict[str, str]:
    return {
        "room": array(copy.room_id for copy in copies),
        "id": array(copy.delivery_id for copy in copies),
        "generation": array(copy.generation for copy in copies),
        "attempt": array(copy.attempt for copy in copies),
    }
