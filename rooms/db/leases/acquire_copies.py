"""Lease given messages: copies that another broker sent, or those that a scan of the queue chose.

A copy is a hint, its row decides: whether the version it was made of can still be leased. The
payload and the publisher's headers come from the copy, everything else from the rows. Locks are
taken in the order of `rooms.db.leases.acquire`. This statement waits for them, because a copy may
arrive before the relay marked it as sent.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from rooms.db import pg_arrays
from rooms.db.leases.acquire import (
    ACCESS,
    ALWAYS_TRUE,
    IDENTITY_COLUMNS,
    MESSAGE_COLUMNS,
    TARGET_ENTRIES,
    LeasedRow,
    PackedTarget,
    SubscriptionAccess,
    unpack_int,
)
from rooms.db.pg_arrays import literal_array
from rooms.db.statement_parts import version_arrays
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import KeyId, RoomId, SubscriptionId

RELAYED_PULL: Final = "kind IN (3, 5)"
"""Rows due for PULL that are on their way to the broker or in it.

Their locations are `WorkLocation.PULL_TO_RELAY` and `PULL_AT_BROKER`.
"""

_ENTRIES: Final = ACCESS.format(
    entries=TARGET_ENTRIES + ", unnest($4::int8[]) AS lease_ms, unnest($5::int4[]) AS expected"
)

_LEASE: Final = f"""
WITH e AS MATERIALIZED ({_ENTRIES}), a AS MATERIALIZED (
    SELECT array_agg(standing = 3 ORDER BY n) AS may FROM e
), picked AS MATERIALIZED (
    SELECT v.k, v.n, o.* FROM (
        SELECT * FROM (
            SELECT unnest($6::int4[]) AS n, unnest($7::uuid[]) AS id, unnest($8::int4[]) AS generation,
                unnest($9::int4[]) AS attempt, generate_subscripts($6::int4[], 1) AS k
        ) v WHERE ((SELECT may FROM a))[v.n] AND {ALWAYS_TRUE.format("v.generation")} ORDER BY v.id
    ) v CROSS JOIN LATERAL (
        SELECT o.room_id, o.id, o.message_id, o.subscription_id, o.generation, o.attempt, o.priority, o.delay_ms,
            o.expires_at FROM outbox o
        WHERE o.room_id = ($1::int4[])[v.n] AND o.id = v.id AND o.generation = v.generation AND o.attempt = v.attempt
            AND o.subscription_id = ($2::uuid[])[v.n] AND (o.kind IN (1, 3, 5)) IS TRUE
            AND (coalesce(o.expires_at, 'infinity') > now()) IS TRUE AND (o.due_at <= now()) IS TRUE
        FOR UPDATE
    ) o
), read AS MATERIALIZED (
    SELECT p.*, {MESSAGE_COLUMNS} FROM picked p CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m
), gone AS (
    DELETE FROM outbox o USING read p WHERE o.room_id = ANY (ARRAY[p.room_id]) AND o.id = p.id
), d AS (
    UPDATE deliveries t SET state = 'leased', due_at = NULL, updated_at = now()
    FROM read p WHERE t.room_id = p.room_id AND t.id = p.id AND t.generation = p.generation
        AND t.attempt = p.attempt AND t.state = 'queued'
    RETURNING p.*, t.sequence
), lease AS (
    INSERT INTO leases (room_id, id, subscription_id, generation, until, key_id)
    SELECT room_id, id, subscription_id, generation,
        now() + ($4::int8[])[n] * interval '1 ms', ($10::uuid[])[n] FROM d
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id)
    SELECT $11::int4, $12::int8 - 1 + row_number() OVER (), room_id, message_id, 'leased', subscription_id, id,
        generation, attempt, event_type, event_version, correlation_id FROM d
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), n, standing, due, sent, NULL::uuid, NULL::int4, NULL::int4, NULL, NULL, NULL, NULL::int4,
    NULL, NULL::timestamptz, NULL::int4, NULL::int8, NULL::timestamptz, NULL::timestamptz, NULL, NULL
FROM e CROSS JOIN LATERAL (
    SELECT count(*) AS due, count(*) FILTER (WHERE kind = 5) AS sent FROM (
        SELECT o.kind FROM outbox o
        WHERE o.{RELAYED_PULL} AND -o.room_id = -e.room_id AND o.subscription_id = e.subscription_id
            AND o.due_at <= now() AND coalesce(o.expires_at, 'infinity') > now() LIMIT e.expected
    ) o
) due
UNION ALL
SELECT 0, k, NULL, NULL, NULL, id, generation, attempt, id::text, message_id::text, event_type, event_version, correlation_id,
    published_at, priority::int4, delay_ms, now() + ($4::int8[])[n] * interval '1 ms', {IDENTITY_COLUMNS}
FROM (SELECT d.*, (SELECT e.room_owner FROM e WHERE e.n = d.n) AS room_owner FROM d) d
"""  # noqa: S608 - constants of this package

_DUE_BY_QUEUE: Final = f"""
SELECT 0, v.k, EXISTS (
    SELECT FROM outbox o WHERE o.{RELAYED_PULL} AND -o.room_id = -v.room_id AND o.subscription_id = v.subscription_id
        AND o.due_at <= now() AND coalesce(o.expires_at, 'infinity') > now()
)
FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) WITH ORDINALITY AS v (room_id, subscription_id, k)
    CROSS JOIN LATERAL (SELECT FROM rooms r WHERE r.id = v.room_id AND NOT r.deleting LIMIT 1) r
    CROSS JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = v.room_id AND s.id = v.subscription_id LIMIT 1
    ) s
WHERE s.status = 'active'
UNION ALL SELECT 0, NULL, NULL
"""  # noqa: S608 - constants of this package

_FINISHED: Final = """
SELECT 0, v.k FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])
    WITH ORDINALITY AS v (room_id, id, generation, attempt, k)
WHERE EXISTS (SELECT FROM deliveries d WHERE d.room_id = v.room_id AND d.id = v.id) AND NOT EXISTS (
    SELECT FROM outbox o
    WHERE o.room_id = v.room_id AND o.id = v.id AND o.generation = v.generation AND o.attempt = v.attempt
)
UNION ALL SELECT 0, NULL
"""


_PENDING: Final = """
SELECT 0, v.k, greatest(extract(epoch FROM o.due_at - now()), 0)::float8
FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])
    WITH ORDINALITY AS v (room_id, id, generation, attempt, k) CROSS JOIN LATERAL (
        SELECT * FROM outbox o WHERE o.room_id = v.room_id AND o.id = v.id AND o.generation = v.generation
            AND o.attempt = v.attempt AND coalesce(o.expires_at, 'infinity') > now() LIMIT 1
    ) o
UNION ALL SELECT 0, NULL, NULL
"""


@dataclass(frozen=True, slots=True)
class CopyLeaseRequest:
    """Request leases of so many ms for copies that a broker sent from a queue.

    `count_limit`: count what is due, up to so many.
    """

    target: PackedTarget
    lease_ms: int
    copies: Sequence[DeliveryTask]
    count_limit: int
    key_id: KeyId | None = None
    """The key of the consumer that gets the leases."""


@dataclass(frozen=True, slots=True)
class CopyLeaseResult:
    """Hold the leased copies as `rows`, and their indexes in the same order.

    With access OPEN, the other copies cannot be leased any more because their version is over, or
    they are not due by PostgreSQL's clock. `pending_copies` returns which. Otherwise nothing is
    known of the other copies.
    """

    access: SubscriptionAccess
    due: int
    sent: int
    """The number of those due that are in the broker, as far as the relay has marked them."""
    rows: Sequence[LeasedRow]
    leased_indexes: Sequence[int]

    def unleased(self, copies: Sequence[DeliveryTask]) -> list[DeliveryTask]:
        """Return those of the requested copies that were not leased."""
        if len(self.leased_indexes) == len(copies):
            return []
        taken = frozenset(self.leased_indexes)
        return [copy for index, copy in enumerate(copies) if index not in taken]


async def lease_copies(
    writer: LogWriter, requests: Sequence[CopyLeaseRequest]
) -> list[CopyLeaseResult]:
    """Lease exactly these copies.

    No queue comes twice; one copy may.

    StorageUnavailableError: in doubt; messages that were leased unnoticed come back when their
    leases expire.
    """
    copies = [
        (index, at, copy)
        for index, one in enumerate(requests)
        for at, copy in enumerate(one.copies)
    ]
    rows = await writer.run_packed(
        _LEASE,
        (
            pg_arrays.binary_array("int4", [one.target.room for one in requests]),
            pg_arrays.binary_array("uuid", [one.target.subscription for one in requests]),
            pg_arrays.binary_array("uuid", [one.target.organisation for one in requests]),
            pg_arrays.binary_array(
                "int8", [pg_arrays.int8_element(one.lease_ms) for one in requests]
            ),
            pg_arrays.binary_array(
                "int4", [pg_arrays.int4_element(one.count_limit) for one in requests]
            ),
            pg_arrays.binary_array(
                "int4", [pg_arrays.int4_element(index + 1) for index, _, _ in copies]
            ),
            pg_arrays.binary_array(
                "uuid", [pg_arrays.uuid_from_text(copy.delivery_id) for _, _, copy in copies]
            ),
            pg_arrays.binary_array(
                "int4", [pg_arrays.int4_element(copy.generation) for _, _, copy in copies]
            ),
            pg_arrays.binary_array(
                "int4", [pg_arrays.int4_element(copy.attempt) for _, _, copy in copies]
            ),
            pg_arrays.binary_array(
                "uuid", [pg_arrays.uuid_or_null(one.key_id) for one in requests]
            ),
        ),
    )
    heads, found = rows[: len(requests)], rows[len(requests) :]
    of_queue: list[list[LeasedRow]] = [[] for _ in requests]
    taken: list[list[int]] = [[] for _ in requests]
    for ordinal, row in sorted((unpack_int(row[0]), row[4:]) for row in found):
        index, at, copy = copies[ordinal - 1]
        of_queue[index].append(cast("LeasedRow", (*row, copy.headers, copy.payload)))
        taken[index].append(at)
    return [
        CopyLeaseResult(
            SubscriptionAccess(unpack_int(head[1])),
            unpack_int(head[2]),
            unpack_int(head[3]),
            own,
            indexes,
        )
        for head, own, indexes in zip(heads, of_queue, taken, strict=True)
    ]


async def finished_copies(writer: LogWriter, copies: Sequence[DeliveryTask]) -> list[DeliveryTask]:
    """Return the copies whose version can no longer be leased, unless their delivery has no row."""
    return [
        copies[ordinal - 1] for (ordinal,) in await writer.run(_FINISHED, version_arrays(copies))
    ]


async def pending_copies(writer: LogWriter, copies: Sequence[DeliveryTask]) -> dict[int, float]:
    """Return by index the copies that can still be leased, and in how many seconds."""
    return {
        ordinal - 1: wait_s
        for ordinal, wait_s in await writer.run(_PENDING, version_arrays(copies))
    }


async def due_by_queue(
    writer: LogWriter, queues: Sequence[tuple[RoomId, SubscriptionId]]
) -> dict[int, bool]:
    """Return by index those queues that are active; true if a message is due that is not leased."""
    parameters = {
        "room": literal_array(room for room, _ in queues),
        "subscription": literal_array(identity for _, identity in queues),
    }
    return {ordinal - 1: due for ordinal, due in await writer.run(_DUE_BY_QUEUE, parameters)}
