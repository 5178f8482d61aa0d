"""Replay past messages to a subscription, skip or clear what waits, and delete it."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, wrong_fields
from rooms.console.event_types import check_typed
from rooms.console.fields import typed_time
from rooms.console.form import Form
from rooms.console.page import Page, PageDep
from rooms.console.subscriptions import PATH, SUBSCRIPTION, find_subscription

_REPLAY: Final = f"{SUBSCRIPTION}/replay"
_COUNTED: Final = 200
DONE: Final = {
    "replay-begun": "The replay has begun: a job works on it.",
    "skip-begun": "What waits is being skipped: a job works on it.",
    "clear-begun": "What waits is being cancelled: a job works on it.",
    "subscription-deleted": "The subscription is deleted: a job cancels what is unfinished.",
}


@get(_REPLAY)
async def show_replay(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Show what can be replayed, skipped, cleared and deleted, with numbers."""
    return await _show(page, await find_subscription(page, subscription_id))


@post(_REPLAY)
async def replay(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Start a replay, or only count its messages where that button was used."""
    form = await page.form()
    page.require("operate")
    subscription = await find_subscription(page, subscription_id)
    body = _body(page, form)
    try:
        if "count" in form:
            counted = await _count(page, subscription, body)
            return await _show(page, subscription, form.values(), counted=counted)
        await page.api.post(f"/subscriptions/{subscription['id']}/replay", body)
    except ApiProblemError as exc:
        return await _show(page, subscription, form.values(), exc)
    return page.redirect(f"{PATH}/{subscription['id']}/replay", done="replay-begun")


@post(f"{_REPLAY}/start-over")
async def start_over(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Replay everything that is kept, once the name was typed."""
    form = await page.form()
    page.require("operate")
    subscription = await find_subscription(page, subscription_id)
    try:
        check_typed(form, "confirm_over", subscription["name"])
        body = {"since": "1970-01-01T00:00:00Z"}
        await page.api.post(f"/subscriptions/{subscription['id']}/replay", body)
    except ApiProblemError as exc:
        return await _show(page, subscription, error=exc)
    return page.redirect(f"{PATH}/{subscription['id']}/replay", done="replay-begun")


@post(f"{_REPLAY}/skip")
async def skip_to_now(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Cancel what waits and is due, once the name was typed."""
    return await _confirmed(page, subscription_id, "skip-to-now", "confirm_skip", "skip-begun")


@post(f"{_REPLAY}/clear")
async def clear(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Cancel all that is unfinished, once the name was typed."""
    return await _confirmed(page, subscription_id, "clear", "confirm_clear", "clear-begun")


@post(f"{_REPLAY}/delete")
async def delete_subscription(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Delete a subscription, once its name was typed."""
    form = await page.form()
    page.require("manage")
    subscription = await find_subscription(page, subscription_id)
    try:
        check_typed(form, "confirm_delete", subscription["name"])
        await page.api.delete(f"/subscriptions/{subscription['id']}")
    except ApiProblemError as exc:
        return await _show(page, subscription, error=exc)
    return page.redirect(f"{PATH}/{subscription['id']}/history", done="subscription-deleted")


async def _confirmed(
    page: Page, subscription_id: str, action: str, field: str, done: str
) -> Response[Any]:
    form = await page.form()
    page.require("operate")
    subscription = await find_subscription(page, subscription_id)
    path = f"/subscriptions/{subscription['id']}/{action}"
    try:
        await page.api.post(path, None, confirm=form.text(field) or "")
    except ApiProblemError as exc:
        return await _show(page, subscription, error=exc, confirm=field)
    return page.redirect(f"{PATH}/{subscription['id']}/replay", done=done)


def _body(page: Page, form: Form) -> dict[str, Any]:
    given = {
        "since": typed_time(page, form.text("since")),
        "from_message_id": form.text("from_message_id"),
        "until": typed_time(page, form.text("until")),
        "event_types": form.lines("event_types") or None,
        "ordering_keys": form.lines("ordering_keys") or None,
        "business_keys": form.lines("business_keys") or None,
        "rate_per_s": form.number("rate_per_s"),
        "include_expired": form.checked("include_expired") or None,
    }
    return {name: value for name, value in given.items() if value is not None}


async def _count(
    page: Page, subscription: dict[str, Any], body: dict[str, Any]
) -> tuple[int, bool]:
    """Return the messages of a replay's time, up to a page of them, and whether there are more."""
    found = await page.api.get(
        f"/rooms/{subscription['room_id']}/messages",
        limit=_COUNTED,
        since=body.get("since"),
        until=body.get("until"),
    )
    return len(found["items"]), found["next_cursor"] is not None


async def _show(
    page: Page,
    subscription: dict[str, Any],
    values: dict[str, str] | None = None,
    error: ApiProblemError | None = None,
    *,
    confirm: str | None = None,
    counted: tuple[int, bool] | None = None,
) -> Response[str]:
    """`confirm`: the field into which the name was typed wrongly."""
    return page.render(
        "subscription_replay.html",
        refused=error,
        subscription=subscription,
        counts=await page.api.get(f"/subscriptions/{subscription['id']}/counts"),
        jobs=await page.optional("/jobs", room_id=subscription["room_id"], limit=10),
        values=values or {},
        counted=counted,
        wrong=wrong_fields(error, {"confirm": confirm}),
    )


ROUTES: Final = (show_replay, replay, start_over, skip_to_now, clear, delete_subscription)
