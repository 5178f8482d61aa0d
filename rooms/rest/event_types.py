"""`/v1/rooms/{id}/event-types`: types, and versions of their schema (row A12)."""

from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, delete, get, post, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.names import MAX_NAME, NAME_PATTERN
from rooms.domain.states import Scope
from rooms.publishing.schemas import PayloadSchema
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body, checked_name
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.paths import NamePath, RoomPath, VersionPath, parse_name, parse_room, parse_version
from rooms.rest.problems import documented
from rooms.storage import event_types as records
from rooms.storage import rooms as room_records
from rooms.storage.signals import Channel
from rooms.storage.transactions import transaction

_TYPES: Final = "event-types"
_VERSIONS: Final = "versions"
_TAGS: Final = ["event types"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH)
_WRITE: Final = needs(Scope.MANAGE)

TypeName = Annotated[str, Meta(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME)]
Schema = Annotated[
    dict[str, Any] | bool | None,
    Meta(description="JSON Schema, 2020-12 (the default) or draft-07 by its $schema; null: any JSON fits."),
]


class EventTypeNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """An event type, with the schema of its version 1."""

    name: TypeName
    schema: Schema = None


class VersionNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """A version."""

    schema: Schema


class EventTypeOut(Struct, kw_only=True):
    """An event type; publishes that name no version are checked against `latest_version`."""

    id: str
    room_id: int
    name: str
    latest_version: int
    versions: list[int]
    created_at: datetime


class EventTypePage(Struct, kw_only=True):
    """Event types, newest first."""

    items: list[EventTypeOut]
    next_cursor: str | None


class VersionOut(Struct, kw_only=True):
    """A version of an event type; `schema` null: any JSON fits."""

    id: str
    room_id: int
    event_type: str
    version: int
    schema: Any
    created_at: datetime


class VersionPage(Struct, kw_only=True):
    """Versions, newest first."""

    items: list[VersionOut]
    next_cursor: str | None


@post(
    "/rooms/{room_id:str}/event-types",
    dto=Body[EventTypeNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Declare an event type",
)
async def create_event_type(
    data: JSONBody[EventTypeNew], services: Given, principal: Caller, room_id: RoomPath
) -> Response[EventTypeOut]:
    """201 with the type at version 1. 409: the room has it already."""
    room = parse_room(room_id)
    checked_name(data.name)
    _check(data.schema)
    now_ms = services.clock.now_ms()
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        made = await records.create_event_type(
            connection,
            room,
            data.name,
            data.schema,
            new_id=services.ids.make(room, now_ms),
            version_id=services.ids.make(room, now_ms),
        )
    services.signals.ring(Channel.CONFIG, str(room))
    return Response(_type_out(made), headers={"Location": f"/v1/rooms/{room}/event-types/{made.name}"})


@get("/rooms/{room_id:str}/event-types", opt=_READ, responses=documented(), tags=_TAGS, summary="List event types")
async def list_event_types(
    services: Given, principal: Caller, room_id: RoomPath, limit: Limit = 50, cursor: Cursor = None
) -> EventTypePage:
    """The room's event types, newest first."""
    room = parse_room(room_id)
    before = open_cursor(services.seal, _TYPES, cursor)
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
        found = await records.list_event_types(connection, room, before=before, limit=limit + 1)
    page, last = cut(found, limit, lambda event_type: event_type.id)
    return EventTypePage(
        items=[_type_out(event_type) for event_type in page],
        next_cursor=None if last is None else seal_cursor(services.seal, _TYPES, last),
    )


@get(
    "/rooms/{room_id:str}/event-types/{name:str}",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Read an event type",
)
async def read_event_type(services: Given, principal: Caller, room_id: RoomPath, name: NamePath) -> EventTypeOut:
    """One event type."""
    room, wanted = parse_room(room_id), parse_name(name)
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
        return _type_out(await records.find_event_type(connection, room, wanted))


@delete(
    "/rooms/{room_id:str}/event-types/{name:str}",
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Delete an event type",
)
async def delete_event_type(services: Given, principal: Caller, room_id: RoomPath, name: NamePath) -> None:
    """204. 409: messages were published with it, or a subscription names it."""
    room, wanted = parse_room(room_id), parse_name(name)
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        await records.delete_event_type(connection, room, wanted)
    services.signals.ring(Channel.CONFIG, str(room))


@post(
    "/rooms/{room_id:str}/event-types/{name:str}/versions",
    dto=Body[VersionNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(),
    tags=_TAGS,
    summary="Add a version",
)
async def add_version(
    data: JSONBody[VersionNew], services: Given, principal: Caller, room_id: RoomPath, name: NamePath
) -> Response[VersionOut]:
    """201 with the version, whose number no version of this type ever had."""
    room, wanted = parse_room(room_id), parse_name(name)
    _check(data.schema)
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        new_id = services.ids.make(room, services.clock.now_ms())
        made = await records.add_version(connection, room, wanted, data.schema, new_id=new_id)
    services.signals.ring(Channel.CONFIG, str(room))
    location = f"/v1/rooms/{room}/event-types/{wanted}/versions/{made.version}"
    return Response(_version_out(made), headers={"Location": location})


@get(
    "/rooms/{room_id:str}/event-types/{name:str}/versions",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="List versions",
)
async def list_versions(
    *,
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    name: NamePath,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> VersionPage:
    """The versions of an event type, newest first, with their schemas."""
    room, wanted = parse_room(room_id), parse_name(name)
    position = open_cursor(services.seal, _VERSIONS, cursor)
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
        before = None if position is None else int(position)
        found = await records.list_versions(connection, room, wanted, before=before, limit=limit + 1)
        if not found and before is None:
            raise records.missing(wanted)
    page, last = cut(found, limit, lambda version: str(version.version))
    return VersionPage(
        items=[_version_out(version) for version in page],
        next_cursor=None if last is None else seal_cursor(services.seal, _VERSIONS, last),
    )


@get(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Read a version",
)
async def read_version(
    services: Given, principal: Caller, room_id: RoomPath, name: NamePath, version: VersionPath
) -> VersionOut:
    """One version with its schema."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
        return _version_out(await records.find_version(connection, room, wanted, number))


@put(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    dto=Body[VersionNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Rewrite a version",
)
async def rewrite_version(
    *,
    data: JSONBody[VersionNew],
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    name: NamePath,
    version: VersionPath,
) -> VersionOut:
    """The version with another schema. 409: messages were published with it, so that it must stay what it was."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    _check(data.schema)
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        changed = await records.rewrite_version(connection, room, wanted, number, data.schema)
    services.signals.ring(Channel.CONFIG, str(room))
    return _version_out(changed)


@delete(
    "/rooms/{room_id:str}/event-types/{name:str}/versions/{version:str}",
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Delete a version",
)
async def delete_version(
    services: Given, principal: Caller, room_id: RoomPath, name: NamePath, version: VersionPath
) -> None:
    """204. 409: it is the last one, messages were published with it, or a subscription names it."""
    room, wanted, number = parse_room(room_id), parse_name(name), parse_version(version)
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        await records.delete_version(connection, room, wanted, number)
    services.signals.ring(Channel.CONFIG, str(room))


def _check(schema: object) -> None:
    if schema is not None:
        PayloadSchema(schema, field="schema")


def _type_out(found: records.EventType) -> EventTypeOut:
    return EventTypeOut(
        id=found.id,
        room_id=found.room_id,
        name=found.name,
        latest_version=found.versions[-1],
        versions=list(found.versions),
        created_at=found.created_at,
    )


def _version_out(found: records.Version) -> VersionOut:
    return VersionOut(**{name: getattr(found, name) for name in VersionOut.__struct_fields__})


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
