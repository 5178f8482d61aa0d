"""Show what waits for the decision of the rooms' owner, and what grants allow other organisations.

The grants of a room are made and revoked here, too.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.api_client import ApiProblemError, segment
from rooms.console.fields import typed_time
from rooms.console.form import Form
from rooms.console.formatting import NONE
from rooms.console.page import Page, PageDep
from rooms.console.rooms import PATH as ROOMS
from rooms.console.rooms import ROOM, find_room
from rooms.console.subscription_actions import decide

PATH: Final = f"{ADMINISTRATION}/approvals"
GRANTS_PATH: Final = f"{ADMINISTRATION}/grants"
_SHARING: Final = f"{ROOM}/sharing"
_LIMIT: Final = 20
"""Subscriptions on a page: each is shown in full, to decide on."""
DONE: Final = {
    "approved": "Approved: messages are delivered from now on.",
    "rejected": "Rejected. The subscriber reads your reason.",
    "proposal-rejected": "The change is rejected; the subscription stays as it was.",
    "grant-created": "The grant is made.",
    "grant-revoked": "The grant is revoked.",
}


@get(PATH)
async def list_approvals(page: PageDep) -> Response[str]:
    """List new subscriptions and proposed changes that wait for the viewer's organisation."""
    return await _list(page)


@post(f"{PATH}/{{identity:str}}/approve")
async def approve(page: PageDep, identity: FromPath[str]) -> Response[Any]:
    """Approve the version that was shown."""
    return await _decide(page, identity, "approve")


@post(f"{PATH}/{{identity:str}}/reject")
async def reject(page: PageDep, identity: FromPath[str]) -> Response[Any]:
    """Reject a new subscription, or a proposed change."""
    return await _decide(page, identity, "reject")


@get(GRANTS_PATH)
async def list_grants(page: PageDep) -> Response[str]:
    """List the grants of all own rooms."""
    found = await _find_grants(page, "/grants", organisation_id=page.query("organisation_id"))
    return page.render("grants.html", found=found)


@post(f"{GRANTS_PATH}/{{room:str}}/{{identity:str}}/revoke")
async def revoke_grant(
    page: PageDep, room: FromPath[str], identity: FromPath[str]
) -> Response[Any]:
    """End a grant now."""
    return await _revoke(page, room, identity, back=GRANTS_PATH)


@get(_SHARING)
async def list_room_grants(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """List the grants of a room."""
    return await _list_of_room(page, await find_room(page, room_id), {})


@post(_SHARING)
async def create_grant(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Allow another organisation to publish or to subscribe."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        await page.api.post(f"/rooms/{room['id']}/grants", _grant_fields(page, form))
    except ApiProblemError as exc:
        return await _list_of_room(page, room, form.values(), exc)
    return page.redirect(f"{ROOMS}/{room['id']}/sharing", done="grant-created")


@post(f"{_SHARING}/{{grant_id:str}}/revoke")
async def revoke_room_grant(
    page: PageDep, room_id: FromPath[str], grant_id: FromPath[str]
) -> Response[Any]:
    """End a grant now."""
    return await _revoke(page, room_id, grant_id, back=f"{ROOMS}/{segment(room_id)}/sharing")


async def _revoke(page: Page, room: str, grant: str, *, back: str) -> Response[Any]:
    await page.form()
    page.require("manage")
    await page.api.delete(f"/rooms/{segment(room)}/grants/{segment(grant)}")
    return page.redirect(back, done="grant-revoked")


def _grant_fields(page: Page, form: Form) -> dict[str, Any]:
    given = {
        "organisation_id": form.text("organisation_id") or "",
        "kind": form.text("kind"),
        "event_types": form.lines("event_types") or None,
        "starts_at": typed_time(page, form.text("starts_at")),
        "until": typed_time(page, form.text("until")),
    }
    return {name: value for name, value in given.items() if value is not None}


async def _list_of_room(
    page: Page, room: dict[str, Any], values: dict[str, str], error: ApiProblemError | None = None
) -> Response[str]:
    found = await _find_grants(page, f"/rooms/{room['id']}/grants")
    return page.render("sharing.html", refused=error, room=room, found=found, values=values)


async def _find_grants(page: Page, path: str, **filters: str | None) -> dict[str, Any]:
    """Return a page of grants, each with `is_over`: its time has passed."""
    found: dict[str, Any] = await page.api.get(
        path,
        cursor=page.query("cursor"),
        kind=page.query("kind"),
        ended="true" if page.query("ended") else None,
        **filters,
    )
    for one in found["items"]:
        until = one["until"] and datetime.fromisoformat(one["until"])
        one["is_over"] = bool(until and until <= page.format.now)
    return found


async def _decide(page: Page, identity: str, decision: str) -> Response[Any]:
    form = await page.form()
    try:
        await decide(page, form, identity, decision)
    except ApiProblemError as exc:
        return await _list(page, exc, identity, form.text("reason"))
    if decision == "approve":
        return page.redirect(PATH, done="approved")
    return page.redirect(PATH, done="proposal-rejected" if form.text("proposal") else "rejected")


def _changes(subscription: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (field, now, proposed) of a proposal."""
    for name, value in (subscription["proposal"] or {}).items():
        yield name, _shown(subscription.get(name)), _shown(value)


def _shown(value: Any) -> str:
    """Return a setting in words: event types by their names."""
    if value is None:
        return NONE
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, Mapping):
        versions = value.get("versions")
        name = str(value.get("name", ""))
        return f"{name} ({', '.join(map(str, versions))})" if versions else name
    return str(value)


async def _list(
    page: Page,
    error: ApiProblemError | None = None,
    about: str | None = None,
    reason: str | None = None,
) -> Response[str]:
    """Render the list; `about`: the subscription whose form is shown again, with its reason."""
    found = await page.api.get(
        "/subscriptions",
        role="owner",
        status="pending",
        limit=_LIMIT,
        cursor=page.query("cursor"),
    )
    return page.render(
        "approvals.html",
        refused=error,
        found=found,
        rooms=await page.room_names(one["room_id"] for one in found["items"]),
        changes={one["id"]: list(_changes(one)) for one in found["items"]},
        about=about,
        reason=reason or "",
    )


ROUTES: Final = (
    list_approvals,
    approve,
    reject,
    list_grants,
    revoke_grant,
    list_room_grants,
    create_grant,
    revoke_room_grant,
)
