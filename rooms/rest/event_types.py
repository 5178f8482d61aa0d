"""`/v1/rooms/{id}/event-types`: types, and versions of their schema (row A12)."""

from datetime import datetime
from typing import Annotated, Final

from litestar import Response, delete, get, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.names import MAX_NAME, NAME_PATTERN
from rooms.domain.states import Scope
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body, checked_name
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.paths import NamePath, RoomPath, parse_name, parse_room
from rooms.rest.problems import documented
from rooms.rest.versions import Schema, check_schema
from rooms.storage import event_types as records
from rooms.storage import rooms as room_records
from rooms.storage.signals import Channel
from rooms.storage.transactions import transaction

_TYPES: Final = "event-types"
_TAGS: Final = ["event types"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH)
_WRITE: Final = needs(Scope.MANAGE)

TypeName = Annotated[str, Meta(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME)]


class EventTypeNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """An event type, with the schema of its version 1."""

    name: TypeName
    schema: Schema = None


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
    await check_schema(services, principal, data.schema)
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
        next_cursor=seal_cursor(services.seal, _TYPES, last),
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


def _type_out(found: records.EventType) -> EventTypeOut:
    return EventTypeOut(
        id=found.id,
        room_id=found.room_id,
        name=found.name,
        latest_version=found.versions[-1],
        versions=list(found.versions),
        created_at=found.created_at,
    )


ROUTES: Final = [create_event_type, list_event_types, read_event_type, delete_event_type]
