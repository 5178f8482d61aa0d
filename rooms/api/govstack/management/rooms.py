"""Serve `/rooms/{memberId}` and `/rooms/{memberId}/{roomId}`: rooms, and what was published."""

from typing import Final

from litestar import Response, delete, get, post, put
from litestar.params import FromQuery, JSONBody

from rooms.api import messages, rooms
from rooms.api.auth import Caller, ServicesDep
from rooms.api.codec import Body
from rooms.api.fast_routes import JSON
from rooms.api.govstack.bodies import EventItem
from rooms.api.govstack.callers import AddressDep
from rooms.api.govstack.events import describe_event, find_event
from rooms.api.govstack.management.delegation import (
    PAGES,
    ROOM,
    MemberCallDep,
    delegate,
    list_route,
)
from rooms.api.govstack.operations import Reply, hiding, problem
from rooms.api.jobs import JobAccepted
from rooms.api.pagination import Cursor, Limit
from rooms.api.params import IdPath
from rooms.api.room_bodies import CreateRoom, RoomPage, RoomResponse, UpdateRoom
from rooms.errors import OtherMemberError

_CONFIRM: Final = {
    "confirm": {
        "description": "Ours. The room's name, to prevent deleting by mistake.",
        "required": True,
        "schema": {"type": "string"},
    }
}
_NO_NEW_ROOM: Final = "a member creates rooms of its own: use its own member id in the path"


@get(
    "/",
    opt=delegate(rooms.list_rooms, (200, Reply("The rooms", RoomPage)), query=PAGES),
    summary="List the own rooms",
)
async def list_member_rooms(
    call: MemberCallDep, limit: Limit = 50, cursor: Cursor = None
) -> RoomPage:
    """List the caller's rooms, newest first. The member of the path must be the caller."""
    if call.address.owner != call.address.caller.member_id:
        raise OtherMemberError("the member of the path is not the caller: it lists its own rooms")
    found: RoomPage = await call(rooms.list_rooms, limit=limit, cursor=cursor)
    return found


@post(
    "/",
    dto=Body[CreateRoom],
    return_dto=None,
    opt=delegate(
        rooms.create_room,
        (201, Reply("The room", RoomResponse)),
        (409, problem("The member has a room of this name")),
        body=CreateRoom,
    ),
    summary="Create a room",
)
async def create_member_room(
    data: JSONBody[CreateRoom], call: MemberCallDep
) -> Response[RoomResponse]:
    """Create a room of the caller, which these interfaces serve."""
    if call.address.owner != call.address.caller.member_id:
        raise OtherMemberError(_NO_NEW_ROOM)
    data.govstack = True
    found: Response[RoomResponse] = await call(rooms.create_room, data=data)
    return found


@get(
    ROOM,
    opt=delegate(rooms.read_room, (200, Reply("The room", RoomResponse))),
    summary="Read a room",
)
async def read_member_room(call: MemberCallDep) -> RoomResponse:
    """Return a room in which the caller has a part."""
    found: RoomResponse = await call(rooms.read_room)
    return found


@put(
    ROOM,
    dto=Body[UpdateRoom],
    return_dto=None,
    opt=delegate(
        rooms.change_room,
        (200, Reply("The room", RoomResponse)),
        (409, problem("The member has a room of this name")),
        body=UpdateRoom,
    ),
    summary="Change a room",
)
async def change_member_room(data: JSONBody[UpdateRoom], call: MemberCallDep) -> RoomResponse:
    """Change the given fields of a room; null clears. A new name is a new address."""
    found: RoomResponse = await call(rooms.change_room, data=data)
    return found


@delete(
    ROOM,
    status_code=202,
    opt=delegate(
        rooms.delete_room,
        (202, Reply("The job that deletes it", JobAccepted, {"Location": "Its path in `/v1`"})),
        query=_CONFIRM,
    ),
    summary="Delete a room",
)
async def delete_member_room(
    call: MemberCallDep, confirm: FromQuery[str | None] = None
) -> Response[JobAccepted]:
    """Start to delete a room with everything in it. For requests it is gone at once."""
    found: Response[JobAccepted] = await call(rooms.delete_room, confirm=confirm)
    return found


@get(
    ROOM + "/events/{event_id:str}",
    opt=delegate(messages.read_message, (200, Reply("The event", EventItem))),
    summary="Read an event",
)
async def read_room_event(
    services: ServicesDep, principal: Caller, address: AddressDep, event_id: IdPath
) -> Response[bytes]:
    """Return an event with its status, and the number of its deliveries in each state."""
    with hiding():
        found = await find_event(services, principal, address.room_id, event_id)
    return Response(await describe_event(services, found), media_type=JSON)


ROUTES: Final = [
    list_member_rooms,
    create_member_room,
    read_member_room,
    change_member_room,
    delete_member_room,
    list_route(
        ROOM + "/events",
        messages.list_messages,
        messages.MessagePage,
        name="list_room_events",
        about="List the events that the caller owns, published or received, newest first.",
    ),
    read_room_event,
]
