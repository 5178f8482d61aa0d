"""Change the policy of a room."""

from typing import Any, Final

from litestar import Response, get, post
from litestar.params import FromPath

from rooms.console.api_client import ApiProblemError
from rooms.console.fields import (
    RETRY_FIELDS,
    THROTTLE_FIELDS,
    Field,
    Kind,
    read_changes,
    shown_texts,
    to_texts,
    typed_texts,
)
from rooms.console.page import Page, PageDep
from rooms.console.retry_schedule import read_schedule
from rooms.console.rooms import PATH, ROOM, find_room
from rooms.domain.operational_event import OperationalEvent

FIELDS: Final = (
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
DONE: Final = {"room-changed": "The room is changed."}


@get(f"{ROOM}/policy")
async def edit_policy(page: PageDep, room_id: FromPath[str]) -> Response[str]:
    """Show the form of a room's policy."""
    room = await find_room(page, room_id)
    values = to_texts(FIELDS, room)
    return _form(page, room, values, shown_texts(values))


@post(f"{ROOM}/policy")
async def change_policy(page: PageDep, room_id: FromPath[str]) -> Response[Any]:
    """Change what was changed in the form."""
    form = await page.form()
    page.require("manage")
    room = await find_room(page, room_id)
    try:
        await page.api.patch(f"/rooms/{room['id']}", read_changes(FIELDS, form))
    except ApiProblemError as exc:
        return _form(page, room, typed_texts(FIELDS, form), form.raw("shown"), exc)
    return page.redirect(f"{PATH}/{room['id']}", done="room-changed")


def _form(
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


ROUTES: Final = (edit_policy, change_policy)
