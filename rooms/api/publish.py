"""Declare the publish routes for Litestar.

`rooms.api.fast_routes` answers them first, with the same bytes.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, Response, post
from litestar.datastructures import ResponseHeader
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody
from litestar.params import HeaderParameter
from litestar.status_codes import HTTP_200_OK, HTTP_202_ACCEPTED
from msgspec import Struct

from rooms.api.auth import (
    CHANGES_NOTHING,
    OF_EVENTS,
    Caller,
    ServicesDep,
    moves_messages,
    require_scopes,
)
from rooms.api.codec import RawSchema, inlined_schema
from rooms.api.errors import documented_responses
from rooms.api.fast_routes import JSON, REPLAYED_HEADER, read_request
from rooms.api.params import RoomPath, parse_room
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.publishing.publisher import PublishResult
from rooms.publishing.request import MAX_KEY, BatchRequest, MessageRequest

_TAGS: Final = ["publish"]
_PUBLISH_SCOPES: Final = moves_messages(Scope.PUBLISH, allows=OF_EVENTS)
_HEADERS: Final = [
    ResponseHeader(
        name=REPLAYED_HEADER,
        description="`true`: the answer to an earlier request with this Idempotency-Key.",
        documentation_only=True,
        required=False,
    )
]

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        description="Kept for 24 hours in its room: a repeated request gets the first answer, and "
        "is not published twice; another request with it is a conflict.",
        # Documented here and checked by the service, so that both ways to publish agree.
        schema_extra={"pattern": "^[!-~]+$", "minLength": 1, "maxLength": MAX_KEY},
    ),
]


class PublishResponse(Struct, kw_only=True):
    """Describe an accepted message and its destinations: `room-…::subscription-…`.

    At most 100 of them are named, and to a publisher that is not the room's owner only its own
    subscriptions, unless the room is transparent. `destination_count` counts all.
    """

    message_id: str
    correlation_id: str
    destinations: list[str]
    destination_count: int


class CheckResponse(Struct, kw_only=True):
    """Describe the destinations of a message, named as by a publish."""

    destinations: list[str]
    destination_count: int


class PublishBatchResponse(Struct, kw_only=True):
    """Describe the accepted messages, in the order of the request."""

    messages: list[PublishResponse]


@dataclass
class _PublishOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _request_body(MessageRequest)


@dataclass
class _PublishBatchOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _request_body(BatchRequest)


def _request_body(kind: type[Struct]) -> RequestBody:
    return RequestBody(
        content={JSON: OpenAPIMediaType(schema=RawSchema(inlined_schema(kind)))}, required=True
    )


@post(
    "/rooms/{room_id:str}/messages",
    operation_class=_PublishOperation,
    opt=_PUBLISH_SCOPES,
    status_code=HTTP_202_ACCEPTED,
    responses=documented_responses(409),
    response_headers=_HEADERS,
    tags=_TAGS,
    summary="Publish a message",
)
async def publish(
    request: Request[Any, Principal, Any],
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
    idempotency_key: IdempotencyKey = None,  # noqa: ARG001 - read as it came, so that both ways judge alike
) -> Response[PublishResponse]:
    """Store a message durably with one delivery for each matching subscription.

    `destinations` restricts it to some of them. `ttl_ms` may shorten the room's expiration. Without
    `correlation_id` the message's id is used. The payload keeps its bytes.
    """
    body, key = await read_request(
        request.scope["headers"], request.receive, services.settings.max_resource_body_bytes
    )
    return _response(await services.publisher.publish(principal, parse_room(room_id), body, key))


@post(
    "/rooms/{room_id:str}/messages/batch",
    operation_class=_PublishBatchOperation,
    opt=_PUBLISH_SCOPES,
    status_code=HTTP_202_ACCEPTED,
    responses=documented_responses(409),
    response_headers=_HEADERS,
    tags=_TAGS,
    summary="Publish several messages",
)
async def publish_batch(
    request: Request[Any, Principal, Any],
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
    idempotency_key: IdempotencyKey = None,  # noqa: ARG001 - read as it came, so that both ways judge alike
) -> Response[PublishBatchResponse]:
    """Store all messages or none: one wrong message refuses all; each problem names its index.

    Together they make at most 100,000 deliveries (413), or as many as one of them makes.
    """
    body, key = await read_request(
        request.scope["headers"], request.receive, services.settings.max_body_bytes
    )
    return _response(
        await services.publisher.publish_batch(principal, parse_room(room_id), body, key)
    )


@post(
    "/rooms/{room_id:str}/messages/check",
    operation_class=_PublishOperation,
    opt={**require_scopes(Scope.PUBLISH, allows=OF_EVENTS), CHANGES_NOTHING: True},
    status_code=HTTP_200_OK,
    tags=_TAGS,
    summary="Check a message",
)
async def check_message(
    request: Request[Any, Principal, Any],
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
) -> CheckResponse:
    """Check a message as publishing it would, and publish nothing.

    The problems are those of a publish. Quotas, signatures and messages that were published with
    the same `id` are not looked at.
    """
    body, _ = await read_request(
        request.scope["headers"], request.receive, services.settings.max_resource_body_bytes
    )
    answer = await services.publisher.check(principal, parse_room(room_id), body)
    return msgspec.json.decode(answer, type=CheckResponse)


def _response(answer: PublishResult) -> Response[Any]:
    headers = {REPLAYED_HEADER: "true"} if answer.replayed else {}
    return Response(answer.body, status_code=answer.status, media_type=JSON, headers=headers)


ROUTES: Final = (publish, publish_batch, check_message)
