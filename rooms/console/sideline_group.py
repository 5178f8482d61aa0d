"""Bring back the sidelines of several subscriptions, as after an outage of one host."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.response import Redirect

from rooms.console.administration import JOBS_PATH
from rooms.console.api_client import ApiProblemError, segment
from rooms.console.page import Page, PageDep
from rooms.console.sideline import PATH
from rooms.domain.job import JobKind

_GROUP: Final = f"{PATH}/shovel"
_CHOSEN: Final = "subscription"
_BEFORE: Final = "sidelined_before"
"""The hidden field with the end of what the preview counted: what is sidelined later stays."""
MOST: Final = 50
"""Subscriptions of one page: each costs a dry run."""
DONE: Final = {
    "shovels-begun": "The deliveries are brought back, by a job for each subscription.",
    "some-shovels-begun": "Some are brought back, each by a job. Others were refused: open them.",
    "nothing-to-bring-back": "There is nothing to bring back.",
}


@get(_GROUP)
async def preview_shovels(page: PageDep) -> Response[Any]:
    """Show what shovels of the chosen subscriptions would do."""
    page.require("operate")
    chosen = page.request.query_params.getall(_CHOSEN, [])[:MOST]
    previews = [await _preview(page, one) for one in dict.fromkeys(chosen)]
    return page.render(
        "sideline_shovel_group.html",
        previews=previews,
        room_names=await page.room_names(one["subscription"]["room_id"] for one in previews),
        total=sum(one["would_move"] for one in previews),
        before=min((one["until"] for one in previews), default=""),
    )


@post(_GROUP)
async def begin_shovels(page: PageDep) -> Redirect:
    """Begin a shovel of each chosen subscription, and show the jobs."""
    form = await page.form()
    page.require("operate")
    before = form.text(_BEFORE)
    chosen = dict.fromkeys(filter(None, form.many(_CHOSEN)[:MOST]))
    # Without the end of a preview nothing begins.
    if before is None or not chosen:
        return page.redirect(PATH, refused="nothing-to-bring-back")
    refused: list[ApiProblemError] = []
    for one in chosen:
        try:
            await page.api.post(_path(one), {"until": before})
        except ApiProblemError as exc:  # as of one that was deleted since the preview
            refused.append(exc)
    if len(refused) == len(chosen):
        raise refused[0]
    done = "some-shovels-begun" if refused else "shovels-begun"
    return page.redirect(f"{JOBS_PATH}?kind={JobKind.SHOVEL_SIDELINE}", done=done)


async def _preview(page: Page, subscription_id: str) -> dict[str, Any]:
    """Return a subscription and what a shovel of its sideline would do."""
    subscription = await page.api.get(f"/subscriptions/{segment(subscription_id)}")
    preview = await page.api.post(_path(subscription_id), {"dry_run": True})
    return {**preview, "subscription": subscription}


def _path(subscription_id: str) -> str:
    return f"/subscriptions/{segment(subscription_id)}/sideline/shovel"


ROUTES: Final = (preview_shovels, begin_shovels)
