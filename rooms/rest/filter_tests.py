"""`POST /v1/subscriptions/{id}/filter/test`: would this message pass?"""

from typing import Annotated, Any, Final

import msgspec
from litestar import post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.states import Scope
from rooms.errors import FieldProblem, InvalidError, TooLargeError
from rooms.publishing.filter import MessageFilter, Subject, kept_filter
from rooms.publishing.request import MAX_HEADERS, MAX_TEXT
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.paths import IdPath
from rooms.rest.problems import documented
from rooms.rest.subscription_fields import Filter
from rooms.rest.subscriptions import parse_subscription
from rooms.storage import subscriptions as records
from rooms.storage.transactions import transaction

_DEFAULT_PRIORITY: Final = 4


class FilterTest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message that was not published. `filter`: try this one instead of the subscription's."""

    payload: Any
    headers: Annotated[dict[str, str], Meta(max_length=MAX_HEADERS)] | None = None
    event_type: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    event_version: Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)] = 1
    ordering_key: Annotated[str, Meta(max_length=MAX_TEXT)] | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] = _DEFAULT_PRIORITY
    filter: Filter | None = None


class FilterVerdict(Struct, kw_only=True):
    """Whether the message would be delivered; with an `error` it is, as no message is lost for a filter's sake."""

    matches: bool
    error: str | None


@post(
    "/subscriptions/{subscription_id:str}/filter/test",
    status_code=200,
    dto=Body[FilterTest],
    return_dto=None,
    opt=needs(Scope.MANAGE, Scope.OPERATE),
    responses=documented(),
    tags=["subscriptions"],
    summary="Try a filter",
)
async def try_filter(
    data: JSONBody[FilterTest], services: Given, principal: Caller, subscription_id: IdPath
) -> FilterVerdict:
    """What the subscription's filter, or another one, says of a message. Nothing is published, and types do not count."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_subscription(connection, principal.organisation_id, identity)
    if data.filter is not None:
        chosen = MessageFilter(data.filter)
    elif found.filter is not None:
        chosen = kept_filter(found.filter)
    else:
        return FilterVerdict(matches=True, error=None)
    subject = Subject(
        payload=_payload(data.payload, services.settings.max_payload_bytes),
        headers=data.headers or {},
        event_type=data.event_type,
        event_version=data.event_version,
        ordering_key=data.ordering_key,
        priority=data.priority,
    )
    judgement = await services.publisher.checker.judge(principal.organisation_id, chosen, subject)
    return FilterVerdict(matches=judgement.matches, error=judgement.error)


def _payload(payload: object, limit: int) -> bytes:
    try:
        text = msgspec.json.encode(payload)
    except (ValueError, OverflowError, RecursionError) as exc:
        raise InvalidError(FieldProblem("payload", str(exc))) from exc
    if len(text) > limit:
        raise TooLargeError(f"payload: {len(text)} bytes; the limit is {limit}")
    return text


ROUTES: Final = [try_filter]
