"""Scan what waits for a PULL subscription, a window at a time, without leasing or locking it."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from rooms.db.leases.acquire import (
    ACCESS_TO_ONE,
    EPOCH,
    MAX_BYTES,
    MESSAGE_COLUMNS,
    PUBLISHER,
    SubscriptionAccess,
)
from rooms.db.pg_arrays import literal_array, text_array
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, MessageId, OrganisationId, RoomId, SubscriptionId

WINDOW_SIZE: Final = 500
"""One statement reads so many messages, and no more than 4 MiB of payload, except for a single
larger message.
"""
PRIORITY_LEVELS: Final = 10
NIL_ID: Final = "00000000-0000-0000-0000-000000000000"


# What PostgreSQL carries is found by priority. What another broker carries is found only by due
# time, because its index has no other column.
_SCAN_TEMPLATE: Final = f"""
WITH e AS MATERIALIZED ({ACCESS_TO_ONE}), seen AS MATERIALIZED (
    SELECT row_number() OVER () AS k, o.* FROM (
        SELECT o.* FROM e CROSS JOIN LATERAL (
            SELECT o.* FROM {{levels}} p (level), LATERAL (
                SELECT p.level, o.room_id, o.id, o.message_id, o.generation, o.attempt, o.priority, o.due_at,
                    o.delay_ms, o.expires_at, e.room_owner
                FROM outbox o
                WHERE {{carried}} AND -o.room_id = -e.room_id AND o.subscription_id = e.subscription_id
                    AND o.due_at >= {EPOCH} + (%(due)s::int8[])[10 - p.level] * interval '1 us'
                    AND (o.due_at > {EPOCH} + (%(due)s::int8[])[10 - p.level] * interval '1 us'
                        OR o.id > (%(low)s::uuid[])[10 - p.level])
                    AND o.due_at <= now() AND coalesce(o.expires_at, 'infinity') > now()
                ORDER BY o.due_at, o.id LIMIT {WINDOW_SIZE}
            ) o LIMIT {WINDOW_SIZE}
        ) o WHERE e.standing = 3
    ) o
), read AS MATERIALIZED (
    SELECT s.*, {MESSAGE_COLUMNS}, m.headers, m.payload, coalesce(sum(octet_length(m.payload)) OVER (
        ORDER BY s.k ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) < {MAX_BYTES} AS fits
    FROM seen s LEFT JOIN LATERAL (
        SELECT {MESSAGE_COLUMNS}, CASE WHEN wanted THEN m.headers END AS headers, CASE WHEN wanted THEN m.payload END AS payload
        FROM (
            SELECT m.*, %(event_types)s::text[] = '{{{{}}}}' OR m.event_type = ANY (%(event_types)s::text[]) AS wanted
            FROM messages m WHERE m.room_id = s.room_id AND m.id = s.message_id LIMIT 1
        ) m
    ) m ON true
)
SELECT 0, NULL::int8, standing, (SELECT count(*) FROM seen), (extract(epoch FROM now() - {EPOCH}) * 1000000)::int8,
    NULL, NULL, NULL::int4, NULL::int4, NULL, NULL::int4, NULL, NULL::timestamptz, NULL::bytea, NULL::bytea,
    NULL::int8, NULL::timestamptz, NULL, NULL, NULL FROM e
UNION ALL
SELECT * FROM (
    SELECT 0, k, level, priority, (extract(epoch FROM due_at - {EPOCH}) * 1000000)::int8, id::text, message_id::text,
        generation, attempt, event_type, event_version, correlation_id, published_at, headers, payload,
        delay_ms, expires_at, {PUBLISHER}, ordering_key, business_key FROM read WHERE fits ORDER BY k
) r
"""  # noqa: S608 - constants of this package
_SCAN_EMBEDDED: Final = _SCAN_TEMPLATE.format(
    levels="generate_series(9, 0, -1)", carried="o.kind = 1 AND o.priority = p.level"
)
_SCAN_RELAYED: Final = _SCAN_TEMPLATE.format(
    levels="generate_series(0, 0)", carried="o.kind IN (3, 5)"
)

DuePosition = tuple[int, str]
"""A due time in PostgreSQL's µs and an id: the position behind which to continue, in this order."""
START: Final[DuePosition] = (0, NIL_ID)


class ScannedMessage(NamedTuple):
    """Hold a waiting message as it was scanned; without payload if its type is not wanted."""

    level: int
    priority: int
    due_us: int
    delivery: DeliveryId
    message: MessageId
    generation: int
    attempt: int
    event_type: str | None
    """None: its message row is gone."""
    version: int
    correlation_id: str
    published_at: datetime
    headers: bytes | None
    payload: bytes | None
    delay_ms: int
    expires_at: datetime | None
    publisher: str | None
    ordering_key: str | None
    business_key: str | None


@dataclass(frozen=True, slots=True)
class ScanWindow:
    """Hold the scanned messages in their order; `is_last`: nothing waits behind them.

    `at_us`: PostgreSQL's time.
    """

    access: SubscriptionAccess
    messages: Sequence[ScannedMessage]
    is_last: bool
    at_us: int


async def scan(
    writer: LogWriter,
    target: tuple[RoomId, SubscriptionId, OrganisationId],
    event_types: frozenset[str],
    positions: Mapping[int, DuePosition],
) -> ScanWindow:
    """Return the next window of a queue: what waits behind `positions`, by level.

    A level is a priority; with another broker there is only level 0.
    """
    room, subscription, organisation = target
    parameters = {
        "room": room,
        "subscription": subscription,
        "organisation": organisation,
        "event_types": text_array(sorted(event_types)),
        "due": literal_array(
            positions.get(level, START)[0] for level in range(PRIORITY_LEVELS - 1, -1, -1)
        ),
        "low": literal_array(
            positions.get(level, START)[1] for level in range(PRIORITY_LEVELS - 1, -1, -1)
        ),
    }
    head, *rows = await writer.run(
        _SCAN_RELAYED if writer.broker_mode.is_relayed else _SCAN_EMBEDDED, parameters
    )
    found = [ScannedMessage(*row[1:]) for row in rows]
    return ScanWindow(
        SubscriptionAccess(head[1]), found, head[2] < WINDOW_SIZE and len(found) == head[2], head[3]
    )
