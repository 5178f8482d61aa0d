"""Lease what is due for PULL subscriptions, many requests in one statement.

Values travel in arrays of PostgreSQL's binary form, as for a publish. A request names its
subscription by an entry (room, subscription, organisation). The statement itself checks the owner
and whether it may be pulled.

Locks are always taken in one order, work row (outbox, leases) before delivery and by id, so that no
two statements can deadlock.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, cast

from rooms.db import pg_arrays
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.watermarks import NO_WATERMARKS, DueWatermarks

MAX_BYTES: Final = 4 * 1024 * 1024
"""A statement takes no more payload than this, except for a single larger message."""


class SubscriptionAccess(IntEnum):
    """Say how an organisation may use a subscription."""

    NONE = 0
    """There is none, or another organisation is its subscriber."""
    PUSH = 1
    STOPPED = 2
    """Paused or disabled: nothing is leased, existing leases may still be settled."""
    OPEN = 3
    NATIVE = 4
    """Its queue is read at the broker, not here."""


@dataclass(frozen=True, slots=True)
class PackedTarget:
    """Hold a subscription and the organisation that asks for it, packed for a statement."""

    room: bytes
    subscription: bytes
    organisation: bytes

    @classmethod
    def of(
        cls, room: RoomId, subscription: SubscriptionId, organisation: OrganisationId
    ) -> "PackedTarget":
        """Pack the entry for these ids."""
        return cls(
            pg_arrays.room_element(room),
            pg_arrays.uuid_from_text(subscription),
            pg_arrays.uuid_from_text(organisation),
        )


LeasedRow = tuple[
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes,
    bytes | None,
    bytes | None,
    bytes | None,
    bytes | None,
    bytes,
]
"""(delivery id as 16 bytes, generation, attempt, delivery id as text, message id as text, event
type, version, correlation id, time of publish, priority, delay in ms, end of the lease, expiry,
publisher as text, a JSON object of keys and sequence, headers, payload), each as PostgreSQL sends
it in binary.
"""

# Plans are kept, and made anew whenever the tables were analysed, which may be while they are
# empty. Then the planner would prefer to scan "the one row" to looking up a thousand, and would
# still do so with a million. So nothing here leaves it a choice. Rows are read by a LATERAL with a
# limit or a lock, one at a time. Rows of the work tables are changed by a join on "= ANY
# (ARRAY[…])", which only an index look-up serves. Rows of other tables are changed by a join on
# what the planner takes for one row. Minus signs, "IS NOT DISTINCT FROM" and "IS TRUE" keep it from
# every index but the intended one.
ACCESS: Final = """
    SELECT e.*, r.owner AS room_owner, s.max_receives, s.version - s.lane_changes AS policy, coalesce(s.ordered, r.ordered) AS ordered,
        CASE WHEN r.here IS NULL OR s.ours IS NOT TRUE OR s.status = 'deleted' THEN 0
        WHEN s.type <> 'PULL' THEN 1 WHEN s.native_password IS NOT NULL THEN 4 WHEN s.status <> 'active' THEN 2 ELSE 3 END AS standing
    FROM ({entries}) e LEFT JOIN LATERAL (
        SELECT true AS here, ordered, organisation_id AS owner FROM rooms r WHERE r.id = e.room_id AND NOT r.deleting LIMIT 1
    ) r ON true LEFT JOIN LATERAL (
        SELECT s.*, s.organisation_id IS NOT DISTINCT FROM e.organisation_id AS ours FROM subscriptions s WHERE s.room_id = e.room_id AND s.id = e.subscription_id LIMIT 1
    ) s ON true
"""

ACCESS_TO_ONE: Final = ACCESS.format(
    entries="""SELECT %(room)s::int4 AS room_id, %(subscription)s::uuid AS subscription_id,
    %(organisation)s::uuid AS organisation_id"""
)
"""The access to one subscription, given as the parameters room, subscription and organisation."""

ALWAYS_TRUE: Final = "({0} # 0) = ({0} | 0) AND ({0} + 0) = ({0} - 0)"
"""Is true of every integer; the planner thinks it improbable."""

LIVE_LEASES: Final = f"""
    SELECT v.k, l.* FROM (SELECT * FROM {{wanted}} WHERE {{may}} AND {ALWAYS_TRUE.format("v.generation")} ORDER BY v.id) v
    CROSS JOIN LATERAL (
        SELECT l.room_id, l.id, l.generation FROM leases l
        WHERE l.room_id = {{room}} AND l.id = v.id AND l.generation = v.generation
            AND l.subscription_id = {{subscription}}
            AND (l.until > now()) IS TRUE
        FOR UPDATE
    ) l
"""  # noqa: S608 - constants of this package
"""Those leases of `wanted` that have not expired. An expired one is over even before maintenance
has ended it.
"""

TARGET_ENTRIES: Final = """SELECT unnest($1::int4[]) AS room_id, unnest($2::uuid[]) AS subscription_id,
    unnest($3::uuid[]) AS organisation_id, generate_subscripts($1::int4[], 1) AS n"""


def unpack_int(packed: bytes | None) -> int:
    """Return the integer that PostgreSQL sent in binary; null is 0."""
    return int.from_bytes(packed or b"", "big", signed=True)


def parse_indexes(ordinals: bytes | str | None) -> frozenset[int] | None:
    """Return the indexes in a statement's list of ordinals; None: all."""
    if ordinals is None:
        return None
    text = ordinals.decode() if isinstance(ordinals, bytes) else ordinals
    return frozenset(int(ordinal) - 1 for ordinal in text.split(",") if ordinal)


MESSAGE_COLUMNS: Final = """m.event_type, m.event_version, m.correlation_id, m.published_at, m.ordering_key, m.business_key,
        m.publisher_id, m.publisher_organisation_id, m.application"""
PUBLISHER: Final = """CASE WHEN publisher_id IS NOT NULL
        THEN coalesce(publisher_organisation_id, room_owner)::text || coalesce('/' || application, '') END"""
IDENTITY_COLUMNS: Final = f"""expires_at, {PUBLISHER},
    CASE WHEN ordering_key IS NOT NULL OR business_key IS NOT NULL THEN json_strip_nulls(json_build_object(
        'ordering_key', ordering_key, 'sequence', sequence, 'business_key', business_key))::text END"""
"""Expiry, publisher and keys of a leased row, as a `LeasedRow` has them."""

_ROW_OFFSET: Final = 6
_ORPHANS_COLUMN: Final = _ROW_OFFSET + 3


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """Request at most so many messages of a queue, leased for so many ms to a consumer's key."""

    target: PackedTarget
    limit: int
    lease_ms: int
    watermarks: DueWatermarks = NO_WATERMARKS
    key_id: KeyId | None = None


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """Hold the messages that were leased from one queue.

    `has_more`: there may be more right now.

    `at_us`: PostgreSQL's time; `last`: priority and due time (None: there was none) of the last
    message in its order; `orphans`: due deliveries without a message row. They stay in the queue,
    before all others.
    """

    access: SubscriptionAccess
    rows: Sequence[LeasedRow]
    has_more: bool
    at_us: int
    last: tuple[int, int] | None
    orphans: Sequence[DeliveryId] = ()


EPOCH: Final = "'2000-01-01 00:00:00+00'::timestamptz"
"""The origin of PostgreSQL's timestamps."""
_ENTRIES: Final = ACCESS.format(
    entries=TARGET_ENTRIES + ", unnest($4::int4[]) AS most, unnest($5::int8[]) AS lease_ms"
)

# Expiry ends what waits. A lease runs to its end, and is acknowledged until then.
_ACQUIRE: Final = f"""
WITH e AS MATERIALIZED ({_ENTRIES}), picked AS MATERIALIZED (
    SELECT * FROM (SELECT e.n, e.lease_ms, e.room_owner, row_number() OVER () AS k, o.* FROM e, LATERAL (
        SELECT o.* FROM generate_series(9, 0, -1) p (priority), LATERAL (
            SELECT o.room_id, o.id, o.message_id, o.subscription_id, o.generation, o.attempt, o.delay_ms, o.expires_at,
                o.priority, o.due_at FROM outbox o
            WHERE o.kind = 1 AND -o.room_id = -e.room_id AND o.subscription_id = e.subscription_id
                AND o.priority = p.priority
                AND o.due_at >= {EPOCH} + ($6::int8[])[e.n * 10 - p.priority] * interval '1 us' AND o.due_at <= now() AND coalesce(o.expires_at, 'infinity') > now()
            ORDER BY o.due_at LIMIT e.most FOR UPDATE SKIP LOCKED
        ) o LIMIT e.most
    ) o WHERE e.standing = 3) p WHERE {ALWAYS_TRUE.format("generation")}
), read AS MATERIALIZED (
    SELECT p.*, {MESSAGE_COLUMNS}, m.headers, m.payload,
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
    RETURNING p.*, t.sequence
), lease AS (
    INSERT INTO leases (room_id, id, subscription_id, generation, until, key_id)
    SELECT room_id, id, subscription_id, generation, now() + lease_ms * interval '1 ms', ($7::uuid[])[n] FROM d
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id)
    SELECT $8::int4, $9::int8 - 1 + row_number() OVER (), room_id, message_id, 'leased', subscription_id, id, generation,
        attempt, event_type, event_version, correlation_id FROM d
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), n, standing, now(), (SELECT p.priority FROM read p WHERE p.n = e.n AND p.fits ORDER BY k DESC LIMIT 1),
    (SELECT p.due_at FROM read p WHERE p.n = e.n AND p.fits ORDER BY k DESC LIMIT 1), 0::int8, NULL::uuid, NULL::int4, NULL::int4,
    CASE WHEN (SELECT count(*) FROM picked) > (SELECT count(*) FROM read) THEN (
        SELECT string_agg(p.id::text, ',') FROM picked p WHERE p.n = e.n AND NOT EXISTS (SELECT FROM read r WHERE r.k = p.k)
    ) END, NULL, NULL, NULL::int4, NULL, NULL::timestamptz, NULL::int4, NULL::int8, NULL::timestamptz, NULL::timestamptz, NULL, NULL,
    NULL::bytea, NULL::bytea FROM e
UNION ALL
SELECT 0, n, NULL, NULL, NULL, NULL, k, id, generation, attempt, id::text, message_id::text, event_type, event_version, correlation_id,
    published_at, priority::int4, delay_ms, now() + lease_ms * interval '1 ms', {IDENTITY_COLUMNS}, headers, payload FROM d
"""  # noqa: S608 - constants of this package


async def acquire(writer: LogWriter, requests: Sequence[AcquireRequest]) -> list[AcquireResult]:
    """Lease what is due, by priority and due time.

    No queue comes twice.

    StorageUnavailableError: in doubt; messages that were leased unnoticed come back when their
    leases expire.
    """
    rows = await writer.run_packed(
        _ACQUIRE,
        (
            pg_arrays.binary_array("int4", [one.target.room for one in requests]),
            pg_arrays.binary_array("uuid", [one.target.subscription for one in requests]),
            pg_arrays.binary_array("uuid", [one.target.organisation for one in requests]),
            pg_arrays.binary_array("int4", [pg_arrays.int4_element(one.limit) for one in requests]),
            pg_arrays.binary_array(
                "int8", [pg_arrays.int8_element(one.lease_ms) for one in requests]
            ),
            pg_arrays.binary_array(
                "int8", [pg_arrays.int8_element(low) for one in requests for low in one.watermarks]
            ),
            pg_arrays.binary_array(
                "uuid", [pg_arrays.uuid_or_null(one.key_id) for one in requests]
            ),
        ),
    )
    heads, found = rows[: len(requests)], rows[len(requests) :]
    found.sort(key=_sort_key)
    full = sum([len(row[-1] or b"") for row in found]) >= MAX_BYTES
    of_queue: list[list[LeasedRow]] = [[] for _ in requests]
    if len(requests) == 1:
        of_queue[0] = cast("list[LeasedRow]", [row[_ROW_OFFSET:] for row in found])
    else:
        for row in found:
            of_queue[unpack_int(row[0]) - 1].append(cast("LeasedRow", row[_ROW_OFFSET:]))
    return [
        AcquireResult(
            SubscriptionAccess(unpack_int(head[1])),
            own,
            full or len(own) >= one.limit or head[_ORPHANS_COLUMN] is not None,
            unpack_int(head[2]),
            None if head[3] is None else (unpack_int(head[3]), unpack_int(head[4])),
            ()
            if head[_ORPHANS_COLUMN] is None
            else [DeliveryId(name) for name in head[_ORPHANS_COLUMN].decode().split(",")],
        )
        for head, own, one in zip(heads, of_queue, requests, strict=True)
    ]


def _sort_key(row: tuple[bytes | None, ...]) -> bytes:
    return row[_ROW_OFFSET - 1] or b""
