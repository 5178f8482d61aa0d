"""Serve the management resources of GovStack's first implementation, below `/rooms/{memberId}`.

Each route calls the handler of `/v1` for the same resource, and has its bodies: only the path and
the statuses of wrong fields differ. A publisher is a grant to publish.
"""

from typing import Annotated, Any, Final

from litestar import Response, delete, get, post, put
from litestar.di import NamedDependency, Provide
from litestar.params import JSONBody, SkipValidation
from msgspec import Meta, Struct

from rooms.api import (
    event_types,
    grants,
    messages,
    rooms,
    subscription_approval,
    subscription_creation,
    subscriptions,
)
from rooms.api.auth import (
    FOR_EVERY_KEY,
    Caller,
    ServicesDep,
    require_scopes,
)
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.fast_routes import JSON
from rooms.api.govstack.bodies import EventItem
from rooms.api.govstack.callers import AddressDep
from rooms.api.govstack.errors import NOT_THERE, hiding
from rooms.api.govstack.events import describe_event, find_event
from rooms.api.govstack.operations import CONFLICT, Operation, Reply, declare, problem
from rooms.api.pagination import Cursor, Limit
from rooms.api.params import IdPath, NamePath, parse_id
from rooms.api.subscription_bodies import (
    CreatedSubscription,
    CreateSubscription,
    SubscriptionResponse,
)
from rooms.api.subscription_creation import SubscriptionCreator, provide_creator
from rooms.db.catalog.event_types import EventTypeVersion
from rooms.db.catalog.grants import MAX_GRANTS, list_grants
from rooms.db.catalog.rooms import find_room
from rooms.db.connection import transaction
from rooms.db.queries.subscription_counts import SubscriptionCounts
from rooms.domain.ids import RoomId, room_of
from rooms.domain.principal import Principal
from rooms.domain.sharing import EVERY_ORGANISATION, Grant, GrantKind
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError, NotFoundError, OtherMemberError

_ROOM: Final = "/{application_code:str}"
_READ_ROOM: Final = require_scopes(
    Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH, Scope.SUBSCRIBE, allows=FOR_EVERY_KEY
)
_PAGES: Final = {
    "limit": {
        "description": "The most items of a page.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 200, "default": 50},
    },
    "cursor": {
        "description": "The `next_cursor` of the page before.",
        "schema": {"type": "string"},
    },
}
_NO_NEW_ROOM: Final = "a member creates rooms of its own: use its own member id in the path"


class AddPublisher(Struct, forbid_unknown_fields=True, kw_only=True):
    """Allow an organisation to publish into the room; no event types: all of them."""

    organisation_id: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="An organisation's id, name or member id; * for all.",
        ),
    ]
    event_types: grants.EventTypes | None = None


class ChangePublisher(Struct, forbid_unknown_fields=True, kw_only=True):
    """Replace the event types that a publisher may publish; null: all of them."""

    event_types: grants.EventTypes | None


class DecideSubscription(Struct, forbid_unknown_fields=True, kw_only=True):
    """Approve or reject; to approve, `version` is the subscription's, as it was shown."""

    approved: bool
    version: Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)] | None = None
    reason: subscription_approval.Reason | None = None


def _as(handler: Any, *replies: tuple[int, Reply], **more: Any) -> dict[str, Any]:
    """Return the `opt` of a route that calls a handler of `/v1`, with its scopes and keys."""
    return {**handler.opt, **declare(Operation(replies=dict(replies), **more))}


async def _answer(handler: Any, **arguments: Any) -> Any:
    """Return what a handler of `/v1` returns, or raise what it raises; 404 is always the same."""
    with hiding():
        return await handler.fn(**arguments)


@get(
    "/",
    opt=_as(rooms.list_rooms, (200, Reply("The rooms", rooms.RoomPage)), query=_PAGES),
    summary="List the own rooms",
)
async def list_member_rooms(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> rooms.RoomPage:
    """List the caller's rooms, newest first. The member of the path must be the caller."""
    if address.owner != address.caller.member_id:
        raise OtherMemberError("the member of the path is not the caller: it lists its own rooms")
    found: rooms.RoomPage = await _answer(
        rooms.list_rooms, services=services, principal=principal, limit=limit, cursor=cursor
    )
    return found


@post(
    "/",
    dto=Body[rooms.CreateRoom],
    return_dto=None,
    opt=_as(
        rooms.create_room,
        (201, Reply("The room", rooms.RoomResponse)),
        (409, problem("The member has a room of this name")),
        body=rooms.CreateRoom,
    ),
    summary="Create a room",
)
async def create_member_room(
    data: JSONBody[rooms.CreateRoom],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
) -> Response[rooms.RoomResponse]:
    """Create a room of the caller, which these interfaces serve."""
    if address.owner != address.caller.member_id:
        raise OtherMemberError(_NO_NEW_ROOM)
    data.govstack = True
    found: Response[rooms.RoomResponse] = await _answer(
        rooms.create_room, data=data, services=services, principal=principal, change=change
    )
    return found


@get(
    _ROOM,
    opt=_as(rooms.read_room, (200, Reply("The room", rooms.RoomResponse))),
    summary="Read a room",
)
async def read_member_room(
    services: ServicesDep, principal: Caller, address: AddressDep
) -> rooms.RoomResponse:
    """Return a room in which the caller has a part."""
    found: rooms.RoomResponse = await _answer(
        rooms.read_room, services=services, principal=principal, room_id=str(address.room_id)
    )
    return found


@get(
    _ROOM + "/event-types",
    opt=_as(
        event_types.list_event_types,
        (200, Reply("The event types", event_types.EventTypePage)),
        query=_PAGES,
    ),
    summary="List event types",
)
async def list_room_event_types(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> event_types.EventTypePage:
    """List the event types that the caller may see, newest first."""
    found: event_types.EventTypePage = await _answer(
        event_types.list_event_types,
        services=services,
        principal=principal,
        room_id=str(address.room_id),
        limit=limit,
        cursor=cursor,
    )
    return found


@post(
    _ROOM + "/event-types",
    dto=Body[event_types.CreateEventType],
    return_dto=None,
    opt=_as(
        event_types.create_event_type,
        (201, Reply("The event type", event_types.EventTypeResponse)),
        (409, problem("The room has it already")),
        body=event_types.CreateEventType,
    ),
    summary="Create an event type",
)
async def create_room_event_type(
    data: JSONBody[event_types.CreateEventType],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
) -> Response[event_types.EventTypeResponse]:
    """Create an event type with its version 1. For the room's owner."""
    found: Response[event_types.EventTypeResponse] = await _answer(
        event_types.create_event_type,
        data=data,
        services=services,
        principal=principal,
        change=change,
        room_id=str(address.room_id),
    )
    return found


@delete(
    _ROOM + "/event-types/{event_type:str}",
    opt=_as(
        event_types.delete_event_type,
        (204, Reply("It is deleted")),
        (409, problem(f"{CONFLICT}: events were published with it, or it is subscribed")),
    ),
    summary="Delete an event type",
)
async def delete_room_event_type(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    event_type: NamePath,
) -> None:
    """Delete an event type that was never used. For the room's owner."""
    await _answer(
        event_types.delete_event_type,
        services=services,
        principal=principal,
        change=change,
        room_id=str(address.room_id),
        name=event_type,
    )


@get(
    _ROOM + "/event-types/{event_type:str}/versions",
    opt=_as(
        event_types.list_versions,
        (200, Reply("The versions", event_types.EventTypeVersionPage)),
        query=_PAGES,
    ),
    summary="List versions",
)
async def list_room_versions(
    *,
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    event_type: NamePath,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> event_types.EventTypeVersionPage:
    """List the versions of an event type with their schemas, newest first."""
    found: event_types.EventTypeVersionPage = await _answer(
        event_types.list_versions,
        services=services,
        principal=principal,
        room_id=str(address.room_id),
        name=event_type,
        limit=limit,
        cursor=cursor,
    )
    return found


@post(
    _ROOM + "/event-types/{event_type:str}/versions",
    dto=Body[event_types.EventTypeVersionRequest],
    return_dto=None,
    opt=_as(
        event_types.add_version,
        (201, Reply("The version", EventTypeVersion)),
        body=event_types.EventTypeVersionRequest,
    ),
    summary="Add a version",
)
async def add_room_version(
    *,
    data: JSONBody[event_types.EventTypeVersionRequest],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    event_type: NamePath,
) -> Response[EventTypeVersion]:
    """Add a version to an event type. For the room's owner."""
    found: Response[EventTypeVersion] = await _answer(
        event_types.add_version,
        data=data,
        services=services,
        principal=principal,
        change=change,
        room_id=str(address.room_id),
        name=event_type,
    )
    return found


@get(
    _ROOM + "/publishers",
    opt=_as(grants.list_grants, (200, Reply("The publishers", grants.GrantPage)), query=_PAGES),
    summary="List publishers",
)
async def list_publishers(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> grants.GrantPage:
    """List the grants to publish that have not ended, newest first. For the room's owner."""
    found: grants.GrantPage = await _answer(
        grants.list_grants,
        services=services,
        principal=principal,
        room_id=str(address.room_id),
        limit=limit,
        cursor=cursor,
        kind=GrantKind.PUBLISH,
    )
    return found


@post(
    _ROOM + "/publishers",
    dto=Body[AddPublisher],
    return_dto=None,
    opt=_as(
        grants.create_grant,
        (201, Reply("The grant", grants.GrantResponse)),
        (409, problem("The room has too many grants")),
        body=AddPublisher,
    ),
    summary="Add a publisher",
)
async def add_publisher(
    data: JSONBody[AddPublisher],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
) -> Response[grants.GrantResponse]:
    """Allow an organisation to publish. For the room's owner."""
    found: Response[grants.GrantResponse] = await _answer(
        grants.create_grant,
        data=_to_grant(data.organisation_id, data.event_types),
        services=services,
        principal=principal,
        change=change,
        room_id=str(address.room_id),
    )
    return found


@put(
    _ROOM + "/publishers/{publisher_id:str}",
    dto=Body[ChangePublisher],
    return_dto=None,
    opt=_as(
        grants.create_grant,
        (200, Reply("The grant that replaces it", grants.GrantResponse)),
        (409, problem("The room has too many grants")),
        body=ChangePublisher,
    ),
    summary="Change a publisher",
)
async def change_publisher(
    *,
    data: JSONBody[ChangePublisher],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    publisher_id: IdPath,
) -> Response[grants.GrantResponse]:
    """Replace a grant to publish: the new one has another id. For the room's owner.

    It begins before the other one ends, so that the publisher is never without.
    """
    with hiding():
        former = await _find_publisher(services, principal, address.room_id, publisher_id)
        made: Response[grants.GrantResponse] = await grants.create_grant.fn(
            data=_to_grant(former.organisation_id or EVERY_ORGANISATION, data.event_types),
            services=services,
            principal=principal,
            change=change,
            room_id=str(address.room_id),
        )
        change.after = None
        await grants.revoke_grant.fn(
            services=services,
            principal=principal,
            change=change,
            room_id=str(address.room_id),
            grant_id=publisher_id,
        )
    return Response(made.content, status_code=200)


@delete(
    _ROOM + "/publishers/{publisher_id:str}",
    opt=_as(grants.revoke_grant, (204, Reply("The grant is revoked"))),
    summary="Remove a publisher",
)
async def remove_publisher(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    publisher_id: IdPath,
) -> None:
    """End a grant to publish now. For the room's owner."""
    with hiding():
        await _find_publisher(services, principal, address.room_id, publisher_id)
    await _answer(
        grants.revoke_grant,
        services=services,
        principal=principal,
        change=change,
        room_id=str(address.room_id),
        grant_id=publisher_id,
    )


@get(
    _ROOM + "/subscriptions",
    opt=_as(
        subscriptions.list_subscriptions,
        (200, Reply("The subscriptions", subscriptions.SubscriptionPage)),
        query=_PAGES,
    ),
    summary="List subscriptions",
)
async def list_room_subscriptions(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> subscriptions.SubscriptionPage:
    """List the room's subscriptions to its owner, and to others their own, newest first."""
    found: subscriptions.SubscriptionPage = await _answer(
        subscriptions.list_subscriptions,
        services=services,
        principal=principal,
        room_id=str(address.room_id),
        limit=limit,
        cursor=cursor,
    )
    return found


@post(
    _ROOM + "/subscriptions",
    dto=Body[CreateSubscription],
    return_dto=None,
    dependencies={"creator": Provide(provide_creator)},
    opt=_as(
        subscription_creation.create_subscription,
        (201, Reply("The subscription", CreatedSubscription)),
        (409, problem("The name is taken, or a quota is used up")),
        body=CreateSubscription,
    ),
    summary="Subscribe",
)
async def create_room_subscription(
    *,
    data: JSONBody[CreateSubscription],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    creator: NamedDependency[SkipValidation[SubscriptionCreator]],
    address: AddressDep,
) -> Response[CreatedSubscription]:
    """Create a subscription. One with PULL has `ack_by_next_pull`, unless it is given as false."""
    if data.type.value == "PULL" and data.ack_by_next_pull is None:
        data.ack_by_next_pull = not (data.native or data.operational)
    found: Response[CreatedSubscription] = await _answer(
        subscription_creation.create_subscription,
        data=data,
        services=services,
        principal=principal,
        change=change,
        creator=creator,
        room_id=str(address.room_id),
    )
    return found


@get(
    _ROOM + "/subscriptions/{subscription_id:str}",
    opt=_as(
        subscriptions.read_subscription, (200, Reply("The subscription", SubscriptionResponse))
    ),
    summary="Read a subscription",
)
async def read_room_subscription(
    services: ServicesDep, principal: Caller, address: AddressDep, subscription_id: IdPath
) -> SubscriptionResponse:
    """Return a subscription to its subscriber, and a part of it to the room's owner."""
    found: SubscriptionResponse = await _of_room(
        subscriptions.read_subscription,
        address.room_id,
        subscription_id,
        services=services,
        principal=principal,
    )
    return found


@post(
    _ROOM + "/subscriptions/{subscription_id:str}",
    status_code=200,
    dto=Body[DecideSubscription],
    return_dto=None,
    opt=_as(
        subscription_approval.approve_subscription,
        (200, Reply("The subscription", SubscriptionResponse)),
        (409, problem("It has changed since, or nothing waits for approval")),
        body=DecideSubscription,
    ),
    summary="Approve or reject a subscription",
)
async def decide_room_subscription(
    *,
    data: JSONBody[DecideSubscription],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    subscription_id: IdPath,
) -> SubscriptionResponse:
    """Decide about what waits: a new subscription, or a change of one. For the room's owner."""
    body: Any
    if data.approved:
        handler: Any = subscription_approval.approve_subscription
        if data.version is None:
            raise InvalidError(
                FieldProblem("version", "is missing: give that of the subscription you looked at")
            )
        body = subscription_approval.Approve(version=data.version, reason=data.reason)
    else:
        handler = subscription_approval.reject_subscription
        body = subscription_approval.Decide(reason=data.reason)
    found: SubscriptionResponse = await _of_room(
        handler,
        address.room_id,
        subscription_id,
        data=body,
        services=services,
        principal=principal,
        change=change,
    )
    return found


@delete(
    _ROOM + "/subscriptions/{subscription_id:str}",
    opt=_as(
        subscription_approval.terminate_subscription,
        (204, Reply("It is terminated")),
        (409, problem("It has ended")),
    ),
    summary="Terminate a subscription",
)
async def terminate_room_subscription(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    subscription_id: IdPath,
) -> None:
    """End a subscription for good. For the subscriber and the room's owner."""
    await _of_room(
        subscription_approval.terminate_subscription,
        address.room_id,
        subscription_id,
        services=services,
        principal=principal,
        change=change,
    )


@get(
    _ROOM + "/subscriptions/{subscription_id:str}/queue",
    opt=_as(subscription_approval.read_counts, (200, Reply("The counts", SubscriptionCounts))),
    summary="Count what waits for a subscription",
)
async def read_room_queue(
    services: ServicesDep, principal: Caller, address: AddressDep, subscription_id: IdPath
) -> SubscriptionCounts:
    """Count what waits, is held, leased or sidelined. For the subscriber and the room's owner."""
    found: SubscriptionCounts = await _of_room(
        subscription_approval.read_counts,
        address.room_id,
        subscription_id,
        services=services,
        principal=principal,
    )
    return found


@get(
    _ROOM + "/events",
    opt=_as(messages.list_messages, (200, Reply("The events", messages.MessagePage)), query=_PAGES),
    summary="List events",
)
async def list_room_events(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> messages.MessagePage:
    """List the events that the caller owns, published or received, newest first."""
    found: messages.MessagePage = await _answer(
        messages.list_messages,
        services=services,
        principal=principal,
        room_id=str(address.room_id),
        limit=limit,
        cursor=cursor,
    )
    return found


@get(
    _ROOM + "/events/{event_id:str}",
    opt=_as(messages.read_message, (200, Reply("The event", EventItem))),
    summary="Read an event",
)
async def read_room_event(
    services: ServicesDep, principal: Caller, address: AddressDep, event_id: IdPath
) -> Response[bytes]:
    """Return an event with its status, and the number of its deliveries in each state."""
    with hiding():
        found = await find_event(services, principal, address.room_id, event_id)
    return Response(await describe_event(services, found), media_type=JSON)


async def _of_room(handler: Any, room: RoomId, subscription_id: str, **arguments: Any) -> Any:
    """Return what a handler of `/v1` returns for a subscription of a room. NotFoundError."""
    with hiding():
        if room_of(subscriptions.parse_subscription(subscription_id)) != room:
            raise NotFoundError(NOT_THERE)
        return await handler.fn(subscription_id=subscription_id, **arguments)


async def _find_publisher(
    services: ApiServices, principal: Principal, room: RoomId, publisher_id: str
) -> Grant:
    """Return a grant to publish that has not ended, in an own room. NotFoundError."""
    identity = parse_id(publisher_id, "grant")
    async with transaction(services.engine) as connection:
        await find_room(connection, principal, room)
        found = await list_grants(
            connection,
            room,
            kind=GrantKind.PUBLISH,
            organisation=None,
            ended=False,
            before=None,
            limit=MAX_GRANTS,
        )
    for one in found:
        if one.id == identity:
            return one
    raise NotFoundError(NOT_THERE)


def _to_grant(organisation: str, event_types: list[str] | None) -> grants.CreateGrant:
    return grants.CreateGrant(
        organisation_id=organisation, kind=GrantKind.PUBLISH, event_types=event_types
    )


ROUTES: Final = [
    list_member_rooms,
    create_member_room,
    read_member_room,
    list_room_event_types,
    create_room_event_type,
    delete_room_event_type,
    list_room_versions,
    add_room_version,
    list_publishers,
    add_publisher,
    change_publisher,
    remove_publisher,
    list_room_subscriptions,
    create_room_subscription,
    read_room_subscription,
    decide_room_subscription,
    terminate_room_subscription,
    read_room_queue,
    list_room_events,
    read_room_event,
]
