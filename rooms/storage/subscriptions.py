"""Subscriptions. `version` counts up with every change, and workers reload by it."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, Select, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.lane import LANE_SETTINGS, LaneSettings
from rooms.domain.room import Interest, Subscription
from rooms.domain.states import SubscriptionStatus, SubscriptionType
from rooms.errors import ConflictError, NotFoundError
from rooms.storage.tables.rooms import rooms, subscriptions


def _visible(room: RoomId) -> Select[Any]:
    return select(subscriptions).where(
        subscriptions.c.room_id == room, subscriptions.c.status != SubscriptionStatus.DELETED
    )


def missing(identity: object) -> NotFoundError:
    """The answer for a subscription that is not there, whoever asks."""
    return NotFoundError(f"there is no subscription {identity}")


async def create_subscription(
    connection: AsyncConnection, room: RoomId, identity: SubscriptionId, columns: Mapping[str, Any]
) -> Subscription:
    """A new subscription from column values (`event_types` as `to_json` makes it, `secret` sealed).

    ConflictError: the name is taken.
    """
    statement = insert(subscriptions).values(room_id=room, id=identity, **columns).returning(subscriptions)
    try:
        return from_row((await connection.execute(statement)).mappings().one())
    except IntegrityError as exc:
        raise _taken(columns["name"]) from exc


async def find_subscription(
    connection: AsyncConnection, organisation: OrganisationId, identity: SubscriptionId
) -> Subscription:
    """One subscription of the organisation. NotFoundError, also once its deletion was accepted."""
    room = room_of(identity)
    statement = (
        _visible(room)
        .where(subscriptions.c.id == identity)
        .join(rooms, rooms.c.id == subscriptions.c.room_id)
        .where(rooms.c.organisation_id == organisation, rooms.c.deleting.is_(False))
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise missing(identity)
    return from_row(row)


async def list_subscriptions(
    connection: AsyncConnection, room: RoomId, *, name: str | None, before: str | None, limit: int
) -> Sequence[Subscription]:
    """The subscriptions of a room, newest first."""
    statement = _visible(room).order_by(subscriptions.c.id.desc()).limit(limit)
    if name is not None:
        statement = statement.where(subscriptions.c.name == name)
    if before is not None:
        statement = statement.where(subscriptions.c.id < before)
    return [from_row(row) for row in (await connection.execute(statement)).mappings()]


async def change_subscription(
    connection: AsyncConnection, subscription: Subscription, columns: Mapping[str, Any]
) -> Subscription:
    """The subscription with other column values and its next version. NotFoundError, ConflictError: the name is taken.

    The room must have been touched in the same transaction.
    """
    statement = (
        update(subscriptions)
        .where(
            subscriptions.c.room_id == subscription.room_id,
            subscriptions.c.id == subscription.id,
            subscriptions.c.status != SubscriptionStatus.DELETED,
        )
        .values(**columns, version=subscriptions.c.version + 1, updated_at=func.now())
        .returning(subscriptions)
    )
    try:
        row = (await connection.execute(statement)).mappings().one_or_none()
    except IntegrityError as exc:
        raise _taken(columns.get("name")) from exc
    if row is None:
        raise missing(subscription.id)
    return from_row(row)


async def set_status(
    connection: AsyncConnection, subscription: Subscription, status: SubscriptionStatus, reason: str | None
) -> Subscription:
    """The subscription in another status, since now."""
    changes = {"status": status.value, "status_reason": reason, "status_since": func.now()}
    return await change_subscription(connection, subscription, changes)


async def rotate_secret(
    connection: AsyncConnection, subscription: Subscription, sealed: bytes, *, overlap_s: int
) -> datetime | None:
    """Sign with another secret from now on, and with the one before as well for `overlap_s`; until when that is."""
    keeps = overlap_s > 0
    until = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, overlap_s)
    await change_subscription(
        connection,
        subscription,
        {
            "previous_secret": subscriptions.c.secret if keeps else None,
            "previous_secret_until": until if keeps else None,
            "secret": sealed,
        },
    )
    found: datetime | None = await connection.scalar(
        select(subscriptions.c.previous_secret_until).where(
            subscriptions.c.room_id == subscription.room_id, subscriptions.c.id == subscription.id
        )
    )
    return found


def to_json(interests: Sequence[Interest] | None) -> list[dict[str, Any]] | None:
    """What the column `event_types` holds: `[{"name": …, "versions": [1, 2]}]`, without `versions` where all are wanted."""
    if interests is None:
        return None
    return [
        {"name": interest.name} | ({} if interest.versions is None else {"versions": sorted(interest.versions)})
        for interest in interests
    ]


def from_json(found: Sequence[Mapping[str, Any]] | None) -> tuple[Interest, ...] | None:
    """The inverse of `to_json`."""
    if found is None:
        return None
    return tuple(
        Interest(name=entry["name"], versions=frozenset(entry["versions"]) if "versions" in entry else None)
        for entry in found
    )


def from_row(row: RowMapping) -> Subscription:
    """A row of the table as the house knows it. Secrets stay behind."""
    return Subscription(
        id=SubscriptionId(row["id"]),
        room_id=RoomId(row["room_id"]),
        name=row["name"],
        type=SubscriptionType(row["type"]),
        event_types=from_json(row["event_types"]),
        filter=row["filter"],
        ordered=row["ordered"],
        push_url=row["push_url"],
        delivery_delay_ms=row["delivery_delay_ms"],
        delivery_delay_multiplier=row["delivery_delay_multiplier"],
        delivery_attempts=row["delivery_attempts"],
        headers=row["headers"],
        terminal_statuses=frozenset(row["terminal_statuses"]),
        ignorable_statuses=frozenset(row["ignorable_statuses"]),
        max_receives=row["max_receives"],
        lane=LaneSettings(**{name: row[name] for name in LANE_SETTINGS}),
        operational=row["operational"],
        cloud_events=row["cloud_events"],
        native=row["native_password"] is not None,
        status=SubscriptionStatus(row["status"]),
        status_reason=row["status_reason"],
        status_since=row["status_since"],
        version=row["version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _taken(name: object) -> ConflictError:
    return ConflictError(f"the room has a subscription of the name {name} already")
