"""Serve `/v1/subscriptions/{id}/queue` and `/consumers`: look at a PULL queue, and take nothing."""

from datetime import datetime
from typing import Annotated, Final, Literal

from litestar import get
from litestar.params import QueryParameter
from msgspec import Struct

from rooms.api.auth import (
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog.subscriptions import find_subscription
from rooms.db.connection import transaction
from rooms.db.queries.pull_queue import (
    QueueConsumer,
    QueuedDelivery,
    list_consumers,
    list_leased,
    list_waiting,
)
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope, SubscriptionType
from rooms.errors import ConflictError

_LIST: Final = "queue"

QueuePart = Annotated[
    Literal["waiting", "leased"],
    QueryParameter(
        name="state",
        description="waiting: in the order in which consumers get them; leased: with a consumer.",
    ),
]


class QueuedDeliveryResponse(Struct, kw_only=True):
    """Describe a delivery in a queue, without its payload.

    `leased_until`: the end of its lease; null: it waits. `key_id`: the API key of the consumer that
    has it, taken at `leased_at`. The fields of its message are null where the message is gone.
    """

    delivery_id: str
    message_id: str
    attempt: int
    due_at: datetime | None
    expires_at: datetime | None
    leased_until: datetime | None
    leased_at: datetime | None
    key_id: str | None
    event_type: str | None
    event_version: int | None
    priority: int | None
    correlation_id: str | None
    ordering_key: str | None
    business_key: str | None
    published_at: datetime | None


class QueueConsumerResponse(Struct, kw_only=True):
    """Describe a consumer: an API key that has messages under leases.

    `key_id` is null where it is not known, `key_name` also for a restricted key that asks about
    another one. Of its leases, the first was taken at `oldest_at`; they end between `first_end` and
    `last_end`.
    """

    key_id: str | None
    key_name: str | None
    leases: int
    oldest_at: datetime | None
    first_end: datetime
    last_end: datetime


class QueueConsumersResponse(Struct, kw_only=True):
    """List up to 100 consumers, those with the most leases first.

    `oldest_due_at`: when the message was due that has waited longest; null: none waits. `complete`
    is false where the room has more than 10,000 leases: others were not looked at.
    """

    items: list[QueueConsumerResponse]
    oldest_due_at: datetime | None
    complete: bool


class QueuePage(Struct, kw_only=True):
    """List deliveries of a queue."""

    items: list[QueuedDeliveryResponse]
    next_cursor: str | None


@get(
    "/subscriptions/{subscription_id:str}/queue",
    opt=for_portals(
        require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
    ),
    responses=documented_responses(409),
    tags=["pull"],
    summary="Browse a queue",
)
async def browse_queue(
    *,
    services: ServicesDep,
    principal: Caller,
    subscription_id: IdPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    part: QueuePart = "waiting",
) -> QueuePage:
    """List what waits in the queue of a PULL subscription, or what consumers have; take nothing.

    What another broker carries is listed by due time, after what PostgreSQL carries. `leased` is in
    no particular order. A call looks at 10,000 leases of the room, so such a page may have few or
    no items while `next_cursor` is set. So may any page in another organisation's room, where a
    call looks at about 2,000 messages of each priority. 409: it is a PUSH subscription.
    """
    identity = parse_subscription(subscription_id)
    page = PageRequest(services.cipher, f"{_LIST}-{part}", limit, cursor)
    async with transaction(services.engine) as connection:
        found = await find_subscription(connection, principal, identity)
        if found.type is not SubscriptionType.PULL:
            raise ConflictError("it is a PUSH subscription: it has no queue to browse")
        if part == "leased":
            scan = await list_leased(
                connection, found.room_id, identity, after=page.after, limit=page.fetch_limit
            )
        else:
            scan = await list_waiting(
                connection,
                found.room_id,
                identity,
                due_only=principal.sees_due_only,
                after=page.after,
                limit=page.fetch_limit,
            )
    return page.respond(
        QueuePage,
        scan.found,
        lambda one: _to_response(one[0]),
        position=lambda one: one[1],
        further=scan.further,
    )


@get(
    "/subscriptions/{subscription_id:str}/consumers",
    opt=for_portals(
        require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
    ),
    responses=documented_responses(409),
    tags=["pull"],
    summary="List the consumers of a queue",
)
async def read_consumers(
    services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> QueueConsumersResponse:
    """List who has messages of a PULL subscription now, and since when the oldest one waits.

    Consumers that wait and have nothing are not listed, nor are clients of a native subscription,
    which the broker knows. 409: it is a PUSH subscription.
    """
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await find_subscription(connection, principal, identity)
        if found.type is not SubscriptionType.PULL:
            raise ConflictError("it is a PUSH subscription: it has no consumers")
        queue = await list_consumers(connection, found.room_id, identity, principal.organisation_id)
    return QueueConsumersResponse(
        items=[_to_consumer(one, principal) for one in queue.consumers],
        oldest_due_at=queue.oldest_due_at,
        complete=queue.complete,
    )


def _to_consumer(one: QueueConsumer, principal: Principal) -> QueueConsumerResponse:
    is_whole = not principal.restrictions and not principal.is_portal
    may_name = is_whole or one.key_id == principal.key_id
    return QueueConsumerResponse(
        key_id=one.key_id,
        key_name=one.name if may_name else None,
        leases=one.leases,
        oldest_at=one.oldest_at,
        first_end=one.first_end,
        last_end=one.last_end,
    )


def _to_response(one: QueuedDelivery) -> QueuedDeliveryResponse:
    same = {
        name: getattr(one, name)
        for name in QueuedDeliveryResponse.__struct_fields__
        if name != "delivery_id"
    }
    return QueuedDeliveryResponse(delivery_id=one.id, **same)


ROUTES: Final = [browse_queue, read_consumers]
