"""List subscriptions, and show one: how it is, what changed it, and its ordering keys."""

from http import HTTPStatus
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.page import HOME, Page, PageDep, all_parts, no_part
from rooms.console.retry_schedule import read_schedule
from rooms.console.subscription_health import (
    find_failing_together,
    find_unhealthy,
    health_labels,
    read_last_hour,
    summarize,
)
from rooms.domain.state_machine import ENDED_STATUSES

PATH: Final = f"{HOME}/subscriptions"
SUBSCRIPTION: Final = f"{PATH}/{{subscription_id:str}}"
_ORDERING: Final = f"{SUBSCRIPTION}/ordering"
DONE: Final = {"head-skipped": "The key goes on; its former head stays sidelined."}
_UNWELL: Final = 200
_LATEST: Final = 100
"""Deliveries of which a subscription's page shows the share that succeeded, and the latencies."""
_SHOWN: Final = 10


@get(PATH)
async def list_subscriptions(page: PageDep) -> Response[str]:
    """List the organisation's subscriptions, or those of others to its rooms, or those unwell."""
    if page.query("health"):
        return await _list_unhealthy(page)
    room = page.query("room")
    path = "/subscriptions" if room is None else f"/rooms/{segment(room)}/subscriptions"
    found = await page.api.get(
        path,
        cursor=page.query("cursor"),
        status=page.query("status"),
        type=page.query("type"),
        contains=page.query("contains"),
        role=page.query("role") if room is None else None,
    )
    return page.render(
        "subscriptions.html",
        found=found,
        unwell=None,
        health=await find_unhealthy(page, found["items"]),
        room_names=await page.room_names(one["room_id"] for one in found["items"]),
        **_conditions(page),
    )


async def _list_unhealthy(page: Page) -> Response[str]:
    status = await page.api.get("/status", limit=_UNWELL)
    wanted = page.query("health")
    unwell = [one for one in status["subscriptions"] if wanted in {"any", one["condition"]}]
    return page.render(
        "subscriptions.html",
        found=None,
        unwell=unwell,
        room_names={},
        **_conditions(page),
    )


def _conditions(page: Page) -> dict[str, Any]:
    names = health_labels(page)
    return {"conditions": names, "choices": [(one, name) for one, (_, name) in names.items()]}


@get(SUBSCRIPTION)
async def show_subscription(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Show a subscription: to its own organisation all of it, to the room's owner a part.

    Of a deleted one the history is left, where messages, jobs and the journal still lead.
    """
    try:
        subscription = await find_subscription(page, subscription_id)
    except ApiProblemError as exc:
        history = f"/subscriptions/{segment(subscription_id)}/history"
        if exc.status != HTTPStatus.NOT_FOUND or not await page.optional(history, limit=1):
            raise
        return page.redirect(f"{HOME}{history}")
    at = f"/subscriptions/{subscription['id']}"
    own = subscription["own"]
    room = subscription["room"]
    is_push = subscription["type"] == "PUSH"
    found, hour, counts, latest, lane = await all_parts(
        find_unhealthy(page, [subscription]),
        read_last_hour(page, f"{at}/activity"),
        page.optional(f"{at}/counts"),
        page.optional(f"{at}/deliveries", limit=_LATEST) if own else no_part(),
        page.optional(f"{at}/lane") if own and is_push else no_part(),
    )
    unwell = (found or {}).get(subscription["id"])
    together, names = await find_failing_together(page, subscription["id"]) if unwell else ([], {})
    return page.render(
        "subscription.html",
        subscription=subscription,
        room=room,
        unwell=unwell,
        conditions=health_labels(page),
        together=together,
        names=names,
        counts=counts,
        hour=hour,
        lane=lane,
        recent=None if latest is None else latest["items"][:_SHOWN],
        health=None if latest is None else summarize(latest["items"]),
        schedule=read_schedule(subscription, room) if own and is_push and room else None,
    )


async def find_subscription(page: Page, subscription_id: str) -> dict[str, Any]:
    """Return a subscription as the API shows it, and as `own` if it is the viewer's.

    `ended`: nothing can be changed any more; `room`: its room, None where the viewer may not read
    it. ApiProblemError: there is none for the viewer.
    """
    found: dict[str, Any] = await page.api.get(f"/subscriptions/{segment(subscription_id)}")
    found["own"] = found["organisation_id"] == page.me.organisation_id
    found["ended"] = found["status"] in ENDED_STATUSES
    found["room"] = await page.optional(f"/rooms/{found['room_id']}")
    return found


@get(f"{SUBSCRIPTION}/history")
async def show_history(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """List every change of a subscription, newest first, also of one that is deleted."""
    history = f"/subscriptions/{segment(subscription_id)}/history"
    found = await page.api.get(history, cursor=page.query("cursor"), limit=20)
    try:
        subscription = await find_subscription(page, subscription_id)
    except ApiProblemError as exc:
        if exc.status != HTTPStatus.NOT_FOUND:
            raise
        subscription = None
    names = [one["snapshot"]["name"] for one in found["items"]]
    return page.render(
        "subscription_history.html",
        subscription=subscription,
        subscription_id=subscription_id,
        name=names[0] if names else subscription_id,
        found=found,
    )


@get(_ORDERING)
async def list_keys(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """List the ordering keys that have deliveries, or only those that are parked."""
    subscription = await find_subscription(page, subscription_id)
    found = await page.api.get(
        f"/subscriptions/{subscription['id']}/ordering-keys",
        cursor=page.query("cursor"),
        parked="true" if page.query("parked") else None,
    )
    return page.render("subscription_ordering.html", subscription=subscription, found=found)


@post(f"{_ORDERING}/skip")
async def skip_head(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Skip the sidelined head of a key."""
    form = await page.form()
    page.require("operate")
    subscription = await find_subscription(page, subscription_id)
    # As it is: a key may begin or end with spaces.
    await page.api.post(
        f"/subscriptions/{subscription['id']}/ordering-keys/skip",
        {"ordering_key": form.raw("ordering_key")},
    )
    return page.redirect(f"{PATH}/{subscription['id']}/ordering", done="head-skipped")


ROUTES: Final = (list_subscriptions, show_subscription, show_history, list_keys, skip_head)
