"""Rooms. Whatever changes a room, its event types or its subscriptions passes `touch` first, in the same transaction:
it counts the plan's version up, by which every publisher notices, and lets one change a room happen at a time.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.lane import LANE_SETTINGS, LaneSettings
from rooms.domain.room import Room
from rooms.errors import ConflictError, NotFoundError
from rooms.storage.tables.rooms import rooms, subscriptions

POLICY: Final = frozenset(
    {
        "message_expiration_ms",
        "delivery_delay_ms",
        "delivery_delay_multiplier",
        "delivery_attempts",
        "delivery_max_delay_ms",
        "delivery_jitter",
        "ordered",
        *LANE_SETTINGS,
    }
)
"""The columns that make up what subscriptions follow where they say nothing themselves."""


def missing(room: object) -> NotFoundError:
    """The answer for a room that is not there, whoever asks."""
    return NotFoundError(f"there is no room {room}")


async def create_room(
    connection: AsyncConnection, organisation: OrganisationId, identity: RoomId, fields: Mapping[str, Any]
) -> Room | None:
    """A new room; None where another one has the identity already. ConflictError: the name is taken."""
    statement = (
        insert(rooms)
        .values(id=identity, organisation_id=organisation, **fields)
        .on_conflict_do_nothing()
        .returning(rooms)
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is not None:
        return _room(row)
    same_name = select(rooms.c.id).where(rooms.c.organisation_id == organisation, rooms.c.name == fields["name"])
    if await connection.scalar(same_name) is not None:
        raise _taken(fields["name"])
    return None


async def find_room(connection: AsyncConnection, organisation: OrganisationId, identity: RoomId) -> Room:
    """One room of the organisation. NotFoundError, also while it is being deleted."""
    statement = select(rooms).where(
        rooms.c.id == identity, rooms.c.organisation_id == organisation, rooms.c.deleting.is_(False)
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise missing(identity)
    return _room(row)


async def list_rooms(
    connection: AsyncConnection,
    organisation: OrganisationId,
    *,
    name: str | None,
    before: tuple[datetime, RoomId] | None,
    limit: int,
) -> Sequence[Room]:
    """Rooms of the organisation, newest first, older than `before`; those of one name, where it is given."""
    statement = select(rooms).where(rooms.c.organisation_id == organisation, rooms.c.deleting.is_(False))
    if name is not None:
        statement = statement.where(rooms.c.name == name)
    if before is not None:
        statement = statement.where(tuple_(rooms.c.created_at, rooms.c.id) < before)
    ordered = statement.order_by(rooms.c.created_at.desc(), rooms.c.id.desc()).limit(limit)
    return [_room(row) for row in (await connection.execute(ordered)).mappings()]


async def touch(
    connection: AsyncConnection,
    organisation: OrganisationId,
    identity: RoomId,
    fields: Mapping[str, Any] | None = None,
) -> Room:
    """The room with the next version of its plan, locked until the transaction ends; `fields` changed on the way.

    NotFoundError; ConflictError: the name is taken.
    """
    changes: dict[str, Any] = {"plan_version": rooms.c.plan_version + 1}
    if fields:
        changes |= {**fields, "updated_at": func.now()}
    statement = (
        update(rooms)
        .where(rooms.c.id == identity, rooms.c.organisation_id == organisation, rooms.c.deleting.is_(False))
        .values(**changes)
        .returning(rooms)
    )
    try:
        row = (await connection.execute(statement)).mappings().one_or_none()
    except IntegrityError as exc:
        raise _taken(fields["name"] if fields else identity) from exc
    if row is None:
        raise missing(identity)
    if fields and POLICY & fields.keys():
        # Workers keep a subscription with its effective policy, and notice a change by this version.
        await connection.execute(
            update(subscriptions).where(subscriptions.c.room_id == identity).values(version=subscriptions.c.version + 1)
        )
    return _room(row)


async def mark_deleting(connection: AsyncConnection, room: Room) -> None:
    """From now on the room is nowhere to be found; its name is free at once, a job does the rest."""
    # '~' is in no name that people may choose.
    await connection.execute(
        update(rooms)
        .where(rooms.c.id == room.id)
        .values(deleting=True, name=f"{room.id}~deleting", updated_at=func.now())
    )


def _taken(name: object) -> ConflictError:
    return ConflictError(f"there is a room of the name {name} already")


def _room(row: RowMapping) -> Room:
    return Room(
        id=RoomId(row["id"]),
        organisation_id=OrganisationId(row["organisation_id"]),
        name=row["name"],
        description=row["description"],
        message_expiration_ms=row["message_expiration_ms"],
        delivery_delay_ms=row["delivery_delay_ms"],
        delivery_delay_multiplier=row["delivery_delay_multiplier"],
        delivery_attempts=row["delivery_attempts"],
        delivery_max_delay_ms=row["delivery_max_delay_ms"],
        delivery_jitter=row["delivery_jitter"],
        lane=LaneSettings(**{name: row[name] for name in LANE_SETTINGS}),
        ordered=row["ordered"],
        operational_url=row["operational_url"],
        plan_version=row["plan_version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
