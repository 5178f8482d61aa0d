"""Show who may publish into a room and subscribe to it, grant that, and revoke grants."""

from datetime import datetime
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.fields import typed_time
from rooms.console.form import Form
from rooms.console.page import Page, PageDep
from rooms.console.rooms import PATH, ROOM, find_room

_GRANTS: Final = f"{ROOM}/sharing"
DONE: Final = {"grant-created": "The grant is made.", "grant-revoked": "The grant is revoked."}


@get(_GRANTS)
async def list_grants(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """List the grants of a room."""
    return await _list(page, await find_room(page, room_id), {})


@post(_GRANTS)
async def create_grant(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Allow another organisation to publish or to subscribe."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        await page.api.post(f"/rooms/{room['id']}/grants", _body(page, form))
    except ApiProblemError as exc:
        return await _list(page, room, form.values(), exc)
    return page.redirect(f"{PATH}/{room['id']}/sharing", done="grant-created")


@post(f"{_GRANTS}/{{grant_id:str}}/revoke")
async def revoke_grant(
    page: PageDep, room_id: FromPath[str], grant_id: FromPath[str]
) -> Response[Any]:
    """End a grant now."""
    await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    await page.api.delete(f"/rooms/{room['id']}/grants/{segment(grant_id)}")
    return page.redirect(f"{PATH}/{room['id']}/sharing", done="grant-revoked")


def _body(page: Page, form: Form) -> dict[str, Any]:
    given = {
        "organisation_id": form.text("organisation_id") or "",
        "kind": form.text("kind"),
        "event_types": form.lines("event_types") or None,
        "starts_at": typed_time(page, form.text("starts_at")),
        "until": typed_time(page, form.text("until")),
    }
    return {name: value for name, value in given.items() if value is not None}


async def _list(
    page: Page, room: dict[str, Any], values: dict[str, str], error: ApiProblemError | None = None
) -> Response[str]:
    found = await page.api.get(
        f"/rooms/{room['id']}/grants",
        cursor=page.query("cursor"),
        kind=page.query("kind"),
        ended="true" if page.query("ended") else None,
    )
    for one in found["items"]:
        until = one["until"] and datetime.fromisoformat(one["until"])
        one["is_over"] = bool(until and until <= page.format.now)
    return page.render("sharing.html", refused=error, room=room, found=found, values=values)


ROUTES: Final = (list_grants, create_grant, revoke_grant)
