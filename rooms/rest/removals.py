"""The end of a subscription: gone for every request at once, and a job for what it has not got yet."""

from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.states import SubscriptionStatus
from rooms.rest.services import Services
from rooms.storage import jobs as job_records
from rooms.storage import subscriptions as records


async def take_away(
    connection: AsyncConnection, services: Services, principal: Principal, subscription: Subscription
) -> job_records.Job:
    """The job that cancels what it has not got yet. The room must have been touched in the same transaction."""
    await records.set_status(connection, subscription, SubscriptionStatus.DELETED, None)
    return await job_records.create_job(
        connection,
        principal.organisation_id,
        JobKind.DELETE_SUBSCRIPTION,
        new_id=services.ids.global_id(services.clock.now_ms()),
        room=subscription.room_id,
        arguments={
            "room_id": subscription.room_id,
            "subscription_id": subscription.id,
            "name": subscription.name,
        },
    )
