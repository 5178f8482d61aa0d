"""Looking through what waits for a PULL subscription, a window at a time, without taking or locking any of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from rooms.domain.ids import DeliveryId, MessageId, OrganisationId, RoomId, SubscriptionId
from rooms.storage.leases import MAX_BYTES, STANDING, Standing
from rooms.storage.literals import array, text_array
from rooms.storage.writer import Writer

WINDOW: Final = 500
"""So many messages are looked at by one statement, and no more than 4 MiB of payload, one message apart."""
LEVELS: Final = 10
NOBODY: Final = "00000000-0000-0000-0000-000000000000"

_ASKED: Final = STANDING.format(
    entries="""SELECT %(room)s::int4 AS room_id, %(subscription)s::uuid AS subscription_id,
    %(organisation)s::uuid AS organisation_id"""
)
_EPOCH: Final = "'2000-01-01 00:00:00+00'::timestamptz"

# What PostgreSQL carries is found by priority; what another broker does, by due time alone, as its index has no other.
_SIFT: Final = f"""
WITH e AS MATERIALIZED ({_ASKED}), seen AS MATERIALIZED (
    SELECT row_number() OVER () AS k, o.* FROM (
        SELECT o.* FROM e CROSS JOIN LATERAL (
            SELECT o.* FROM {{levels}} p (level), LATERAL (
                SELECT p.level, o.room_id, o.id, o.message_id, o.generation, o.attempt, o.priority, o.due_at
                FROM outbox o
                WHERE {{carried}} AND -o.room_id = -e.room_id AND o.subscription_id = e.subscription_id
                    AND o.due_at >= {_EPOCH} + (%(due)s::int8[])[10 - p.level] * interval '1 us'
                    AND (o.due_at > {_EPOCH} + (%(due)s::int8[])[10 - p.level] * interval '1 us'
                        OR o.id > (%(low)s::uuid[])[10 - p.level])
                    AND o.due_at <= now() AND coalesce(o.expires_at, 'infinity') > now()
                ORDER BY o.due_at, o.id LIMIT {WINDOW}
            ) o LIMIT {WINDOW}
        ) o WHERE e.standing = 3
    ) o
), read AS MATERIALIZED (
    SELECT s.*, m.event_type, m.event_version, m.correlation_id, m.published_at, m.headers, m.payload, coalesce(sum(octet_length(m.payload)) OVER (
        ORDER BY s.k ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) < {MAX_BYTES} AS fits
    FROM seen s LEFT JOIN LATERAL (
        SELECT m.event_type, m.event_version, m.correlation_id, m.published_at, CASE WHEN wanted THEN m.headers END AS headers, CASE WHEN wanted THEN m.payload END AS payload
        FROM (
            SELECT m.*, %(event_types)s::text[] = '{{{{}}}}' OR m.event_type = ANY (%(event_types)s::text[]) AS wanted
            FROM messages m WHERE m.room_id = s.room_id AND m.id = s.message_id LIMIT 1
        ) m
    ) m ON true
)
SELECT 0, NULL::int8, standing, (SELECT count(*) FROM seen), (extract(epoch FROM now() - {_EPOCH}) * 1000000)::int8,
    NULL, NULL, NULL::int4, NULL::int4, NULL, NULL::int4, NULL, NULL::timestamptz, NULL::bytea, NULL::bytea FROM e
UNION ALL
SELECT * FROM (
    SELECT 0, k, level, priority, (extract(epoch FROM due_at - {_EPOCH}) * 1000000)::int8, id::text, message_id::text,
        generation, attempt, event_type, event_version, correlation_id, published_at, headers, payload FROM read WHERE fits ORDER BY k
) r
"""  # noqa: S608 - text of our own
_HERE: Final = _SIFT.format(levels="generate_series(9, 0, -1)", carried="o.kind = 1 AND o.priority = p.level")
_AWAY: Final = _SIFT.format(levels="generate_series(0, 0)", carried="o.kind IN (3, 5)")

Low = tuple[int, str]
"""A due time in PostgreSQL's µs and an id: what comes after it, in this order."""
START: Final[Low] = (0, NOBODY)


class Found(NamedTuple):
    """A message that waits, as it was when it was looked at; no payload where it has a type that is not wanted."""

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


@dataclass(frozen=True, slots=True)
class Window:
    """What was looked at, in its order; `whole`: nothing waits behind it. `at_us`: PostgreSQL's time."""

    standing: Standing
    found: Sequence[Found]
    whole: bool
    at_us: int


async def sift(
    writer: Writer,
    queue: tuple[RoomId, SubscriptionId, OrganisationId],
    event_types: frozenset[str],
    lows: Mapping[int, Low],
) -> Window:
    """The next window of a queue: what waits behind `lows`, by level (priority; 0 alone with another broker)."""
    room, subscription, organisation = queue
    asked = {
        "room": room,
        "subscription": subscription,
        "organisation": organisation,
        "event_types": text_array(sorted(event_types)),
        "due": array(lows.get(level, START)[0] for level in range(LEVELS - 1, -1, -1)),
        "low": array(lows.get(level, START)[1] for level in range(LEVELS - 1, -1, -1)),
    }
    head, *rows = await writer.run(_AWAY if writer.shape.relayed else _HERE, asked)
    found = [Found(*row[1:]) for row in rows]
    return Window(Standing(head[1]), found, head[2] < WINDOW and len(found) == head[2], head[3])
