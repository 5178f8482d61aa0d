"""The application: every route of the API, in one place."""

import re
from collections.abc import Sequence
from typing import Any, Final

from litestar import Litestar, Response, Router, route
from litestar.datastructures import State
from litestar.di import Provide
from litestar.enums import HttpMethod
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme, Tag

from rooms.errors import RoomsError
from rooms.rest import (
    cluster,
    deliveries,
    event_types,
    filter_tests,
    health,
    jobs,
    keys,
    lane,
    message_actions,
    messages,
    ordering,
    publish,
    pull,
    replays,
    restores,
    rooms,
    stream_routes,
    subscription_actions,
    subscriptions,
    versions,
)
from rooms.rest.auth import authorize, declare_scopes, provide_principal, provide_services
from rooms.rest.document import PageRenderPlugin
from rooms.rest.pages import check_query, declare_query
from rooms.rest.problems import answer_anything, answer_http_exception, answer_rooms_error
from rooms.rest.services import Services

VERSION: Final = "1"
PREFIX: Final = "/v1"
_PATH_NAME: Final = re.compile(r"\{([a-z_]+)")
_TOLD: Final = """
Publish messages into rooms; subscribers are called (PUSH) or fetch (PULL). Errors are problem details (RFC 9457), times
RFC 3339 in UTC, lists `{items, next_cursor}`: pass `next_cursor` as `cursor` for the next page. A resource of another
organisation does not exist: 404. Answers 429 and 503 carry Retry-After.
"""
_TAGS: Final = (
    Tag(name="rooms", description="Rooms and their retry policy."),
    Tag(name="event types", description="What may be published into a room, with versions and JSON Schemas."),
    Tag(name="subscriptions", description="Who gets the messages of a room."),
    Tag(name="publish", description="Publishing."),
    Tag(name="pull", description="Fetching and acknowledging (PULL)."),
    Tag(name="messages", description="What was published and what happened to it."),
    Tag(name="deliveries", description="One message on its way to one subscription."),
    Tag(name="jobs", description="What goes on after a 202."),
    Tag(name="keys", description="API keys."),
    Tag(name="cluster", description="The processes of the installation, with the scope `platform`."),
    Tag(name="health", description="For machines; without a key."),
)
ROUTES: Final[Sequence[HTTPRouteHandler]] = (
    *rooms.ROUTES,
    *event_types.ROUTES,
    *versions.ROUTES,
    *subscriptions.ROUTES,
    *subscription_actions.ROUTES,
    *lane.ROUTES,
    *filter_tests.ROUTES,
    *ordering.ROUTES,
    *pull.ROUTES,
    *stream_routes.ROUTES,
    *publish.ROUTES,
    *messages.ROUTES,
    *message_actions.ROUTES,
    *deliveries.ROUTES,
    *restores.ROUTES,
    *replays.ROUTES,
    *jobs.ROUTES,
    *keys.ROUTES,
    *cluster.ROUTES,
)
"""Everything of ours under /v1."""


def create_app(
    services: Services, *, more: Sequence[HTTPRouteHandler] = (), more_tags: Sequence[Tag] = (), debug: bool = False
) -> Litestar:
    """The API over `services`, as an ASGI application; `more`: routes of others under /v1, and their tags."""
    routes = (*ROUTES, *more)
    app = Litestar(
        route_handlers=[
            Router(
                PREFIX,
                route_handlers=[*_options(routes), *routes],
                guards=[authorize, _check_query],
                dependencies={"principal": Provide(provide_principal)},
            ),
            *health.ROUTES,
        ],
        dependencies={"services": Provide(provide_services)},
        exception_handlers={
            RoomsError: answer_rooms_error,
            HTTPException: answer_http_exception,
            Exception: answer_anything,
        },
        openapi_config=OpenAPIConfig(
            title="Rooms",
            version=VERSION,
            description=_TOLD.strip(),
            tags=[*_TAGS, *more_tags],
            use_handler_docstrings=True,
            components=Components(
                security_schemes={
                    "api_key": SecurityScheme(
                        type="http", scheme="bearer", description="`Authorization: Bearer rooms_…`"
                    )
                }
            ),
            operation_id_creator=_operation_id,
            path="/schema",
            render_plugins=[PageRenderPlugin(), JsonRenderPlugin(path="/openapi.json")],
        ),
        state=State({"services": services}),
        request_max_body_size=services.settings.max_body_bytes,
        logging_config=None,
        debug=debug,
    )
    for handler, path in handlers(app):
        if path.startswith(PREFIX):
            declare_query(handler, frozenset(_PATH_NAME.findall(path)))
            declare_scopes(handler, path)
    return app


def handlers(app: Litestar) -> list[tuple[HTTPRouteHandler, str]]:
    """Every handler with its path, OPTIONS apart."""
    return [
        (handler, served.path_format)
        for served in app.routes
        for handler in getattr(served, "route_handlers", ())
        if isinstance(handler, HTTPRouteHandler) and handler.http_methods != {"OPTIONS"}
    ]


def _options(routes: Sequence[HTTPRouteHandler]) -> list[HTTPRouteHandler]:
    """OPTIONS of every path. Litestar's own would name the methods of the path's first handler alone."""
    methods: dict[str, set[str]] = {}
    for handler in routes:
        for path in handler.paths:
            methods.setdefault(path, {HttpMethod.OPTIONS.value}).update(handler.http_methods)

    def answering(path: str, allowed: str) -> HTTPRouteHandler:
        @route(path, http_method=HttpMethod.OPTIONS, status_code=204, include_in_schema=False, sync_to_thread=False)
        def options() -> Response[None]:
            return Response(None, headers={"Allow": allowed})

        return options

    return [answering(path, ", ".join(sorted(found))) for path, found in methods.items()]


def _check_query(connection: Any, handler: BaseRouteHandler) -> None:
    check_query(connection, handler)


def _operation_id(handler: HTTPRouteHandler, *_: Any) -> str:
    return handler.handler_name
