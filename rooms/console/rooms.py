"""Show rooms and one room, and create one."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment
from rooms.console.conditions import condition_names
from rooms.console.fields import wrong_fields
from rooms.console.page import HOME, Form, Page, PageDep
from rooms.console.retry_schedule import read_schedule

PATH: Final = f"{HOME}/rooms"
ROOM: Final = f"{PATH}/{{room_id:str}}"
_SUGGESTED: Final = {
    "delivery_delay_ms": "1000",
    "delivery_delay_multiplier": "2",
    "delivery_attempts": "10",
}
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
        http_status=200 if error is None else error.status,
        values=values,
        problem=None if error is None else error.problem,
        wrong=wrong_fields(error),
        schedule=read_schedule(values),
        preview_room=None,
    )


ROUTES: Final = (list_rooms, new_room, create_room, show_room)
