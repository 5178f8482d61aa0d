"""Show the people who are, or were, signed in to the console; invite others, and end sessions."""

from typing import Any, Final
from urllib.parse import unquote

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError, segment, wrong_fields
from rooms.console.keys import in_seconds
from rooms.console.page import Page, PageDep
from rooms.domain.role import SCOPES, Role

PATH: Final = f"{ADMINISTRATION}/people"
_SUGGESTED: Final = {"expires_min": "15", "session_h": "12"}
DONE: Final = {
    "session-ended": "The session is ended.",
    "sessions-ended": "All sessions of this person are ended.",
}
_KNOWN: Final = f"{PATH}/known"


@get(PATH)
async def list_people(page: PageDep) -> Response[str]:
    """List the sessions, newest first."""
    return await _list(page, dict(_SUGGESTED), ["viewer"])


@post(PATH)
async def invite(page: PageDep) -> Response[Any]:
    """Make a link that signs one person in, and show it once."""
    form = await page.form()
    body = {
        "name": form.text("name") or "",
        "roles": form.many("roles"),
        "expires_s": in_seconds(form.number("expires_min"), 60),
        "session_s": in_seconds(form.number("session_h"), 3600),
    }
    try:
        made = await page.api.post(
            "/sign-in-links", {name: value for name, value in body.items() if value is not None}
        )
    except ApiProblemError as exc:
        return await _list(page, form.values(), form.many("roles"), exc)
    # The browser sends the address by which this person reaches the console.
    origin = page.request.headers.get("origin", "")
    return page.render(
        "invited.html", http_status=201, made=made, link=f"{origin}{made['path']}", back=PATH
    )


@get(_KNOWN)
async def list_known(page: PageDep) -> Response[str]:
    """List the people who have signed in at some time, with the number of their open sessions."""
    found = await page.api.get("/people", cursor=page.query("cursor"))
    return page.render("people_known.html", found=found)


@post(f"{_KNOWN}/end")
async def end_all(page: PageDep) -> Response[Any]:
    """End all sessions of a person."""
    form = await page.form()
    # Encoded, because a page replaces characters that cannot be seen.
    await page.api.post("/people/end-sessions", {"name": unquote(form.text("name") or "")})
    return page.redirect(_KNOWN, done="sessions-ended")


@post(f"{PATH}/{{identity:str}}/end")
async def end_session(page: PageDep, identity: FromPath[str]) -> Response[Any]:
    """End a session."""
    await page.form()
    await page.api.delete(f"/sessions/{segment(identity)}")
    return page.redirect(PATH, done="session-ended")


async def _list(
    page: Page,
    values: dict[str, str],
    chosen: list[str],
    error: ApiProblemError | None = None,
) -> Response[str]:
    return page.render(
        "people.html",
        refused=error,
        found=await page.api.get("/sessions", cursor=page.query("cursor")),
        values=values,
        chosen=chosen,
        roles=[
            role.value for role in Role if all(page.me.may(scope.value) for scope in SCOPES[role])
        ],
        wrong=wrong_fields(error, {"expires_s": "expires_min", "session_s": "session_h"}),
    )


ROUTES: Final = (list_people, invite, list_known, end_all, end_session)
