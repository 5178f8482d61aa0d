"""Serve the portal: what a subscriber's people see of their subscriptions, also in a frame.

A link of `POST /v1/portal-links` begins a session of a kind of its own. It opens only the pages
below, at addresses of their own, and its cookie is sent where a site of `ROOMS_FRAME_ANCESTORS`
frames them. The pages are those of the console, without what its session may not call.
"""

from typing import Any, Final

from litestar import Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.response import Redirect

from rooms.console import (
    administration,
    deliveries,
    event_types,
    messages,
    queues,
    retry_schedule,
    sideline,
    sign_in,
    subscription_actions,
    subscription_edit,
    subscriptions,
)
from rooms.console.page import DOWNLOAD, HOME, PORTAL, PUBLIC, Page, PageDep
from rooms.console.sessions import session_key
from rooms.console.subscription_health import find_unhealthy, health_labels
from rooms.db.catalog.sign_in_links import PORTAL_ENTRY_PATH, LinkKind
from rooms.errors import RateLimitedError, UnauthenticatedError

_UNWELL: Final = 20
"""So many subscriptions that are not well come before the list of all."""
_PAGE: Final = 25
_BEGUN: Final = "begun"
"""The parameter of the first page, by which it knows that the browser was given a cookie."""
_SHARED: Final = (
    *deliveries.ROUTES,
    event_types.list_event_types,
    event_types.show_event_type,
    administration.show_job,
    administration.cancel_job,
    messages.show_message,
    messages.show_payload,
    messages.leave_payload,
    messages.download_receipt,
    queues.browse_queue,
    *retry_schedule.ROUTES,
    sideline.show_sideline,
    sideline.preview_shovel,
    sideline.shovel,
    sideline.preview_purge,
    sideline.purge,
    sideline.set_schedule,
    sideline.end_schedule,
    sign_in.set_preferences,
    subscription_actions.pause,
    subscription_actions.resume,
    subscription_actions.retry,
    subscription_actions.withdraw_proposal,
    subscription_actions.show_test,
    subscription_actions.call,
    subscription_actions.try_filter,
    subscription_actions.show_credentials,
    subscription_actions.rotate_secret,
    subscription_actions.rotate_password,
    subscription_edit.edit_subscription,
    subscription_edit.change_subscription,
    subscriptions.show_history,
    subscriptions.list_keys,
    subscriptions.skip_head,
    subscriptions.show_subscription,
)
"""The pages and actions of the console that are those of the portal, too."""


@get(PORTAL_ENTRY_PATH, opt={PUBLIC: True, DOWNLOAD: True})
async def enter(page: PageDep) -> Response[Any]:
    """Begin the session of a link.

    Without a click, unlike a link to the console: it is not used up, and a frame shows the portal
    at once.
    """
    sessions, token = page.parts.sessions, page.query("token") or ""
    try:
        started = await sessions.begin_by_link(page.request.scope, token, LinkKind.PORTAL)
    except UnauthenticatedError:
        return show_ended(page, "link")
    except RateLimitedError:
        return show_ended(page, "busy")
    return sign_in.enter(page, started, f"{PORTAL}?{_BEGUN}=1")


@get(PORTAL)
async def show_portal(page: PageDep) -> Response[Any]:
    """List the subscriptions, and which are not well; the only one is shown itself."""
    contains = page.query("contains")
    found = await page.api.get(
        "/subscriptions", cursor=page.query("cursor"), contains=contains, limit=_PAGE
    )
    is_all = contains is None and page.query("cursor") is None and found["next_cursor"] is None
    if is_all and len(found["items"]) == 1:
        return page.redirect(f"{subscriptions.PATH}/{found['items'][0]['id']}")
    status = await page.api.get("/status", limit=_UNWELL)
    return page.render(
        "portal.html",
        found=found,
        filtered=contains is not None,
        backlog=status["backlog"],
        unwell=status["subscriptions"] if contains is None and not page.query("cursor") else [],
        troubled=status["subscriptions_total"],
        health=await find_unhealthy(page, found["items"]) or {},
        conditions=health_labels(page),
    )


@post(f"{PORTAL}/leave", opt={PUBLIC: True})
async def leave(page: PageDep) -> Redirect:
    """End the session."""
    await page.form()
    return await sign_in.leave(page, PORTAL)


def show_ended(page: Page, why: str | None = None) -> Response[Any]:
    """Say that there is no session: in a frame, no form to sign in would help.

    `why`: `link` is not valid, `busy`, or found out by the request.
    """
    page.viewer = None
    if page.is_fragment:
        return Response("", status_code=401)
    if why is None:
        kept_none = page.query(_BEGUN) and session_key(page.request.scope) is None
        why = "cookie" if kept_none else "ended"
    return page.render("portal_ended.html", http_status=429 if why == "busy" else 401, why=why)


def _at_portal(handler: HTTPRouteHandler) -> HTTPRouteHandler:
    """Return the handler at the same path below that of the portal."""
    (path,) = handler.paths
    route = get if "GET" in handler.http_methods else post
    return route(PORTAL + path.removeprefix(HOME), opt=dict(handler.opt))(handler.fn)


ROUTES: Final = (enter, show_portal, leave, *map(_at_portal, _SHARED))
