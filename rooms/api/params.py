"""Parse path and query parameters, and the filters that lists share.

Path text that cannot be an id is answered as an unknown id: 404.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import ParameterKwarg, PathParameter, QueryParameter

from rooms.api.pagination import MAX_LIMIT
from rooms.db.queries.messages import ListFilter
from rooms.domain.ids import MAX_ROOM, MessageId, RoomId, SubscriptionId
from rooms.domain.names import MAX_NAME, NAME_CHARACTERS, NAME_PATTERN
from rooms.domain.principal import Principal
from rooms.domain.state_machine import State
from rooms.errors import FieldProblem, InvalidError, NotFoundError

QUERY: Final = "query"
"""The key in a handler's `opt` for its query parameters."""
READS_QUERY: Final = "reads_query"
"""The key in the `opt` of a handler that reads its query itself."""
_NOT_QUERY_ARGUMENTS: Final = frozenset(
    {
        "services",
        "principal",
        "change",
        "creator",
        "address",
        "data",
        "request",
        "headers",
        "body",
        "state",
        "scope",
    }
)

Since = Annotated[
    str | None,
    QueryParameter(
        description="Created at this time or later, RFC 3339.", schema_extra={"format": "date-time"}
    ),
]
Until = Annotated[
    str | None,
    QueryParameter(
        description="Created before this time, RFC 3339.", schema_extra={"format": "date-time"}
    ),
]


def parse_time(field: str, text: str | None) -> datetime | None:
    """Return an RFC 3339 time with an offset in UTC. InvalidError names the parameter."""
    if text is None:
        return None
    try:
        found = msgspec.convert(text, datetime)
        if found.tzinfo is None:
            raise ValueError("no offset")
        return found.astimezone(UTC)
    except (msgspec.ValidationError, ValueError, OverflowError) as exc:
        message = "is not a time like 2026-01-31T12:00:00Z (a '+' in the offset is written %2B)"
        raise InvalidError(FieldProblem(field, message)) from exc


def time_problems(times: Mapping[str, datetime | None]) -> Iterator[FieldProblem]:
    """Yield a problem for each time, by field, that PostgreSQL stores and Python cannot read."""
    for field, at in times.items():
        try:
            if at is not None:
                at.astimezone(UTC)
        except OverflowError:
            yield FieldProblem(field, "is not within the years 1 to 9999 in UTC")


def query_names(handler: BaseRouteHandler, path_names: frozenset[str]) -> dict[str, str]:
    """Return a handler's query parameters: argument → name in the query."""
    found = {}
    for name, field in handler.parsed_fn_signature.parameters.items():
        kwarg = field.kwarg_definition
        if name in path_names or name in _NOT_QUERY_ARGUMENTS:
            continue
        if not isinstance(kwarg, ParameterKwarg):
            found[name] = name
        elif not kwarg.header and not kwarg.cookie:
            found[name] = kwarg.query or kwarg.name or name
    return found


def register_query(handler: BaseRouteHandler, path_names: frozenset[str]) -> None:
    """Record a handler's query parameters for `reject_unknown_query`."""
    handler.opt[QUERY] = query_names(handler, path_names)


def reject_unknown_query(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Refuse query parameters that a route does not read. InvalidError names them."""
    if not connection.scope["query_string"] or handler.opt.get(READS_QUERY):
        return
    known = frozenset(handler.opt.get(QUERY, {}).values())
    problems = []
    given = connection.query_params.dict()
    for name, values in given.items():
        if name not in known:
            valid = f"; there are {', '.join(sorted(known))}" if known else ""
            problems.append(FieldProblem(name, f"there is no such query parameter{valid}"))
        elif len(values) > 1:
            problems.append(FieldProblem(name, "is given more than once"))
        elif "\x00" in values[0]:
            problems.append(FieldProblem(name, "contains the character U+0000"))
    if problems:
        raise InvalidError(*problems)


_ID_PATTERN: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_ID: Final = re.compile(_ID_PATTERN[1:-1])
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,9}")
_MAX_VERSION: Final = 0x7FFF_FFFF
_MAX_ROOM_LENGTH: Final = 11
MAX_ID_LENGTH: Final = 37
"""Characters of an id and its comma."""

RoomPath = Annotated[
    str,
    PathParameter(
        description="The room's id, a whole number.", schema_extra={"pattern": "^[1-9][0-9]{0,9}$"}
    ),
]
NameContains = Annotated[
    str | None,
    QueryParameter(
        max_length=MAX_NAME,
        description="Only those whose name contains this, in upper or lower case.",
    ),
]
RoomIds = Annotated[
    str | None,
    QueryParameter(
        name="id",
        max_length=MAX_LIMIT * _MAX_ROOM_LENGTH,
        description=f"Only the rooms of these ids, separated by commas, at most {MAX_LIMIT}.",
    ),
]
SubscriptionIds = Annotated[
    str | None,
    QueryParameter(
        name="id",
        max_length=MAX_LIMIT * MAX_ID_LENGTH,
        description=f"Only those of these ids, separated by commas, at most {MAX_LIMIT}.",
    ),
]
IdPath = Annotated[
    str, PathParameter(description="The id, a UUID.", schema_extra={"pattern": _ID_PATTERN})
]
NamePath = Annotated[
    str,
    PathParameter(
        description="The event type's name.",
        schema_extra={"pattern": NAME_PATTERN, "maxLength": MAX_NAME},
    ),
]
VersionPath = Annotated[
    str,
    PathParameter(
        description="The number of the version.", schema_extra={"pattern": "^[1-9][0-9]{0,9}$"}
    ),
]


def parse_room(text: str) -> RoomId:
    """Return a room's id. NotFoundError: the text cannot be one."""
    if not _NUMBER.fullmatch(text) or int(text) > MAX_ROOM:
        raise NotFoundError(
            "there is no such room: a path takes its id, a whole number; "
            "GET /v1/rooms?name=… finds it"
        )
    return RoomId(int(text))


def parse_id(text: str, kind: str) -> str:
    """Return an id. NotFoundError (there is no such `kind`): the text cannot be one."""
    if not _ID.fullmatch(text):
        raise NotFoundError(f"there is no such {kind}: its id is a UUID, in lower case")
    return text


def parse_filter_id(field: str, text: str | None) -> str | None:
    """Return an id by which a list is narrowed. InvalidError: the text cannot be one."""
    if text is not None and not _ID.fullmatch(text):
        raise InvalidError(FieldProblem(field, "is not an id: it is a UUID, in lower case"))
    return text


def parse_filter_subscriptions(field: str, text: str | None) -> set[SubscriptionId] | None:
    """Return the ids of a list with commas between them. InvalidError: one of them is not an id."""
    if text is None:
        return None
    ids = (parse_filter_id(field, one) for one in text.split(","))
    return {SubscriptionId(one) for one in ids if one is not None}


def parse_filter_rooms(field: str, text: str | None) -> set[RoomId] | None:
    """Return the rooms of a list of ids with commas between them. InvalidError: one is no id."""
    if text is None:
        return None
    ids = text.split(",")
    if not all(_NUMBER.fullmatch(one) and int(one) <= MAX_ROOM for one in ids):
        raise InvalidError(
            FieldProblem(field, f"is ids of rooms, whole numbers up to {MAX_ROOM}, as in 5,17")
        )
    if len(ids) > MAX_LIMIT:
        raise InvalidError(FieldProblem(field, f"has more than {MAX_LIMIT} ids"))
    return {RoomId(int(one)) for one in ids}


def parse_name(text: str) -> str:
    """Return an event type's name. NotFoundError: the text cannot be one."""
    if not NAME_CHARACTERS.fullmatch(text) or len(text) > MAX_NAME:
        raise NotFoundError("there is no such event type")
    return text


def parse_message(text: str) -> MessageId:
    """Return a message's id. NotFoundError: the text cannot be an id."""
    return MessageId(parse_id(text, "message"))


def parse_version(text: str) -> int:
    """Return a version's number. NotFoundError: the text cannot be one."""
    if not _NUMBER.fullmatch(text) or int(text) > _MAX_VERSION:
        raise NotFoundError("there is no such version")
    return int(text)


_MAX_INT4: Final = 0x7FFF_FFFF

WithPayload = Annotated[
    bool, QueryParameter(description="Whether to return headers and payload, if you may read them.")
]
EventType = Annotated[str | None, QueryParameter(description="Only this event type.")]
Version = Annotated[
    int | None, QueryParameter(ge=1, le=_MAX_INT4, description="Only this version of it.")
]
Correlation = Annotated[str | None, QueryParameter(description="Only with this correlation id.")]
OrderingKey = Annotated[str | None, QueryParameter(description="Only with this ordering key.")]
BusinessKey = Annotated[str | None, QueryParameter(description="Only with this business key.")]
CallerId = Annotated[
    str | None,
    QueryParameter(
        name="id",
        description="Only the message with this id of its publisher: of your organisation, or of "
        "`publisher_organisation_id`.",
    ),
]
PublisherOrganisation = Annotated[
    str | None,
    QueryParameter(
        name="publisher_organisation_id", description="Only published by this organisation."
    ),
]
PublisherApplication = Annotated[
    str | None,
    QueryParameter(
        name="application", description="Only published with a key of this application."
    ),
]
DeliveredTo = Annotated[
    str | None,
    QueryParameter(
        name="subscription_id", description="Only with a delivery to this subscription."
    ),
]
# Litestar reserves the name `state`.
DeliveryState = Annotated[
    State | None, QueryParameter(name="state", description="Only with this state.")
]


def to_filter(
    *,
    since: str | None,
    until: str | None,
    event_type: str | None,
    version: int | None,
    state: State | None,
    correlation_id: str | None,
    principal: Principal,
) -> ListFilter:
    """Return the filter of these query parameters, within the key's event types.

    InvalidError names the wrong parameter.
    """
    return ListFilter(
        since=parse_time("since", since),
        until=parse_time("until", until),
        event_type=event_type,
        version=version,
        state=state,
        correlation_id=correlation_id,
        event_types=principal.event_types,
    )
