"""Replace the signing secrets of subscriptions."""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.catalog.subscriptions import update_subscription
from rooms.db.secrets import Cipher
from rooms.db.tables.rooms import subscriptions
from rooms.domain.room import Subscription


async def replace_secret(
    connection: AsyncConnection,
    subscription: Subscription,
    secret: str,
    cipher: Cipher,
    *,
    overlap_s: int,
) -> datetime | None:
    """Replace the signing secret; the old one signs too for `overlap_s`.

    Return until when, if at all: one that no key of the cipher opens ends at once, because no call
    could be signed while it is valid. The transaction must have called `touch_room`. NotFoundError.
    """
    row = (subscriptions.c.room_id == subscription.room_id, subscriptions.c.id == subscription.id)
    old = await connection.scalar(select(subscriptions.c.secret).where(*row).with_for_update())
    keeps = overlap_s > 0 and old is not None and cipher.opens(old)
    until = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, overlap_s)
    await update_subscription(
        connection,
        subscription,
        {
            "previous_secret": old if keeps else None,
            "previous_secret_until": until if keeps else None,
            "secret": cipher.encrypt(secret.encode()),
        },
    )
    found: datetime | None = await connection.scalar(
        select(subscriptions.c.previous_secret_until).where(*row)
    )
    return found
