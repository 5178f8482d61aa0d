"""Serve `/v1/rooms`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, cast

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.params import JSONBody, QueryParameter
from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import (
    BELOW_ROOM,
    FOR_EVERY_KEY,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import ChangeDep, shown
from rooms.api.codec import Body, validate_name
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.jobs import JobAccepted, accepted_response, delete_subscription_job
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import NameContains, RoomIds, RoomPath, parse_filter_rooms, parse_room
from rooms.api.room_bodies import (
    CreateRoom,
    RoomPage,
    RoomResponse,
    UpdateRoom,
    to_room_response,
)
from rooms.api.subscription_limits import SubscriptionLimits
from rooms.api.throttle_bodies import throttle_problems
from rooms.db.catalog import rooms as records
from rooms.db.catalog.access import find_access, find_publishable
from rooms.db.catalog.organisations import find_members
from rooms.db.catalog.subscriptions import find_operational, set_operational
from rooms.db.connection import transaction
from rooms.db.jobs import jobs as job_records
from rooms.db.notify import Channel
from rooms.db.queries.subscription_counts import RoomCounts, count_in_room
from rooms.domain.ids import MAX_ROOM, RoomId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.push_url import PushUrl
from rooms.domain.room import Room
from rooms.domain.state_machine import Scope
from rooms.domain.throttle import THROTTLE_SETTINGS
from rooms.errors import FieldProblem, InvalidError, StorageRefusedError

_LIST: Final = "rooms"
_ID_TRIES: Final = 5
_TAGS: Final = ["rooms"]
_READ: Final = require_scopes(
    Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH, Scope.SUBSCRIBE, allows=FOR_EVERY_KEY
)


@post(
    "/rooms",
    dto=Body[CreateRoom],
    return_dto=None,
    opt=require_scopes(Scope.MANAGE),
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Create a room",
)
async def create_room(
    data: JSONBody[CreateRoom], services: ServicesDep, principal: Caller, change: ChangeDep
) -> Response[RoomResponse]:
    """Create a room.

    409: the organisation has a room of this name, or as many rooms as it may; or `operational_url`
    would be one subscription more than it may have.
    """
    validate_name(data.name)
    fields = msgspec.structs.asdict(data)
    _validate(services, fields)
    async with change.transaction() as connection:
        await records.check_room_count(
            connection, principal.organisation_id, services.settings.max_rooms
        )
        # Among a million rooms 31 random bits collide once in two thousand tries.
        for _ in range(_ID_TRIES):
            identity = RoomId(1 + int.from_bytes(services.random(8), "big") % MAX_ROOM)
            room = await records.create_room(
                connection, principal.organisation_id, identity, fields
            )
            if room is not None:
                break
        else:
            raise StorageRefusedError("no free room id was found")
        await _check_govstack(connection, principal, fields)
        await _set_operational_subscription(connection, services, principal, room, fields)
    services.notifier.notify(Channel.CONFIG, str(room.id))
    return Response(to_room_response(room, principal), headers={"Location": f"/v1/rooms/{room.id}"})


@get("/rooms", opt=_READ, tags=_TAGS, summary="List rooms")
async def list_rooms(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    name: Annotated[str | None, QueryParameter(description="Only the room of this name.")] = None,
    contains: NameContains = None,
    ids: RoomIds = None,
    shared: Annotated[
        bool,
        QueryParameter(
            description="Rooms of others, into which this organisation may publish, or to which "
            "it may subscribe or has subscribed, instead of its own."
        ),
    ] = False,
) -> RoomPage:
    """List the organisation's rooms, newest first."""
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_rooms(
            connection,
            principal,
            name=name,
            contains=contains,
            chosen=parse_filter_rooms("id", ids),
            shared=shared,
            before=_parse_position(page.after),
            limit=page.fetch_limit,
        )
        publishes = await find_publishable(connection, principal, found) if shared else {}
    return page.respond(
        RoomPage,
        found,
        lambda room: to_room_response(room, principal, publishes.get(room.id)),
        position=lambda room: f"{room.created_at.isoformat()} {room.id}",
    )


@get("/rooms/{room_id:str}", opt=for_portals(_READ), tags=_TAGS, summary="Read a room")
async def read_room(services: ServicesDep, principal: Caller, room_id: RoomPath) -> RoomResponse:
    """Return one room: an own one, or one of others in which this organisation has a part."""
    async with transaction(services.engine) as connection:
        access = await find_access(connection, principal, parse_room(room_id))
    return to_room_response(access.room, principal, access.publishes)


@get(
    "/rooms/{room_id:str}/counts",
    opt=require_scopes(Scope.MANAGE, Scope.OPERATE, allows=BELOW_ROOM),
    tags=_TAGS,
    summary="Count what a room has",
)
async def read_room_counts(
    services: ServicesDep, principal: Caller, room_id: RoomPath
) -> RoomCounts:
    """Count the room's deliveries that are unfinished or sidelined, and what it has. For its owner.

    So much is affected by a clear, a restore and a deletion.
    """
    identity = parse_room(room_id)
    async with transaction(services.engine) as connection:
        await records.find_room(connection, principal, identity)
        return await count_in_room(connection, identity)


@patch(
    "/rooms/{room_id:str}",
    dto=Body[UpdateRoom],
    return_dto=None,
    opt=require_scopes(Scope.MANAGE, allows=BELOW_ROOM),
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Change a room",
)
async def change_room(
    data: JSONBody[UpdateRoom],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
) -> RoomResponse:
    """Change the room.

    A new retry policy applies to later failures, a new expiration to later messages. 409: the name
    is taken, the room has another operational subscription, or `operational_url` would be one
    subscription more than a quota allows.
    """
    identity = parse_room(room_id)
    fields: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(data).items() if value is not UNSET
    }
    if "name" in fields:
        validate_name(fields["name"])
    _validate(services, fields)
    async with change.transaction() as connection:
        before = await records.find_room(connection, principal, identity, lock=True)
        if not fields:
            return to_room_response(before, principal)
        change.before = changed_values(before, fields)
        room = await records.touch_room(connection, principal, identity, fields)
        await _check_govstack(connection, principal, fields)
        await _set_operational_subscription(connection, services, principal, room, fields)
    services.notifier.notify(Channel.CONFIG, str(identity))
    return to_room_response(room, principal)


@delete(
    "/rooms/{room_id:str}",
    status_code=202,
    opt=require_scopes(Scope.MANAGE, allows=BELOW_ROOM),
    tags=_TAGS,
    summary="Delete a room",
)
async def delete_room(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
    confirm: Annotated[
        str | None,
        QueryParameter(description="The room's name, to prevent deleting by mistake."),
    ] = None,
) -> Response[JobAccepted]:
    """Start the job that deletes the room and everything in it. For requests it is gone at once."""
    identity = parse_room(room_id)
    async with change.transaction() as connection:
        room = await records.touch_room(connection, principal, identity)
        if confirm != room.name:
            raise InvalidError(
                FieldProblem("confirm", "repeat the room's name here: everything in it is deleted")
            )
        change.before = {"name": room.name}
        await records.mark_deleting(connection, room)
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            JobKind.DELETE_ROOM,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=identity,
            arguments={"room_id": identity, "name": room.name},
        )
    services.notifier.notify(Channel.CONFIG, str(identity))
    return accepted_response(job)


def changed_values(room: Room, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the former values of given fields, for the journal."""
    values = {
        name: getattr(room.throttle if name in THROTTLE_SETTINGS else room, name) for name in fields
    }
    values |= {name: sorted(one) for name, one in values.items() if isinstance(one, frozenset)}
    return cast("dict[str, Any]", shown(values))


def _validate(services: ApiServices, fields: Mapping[str, Any]) -> None:
    problems = list(throttle_problems(fields))
    if (url := fields.get("operational_url")) is not None:
        try:
            services.check_push_url(PushUrl.parse(url))
        except ValueError as exc:
            problems.append(FieldProblem("operational_url", str(exc)))
    if problems:
        raise InvalidError(*problems)


async def _check_govstack(
    connection: AsyncConnection, principal: Principal, fields: Mapping[str, Any]
) -> None:
    """Raise InvalidError where these fields serve a room that has no address."""
    if not fields.get("govstack"):
        return
    members = await find_members(connection, {principal.organisation_id})
    if members[principal.organisation_id].member_id is None:
        raise InvalidError(
            FieldProblem(
                "govstack",
                "your organisation has no member_id, which is in the room's address; an operator "
                "sets it (PATCH /v1/organisations/{id})",
            )
        )


async def _set_operational_subscription(
    connection: AsyncConnection,
    services: ApiServices,
    principal: Principal,
    room: Room,
    fields: Mapping[str, Any],
) -> None:
    """Create, change or delete the room's operational subscription as `fields` say.

    The transaction has locked the room. QuotaConflictError: there may be no other subscription.
    ConflictError: the owner made another operational subscription.
    """
    if "operational_url" not in fields:
        return
    now = await find_operational(connection, room)
    if room.operational_url is not None:
        if now is None:
            limits = SubscriptionLimits(connection=connection, settings=services.settings)
            left = await limits.left(principal, room.id, owner=principal.organisation_id)
            left.check()
        await set_operational(
            connection,
            room,
            room.operational_url,
            now=now,
            identity=SubscriptionId(services.ids.generate(room.id, services.clock.now_ms())),
            encrypted_secret=services.cipher.encrypt(services.new_secret().encode()),
        )
    elif now is not None and now.belongs_to_room:
        await delete_subscription_job(connection, services, principal, now)


def _parse_position(text: str | None) -> tuple[datetime, RoomId] | None:
    if text is None:
        return None
    at, _, identity = text.partition(" ")
    return datetime.fromisoformat(at), RoomId(int(identity))


ROUTES: Final = [
    create_room,
    list_rooms,
    read_room,
    read_room_counts,
    change_room,
    delete_room,
]
