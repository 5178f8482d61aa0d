"""Serve the pages on which people sign in and out, and choose language, colours and time zone."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.response import Redirect

from rooms.api.sessions import SIGN_IN_PATH
from rooms.console.formatting import is_zone
from rooms.console.page import HOME, PUBLIC, Page, PageDep
from rooms.console.sessions import StartedSession, preference_cookie, session_cookie
from rooms.db.catalog.sign_in_links import LinkKind
from rooms.errors import RateLimitedError, UnauthenticatedError

_YEAR_S: Final = 365 * 86_400
DONE: Final = {
    "unknown-zone": "There is no such time zone. Use a name such as Europe/Berlin, or UTC.",
}
_PREFERENCES: Final = ("language", "theme", "time_zone", "times")
_MAX_PREFERENCE: Final = 64


def safe_path(target: str | None) -> str:
    """Return a path of the console to go on to; anything else leads to its first page."""
    if target is not None and (target == HOME or target.startswith((f"{HOME}/", f"{HOME}?"))):
        return target
    return HOME


@get(SIGN_IN_PATH, opt={PUBLIC: True})
async def show_sign_in(page: PageDep) -> Response[str]:
    """Ask for an API key; with a link's token, for a click.

    Programs that look at a link before a person does must not use it up.
    """
    return _form(page, token=page.query("token"))


@post(SIGN_IN_PATH, opt={PUBLIC: True}, status_code=200)
async def sign_in(page: PageDep) -> Response[Any]:
    """Begin a session with a link's token or an API key."""
    page.key = None  # the form may be older than the session of this browser
    form = await page.form()
    token, key = form.text("token"), form.text("key")
    sessions = page.parts.sessions
    try:
        if token is not None:
            started = await sessions.begin_by_link(page.request.scope, token, LinkKind.CONSOLE)
        elif key is not None:
            started = await sessions.begin_by_key(page.request.scope, key)
        else:
            raise UnauthenticatedError("type an API key, which begins with rooms_")
    except UnauthenticatedError as exc:
        return _form(page, status=401, problem=str(exc), target=form.text("to"))
    except RateLimitedError as exc:
        return _form(page, status=429, problem=str(exc), target=form.text("to"))
    return enter(page, started, safe_path(form.text("to")))


def enter(page: Page, started: StartedSession, path: str) -> Redirect:
    """Send the browser on with the cookie of its new session."""
    answer = page.redirect(path)
    answer.set_cookie(session_cookie(page.request.scope, started.key, max_age_s=started.max_age_s))
    return answer


@post("/console/sign-out", opt={PUBLIC: True})
async def sign_out(page: PageDep) -> Redirect:
    """End the session."""
    await page.form()
    return await leave(page, SIGN_IN_PATH)


async def leave(page: Page, path: str) -> Redirect:
    """End the session, if there is one, and send the browser on without its cookie."""
    if page.key is not None and page.viewer is not None:
        person = await page.parts.services.keys.authenticate(
            b"Bearer " + page.key.encode(), page.request.scope.get("client")
        )
        await page.parts.sessions.end(page.request.scope, person)
    answer = page.redirect(path)
    answer.set_cookie(session_cookie(page.request.scope, "", max_age_s=0))
    return answer


@post("/console/preferences", opt={PUBLIC: True})
async def set_preferences(page: PageDep) -> Redirect:
    """Keep language, colours, time zone and the look of times in cookies of this browser."""
    form = await page.form()
    # Times in UTC instead would be taken for those of the zone that was typed.
    is_wrong_zone = "time_zone" in form and not is_zone(form.text("time_zone"))
    answer = page.redirect(
        safe_path(form.text("to")), refused="unknown-zone" if is_wrong_zone else None
    )
    for name in _PREFERENCES:
        if name in form and not (name == "time_zone" and is_wrong_zone):
            value = _cookie_text(form.text(name) or "")
            answer.set_cookie(preference_cookie(page.request.scope, name, value, max_age_s=_YEAR_S))
    return answer


def _cookie_text(text: str) -> str:
    """Return a choice as a cookie can hold it; no choice has other characters."""
    return text[:_MAX_PREFERENCE] if text.isascii() else ""


def _form(
    page: Page,
    *,
    token: str | None = None,
    status: int = 200,
    problem: str | None = None,
    target: str | None = None,
) -> Response[str]:
    return page.render(
        "sign_in.html",
        http_status=status,
        token=token,
        failure=problem,
        to=safe_path(target or page.query("to")),
    )


ROUTES: Final = (show_sign_in, sign_in, sign_out, set_preferences)
