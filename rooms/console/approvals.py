"""Show what waits for the decision of the rooms' owner, and what the rooms' grants allow."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.administration import PATH as ADMINISTRATION
from rooms.console.analysis import names_of
from rooms.console.api_client import ApiProblemError, segment
from rooms.console.form import Form
from rooms.console.formatting import NONE
from rooms.console.page import Page, PageDep

PATH: Final = f"{ADMINISTRATION}/approvals"
GRANTS_PATH: Final = f"{ADMINISTRATION}/grants"
_LIMIT: Final = 20
"""Subscriptions on a page: each is shown in full, to decide on."""
DONE: Final = {
    "approved": "Approved: messages are delivered from now on.",
    "rejected": "Rejected. The subscriber reads your reason.",
    "proposal-rejected": "The change is rejected; the subscription stays as it was.",
    "grant-revoked": "The grant is revoked. Without another one, subscriptions hold messages.",
}


@get(PATH)
async def list_approvals(page: PageDep) -> Response[str]:
    """List new subscriptions and proposed changes that wait for the viewer's organisation."""
    return await _list(page)


@post(f"{PATH}/{{identity:str}}/approve")
async def approve(page: PageDep, identity: FromPath[str]) -> Response[Any]:
    """Approve the version that was shown."""
    form = await page.form()
    error = await _decide(page, form, identity, "approve", version=form.number("version"))
    if error is not None:
        return await _list(page, error, identity, form.text("reason"))
    return page.redirect(PATH, done="approved")


@post(f"{PATH}/{{identity:str}}/reject")
async def reject(page: PageDep, identity: FromPath[str]) -> Response[Any]:
    """Reject a new subscription, or a proposed change."""
    form = await page.form()
    error = await _decide(page, form, identity, "reject")
    if error is not None:
        return await _list(page, error, identity, form.text("reason"))
    return page.redirect(PATH, done="proposal-rejected" if form.text("proposal") else "rejected")


@get(GRANTS_PATH)
async def list_grants(page: PageDep) -> Response[str]:
    """List the grants of all own rooms."""
    found = await page.api.get(
        "/grants",
        kind=page.query("kind"),
        organisation_id=page.query("organisation_id"),
        ended="true" if page.query("ended") else None,
        cursor=page.query("cursor"),
    )
    return page.render("grants.html", found=found)


@post(f"{GRANTS_PATH}/{{room:str}}/{{identity:str}}/revoke")
async def revoke_grant(
    page: PageDep, room: FromPath[str], identity: FromPath[str]
) -> Response[Any]:
    """End a grant now."""
    await page.form()
    await page.api.delete(f"/rooms/{segment(room)}/grants/{segment(identity)}")
    return page.redirect(GRANTS_PATH, done="grant-revoked")


async def _decide(
    page: Page, form: Form, identity: str, action: str, **more: Any
) -> ApiProblemError | None:
    """Approve or reject, with the reason; return the problem with it."""
    body = {"reason": form.text("reason"), **more}
    try:
        await page.api.post(f"/subscriptions/{segment(identity)}/{action}", body)
    except ApiProblemError as exc:
        return exc
    return None


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
        rooms=await names_of(page, "/rooms"),
        changes={one["id"]: list(_changes(one)) for one in found["items"]},
        about=about,
        reason=reason or "",
    )


ROUTES: Final = (list_approvals, approve, reject, list_grants, revoke_grant)
