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
from rooms.api.govstack.management.delegation import PAGES, ROOM, answer, delegate
from rooms.api.govstack.operations import Reply
from rooms.api.pagination import Cursor, Limit
from rooms.api.params import IdPath


@get(
    ROOM + "/events",
    opt=delegate(
        messages.list_messages, (200, Reply("The events", messages.MessagePage)), query=PAGES
    ),
    summary="List events",
)
async def list_room_events(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> messages.MessagePage:
    """List the events that the caller owns, published or received, newest first."""
    found: messages.MessagePage = await answer(
        messages.list_messages,
        services=services,
        principal=principal,
        room_id=str(address.room_id),
        limit=limit,
        cursor=cursor,
    )
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
    list_room_events,
    read_room_event,
]
