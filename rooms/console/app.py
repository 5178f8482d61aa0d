"""Assemble the console: every page is registered here, and errors are pages, too."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import msgspec
from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.response import Redirect

from rooms.api.deps import ApiServices
from rooms.api.errors import to_problem
from rooms.api.fast_routes import App, Receive, Send
from rooms.api.sessions import SIGN_IN_PATH
from rooms.console import (
    administration,
    analysis,
    approvals,
    deliveries,
    event_types,
    home,
    journal,
    keys,
    messages,
    organisations,
    people,
    portal,
    publish,
    queues,
    retry_schedule,
    rooms,
    search,
    sideline,
    sideline_group,
    sign_in,
    subscription_actions,
    subscription_edit,
    subscription_replay,
    subscriptions,
    usage,
)
from rooms.console.api_client import ApiProblemError
from rooms.console.assets import assets_route, read_assets
from rooms.console.formatting import read_translations
from rooms.console.live import LiveStreams, stream_page
from rooms.console.page import (
    HOME,
    MAX_FORM_BYTES,
    PAGE_STATE,
    ConsoleParts,
    Page,
    load_templates,
    make_environment,
    provide_page,
    unsigned_page,
)
from rooms.console.problem_texts import translate
from rooms.console.sessions import Sessions, is_portal_path
from rooms.errors import RoomsError, UnauthenticatedError

if TYPE_CHECKING:
    from rooms.console.oidc import OidcSignIn

_log = logging.getLogger(__name__)

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors "
)
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_MODULES: Final = (
    home,
    administration,
    analysis,
    approvals,
    deliveries,
    event_types,
    journal,
    keys,
    messages,
    organisations,
    people,
    publish,
    queues,
    retry_schedule,
    rooms,
    search,
    sideline,
    sideline_group,
    subscription_actions,
    subscription_edit,
    subscription_replay,
    subscriptions,
    usage,
)
PAGES: Final = (
    *sign_in.ROUTES,
    *portal.ROUTES,
    *(route for module in _MODULES for route in module.ROUTES),
)
"""Register every page."""
DONE: Final[Mapping[str, str]] = {
    code: text
    for module in (sign_in, *_MODULES)
    for code, text in vars(module).get("DONE", {}).items()
}
"""Every `done` of a page."""


class Console:
    """Serve the console in front of the API: `/`, and everything below `/console`."""

    def __init__(self, services: ApiServices, api: App, live: LiveStreams) -> None:
        assets = read_assets()
        self._api = api
        oidc, oidc_pages = _open_oidc(services)
        parts = ConsoleParts(
            services=services,
            api=api,
            environment=make_environment(),
            assets=assets,
            translations=read_translations(),
            sessions=Sessions(services),
            done_texts=DONE,
            oidc=oidc,
        )
        app: Any = Litestar(
            route_handlers=[
                *PAGES,
                *oidc_pages,
                stream_page,
                assets_route(assets),
            ],
            dependencies={"page": Provide(provide_page)},
            exception_handlers={
                ApiProblemError: _show_api_problem,
                RoomsError: _show_error,
                HTTPException: _show_http_error,
                Exception: _show_bug,
            },
            openapi_config=None,
            state=State({"parts": parts, "live": live}),
            request_max_body_size=MAX_FORM_BYTES,
            logging_config=None,
        )
        self._app: App = app
        self._environment = parts.environment
        self._loading: asyncio.Task[None] | None = None
        self._headers = _framing(())
        self._portal_headers = _framing(services.settings.frame_ancestors)
        live.app = app

    async def _load_templates(self) -> None:
        """Load them in a thread at the first request: who never opens the console pays nothing."""
        if self._loading is None:
            self._loading = asyncio.create_task(
                asyncio.to_thread(load_templates, self._environment)
            )
        if not self._loading.done():
            # A page whose template cannot be read reports that itself.
            await asyncio.wait([self._loading])

    def _headers_of(self, path: str) -> Sequence[tuple[bytes, bytes]]:
        return self._portal_headers if is_portal_path(path) else self._headers

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a request for the console; pass everything else on."""
        if scope["type"] != "http" or not _is_ours(scope["path"]):
            await self._api(scope, receive, send)
            return
        await self._load_templates()

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                wanted = (*self._headers_of(scope["path"]), *_HEADERS)
                added = [header for header in wanted if header[0] not in present]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if scope["path"] == "/":
            await send_with_headers(
                {
                    "type": "http.response.start",
                    "status": 303,
                    "headers": [(b"location", HOME.encode()), (b"content-length", b"0")],
                }
            )
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send_with_headers)


def _framing(ancestors: Sequence[str]) -> Sequence[tuple[bytes, bytes]]:
    """Return the headers that let these sites frame a page, and no other."""
    policy = (b"content-security-policy", (_POLICY + (" ".join(ancestors) or "'none'")).encode())
    return (policy,) if ancestors else (policy, (b"x-frame-options", b"DENY"))


def _open_oidc(
    services: ApiServices,
) -> "tuple[OidcSignIn | None, Sequence[HTTPRouteHandler]]":
    """Return the sign-in at a provider and its pages, if one is set up.

    Its libraries are loaded only then.
    """
    if services.settings.oidc_issuer is None:
        return None, ()
    from rooms.console import oidc_routes

    return oidc_routes.open_oidc(services), oidc_routes.ROUTES


def _is_ours(path: str) -> bool:
    return path in {"/", HOME} or path.startswith(f"{HOME}/")


def _show_problem(
    request: Request[Any, Any, Any], status: int, problem: Mapping[str, Any]
) -> Response[Any]:
    page: Page | None = request.state.get(PAGE_STATE)
    if page is None:
        page = unsigned_page(request)
    if page.is_fragment:
        return Response("", status_code=status)
    shown = {"title": "", "detail": "", "errors": [], **problem}
    return page.render(
        "error.html", http_status=status, error=translate(shown, page.text), code=status
    )


def _show_api_problem(request: Request[Any, Any, Any], error: ApiProblemError) -> Response[Any]:
    return _show_problem(request, error.status, error.problem)


def _show_error(request: Request[Any, Any, Any], error: RoomsError) -> Response[Any]:
    if isinstance(error, UnauthenticatedError) and is_portal_path(request.scope["path"]):
        return portal.show_ended(request.state.get(PAGE_STATE) or unsigned_page(request))
    if isinstance(error, UnauthenticatedError) and request.method in {"GET", "HEAD"}:
        query = request.scope["query_string"].decode("latin-1")
        target = quote(request.scope["path"]) + (f"?{query}" if query else "")
        return Redirect(f"{SIGN_IN_PATH}?{urlencode({'to': target})}", status_code=303)
    problem, _ = to_problem(error, request.scope["path"])
    return _show_problem(request, problem.status, msgspec.to_builtins(problem))


def _show_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    title = HTTPStatus(error.status_code).phrase
    return _show_problem(request, error.status_code, {"title": title, "detail": ""})


def _show_bug(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    title = "The page could not be made"
    return _show_problem(
        request, 500, {"title": title, "detail": "the log of the service says why"}
    )
