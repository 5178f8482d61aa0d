"""Store event types and their versions.

The number of a version is never reused, even after a deletion.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    RowMapping,
    Select,
    Text,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    insert,
    or_,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, aggregate_order_by
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.bounded_lists import read_bounded
from rooms.db.tables.messages import messages
from rooms.db.tables.rooms import event_type_versions, event_types, subscriptions
from rooms.domain.event_type_pattern import EVERY_EVENT_TYPE, is_pattern
from rooms.domain.ids import RoomId
from rooms.domain.state_machine import ENDED_STATUSES
from rooms.errors import ConflictError, FieldProblem, InvalidError, NotFoundError

VERSION_BYTES: Final = 256
"""Bytes that a version counts beside its schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventType:
    """Describe an event type and the numbers of its versions, ascending, never none."""

    id: str
    room_id: RoomId
    name: str
    versions: tuple[int, ...]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTypeVersion:
    """Describe one version of an event type with its JSON Schema (None: any JSON)."""

    id: str
    room_id: RoomId
    event_type: str
    version: int
    schema: Any
    created_at: datetime


_OF_TYPE: Final = (event_type_versions.c.room_id == event_types.c.room_id) & (
    event_type_versions.c.event_type_id == event_types.c.id
)


def _types(room: RoomId) -> Select[Any]:
    versions = func.array_agg(
        aggregate_order_by(event_type_versions.c.version, event_type_versions.c.version.asc())
    )
    return (
        select(event_types, versions.label("versions"))
        .join(event_type_versions, _OF_TYPE)
        .where(event_types.c.room_id == room)
        .group_by(event_types.c.room_id, event_types.c.id)
    )


def _versions(room: RoomId, name: str) -> Select[Any]:
    return (
        select(event_type_versions, event_types.c.name)
        .join(event_types, _OF_TYPE)
        .where(event_types.c.room_id == room, event_types.c.name == name)
    )


def event_type_not_found(name: str, version: int | None = None) -> NotFoundError:
    """Build the error for a type or version that the room does not have."""
    return NotFoundError(
        f"there is no event type {name}" + ("" if version is None else f" of version {version}")
    )


async def create_event_type(
    connection: AsyncConnection,
    room: RoomId,
    name: str,
    schema: object,
    *,
    new_id: str,
    version_id: str,
) -> EventType:
    """Create a type with its version 1. ConflictError: the room has it already."""
    try:
        await connection.execute(insert(event_types).values(room_id=room, id=new_id, name=name))
    except IntegrityError as exc:
        raise ConflictError(
            f"the room has an event type {name} already; add a version to it"
        ) from exc
    await connection.execute(
        insert(event_type_versions).values(
            room_id=room, id=version_id, event_type_id=new_id, version=1, schema=schema
        )
    )
    return await find_event_type(connection, room, name)


async def find_event_type(connection: AsyncConnection, room: RoomId, name: str) -> EventType:
    """Return one type by its name. NotFoundError."""
    row = (
        (await connection.execute(_types(room).where(event_types.c.name == name)))
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise event_type_not_found(name)
    return _event_type(row)


async def list_event_types(
    connection: AsyncConnection,
    room: RoomId,
    *,
    visible: Iterable[Sequence[str] | None] = (),
    before: str | None = None,
    limit: int | None = None,
) -> Sequence[EventType]:
    """Return the types of a room, newest first.

    `visible`: only those that a pattern of each of these matches; None: every type.
    """
    statement = _types(room).order_by(event_types.c.id.desc()).limit(limit)
    for patterns in visible:
        if patterns is not None and EVERY_EVENT_TYPE not in patterns:
            name = event_types.c.name
            matching = [
                name.startswith(pattern[:-1], autoescape=True)
                if is_pattern(pattern)
                else name == pattern
                for pattern in patterns
            ]
            statement = statement.where(or_(false(), *matching))
    if before is not None:
        statement = statement.where(event_types.c.id < before)
    return [_event_type(row) for row in (await connection.execute(statement)).mappings()]


async def add_version(
    connection: AsyncConnection, room: RoomId, name: str, schema: object, *, new_id: str
) -> EventTypeVersion:
    """Create the next version of a type. NotFoundError."""
    # `latest_version` is the last number used, not the last that exists.
    statement = (
        update(event_types)
        .where(event_types.c.room_id == room, event_types.c.name == name)
        .values(latest_version=event_types.c.latest_version + 1)
        .returning(event_types.c.id, event_types.c.latest_version)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise event_type_not_found(name)
    await connection.execute(
        insert(event_type_versions).values(
            room_id=room, id=new_id, event_type_id=row.id, version=row.latest_version, schema=schema
        )
    )
    return await find_version(connection, room, name, row.latest_version)


async def find_version(
    connection: AsyncConnection, room: RoomId, name: str, version: int
) -> EventTypeVersion:
    """Return one version of a type. NotFoundError."""
    statement = _versions(room, name).where(event_type_versions.c.version == version)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise event_type_not_found(name, version)
    return _version(row)


async def list_versions(
    connection: AsyncConnection, room: RoomId, name: str, *, before: int | None, limit: int
) -> tuple[Sequence[EventTypeVersion], bool]:
    """Return the versions of a type, newest first; empty if there is no such type.

    And whether the list may go on, because it ended where the schemas have enough bytes.
    """
    sizes: dict[int, int] = {}

    async def read(last: EventTypeVersion | None, count: int) -> Sequence[EventTypeVersion]:
        statement = (
            _versions(room, name)
            .add_columns(func.octet_length(cast(event_type_versions.c.schema, Text)).label("size"))
            .order_by(event_type_versions.c.version.desc())
            .limit(count)
        )
        after = before if last is None else last.version
        if after is not None:
            statement = statement.where(event_type_versions.c.version < after)
        rows = (await connection.execute(statement)).mappings().all()
        sizes.update((row["version"], row["size"] or 0) for row in rows)
        return [_version(row) for row in rows]

    return await read_bounded(read, limit, lambda one: sizes[one.version])


async def total_size(connection: AsyncConnection, room: RoomId) -> int:
    """Return the bytes of all schemas of a room, each version counted as `VERSION_BYTES` more."""
    stored = func.coalesce(func.octet_length(cast(event_type_versions.c.schema, Text)), 0)
    statement = select(func.coalesce(func.sum(stored + VERSION_BYTES), 0)).where(
        event_type_versions.c.room_id == room
    )
    return int(await connection.scalar(statement) or 0)


async def check_total_size(connection: AsyncConnection, room: RoomId, max_bytes: int) -> None:
    """Check the size of all schemas of a room, which publishing holds in memory.

    Each version counts as `VERSION_BYTES` more. InvalidError: it is more than `max_bytes`.
    """
    total = await total_size(connection, room)
    if total > max_bytes:
        raise InvalidError(
            FieldProblem(
                "schema",
                f"the schemas of this room would have {total} bytes, each version counted as"
                f" {VERSION_BYTES} more; the limit is {max_bytes}: delete versions that are not"
                " used, or make another room",
            )
        )


async def as_stored(connection: AsyncConnection, schema: str, *, most_bytes: int) -> str | None:
    """Return a JSON text as its column will have it; None: it is longer than `most_bytes`.

    Numbers are written out: `1e308` has 309 digits then.
    """
    stored = cast(cast(bindparam("schema", schema, type_=Text), JSONB), Text)
    found: str | None = await connection.scalar(
        select(case((func.octet_length(stored) <= most_bytes, stored)))
    )
    return found


async def replace_schema(
    connection: AsyncConnection, room: RoomId, name: str, version: int, schema: object
) -> EventTypeVersion:
    """Replace the schema of a version that no message used. NotFoundError, ConflictError."""
    found = await find_version(connection, room, name, version)
    await _check_unpublished(connection, room, name, version)
    await connection.execute(
        update(event_type_versions)
        .where(event_type_versions.c.room_id == room, event_type_versions.c.id == found.id)
        .values(schema=schema)
    )
    return await find_version(connection, room, name, version)


async def delete_version(
    connection: AsyncConnection, room: RoomId, name: str, version: int
) -> None:
    """Delete a version that no message used and no subscription names, unless it is the only one.

    NotFoundError, ConflictError.
    """
    found = await find_version(connection, room, name, version)
    event_type = await find_event_type(connection, room, name)
    if event_type.versions == (version,):
        raise ConflictError(
            f"version {version} is the only one of {name}; delete the event type instead"
        )
    await _check_unpublished(connection, room, name, version)
    await _check_unsubscribed(connection, room, {"name": name, "versions": [version]})
    await connection.execute(
        delete(event_type_versions).where(
            event_type_versions.c.room_id == room, event_type_versions.c.id == found.id
        )
    )


async def delete_event_type(connection: AsyncConnection, room: RoomId, name: str) -> None:
    """Delete a type that no message used and no subscription names.

    NotFoundError, ConflictError.
    """
    found = await find_event_type(connection, room, name)
    await _check_unpublished(connection, room, name)
    await _check_unsubscribed(connection, room, {"name": name})
    for table, column in (
        (event_type_versions, event_type_versions.c.event_type_id),
        (event_types, event_types.c.id),
    ):
        await connection.execute(delete(table).where(table.c.room_id == room, column == found.id))


async def _check_unpublished(
    connection: AsyncConnection, room: RoomId, name: str, version: int | None = None
) -> None:
    used = select(messages.c.id).where(messages.c.room_id == room, messages.c.event_type == name)
    if version is not None:
        used = used.where(messages.c.event_version == version)
    if await connection.scalar(select(exists(used))):
        which = name if version is None else f"{name} version {version}"
        raise ConflictError(f"messages were published with {which}; add a new version instead")


async def _check_unsubscribed(
    connection: AsyncConnection, room: RoomId, interest: dict[str, Any]
) -> None:
    subscribed = select(subscriptions.c.name).where(
        subscriptions.c.room_id == room,
        subscriptions.c.status.not_in(sorted(ENDED_STATUSES)),
        subscriptions.c.event_types.contains(type_coerce([interest], JSONB)),
    )
    found = await connection.scalar(subscribed.limit(1))
    if found is not None:
        raise ConflictError(
            f"the subscription {found} names it in its event_types; change that first"
        )


def _event_type(row: RowMapping) -> EventType:
    return EventType(
        id=row["id"],
        room_id=RoomId(row["room_id"]),
        name=row["name"],
        versions=tuple(row["versions"]),
        created_at=row["created_at"],
    )


def _version(row: RowMapping) -> EventTypeVersion:
    return EventTypeVersion(
        id=row["id"],
        room_id=RoomId(row["room_id"]),
        event_type=row["name"],
        version=row["version"],
        schema=row["schema"],
        created_at=row["created_at"],
    )
