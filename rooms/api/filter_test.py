"""Serve the test of a subscription's filter, or of another one, on a message."""

from typing import Annotated, Any, Final

import msgspec
from litestar import post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import (
    CHANGES_NOTHING,
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.codec import Body
from rooms.api.params import IdPath
from rooms.api.subscription_bodies import FilterExpression
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog import subscriptions as records
from rooms.db.connection import transaction
from rooms.domain.delivery_task import DEFAULT_PRIORITY
from rooms.domain.message_headers import MAX_HEADERS
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError, TooLargeError
from rooms.publishing.cel_filter import FilterInput, MessageFilter, load_filter
from rooms.publishing.request import MAX_TEXT


class FilterTestRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Hold a message to test. `filter`: test this one instead of the subscription's."""

    payload: Any
    headers: Annotated[dict[str, str], Meta(max_length=MAX_HEADERS)] | None = None
    event_type: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    event_version: Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)] = 1
    ordering_key: Annotated[str, Meta(max_length=MAX_TEXT)] | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] = DEFAULT_PRIORITY
    filter: FilterExpression | None = None


class FilterTestResponse(Struct, kw_only=True):
    """Describe whether the message would be delivered; a filter with an `error` lets it pass."""

    matches: bool
    error: str | None


@post(
    "/subscriptions/{subscription_id:str}/filter/test",
    status_code=200,
    dto=Body[FilterTestRequest],
    return_dto=None,
    opt={
        **for_portals(require_scopes(Scope.MANAGE, Scope.OPERATE, allows=OF_SUBSCRIPTIONS)),
        CHANGES_NOTHING: True,
    },
    tags=["subscriptions"],
    summary="Test a filter",
)
async def try_filter(
    data: JSONBody[FilterTestRequest],
    services: ServicesDep,
    principal: Caller,
    subscription_id: IdPath,
) -> FilterTestResponse:
    """Test the subscription's filter, or another one, on a message; event types do not count."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await records.find_subscription(connection, principal, identity)
    if data.filter is not None:
        chosen = MessageFilter(data.filter)
    elif found.filter is not None:
        chosen = load_filter(found.filter)
    else:
        return FilterTestResponse(matches=True, error=None)
    subject = FilterInput(
        payload=_encode_payload(data.payload, services.settings.max_payload_bytes),
        headers=data.headers or {},
        event_type=data.event_type,
        event_version=data.event_version,
        ordering_key=data.ordering_key,
        priority=data.priority,
    )
    result = await services.publisher.checker.evaluate_filter(
        principal.organisation_id, chosen, subject
    )
    return FilterTestResponse(matches=result.matches, error=result.error)


def _encode_payload(payload: object, limit: int) -> bytes:
    try:
        text = msgspec.json.encode(payload)
    except (ValueError, OverflowError, RecursionError) as exc:
        raise InvalidError(FieldProblem("payload", str(exc))) from exc
    if len(text) > limit:
        raise TooLargeError(f"payload: {len(text)} bytes; the limit is {limit}")
    return text


ROUTES: Final = [try_filter]
