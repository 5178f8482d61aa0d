"""Serve `/v1/rooms/{id}/event-types`: event types and the versions of their schemas."""

import re
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Response, delete, get, post, put
from litestar.params import JSONBody
from msgspec import Meta, Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import (
    BELOW_ROOM,
    FOR_EVERY_KEY,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import Change, ChangeDep
from rooms.api.codec import Body, validate_name
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import (
    NamePath,
    RoomPath,
    VersionPath,
    parse_name,
    parse_room,
    parse_version,
)
from rooms.db.catalog import event_types as records
from rooms.db.catalog import rooms as room_records
from rooms.db.catalog.access import find_access
from rooms.db.connection import transaction
from rooms.db.notify import Channel
from rooms.domain.ids import RoomId
from rooms.domain.names import MAX_NAME, NAME_PATTERN
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.number_bounds import decode_json

_VERSION_LIST: Final = "versions"
_EXPONENT: Final = re.compile(rb"[0-9][eE]")

EventTypeSchema = Annotated[
    dict[str, Any] | bool | None,
    Meta(description="JSON Schema, 2020-12 (default) or draft-07 by its $schema; null: any JSON."),
]

_TAGS: Final = ["event types"]
_READ: Final = for_portals(
    require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH, allows=FOR_EVERY_KEY)
)
_WRITE: Final = require_scopes(Scope.MANAGE, allows=BELOW_ROOM)


class EventTypeVersionRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Hold the schema of a version."""

    schema: EventTypeSchema


class EventTypeVersionPage(Struct, kw_only=True):
    """List versions, newest first."""

    items: list[records.EventTypeVersion]
    next_cursor: str | None


@post(
    "/rooms/{room_id:str}/event-types/{name:str}/versions",
    dto=Body[EventTypeVersionRequest],
    return_dto=None,
    opt=_WRITE,
    tags=_TAGS,
    summary="Add a version",
)
async def add_version(
    *,
    data: JSONBody[EventTypeVersionRequest],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
    name: NamePath,
) -> Response[records.EventTypeVersion]:
    """Add a version. Its number was never used by this type before."""
    room, wanted = parse_room(room_id), parse_name(name)
    made = await append_version(
        room, wanted, data.schema, services=services, principal=principal, change=change
    )
    location = f"/v1/rooms/{room}/event-types/{wanted}/versions/{made.version}"
    return Response(made, headers={"Location": location})


async def append_version(
    room: RoomId,
    name: str,
    schema: object,
    *,
    services: ApiServices,
    principal: Principal,
    change: Change,
) -> records.EventTypeVersion:
    """Add a version to an event type. InvalidError, NotFoundError."""
    await check_schema(services, principal, schema)
    async with change.transaction() as connection:
        await room_records.touch_room(connection, principal, room)
        new_id = services.ids.generate(room, services.clock.now_ms())
        made = await records.add_version(connection, room, name, schema, new_id=new_id)
        await records.check_total_size(connection, room, services.settings.max_room_schema_bytes)
    services.notifier.notify(Channel.CONFIG, str(room))
    return made


@get(
    "/rooms/{room_id:str}/event-types/{name:str}/versions",
    opt=_READ,
    tags=_TAGS,
    summary="List versions",
)
async def list_versions(
    *,
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
    name: NamePath,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> EventTypeVersionPage:
    """List the versions of an event type with their schemas, newest first.

    A page ends early where its schemas have 1 MiB.
    """
    room, wanted = parse_room(room_id), parse_name(name)
    page = PageRequest(services.cipher, _VERSION_LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        await check_visible(connection, principal, room, wanted)
        before = None if page.after is None else int(page.after)
        found, is_cut = await records.list_versions(
            connection, room, wanted, before=before, limit=page.fetch_limit
        )
        if not found and before is None:
            raise records.event_type_not_found(wanted)
    return page.respond(
        EventTypeVersionPage,
        found,
        position=lambda version: str(version.version),
        further=str(found[-1].version) if is_cut else None,
    )


@get(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    opt=_READ,
    tags=_TAGS,
    summary="Read a version",
)
async def read_version(
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
    name: NamePath,
    version: VersionPath,
) -> records.EventTypeVersion:
    """Return one version with its schema."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    async with transaction(services.engine) as connection:
        await check_visible(connection, principal, room, wanted)
        return await records.find_version(connection, room, wanted, number)


@put(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    dto=Body[EventTypeVersionRequest],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Rewrite a version",
)
async def rewrite_version(
    *,
    data: JSONBody[EventTypeVersionRequest],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
    name: NamePath,
    version: VersionPath,
) -> records.EventTypeVersion:
    """Replace the schema of a version. 409: messages were published with it."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    await check_schema(services, principal, data.schema)
    async with change.transaction() as connection:
        await room_records.touch_room(connection, principal, room)
        before = await records.total_size(connection, room)
        changed = await records.replace_schema(connection, room, wanted, number, data.schema)
        # A room that was over the limit before may come closer to it.
        limit = max(services.settings.max_room_schema_bytes, before)
        await records.check_total_size(connection, room, limit)
    services.notifier.notify(Channel.CONFIG, str(room))
    return changed


@delete(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Delete a version",
)
async def delete_version(
    *,
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
    name: NamePath,
    version: VersionPath,
) -> None:
    """Delete a version. 409: it is the last one, messages used it, or a subscription names it."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    async with change.transaction() as connection:
        await room_records.touch_room(connection, principal, room)
        await records.delete_version(connection, room, wanted, number)
    services.notifier.notify(Channel.CONFIG, str(room))


async def check_schema(services: ApiServices, principal: Principal, schema: object) -> None:
    """Raise InvalidError, naming the place, where a JSON Schema is not accepted."""
    if schema is not None:
        checker = services.publisher.checker
        await checker.check_schema(principal.organisation_id, schema, field="schema")
        await _check_stored(services, schema)


async def _check_stored(services: ApiServices, schema: object) -> None:
    """Check the size that publishing will find: PostgreSQL writes exponents out."""
    text = msgspec.json.encode(schema)
    if not _EXPONENT.search(text):
        return
    most = services.settings.max_schema_bytes
    async with transaction(services.engine) as connection:
        # With a space behind each comma and colon.
        stored = await records.as_stored(connection, text.decode(), most_bytes=2 * most)
    if stored is None or len(msgspec.json.encode(decode_json(stored.encode()))) > most:
        raise InvalidError(
            FieldProblem(
                "schema",
                f"with its numbers written out in full it has more than {most:,} bytes: use"
                " numbers of fewer digits",
            )
        )


_TYPE_LIST: Final = "event-types"

EventTypeName = Annotated[str, Meta(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME)]


class CreateEventType(Struct, forbid_unknown_fields=True, kw_only=True):
    """Hold a new event type, with the schema of its version 1."""

    name: EventTypeName
    schema: EventTypeSchema = None


class EventTypeResponse(Struct, kw_only=True):
    """Describe an event type; publishes without a version are checked against `latest_version`."""

    id: str
    room_id: int
    name: str
    latest_version: int
    versions: list[int]
    created_at: datetime


class EventTypePage(Struct, kw_only=True):
    """List event types, newest first."""

    items: list[EventTypeResponse]
    next_cursor: str | None


@post(
    "/rooms/{room_id:str}/event-types",
    dto=Body[CreateEventType],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Declare an event type",
)
async def create_event_type(
    data: JSONBody[CreateEventType],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
) -> Response[EventTypeResponse]:
    """Create the type with version 1. 409: the room has it already."""
    made = await declare(services, principal, change, parse_room(room_id), data)
    return Response(
        _to_event_type_response(made),
        headers={"Location": f"/v1/rooms/{made.room_id}/event-types/{made.name}"},
    )


async def declare(
    services: ApiServices,
    principal: Principal,
    change: Change,
    room: RoomId,
    data: CreateEventType,
) -> records.EventType:
    """Create an event type with version 1. InvalidError, NotFoundError, ConflictError."""
    validate_name(data.name)
    await check_schema(services, principal, data.schema)
    now_ms = services.clock.now_ms()
    async with change.transaction() as connection:
        await room_records.touch_room(connection, principal, room)
        made = await records.create_event_type(
            connection,
            room,
            data.name,
            data.schema,
            new_id=services.ids.generate(room, now_ms),
            version_id=services.ids.generate(room, now_ms),
        )
        await records.check_total_size(connection, room, services.settings.max_room_schema_bytes)
    services.notifier.notify(Channel.CONFIG, str(room))
    return made


@get("/rooms/{room_id:str}/event-types", opt=_READ, tags=_TAGS, summary="List event types")
async def list_event_types(
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> EventTypePage:
    """List the room's event types, newest first."""
    room = parse_room(room_id)
    page = PageRequest(services.cipher, _TYPE_LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        access = await find_access(connection, principal, room)
        found = await records.list_event_types(
            connection,
            room,
            visible=(access.visible_event_types, principal.event_types),
            before=page.after,
            limit=page.fetch_limit,
        )
    return page.respond(
        EventTypePage, found, _to_event_type_response, position=lambda event_type: event_type.id
    )


@get(
    "/rooms/{room_id:str}/event-types/{name:str}",
    opt=_READ,
    tags=_TAGS,
    summary="Read an event type",
)
async def read_event_type(
    services: ServicesDep, principal: Caller, room_id: RoomPath, name: NamePath
) -> EventTypeResponse:
    """Return one event type."""
    room, wanted = parse_room(room_id), parse_name(name)
    async with transaction(services.engine) as connection:
        await check_visible(connection, principal, room, wanted)
        return _to_event_type_response(await records.find_event_type(connection, room, wanted))


@delete(
    "/rooms/{room_id:str}/event-types/{name:str}",
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Delete an event type",
)
async def delete_event_type(
    services: ServicesDep, principal: Caller, change: ChangeDep, room_id: RoomPath, name: NamePath
) -> None:
    """Delete an event type. 409: messages were published with it, or a subscription names it."""
    await remove(services, principal, change, parse_room(room_id), parse_name(name))


async def remove(
    services: ApiServices, principal: Principal, change: Change, room: RoomId, name: str
) -> None:
    """Delete an event type. NotFoundError, ConflictError."""
    async with change.transaction() as connection:
        await room_records.touch_room(connection, principal, room)
        await records.delete_event_type(connection, room, name)
    services.notifier.notify(Channel.CONFIG, str(room))


def _to_event_type_response(event_type: records.EventType) -> EventTypeResponse:
    return EventTypeResponse(
        id=event_type.id,
        room_id=event_type.room_id,
        name=event_type.name,
        latest_version=event_type.versions[-1],
        versions=list(event_type.versions),
        created_at=event_type.created_at,
    )


async def check_visible(
    connection: AsyncConnection, principal: Principal, room: RoomId, name: str
) -> None:
    """Raise NotFoundError where a principal may not read an event type of a room."""
    access = await find_access(connection, principal, room)
    if not (access.sees_event_type(name) and principal.may_use_event_type(name)):
        raise records.event_type_not_found(name)


ROUTES: Final = [
    create_event_type,
    list_event_types,
    read_event_type,
    delete_event_type,
    add_version,
    list_versions,
    read_version,
    rewrite_version,
    delete_version,
]
