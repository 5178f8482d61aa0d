"""Serve `/r1/…/pull/v1`: lease the events of the calling client one by one, and acknowledge each.

An event that is under a lease is returned again, until it is acknowledged or its lease is over.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
from litestar import Response, delete, get
from litestar.params import FromQuery
from msgspec import Struct

from delivery.pull.leases import LeaseStatus
from delivery.pull.requests import MAX_LEASE_MS, ack_id, parse_ack_id
from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, moves_messages
from rooms.api.deps import ApiServices
from rooms.api.errors import AckIdStatus
from rooms.api.fast_routes import JSON
from rooms.api.govstack.bodies import EventItem
from rooms.api.govstack.callers import AddressDep, find_publisher
from rooms.api.govstack.operations import NOT_THERE, Operation, Reply, declare, hiding, problem
from rooms.api.govstack.subscriptions import find_callers_subscription
from rooms.api.params import IdPath, NamePath, parse_message
from rooms.db.connection import transaction
from rooms.db.leases.current import (
    LeaseId,
    find_delivery,
    find_lease,
    find_leased_event,
    has_due,
    hold,
    take_held,
)
from rooms.domain.govstack import ClientId, event_item
from rooms.domain.ids import MessageId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import Scope, SubscriptionStatus
from rooms.errors import ConflictError, FieldProblem, InvalidError, NotFoundError, TransientError

DEFAULT_LEASE_S: Final = 30
MAX_LEASE_S: Final = MAX_LEASE_MS // 1000
_MS: Final = 1000
_SECONDS: Final = re.compile(r"[1-9][0-9]{0,4}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedEvent:
    """Hold an event that a subscriber has under a lease."""

    id: str
    event_type: str
    payload: bytes
    sequence: int | None
    publisher: ClientId | None
    lease: LeaseId


class _Publisher(Struct):
    organisation_id: str
    application: str | None = None


class _Pulled(Struct):
    ack_id: str
    message_id: str
    event_type: str
    payload: msgspec.Raw
    sequence: int | None = None
    publisher: _Publisher | None = None


class _PullAnswer(Struct):
    messages: list[_Pulled]


class _AckAnswer(Struct):
    results: list[AckIdStatus]


_decode: Final = msgspec.json.Decoder(_PullAnswer).decode
_decode_results: Final = msgspec.json.Decoder(_AckAnswer).decode


def parse_lease(text: str | None) -> int:
    """Return the length of a lease in ms from a number of seconds. InvalidError."""
    if text is None:
        return DEFAULT_LEASE_S * _MS
    if not _SECONDS.fullmatch(text) or int(text) > MAX_LEASE_S:
        raise InvalidError(
            FieldProblem("leaseSeconds", f"is a whole number from 1 to {MAX_LEASE_S}")
        )
    return int(text) * _MS


async def take_next(
    services: ApiServices,
    principal: Principal,
    subscription: Subscription,
    *,
    lease_ms: int,
) -> HandedEvent | None:
    """Return the event that is under a lease, or lease the next one; None: there is none.

    None also while the subscription is paused or suspended. ConflictError: it is PUSH.
    """
    if subscription.status is SubscriptionStatus.ACTIVE:
        again = await find_current(services, subscription.room_id, subscription.id)
        if again is not None:
            return again
    return await lease_next(services, principal, subscription.id, lease_ms=lease_ms)


async def pull_next(
    services: ApiServices,
    principal: Principal,
    subscription: Subscription,
    *,
    lease_ms: int,
) -> tuple[HandedEvent, bool] | None:
    """Acknowledge what the caller's last pull was given, and lease the next event; None: none.

    Also return whether another event is due. The caller is a key with an application. A lease of
    any other caller, and one that was taken without this function, is never acknowledged. If the
    process dies in between, the event has no holder, and comes again. ConflictError: it is a PUSH
    subscription.
    """
    room, holder = subscription.room_id, f"{principal.key_id} {principal.application or ''}"
    last = await _take_last(services, room, subscription.id, holder)
    if last is not None:
        await _acknowledge_last(services, principal, subscription.id, last)
    event = await lease_next(services, principal, subscription.id, lease_ms=lease_ms)
    if event is None:
        return None
    is_another = await is_another_waiting(services, room, subscription.id, event)
    # Nothing may fail after this, or the next pull would acknowledge an event that was not seen.
    await _hold(services, room, event.lease, holder)
    return event, is_another


async def find_current(
    services: ApiServices, room: RoomId, subscription: SubscriptionId
) -> HandedEvent | None:
    """Return the event that is under a lease; None: there is none."""
    async with transaction(services.engine) as connection:
        lease = await find_lease(connection, room, subscription)
        if lease is None:
            return None
        found = await find_leased_event(connection, room, lease)
        if found is None:
            return None
        return HandedEvent(
            id=found.message_id,
            event_type=found.event_type,
            payload=found.payload,
            sequence=found.sequence,
            publisher=await find_publisher(connection, found.publisher, found.application),
            lease=lease,
        )


async def lease_next(
    services: ApiServices, principal: Principal, subscription: SubscriptionId, *, lease_ms: int
) -> HandedEvent | None:
    """Lease the next event; None: there is none. ConflictError: it is a PUSH subscription."""
    request = b'{"max_messages":1,"lease_ms":%d}' % lease_ms
    _, body = await services.pull_service.pull(principal, subscription, request)
    pulled = _decode(body).messages
    if not pulled:
        return None
    one = pulled[0]
    publisher = None
    if one.publisher is not None:
        async with transaction(services.engine) as connection:
            publisher = await find_publisher(
                connection,
                OrganisationId(one.publisher.organisation_id),
                one.publisher.application,
            )
    return HandedEvent(
        id=one.message_id,
        event_type=one.event_type,
        payload=bytes(one.payload),
        sequence=one.sequence,
        publisher=publisher,
        lease=LeaseId.unpacked(*parse_ack_id(one.ack_id)),
    )


async def acknowledge(
    services: ApiServices,
    principal: Principal,
    room: RoomId,
    subscription: SubscriptionId,
    event: MessageId,
) -> None:
    """Complete the delivery of an event.

    NotFoundError: the subscription has no such event. ConflictError: it is PUSH, or the event is
    not under a lease now.
    """
    async with transaction(services.engine) as connection:
        lease = await find_delivery(connection, room, subscription, event)
    if lease is None:
        raise NotFoundError(NOT_THERE)
    await _ack(services, principal, subscription, lease)


async def is_another_waiting(
    services: ApiServices, room: RoomId, subscription: SubscriptionId, event: HandedEvent
) -> bool:
    """Return whether another event is due, beside this one under a lease, or behind it."""
    async with transaction(services.engine) as connection:
        return await has_due(connection, room, subscription, event.lease)


async def _take_last(
    services: ApiServices, room: RoomId, subscription: SubscriptionId, holder: str
) -> LeaseId | None:
    async with transaction(services.engine) as connection:
        return await take_held(connection, room, subscription, holder)


async def _acknowledge_last(
    services: ApiServices, principal: Principal, subscription: SubscriptionId, lease: LeaseId
) -> None:
    try:
        await _ack(services, principal, subscription, lease)
    except ConflictError:
        return  # it ended in between, so the event comes again


async def _hold(services: ApiServices, room: RoomId, lease: LeaseId, holder: str) -> None:
    """Let the holder's next pull acknowledge the lease, if that can be recorded now.

    If not, the event is answered all the same, and comes again when its lease ends. A problem
    instead of the event would lose it where a commit in doubt has happened.
    """
    with suppress(TransientError):
        async with transaction(services.engine) as connection:
            await hold(connection, room, lease, holder)


async def _ack(
    services: ApiServices, principal: Principal, subscription: SubscriptionId, lease: LeaseId
) -> None:
    body = b'{"ack_ids":["%b"]}' % ack_id(*lease.packed())
    _, answer = await services.pull_service.ack(principal, subscription, body)
    (result,) = _decode_results(answer).results
    if result.status != LeaseStatus.ACKED:
        raise ConflictError("the event is not under a lease now: pull it, then acknowledge it")


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


ROUTES: Final = [
    pull_event,
    acknowledge_event,
]
