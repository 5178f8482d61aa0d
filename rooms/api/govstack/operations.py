"""Declare what an operation of GovStack's interfaces answers, and render its errors.

Errors have the statuses of the specification: wrong fields are 400, not 422.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from litestar import Request, Response
from litestar.exceptions import HTTPException

from rooms.api.errors import Problem, handle_http_exception, handle_rooms_error
from rooms.errors import NotFoundError, RoomsError

OPERATION: Final = "govstack_operation"
"""The key in a handler's `opt` for its `Operation`."""
NOT_THERE: Final = "there is no such room, event type, subscription or event for this caller"


@dataclass(frozen=True, slots=True)
class Reply:
    """Describe one answer of an operation: its body's type (None: no body), and its headers."""

    description: str
    kind: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """The description of each header by name."""
    is_table: bool = field(default=False, kw_only=True)
    """It can be CSV, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Describe an operation: the type of its body, its query, and the answers of its own."""

    replies: Mapping[int, Reply]
    body: Any = None
    body_is_required: bool = True
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Description, schema and more of each query parameter by name."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers of the request."""

    def all_replies(self) -> Mapping[int, Reply]:
        """Return the answers of its own, and the problems that every operation may answer."""
        return dict(sorted({**COMMON_PROBLEMS, **self.replies}.items()))


def problem(description: str) -> Reply:
    """Return a reply that is a problem of RFC 9457."""
    return Reply(description, Problem)


COMMON_PROBLEMS: Final[dict[int, Reply]] = {
    400: problem("A header, a parameter or a field of the body is wrong"),
    401: problem("The caller is not authenticated"),
    403: problem("The caller may not do this, or names another member"),
    404: problem("There is no such thing for this caller"),
    413: problem("Beyond a limit"),
    429: problem("Too many requests, or a quota is used up"),
    503: problem("Try again soon"),
}
CONFLICT: Final = "Conflict with the present state"


def declare(operation: Operation) -> dict[str, Any]:
    """Return the entry of a handler's `opt`."""
    return {OPERATION: operation}


def handle_error(request: Request[Any, Any, Any], error: RoomsError) -> Response[Problem]:
    """Handle a `RoomsError` for Litestar."""
    return _as_bad_request(handle_rooms_error(request, error))


def handle_refusal(request: Request[Any, Any, Any], error: HTTPException) -> Response[Problem]:
    """Handle what Litestar itself refuses."""
    return _as_bad_request(handle_http_exception(request, error))


@contextmanager
def hiding() -> Iterator[None]:
    """Raise one NotFoundError for all: no text says whether something is there for others."""
    try:
        yield
    except NotFoundError as exc:
        raise NotFoundError(NOT_THERE) from exc


def _as_bad_request(response: Response[Problem]) -> Response[Problem]:
    if response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY:
        response.status_code = response.content.status = HTTPStatus.BAD_REQUEST.value
    return response
