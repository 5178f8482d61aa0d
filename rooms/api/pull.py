"""Declare PULL for Litestar: `/v1/subscriptions/{id}/pull`, `/ack`, `/nack`, `/extend`.

`rooms.api.fast_routes` answers the first two by the same service.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from litestar import Request, Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody
from litestar.status_codes import HTTP_200_OK
from msgspec import UNSET, Struct, UnsetType

from delivery.pull.requests import AckRequest, ExtendRequest, NackRequest, PullRequest
from delivery.pull.service import PullService
from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, moves_messages
from rooms.api.codec import RawSchema, inlined_schema
from rooms.api.deps import ApiServices
from rooms.api.errors import AckIdStatus, documented_responses
from rooms.api.fast_routes import JSON, read_request
from rooms.api.params import IdPath
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope

_TAGS: Final = ["pull"]
_SUBSCRIBE: Final = moves_messages(Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)

AuthenticatedRequest = Request[Any, Principal, Any]


class MessagePublisher(Struct, kw_only=True):
    """Name the organisation that published a message, and the application of its key."""

    organisation_id: str
    application: str | UnsetType = UNSET


class PulledMessage(Struct, kw_only=True):
    """Describe a message under a lease until `lease_until`.

    `attempt` counts from 0; `delay_ms` is the delay before it. `sequence` numbers the messages of
    one ordering key, `replayed` says that a replay and not the publish sent it. A field that the
    message does not have is absent; `publisher` is only where the service itself published.
    """

    ack_id: str
    delivery_id: str
    message_id: str
    attempt: int
    event_type: str
    version: int
    correlation_id: str
    published_at: datetime
    priority: int
    delay_ms: int
    lease_until: datetime
    payload: Any
    publisher: MessagePublisher | UnsetType = UNSET
    expires_at: datetime | UnsetType = UNSET
    ordering_key: str | UnsetType = UNSET
    sequence: int | UnsetType = UNSET
    business_key: str | UnsetType = UNSET
    replayed: Literal[True] | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET


class PullResponse(Struct, kw_only=True):
    """Describe messages by priority, then by due time; none where none is due."""

    messages: list[PulledMessage]


class AckIdStatuses(Struct, kw_only=True):
    """Describe the status of each ack id, in the order of the request."""

    results: list[AckIdStatus]


@dataclass
class _PullOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _request_body(PullRequest, required=False)


@dataclass
class _AckOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _request_body(AckRequest)


@dataclass
class _NackOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _request_body(NackRequest)


@dataclass
class _ExtendOperation(Operation):
    def __post_init__(self) -> None:
        self.request_body = _request_body(ExtendRequest)


def _request_body(kind: type[Struct], *, required: bool = True) -> RequestBody:
    return RequestBody(
        content={JSON: OpenAPIMediaType(schema=RawSchema(inlined_schema(kind)))}, required=required
    )


def _response_spec(kind: type[Struct], description: str) -> Mapping[int, ResponseSpec]:
    return {
        HTTP_200_OK: ResponseSpec(kind, generate_examples=False, description=description),
        **documented_responses(409),
    }


_RESULTS: Final = _response_spec(AckIdStatuses, "The status of each ack id")


@post(
    "/subscriptions/{subscription_id:str}/pull",
    operation_class=_PullOperation,
    opt=_SUBSCRIBE,
    status_code=HTTP_200_OK,
    responses=_response_spec(PullResponse, "The leased messages"),
    tags=_TAGS,
    summary="Pull messages",
)
async def pull(
    request: AuthenticatedRequest, services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> Response[bytes]:
    """Lease messages that are due; wait up to `wait_ms` for the first one.

    An answer has at most 4 MiB of payload, or one message: more may be due even where fewer came
    than were requested. A paused subscription returns none. A message that is neither acknowledged
    nor given back returns when its lease ends, with the next `attempt`. Without a body the defaults
    hold. 409: it is a PUSH subscription.
    """
    body = await _read_body(request, services)
    return _to_response(
        await _pull_service(services).pull(principal, subscription_id, body, request.receive)
    )


@post(
    "/subscriptions/{subscription_id:str}/ack",
    operation_class=_AckOperation,
    opt=_SUBSCRIBE,
    status_code=HTTP_200_OK,
    responses=_RESULTS,
    tags=_TAGS,
    summary="Acknowledge messages",
)
async def ack(
    request: AuthenticatedRequest, services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> Response[bytes]:
    """Complete each message: `acked` (also if it was before), `late` or `unknown`.

    `late`: its lease had ended. 409: every lease had ended and nothing changed; the problem has the
    results too.
    """
    body = await _read_body(request, services)
    return _to_response(await _pull_service(services).ack(principal, subscription_id, body))


@post(
    "/subscriptions/{subscription_id:str}/nack",
    operation_class=_NackOperation,
    opt=_SUBSCRIBE,
    status_code=HTTP_200_OK,
    responses=_RESULTS,
    tags=_TAGS,
    summary="Give messages back",
)
async def nack(
    request: AuthenticatedRequest, services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> Response[bytes]:
    """Give each message back for `delay_ms` (`nacked`).

    It is sidelined where `max_receives` is spent, and expires where it would come too late.
    Otherwise `late` or `unknown`, and 409, as for an ack.
    """
    body = await _read_body(request, services)
    return _to_response(await _pull_service(services).nack(principal, subscription_id, body))


@post(
    "/subscriptions/{subscription_id:str}/extend",
    operation_class=_ExtendOperation,
    opt=_SUBSCRIBE,
    status_code=HTTP_200_OK,
    responses=_RESULTS,
    tags=_TAGS,
    summary="Extend leases",
)
async def extend(
    request: AuthenticatedRequest, services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> Response[bytes]:
    """Extend each lease to `lease_ms` from now (`extended`), also where its message expires before.

    Otherwise `late` or `unknown`, and 409, as for an ack.
    """
    body = await _read_body(request, services)
    return _to_response(await _pull_service(services).extend(principal, subscription_id, body))


async def _read_body(request: AuthenticatedRequest, services: ApiServices) -> bytes:
    body, _ = await read_request(
        request.scope["headers"], request.receive, services.settings.max_resource_body_bytes
    )
    return body


def _pull_service(services: ApiServices) -> PullService:
    pull_service: PullService = services.pull_service
    return pull_service


def _to_response(answer: tuple[int, bytes]) -> Response[bytes]:
    status, body = answer
    return Response(body, status_code=status, media_type=JSON)


ROUTES: Final = (pull, ack, nack, extend)
