"""Serve `/r1/…/api/v1/eventType`: the event types of a room."""

from typing import Any, Final

from litestar import Response, delete, get, post
from litestar.params import JSONBody

from rooms.api import event_types as resource
from rooms.api.auth import BELOW_ROOM, FOR_EVERY_KEY, Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.govstack.bodies import EventTypeItem
from rooms.api.govstack.callers import AddressDep
from rooms.api.govstack.operations import CONFLICT, Operation, Reply, declare, hiding, problem
from rooms.api.params import NamePath, parse_name
from rooms.db.catalog import event_types as records
from rooms.db.catalog.access import find_access
from rooms.db.connection import transaction
from rooms.domain.state_machine import Scope
from rooms.errors import NotFoundError

MAX_NAMES: Final = 10_000
"""The most event types that a list names."""
_PATH: Final = "/api/v1/eventType"
_WRITE: Final = require_scopes(Scope.MANAGE, allows=BELOW_ROOM)
_READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH, allows=FOR_EVERY_KEY)


@post(
    _PATH,
    status_code=200,
    dto=Body[EventTypeItem],
    return_dto=None,
    opt=_WRITE
    | declare(
        Operation(
            body=EventTypeItem,
            replies={
                200: Reply("The event type", EventTypeItem),
                409: problem("The room has it already"),
            },
        )
    ),
    summary="Create an event type",
)
async def create_event_type(
    data: JSONBody[EventTypeItem],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
) -> Response[EventTypeItem]:
    """Create an event type with version 1 of its schema. For the room's owner."""
    body = resource.CreateEventType(name=data.event_type, schema=data.schema)
    with hiding():
        await resource.declare(services, principal, change, address.room_id, body)
    return Response(data, status_code=200)


@get(
    _PATH,
    opt=_READ
    | declare(
        Operation(
            replies={
                200: Reply("The names, at most 10,000", list[str]),
                204: Reply("The caller sees none"),
            }
        )
    ),
    summary="List event types",
)
async def list_event_types(
    services: ServicesDep, principal: Caller, address: AddressDep
) -> Response[Any]:
    """List the names of the event types that the caller may see, newest first."""
    with hiding():
        async with transaction(services.engine) as connection:
            access = await find_access(connection, principal, address.room_id)
            found = await records.list_event_types(
                connection,
                address.room_id,
                visible=(access.visible_event_types, principal.event_types),
                limit=MAX_NAMES,
            )
    if not found:
        return Response(None, status_code=204)
    return Response([one.name for one in found], status_code=200)


@get(
    _PATH + "/{event_type:str}",
    opt=_READ
    | declare(
        Operation(
            replies={
                200: Reply("The event type", EventTypeItem),
                204: Reply("There is no such event type for the caller"),
            }
        )
    ),
    summary="Read an event type",
)
async def read_event_type(
    services: ServicesDep, principal: Caller, address: AddressDep, event_type: NamePath
) -> Response[Any]:
    """Return an event type with the schema of its latest version.

    404 only says that there is no such room for the caller.
    """
    with hiding():
        async with transaction(services.engine) as connection:
            await find_access(connection, principal, address.room_id)
            try:
                name = parse_name(event_type)
                await resource.check_visible(connection, principal, address.room_id, name)
                found = await records.find_event_type(connection, address.room_id, name)
                latest = await records.find_version(
                    connection, address.room_id, name, found.versions[-1]
                )
            except NotFoundError:
                return Response(None, status_code=204)
    return Response(EventTypeItem(event_type=name, schema=latest.schema), status_code=200)


@delete(
    _PATH + "/{event_type:str}",
    opt=_WRITE
    | declare(
        Operation(
            replies={
                204: Reply("It is deleted"),
                409: problem(
                    f"Ours. {CONFLICT}: events were published with it, or it is subscribed"
                ),
            }
        )
    ),
    summary="Delete an event type",
)
async def delete_event_type(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    event_type: NamePath,
) -> None:
    """Delete an event type that was never used. For the room's owner."""
    with hiding():
        await resource.remove(services, principal, change, address.room_id, parse_name(event_type))


ROUTES: Final = [create_event_type, list_event_types, read_event_type, delete_event_type]
