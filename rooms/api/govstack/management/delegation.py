"""Call a handler of `/v1` for the same resource, with its scopes, bodies and answers."""

from typing import Any, Final

from rooms.api import subscriptions
from rooms.api.govstack.errors import NOT_THERE, hiding
from rooms.api.govstack.operations import Operation, Reply, declare
from rooms.domain.ids import RoomId, room_of
from rooms.errors import NotFoundError

ROOM: Final = "/{application_code:str}"
PAGES: Final = {
    "limit": {
        "description": "The most items of a page.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 200, "default": 50},
    },
    "cursor": {
        "description": "The `next_cursor` of the page before.",
        "schema": {"type": "string"},
    },
}


def delegate(handler: Any, *replies: tuple[int, Reply], **more: Any) -> dict[str, Any]:
    """Return the `opt` of a route that calls a handler of `/v1`, with its scopes and keys."""
    return {**handler.opt, **declare(Operation(replies=dict(replies), **more))}


async def answer(handler: Any, **arguments: Any) -> Any:
    """Return what a handler of `/v1` returns, or raise what it raises; 404 is always the same."""
    with hiding():
        return await handler.fn(**arguments)


async def answer_in_room(handler: Any, room: RoomId, subscription_id: str, **arguments: Any) -> Any:
    """Return what a handler of `/v1` returns for a subscription of a room. NotFoundError."""
    with hiding():
        if room_of(subscriptions.parse_subscription(subscription_id)) != room:
            raise NotFoundError(NOT_THERE)
        return await handler.fn(subscription_id=subscription_id, **arguments)
