"""Look at the queue of a PULL subscription, and at its consumers, without taking anything.

What waits is read by the indexes of `outbox`. Leases have no index by subscription, because each
pull would pay for it, so a statement looks at a bounded number of the room's. So does one for a
subscriber in another organisation's room, which may not know of what is scheduled. A consumer is an
API key.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.hidden_deliveries import IS_GOING_ON, IS_QUEUE_KNOWN, is_of_others
from rooms.domain.ids import DeliveryId, KeyId, MessageId, OrganisationId, RoomId, SubscriptionId

MAX_SCANNED: Final = 10_000
"""So many leases of a room are looked at by one statement."""
MAX_WAITING_SCANNED: Final = 2_000
"""So many rows of each priority are looked at where some may be hidden, with those of the page."""
_TOP_LEVEL: Final = 9
_AT_BROKER: Final = -1
"""The level of what another broker carries, which has no index by priority."""

_OF_MESSAGE: Final = """m.event_type, m.event_version, m.priority, m.correlation_id, m.ordering_key, m.business_key,
    m.published_at"""
_NO_LEASE: Final = (
    "NULL::timestamptz AS leased_until, NULL::timestamptz AS leased_at, NULL AS key_id"
)
_ROWS: Final = """
        SELECT p.level, o.* FROM generate_series({top}, 0, -1) p (level) CROSS JOIN LATERAL (
            SELECT o.id, o.room_id, o.message_id, o.attempt, o.due_at, o.expires_at FROM outbox o
            WHERE o.kind = 1 AND o.priority = p.level AND -o.room_id = -CAST(:room AS int4) AND o.subscription_id = CAST(:subscription AS uuid)
                AND (p.level < CAST(:level AS int4) OR (p.level = CAST(:level AS int4) AND (o.due_at, o.id) > (CAST(:due AS timestamptz), CAST(:after AS uuid))))
                AND o.due_at <= CAST(:until AS timestamptz){going_on}{of_level}
            ORDER BY o.due_at, o.id LIMIT {limit}
        ) o
        UNION ALL
        SELECT * FROM (
            SELECT {at_broker}, o.id, o.room_id, o.message_id, o.attempt, o.due_at, o.expires_at FROM outbox o
            WHERE o.kind IN (3, 5) AND -o.room_id = -CAST(:room AS int4) AND o.subscription_id = CAST(:subscription AS uuid)
                AND (CAST(:level AS int4) > {at_broker} OR (o.due_at, o.id) > (CAST(:due AS timestamptz), CAST(:after AS uuid)))
                AND o.due_at <= CAST(:until AS timestamptz){going_on}{of_broker}
            ORDER BY o.due_at, o.id LIMIT {limit}
        ) o"""
_COLUMNS: Final = f"""o.level, o.id::text AS id, o.message_id::text AS message_id, o.attempt, o.due_at, o.expires_at, {_NO_LEASE}, {_OF_MESSAGE}"""
_JOIN_MESSAGE: Final = "LEFT JOIN LATERAL (SELECT m.* FROM messages m WHERE m.room_id = o.room_id AND m.id = o.message_id LIMIT 1) m ON true"
_PLACES: Final = {"top": _TOP_LEVEL, "at_broker": _AT_BROKER}
_ANY_ROWS: Final = {"going_on": "", "of_level": "", "of_broker": "", "limit": ":limit"}
_MOST: Final = "(SELECT most FROM n)"
# Bounds of an index: a page that goes on must not read what the pages before it have read.
_FROM_DUE: Final = """
                AND o.due_at >= CASE WHEN {is_first} THEN CAST(:due AS timestamptz) ELSE '-infinity' END"""
_KNOWN_ROWS: Final = {
    "going_on": f" AND {IS_GOING_ON}",
    "of_level": _FROM_DUE.format(is_first="p.level = CAST(:level AS int4)")
    + " AND p.level <= CAST(:level AS int4)",
    "of_broker": _FROM_DUE.format(is_first=f"CAST(:level AS int4) = {_AT_BROKER}"),
    "limit": _MOST,
}
WAITING: Final = f"""
SELECT {_COLUMNS}
FROM (
    SELECT * FROM ({_ROWS.format(**_PLACES, **_ANY_ROWS)}
    ) o ORDER BY o.level DESC, o.due_at, o.id LIMIT :limit
) o {_JOIN_MESSAGE}
ORDER BY o.level DESC, o.due_at, o.id
"""  # noqa: S608 - constants of this package
# How many rows are looked at varies, or a subscriber that publishes too could fill the queue up to
# one row, and see by the next cursor whether one more is scheduled for it.
WAITING_KNOWN: Final = f"""
WITH n AS MATERIALIZED (
    SELECT :limit + (:scanned * (1 + random()) / 2)::int8 AS most
), seen AS MATERIALIZED (
    SELECT * FROM ({_ROWS.format(**_PLACES, **_KNOWN_ROWS)}
    ) o ORDER BY o.level DESC, o.due_at, o.id LIMIT {_MOST}
), known AS MATERIALIZED (
    SELECT * FROM seen o WHERE {IS_QUEUE_KNOWN} ORDER BY o.level DESC, o.due_at, o.id LIMIT :limit
)
SELECT w.is_end, e.level AS last_level, e.due_at AS last_due_at, e.id::text AS last_id, {_COLUMNS}
FROM (SELECT count(*) < {_MOST} AS is_end FROM seen) w
LEFT JOIN (SELECT * FROM seen o ORDER BY o.level, o.due_at DESC, o.id DESC LIMIT 1) e ON true
LEFT JOIN known o ON true {_JOIN_MESSAGE}
ORDER BY o.level DESC, o.due_at, o.id
"""  # noqa: S608 - constants of this package
"""As `WAITING`, of what its subscriber may know of in a room of another organisation."""
_LEASED: Final = """
WITH seen AS MATERIALIZED (
    SELECT l.* FROM leases l WHERE l.room_id = CAST(:room AS int4) AND l.id > CAST(:after AS uuid) ORDER BY l.id LIMIT :scanned
), mine AS MATERIALIZED (
    SELECT l.* FROM seen l WHERE l.subscription_id = CAST(:subscription AS uuid) ORDER BY l.id LIMIT :limit
)
SELECT w.scanned, w.last, l.id::text AS id, l.until AS leased_until, d.updated_at AS leased_at, l.key_id::text AS key_id, d.message_id::text AS message_id, d.attempt, d.due_at, d.expires_at, {of_message}
FROM (SELECT count(*) AS scanned, max(seen.id::text) AS last FROM seen) w LEFT JOIN mine l ON true
LEFT JOIN LATERAL (SELECT d.* FROM deliveries d WHERE d.room_id = l.room_id AND d.id = l.id LIMIT 1) d ON true
LEFT JOIN LATERAL (SELECT m.* FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1) m ON true
ORDER BY l.id
"""
LEASED: Final = _LEASED.format(of_message=_OF_MESSAGE)
_FIRST: Final = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedDelivery:
    """Describe a delivery in a queue; `leased_until` None: it waits.

    `key_id`: the consumer's; None: it is not known. If its message is gone, what the message would
    say is None.
    """

    id: DeliveryId
    message_id: MessageId
    attempt: int
    due_at: datetime | None
    expires_at: datetime | None
    leased_until: datetime | None
    leased_at: datetime | None
    key_id: KeyId | None
    event_type: str | None
    event_version: int | None
    priority: int | None
    correlation_id: str | None
    ordering_key: str | None
    business_key: str | None
    published_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueScan:
    """Hold deliveries with their positions, and where the next statement goes on, if it does."""

    found: Sequence[tuple[QueuedDelivery, str]]
    further: str | None = None


async def list_waiting(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    *,
    due_only: bool,
    after: str | None,
    limit: int,
    max_scanned: int = MAX_WAITING_SCANNED,
) -> QueueScan:
    """Return what waits for consumers in the order in which they get it.

    What is not due yet is last of its priority. In a room of another organisation, what the
    subscriber may know of among the next rows of each priority: about `max_scanned` at most.
    """
    level, due, identity = (after or f"{_TOP_LEVEL + 1} -infinity {_FIRST}").split(" ")
    parameters = {
        "room": room,
        "subscription": subscription,
        "level": int(level),
        "due": due,
        "after": identity,
        "until": "now" if due_only else "infinity",
        "limit": limit,
    }
    if not await is_of_others(connection, room, subscription):
        rows = (await connection.execute(text(WAITING), parameters)).mappings().all()
        return QueueScan(found=[_at_position(row) for row in rows])
    parameters["scanned"] = max_scanned
    rows = (await connection.execute(text(WAITING_KNOWN), parameters)).mappings().all()
    found = [_at_position(row) for row in rows if row["id"] is not None]
    if len(found) == limit or rows[0]["is_end"]:
        return QueueScan(found=found)
    last = (rows[0][f"last_{name}"] for name in ("level", "due_at", "id"))
    return QueueScan(found=found, further=_position(*last))


async def list_leased(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    *,
    after: str | None,
    limit: int,
    max_scanned: int = MAX_SCANNED,
) -> QueueScan:
    """Return what consumers have, among the next `max_scanned` leases of the room, by id."""
    parameters = {
        "room": room,
        "subscription": subscription,
        "after": after or _FIRST,
        "limit": limit,
        "scanned": max_scanned,
    }
    rows = (await connection.execute(text(LEASED), parameters)).mappings().all()
    found = [(_queued(row), str(row["id"])) for row in rows if row["message_id"] is not None]
    if len(found) == limit:
        return QueueScan(found=found)
    is_end = rows[0]["scanned"] < max_scanned
    return QueueScan(found=found, further=None if is_end else rows[0]["last"])


def _position(level: int, due_at: datetime, identity: str) -> str:
    return f"{level} {due_at.isoformat()} {identity}"


def _at_position(row: RowMapping) -> tuple[QueuedDelivery, str]:
    return _queued(row), _position(row["level"], row["due_at"], row["id"])


def _queued(row: RowMapping) -> QueuedDelivery:
    values: dict[str, Any] = {
        name: row[name] for name in QueuedDelivery.__dataclass_fields__ if name in row
    }
    return QueuedDelivery(**values)


MAX_CONSUMERS: Final = 100
CONSUMERS: Final = """
WITH seen AS MATERIALIZED (
    SELECT l.* FROM leases l WHERE l.room_id = CAST(:room AS int4) ORDER BY l.id LIMIT :scanned
), by_key AS (
    SELECT l.key_id, count(*) AS leases, min(d.updated_at) AS oldest_at, min(l.until) AS first_end, max(l.until) AS last_end
    FROM seen l LEFT JOIN LATERAL (
        SELECT d.updated_at FROM deliveries d WHERE d.room_id = l.room_id AND d.id = l.id LIMIT 1
    ) d ON true WHERE l.subscription_id = CAST(:subscription AS uuid) AND l.until > now() GROUP BY 1
)
SELECT w.scanned, h.leases, h.key_id::text AS key_id, k.name, h.oldest_at, h.first_end, h.last_end
FROM (SELECT count(*) AS scanned FROM seen) w LEFT JOIN by_key h ON true
LEFT JOIN LATERAL (SELECT k.name FROM api_keys k WHERE k.id = h.key_id AND k.organisation_id = CAST(:organisation AS uuid) LIMIT 1) k ON true
ORDER BY h.leases DESC, h.key_id LIMIT :most
"""
# What PostgreSQL carries is found by priority, what another broker carries only by due time.
_OLDEST: Final = """
SELECT min(o.due_at) FROM (
    (SELECT o.due_at FROM generate_series(0, 9) p (priority), LATERAL (
        SELECT o.due_at FROM outbox o WHERE o.kind = 1 AND -o.room_id = -CAST(:room AS int4)
            AND o.subscription_id = CAST(:subscription AS uuid) AND o.priority = p.priority AND o.due_at <= now(){going_on} ORDER BY o.due_at LIMIT 1
    ) o)
    UNION ALL
    (SELECT o.due_at FROM outbox o WHERE o.kind IN (3, 5) AND -o.room_id = -CAST(:room AS int4)
        AND o.subscription_id = CAST(:subscription AS uuid) AND o.due_at <= now(){going_on} ORDER BY o.due_at LIMIT 1)
) o
"""
OLDEST: Final = _OLDEST.format(going_on="")
OLDEST_KNOWN: Final = _OLDEST.format(going_on=f" AND {IS_GOING_ON}")
"""As `OLDEST`, for the subscriber in a room of another organisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConsumer:
    """Describe what a consumer has under leases that have not ended.

    `key_id` None: it is not known, as of leases that a repair made. `name` None: the key is gone.
    `oldest_at`: when the first of its leases was taken; None: it is not known.
    """

    key_id: KeyId | None
    name: str | None
    leases: int
    oldest_at: datetime | None
    first_end: datetime
    last_end: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConsumers:
    """Hold the consumers with the most leases, and the due time of what has waited longest.

    `complete`: every lease of the room was looked at.
    """

    consumers: Sequence[QueueConsumer]
    oldest_due_at: datetime | None
    complete: bool


async def list_consumers(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    organisation: OrganisationId,
    *,
    max_scanned: int = MAX_SCANNED,
) -> QueueConsumers:
    """Return up to 100 consumers of a subscription of `organisation`, and what waits longest."""
    queue = {"room": room, "subscription": subscription}
    more = {"organisation": organisation, "scanned": max_scanned, "most": MAX_CONSUMERS}
    rows = (await connection.execute(text(CONSUMERS), queue | more)).mappings().all()
    is_guest = await is_of_others(connection, room, subscription)
    return QueueConsumers(
        consumers=[
            QueueConsumer(
                key_id=row["key_id"],
                name=row["name"],
                leases=row["leases"],
                oldest_at=row["oldest_at"],
                first_end=row["first_end"],
                last_end=row["last_end"],
            )
            for row in rows
            if row["leases"] is not None
        ],
        oldest_due_at=await connection.scalar(text(OLDEST_KNOWN if is_guest else OLDEST), queue),
        complete=rows[0]["scanned"] < max_scanned,
    )
