"""Show rooms, and those that others made visible; create, change, restore, clear and delete one.

What is restored, cleared or deleted is shown in numbers before.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment, wrong_fields
from rooms.console.fields import (
    RETRY_FIELDS,
    THROTTLE_FIELDS,
    Field,
    Kind,
    read_changes,
    shown_texts,
    to_texts,
    typed_texts,
    typed_time,
)
from rooms.console.form import Form
from rooms.console.page import HOME, Page, PageDep
from rooms.console.retry_schedule import read_schedule
from rooms.console.subscription_health import find_unhealthy, health_labels
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.room import (
    DEFAULT_DELIVERY_ATTEMPTS,
    DEFAULT_DELIVERY_DELAY_MS,
    DEFAULT_DELIVERY_DELAY_MULTIPLIER,
)
from rooms.domain.state_machine import RESTORABLE, State, SubscriptionStatus

PATH: Final = f"{HOME}/rooms"
ROOM: Final = f"{PATH}/{{room_id:str}}"
SUGGESTED: Final = {
    "delivery_delay_ms": str(DEFAULT_DELIVERY_DELAY_MS),
    "delivery_delay_multiplier": f"{DEFAULT_DELIVERY_DELAY_MULTIPLIER:g}",
    "delivery_attempts": str(DEFAULT_DELIVERY_ATTEMPTS),
}
_SHOWN: Final = 50
_COUNTED: Final = 200
"""So many event types and subscriptions are counted."""
_STATUSES: Final = tuple(
    status.value for status in SubscriptionStatus if status is not SubscriptionStatus.DELETED
)
_DIRECTORY: Final = f"{HOME}/directory"
_UNWELL: Final = 10
POLICY_FIELDS: Final = (
    Field("name"),
    Field("description"),
    Field("message_expiration_ms", Kind.NUMBER),
    Field("visibility"),
    Field("subscription_policy"),
    Field("transparent", Kind.FLAG),
    Field("ordered", Kind.FLAG),
    Field("reapprove_on", Kind.MANY),
    *RETRY_FIELDS,
    *THROTTLE_FIELDS,
    Field("operational_url"),
    Field("operational_events", Kind.MANY),
)
_MAINTENANCE: Final = f"{ROOM}/maintenance"
DONE: Final = {
    "room-created": "The room is created.",
    "room-changed": "The room is changed.",
    "room-restoring": "The restore has begun: a job works on it.",
    "room-clearing": "The clear has begun: a job works on it.",
    "room-deleted": "The room is deleted: a job removes what it had.",
}


@get(PATH)
async def list_rooms(page: PageDep) -> Response[str]:
    """List the rooms that the viewer may see; `shared`: those of others."""
    found = await page.api.get(
        "/rooms",
        cursor=page.query("cursor"),
        contains=page.query("contains"),
        shared="true" if page.query("shared") else None,
    )
    return page.render(
        "rooms.html", found=found, shared=None if found["items"] else await find_shared(page)
    )


async def find_shared(page: Page) -> dict[str, Any] | None:
    """Return a room of others that the viewer may read, in a list; None: may not list them."""
    found: dict[str, Any] | None = await page.optional("/rooms", shared="true", limit=1)
    return found


@get(f"{PATH}/new")
async def new_room(page: PageDep) -> Response[str]:
    """Ask for the fields of a room."""
    page.require("manage")
    return _form(page, dict(SUGGESTED))


@post(PATH)
async def create_room(page: PageDep) -> Response[Any]:
    """Create a room."""
    form = await page.form()
    try:
        made = await page.api.post("/rooms", _fields(form))
    except ApiProblemError as exc:
        return _form(page, form.values(), exc)
    return page.redirect(f"{PATH}/{made['id']}", done="room-created")


@get(ROOM)
async def show_room(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Show a room: how much it has, when it retries, and its policy."""
    room = await find_room(page, room_id)
    at = f"/rooms/{room['id']}"
    pending = None
    if owns(page, room):
        pending = await page.optional(f"{at}/subscriptions", status="pending", limit=_COUNTED)
    return page.render(
        "room.html",
        room=room,
        event_types=await page.optional(f"{at}/event-types", limit=_COUNTED),
        subscriptions=await page.optional(f"{at}/subscriptions", limit=_COUNTED),
        pending=pending,
        status=await page.optional("/status", room_id=room["id"], limit=_UNWELL),
        conditions=health_labels(page),
        schedule=read_schedule(room),
    )


async def find_room(page: Page, room_id: str) -> dict[str, Any]:
    """Return a room as the API shows it. ApiProblemError: there is none for the viewer."""
    found: dict[str, Any] = await page.api.get(f"/rooms/{segment(room_id)}")
    return found


def owns(page: Page, room: dict[str, Any]) -> bool:
    """Return whether a room is of the viewer's organisation."""
    return bool(room["organisation_id"] == page.me.organisation_id)


def _fields(form: Form) -> dict[str, Any]:
    given = {
        "name": form.text("name"),
        "delivery_delay_ms": form.number("delivery_delay_ms"),
        "delivery_delay_multiplier": form.number("delivery_delay_multiplier"),
        "delivery_attempts": form.number("delivery_attempts"),
        "delivery_max_delay_ms": form.number("delivery_max_delay_ms"),
        "delivery_jitter": form.number("delivery_jitter"),
    }
    return {name: value for name, value in given.items() if value is not None}


def _form(
    page: Page, values: dict[str, str], error: ApiProblemError | None = None
) -> Response[str]:
    return page.render(
        "room_new.html",
        refused=error,
        values=values,
        schedule=read_schedule(values),
        preview_room=None,
    )


@get(f"{ROOM}/tail")
async def show_tail(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Show the newest messages, of one event type or application if the address names one."""
    room = await find_room(page, room_id)
    found = await page.api.get(
        f"/rooms/{room['id']}/messages",
        limit=_SHOWN,
        event_type=page.query("event_type"),
        state=page.query("state"),
    )
    return page.render("room_tail.html", room=room, found=found)


@get(f"{ROOM}/subscriptions")
async def list_room_subscriptions(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """List the subscriptions of a room: to its owner those of others, too."""
    room = await find_room(page, room_id)
    found = await page.api.get(
        f"/rooms/{room['id']}/subscriptions",
        cursor=page.query("cursor"),
        status=page.query("status"),
        type=page.query("type"),
        contains=page.query("contains"),
    )
    return page.render(
        "room_subscriptions.html",
        room=room,
        found=found,
        health=await find_unhealthy(page, found["items"]),
        conditions=health_labels(page),
        statuses=_STATUSES,
    )


@get(_DIRECTORY)
async def show_directory(page: PageDep) -> Response[str]:
    """List rooms of others with their event types, and how to subscribe to them."""
    found = await page.api.get(
        "/directory",
        cursor=page.query("cursor"),
        limit=20,
        name=page.query("name"),
        owner=page.query("owner"),
        event_type=page.query("event_type"),
    )
    return page.render("directory.html", found=found)


@get(f"{ROOM}/policy")
async def edit_policy(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Show the form of a room's policy."""
    page.require("manage")
    room = await find_room(page, room_id)
    values = to_texts(POLICY_FIELDS, room)
    return _policy_form(page, room, values, shown_texts(values))


@post(f"{ROOM}/policy")
async def change_policy(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Change what was changed in the form."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        await page.api.patch(f"/rooms/{room['id']}", read_changes(POLICY_FIELDS, form))
    except ApiProblemError as exc:
        return _policy_form(page, room, typed_texts(POLICY_FIELDS, form), form.raw("shown"), exc)
    return page.redirect(f"{PATH}/{room['id']}", done="room-changed")


def _policy_form(
    page: Page,
    room: dict[str, Any],
    values: dict[str, str],
    shown: str,
    error: ApiProblemError | None = None,
) -> Response[str]:
    return page.render(
        "room_policy.html",
        refused=error,
        room=room,
        values=values,
        shown=shown,
        events=[(event.value, event.value) for event in OperationalEvent],
        schedule=read_schedule(values),
        preview_room=None,
    )


@get(_MAINTENANCE)
async def show_maintenance(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Show what a restore, a clear and a deletion would affect, and the room's jobs."""
    return await _show_maintenance(page, await find_room(page, room_id))


@post(f"{_MAINTENANCE}/restore")
async def restore_room(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Start the job that restores the room's deliveries."""
    form = await page.form()
    page.require("operate")
    room = await find_room(page, room_id)
    body = {
        "include_expired": form.checked("include_expired"),
        "since": typed_time(page, form.text("since")),
        "states": form.many("states") or None,
    }
    given = {name: value for name, value in body.items() if value is not None}
    try:
        await page.api.post(f"/rooms/{room['id']}/restore", given)
    except ApiProblemError as exc:
        values = form.values() | {"states": "\n".join(form.many("states"))}
        return await _show_maintenance(page, room, exc, values=values)
    return page.redirect(f"{PATH}/{room['id']}/maintenance", done="room-restoring")


@post(f"{_MAINTENANCE}/clear")
async def clear_room(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Start the job that cancels the room's unfinished deliveries, once its name was typed."""
    form = await page.form()
    page.require("operate")
    room = await find_room(page, room_id)
    try:
        await page.api.post(
            f"/rooms/{room['id']}/clear", None, confirm=form.text("confirm_clear") or ""
        )
    except ApiProblemError as exc:
        return await _show_maintenance(page, room, exc, confirm="confirm_clear")
    return page.redirect(f"{PATH}/{room['id']}/maintenance", done="room-clearing")


@post(f"{_MAINTENANCE}/delete")
async def delete_room(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Delete the room, once its name was typed."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        await page.api.delete(
            f"/rooms/{segment(room['id'])}", confirm=form.text("confirm_delete") or ""
        )
    except ApiProblemError as exc:
        return await _show_maintenance(page, room, exc, confirm="confirm_delete")
    return page.redirect(PATH, done="room-deleted")


async def _show_maintenance(
    page: Page,
    room: dict[str, Any],
    error: ApiProblemError | None = None,
    *,
    confirm: str | None = None,
    values: Mapping[str, str] = MappingProxyType({}),
) -> Response[str]:
    """`confirm`: the field into which the name was typed wrongly. `values`: of the restore."""
    return page.render(
        "room_maintenance.html",
        refused=error,
        room=room,
        counts=await page.api.get(f"/rooms/{room['id']}/counts"),
        jobs=await page.optional("/jobs", room_id=room["id"], limit=10),
        states=[(one.value, page.label_of(one.value)) for one in State if one in RESTORABLE],
        values=values,
        wrong=wrong_fields(error, {"confirm": confirm}),
    )


ROUTES: Final = (
    list_rooms,
    new_room,
    create_room,
    show_room,
    show_tail,
    list_room_subscriptions,
    show_directory,
    edit_policy,
    change_policy,
    show_maintenance,
    restore_room,
    clear_room,
    delete_room,
)
