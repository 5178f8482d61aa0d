"""Create the jobs that bring deliveries back or clear them.

These are restore, clear, replay, and resending to the broker.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from litestar import Response, post
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import BELOW_ROOM, Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.jobs import JobAccepted, accepted_response
from rooms.api.params import IdPath, RoomPath, parse_id, parse_room
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog import rooms as room_records
from rooms.db.catalog.entitlements import entitlements
from rooms.db.catalog.subscriptions import find_subscription
from rooms.db.jobs import jobs as job_records
from rooms.db.jobs.requests import request_job
from rooms.db.queries.message_scope import find_message_view
from rooms.db.queries.messages import message_not_found
from rooms.domain.ids import MessageId, RoomId, created_ms, room_of
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.state_machine import (
    ENDED_STATUSES,
    RESTORABLE,
    UNFINISHED,
    Scope,
    State,
    SubscriptionStatus,
)
from rooms.errors import ConflictError, FieldProblem, InvalidError
from rooms.publishing.request import MAX_TEXT

_WRITE: Final = require_scopes(Scope.OPERATE, allows=BELOW_ROOM)
_RESTORABLE_NAMES: Final = ", ".join(sorted(RESTORABLE))


class CreateRestore(Struct, forbid_unknown_fields=True, kw_only=True):
    """Select what to restore: unfinished deliveries, or those in `states`.

    With `include_expired` expired ones too.
    """

    include_expired: Annotated[
        bool, Meta(description="Also expired ones, with a new lifetime of the room.")
    ] = False
    states: (
        Annotated[
            list[State],
            Meta(
                min_length=1,
                max_length=len(State),
                description=f"Only deliveries in these states: {_RESTORABLE_NAMES}. "
                "Ended ones start again with attempt 0.",
            ),
        ]
        | None
    ) = None


class CreateRoomRestore(CreateRestore, forbid_unknown_fields=True, kw_only=True):
    """Select what to restore in a room."""

    since: (
        Annotated[
            datetime, Meta(tz=True, description="Only messages published at this time or later.")
        ]
        | None
    ) = None


@post(
    "/messages/{message_id:str}/restore",
    status_code=202,
    dto=Body[CreateRestore | None],
    return_dto=None,
    opt=_WRITE,
    tags=["messages"],
    summary="Restore a message",
)
async def restore_message(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    message_id: IdPath,
    data: JSONBody[CreateRestore | None] = None,
) -> Response[JobAccepted]:
    """Start the job that restores the deliveries of one message."""
    request = data or CreateRestore()
    identity = MessageId(parse_id(message_id, "message"))
    room = room_of(identity)
    async with change.transaction() as connection:
        view = await find_message_view(connection, principal, identity)
        if view.message is None or not view.scope.owns:
            raise message_not_found(identity)
        return await _create_job(
            connection,
            services,
            principal,
            room=room,
            kind=JobKind.RESTORE,
            arguments={"message_id": identity, "states": _states(request)},
        )


@post(
    "/rooms/{room_id:str}/restore",
    status_code=202,
    dto=Body[CreateRoomRestore | None],
    return_dto=None,
    opt=_WRITE,
    tags=["rooms"],
    summary="Restore unfinished deliveries of a room",
)
async def restore_room(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
    data: JSONBody[CreateRoomRestore | None] = None,
) -> Response[JobAccepted]:
    """Start the job that restores a room's deliveries, without messages published meanwhile.

    Unfinished deliveries keep their state, attempt and due time; those that a worker or a consumer
    has are left alone.
    """
    request = data or CreateRoomRestore()
    room = parse_room(room_id)
    since = None if request.since is None else request.since.isoformat()
    async with change.transaction() as connection:
        await room_records.find_room(connection, principal, room)
        arguments = {"states": _states(request), **({} if since is None else {"since": since})}
        return await _create_job(
            connection, services, principal, room=room, kind=JobKind.RESTORE, arguments=arguments
        )


@post(
    "/rooms/{room_id:str}/clear",
    status_code=202,
    opt=_WRITE,
    tags=["rooms"],
    summary="Cancel unfinished deliveries of a room",
)
async def clear_room(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    room_id: RoomPath,
    confirm: Annotated[
        str | None, QueryParameter(description="The room's name, to prevent clearing by mistake.")
    ] = None,
) -> Response[JobAccepted]:
    """Start the job that cancels all unfinished deliveries; a running attempt ends first.

    Messages published meanwhile and sidelined deliveries are kept.
    """
    room = parse_room(room_id)
    async with change.transaction() as connection:
        found = await room_records.find_room(connection, principal, room)
        if confirm != found.name:
            raise InvalidError(
                FieldProblem(
                    "confirm",
                    "repeat the room's name here: all its unfinished deliveries are cancelled",
                )
            )
        return await _create_job(
            connection,
            services,
            principal,
            room=room,
            kind=JobKind.CLEAR_ROOM,
            arguments={"name": found.name},
        )


def _states(request: CreateRestore) -> list[str]:
    if request.states is None:
        chosen = UNFINISHED
    else:
        wrong = [n for n, state in enumerate(request.states) if state not in RESTORABLE]
        if wrong:
            raise InvalidError(
                *(
                    FieldProblem(
                        f"states[{n}]", f"cannot be restored; there are {_RESTORABLE_NAMES}"
                    )
                    for n in wrong
                )
            )
        chosen = frozenset(request.states)
    return sorted(chosen | ({State.EXPIRED} if request.include_expired else frozenset()))


async def _create_job(
    connection: AsyncConnection,
    services: ApiServices,
    principal: Principal,
    *,
    room: RoomId,
    kind: JobKind,
    arguments: Mapping[str, Any],
) -> Response[JobAccepted]:
    job = await request_job(
        connection,
        principal.organisation_id,
        kind,
        new_id=services.ids.generate_global(services.clock.now_ms()),
        room=room,
        arguments={"room_id": room, **arguments},
    )
    return accepted_response(job)


MAX_RATE_PER_S: Final = 100_000
_LAST_S: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_MAX_EVENT_TYPES: Final = 100
_MAX_KEYS: Final = 100
MessageKey = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]


class CreateReplay(Struct, forbid_unknown_fields=True, kw_only=True):
    """Select past messages and a rate.

    Exactly one of `since` and `from_message_id` is the start.
    """

    since: (
        Annotated[datetime, Meta(tz=True, description="Published at this time or later.")] | None
    ) = None
    from_message_id: (
        Annotated[
            str,
            Meta(
                pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
                description="This message and all after it, in the order of their ids.",
            ),
        ]
        | None
    ) = None
    until: (
        Annotated[
            datetime, Meta(tz=True, description="Published before this time; null: before now.")
        ]
        | None
    ) = None
    event_types: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=256)]],
            Meta(
                min_length=1,
                max_length=_MAX_EVENT_TYPES,
                description="Only these, where the subscription matches them.",
            ),
        ]
        | None
    ) = None
    ordering_keys: (
        Annotated[
            list[MessageKey],
            Meta(
                min_length=1,
                max_length=_MAX_KEYS,
                description="Only messages with one of these ordering keys.",
            ),
        ]
        | None
    ) = None
    business_keys: (
        Annotated[
            list[MessageKey],
            Meta(
                min_length=1,
                max_length=_MAX_KEYS,
                description="Only messages with one of these business keys.",
            ),
        ]
        | None
    ) = None
    rate_per_s: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=MAX_RATE_PER_S,
                description="Deliveries a second; null: no limit.",
            ),
        ]
        | None
    ) = None
    include_expired: Annotated[
        bool, Meta(description="Also expired ones, with a new lifetime of the room.")
    ] = False


@post(
    "/subscriptions/{subscription_id:str}/replay",
    status_code=202,
    dto=Body[CreateReplay],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=["subscriptions"],
    summary="Replay past messages to a subscription",
)
async def replay(
    data: JSONBody[CreateReplay],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
) -> Response[JobAccepted]:
    """Start the job that makes a new delivery of each past message that the subscription matches.

    It may have received a message before. Messages that their publisher withdrew are left out, and
    in another organisation's room those that are not due. 409: the subscription waits for approval,
    or has ended, or there were too many grants since then, or it is suspended in another
    organisation's room.
    """
    identity = parse_subscription(subscription_id)
    room = room_of(identity)
    if (data.since is None) == (data.from_message_id is None):
        raise InvalidError(
            FieldProblem("since", "give since or from_message_id as the start, one of them")
        )
    if (
        data.from_message_id is not None
        and room_of(parse_id(data.from_message_id, "message")) != room
    ):
        raise InvalidError(
            FieldProblem("from_message_id", "is not a message of the subscription's room")
        )
    given: dict[str, Any] = {
        "since": data.since and data.since.isoformat(),
        "from_message_id": data.from_message_id,
        "until": data.until and data.until.isoformat(),
        "event_types": data.event_types,
        "ordering_keys": data.ordering_keys,
        "business_keys": data.business_keys,
        "rate_per_s": data.rate_per_s,
        "include_expired": data.include_expired or None,
    }
    async with change.transaction() as connection:
        found = await find_subscription(connection, principal, identity)
        if found.status is SubscriptionStatus.PENDING or found.status in ENDED_STATUSES:
            raise ConflictError(f"it is {found.status}, and receives no messages")
        given["entitled"] = await entitlements(connection, found, _begin(data))
        if given["entitled"] is not None and found.status is SubscriptionStatus.SUSPENDED:
            raise ConflictError("it is suspended, and shows nothing of past messages")
        job = await request_job(
            connection,
            principal.organisation_id,
            JobKind.REPLAY,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=room,
            arguments={
                "room_id": room,
                "subscription_id": identity,
                **{name: value for name, value in given.items() if value is not None},
            },
        )
    return accepted_response(job)


def _begin(data: CreateReplay) -> datetime:
    """Return the time before which no message is replayed."""
    if data.since is not None:
        return data.since
    at_s = created_ms(data.from_message_id or "") / 1000
    return datetime.fromtimestamp(min(at_s, _LAST_S), UTC)


@post(
    "/recover",
    status_code=202,
    opt=require_scopes(Scope.PLATFORM),
    tags=["cluster"],
    summary="Resend deliveries that a broker has lost",
)
async def recover(
    services: ServicesDep, principal: Caller, change: ChangeDep
) -> Response[JobAccepted]:
    """Start the job that resends all unfinished deliveries that were in the broker.

    Attempts and due times are kept. It covers the whole installation, so its job needs the scope
    `platform` too. The maintenance process does this itself where a broker was restarted or
    emptied. Where PostgreSQL is the broker there is nothing to resend.
    """
    async with change.transaction() as connection:
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            JobKind.RECOVER,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=None,
            arguments={},
        )
    return accepted_response(job)


ROUTES: Final = [
    restore_message,
    restore_room,
    clear_room,
    replay,
    recover,
]
