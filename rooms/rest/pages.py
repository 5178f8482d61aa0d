"""Lists by page: newest first, continued by an opaque cursor that cannot be made up."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

import msgspec
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import ParameterKwarg, QueryParameter

from rooms.errors import FieldProblem, InvalidError
from rooms.storage.sealing import Seal

T = TypeVar("T")

MAX_LIMIT: Final = 200
_LONGEST_CURSOR: Final = 512
QUERY: Final = "query"
"""The key in a handler's `opt` under which its query parameters stand."""
READS_QUERY: Final = "reads_query"
"""The key in a handler's `opt` of one that reads its query by itself."""
_NOT_QUERY: Final = frozenset({"services", "principal", "data", "request", "headers", "body", "state", "scope"})

Limit = Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT, description="How many items a page holds at most.")]
Cursor = Annotated[
    str | None,
    QueryParameter(description="Where to go on: the `next_cursor` of the page before, with the same filters."),
]
Since = Annotated[
    str | None,
    QueryParameter(description="Made at this time or later, RFC 3339.", schema_extra={"format": "date-time"}),
]
Until = Annotated[
    str | None,
    QueryParameter(description="Made before this time, RFC 3339.", schema_extra={"format": "date-time"}),
]


def seal_cursor(seal: Seal, of: str, position: str | None) -> str | None:
    """A cursor of the list named `of`, after the item at `position`; None where nothing comes after it."""
    if position is None:
        return None
    return urlsafe_b64encode(seal.seal(position.encode(), _purpose(of))).rstrip(b"=").decode("ascii")


def open_cursor(seal: Seal, of: str, cursor: str | None) -> str | None:
    """The position a cursor stands for. InvalidError where it is not one of this list's."""
    if cursor is None:
        return None
    try:
        if len(cursor) > _LONGEST_CURSOR:
            raise ValueError("too long")
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        return seal.open(urlsafe_b64decode(padded), _purpose(of)).decode()
    except ValueError as exc:
        raise InvalidError(FieldProblem("cursor", "is not a next_cursor of this list")) from exc


def cut(items: Sequence[T], limit: int, position: Callable[[T], str]) -> tuple[Sequence[T], str | None]:
    """The page out of one item more than fits, and the position of its last item where there is more behind it."""
    if len(items) <= limit:
        return items, None
    page = items[:limit]
    return page, position(page[-1])


def parse_time(field: str, text: str | None) -> datetime | None:
    """An RFC 3339 time with its offset, in UTC. InvalidError names the parameter."""
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


def _purpose(of: str) -> bytes:
    return b"cursor " + of.encode()


def query_names(handler: BaseRouteHandler, path_names: frozenset[str]) -> dict[str, str]:
    """The query parameters a handler declares: argument → name in the query."""
    found = {}
    for name, field in handler.parsed_fn_signature.parameters.items():
        kwarg = field.kwarg_definition
        if name in path_names or name in _NOT_QUERY:
            continue
        if not isinstance(kwarg, ParameterKwarg):
            found[name] = name
        elif not kwarg.header and not kwarg.cookie:
            found[name] = kwarg.query or kwarg.name or name
    return found


def declare_query(handler: BaseRouteHandler, path_names: frozenset[str]) -> None:
    """Remember for `check_query` what a handler declares."""
    handler.opt[QUERY] = query_names(handler, path_names)


def check_query(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """A guard: a query parameter that nobody reads is a mistake that would stay hidden. InvalidError names it."""
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
