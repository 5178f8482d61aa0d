"""Publishing as Litestar declares it. The front answers these routes first, with the same bytes: see `front.py`."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

from litestar import Request, Response, post
from litestar.datastructures import ResponseHeader
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody
from litestar.params import HeaderParameter
from litestar.status_codes import HTTP_202_ACCEPTED
from msgspec import Struct

from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.publishing.publisher import Answer
from rooms.publishing.request import MAX_KEY, BatchRequest, MessageRequest
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import ExactSchema, schema_of
from rooms.rest.front import HEAD_REPLAYED, JSON, read_request
from rooms.rest.paths import RoomPath, parse_room
from rooms.rest.problems import documented

_TAGS: Final = ["publish"]
_OPT: Final = needs(Scope.PUBLISH)
_HEADERS: Final = [
    ResponseHeader(
        name=HEAD_REPLAYED,
        description="`true`: an earlier request with this Idempotency-Key was accepted; this is its answer.",
        documentation_only=True,
        required=False,
    )
]

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        description="Kept for 24 hours in its room: the same request again is answered as the first was, and nothing is"
        " published twice; another request with it is a conflict.",
        # Told here, checked by the service, so that both ways say the same.
        schema_extra={"pattern": "^[!-~]+$", "minLength": 1, "maxLength": MAX_KEY},
    ),
]


class Published(Struct, kw_only=True):
    """A message that cannot be lost any more, and where it goes: `room-…::subscription-…`."""

    message_id: str
    correlation_id: str
    destinations: list[str]


class PublishedBatch(Struct, kw_only=True):
    """What was published, in the order it was sent."""

    messages: list[Published]


@dataclass
class _OneOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(MessageRequest)


@dataclass
class _BatchOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(BatchRequest)


def _body(kind: type[Struct]) -> RequestBody:
    return RequestBody(content={JSON: OpenAPIMediaType(schema=ExactSchema(schema_of(kind)))}, required=True)


@post(
    "/rooms/{room_id:str}/messages",
    operation_class=_OneOperation,
    opt=_OPT,
    status_code=HTTP_202_ACCEPTED,
    responses=documented(409),
    response_headers=_HEADERS,
    tags=_TAGS,
    summary="Publish a message",
)
async def publish(
    request: Request[Any, Principal, Any],
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    idempotency_key: IdempotencyKey = None,  # noqa: ARG001 - read as it came, so that both ways judge alike
) -> Response[Published]:
    """202: kept, with a delivery for each subscription to its event type and version. The payload stays the bytes sent.

    `destinations` narrows it to some of them. `ttl_ms` may shorten the room's expiration. Without `correlation_id` the
    message's id is one.
    """
    body, key = await read_request(request.scope["headers"], request.receive, services.settings.max_body_bytes)
    return _response(await services.publisher.publish(principal, parse_room(room_id), body, key))


@post(
    "/rooms/{room_id:str}/messages/batch",
    operation_class=_BatchOperation,
    opt=_OPT,
    status_code=HTTP_202_ACCEPTED,
    responses=documented(409),
    response_headers=_HEADERS,
    tags=_TAGS,
    summary="Publish several messages",
)
async def publish_batch(
    request: Request[Any, Principal, Any],
    services: Given,
    principal: Caller,
    room_id: RoomPath,
    idempotency_key: IdempotencyKey = None,  # noqa: ARG001 - read as it came, so that both ways judge alike
) -> Response[PublishedBatch]:
    """All of them or none: one that is wrong refuses all, and every problem is named by its index."""
    body, key = await read_request(request.scope["headers"], request.receive, services.settings.max_body_bytes)
    return _response(await services.publisher.publish_batch(principal, parse_room(room_id), body, key))


def _response(answer: Answer) -> Response[Any]:
    headers = {HEAD_REPLAYED: "true"} if answer.replayed else {}
    return Response(answer.body, status_code=answer.status, media_type=JSON, headers=headers)


ROUTES: Final = (publish, publish_batch)
