"""Lock rooms while subscriptions change, and touch and notify what routing reads."""

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.deps import ApiServices
from rooms.db.catalog import rooms as room_records
from rooms.db.catalog import subscriptions as records
from rooms.db.catalog.access import RoomAccess, find_access
from rooms.db.catalog.organisations import ListedOrganisation, lock_members
from rooms.db.notify import Channel
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import SubscriptionStatus


async def lock_room(
    services: ApiServices, connection: AsyncConnection, principal: Principal, room: RoomId
) -> tuple[RoomAccess, Mapping[OrganisationId, ListedOrganisation]]:
    """Return what the principal may do in a room, locked until the transaction ends.

    With it come the organisations on both sides, whose status stays as it is until then. The access
    is read again under the lock, as it may have changed before. NotFoundError, RateLimitedError.
    """
    access = await find_access(connection, principal, room)
    access.join()  # who may not subscribe takes no lock
    members = await lock_members(
        connection, {access.room.organisation_id, principal.organisation_id}
    )
    await room_records.lock_shared_room(connection, room)
    access = await find_access(connection, principal, room)
    await change_room_as(services, connection, principal, room, access.join()[0])
    return access, members


async def change_room_as(
    services: ApiServices,
    connection: AsyncConnection,
    principal: Principal,
    room: RoomId,
    status: SubscriptionStatus,
) -> None:
    """Count a change of what is the principal's own in a locked room, and touch the room for it.

    `status`: of the subscription before the change. Routing does not read a pending one, so the
    room is not touched for it: publishers must not load a room again because a stranger asks.
    RateLimitedError: the organisation has changed too much in this room of another one.
    """
    if status is SubscriptionStatus.PENDING:
        found = await room_records.find_any_room(connection, room)
        if found is None:
            raise room_records.room_not_found(room)
    else:
        found = await room_records.touch_shared_room(connection, room)
    services.guest_changes.acquire(principal.organisation_id, found)


async def lock_subscription(
    services: ApiServices,
    connection: AsyncConnection,
    principal: Principal,
    identity: SubscriptionId,
    *,
    is_changed: bool = True,
) -> Subscription:
    """Return the principal's own subscription with its room locked.

    It is read again under the lock, as it may have changed before. `is_changed`: see
    `change_room_as`. RateLimitedError.
    """
    found = await records.find_subscription(connection, principal, identity)
    await room_records.lock_shared_room(connection, found.room_id)
    found = await records.find_subscription(connection, principal, identity)
    if is_changed:
        await change_room_as(services, connection, principal, found.room_id, found.status)
    return found


def notify_of(services: ApiServices, before: Subscription) -> None:
    """Notify every process of a changed subscription, unless routing did not read it before."""
    if before.status is not SubscriptionStatus.PENDING:
        services.notifier.notify(Channel.CONFIG, str(before.room_id))
