"""Serve publishing and pulling of GovStack's first implementation: `/rooms/{memberId}/{roomId}`."""

from dataclasses import replace
from typing import Any, Final

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.params import FromQuery
from msgspec import Struct

from rooms.api.auth import OF_EVENTS, OF_SUBSCRIPTIONS, Caller, ServicesDep, moves_messages
from rooms.api.codec import decode_kept
from rooms.api.deps import ApiServices
from rooms.api.event_types import EventTypeName
from rooms.api.fast_routes import JSON, read_request
from rooms.api.govstack.bodies import EventId
from rooms.api.govstack.callers import Address, AddressDep
from rooms.api.govstack.events import publish
from rooms.api.govstack.leases import (
    LEASE_QUERY,
    acknowledge,
    is_another_waiting,
    parse_lease,
    pull_next,
    take_next,
)
from rooms.api.govstack.operations import NOT_THERE, Operation, Reply, declare, hiding, problem
from rooms.api.params import IdPath, parse_message
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog.subscriptions import find_subscription
from rooms.db.connection import transaction
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError, NotFoundError

ANOTHER_HEADER: Final = "Another-Event-In-Queue"
EVENT_HEADER: Final = "Event-Id"
_FIELDS: Final = {"event": "content"}
_SUBSCRIBE: Final = moves_messages(Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
_SUBSCRIPTION_QUERY: Final = {
    "subscriptionId": {
        "description": "The id of the PULL subscription.",
        "required": True,
        "schema": {"type": "string", "format": "uuid"},
    }
}
_EVENT_HEADERS: Final = {
    ANOTHER_HEADER: "`true` where a further event waits, else `false`",
    EVENT_HEADER: "Ours. The id of the event",
}
_NULL: Final = b"null"


class PublishRequest(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Hold an event to publish: any JSON, which keeps its bytes."""

    event_type: EventTypeName
    content: msgspec.Raw


class PublishReply(Struct, rename="camel", kw_only=True):
    """Name a published event."""

    event_id: EventId


@post(
    "/publish",
    status_code=200,
    opt=moves_messages(Scope.PUBLISH, allows=OF_EVENTS)
    | declare(
        Operation(
            body=PublishRequest,
            headers={"Idempotency-Key": "Ours. A repeated request with it is published once."},
            replies={
                200: Reply("The event is stored", PublishReply),
                409: problem("Ours. The Idempotency-Key was used for another event"),
            },
        )
    ),
    summary="Publish an event",
)
async def publish_content(
    request: Request[Any, Principal, Any],
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
) -> Response[PublishReply]:
    """Store an event durably, with one delivery for each subscription to its type."""
    body, key = await read_request(
        request.scope["headers"], request.receive, services.settings.max_resource_body_bytes
    )
    data: PublishRequest = decode_kept(body, PublishRequest)
    try:
        event, _ = await publish(
            services,
            principal,
            address.room_id,
            event_type=data.event_type,
            payload=bytes(data.content),
            key=key,
        )
    except InvalidError as exc:
        raise InvalidError(*map(_renamed, exc.problems)) from exc
    return Response(PublishReply(event_id=event), status_code=200)


@get(
    "/pull",
    opt=_SUBSCRIBE
    | declare(
        Operation(
            query={**_SUBSCRIPTION_QUERY, **LEASE_QUERY},
            replies={
                200: Reply("The payload of the event", Any, _EVENT_HEADERS),
                204: Reply("The event has no payload, and another waits", None, _EVENT_HEADERS),
                404: problem("No event waits, or there is no such subscription"),
                409: problem("The subscription is PUSH"),
            },
        )
    ),
    summary="Pull the next event",
)
async def pull_content(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    subscriptionId: FromQuery[str | None] = None,  # noqa: N803 - the name in the query
    leaseSeconds: FromQuery[str | None] = None,  # noqa: N803 - likewise
) -> Response[bytes | None]:
    """Return the payload of the next event, under a lease.

    Where the subscription has `ack_by_next_pull`, this acknowledges the event that the last pull
    with the same key and application returned. Otherwise the same event is returned until it is
    acknowledged by its `Event-Id`. In both cases it comes again when its lease is over.
    """
    lease_ms = parse_lease(leaseSeconds)
    with hiding():
        found = await _find(services, principal, address, subscriptionId)
        if found.ack_by_next_pull:
            pulled = await pull_next(services, principal, found, lease_ms=lease_ms)
        else:
            taken = await take_next(services, principal, found, lease_ms=lease_ms)
            pulled = None
            if taken is not None:
                is_another = await is_another_waiting(services, address.room_id, found.id, taken)
                pulled = taken, is_another
    if pulled is None:
        raise NotFoundError("no event waits for this subscription")
    event, is_another = pulled
    headers = {ANOTHER_HEADER: "true" if is_another else "false", EVENT_HEADER: event.id}
    if event.payload == _NULL and is_another:
        return Response(None, status_code=204, headers=headers)
    return Response(event.payload, media_type=JSON, headers=headers)


@delete(
    "/pull/{event_id:str}",
    opt=_SUBSCRIBE
    | declare(
        Operation(
            query=_SUBSCRIPTION_QUERY,
            replies={
                204: Reply("It is acknowledged, also if it was before"),
                409: problem("The subscription is PUSH, or the event is not under a lease now"),
            },
        )
    ),
    summary="Acknowledge an event",
)
async def acknowledge_content(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    event_id: IdPath,
    subscriptionId: FromQuery[str | None] = None,  # noqa: N803 - the name in the query
) -> None:
    """Complete an event by the `Event-Id` of its pull. Ours: the first implementation has none."""
    with hiding():
        found = await _find(services, principal, address, subscriptionId)
        identity = parse_message(event_id)
        await acknowledge(services, principal, address.room_id, found.id, identity)


async def _find(
    services: ApiServices, principal: Principal, address: Address, subscription: str | None
) -> Subscription:
    """Return an own subscription in the room. InvalidError: none is named. NotFoundError."""
    if subscription is None:
        raise InvalidError(FieldProblem("subscriptionId", "is missing"))
    identity = parse_subscription(subscription)
    async with transaction(services.engine) as connection:
        found = await find_subscription(connection, principal, identity)
    if found.room_id != address.room_id:
        raise NotFoundError(NOT_THERE)
    return found


def _renamed(found: FieldProblem) -> FieldProblem:
    name, dot, rest = found.field.partition(".")
    return replace(found, field=f"{_FIELDS.get(name, name)}{dot}{rest}")


ROUTES: Final = [publish_content, pull_content, acknowledge_content]
