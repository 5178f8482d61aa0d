"""Show the subscriptions of a room."""

from typing import Final

from litestar import Response, get
from litestar.params import FromPath

from rooms.console.conditions import condition_names, find_unwell
from rooms.console.page import PageDep
from rooms.console.rooms import ROOM, find_room
from rooms.domain.state_machine import SubscriptionStatus

STATUSES: Final = tuple(
    status.value for status in SubscriptionStatus if status is not SubscriptionStatus.DELETED
)


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
        statuses=STATUSES,
    )


ROUTES: Final = (list_room_subscriptions,)
