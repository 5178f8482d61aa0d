"""Read deliveries for the API, and send one again."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, RowMapping, Select, and_, func, not_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.hidden_deliveries import is_hidden, is_of_others
from rooms.db.queries.message_scope import MessageView
from rooms.db.queries.messages import ListFilter, deliveries_of, event_type_conditions
from rooms.db.queries.scan_bound import Scanned, find_scan_bound, hidden_from
from rooms.db.queue.ordering import RELEASED_COUNT, advance_ordering
from rooms.db.queue.refusals import is_not_granted
from rooms.db.statement_parts import ROOM_LIFETIME_MS
from rooms.db.tables.messages import deliveries, messages
from rooms.db.tables.rooms import IS_SHOWN_IN_PORTALS, rooms, subscriptions
from rooms.db.writer import LogWriter
from rooms.domain.ids import (
    DeliveryId,
    MessageId,
    OrganisationId,
    RoomId,
    SubscriptionId,
    created_ms,
    room_of,
)
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Reason, State, SubscriptionType
from rooms.errors import NotFoundError

_OF_MESSAGE: Final = (messages.c.room_id == deliveries.c.room_id) & (
    messages.c.id == deliveries.c.message_id
)
_OF_SUBSCRIPTION: Final = (subscriptions.c.room_id == deliveries.c.room_id) & (
    subscriptions.c.id == deliveries.c.subscription_id
)
_NOT_DUE: Final = and_(
    deliveries.c.state.in_([State.SCHEDULED.value, State.QUEUED.value]),
    deliveries.c.due_at > func.now(),
)
_WAITING_STATES: Final = frozenset({State.SCHEDULED, State.QUEUED})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRecord:
    """Describe a delivery, its message and its subscription.

    `attempt` starts again with each shovel, `attempts` never does. `subscription` (its name) and
    `organisation_id` (the subscriber) are None where its row is gone.
    """

    id: DeliveryId
    message_id: MessageId
    subscription_id: SubscriptionId
    subscription: str | None
    organisation_id: OrganisationId | None
    room_id: RoomId
    state: State
    reason: str | None
    generation: int
    attempt: int
    attempts: int
    last_status: int | None
    last_error: str | None
    due_at: datetime | None
    sequence: int | None
    expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    correlation_id: str
    event_type: str
    event_version: int

    @property
    def next_attempt_at(self) -> datetime | None:
        """Return the time of the next attempt, while the delivery waits for it."""
        return self.due_at if self.state in _WAITING_STATES else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Redelivery:
    """Hold the state before and after sending a delivery again (`after` None: it stayed).

    `withdrawn`, `not_due`, `not_granted`: why a subscriber in another organisation's room may not
    have it.
    """

    before: State
    after: State | None
    subscription_gone: bool
    withdrawn: bool
    not_due: bool
    not_granted: bool
    subscription_id: SubscriptionId
    type: SubscriptionType | None


def _select(room: RoomId, *, due_only: bool) -> Select[Any]:
    statement = (
        select(
            deliveries,
            messages.c.correlation_id,
            messages.c.event_type,
            messages.c.event_version,
            subscriptions.c.name.label("subscription"),
            subscriptions.c.organisation_id,
        )
        .join(messages, _OF_MESSAGE)
        .outerjoin(subscriptions, _OF_SUBSCRIPTION)
        .where(deliveries.c.room_id == room)
    )
    # coalesce: a delivery without a due time does not wait for one.
    return statement.where(not_(func.coalesce(_NOT_DUE, False))) if due_only else statement


def delivery_not_found(identity: object) -> NotFoundError:
    """Build the error for a delivery that is not there."""
    return NotFoundError(f"there is no delivery {identity}")


async def find_delivery(
    connection: AsyncConnection,
    principal: Principal,
    identity: DeliveryId,
    *,
    due_only: bool,
) -> DeliveryRecord:
    """Return one delivery to a subscription of the principal.

    NotFoundError; also, with `due_only`, before it is due.
    """
    statement = (
        _select(room_of(identity), due_only=due_only)
        .where(deliveries.c.id == identity)
        .join(rooms, rooms.c.id == deliveries.c.room_id)
        .where(
            *event_type_conditions(principal.event_types),
            # Where its row is gone, the subscriber was an organisation that was deleted.
            subscriptions.c.organisation_id == principal.organisation_id,
            not_(is_hidden()),
            rooms.c.deleting.is_(False),
        )
    )
    if principal.is_portal:
        statement = statement.where(IS_SHOWN_IN_PORTALS)
    if principal.subscriptions is not None:
        statement = statement.where(deliveries.c.subscription_id.in_(principal.subscriptions))
    if principal.rooms is not None:
        statement = statement.where(rooms.c.id.in_(principal.rooms))
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise delivery_not_found(identity)
    return _delivery(row)


async def deliveries_of_message(
    connection: AsyncConnection, view: MessageView, *, after: str | None, limit: int
) -> Sequence[DeliveryRecord]:
    """Return the deliveries of a message that a principal may know of, ordered by id."""
    room = view.scope.room.id
    statement = (
        _select(room, due_only=False)
        .where(*deliveries_of(room, view.identity), *view.visible_deliveries())
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
    wanted: ListFilter,
    *,
    due_only: bool,
    before: str | None,
    limit: int,
) -> Scanned[DeliveryRecord]:
    """Return the deliveries of a subscription that its subscriber may know of, newest first.

    In a room of another organisation, the page may end before it is full.
    """
    conditions: list[ColumnElement[bool]] = [
        *wanted.id_bounds(deliveries.c.id),
        *wanted.message_conditions(),
    ]
    down_to: str | None = None
    if await is_of_others(connection, room, subscription):
        of_it = subscriptions.c.room_id == room, subscriptions.c.id == subscription
        chosen = select(subscriptions.c.id).where(*of_it)
        down_to = await find_scan_bound(connection, chosen, wanted, before=before, limit=limit)
        newest = select(hidden_from()).where(*of_it).correlate(None).scalar_subquery()
        conditions += [not_(is_hidden()), deliveries.c.id < newest]
    if down_to is not None:
        conditions.append(deliveries.c.id >= down_to)
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
    found = [_delivery(row) for row in (await connection.execute(statement)).mappings()]
    return Scanned(found=found, further=down_to)


def _delivery(row: RowMapping) -> DeliveryRecord:
    return DeliveryRecord(
        id=DeliveryId(row["id"]),
        message_id=MessageId(row["message_id"]),
        subscription_id=SubscriptionId(row["subscription_id"]),
        subscription=row["subscription"],
        organisation_id=row["organisation_id"],
        room_id=RoomId(row["room_id"]),
        state=State(row["state"]),
        reason=row["reason"],
        generation=row["generation"],
        attempt=row["attempt"],
        attempts=row["attempts"],
        last_status=row["last_status"],
        last_error=row["last_error"],
        due_at=row["due_at"],
        sequence=row["sequence"],
        expires_at=row["expires_at"],
        created_at=datetime.fromtimestamp(created_ms(row["id"]) / 1000, UTC),
        updated_at=row["updated_at"],
        correlation_id=row["correlation_id"],
        event_type=row["event_type"],
        event_version=row["event_version"],
    )


# A shovel does not renew the lifetime: if it expired meanwhile, the delivery ends here. A restore
# renews it. What was kept from another organisation's subscription must not reach it by this.
_REDELIVER: Final = f"""
WITH t AS MATERIALIZED (
    SELECT *, CASE WHEN refused IS NULL THEN possible END AS next FROM (SELECT d.room_id, d.id, d.message_id, d.subscription_id, d.state, d.generation, s.type, s.version - s.lane_changes AS policy,
        m.priority, m.event_type, m.event_version, m.correlation_id,
        CASE WHEN d.state = 'sidelined' THEN d.expires_at
            ELSE now() + least({ROOM_LIFETIME_MS}, s.message_expiration_ms) * interval '1 ms' END AS expires_at,
        CASE WHEN s.id IS NULL THEN NULL
            WHEN d.state = 'sidelined' AND d.expires_at <= now() THEN 'expired'
            WHEN d.state IN ('sidelined', 'expired', 'cancelled', 'dropped') THEN 'queued' END::delivery_state AS possible,
        CASE WHEN s.organisation_id = r.organisation_id THEN NULL
            WHEN d.state = 'cancelled' AND d.reason = '{Reason.WITHDRAWN}' THEN 'withdrawn'
            WHEN d.state = 'cancelled' AND m.due_at > now() THEN 'not_due'
            WHEN {is_not_granted("d", "s")} THEN 'not_granted' END AS refused,
        CASE WHEN d.state <> 'sidelined' THEN 'restored' WHEN d.expires_at <= now() THEN 'expired' ELSE 'shoveled' END AS kind
    FROM deliveries d
        JOIN rooms r ON r.id = d.room_id AND NOT r.deleting
        JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id
        LEFT JOIN subscriptions s ON s.room_id = d.room_id AND s.id = d.subscription_id AND s.status NOT IN ('deleted', 'rejected', 'terminated')
    WHERE d.room_id = %(room)s::int4 AND d.id = %(id)s::uuid AND %(organisation)s::uuid =
            (SELECT w.organisation_id FROM subscriptions w WHERE w.room_id = d.room_id AND w.id = d.subscription_id)) t
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
){advance_ordering("SELECT room_id, id FROM u WHERE next = 'expired'")}
SELECT n.count + {RELEASED_COUNT}, t.state::text, u.next::text, t.type IS NULL AND t.id IS NOT NULL, t.subscription_id::text, t.type, t.refused
FROM (SELECT count(*) FROM l) n LEFT JOIN t ON true LEFT JOIN u ON true
"""  # noqa: S608 - constants of this package


async def redeliver(
    writer: LogWriter, organisation: OrganisationId, identity: DeliveryId
) -> Redelivery:
    """Send a delivery that is sidelined or ended once more, its attempts counted anew.

    NotFoundError.

    A sidelined delivery is shoveled, or expires if its lifetime is over. One that expired, was
    cancelled or dropped is restored with a fresh lifetime. Any other stays as it is, and so does
    one that was withdrawn, cancelled before it was due, or never sent and is not covered by a grant
    or not taken any more, in another organisation's room.
    StorageUnavailableError, StorageRefusedError.
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
        raise delivery_not_found(identity)
    before, after, gone, subscription, kind, refused = rows[0]
    return Redelivery(
        before=State(before),
        after=None if after is None else State(after),
        subscription_gone=gone,
        withdrawn=refused == "withdrawn",
        not_due=refused == "not_due",
        not_granted=refused == "not_granted",
        subscription_id=SubscriptionId(subscription),
        type=None if kind is None else SubscriptionType(kind),
    )
