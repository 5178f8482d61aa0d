"""Serve `/rooms/{memberId}/{roomId}/events`: list and read what was published."""

from typing import Final

from litestar import Response, get

from rooms.api import messages
from rooms.api.auth import Caller, ServicesDep
from rooms.api.fast_routes import JSON
from rooms.api.govstack.bodies import EventItem
from rooms.api.govstack.callers import AddressDep
from rooms.api.govstack.errors import hiding
from rooms.api.govstack.events import describe_event, find_event
from rooms.api.govstack.management.delegation import ROOM, delegate, list_route
from rooms.api.govstack.operations import Reply
from rooms.api.params import IdPath


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
    list_route(
        ROOM + "/events",
        messages.list_messages,
        messages.MessagePage,
        name="list_room_events",
        about="List the events that the caller owns, published or received, newest first.",
    ),
    read_room_event,
]
