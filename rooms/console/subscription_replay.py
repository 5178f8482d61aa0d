"""Replay past messages to a subscription, skip or clear what waits, and delete it."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, wrong_fields
from rooms.console.event_types import check_typed, field_problem
from rooms.console.fields import typed_time
from rooms.console.form import Form
from rooms.console.page import Page, PageDep
from rooms.console.rooms import owns
from rooms.console.subscriptions import PATH, SUBSCRIPTION, find_subscription
from rooms.domain.ids import created_ms, is_id, room_of

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
) -> tuple[int | None, bool]:
    """Return the messages from a replay's start to its end, up to a page, and whether more follow.

    None: the viewer sees only what it received or published, so it is not known. ApiProblemError.
    """
    since, first = body.get("since"), body.get("from_message_id")
    if (since is None) == (first is None):
        raise field_problem("since", "give since or from_message_id as the start, one of them")
    if first is not None:
        is_known = is_id(first) and first == first.lower()
        if not is_known or room_of(first) != subscription["room_id"]:
            raise field_problem("from_message_id", "is not a message of the subscription's room")
        since = _time_of(first)
    room = subscription["room"]
    if room is None or not owns(page, room) or page.me.subscriptions is not None:
        return None, True
    path = f"/rooms/{room['id']}/messages"
    span = {"since": since, "until": body.get("until")}
    found = await page.api.get(path, limit=_COUNTED, **span)
    items, cursor = found["items"], found["next_cursor"]
    if first is not None and items and items[-1]["id"] < first:
        return sum(one["id"] >= first for one in items), False
    if first is not None and cursor is not None:
        # Those before it in its millisecond follow, and are not replayed.
        further = (await page.api.get(path, limit=1, cursor=cursor, **span))["items"]
        return len(items), bool(further) and further[0]["id"] >= first
    return len(items), cursor is not None


def _time_of(message_id: str) -> str:
    """Return a time that includes the whole millisecond of a message's id, and none before it."""
    # Half a millisecond early, because the API rounds up to a whole one.
    after_ms = timedelta(milliseconds=created_ms(message_id) - 0.5)
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + after_ms).isoformat()
    except OverflowError as exc:
        problem = "is not a message of the subscription's room"
        raise field_problem("from_message_id", problem) from exc


async def _show(
    page: Page,
    subscription: dict[str, Any],
    values: dict[str, str] | None = None,
    error: ApiProblemError | None = None,
    *,
    confirm: str | None = None,
    counted: tuple[int | None, bool] | None = None,
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
