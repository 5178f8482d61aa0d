"""Create the job that gives a new or just approved subscription what was published before.

The job leaves out messages that routing delivers already, and begins once every publish that did
not know of the subscription is over (`delivery.maintenance.replay`). So there is neither a gap nor
a double between history and live messages.
"""

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.deps import ApiServices
from rooms.db.catalog.access import entitlements
from rooms.db.jobs.jobs import create_job
from rooms.domain.job import JobKind
from rooms.domain.room import Subscription


async def replay_history(
    connection: AsyncConnection,
    services: ApiServices,
    subscription: Subscription,
    since: datetime,
    *,
    backfill: bool = False,
) -> None:
    """Create the job that delivers what was published since then; it belongs to the subscriber.

    `backfill`: everything since then, because the owner approved the request of that time. Else
    only what the subscriber was entitled to.
    """
    entitled = None if backfill else await entitlements(connection, subscription, since)
    await create_job(
        connection,
        subscription.organisation_id,
        JobKind.REPLAY,
        new_id=services.ids.generate_global(services.clock.now_ms()),
        room=subscription.room_id,
        arguments={
            "room_id": subscription.room_id,
            "subscription_id": subscription.id,
            "since": since.isoformat(),
            "missing": True,
            **({} if entitled is None else {"entitled": entitled}),
        },
    )
