"""Find what a PULL subscription has under a lease now, for clients that keep no ack ids."""

# ruff: noqa: E501 - SQL statements keep their lines

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.messages import deliveries_of
from rooms.db.tables.messages import deliveries
from rooms.domain.ids import MessageId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.state_machine import Reason, State

MAX_LEASES_READ: Final = 10_000
"""So many leases of a room are read to find one of a subscription."""

_LEASED: Final = text("""
SELECT l.id::text, l.generation FROM (
    SELECT l.* FROM leases l WHERE l.room_id = :room LIMIT :most
) l WHERE l.subscription_id = CAST(:subscription AS uuid) AND l.until > now() ORDER BY l.until, l.id LIMIT 1
""")
# By the index of leases with a holder. The sign leaves the primary key out, by which those of
# others in the room would be read.
_TAKE_HELD: Final = text("""
UPDATE leases l SET holder = NULL
WHERE l.subscription_id = CAST(:subscription AS uuid) AND l.holder = :holder AND -l.room_id = -CAST(:room AS int4)
RETURNING l.id::text, l.generation, l.until > now()
""")
_HOLD: Final = text("""
UPDATE leases SET holder = :holder WHERE room_id = :room AND id = CAST(:delivery AS uuid) AND generation = :generation
""")
_EVENT: Final = text("""
SELECT d.message_id::text AS message_id, d.sequence, m.event_type, m.payload, m.application,
    m.publisher_id IS NOT NULL AS has_publisher,
    coalesce(m.publisher_organisation_id, r.organisation_id)::text AS organisation_id
FROM deliveries d JOIN rooms r ON r.id = d.room_id CROSS JOIN LATERAL (
    SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
) m WHERE d.room_id = :room AND d.id = CAST(:delivery AS uuid) AND d.generation = :generation
""")
# What PostgreSQL carries is found by priority, what another broker carries only by due time. The
# delivery behind a leased one in the order of their key is found as the end of that one finds it.
_DUE: Final = text("""
SELECT EXISTS (
    SELECT FROM generate_series(0, 9) p (priority), LATERAL (
        SELECT FROM outbox o WHERE o.kind = 1 AND -o.room_id = -CAST(:room AS int4)
            AND o.subscription_id = CAST(:subscription AS uuid) AND o.priority = p.priority AND o.due_at <= now()
            AND coalesce(o.expires_at, 'infinity') > now() ORDER BY o.due_at LIMIT 1
    ) o
) OR EXISTS (
    SELECT FROM outbox o WHERE o.kind IN (3, 5) AND -o.room_id = -CAST(:room AS int4)
        AND o.subscription_id = CAST(:subscription AS uuid) AND o.due_at <= now()
        AND coalesce(o.expires_at, 'infinity') > now()
) OR EXISTS (
    SELECT FROM ordered_keys k, LATERAL (
        SELECT t.due_at, t.expires_at FROM ordered_waiting w, LATERAL (
            SELECT * FROM deliveries t WHERE t.room_id = w.room_id AND t.id = w.id AND t.state = 'held' AND t.reason = :order LIMIT 1
        ) t WHERE w.room_id = k.room_id AND w.subscription_id = k.subscription_id AND w.key = k.key AND w.position > k.head
        ORDER BY w.position LIMIT 1
    ) n WHERE k.head_id = CAST(:leased AS uuid) AND k.room_id = :room
        AND coalesce(n.due_at, '-infinity') <= now() AND coalesce(n.expires_at, 'infinity') > now()
)
""")


@dataclass(frozen=True, slots=True)
class LeaseId:
    """Name a lease: a delivery and its generation."""

    delivery: str
    generation: int

    @classmethod
    def unpacked(cls, delivery: bytes, generation: bytes) -> "LeaseId":
        """Return the lease of a delivery's id as 16 bytes, and a generation as 4."""
        return cls(str(UUID(bytes=delivery)), int.from_bytes(generation, "big"))

    def packed(self) -> tuple[bytes, bytes]:
        """Return (delivery id as 16 bytes, generation as 4 bytes)."""
        return UUID(self.delivery).bytes, self.generation.to_bytes(4, "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedEvent:
    """Hold a message that is under a lease."""

    message_id: str
    event_type: str
    payload: bytes
    sequence: int | None
    publisher: OrganisationId | None
    """None: the service itself published it."""
    application: str | None


async def find_lease(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId
) -> LeaseId | None:
    """Return the lease of a subscription that ends first; None: it has none.

    In a room with more than 10,000 leases one may be missed.
    """
    parameters = {"room": room, "subscription": subscription, "most": MAX_LEASES_READ}
    row = (await connection.execute(_LEASED, parameters)).one_or_none()
    return None if row is None else LeaseId(row[0], row[1])


async def hold(connection: AsyncConnection, room: RoomId, lease: LeaseId, holder: str) -> None:
    """Record whose next pull acknowledges a lease. A lease that is over has no holder."""
    parameters = {"room": room, "delivery": lease.delivery, "generation": lease.generation}
    await connection.execute(_HOLD, {**parameters, "holder": holder})


async def take_held(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId, holder: str
) -> LeaseId | None:
    """Return the lease that the holder's last pull got, and hold it no longer; None: there is none.

    None also if it is over, or if the holder has several, from pulls at the same moment: then none
    is the last one.
    """
    parameters = {"room": room, "subscription": subscription, "holder": holder}
    rows = (await connection.execute(_TAKE_HELD, parameters)).all()
    match rows:
        case [(delivery, generation, True)]:
            return LeaseId(delivery, generation)
        case _:
            return None


async def find_leased_event(
    connection: AsyncConnection, room: RoomId, lease: LeaseId
) -> LeasedEvent | None:
    """Return the message under a lease; None: it is settled, or the message is gone."""
    parameters = {"room": room, "delivery": lease.delivery, "generation": lease.generation}
    row = (await connection.execute(_EVENT, parameters)).mappings().one_or_none()
    if row is None:
        return None
    return LeasedEvent(
        message_id=row["message_id"],
        event_type=row["event_type"],
        payload=row["payload"],
        sequence=row["sequence"],
        publisher=OrganisationId(row["organisation_id"]) if row["has_publisher"] else None,
        application=row["application"],
    )


async def find_delivery(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId, message: MessageId
) -> LeaseId | None:
    """Return the delivery of a message to a subscription, the leased one first; None: none."""
    statement = (
        select(deliveries.c.id, deliveries.c.generation)
        .where(*deliveries_of(room, message), deliveries.c.subscription_id == subscription)
        .order_by((deliveries.c.state == State.LEASED.value).desc(), deliveries.c.id.desc())
        .limit(1)
    )
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else LeaseId(str(row[0]), row[1])


async def has_due(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId, leased: LeaseId
) -> bool:
    """Return whether a message is due for a PULL subscription beside the leased one.

    One that only waits for the end of the leased one, in the order of their key, is due, too.
    """
    parameters = {
        "room": room,
        "subscription": subscription,
        "leased": leased.delivery,
        "order": Reason.ORDER.value,
    }
    return bool(await connection.scalar(_DUE, parameters))
