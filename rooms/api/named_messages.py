"""Serve `/v1/rooms/{id}/messages/by-id/{caller id}`: a message by the id that its publisher gave.

Each organisation addresses the ids that it gave itself. The answers are those of
`/v1/messages/{id}`.
"""

import re
from typing import Annotated, Any, Final
from urllib.parse import unquote_to_bytes

from litestar import Request, delete, get, patch
from litestar.params import JSONBody, PathParameter

from rooms.api.auth import Caller, ServicesDep
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.message_changes import (
    WRITE,
    CancelMessageResponse,
    RescheduleMessage,
    RescheduleMessageResponse,
    cancel,
    reschedule,
)
from rooms.api.messages import READ, MessageResponse, describe_message
from rooms.api.params import RoomPath, WithPayload, parse_room
from rooms.db.connection import transaction
from rooms.db.queries.message_scope import find_named_message
from rooms.domain.ids import MessageId
from rooms.domain.principal import Principal
from rooms.errors import NotFoundError
from rooms.publishing.request import MAX_TEXT

_TAGS: Final = ["messages"]
_PATH: Final = "/rooms/{room_id:str}/messages/by-id/{caller_id:path}"
_BEFORE_ID: Final = b"/messages/by-id/"
_CALLER_ID: Final = re.compile(rf"[!-~]{{1,{MAX_TEXT}}}")

CallerIdPath = Annotated[
    str,
    PathParameter(
        description="The id that your organisation gave to the message, percent-encoded.",
        schema_extra={"pattern": "^[!-~]+$", "maxLength": MAX_TEXT},
    ),
]


@get(_PATH, opt=READ, tags=_TAGS, summary="Read a message by your own id")
async def read_named_message(
    *,
    services: ServicesDep,
    principal: Caller,
    request: Request[Any, Any, Any],
    room_id: RoomPath,
    caller_id: CallerIdPath,  # noqa: ARG001 - documented here, and read as it was sent
    payload: WithPayload = True,
) -> MessageResponse:
    """Return the message that your organisation published with this id, as by its other id."""
    identity = await _find(services, principal, room_id, request)
    return await describe_message(
        services, principal, identity, with_payload=payload, scope=request.scope
    )


@delete(
    _PATH,
    status_code=200,
    opt=WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Cancel a message by your own id",
)
async def withdraw_named_message(
    *,
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    request: Request[Any, Any, Any],
    room_id: RoomPath,
    caller_id: CallerIdPath,  # noqa: ARG001 - documented here, and read as it was sent
) -> CancelMessageResponse:
    """Cancel the deliveries of the message that your organisation published with this id.

    It does what `DELETE /v1/messages/{id}` does.
    """
    identity = await _find(services, principal, room_id, request)
    return await cancel(services, principal, change, identity)


@patch(
    _PATH,
    dto=Body[RescheduleMessage],
    return_dto=None,
    opt=WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Change the due time of a message by your own id",
)
async def move_named_message(
    *,
    data: JSONBody[RescheduleMessage],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    request: Request[Any, Any, Any],
    room_id: RoomPath,
    caller_id: CallerIdPath,  # noqa: ARG001 - documented here, and read as it was sent
) -> RescheduleMessageResponse:
    """Change the due time of the message that your organisation published with this id.

    It does what `PATCH /v1/messages/{id}` does.
    """
    identity = await _find(services, principal, room_id, request)
    return await reschedule(services, principal, change, identity, data)


async def _find(
    services: ApiServices, principal: Principal, room_id: str, request: Request[Any, Any, Any]
) -> MessageId:
    room = parse_room(room_id)
    # The router collapses slashes, which an id may have; the path as it was sent has them all.
    sent = request.scope["raw_path"].partition(_BEFORE_ID)[2]
    caller_id = unquote_to_bytes(sent).decode("latin-1")
    if not _CALLER_ID.fullmatch(caller_id):
        raise NotFoundError(
            f"there is no such message: its id has at most {MAX_TEXT} visible ASCII characters"
        )
    async with transaction(services.engine) as connection:
        return await find_named_message(connection, principal, room, caller_id)


ROUTES: Final = [read_named_message, withdraw_named_message, move_named_message]
