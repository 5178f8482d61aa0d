"""Call a handler of `/v1` for the same resource, with its scopes, bodies and answers."""

from collections.abc import Mapping
from typing import Any, Final

from litestar import get
from litestar.handlers import HTTPRouteHandler

from rooms.api import subscriptions
from rooms.api.auth import Caller, ServicesDep
from rooms.api.deps import ApiServices
from rooms.api.govstack.callers import Address, AddressDep
from rooms.api.govstack.errors import NOT_THERE, hiding
from rooms.api.govstack.operations import Operation, Reply, declare
from rooms.api.pagination import MAX_LIMIT, Cursor, Limit
from rooms.domain.ids import RoomId, room_of
from rooms.domain.principal import Principal
from rooms.errors import NotFoundError

ROOM: Final = "/{application_code:str}"
PAGES: Final = {
    "limit": {
        "description": "The most items of a page.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": 50},
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


def list_route(
    path: str,
    handler: Any,
    page: type,
    *,
    name: str,
    about: str,
    fixed: Mapping[str, Any] | None = None,
) -> HTTPRouteHandler:
    """Return a route for the pages of a list of `/v1`: of a room, or of the installation.

    `name` is its operation, and `about` its description. `fixed`: further arguments of the handler.
    """

    async def read_page(
        services: ServicesDep,
        principal: Caller,
        address: AddressDep,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Any:
        wanted = list_arguments(path, services, principal, address)
        return await answer(handler, limit=limit, cursor=cursor, **wanted, **(fixed or {}))

    opt = delegate(handler, (200, Reply("A page", page)), query=PAGES)
    return named_route(path, read_page, opt, name=name, about=about)


def list_arguments(
    path: str, services: ApiServices, principal: Principal, address: Address
) -> dict[str, Any]:
    """Return what a list of `/v1` takes besides its page."""
    if ROOM not in path:
        return {"services": services}
    return {"services": services, "principal": principal, "room_id": str(address.room_id)}


def named_route(
    path: str, function: Any, opt: Mapping[str, Any], *, name: str, about: str
) -> HTTPRouteHandler:
    """Return the route of a function that was made for it: GET, with this name and description."""
    function.__name__, function.__doc__ = name, about
    summary = name.replace("_", " ").capitalize()
    made: HTTPRouteHandler = get(path, opt=opt, summary=summary)(function)
    return made
