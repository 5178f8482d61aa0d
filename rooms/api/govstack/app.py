"""Assemble the routers of GovStack's two interfaces."""

import re
from collections.abc import Sequence
from typing import Final

from litestar import Router
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.types import Guard

from rooms.api.auth import authorize, provide_principal
from rooms.api.changes import provide_change
from rooms.api.govstack import event_types, events, pull, subscriptions
from rooms.api.govstack.callers import identify_client, provide_address
from rooms.api.govstack.document import document_route
from rooms.api.govstack.errors import handle_error, handle_refusal
from rooms.errors import RoomsError

SPECIFICATION: Final = "/r1"
FIRST_IMPLEMENTATION: Final = "/rooms"
GOVSTACK_PREFIXES: Final = (f"{SPECIFICATION}/", f"{FIRST_IMPLEMENTATION}/")
OF_ROOM: Final = "/{instance_id:str}/{member_class:str}/{member_code:str}/{application_code:str}"
SPECIFICATION_ROUTES: Final[Sequence[HTTPRouteHandler]] = (
    *event_types.ROUTES,
    *events.ROUTES,
    *subscriptions.ROUTES,
    *pull.ROUTES,
)
_KIND: Final = re.compile(r":[a-z]+(?=\})")


def govstack_routers(check_query: Guard) -> list[Router | HTTPRouteHandler]:
    """Return the routers, and the routes of their documents."""
    return [
        _router(SPECIFICATION, SPECIFICATION_ROUTES, [authorize, check_query, identify_client]),
        document_route(
            f"{SPECIFICATION}/openapi.json",
            "GovStack Information Mediator: publish and subscribe",
            _with_paths(SPECIFICATION, SPECIFICATION_ROUTES),
        ),
    ]


def _router(prefix: str, routes: Sequence[HTTPRouteHandler], guards: list[Guard]) -> Router:
    return Router(
        prefix + OF_ROOM,
        route_handlers=list(routes),
        guards=guards,
        dependencies={
            "principal": Provide(provide_principal),
            "change": Provide(provide_change),
            "address": Provide(provide_address),
        },
        exception_handlers={RoomsError: handle_error, HTTPException: handle_refusal},
        include_in_schema=False,
    )


def _with_paths(
    prefix: str, routes: Sequence[HTTPRouteHandler]
) -> list[tuple[HTTPRouteHandler, str]]:
    return [
        (handler, _KIND.sub("", f"{prefix}{OF_ROOM}{path}"))
        for handler in routes
        for path in handler.paths
    ]
