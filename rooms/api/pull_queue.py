"""Serve `/v1/subscriptions/{id}/queue`: look at a PULL queue without taking anything."""

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
from rooms.db.queries.pull_queue import QueuedDelivery, list_leased, list_waiting
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

    `leased_until`: the end of its lease; null: it waits. The fields of its message are null where
    the message is gone.
    """

    delivery_id: str
    message_id: str
    attempt: int
    due_at: datetime | None
    expires_at: datetime | None
    leased_until: datetime | None
    event_type: str | None
    event_version: int | None
    priority: int | None
    correlation_id: str | None
    ordering_key: str | None
    business_key: str | None
    published_at: datetime | None


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
    no items while `next_cursor` is set. 409: it is a PUSH subscription.
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


def _to_response(one: QueuedDelivery) -> QueuedDeliveryResponse:
    same = {
        name: getattr(one, name)
        for name in QueuedDeliveryResponse.__struct_fields__
        if name != "delivery_id"
    }
    return QueuedDeliveryResponse(delivery_id=one.id, **same)


ROUTES: Final = [browse_queue]
