"""A room's operational endpoint: an ordinary PUSH subscription that wants no event type, made and kept by its room. What it
gets is written by the very statement that makes the news (`rooms.storage.lanes`), and is a delivery like any other.
"""

from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.room import Subscription
from rooms.domain.states import SubscriptionStatus, SubscriptionType
from rooms.storage import subscriptions as records
from rooms.storage.tables.rooms import subscriptions

NAME: Final = "~operational"
"""'~' is in no name that people may choose."""


async def find_operational(connection: AsyncConnection, room: RoomId) -> Subscription | None:
    """The room's, where it has one."""
    statement = select(subscriptions).where(
        subscriptions.c.room_id == room,
        subscriptions.c.operational,
        subscriptions.c.status != SubscriptionStatus.DELETED,
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else records.from_row(row)


async def set_operational(
    connection: AsyncConnection, room: RoomId, url: str, *, identity: SubscriptionId, sealed_secret: bytes
) -> None:
    """Send what there is to tell to this URL from now on. A new one gets these id and secret. The room must be touched."""
    now = await find_operational(connection, room)
    if now is None:
        await records.create_subscription(
            connection,
            room,
            identity,
            {
                "name": NAME,
                "type": SubscriptionType.PUSH,
                "push_url": url,
                "event_types": [],
                "secret": sealed_secret,
                "operational": True,
            },
        )
    elif now.push_url != url:
        await records.change_subscription(connection, now, {"push_url": url})
