"""Deliveries for people: reading them, and sending one again."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, RowMapping, Select, and_, func, not_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import (
    DeliveryId,
    MessageId,
    OrganisationId,
    RoomId,
    SubscriptionId,
    born_ms,
    first_id,
    room_of,
)
from rooms.domain.states import State, SubscriptionType
from rooms.errors import NotFoundError
from rooms.storage.filters import Filter
from rooms.storage.order import TURNS, pass_on
from rooms.storage.tables.messages import deliveries, messages
from rooms.storage.tables.rooms import rooms
from rooms.storage.writer import Writer

_OF_MESSAGE: Final = (messages.c.room_id == deliveries.c.room_id) & (messages.c.id == deliveries.c.message_id)
_NOT_DUE: Final = and_(
    deliveries.c.state.in_([State.SCHEDULED.value, State.QUEUED.value]), deliveries.c.due_at > func.now()
)
_WAITING: Final = frozenset({State.SCHEDULED, State.QUEUED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A delivery with what its message is about. `attempt` starts again with each shovel, `attempts` never does."""

    id: DeliveryId
    message_id: MessageId
    subscription_id: SubscriptionId
    room_id: RoomId
    state: State
    reason: str | None
    generation: int
    attempt: int
    attempts: int
    last_status: int | None
    last_error: str | None
    due_at: datetime | None
    expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    correlation_id: str
    event_type: str
    event_version: int

    @property
    def next_attempt_at(self) -> datetime | None:
        """When it is due, while it waits for that."""
        return self.due_at if self.state in _WAITING else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Redelivery:
    """What came of sending a delivery again: the state it was in, and the one it is in now (None: it stayed)."""

    before: State
    after: State | None
    subscription_gone: bool
    subscription_id: SubscriptionId
    type: SubscriptionType | None


def _select(room: RoomId, *, due_only: bool) -> Select[Any]:
    statement = (
        select(deliveries, messages.c.correlation_id, messages.c.event_type, messages.c.event_version)
        .join(messages, _OF_MESSAGE)
        .where(deliveries.c.room_id == room)
    )
    # coalesce: a delivery without a due time is not one that waits for it.
    return statement.where(not_(func.coalesce(_NOT_DUE, False))) if due_only else statement


def missing(identity: object) -> NotFoundError:
    """The answer for a delivery that is not there, whoever asks."""
    return NotFoundError(f"there is no delivery {identity}")


async def find_delivery(
    connection: AsyncConnection, organisation: OrganisationId, identity: DeliveryId, *, due_only: bool
) -> Delivery:
    """One delivery of the organisation. NotFoundError; also, with `due_only`, before it is due (row A9)."""
    statement = (
        _select(room_of(identity), due_only=due_only)
        .where(deliveries.c.id == identity)
        .join(rooms, rooms.c.id == deliveries.c.room_id)
        .where(rooms.c.organisation_id == organisation, rooms.c.deleting.is_(False))
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise missing(identity)
    return _delivery(row)


async def deliveries_of_message(
    connection: AsyncConnection, room: RoomId, message: MessageId, *, after: str | None, limit: int
) -> Sequence[Delivery]:
    """The deliveries of a message, in the order of their ids."""
    at_ms = born_ms(message)
    statement = (
        _select(room, due_only=False)
        .where(
            deliveries.c.id >= first_id(at_ms),
            deliveries.c.id < first_id(at_ms + 1),
            deliveries.c.message_id == message,
        )
        .order_by(deliveries.c.id)
        .limit(limit)
    )
    if after is not None:
        statement = statement.where(deliveries.c.id > after)
    return [_delivery(row) for row in (await connection.execute(statement)).mappings()]


async def deliveries_of_subscription(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    wanted: Filter,
    *,
    due_only: bool,
    before: str | None,
    limit: int,
) -> Sequence[Delivery]:
    """The deliveries of a subscription, newest first."""
    conditions: list[ColumnElement[bool]] = [*wanted.of_ids(deliveries.c.id), *wanted.of_messages()]
    if wanted.state is not None:
        conditions.append(deliveries.c.state == wanted.state.value)
    if before is not None:
        conditions.append(deliveries.c.id < before)
    statement = (
        _select(room, due_only=due_only)
        .where(deliveries.c.subscription_id == subscription, *conditions)
        .order_by(deliveries.c.id.desc())
        .limit(limit)
    )
    return [_delivery(row) for row in (await connection.execute(statement)).mappings()]


def _delivery(row: RowMapping) -> Delivery:
    return Delivery(
        id=DeliveryId(row["id"]),
        message_id=MessageId(row["message_id"]),
        subscription_id=SubscriptionId(row["subscription_id"]),
        room_id=RoomId(row["room_id"]),
        state=State(row["state"]),
        reason=row["reason"],
        generation=row["generation"],
        attempt=row["attempt"],
        attempts=row["attempts"],
        last_status=row["last_status"],
        last_error=row["last_error"],
        due_at=row["due_at"],
        expires_at=row["expires_at"],
        created_at=datetime.fromtimestamp(born_ms(row["id"]) / 1000, UTC),
        updated_at=row["updated_at"],
        correlation_id=row["correlation_id"],
        event_type=row["event_type"],
        event_version=row["event_version"],
    )


# A shovel does not renew the lifetime: what expired meanwhile is found out here, and ends. A restore does.
_REDELIVER: Final = f"""
WITH t AS MATERIALIZED (
    SELECT d.room_id, d.id, d.message_id, d.subscription_id, d.state, d.generation, s.type, s.version AS policy,
        m.priority, m.event_type, m.event_version, m.correlation_id,
        CASE WHEN d.state = 'sidelined' THEN d.expires_at
            ELSE now() + nullif(r.message_expiration_ms, 0) * interval '1 ms' END AS expires_at,
        CASE WHEN s.id IS NULL THEN NULL
            WHEN d.state = 'sidelined' AND d.expires_at <= now() THEN 'expired'
            WHEN d.state IN ('sidelined', 'expired', 'cancelled', 'dropped') THEN 'queued' END::delivery_state AS next,
        CASE WHEN d.state <> 'sidelined' THEN 'restored' WHEN d.expires_at <= now() THEN 'expired' ELSE 'shoveled' END AS kind
    FROM deliveries d
        JOIN rooms r ON r.id = d.room_id AND r.organisation_id = %(organisation)s::uuid AND NOT r.deleting
        JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id
        LEFT JOIN subscriptions s ON s.room_id = d.room_id AND s.id = d.subscription_id AND s.status <> 'deleted'
    WHERE d.room_id = %(room)s::int4 AND d.id = %(id)s::uuid
), u AS (
    UPDATE deliveries d SET state = t.next, updated_at = now(), expires_at = t.expires_at,
        generation = d.generation + (t.next = 'queued')::int4,
        attempt = CASE WHEN t.next = 'queued' THEN 0 ELSE d.attempt END,
        due_at = CASE WHEN t.next = 'queued' THEN now() END,
        reason = CASE WHEN t.next = 'expired' THEN %(too_late)s::text END,
        shovels = d.shovels + (t.state = 'sidelined' AND t.next = 'queued')::int4
    FROM t WHERE t.next IS NOT NULL AND d.room_id = t.room_id AND d.id = t.id AND d.generation = t.generation
        AND d.state = t.state
    RETURNING t.*, d.generation AS new_generation, d.attempt
), o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, CASE type WHEN 'PULL' THEN %(pull)s::int2 ELSE %(push)s::int2 END,
        priority, new_generation, 0, now(), expires_at
    FROM u WHERE next = 'queued'
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, delay_ms, worker_host)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id, kind, subscription_id, id,
        new_generation, attempt, event_type, event_version, correlation_id, policy, 0, %(host)s::text FROM u
    RETURNING 1
){pass_on("SELECT room_id, id FROM u WHERE next = 'expired'")}
SELECT n.count + {TURNS}, t.state::text, u.next::text, t.type IS NULL AND t.id IS NOT NULL, t.subscription_id::text, t.type
FROM (SELECT count(*) FROM l) n LEFT JOIN t ON true LEFT JOIN u ON true
"""  # noqa: S608 - text of our own


async def redeliver(writer: Writer, organisation: OrganisationId, identity: DeliveryId) -> Redelivery:
    """Send a delivery that rests or ended once more, its attempts counted anew. NotFoundError.

    sidelined: shoveled, or (its lifetime being over) expired; expired, cancelled, dropped: restored with the room's
    lifetime. Anything else stays as it is. StorageUnavailableError, StorageRefusedError.
    """
    parameters = {
        "organisation": organisation,
        "room": room_of(identity),
        "id": identity,
        "too_late": "too_late",
        "host": writer.host,
    }
    rows = await writer.run(_REDELIVER, parameters)
    if not rows or rows[0][0] is None:
        raise missing(identity)
    before, after, gone, subscription, kind = rows[0]
    return Redelivery(
        before=State(before),
        after=None if after is None else State(after),
        subscription_gone=gone,
        subscription_id=SubscriptionId(subscription),
        type=None if kind is None else SubscriptionType(kind),
    )
