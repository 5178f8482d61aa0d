"""Show rooms, and create one."""

from typing import Any, Final

from litestar import Response, get, post

from rooms.console.api_client import ApiProblemError
from rooms.console.page import HOME, Form, Page, PageDep

PATH: Final = f"{HOME}/rooms"
_SUGGESTED: Final = {
    "delivery_delay_ms": "1000",
    "delivery_delay_multiplier": "2",
    "delivery_attempts": "10",
}
DONE: Final = {"room-created": "The room is created."}


@get(PATH)
async def list_rooms(page: PageDep) -> Response[str]:
    """List the rooms that the viewer may see."""
    found = await page.api.get("/rooms", cursor=page.query("cursor"))
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


def _fields(form: Form) -> dict[str, Any]:
    given = {
        "name": form.text("name"),
        "delivery_delay_ms": form.number("delivery_delay_ms"),
        "delivery_delay_multiplier": form.number("delivery_delay_multiplier"),
        "delivery_attempts": form.number("delivery_attempts"),
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
        wrong={} if error is None else error.fields,
    )


ROUTES: Final = (list_rooms, new_room, create_room)
