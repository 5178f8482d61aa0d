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
from rooms.api.govstack import event_types, events, exchange, leases, subscriptions
from rooms.api.govstack.callers import identify_client, identify_member, provide_address
from rooms.api.govstack.document import document_route
from rooms.api.govstack.management import event_types as member_event_types
from rooms.api.govstack.management import members
from rooms.api.govstack.management import publishers as member_publishers
from rooms.api.govstack.management import rooms as member_rooms
from rooms.api.govstack.management import subscriptions as member_subscriptions
from rooms.api.govstack.management.delegation import provide_call
from rooms.api.govstack.operations import handle_error, handle_refusal
from rooms.api.options import options_handlers
from rooms.errors import RoomsError

SPECIFICATION: Final = "/r1"
FIRST_IMPLEMENTATION: Final = "/rooms"
ADMINISTRATION: Final = "/api"
GOVSTACK_PREFIXES: Final = (
    f"{SPECIFICATION}/",
    f"{FIRST_IMPLEMENTATION}/",
    f"{ADMINISTRATION}/",
)
_MEMBER: Final = "/{instance_id:str}/{member_class:str}/{member_code:str}"
_ROOM: Final = "/{application_code:str}"
SPECIFICATION_ROUTES: Final[Sequence[HTTPRouteHandler]] = (
    *event_types.ROUTES,
    *events.ROUTES,
    *subscriptions.ROUTES,
    *leases.ROUTES,
)
MANAGEMENT_ROUTES: Final[Sequence[HTTPRouteHandler]] = (
    *member_rooms.ROUTES,
    *member_event_types.ROUTES,
    *member_publishers.ROUTES,
    *member_subscriptions.ROUTES,
)
_KIND: Final = re.compile(r":[a-z]+(?=\})")


def govstack_routers(check_query: Guard, max_body_bytes: int) -> list[Router | HTTPRouteHandler]:
    """Return the routers, and the routes of their documents.

    `max_body_bytes`: of all but events, which read their body themselves.
    """
    specified = (f"{SPECIFICATION}{_MEMBER}{_ROOM}", SPECIFICATION_ROUTES)
    exchanging = (f"{FIRST_IMPLEMENTATION}{_MEMBER}{_ROOM}", exchange.ROUTES)
    administering = (ADMINISTRATION, members.ROUTES)
    managing = (f"{FIRST_IMPLEMENTATION}{_MEMBER}", MANAGEMENT_ROUTES)
    by_client: list[Guard] = [authorize, check_query, identify_client]
    by_member: list[Guard] = [authorize, check_query, identify_member]
    return [
        _router(*specified, guards=by_client, max_body_bytes=max_body_bytes),
        _router(*exchanging, guards=by_member, max_body_bytes=max_body_bytes),
        _router(*managing, guards=by_member, max_body_bytes=max_body_bytes),
        _router(*administering, guards=by_member, max_body_bytes=max_body_bytes),
        document_route(
            f"{SPECIFICATION}/openapi.json",
            "GovStack Information Mediator: publish and subscribe",
            _with_paths(*specified),
        ),
        document_route(
            f"{FIRST_IMPLEMENTATION}/openapi.json",
            "GovStack publish and subscribe: the interface of the first implementation",
            [
                *_with_paths(*exchanging),
                *_with_paths(*managing),
                *_with_paths(*administering),
            ],
            member_in_one_part=True,
        ),
    ]


def _router(
    prefix: str,
    routes: Sequence[HTTPRouteHandler],
    *,
    guards: list[Guard],
    max_body_bytes: int,
) -> Router:
    return Router(
        prefix,
        route_handlers=[*options_handlers(routes), *routes],
        guards=guards,
        dependencies={
            "principal": Provide(provide_principal),
            "change": Provide(provide_change),
            "address": Provide(provide_address),
            "call": Provide(provide_call),
        },
        exception_handlers={RoomsError: handle_error, HTTPException: handle_refusal},
        include_in_schema=False,
        request_max_body_size=max_body_bytes,
    )


def _with_paths(
    prefix: str, routes: Sequence[HTTPRouteHandler]
) -> list[tuple[HTTPRouteHandler, str]]:
    return [
        (handler, _KIND.sub("", f"{prefix}{path}").removesuffix("/"))
        for handler in routes
        for path in handler.paths
    ]
