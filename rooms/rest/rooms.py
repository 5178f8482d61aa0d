"""`/v1/rooms`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.params import JSONBody, QueryParameter
from msgspec import UNSET, Meta, Struct, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import MAX_ROOM, RoomId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.lane import LANE_SETTINGS
from rooms.domain.names import MAX_NAME, NAME_PATTERN
from rooms.domain.principal import Principal
from rooms.domain.room import Room
from rooms.domain.states import Scope
from rooms.domain.target import MAX_URL, Target
from rooms.errors import FieldProblem, InvalidError, StorageRefusedError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body, checked_name
from rooms.rest.jobs import JobAccepted, accepted
from rooms.rest.lane_fields import LaneChange, LaneNew, lane_out, lane_problems
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.paths import RoomPath, parse_room
from rooms.rest.problems import documented
from rooms.rest.removals import take_away
from rooms.rest.services import Services
from rooms.storage import jobs as job_records
from rooms.storage import rooms as records
from rooms.storage.operational import find_operational, set_operational
from rooms.storage.signals import Channel
from rooms.storage.transactions import transaction

MAX_DELAY_MS: Final = 30 * 86_400_000
MAX_EXPIRATION_MS: Final = 100 * 365 * 86_400_000
_LIST: Final = "rooms"
_TRIES: Final = 5
_TAGS: Final = ["rooms"]
_ANY: Final = needs(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH, Scope.SUBSCRIBE)

Name = Annotated[str, Meta(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME, description="Unique.")]
Description = Annotated[str, Meta(max_length=1000)]
ExpirationMs = Annotated[
    int, Meta(ge=0, le=MAX_EXPIRATION_MS, description="How long a message lives, in ms; null or 0: for ever.")
]
DelayMs = Annotated[int, Meta(ge=0, le=MAX_DELAY_MS, description="The wait before the first redelivery, in ms.")]
Multiplier = Annotated[float, Meta(ge=1.0, le=100.0, description="Each further wait is longer by this factor.")]
Attempts = Annotated[int, Meta(ge=0, le=1000, description="Redeliveries after the first try; 0: none.")]
MaxDelayMs = Annotated[int, Meta(ge=0, le=MAX_DELAY_MS, description="The longest wait, in ms; null: no limit.")]
Jitter = Annotated[
    float, Meta(ge=0.0, le=1.0, description="Share of a wait left to chance; 0: exactly delay * multiplier ^ n.")
]


OperationalUrl = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_URL,
        description="Where to send `rooms.endpoint.disabled`, signed and repeated like any webhook: the subscription "
        "`~operational` of the room carries it, `rotate-secret` shows a signing secret.",
    ),
]


Ordered = Annotated[
    bool, Meta(description="Whether subscriptions that say nothing get the messages of an ordering key one by one.")
]


class RoomNew(LaneNew, forbid_unknown_fields=True, kw_only=True):
    """A room to open."""

    name: Name
    description: Description | None = None
    message_expiration_ms: ExpirationMs | None = None
    delivery_delay_ms: DelayMs
    delivery_delay_multiplier: Multiplier
    delivery_attempts: Attempts
    delivery_max_delay_ms: MaxDelayMs | None = None
    delivery_jitter: Jitter = 0.0
    ordered: Ordered = False
    operational_url: OperationalUrl | None = None


class RoomChange(LaneChange, forbid_unknown_fields=True, kw_only=True):
    """What to change of a room; what is left out stays, null clears."""

    name: Name | UnsetType = UNSET
    description: Description | UnsetType | None = UNSET
    message_expiration_ms: ExpirationMs | UnsetType | None = UNSET
    delivery_delay_ms: DelayMs | UnsetType = UNSET
    delivery_delay_multiplier: Multiplier | UnsetType = UNSET
    delivery_attempts: Attempts | UnsetType = UNSET
    delivery_max_delay_ms: MaxDelayMs | UnsetType | None = UNSET
    delivery_jitter: Jitter | UnsetType = UNSET
    ordered: Ordered | UnsetType = UNSET
    operational_url: OperationalUrl | UnsetType | None = UNSET


class RoomOut(Struct, kw_only=True):
    """A room."""

    id: int
    name: str
    description: str | None
    message_expiration_ms: int | None
    delivery_delay_ms: int
    delivery_delay_multiplier: float
    delivery_attempts: int
    delivery_max_delay_ms: int | None
    delivery_jitter: float
    ordered: bool
    max_concurrency: int | None
    timeout_ms: int | None
    rate_per_s: float | None
    rate_burst: int | None
    circuit_failures: int | None
    circuit_window_ms: int | None
    circuit_open_ms: int | None
    drain_per_s: float | None
    disable_after_ms: int | None
    operational_url: str | None
    created_at: datetime
    updated_at: datetime


class RoomPage(Struct, kw_only=True):
    """Rooms, newest first."""

    items: list[RoomOut]
    next_cursor: str | None


@post(
    "/rooms",
    dto=Body[RoomNew],
    return_dto=None,
    opt=needs(Scope.MANAGE),
    responses=documented(409),
    tags=_TAGS,
    summary="Open a room",
)
async def create_room(data: JSONBody[RoomNew], services: Given, principal: Caller) -> Response[RoomOut]:
    """201 with the room and its Location. 409: the organisation has a room of this name."""
    checked_name(data.name)
    fields = msgspec.structs.asdict(data)
    _check(services, fields)
    async with transaction(services.engine) as connection:
        # 31 random bits meet one of a million rooms once in two thousand tries.
        for _ in range(_TRIES):
            identity = RoomId(1 + int.from_bytes(services.random(8), "big") % MAX_ROOM)
            room = await records.create_room(connection, principal.organisation_id, identity, fields)
            if room is not None:
                break
        else:
            raise StorageRefusedError("no free room id was found")
        await _tell_operators(connection, services, principal, room, fields)
    services.signals.ring(Channel.CONFIG, str(room.id))
    return Response(_out(room), headers={"Location": f"/v1/rooms/{room.id}"})


@get("/rooms", opt=_ANY, responses=documented(), tags=_TAGS, summary="List rooms")
async def list_rooms(
    services: Given,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    name: Annotated[str | None, QueryParameter(description="Only the room of this name.")] = None,
) -> RoomPage:
    """The organisation's rooms, newest first."""
    async with transaction(services.engine) as connection:
        found = await records.list_rooms(
            connection,
            principal.organisation_id,
            name=name,
            before=_position(open_cursor(services.seal, _LIST, cursor)),
            limit=limit + 1,
        )
    page, last = cut(found, limit, lambda room: f"{room.created_at.isoformat()} {room.id}")
    return RoomPage(
        items=[_out(room) for room in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@get("/rooms/{room_id:str}", opt=_ANY, responses=documented(), tags=_TAGS, summary="Read a room")
async def read_room(services: Given, principal: Caller, room_id: RoomPath) -> RoomOut:
    """One room."""
    async with transaction(services.engine) as connection:
        return _out(await records.find_room(connection, principal.organisation_id, parse_room(room_id)))


@patch(
    "/rooms/{room_id:str}",
    dto=Body[RoomChange],
    return_dto=None,
    opt=needs(Scope.MANAGE),
    responses=documented(409),
    tags=_TAGS,
    summary="Change a room",
)
async def change_room(data: JSONBody[RoomChange], services: Given, principal: Caller, room_id: RoomPath) -> RoomOut:
    """The changed room. A new policy holds for what fails from now on; the expiration for what is published."""
    identity = parse_room(room_id)
    fields: dict[str, Any] = {name: value for name, value in msgspec.structs.asdict(data).items() if value is not UNSET}
    if "name" in fields:
        checked_name(fields["name"])
    _check(services, fields)
    async with transaction(services.engine) as connection:
        if not fields:
            return _out(await records.find_room(connection, principal.organisation_id, identity))
        room = await records.touch(connection, principal.organisation_id, identity, fields)
        await _tell_operators(connection, services, principal, room, fields)
    services.signals.ring(Channel.CONFIG, str(identity))
    return _out(room)


@delete(
    "/rooms/{room_id:str}",
    status_code=202,
    opt=needs(Scope.MANAGE),
    responses=documented(),
    tags=_TAGS,
    summary="Delete a room",
)
async def delete_room(
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    confirm: Annotated[
        str | None, QueryParameter(description="The room's name, so that nobody deletes by mistake.")
    ] = None,
) -> Response[JobAccepted]:
    """202 with the job that deletes the room and everything in it; the room is gone for every request at once."""
    identity = parse_room(room_id)
    async with transaction(services.engine) as connection:
        room = await records.touch(connection, principal.organisation_id, identity)
        if confirm != room.name:
            raise InvalidError(FieldProblem("confirm", "repeat the room's name here: everything in it is deleted"))
        await records.mark_deleting(connection, room)
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            JobKind.DELETE_ROOM,
            new_id=services.ids.global_id(services.clock.now_ms()),
            room=identity,
            arguments={"room_id": identity, "name": room.name},
        )
    services.signals.ring(Channel.CONFIG, str(identity))
    return accepted(job)


def _check(services: Services, fields: Mapping[str, Any]) -> None:
    problems = list(lane_problems(fields))
    if (url := fields.get("operational_url")) is not None:
        try:
            services.check_target(Target.parse(url))
        except ValueError as exc:
            problems.append(FieldProblem("operational_url", str(exc)))
    if problems:
        raise InvalidError(*problems)


async def _tell_operators(
    connection: AsyncConnection, services: Services, principal: Principal, room: Room, fields: Mapping[str, Any]
) -> None:
    """Have the room's operational subscription be as `fields` say."""
    if "operational_url" not in fields:
        return
    if room.operational_url is not None:
        await set_operational(
            connection,
            room.id,
            room.operational_url,
            identity=SubscriptionId(services.ids.make(room.id, services.clock.now_ms())),
            sealed_secret=services.seal.seal(services.new_secret().encode()),
        )
    elif (now := await find_operational(connection, room.id)) is not None:
        await take_away(connection, services, principal, now)


def _position(text: str | None) -> tuple[datetime, RoomId] | None:
    if text is None:
        return None
    at, _, identity = text.partition(" ")
    return datetime.fromisoformat(at), RoomId(int(identity))


def _out(room: Room) -> RoomOut:
    own = {name: getattr(room, name) for name in RoomOut.__struct_fields__ if name not in LANE_SETTINGS}
    return RoomOut(**own, **lane_out(room.lane))


ROUTES: Final = [create_room, list_rooms, read_room, change_room, delete_room]
