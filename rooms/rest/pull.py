"""`/v1/subscriptions/{id}/pull`, `/ack`, `/nack`, `/extend`: PULL. The first two are answered by the front, by the same
service.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from litestar import Request, Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody
from litestar.status_codes import HTTP_200_OK
from msgspec import UNSET, Struct, UnsetType

from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.pulling.puller import Puller
from rooms.pulling.request import AckRequest, ExtendRequest, NackRequest, PullRequest
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import ExactSchema, schema_of
from rooms.rest.front import JSON, read_request
from rooms.rest.paths import IdPath
from rooms.rest.problems import LeaseResult, documented
from rooms.rest.services import Services

_TAGS: Final = ["pull"]
_PULL: Final = needs(Scope.SUBSCRIBE)

Asked = Request[Any, Principal, Any]


class PulledMessage(Struct, kw_only=True):
    """A message under a lease; `attempt` counts from 0, `headers` is left out where the publisher gave none."""

    ack_id: str
    delivery_id: str
    message_id: str
    attempt: int
    event_type: str
    version: int
    correlation_id: str
    published_at: datetime
    payload: Any
    headers: dict[str, str] | UnsetType = UNSET


class Pulled(Struct, kw_only=True):
    """Messages, the highest priority first, then by due time; none where nothing is due."""

    messages: list[PulledMessage]


class LeaseResults(Struct, kw_only=True):
    """What became of each ack id, in the order of the request."""

    results: list[LeaseResult]


@dataclass
class _PullOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(PullRequest, required=False)


@dataclass
class _AckOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(AckRequest)


@dataclass
class _NackOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(NackRequest)


@dataclass
class _ExtendOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _body(ExtendRequest)


def _body(kind: type[Struct], *, required: bool = True) -> RequestBody:
    return RequestBody(content={JSON: OpenAPIMediaType(schema=ExactSchema(schema_of(kind)))}, required=required)


def _told(kind: type[Struct], description: str) -> Mapping[int, ResponseSpec]:
    return {
        HTTP_200_OK: ResponseSpec(kind, generate_examples=False, description=description),
        **documented(409),
    }


_RESULTS: Final = _told(LeaseResults, "What became of each ack id")


@post(
    "/subscriptions/{subscription_id:str}/pull",
    operation_class=_PullOperation,
    opt=_PULL,
    status_code=HTTP_200_OK,
    responses=_told(Pulled, "What was leased"),
    tags=_TAGS,
    summary="Pull messages",
)
async def pull(request: Asked, services: Given, principal: Caller, subscription_id: IdPath) -> Response[bytes]:
    """Messages that are due, each under a lease; after `wait_ms` at the latest, none where there were none.

    An answer holds at most 4 MiB of payload, or one message: there may be more even where fewer came than were asked
    for. A paused subscription gives none. What is neither acknowledged nor given back comes again when its lease ends,
    with the next `attempt`. Without a body the defaults hold. 409: it is a PUSH subscription.
    """
    body = await _read(request, services)
    return _answer(await _service(services).pull(principal, subscription_id, body, request.receive))


@post(
    "/subscriptions/{subscription_id:str}/ack",
    operation_class=_AckOperation,
    opt=_PULL,
    status_code=HTTP_200_OK,
    responses=_RESULTS,
    tags=_TAGS,
    summary="Acknowledge messages",
)
async def ack(request: Asked, services: Given, principal: Caller, subscription_id: IdPath) -> Response[bytes]:
    """Each message is done (`acked`, also when it was before), or its lease was over (`late`), or it was never under
    one here (`unknown`).

    409: every lease was over, nothing changed; the problem has the results too.
    """
    body = await _read(request, services)
    return _answer(await _service(services).ack(principal, subscription_id, body))


@post(
    "/subscriptions/{subscription_id:str}/nack",
    operation_class=_NackOperation,
    opt=_PULL,
    status_code=HTTP_200_OK,
    responses=_RESULTS,
    tags=_TAGS,
    summary="Give messages back",
)
async def nack(request: Asked, services: Given, principal: Caller, subscription_id: IdPath) -> Response[bytes]:
    """Each message comes again after `delay_ms` (`nacked`), or is sidelined where `max_receives` is spent, or expires
    where it would come too late. Otherwise `late` or `unknown`, and 409, as for an ack.
    """
    body = await _read(request, services)
    return _answer(await _service(services).nack(principal, subscription_id, body))


@post(
    "/subscriptions/{subscription_id:str}/extend",
    operation_class=_ExtendOperation,
    opt=_PULL,
    status_code=HTTP_200_OK,
    responses=_RESULTS,
    tags=_TAGS,
    summary="Extend leases",
)
async def extend(request: Asked, services: Given, principal: Caller, subscription_id: IdPath) -> Response[bytes]:
    """Each lease ends `lease_ms` from now (`extended`), though never after its message expires. Otherwise `late` or
    `unknown`, and 409, as for an ack.
    """
    body = await _read(request, services)
    return _answer(await _service(services).extend(principal, subscription_id, body))


async def _read(request: Asked, services: Services) -> bytes:
    body, _ = await read_request(request.scope["headers"], request.receive, services.settings.max_body_bytes)
    return body


def _service(services: Services) -> Puller:
    puller: Puller = services.puller
    return puller


def _answer(answer: tuple[int, bytes]) -> Response[bytes]:
    status, body = answer
    return Response(body, status_code=status, media_type=JSON)


ROUTES: Final = (pull, ack, nack, extend)
