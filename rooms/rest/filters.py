"""The filters that lists of messages and of deliveries share."""

from typing import Annotated, Final

from litestar.params import QueryParameter

from rooms.domain.states import State
from rooms.rest.pages import parse_time
from rooms.storage.filters import Filter

_MAX_INT4: Final = 0x7FFF_FFFF

EventType = Annotated[str | None, QueryParameter(description="Only this event type.")]
Version = Annotated[int | None, QueryParameter(ge=1, le=_MAX_INT4, description="Only this version of it.")]
Correlation = Annotated[str | None, QueryParameter(description="Only what carries this correlation id.")]
BusinessKey = Annotated[str | None, QueryParameter(description="Only what was published with this business key.")]
CallerId = Annotated[
    str | None, QueryParameter(name="id", description="Only the message that its publisher gave this id.")
]
# `state` itself is a name that Litestar keeps for its own.
DeliveryState = Annotated[State | None, QueryParameter(name="state", description="Only with this state.")]


def to_filter(
    *,
    since: str | None,
    until: str | None,
    event_type: str | None,
    version: int | None,
    state: State | None,
    correlation_id: str | None,
    business_key: str | None = None,
) -> Filter:
    """The filter that the query parameters make. InvalidError names the one that is wrong."""
    return Filter(
        since=parse_time("since", since),
        until=parse_time("until", until),
        event_type=event_type,
        version=version,
        state=state,
        correlation_id=correlation_id,
        business_key=business_key,
    )
