"""Bringing back, and clearing away: `POST /v1/messages/{id}/restore`, `/v1/rooms/{id}/restore`, `/v1/rooms/{id}/clear`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, post
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct

from rooms.domain.ids import MessageId, RoomId, room_of
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.states import UNFINISHED, Event, Scope, State
from rooms.domain.transitions import sources
from rooms.errors import FieldProblem, InvalidError, NotFoundError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.jobs import JobAccepted, accepted
from rooms.rest.paths import IdPath, RoomPath, parse_id, parse_room
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage import jobs as job_records
from rooms.storage import messages as message_records
from rooms.storage import rooms as room_records
from rooms.storage.transactions import transaction

_WRITE: Final = needs(Scope.OPERATE)
_MAY: Final = UNFINISHED | sources(Event.RESTORE)
_NAMED: Final = ", ".join(sorted(_MAY))


class Restore(Struct, forbid_unknown_fields=True, kw_only=True):
    """What to restore: what is unfinished, unless `states` names others; with `include_expired` what expired as well."""

    include_expired: Annotated[bool, Meta(description="Also what expired; it gets the room's lifetime anew.")] = False
    states: (
        Annotated[
            list[State],
            Meta(
                min_length=1,
                max_length=len(State),
                description=f"Only deliveries in these states: {_NAMED}. What ended begins anew, its attempts counted from 0.",
            ),
        ]
        | None
    ) = None


class RoomRestore(Restore, forbid_unknown_fields=True, kw_only=True):
    """The same for a whole room."""

    since: Annotated[datetime, Meta(tz=True, description="Only what was published at this time or later.")] | None = (
        None
    )


@post(
    "/messages/{message_id:str}/restore",
    status_code=202,
    dto=Body[Restore | None],
    return_dto=None,
    opt=_WRITE,
    responses=documented(),
    tags=["messages"],
    summary="Restore a message",
)
async def restore_message(
    services: Given, principal: Caller, message_id: IdPath, data: JSONBody[Restore | None] = None
) -> Response[JobAccepted]:
    """202 with the job that restores the deliveries of one message."""
    asked = data or Restore()
    identity = MessageId(parse_id(message_id, "message"))
    room = room_of(identity)
    async with transaction(services.engine) as connection:
        try:
            await room_records.find_room(connection, principal.organisation_id, room)
        except NotFoundError as exc:
            raise message_records.missing(identity) from exc
        await message_records.find_message(connection, room, identity)
    return await _ask(services, principal, room, JobKind.RESTORE, {"message_id": identity, "states": _states(asked)})


@post(
    "/rooms/{room_id:str}/restore",
    status_code=202,
    dto=Body[RoomRestore | None],
    return_dto=None,
    opt=_WRITE,
    responses=documented(),
    tags=["rooms"],
    summary="Restore what is unfinished in a room",
)
async def restore_room(
    services: Given, principal: Caller, room_id: RoomPath, data: JSONBody[RoomRestore | None] = None
) -> Response[JobAccepted]:
    """202 with the job that restores a room's deliveries; what is published meanwhile is not meant by it.

    What is unfinished keeps its state, attempt and due time; what a worker or a consumer has is left to it.
    """
    asked = data or RoomRestore()
    room = parse_room(room_id)
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
    since = None if asked.since is None else asked.since.isoformat()
    arguments = {"states": _states(asked), **({} if since is None else {"since": since})}
    return await _ask(services, principal, room, JobKind.RESTORE, arguments)


@post(
    "/rooms/{room_id:str}/clear",
    status_code=202,
    opt=_WRITE,
    responses=documented(),
    tags=["rooms"],
    summary="Cancel what is unfinished in a room",
)
async def clear_room(
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    confirm: Annotated[
        str | None, QueryParameter(description="The room's name, so that nobody clears by mistake.")
    ] = None,
) -> Response[JobAccepted]:
    """202 with the job that cancels all that is unfinished; an attempt that is under way ends first.

    What is published meanwhile is not meant by it, and what rests in sidelines stays there.
    """
    room = parse_room(room_id)
    async with transaction(services.engine) as connection:
        found = await room_records.find_room(connection, principal.organisation_id, room)
    if confirm != found.name:
        raise InvalidError(
            FieldProblem("confirm", "repeat the room's name here: all that is unfinished in it is cancelled")
        )
    return await _ask(services, principal, room, JobKind.CLEAR_ROOM, {"name": found.name})


def _states(asked: Restore) -> list[str]:
    if asked.states is None:
        chosen = UNFINISHED
    else:
        wrong = [n for n, state in enumerate(asked.states) if state not in _MAY]
        if wrong:
            raise InvalidError(
                *(FieldProblem(f"states[{n}]", f"can not be restored; there are {_NAMED}") for n in wrong)
            )
        chosen = frozenset(asked.states)
    return sorted(chosen | ({State.EXPIRED} if asked.include_expired else frozenset()))


async def _ask(
    services: Services, principal: Principal, room: RoomId, kind: JobKind, arguments: Mapping[str, Any]
) -> Response[JobAccepted]:
    async with transaction(services.engine) as connection:
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            kind,
            new_id=services.ids.global_id(services.clock.now_ms()),
            room=room,
            arguments={"room_id": room, **arguments},
        )
    return accepted(job)


ROUTES: Final = [restore_message, restore_room, clear_room]
