"""Serve `/v1/deliveries` and the deliveries of a subscription."""

from datetime import datetime
from typing import Final

import msgspec
from litestar import get, post
from msgspec import Struct

from rooms.api.auth import (
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import ChangeDep
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import (
    Correlation,
    DeliveryState,
    EventType,
    IdPath,
    Since,
    Until,
    Version,
    parse_id,
    to_filter,
)
from rooms.db.catalog import subscriptions as subscription_records
from rooms.db.connection import transaction
from rooms.db.queries import deliveries as records
from rooms.db.queries.message_scope import MessageView
from rooms.domain.attempt import ErrorClass
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.room import destination_name
from rooms.domain.state_machine import Scope, State, SubscriptionType
from rooms.errors import ConflictError

_LIST: Final = "deliveries"
_TAGS: Final = ["deliveries"]
_READ: Final = for_portals(
    require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
)
_ERROR_KINDS: Final = frozenset(ErrorClass)
_HIDDEN_FROM_PUBLISHER: Final = (
    "organisation_id",
    "reason",
    "generation",
    "attempt",
    "attempts",
    "next_attempt_at",
    "last_status",
    "last_error",
    "due_at",
    "sequence",
)
"""Fields of another's delivery that the publisher in a transparent room does not see."""


class DeliveryResponse(Struct, kw_only=True):
    """Describe a delivery: one message on its way to one subscription (`subscription`: its name).

    `attempt` is the number of the next or last attempt since the last shovel; `attempts` counts
    all. `sequence` is its number among the deliveries of its ordering key, if the subscription is
    ordered. Of another organisation's subscription the room's owner sees no text of an answer
    (`last_error` is only its kind), and the publisher in a transparent room only the state.
    """

    id: str
    message_id: str
    subscription_id: str
    subscription: str | None
    organisation_id: str | None
    room_id: int
    destination: str
    state: State
    reason: str | None
    generation: int | None
    attempt: int | None
    attempts: int | None
    next_attempt_at: datetime | None
    last_status: int | None
    last_error: str | None
    due_at: datetime | None
    sequence: int | None
    expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    correlation_id: str
    event_type: str
    event_version: int


class DeliveryPage(Struct, kw_only=True):
    """List deliveries."""

    items: list[DeliveryResponse]
    next_cursor: str | None


@get(
    "/subscriptions/{subscription_id:str}/deliveries",
    opt=_READ,
    tags=_TAGS,
    summary="List the deliveries of a subscription",
)
async def list_subscription_deliveries(
    *,
    services: ServicesDep,
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
    """List the subscription's deliveries, newest first.

    A key that only has the scope `subscribe` sees deliveries that are due. In another
    organisation's room so does every key, and sees none that a suspension holds, unless it was
    attempted before. There a call looks at about 10,000 deliveries, so a page may have few or no
    items while `next_cursor` is set.
    """
    identity = SubscriptionId(parse_id(subscription_id, "subscription"))
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    delivery_filter = to_filter(
        since=since,
        until=until,
        event_type=event_type,
        version=version,
        state=in_state,
        correlation_id=correlation_id,
        principal=principal,
    )
    async with transaction(services.engine) as connection:
        found = await subscription_records.find_subscription(connection, principal, identity)
        scan = await records.deliveries_of_subscription(
            connection,
            found.room_id,
            identity,
            delivery_filter,
            due_only=principal.sees_due_only,
            before=page.after,
            limit=page.fetch_limit,
        )
    return page.respond(
        DeliveryPage,
        scan.found,
        to_delivery_response,
        position=lambda delivery: delivery.id,
        further=scan.further,
    )


@get("/deliveries/{delivery_id:str}", opt=_READ, tags=_TAGS, summary="Read a delivery")
async def read_delivery(
    services: ServicesDep, principal: Caller, delivery_id: IdPath
) -> DeliveryResponse:
    """Return one delivery.

    A key that only has the scope `subscribe` gets 404 before the delivery is due.
    """
    return await _read_delivery(services, principal, DeliveryId(parse_id(delivery_id, "delivery")))


@post(
    "/deliveries/{delivery_id:str}/redeliver",
    status_code=200,
    opt=for_portals(require_scopes(Scope.OPERATE, allows=OF_SUBSCRIPTIONS)),
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Send a delivery again",
)
async def redeliver(
    services: ServicesDep, principal: Caller, change: ChangeDep, delivery_id: IdPath
) -> DeliveryResponse:
    """Queue the delivery again, and count its attempts anew.

    A sidelined delivery keeps its lifetime; an expired, cancelled or dropped one gets a fresh one.
    409: it is in another state, its subscription is gone, or its lifetime ended while it was
    sidelined. In another organisation's room also: it was withdrawn, its message is not due, no
    grant covers its event type, or the subscription does not take it any more.
    """
    identity = DeliveryId(parse_id(delivery_id, "delivery"))
    await _read_delivery(services, principal, identity)  # whose it is, also for a restricted key
    async with services.writer_turns.turn(principal.organisation_id) as writer:
        done = await records.redeliver(writer, principal.organisation_id, identity)
    if done.subscription_gone:
        raise ConflictError("its subscription was deleted")
    if done.withdrawn:
        raise ConflictError("it was withdrawn, and is sent no more")
    if done.not_due:
        raise ConflictError("its message is not due yet")
    if done.not_granted:
        raise ConflictError(
            "the grants of the room's owner do not cover its event type, or the subscription does "
            "not take it any more; a replay gives what they covered when it was published"
        )
    change.before = {"state": done.before}
    if done.after is State.EXPIRED:
        change.after = {"state": done.after}
        await change.record()
        raise ConflictError(
            "its lifetime ended while it was sidelined; it is expired now, and can be sent again"
        )
    if done.after is None:
        raise ConflictError(
            f"it is {done.before}; only sidelined, expired, cancelled or dropped ones can be resent"
        )
    services.notifier.notify_queued(
        done.subscription_id if done.type is SubscriptionType.PULL else None
    )
    await change.record()
    return await _read_delivery(services, principal, identity)


async def _read_delivery(
    services: ApiServices, principal: Principal, identity: DeliveryId
) -> DeliveryResponse:
    async with transaction(services.engine) as connection:
        found = await records.find_delivery(
            connection, principal, identity, due_only=principal.sees_due_only
        )
    return to_delivery_response(found)


def to_delivery_response(delivery: records.DeliveryRecord) -> DeliveryResponse:
    """Return a delivery as the API shows it."""
    same = {
        name: getattr(delivery, name)
        for name in DeliveryResponse.__struct_fields__
        if name != "destination"
    }
    return DeliveryResponse(
        **same, destination=destination_name(delivery.room_id, delivery.subscription_id)
    )


def to_visible_delivery(delivery: records.DeliveryRecord, view: MessageView) -> DeliveryResponse:
    """Return a message's delivery as far as a principal may see it."""
    found = to_delivery_response(delivery)
    scope = view.scope
    if scope.is_own(delivery.subscription_id, delivery.organisation_id):
        return found
    if scope.owns:
        return msgspec.structs.replace(found, last_error=error_kind(delivery.last_error))
    return msgspec.structs.replace(found, **dict.fromkeys(_HIDDEN_FROM_PUBLISHER))


def error_kind(last_error: str | None) -> str | None:
    """Return the kind of an error without its text, which may have what the endpoint answered."""
    kind = (last_error or "").partition(":")[0]
    return kind if kind in _ERROR_KINDS else None


ROUTES: Final = [list_subscription_deliveries, read_delivery, redeliver]
