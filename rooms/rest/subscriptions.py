"""`/v1/rooms/{id}/subscriptions` and `/v1/subscriptions`."""

from typing import Annotated, Final

from litestar import Response, delete, get, patch, post
from litestar.params import JSONBody, QueryParameter
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.states import Scope, SubscriptionType
from rooms.errors import ConflictError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.jobs import JobAccepted, accepted
from rooms.rest.native_fields import let_in, new_password
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.paths import IdPath, RoomPath, parse_id, parse_room
from rooms.rest.problems import documented
from rooms.rest.removals import take_away
from rooms.rest.subscription_fields import (
    SubscriptionChange,
    SubscriptionMade,
    SubscriptionNew,
    SubscriptionOut,
    given_fields,
    to_columns,
    to_out,
)
from rooms.storage import event_types as type_records
from rooms.storage import rooms as room_records
from rooms.storage import subscriptions as records
from rooms.storage.signals import Channel
from rooms.storage.transactions import transaction

_LIST: Final = "subscriptions"
_TAGS: Final = ["subscriptions"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE)
_WRITE: Final = needs(Scope.MANAGE)


_OF_ITS_ROOM: Final = frozenset({"name", "push_url", "event_types", "filter"})
"""What nobody changes of an operational subscription."""


class SubscriptionPage(Struct, kw_only=True):
    """Subscriptions, newest first."""

    items: list[SubscriptionOut]
    next_cursor: str | None


@post(
    "/rooms/{room_id:str}/subscriptions",
    dto=Body[SubscriptionNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Subscribe to a room",
)
async def create_subscription(
    data: JSONBody[SubscriptionNew], services: Given, principal: Caller, room_id: RoomPath
) -> Response[SubscriptionMade]:
    """201 with the subscription and its signing secret (PUSH) or its user of the broker (native). From now on every
    publish reaches it.
    """
    room = parse_room(room_id)
    secret = services.new_secret() if data.type is SubscriptionType.PUSH else None
    async with transaction(services.engine) as connection:
        await room_records.touch(connection, principal.organisation_id, room)
        columns = to_columns(
            given_fields(data),
            kind=data.type,
            now=None,
            types=await _types(connection, room),
            check_target=services.check_target,
            gate=services.gate,
        )
        gate = services.gate if data.native else None
        password = new_password(services.random)
        hashed = None if gate is None else gate.hashed(password)
        made = await records.create_subscription(
            connection,
            room,
            SubscriptionId(services.ids.make(room, services.clock.now_ms())),
            {
                **columns,
                "secret": None if secret is None else services.seal.seal(secret.encode()),
                "native_password": hashed,
            },
        )
    services.signals.ring(Channel.CONFIG, str(room))
    login = None
    if gate is not None and hashed is not None:
        login = await let_in(gate, made, password, hashed, addresses=services.settings.native_addresses)
    body = SubscriptionMade(**to_out(made, show_headers=True), secret=secret, login=login)
    return Response(body, headers={"Location": f"/v1/subscriptions/{made.id}"})


@get(
    "/rooms/{room_id:str}/subscriptions",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="List subscriptions",
)
async def list_subscriptions(
    *,
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    name: Annotated[str | None, QueryParameter(description="Only the subscription of this name.")] = None,
) -> SubscriptionPage:
    """The room's subscriptions, newest first."""
    room = parse_room(room_id)
    before = open_cursor(services.seal, _LIST, cursor)
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
        found = await records.list_subscriptions(connection, room, name=name, before=before, limit=limit + 1)
    page, last = cut(found, limit, lambda subscription: subscription.id)
    return SubscriptionPage(
        items=[subscription_out(subscription, principal) for subscription in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@get(
    "/subscriptions/{subscription_id:str}",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Read a subscription",
)
async def read_subscription(services: Given, principal: Caller, subscription_id: IdPath) -> SubscriptionOut:
    """One subscription. The values of its headers are shown to keys that may change them."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        return subscription_out(
            await records.find_subscription(connection, principal.organisation_id, identity), principal
        )


@patch(
    "/subscriptions/{subscription_id:str}",
    dto=Body[SubscriptionChange],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Change a subscription",
)
async def change_subscription(
    data: JSONBody[SubscriptionChange], services: Given, principal: Caller, subscription_id: IdPath
) -> SubscriptionOut:
    """The changed subscription; attempts that begin from now on follow it."""
    identity = parse_subscription(subscription_id)
    fields = given_fields(data)
    async with transaction(services.engine) as connection:
        now = await locked(connection, principal, identity)
        if now.operational and _OF_ITS_ROOM & fields.keys():
            raise ConflictError("it is its room's: change the room's operational_url instead")
        if fields:
            types = await _types(connection, now.room_id)
            columns = to_columns(fields, kind=now.type, now=now, types=types, check_target=services.check_target)
            now = await records.change_subscription(connection, now, columns)
    services.signals.ring(Channel.CONFIG, str(now.room_id))
    return subscription_out(now, principal)


@delete(
    "/subscriptions/{subscription_id:str}",
    status_code=202,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Delete a subscription",
)
async def delete_subscription(services: Given, principal: Caller, subscription_id: IdPath) -> Response[JobAccepted]:
    """202 with the job that cancels what the subscription has not got yet; it is gone for every request at once."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        now = await locked(connection, principal, identity)
        if now.operational:
            raise ConflictError("it is its room's: clear the room's operational_url instead")
        job = await take_away(connection, services, principal, now)
    services.signals.ring(Channel.CONFIG, str(now.room_id))
    return accepted(job)


def parse_subscription(text: str) -> SubscriptionId:
    """An id in a path; NotFoundError where the text can be none."""
    return SubscriptionId(parse_id(text, "subscription"))


async def _types(connection: AsyncConnection, room: RoomId) -> dict[str, frozenset[int]]:
    return {found.name: frozenset(found.versions) for found in await type_records.list_event_types(connection, room)}


async def locked(connection: AsyncConnection, principal: Principal, identity: SubscriptionId) -> Subscription:
    """The subscription, its room touched. Found again under the lock, as it may have changed before that."""
    found = await records.find_subscription(connection, principal.organisation_id, identity)
    await room_records.touch(connection, principal.organisation_id, found.room_id)
    return await records.find_subscription(connection, principal.organisation_id, identity)


def subscription_out(found: Subscription, principal: Principal) -> SubscriptionOut:
    """A subscription as it reads everywhere."""
    return SubscriptionOut(**to_out(found, show_headers=principal.may(Scope.MANAGE)))


ROUTES: Final = [
    create_subscription,
    list_subscriptions,
    read_subscription,
    change_subscription,
    delete_subscription,
]
