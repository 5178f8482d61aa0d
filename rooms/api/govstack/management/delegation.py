"""Call a handler of `/v1` for the same resource, with its scopes, bodies and answers."""

from collections.abc import Mapping
from typing import Any, Final

from litestar import get
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.params import SkipValidation

from rooms.api import subscriptions
from rooms.api.auth import Caller, ServicesDep
from rooms.api.changes import Change, ChangeDep
from rooms.api.deps import ApiServices
from rooms.api.govstack.callers import Address, AddressDep
from rooms.api.govstack.operations import NOT_THERE, Operation, Reply, declare, hiding
from rooms.api.pagination import MAX_LIMIT, Cursor, Limit
from rooms.domain.ids import room_of
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


class MemberCall:
    """Call handlers of `/v1` for the caller, and for the room of the address."""

    def __init__(
        self, services: ApiServices, principal: Principal, change: Change, address: Address
    ) -> None:
        self.services = services
        self.principal = principal
        self.change = change
        self.address = address

    async def __call__(self, handler: Any, **arguments: Any) -> Any:
        """Return what a handler returns, or raise what it raises; 404 is always the same."""
        with hiding():
            return await self.answer(handler, **arguments)

    async def of_subscription(self, handler: Any, subscription_id: str, **arguments: Any) -> Any:
        """Return what a handler returns for a subscription of the room. NotFoundError."""
        with hiding():
            if room_of(subscriptions.parse_subscription(subscription_id)) != self.address.room_id:
                raise NotFoundError(NOT_THERE)
            return await self.answer(handler, subscription_id=subscription_id, **arguments)

    async def answer(self, handler: Any, **arguments: Any) -> Any:
        """Return what a handler returns with these arguments and those of the call."""
        own = {
            "services": self.services,
            "principal": self.principal,
            "change": self.change,
            "room_id": str(self.address.room_id),
        }
        taken = {name: own[name] for name in own.keys() & handler.fn.__annotations__.keys()}
        return await handler.fn(**taken, **arguments)


MemberCallDep = NamedDependency[SkipValidation[MemberCall]]
"""The argument `call` of a handler that delegates."""


async def provide_call(
    services: ServicesDep, principal: Caller, change: ChangeDep, address: AddressDep
) -> MemberCall:
    """Return what calls handlers of `/v1` for a request."""
    return MemberCall(services, principal, change, address)


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

    async def read_page(call: MemberCallDep, limit: Limit = 50, cursor: Cursor = None) -> Any:
        return await call(handler, limit=limit, cursor=cursor, **(fixed or {}))

    opt = delegate(handler, (200, Reply("A page", page)), query=PAGES)
    return named_route(path, read_page, opt, name=name, about=about)


def named_route(
    path: str, function: Any, opt: Mapping[str, Any], *, name: str, about: str
) -> HTTPRouteHandler:
    """Return the route of a function that was made for it: GET, with this name and description."""
    function.__name__, function.__doc__ = name, about
    summary = name.replace("_", " ").capitalize()
    made: HTTPRouteHandler = get(path, opt=opt, summary=summary)(function)
    return made
