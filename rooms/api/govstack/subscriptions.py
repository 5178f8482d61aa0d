"""Serve `/r1/…/api/v1/subs`: the subscriptions of the calling client, one for each event type."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from litestar import Response, delete, get, patch, post
from litestar.di import NamedDependency, Provide
from litestar.params import JSONBody, SkipValidation
from msgspec import UNSET

from rooms.api import subscriptions as resource
from rooms.api.auth import BELOW_ROOM, OF_SUBSCRIPTIONS, Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.govstack.bodies import (
    DEFAULT_TTL_S,
    ClientIdentifier,
    SubscriptionItem,
    SubscriptionOptions,
)
from rooms.api.govstack.callers import Address, AddressDep
from rooms.api.govstack.operations import NOT_THERE, Operation, Reply, declare, hiding, problem
from rooms.api.params import NamePath, parse_name
from rooms.api.subscription_bodies import CreatedSubscription, CreateSubscription
from rooms.api.subscription_creation import SubscriptionCreator, provide_creator, subscribe
from rooms.api.subscription_fields import InterestRequest
from rooms.db.catalog import subscriptions as records
from rooms.db.catalog.organisations import find_push_template
from rooms.db.connection import transaction
from rooms.domain.govstack import ClientId, push_url
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import Scope, SubscriptionType
from rooms.errors import FieldProblem, InvalidError, NotFoundError, OtherMemberError

MAX_LISTED: Final = 1_000
"""The most subscriptions that a list has."""
_PATH: Final = "/api/v1/subs"
_ONE: Final = _PATH + "/{event_type:str}"
_READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
_WRITE: Final = require_scopes(Scope.MANAGE, allows=OF_SUBSCRIPTIONS)
_MS: Final = 1000
_NAME_PART: Final = 48
_NAME_BYTES: Final = 6
_FIELDS: Final = {
    "event_types[0].name": "eventType",
    "message_expiration_ms": "options.TTL",
    "push_url": "delivery",
}
"""The specification's names of the fields of a subscription."""


@get(
    _PATH,
    opt=_READ
    | declare(
        Operation(replies={200: Reply("The subscriptions, at most 1,000", list[SubscriptionItem])})
    ),
    summary="List the own subscriptions",
)
async def list_subscriptions(
    services: ServicesDep, principal: Caller, address: AddressDep
) -> Response[list[SubscriptionItem]]:
    """List the caller's subscriptions to a single event type of the room; 404: there is none."""
    async with transaction(services.engine) as connection:
        found = await records.list_callers_subscriptions(
            connection,
            principal.organisation_id,
            address.room_id,
            principal.application,
            limit=MAX_LISTED,
        )
    items = [
        _to_item(one, address)
        for one in found
        if principal.may_use_subscription(one.room_id, one.id)
    ]
    if not items:
        raise NotFoundError(NOT_THERE)
    return Response(items)


@post(
    _ONE,
    status_code=200,
    dto=Body[SubscriptionItem],
    return_dto=None,
    dependencies={"creator": Provide(provide_creator)},
    opt=require_scopes(Scope.MANAGE, allows=BELOW_ROOM)
    | declare(
        Operation(
            body=SubscriptionItem,
            replies={
                200: Reply("The subscription", SubscriptionItem),
                409: problem("The caller subscribes to the event type already"),
            },
        )
    ),
    summary="Subscribe",
)
async def create_subscription(
    *,
    data: JSONBody[SubscriptionItem],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    creator: NamedDependency[SkipValidation[SubscriptionCreator]],
    address: AddressDep,
    event_type: NamePath,
) -> Response[SubscriptionItem]:
    """Subscribe the caller to an event type.

    PUSH goes to the URL that the organisation registered (`PUT /v1/push-template`). `status` is
    `pending` where the room's owner approves subscriptions.
    """
    _check_item(data, event_type, address, principal)
    options = data.options or SubscriptionOptions()
    kind = SubscriptionType.PUSH if data.delivery is UNSET else data.delivery
    wanted = CreateSubscription(
        name=_name(services, event_type, principal),
        type=kind,
        event_types=[InterestRequest(name=event_type)],
        ordered=bool(options.fifo),
        message_expiration_ms=_lifetime(options, address),
    )
    if kind is SubscriptionType.PUSH:
        wanted.push_url = await _push_url(services, principal, address, event_type)
        wanted.event_item = True
    with hiding(), _renaming():
        made = await subscribe(
            address.room_id,
            wanted,
            services=services,
            principal=principal,
            change=change,
            creator=creator,
            only_one=True,
        )
    return Response(_to_item(made, address), status_code=200)


@get(
    _ONE,
    opt=_READ | declare(Operation(replies={200: Reply("The subscription", SubscriptionItem)})),
    summary="Read the own subscription",
)
async def read_subscription(
    services: ServicesDep, principal: Caller, address: AddressDep, event_type: NamePath
) -> Response[SubscriptionItem]:
    """Return the caller's subscription to an event type."""
    found = await find_callers_subscription(services, principal, address, event_type)
    return Response(_to_item(found, address))


@patch(
    _ONE,
    status_code=201,
    dto=Body[SubscriptionItem],
    return_dto=None,
    opt=_WRITE
    | declare(
        Operation(
            body=SubscriptionItem,
            replies={
                201: Reply("The changed subscription", SubscriptionItem),
                409: problem("Ours. Something else changed it at the same moment"),
            },
        )
    ),
    summary="Change the own subscription",
)
async def change_subscription(
    *,
    data: JSONBody[SubscriptionItem],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    event_type: NamePath,
) -> Response[SubscriptionItem]:
    """Change the options. What is left out stays as it is; `delivery` cannot be changed.

    `delivery: PUSH` reads the URL anew that the organisation registered.
    """
    _check_item(data, event_type, address, principal)
    found = await find_callers_subscription(services, principal, address, event_type)
    fields: dict[str, Any] = {}
    if data.delivery is not UNSET:
        if data.delivery is not found.type:
            raise InvalidError(
                FieldProblem("delivery", "cannot be changed; cancel it, and subscribe again")
            )
        if found.type is SubscriptionType.PUSH:
            fields["push_url"] = await _push_url(services, principal, address, event_type)
    if data.options is not UNSET:
        if data.options.ttl is not UNSET:
            fields["message_expiration_ms"] = _lifetime(data.options, address)
        if data.options.fifo is not UNSET:
            fields["ordered"] = data.options.fifo
    with hiding(), _renaming():
        # By its version: it may be for other event types by now.
        changed = await resource.change_settings(
            services, principal, change, found.id, fields, version=found.version
        )
    return Response(_to_item(changed, address), status_code=201)


@delete(
    _ONE,
    opt=_WRITE | declare(Operation(replies={204: Reply("It is cancelled")})),
    summary="Cancel the own subscription",
)
async def cancel_subscription(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    event_type: NamePath,
) -> None:
    """Delete the caller's subscription; a job cancels its unfinished deliveries."""
    found = await find_callers_subscription(services, principal, address, event_type)
    with hiding():
        await resource.remove(services, principal, change, found.id)


async def find_callers_subscription(
    services: ApiServices, principal: Principal, address: Address, event_type: str
) -> Subscription:
    """Return the subscription of the calling client to an event type. NotFoundError."""
    with hiding():
        name = parse_name(event_type)
    async with transaction(services.engine) as connection:
        found = await records.list_callers_subscriptions(
            connection,
            principal.organisation_id,
            address.room_id,
            principal.application,
            name,
            limit=MAX_LISTED,
        )
    for one in found:
        if principal.may_use_subscription(one.room_id, one.id):
            return one
    raise NotFoundError(NOT_THERE)


@contextmanager
def _renaming() -> Iterator[None]:
    """Name the fields of problems as the specification does."""
    try:
        yield
    except InvalidError as exc:
        raise InvalidError(
            *(replace(one, field=_FIELDS.get(one.field, one.field)) for one in exc.problems)
        ) from exc


def _check_item(
    data: SubscriptionItem, event_type: str, address: Address, principal: Principal
) -> None:
    """Check what must agree with path and caller. InvalidError, OtherMemberError."""
    if data.event_type != event_type:
        raise InvalidError(FieldProblem("eventType", "is not the event type of the path"))
    if data.subscriber_id is not UNSET and data.subscriber_id != _subscriber(
        address.caller.member_id, principal.application
    ):
        raise OtherMemberError("subscriberId is not the caller: a client only subscribes itself")


def _lifetime(options: SubscriptionOptions, address: Address) -> int:
    """Return the lifetime in ms; by default that of the specification, within the room's."""
    if options.ttl is not UNSET:
        return options.ttl * _MS
    return min(DEFAULT_TTL_S * _MS, address.expiration_ms or DEFAULT_TTL_S * _MS)


async def _push_url(
    services: ApiServices, principal: Principal, address: Address, event_type: str
) -> str:
    """Return the URL that the organisation registered for this caller. InvalidError: none."""
    async with transaction(services.engine) as connection:
        template = await find_push_template(connection, principal.organisation_id)
    if template is None:
        raise InvalidError(
            FieldProblem(
                "delivery",
                "PUSH needs the URL of your endpoint: register it by PUT /v1/push-template or "
                "`rooms govstack endpoint set`, or subscribe with PULL",
            )
        )
    assert address.caller.member_id is not None, "the guard compared it with the header"
    client = ClientId(member_id=address.caller.member_id, application=principal.application)
    try:
        return push_url(template, client, event_type)
    except ValueError as exc:
        raise InvalidError(FieldProblem("delivery", str(exc))) from exc


def _name(services: ApiServices, event_type: str, principal: Principal) -> str:
    """Return a name that no other subscription of the organisation has."""
    application = (principal.application or "")[:_NAME_PART]
    return f"{event_type[:_NAME_PART]}.{application}.{services.random(_NAME_BYTES).hex()}"


def _to_item(found: Subscription | CreatedSubscription, address: Address) -> SubscriptionItem:
    (interest,) = found.event_types or ()
    options = SubscriptionOptions()
    if found.message_expiration_ms is not None:
        options.ttl = max(1, found.message_expiration_ms // _MS)
    if found.ordered is not None:
        options.fifo = found.ordered
    return SubscriptionItem(
        id=found.id,
        subscriber_id=_subscriber(address.caller.member_id, found.application),
        event_type=interest.name,
        delivery=found.type,
        options=options,
        status=found.status,
    )


def _subscriber(member_id: str | None, application: str | None) -> ClientIdentifier:
    assert member_id is not None, "the guard compared it with the header"
    instance, member_class, code = member_id.split("/")
    return ClientIdentifier(
        instance_id=instance,
        member_class=member_class,
        member_code=code,
        application_code=UNSET if application is None else application,
    )


ROUTES: Final = [
    list_subscriptions,
    create_subscription,
    read_subscription,
    change_subscription,
    cancel_subscription,
]
