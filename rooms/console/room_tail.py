"""Show the newest messages of a room, as they come."""

from typing import Final

from litestar import Response, get
from litestar.params import FromPath

from rooms.console.page import PageDep
from rooms.console.rooms import ROOM, find_room

_SHOWN: Final = 50


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


ROUTES: Final = (show_tail,)
