"""Render errors with the statuses of GovStack's specification: wrong fields are 400, not 422."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from litestar import Request, Response
from litestar.exceptions import HTTPException

from rooms.api.errors import Problem, handle_http_exception, handle_rooms_error
from rooms.errors import NotFoundError, RoomsError

NOT_THERE: Final = "there is no such room, event type, subscription or event for this caller"


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
