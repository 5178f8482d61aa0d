"""Restore, clear and delete a room, after what would be affected was shown in numbers."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError, segment, wrong_fields
from rooms.console.fields import typed_time
from rooms.console.page import Page, PageDep
from rooms.console.rooms import PATH, ROOM, find_room

_MAINTENANCE: Final = f"{ROOM}/maintenance"
DONE: Final = {
    "room-restoring": "The restore has begun: a job works on it.",
    "room-clearing": "The clear has begun: a job works on it.",
    "room-deleted": "The room is deleted: a job removes what it had.",
}


@get(_MAINTENANCE)
async def show_maintenance(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Show what a restore, a clear and a deletion would affect, and the room's jobs."""
    return await _show(page, await find_room(page, room_id))


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
        return await _show(page, room, exc)
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
        return await _show(page, room, exc, confirm="confirm_clear")
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
        return await _show(page, room, exc, confirm="confirm_delete")
    return page.redirect(PATH, done="room-deleted")


async def _show(
    page: Page,
    room: dict[str, Any],
    error: ApiProblemError | None = None,
    *,
    confirm: str | None = None,
) -> Response[str]:
    """`confirm`: the field into which the name was typed wrongly."""
    wrong = wrong_fields(error)
    if confirm is not None and "confirm" in wrong:
        wrong[confirm] = wrong["confirm"]
    return page.render(
        "room_maintenance.html",
        refused=error,
        room=room,
        counts=await page.api.get(f"/rooms/{room['id']}/counts"),
        jobs=await page.optional("/jobs", room_id=room["id"], limit=10),
        wrong=wrong,
    )


ROUTES: Final = (show_maintenance, restore_room, clear_room, delete_room)
