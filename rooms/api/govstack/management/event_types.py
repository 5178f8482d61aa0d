"""Serve `/rooms/{memberId}/{roomId}/event-types`: event types and their versions."""

from typing import Annotated, Final

from litestar import Response, delete, get, post, put
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api import event_types
from rooms.api.codec import Body
from rooms.api.govstack.management.delegation import (
    PAGES,
    ROOM,
    MemberCallDep,
    delegate,
    list_route,
)
from rooms.api.govstack.operations import CONFLICT, Reply, problem
from rooms.api.pagination import Cursor, Limit
from rooms.api.params import NamePath, VersionPath
from rooms.db.catalog.event_types import EventTypeVersion


class RewriteVersion(Struct, forbid_unknown_fields=True, kw_only=True):
    """Replace the schema of one version."""

    version: Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)]
    schema: event_types.EventTypeSchema


@post(
    ROOM + "/event-types",
    dto=Body[event_types.CreateEventType],
    return_dto=None,
    opt=delegate(
        event_types.create_event_type,
        (201, Reply("The event type", event_types.EventTypeResponse)),
        (409, problem("The room has it already")),
        body=event_types.CreateEventType,
    ),
    summary="Create an event type",
)
async def create_room_event_type(
    data: JSONBody[event_types.CreateEventType], call: MemberCallDep
) -> Response[event_types.EventTypeResponse]:
    """Create an event type with its version 1. For the room's owner."""
    found: Response[event_types.EventTypeResponse] = await call(
        event_types.create_event_type, data=data
    )
    return found


@delete(
    ROOM + "/event-types/{event_type:str}",
    opt=delegate(
        event_types.delete_event_type,
        (204, Reply("It is deleted")),
        (409, problem(f"{CONFLICT}: events were published with it, or it is subscribed")),
    ),
    summary="Delete an event type",
)
async def delete_room_event_type(call: MemberCallDep, event_type: NamePath) -> None:
    """Delete an event type that was never used. For the room's owner."""
    await call(event_types.delete_event_type, name=event_type)


@get(
    ROOM + "/event-types/{event_type:str}/versions",
    opt=delegate(
        event_types.list_versions,
        (200, Reply("The versions", event_types.EventTypeVersionPage)),
        query=PAGES,
    ),
    summary="List versions",
)
async def list_room_versions(
    *, call: MemberCallDep, event_type: NamePath, limit: Limit = 50, cursor: Cursor = None
) -> event_types.EventTypeVersionPage:
    """List the versions of an event type with their schemas, newest first."""
    found: event_types.EventTypeVersionPage = await call(
        event_types.list_versions, name=event_type, limit=limit, cursor=cursor
    )
    return found


@post(
    ROOM + "/event-types/{event_type:str}/versions",
    dto=Body[event_types.EventTypeVersionRequest],
    return_dto=None,
    opt=delegate(
        event_types.add_version,
        (201, Reply("The version", EventTypeVersion)),
        body=event_types.EventTypeVersionRequest,
    ),
    summary="Add a version",
)
async def add_room_version(
    *,
    data: JSONBody[event_types.EventTypeVersionRequest],
    call: MemberCallDep,
    event_type: NamePath,
) -> Response[EventTypeVersion]:
    """Add a version to an event type. For the room's owner."""
    found: Response[EventTypeVersion] = await call(
        event_types.add_version, data=data, name=event_type
    )
    return found


@put(
    ROOM + "/event-types/{event_type:str}/versions",
    dto=Body[RewriteVersion],
    return_dto=None,
    opt=delegate(
        event_types.rewrite_version,
        (200, Reply("The version", EventTypeVersion)),
        (409, problem(f"{CONFLICT}: events were published with it")),
        body=RewriteVersion,
    ),
    summary="Rewrite a version",
)
async def rewrite_room_version(
    *, data: JSONBody[RewriteVersion], call: MemberCallDep, event_type: NamePath
) -> EventTypeVersion:
    """Replace the schema of a version that no event has. For the room's owner."""
    found: EventTypeVersion = await call(
        event_types.rewrite_version,
        data=event_types.EventTypeVersionRequest(schema=data.schema),
        name=event_type,
        version=str(data.version),
    )
    return found


@delete(
    ROOM + "/event-types/{event_type:str}/versions/{version:str}",
    opt=delegate(
        event_types.delete_version,
        (204, Reply("It is deleted")),
        (409, problem(f"{CONFLICT}: it is the only one, has events, or is subscribed")),
    ),
    summary="Delete a version",
)
async def delete_room_version(
    *, call: MemberCallDep, event_type: NamePath, version: VersionPath
) -> None:
    """Delete a version that was never used. For the room's owner."""
    await call(event_types.delete_version, name=event_type, version=version)


ROUTES: Final = [
    list_route(
        ROOM + "/event-types",
        event_types.list_event_types,
        event_types.EventTypePage,
        name="list_room_event_types",
        about="List the event types that the caller may see, newest first.",
    ),
    create_room_event_type,
    delete_room_event_type,
    list_room_versions,
    add_room_version,
    rewrite_room_version,
    delete_room_version,
]
