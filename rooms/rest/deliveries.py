"""`/v1/deliveries` and the deliveries of a subscription."""

from datetime import datetime
from typing import Final

from litestar import get, post
from msgspec import Struct

from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.names import destination
from rooms.domain.principal import Principal
from rooms.domain.states import Scope, State, SubscriptionType
from rooms.errors import ConflictError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.filters import Correlation, DeliveryState, EventType, Version, to_filter
from rooms.rest.pages import Cursor, Limit, Since, Until, cut, open_cursor, seal_cursor
from rooms.rest.paths import IdPath, parse_id
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage import deliveries as records
from rooms.storage import subscriptions as subscription_records
from rooms.storage.transactions import transaction

_LIST: Final = "deliveries"
_TAGS: Final = ["deliveries"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE)


class DeliveryOut(Struct, kw_only=True):
    """A delivery: one message on its way to one subscription.

    `attempt` is the number of the next or last try since it was last shoveled, `attempts` counts all that were made.
    """

    id: str
    message_id: str
    subscription_id: str
    room_id: int
    destination: str
    state: State
    reason: str | None
    generation: int
    attempt: int
    attempts: int
    next_attempt_at: datetime | None
    last_status: int | None
    last_error: str | None
    due_at: datetime | None
    expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    correlation_id: str
    event_type: str
    event_version: int


class DeliveryPage(Struct, kw_only=True):
    """Deliveries."""

    items: list[DeliveryOut]
    next_cursor: str | None


@get(
    "/subscriptions/{subscription_id:str}/deliveries",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="List the deliveries of a subscription",
)
async def list_subscription_deliveries(
    *,
    services: Given,
    principal: Caller,
    subscription_id: IdPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: Since = None,
    until: Until = None,
    event_type: EventType = None,
    version: Version = None,
    in_state: DeliveryState = None,
    correlation_id: Correlation = None,
) -> DeliveryPage:
    """What the subscription got and is to get, newest first; a key that may only subscribe sees what is due."""
    identity = SubscriptionId(parse_id(subscription_id, "subscription"))
    before = open_cursor(services.seal, _LIST, cursor)
    wanted = to_filter(
        since=since,
        until=until,
        event_type=event_type,
        version=version,
        state=in_state,
        correlation_id=correlation_id,
    )
    async with transaction(services.engine) as connection:
        found = await subscription_records.find_subscription(connection, principal.organisation_id, identity)
        items = await records.deliveries_of_subscription(
            connection,
            found.room_id,
            identity,
            wanted,
            due_only=principal.sees_due_only,
            before=before,
            limit=limit + 1,
        )
    page, last = cut(items, limit, lambda delivery: delivery.id)
    return DeliveryPage(
        items=[delivery_out(delivery) for delivery in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@get("/deliveries/{delivery_id:str}", opt=_READ, responses=documented(), tags=_TAGS, summary="Read a delivery")
async def read_delivery(services: Given, principal: Caller, delivery_id: IdPath) -> DeliveryOut:
    """One delivery; to a key that may only subscribe it does not exist before it is due."""
    return await _read(services, principal, DeliveryId(parse_id(delivery_id, "delivery")))


@post(
    "/deliveries/{delivery_id:str}/redeliver",
    status_code=200,
    opt=needs(Scope.OPERATE),
    responses=documented(409),
    tags=_TAGS,
    summary="Send a delivery again",
)
async def redeliver(services: Given, principal: Caller, delivery_id: IdPath) -> DeliveryOut:
    """The delivery, queued again, its attempts counted anew.

    One that is sidelined keeps its lifetime; one that expired, or was cancelled or dropped, gets a fresh one. 409: it is
    in another state, its subscription is gone, or its lifetime ended while it was sidelined.
    """
    identity = DeliveryId(parse_id(delivery_id, "delivery"))
    done = await records.redeliver(services.writer, principal.organisation_id, identity)
    if done.subscription_gone:
        raise ConflictError("its subscription was deleted, so that there is nobody to send it to")
    if done.after is State.EXPIRED:
        raise ConflictError("its lifetime ended while it was sidelined; it is expired now, and may be sent once more")
    if done.after is None:
        raise ConflictError(f"it is {done.before}; what is sidelined, expired, cancelled or dropped can be sent again")
    services.signals.ring_queued(done.subscription_id if done.type is SubscriptionType.PULL else None)
    return await _read(services, principal, identity)


async def _read(services: Services, principal: Principal, identity: DeliveryId) -> DeliveryOut:
    async with transaction(services.engine) as connection:
        found = await records.find_delivery(
            connection, principal.organisation_id, identity, due_only=principal.sees_due_only
        )
    return delivery_out(found)


def delivery_out(found: records.Delivery) -> DeliveryOut:
    """A delivery as it reads everywhere."""
    same = {name: getattr(found, name) for name in DeliveryOut.__struct_fields__ if name != "destination"}
    return DeliveryOut(**same, destination=destination(found.room_id, found.subscription_id))


ROUTES: Final = [list_subscription_deliveries, read_delivery, redeliver]
