"""Show rooms, those that others made visible, and one room with its parts, and create one."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.conditions import condition_names, find_unwell
from rooms.console.form import Form
from rooms.console.page import HOME, Page, PageDep
from rooms.console.retry_schedule import read_schedule
from rooms.domain.state_machine import SubscriptionStatus

PATH: Final = f"{HOME}/rooms"
ROOM: Final = f"{PATH}/{{room_id:str}}"
_SUGGESTED: Final = {
    "delivery_delay_ms": "1000",
    "delivery_delay_multiplier": "2",
    "delivery_attempts": "10",
}
_SHOWN: Final = 50
_STATUSES: Final = tuple(
    status.value for status in SubscriptionStatus if status is not SubscriptionStatus.DELETED
)
_DIRECTORY: Final = f"{HOME}/directory"
_UNWELL: Final = 10
DONE: Final = {"room-created": "The room is created."}


@get(PATH)
async def list_rooms(page: PageDep) -> Response[str]:
    """List the rooms that the viewer may see; `shared`: those of others."""
    found = await page.api.get(
        "/rooms",
        cursor=page.query("cursor"),
        contains=page.query("contains"),
        shared="true" if page.query("shared") else None,
    )
    return page.render("rooms.html", found=found)


@get(f"{PATH}/new")
async def new_room(page: PageDep) -> Response[str]:
    """Ask for the fields of a room."""
    return _form(page, dict(_SUGGESTED))


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
    subscriptions = await page.optional(f"{at}/subscriptions", limit=200)
    waiting = [
        one
        for one in (subscriptions or {}).get("items", ())
        if one["status"] == "pending" or one["proposal"] is not None
    ]
    return page.render(
        "room.html",
        room=room,
        event_types=await page.optional(f"{at}/event-types", limit=200),
        subscriptions=subscriptions,
        pending=len(waiting) if owns(page, room) else 0,
        status=await page.optional("/status", room_id=room["id"], limit=_UNWELL),
        conditions=condition_names(page),
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
        health=await find_unwell(page, found["items"]),
        conditions=condition_names(page),
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


ROUTES: Final = (
    list_rooms,
    new_room,
    create_room,
    show_room,
    show_tail,
    list_room_subscriptions,
    show_directory,
)
