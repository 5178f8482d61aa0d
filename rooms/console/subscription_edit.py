"""Create a subscription, and edit every setting of one."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.api.portal_fields import NOT_FOR_PORTALS
from rooms.console.api_client import ApiProblemError
from rooms.console.fields import (
    RETRY_FIELDS,
    THROTTLE_FIELDS,
    Field,
    Kind,
    read_changes,
    read_fields,
    shown_texts,
    to_texts,
    typed_texts,
    typed_time,
)
from rooms.console.page import Page, PageDep
from rooms.console.retry_schedule import read_schedule
from rooms.console.rooms import ROOM, find_room
from rooms.console.subscriptions import PATH, SUBSCRIPTION, find_subscription

_COMMON: Final = (
    Field("name"),
    Field("event_types", Kind.INTERESTS),
    Field("filter"),
    Field("ordered", Kind.YES_NO),
    Field("message_expiration_ms", Kind.NUMBER),
)
_PUSH: Final = (
    Field("push_url"),
    Field("headers", Kind.HEADERS),
    Field("terminal_statuses", Kind.NUMBERS),
    Field("ignorable_statuses", Kind.NUMBERS),
    Field("cloud_events", Kind.FLAG),
    *RETRY_FIELDS,
    *THROTTLE_FIELDS,
)
_PULL: Final = (Field("max_receives", Kind.NUMBER),)
_NEW: Final = (Field("operational", Kind.FLAG), Field("backfill", Kind.FLAG))
_NATIVE: Final = "NATIVE"
TYPES: Final = ("PUSH", "PULL", _NATIVE)
DONE: Final = {
    "subscription-changed": "The subscription is changed.",
    "subscription-proposed": "The change waits for the approval of the room's owner.",
}


@get(f"{ROOM}/subscriptions/new")
async def new_subscription(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Ask for the fields of a subscription of the type in the address."""
    page.require("manage")
    room = await find_room(page, room_id)
    kind = page.query("type") or ""
    kind = kind if kind in TYPES else TYPES[0]
    return _new_form(page, room, kind, to_texts(_fields(kind, new=True), {}))


@post(f"{ROOM}/subscriptions/new")
async def create_subscription(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Create a subscription, and show its secret or its password, this once."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    kind = form.text("type") or ""
    fields = _fields(kind, new=True)
    body = read_fields(fields, form) | {"type": "PULL" if kind == _NATIVE else kind}
    if kind == _NATIVE:
        body["native"] = True
    if form.text("start_at"):
        body["start_at"] = typed_time(page, form.text("start_at"))
    try:
        made = await page.api.post(f"/rooms/{room['id']}/subscriptions", body)
    except ApiProblemError as exc:
        values = typed_texts(fields, form) | {"start_at": form.raw("start_at")}
        return _new_form(page, room, kind if kind in TYPES else TYPES[0], values, exc)
    return page.render("subscription_created.html", room=room, made=made)


@get(f"{SUBSCRIPTION}/edit")
async def edit_subscription(page: PageDep, subscription_id: FromPath[str]) -> Response[str]:
    """Show the form of a subscription's settings."""
    page.require("manage")
    subscription = await find_subscription(page, subscription_id)
    values = to_texts(_shown_fields(page, subscription), subscription)
    return await _edit_form(page, subscription, values, shown_texts(values))


@post(f"{SUBSCRIPTION}/edit")
async def change_subscription(page: PageDep, subscription_id: FromPath[str]) -> Response[Any]:
    """Change what was changed in the form."""
    form = await page.form()
    page.require("manage")
    subscription = await find_subscription(page, subscription_id)
    fields = _shown_fields(page, subscription)
    try:
        changes = read_changes(fields, form)
        now = await page.api.patch(f"/subscriptions/{subscription['id']}", changes)
    except ApiProblemError as exc:
        return await _edit_form(
            page, subscription, typed_texts(fields, form), form.raw("shown"), exc
        )
    proposed = not changes.keys().isdisjoint(now["proposal"] or {})
    return page.redirect(
        f"{PATH}/{subscription['id']}",
        done="subscription-proposed" if proposed else "subscription-changed",
    )


def _shown_fields(page: Page, subscription: dict[str, Any]) -> tuple[Field, ...]:
    """Return the fields of the form: in a portal only those that its people may change."""
    found = _fields(subscription["type"])
    if not page.is_portal:
        return found
    return tuple(one for one in found if one.name not in NOT_FOR_PORTALS)


def _fields(kind: str, *, new: bool = False) -> tuple[Field, ...]:
    own = _PUSH if kind == "PUSH" else () if kind == _NATIVE else _PULL
    return (*_COMMON, *own, *(_NEW if new else ()))


def _new_form(
    page: Page,
    room: dict[str, Any],
    kind: str,
    values: dict[str, str],
    error: ApiProblemError | None = None,
) -> Response[str]:
    return page.render(
        "subscription_new.html",
        refused=error,
        room=room,
        kind=kind,
        has_broker=page.parts.services.broker_users is not None,
        values=values,
        schedule=read_schedule(values, room),
        preview_room=room["id"],
    )


async def _edit_form(
    page: Page,
    subscription: dict[str, Any],
    values: dict[str, str],
    shown: str,
    error: ApiProblemError | None = None,
) -> Response[str]:
    room = subscription["room"]
    return page.render(
        "subscription_edit.html",
        refused=error,
        subscription=subscription,
        kind=subscription["type"],
        values=values,
        shown=shown,
        schedule=read_schedule(values, room),
        preview_room=None if room is None else room["id"],
    )


ROUTES: Final = (new_subscription, create_subscription, edit_subscription, change_subscription)
