"""Event types and their versions (row A12). Numbers of versions are never given twice, whatever was deleted since."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, Select, delete, exists, insert, select, type_coerce, update
from sqlalchemy.dialects.postgresql import JSONB, aggregate_order_by
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.domain.ids import RoomId
from rooms.errors import ConflictError, NotFoundError
from rooms.storage.tables.messages import messages
from rooms.storage.tables.rooms import event_type_versions, event_types, subscriptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EventType:
    """An event type and the numbers of its versions, ascending, never none."""

    id: str
    room_id: RoomId
    name: str
    versions: tuple[int, ...]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of an event type with its JSON Schema (None: any JSON)."""

    id: str
    room_id: RoomId
    event_type: str
    version: int
    schema: Any
    created_at: datetime


def _types(room: RoomId) -> Select[Any]:
    versions = func.array_agg(aggregate_order_by(event_type_versions.c.version, event_type_versions.c.version.asc()))
    of_type = (event_type_versions.c.room_id == event_types.c.room_id) & (
        event_type_versions.c.event_type_id == event_types.c.id
    )
    return (
        select(event_types, versions.label("versions"))
        .join(event_type_versions, of_type)
        .where(event_types.c.room_id == room)
        .group_by(event_types.c.room_id, event_types.c.id)
    )


def _versions(room: RoomId, name: str) -> Select[Any]:
    of_type = (event_type_versions.c.room_id == event_types.c.room_id) & (
        event_type_versions.c.event_type_id == event_types.c.id
    )
    return (
        select(event_type_versions, event_types.c.name)
        .join(event_types, of_type)
        .where(event_types.c.room_id == room, event_types.c.name == name)
    )


def missing(name: str, version: int | None = None) -> NotFoundError:
    """The answer for a type or version that the room does not have."""
    return NotFoundError(f"there is no event type {name}" + ("" if version is None else f" of version {version}"))


async def create_event_type(
    connection: AsyncConnection, room: RoomId, name: str, schema: object, *, new_id: str, version_id: str
) -> EventType:
    """A new type with its version 1. ConflictError: the room has it already."""
    try:
        await connection.execute(insert(event_types).values(room_id=room, id=new_id, name=name))
    except IntegrityError as exc:
        raise ConflictError(f"the room has an event type {name} already; add a version to it") from exc
    await connection.execute(
        insert(event_type_versions).values(room_id=room, id=version_id, event_type_id=new_id, version=1, schema=schema)
    )
    return await find_event_type(connection, room, name)


async def find_event_type(connection: AsyncConnection, room: RoomId, name: str) -> EventType:
    """One type by its name. NotFoundError."""
    row = (await connection.execute(_types(room).where(event_types.c.name == name))).mappings().one_or_none()
    if row is None:
        raise missing(name)
    return _event_type(row)


async def list_event_types(
    connection: AsyncConnection, room: RoomId, *, before: str | None = None, limit: int | None = None
) -> Sequence[EventType]:
    """The types of a room, newest first."""
    statement = _types(room).order_by(event_types.c.id.desc()).limit(limit)
    if before is not None:
        statement = statement.where(event_types.c.id < before)
    return [_event_type(row) for row in (await connection.execute(statement)).mappings()]


async def add_version(connection: AsyncConnection, room: RoomId, name: str, schema: object, *, new_id: str) -> Version:
    """The next version of a type. NotFoundError."""
    # `latest_version` is the last number given, not the last that exists.
    statement = (
        update(event_types)
        .where(event_types.c.room_id == room, event_types.c.name == name)
        .values(latest_version=event_types.c.latest_version + 1)
        .returning(event_types.c.id, event_types.c.latest_version)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise missing(name)
    await connection.execute(
        insert(event_type_versions).values(
            room_id=room, id=new_id, event_type_id=row.id, version=row.latest_version, schema=schema
        )
    )
    return await find_version(connection, room, name, row.latest_version)


async def find_version(connection: AsyncConnection, room: RoomId, name: str, version: int) -> Version:
    """One version of a type. NotFoundError."""
    statement = _versions(room, name).where(event_type_versions.c.version == version)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise missing(name, version)
    return _version(row)


async def list_versions(
    connection: AsyncConnection, room: RoomId, name: str, *, before: int | None, limit: int
) -> Sequence[Version]:
    """The versions of a type, newest first; empty where there is no such type."""
    statement = _versions(room, name).order_by(event_type_versions.c.version.desc()).limit(limit)
    if before is not None:
        statement = statement.where(event_type_versions.c.version < before)
    return [_version(row) for row in (await connection.execute(statement)).mappings()]


async def rewrite_version(
    connection: AsyncConnection, room: RoomId, name: str, version: int, schema: object
) -> Version:
    """Another schema for a version that no message used. NotFoundError, ConflictError."""
    found = await find_version(connection, room, name, version)
    await _refuse_used(connection, room, name, version)
    await connection.execute(
        update(event_type_versions)
        .where(event_type_versions.c.room_id == room, event_type_versions.c.id == found.id)
        .values(schema=schema)
    )
    return await find_version(connection, room, name, version)


async def delete_version(connection: AsyncConnection, room: RoomId, name: str, version: int) -> None:
    """Forget a version that is not the last, that no message used, and that no subscription names.

    NotFoundError, ConflictError.
    """
    found = await find_version(connection, room, name, version)
    whole = await find_event_type(connection, room, name)
    if whole.versions == (version,):
        raise ConflictError(f"version {version} is the only one of {name}; delete the event type instead")
    await _refuse_used(connection, room, name, version)
    await _refuse_wanted(connection, room, {"name": name, "versions": [version]})
    await connection.execute(
        delete(event_type_versions).where(event_type_versions.c.room_id == room, event_type_versions.c.id == found.id)
    )


async def delete_event_type(connection: AsyncConnection, room: RoomId, name: str) -> None:
    """Forget a type that no message used and no subscription names. NotFoundError, ConflictError."""
    found = await find_event_type(connection, room, name)
    await _refuse_used(connection, room, name)
    await _refuse_wanted(connection, room, {"name": name})
    for table, column in ((event_type_versions, event_type_versions.c.event_type_id), (event_types, event_types.c.id)):
        await connection.execute(delete(table).where(table.c.room_id == room, column == found.id))


async def _refuse_used(connection: AsyncConnection, room: RoomId, name: str, version: int | None = None) -> None:
    used = select(messages.c.id).where(messages.c.room_id == room, messages.c.event_type == name)
    if version is not None:
        used = used.where(messages.c.event_version == version)
    if await connection.scalar(select(exists(used))):
        which = name if version is None else f"{name} version {version}"
        raise ConflictError(f"messages were published with {which}; add a new version instead")


async def _refuse_wanted(connection: AsyncConnection, room: RoomId, interest: dict[str, Any]) -> None:
    wanting = select(subscriptions.c.name).where(
        subscriptions.c.room_id == room,
        subscriptions.c.status != "deleted",
        subscriptions.c.event_types.contains(type_coerce([interest], JSONB)),
    )
    found = await connection.scalar(wanting.limit(1))
    if found is not None:
        raise ConflictError(f"the subscription {found} names it in its event_types; change that first")


def _event_type(row: RowMapping) -> EventType:
    return EventType(
        id=row["id"],
        room_id=RoomId(row["room_id"]),
        name=row["name"],
        versions=tuple(row["versions"]),
        created_at=row["created_at"],
    )


def _version(row: RowMapping) -> Version:
    return Version(
        id=row["id"],
        room_id=RoomId(row["room_id"]),
        event_type=row["name"],
        version=row["version"],
        schema=row["schema"],
        created_at=row["created_at"],
    )
