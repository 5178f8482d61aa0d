"""Serve `/r1/…/pull/v1`: pull the events of the calling client one by one, and acknowledge each."""

from typing import Final

from litestar import Response, delete, get
from litestar.params import FromQuery

from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, moves_messages
from rooms.api.fast_routes import JSON
from rooms.api.govstack.bodies import EventItem
from rooms.api.govstack.callers import AddressDep
from rooms.api.govstack.errors import hiding
from rooms.api.govstack.leases import (
    DEFAULT_LEASE_S,
    MAX_LEASE_S,
    acknowledge,
    parse_lease,
    take_next,
)
from rooms.api.govstack.operations import Operation, Reply, declare, problem
from rooms.api.govstack.subscriptions import find_callers_subscription
from rooms.api.params import IdPath, NamePath, parse_message
from rooms.domain.govstack import event_item
from rooms.domain.state_machine import Scope
from rooms.errors import NotFoundError

_PATH: Final = "/pull/v1/{event_type:str}"
_SUBSCRIBE: Final = moves_messages(Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
_PUSH: Final = "The subscription is PUSH"
LEASE_QUERY: Final = {
    "leaseSeconds": {
        "description": "Ours. The time in which the event must be acknowledged.",
        "schema": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_LEASE_S,
            "default": DEFAULT_LEASE_S,
        },
    }
}


@get(
    _PATH,
    opt=_SUBSCRIBE
    | declare(
        Operation(
            query=LEASE_QUERY,
            replies={
                200: Reply("The event", EventItem),
                404: problem("No event waits, or the caller has no such subscription"),
                409: problem(_PUSH),
            },
        )
    ),
    summary="Pull the next event",
)
async def pull_event(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    event_type: NamePath,
    leaseSeconds: FromQuery[str | None] = None,  # noqa: N803 - the name in the query
) -> Response[bytes]:
    """Return the next event that is not acknowledged, under a lease.

    The same one is returned again until it is acknowledged, or its lease is over. After that it
    comes again in its turn.
    """
    lease_ms = parse_lease(leaseSeconds)
    found = await find_callers_subscription(services, principal, address, event_type)
    with hiding():
        one = await take_next(services, principal, found, lease_ms=lease_ms)
    if one is None:
        raise NotFoundError("no event waits for this subscription")
    body = event_item(
        one.id,
        one.event_type,
        one.payload,
        publisher=one.publisher,
        sequence=one.sequence,
    )
    return Response(body, media_type=JSON)


@delete(
    _PATH + "/{event_id:str}",
    opt=_SUBSCRIBE
    | declare(
        Operation(
            replies={
                204: Reply("It is acknowledged, also if it was before"),
                404: problem("The subscription has no such event"),
                409: problem(f"{_PUSH}, or the event is not under a lease now"),
            }
        )
    ),
    summary="Acknowledge an event",
)
async def acknowledge_event(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    event_type: NamePath,
    event_id: IdPath,
) -> None:
    """Complete an event. 409: its lease is over, and it comes again."""
    found = await find_callers_subscription(services, principal, address, event_type)
    with hiding():
        identity = parse_message(event_id)
        await acknowledge(services, principal, address.room_id, found.id, identity)


ROUTES: Final = [pull_event, acknowledge_event]
