"""Assemble the application: every route of the API is registered here."""

import re
from collections.abc import Sequence
from copy import copy
from typing import Any, Final

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme, Tag

from rooms.api import (
    analytics,
    checks,
    cluster,
    deliveries,
    event_types,
    filter_test,
    grants,
    handler_queues,
    handler_sideline,
    health,
    jobs,
    journal,
    keys,
    magazines,
    message_changes,
    message_timeline,
    messages,
    named_messages,
    ordering,
    organisations,
    portal_links,
    publish,
    pull,
    pull_queue,
    push_template,
    quotas,
    receipts,
    restore,
    rooms,
    search,
    sessions,
    shovel_schedules,
    sideline,
    sideline_overview,
    signing_keys,
    status,
    streams,
    subscription_actions,
    subscription_approval,
    subscription_clearing,
    subscription_creation,
    subscriptions,
    usage,
    waiting_retries,
)
from rooms.api.auth import (
    authorize,
    declare_scopes,
    provide_principal,
    provide_services,
)
from rooms.api.changes import RefusalJournal, provide_change
from rooms.api.deps import ApiServices
from rooms.api.errors import handle_http_exception, handle_rooms_error, handle_unexpected_error
from rooms.api.govstack.app import GOVSTACK_PREFIXES, govstack_routers
from rooms.api.govstack.operations import OPERATION
from rooms.api.openapi import PageRenderPlugin, declare_answers, declare_body, openapi_router
from rooms.api.options import options_handlers
from rooms.api.params import register_query, reject_unknown_query
from rooms.api.subscription_creation import SubscriptionCreator
from rooms.errors import RoomsError

VERSION: Final = "1"
PREFIX: Final = "/v1"
_BATCH: Final = "/batch"
"""The end of the paths that take several messages."""
_PATH_PARAMETER: Final = re.compile(r"\{([a-z_]+)")
_DESCRIPTION: Final = """
Publish messages into rooms; webhooks deliver them (PUSH), or clients lease them (PULL).
Errors are problem details (RFC 9457), times RFC 3339 in UTC, lists `{items, next_cursor}`:
pass `next_cursor` as `cursor` for the next page. A resource of another organisation is unknown:
404. Answers 429 and 503 carry Retry-After. A client certificate, or a trusted proxy, may identify
the caller in place of a key.
"""
_TAGS: Final = (
    Tag(name="rooms", description="Rooms and their retry policy."),
    Tag(
        name="event types",
        description="What may be published into a room, with versions and JSON Schemas.",
    ),
    Tag(name="subscriptions", description="The receivers of a room's messages."),
    Tag(name="publish", description="Publishing."),
    Tag(name="pull", description="Leasing and acknowledging messages (PULL)."),
    Tag(name="messages", description="Published messages and their history."),
    Tag(name="deliveries", description="One message on its way to one subscription."),
    Tag(name="jobs", description="Long-running work after a 202."),
    Tag(name="keys", description="API keys."),
    Tag(name="organisations", description="The members of the installation, and what they share."),
    Tag(name="evidence", description="Signatures of publishers, and signed receipts."),
    Tag(name="journal", description="Every change of configuration, and every refused attempt."),
    Tag(name="quotas", description="Limits of organisations and rooms."),
    Tag(name="usage", description="What was published and delivered, by minute, hour or day."),
    Tag(
        name="cluster", description="The processes of the installation, with the scope `platform`."
    ),
    Tag(name="sideline", description="Failed deliveries, and shoveling them."),
    Tag(
        name="magazines",
        description="The stores behind sidelines and handler queues: depth, pointers and counters.",
    ),
    Tag(name="queues", description="Messages for handlers in Python processes."),
    Tag(
        name="analysis",
        description="Results of the log analysis: lost messages, incidents, retries.",
    ),
    Tag(name="health", description="For machines; without a key."),
)
ROUTES: Final[Sequence[HTTPRouteHandler]] = (
    *rooms.ROUTES,
    *event_types.ROUTES,
    *subscription_creation.ROUTES,
    *subscriptions.ROUTES,
    *filter_test.ROUTES,
    *subscription_actions.ROUTES,
    *subscription_approval.ROUTES,
    *subscription_clearing.ROUTES,
    *waiting_retries.ROUTES,
    *ordering.ROUTES,
    *pull.ROUTES,
    *pull_queue.ROUTES,
    *streams.ROUTES,
    *publish.ROUTES,
    *messages.ROUTES,
    *message_timeline.ROUTES,
    *message_changes.ROUTES,
    *named_messages.ROUTES,
    *receipts.ROUTES,
    *deliveries.ROUTES,
    *restore.ROUTES,
    *jobs.ROUTES,
    *keys.ROUTES,
    *search.ROUTES,
    *sessions.ROUTES,
    *portal_links.ROUTES,
    *signing_keys.ROUTES,
    *journal.ROUTES,
    *usage.ROUTES,
    *quotas.ROUTES,
    *organisations.ROUTES,
    *push_template.ROUTES,
    *grants.ROUTES,
    *cluster.ROUTES,
    *sideline_overview.ROUTES,
    *shovel_schedules.ROUTES,
    *checks.ROUTES,
    *sideline.ROUTES,
    *magazines.ROUTES,
    *status.ROUTES,
    *handler_queues.ROUTES,
    *handler_sideline.ROUTES,
    *analytics.ROUTES,
)
"""Register every resource under `/v1`."""


def create_app(services: ApiServices) -> Litestar:
    """Return the API over `services` as an ASGI application."""
    refusals, settings = RefusalJournal(), services.settings
    routes = [
        one
        if any(path.endswith(_BATCH) for path in one.paths)
        else _bounded(one, settings.max_resource_body_bytes)
        for one in ROUTES
    ]
    app = Litestar(
        route_handlers=[
            Router(
                PREFIX,
                route_handlers=[*options_handlers(routes), *routes],
                guards=[authorize, _check_query],
                dependencies={
                    "principal": Provide(provide_principal),
                    "change": Provide(provide_change),
                },
            ),
            *govstack_routers(_check_query, settings.max_resource_body_bytes),
            *health.ROUTES,
            *receipts.PUBLIC_ROUTES,
        ],
        dependencies={"services": Provide(provide_services)},
        exception_handlers={
            RoomsError: handle_rooms_error,
            HTTPException: handle_http_exception,
            Exception: handle_unexpected_error,
        },
        openapi_config=OpenAPIConfig(
            title="Rooms",
            version=VERSION,
            description=_DESCRIPTION.strip(),
            tags=list(_TAGS),
            use_handler_docstrings=True,
            components=Components(
                security_schemes={
                    "api_key": SecurityScheme(
                        type="http", scheme="bearer", description="`Authorization: Bearer rooms_…`"
                    )
                }
            ),
            operation_id_creator=_operation_id,
            openapi_router=openapi_router(),
            render_plugins=[PageRenderPlugin(), JsonRenderPlugin(path="/openapi.json")],
        ),
        after_exception=[refusals.after_exception],
        on_shutdown=[refusals.close],
        state=State({"services": services, "creator": SubscriptionCreator()}),
        request_max_body_size=settings.max_body_bytes,
        logging_config=None,
        debug=False,
    )
    for handler, path in route_handlers(app):
        if path.startswith(PREFIX):
            register_query(handler, frozenset(_PATH_PARAMETER.findall(path)))
            declare_scopes(handler, path)
            declare_answers(handler)
            declare_body(handler)
    for handler, path in govstack_handlers(app):
        register_query(handler, frozenset(_PATH_PARAMETER.findall(path)))
    return app


def _bounded(handler: HTTPRouteHandler, max_body_bytes: int) -> HTTPRouteHandler:
    """Return a route with a bound of its own for bodies."""
    own = copy(handler)
    own.request_max_body_size = max_body_bytes
    return own


def route_handlers(app: Litestar) -> list[tuple[HTTPRouteHandler, str]]:
    """Return every handler with its path, without OPTIONS and those of GovStack's interfaces."""
    return [one for one in _all_handlers(app) if not _is_of_govstack(one[1])]


def govstack_handlers(app: Litestar) -> list[tuple[HTTPRouteHandler, str]]:
    """Return every handler of GovStack's interfaces with its path, without their documents."""
    return [
        one for one in _all_handlers(app) if _is_of_govstack(one[1]) and OPERATION in one[0].opt
    ]


def _is_of_govstack(path: str) -> bool:
    return path.startswith(GOVSTACK_PREFIXES)


def _all_handlers(app: Litestar) -> list[tuple[HTTPRouteHandler, str]]:
    return [
        (handler, served.path_format)
        for served in app.routes
        for handler in getattr(served, "route_handlers", ())
        if isinstance(handler, HTTPRouteHandler) and handler.http_methods != {"OPTIONS"}
    ]


# Asynchronous only because Litestar would run it in a thread otherwise.
async def _check_query(connection: Any, handler: BaseRouteHandler) -> None:
    reject_unknown_query(connection, handler)


def _operation_id(handler: HTTPRouteHandler, *_: Any) -> str:
    return handler.handler_name
