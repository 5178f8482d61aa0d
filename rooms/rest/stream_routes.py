"""`GET /v1/subscriptions/{id}/stream` and `GET /v1/stream`: PULL as Server-Sent Events. The same paths take WebSockets,
which the front answers.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

from litestar import Request, get
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Operation, Parameter
from litestar.types import ASGIApp
from msgspec import Struct

from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.pulling.stream_request import LISTS, NUMBERS
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import ExactSchema
from rooms.rest.pages import READS_QUERY
from rooms.rest.paths import IdPath
from rooms.rest.problems import documented
from rooms.rest.streams import Streaming

_TAGS: Final = ["pull"]
_OPT: Final = {**needs(Scope.SUBSCRIBE), READS_QUERY: True}
_TOLD: Final = {
    "credit": "How many messages may be with the client at a time (events: 100 unless given), or may come before it grants more (WebSocket: 0).",
    "lease_ms": "How long each message is the client's, in ms, from when it is sent.",
    "priority": "Who goes first among those who wait in the same process: 9 before 0.",
    "heartbeat_ms": "A sign of life after so long without a message.",
    "for_ms": "How long the stream lasts; until somebody ends it, where this is left out.",
    "subscription": "The id of a subscription; once for each.",
    "event_type": "Only messages of this event type, or of one of these.",
    "header": "Only messages whose publisher set this header to this value, like `tenant:7`.",
    "payload": "Only messages whose payload has this value at this place, like `order.items.0.sku:A-1`.",
}
_BROWSE: Final = "`true`: show what waits and what comes, and take nothing. Messages then have no `ack_id`."


class StreamEvent(Struct):
    """An event as it stands in the stream; `data` is JSON."""

    event: Literal["message", "end"]
    data: str


_EVENTS: Final = {
    200: ResponseSpec(
        StreamEvent,
        generate_examples=False,
        description="Events `message` and, at last, `end`",
        media_type="text/event-stream",
    ),
    **documented(409),
}

Asked = Request[Any, Principal, Any]


def _parameter(name: str, schema: dict[str, Any], *, required: bool = False) -> Parameter:
    told = _TOLD.get(name, _BROWSE)
    return Parameter(name=name, param_in="query", description=told, required=required, schema=ExactSchema(schema))


def _parameters() -> list[Parameter | Any]:
    numbers = [
        _parameter(name, {"type": "integer", "minimum": low, "maximum": high}) for name, (low, high) in NUMBERS.items()
    ]
    lists = [
        _parameter(name, {"type": "array", "items": {"type": "string", "maxLength": 512}, "maxItems": most})
        for name, most in LISTS.items()
        if name != "subscription"
    ]
    return [*numbers, *lists, _parameter("browse", {"type": "boolean"})]


@dataclass
class _StreamOperation(Operation):
    def __post_init__(self) -> None:
        self.parameters = [*(self.parameters or []), *_parameters()]


@dataclass
class _StreamsOperation(Operation):
    def __post_init__(self) -> None:
        ids = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": LISTS["subscription"]}
        self.parameters = [*(self.parameters or []), _parameter("subscription", ids, required=True), *_parameters()]


@get(
    "/subscriptions/{subscription_id:str}/stream",
    operation_class=_StreamOperation,
    opt=_OPT,
    responses=_EVENTS,
    tags=_TAGS,
    summary="Stream messages",
)
async def stream(request: Asked, services: Given, principal: Caller, subscription_id: IdPath) -> ASGIApp:
    """Messages as they come: Server-Sent Events, or frames of a WebSocket where one is asked for at this path.

    Each event `message` has the JSON of a pulled message, and its `subscription_id`. Over events the client has at most
    `credit` messages; what it acknowledges or gives back by `/ack` and `/nack`, or lets run out, makes room for as many.

    A WebSocket's client grants credit by `{"credit": n}`, and settles by `{"ack": […]}`, `{"nack": […], "delay_ms": 0}`
    and `{"extend": […], "lease_ms": 30000}`; each is answered by a frame `results` with the status of every id, or by a
    `problem`. A client that does not read gets nothing meanwhile: others do.

    A stream ends with `end` and its `reason`: `shutdown` (come again), `unavailable` (come again in a moment),
    `revoked`, `deleted`, `over`. Whoever goes away has what was sent to them until their leases end; what was taken and
    not sent goes back at once. 409: it is a PUSH subscription.
    """
    streaming = Streaming(services.puller, services.metrics)
    return await streaming.events(principal, [subscription_id], request.scope["query_string"])


@get(
    "/stream",
    operation_class=_StreamsOperation,
    opt=_OPT,
    responses=_EVENTS,
    tags=_TAGS,
    summary="Stream messages of several subscriptions",
)
async def streams(request: Asked, services: Given, principal: Caller) -> ASGIApp:
    """The same over several subscriptions, of any rooms, which are served in turn under one credit."""
    streaming = Streaming(services.puller, services.metrics)
    return await streaming.events(principal, None, request.scope["query_string"])


ROUTES: Final = (stream, streams)
