"""Problems as RFC 9457 tells them: one table from errors to answers."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec

from rooms.complaints import complaint
from rooms.errors import (
    BrokerUnavailableError,
    ConflictError,
    ElectionUnavailableError,
    FieldProblem,
    ForbiddenError,
    InvalidError,
    LateError,
    MagazineUnavailableError,
    MalformedError,
    NotFoundError,
    RateLimitedError,
    RoomsError,
    TooLargeError,
    TransientError,
    UnauthenticatedError,
)
from rooms.outages import OUTAGES

_log = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:rooms:problem:"
RETRY_AFTER_S: Final = 1


class ProblemField(msgspec.Struct, kw_only=True):
    """One wrong field of the request."""

    field: str
    message: str


class LeaseResult(msgspec.Struct, kw_only=True):
    """What became of one ack id: acked, nacked, extended, late or unknown."""

    ack_id: str
    status: str


class Problem(msgspec.Struct, kw_only=True):
    """Problem details, RFC 9457. `results` stands where a request's ack ids are all late."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[ProblemField] = []
    results: list[LeaseResult] | msgspec.UnsetType = msgspec.UNSET


# The first class that fits decides; the name ends the problem's type.
_TABLE: Final[Sequence[tuple[type[RoomsError], HTTPStatus, str, str]]] = (
    (MalformedError, HTTPStatus.BAD_REQUEST, "malformed", "The body is not JSON"),
    (InvalidError, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid", "Fields of the request are wrong"),
    (UnauthenticatedError, HTTPStatus.UNAUTHORIZED, "unauthenticated", "A valid API key is needed"),
    (ForbiddenError, HTTPStatus.FORBIDDEN, "forbidden", "The key lacks the scope"),
    (NotFoundError, HTTPStatus.NOT_FOUND, "not-found", "There is no such thing"),
    (LateError, HTTPStatus.CONFLICT, "late", "The leases are over"),
    (ConflictError, HTTPStatus.CONFLICT, "conflict", "Not in a state for this"),
    (TooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", "Beyond a limit"),
    (RateLimitedError, HTTPStatus.TOO_MANY_REQUESTS, "rate-limited", "Too many requests"),
    (TransientError, HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", "Try again soon"),
)
_BUSY: Final = "the service cannot take this right now; nothing is lost by asking again"
_MISSING: Final[Mapping[type[TransientError], str]] = {
    ElectionUnavailableError: (
        "the store of the election (ELECTION_URL, else PostgreSQL) does not answer, so it is unknown which process leads and which one does what. "
        "Start it, or look at its log; publishing and delivering go on without it"
    ),
    BrokerUnavailableError: (
        "the broker (BROKER_URL, else PostgreSQL) does not answer. Start it, or look at its log; publishing goes on without it, and nothing is "
        "lost by asking again"
    ),
    MagazineUnavailableError: (
        "the store of the magazines (MAGAZINE_URL, else PostgreSQL) does not answer or takes no more. Start it, or look at its log; "
        "publishing to rooms goes on without it, and nothing is lost by asking again"
    ),
}
_BY_STATUS: Final = {
    HTTPStatus.BAD_REQUEST: "malformed",
    HTTPStatus.NOT_FOUND: "not-found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method-not-allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too-large",
}
_INTERNAL: Final = (HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "Something went wrong here")
REFUSED: Final = "requests were refused"
"""What follows for the requests of an outage, as the log counts them."""
_encode: Final = msgspec.json.Encoder().encode


def problem_of(error: RoomsError, instance: str) -> tuple[Problem, dict[str, str]]:
    """The problem that tells of an error, and the headers that go with it. What is in no row is a 500."""
    found = next(((status, name, title) for kind, status, name, title in _TABLE if isinstance(error, kind)), None)
    if found is None:
        _log.error("an error without an answer: %s", error, exc_info=error)
        found = _INTERNAL
    errors: list[ProblemField] = []
    if isinstance(error, InvalidError):
        errors = [ProblemField(field=problem.field, message=problem.message) for problem in error.problems]
    detail = _unavailable(error) if isinstance(error, TransientError) else str(error)
    problem = _problem(*found, detail=detail, instance=instance, errors=errors)
    if isinstance(error, LateError):
        problem.results = [LeaseResult(ack_id=ack_id, status=status) for ack_id, status in error.results]
    return problem, _headers(error)


def render(error: RoomsError, instance: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (content type included) and body: what the hot routes send without Litestar."""
    problem, headers = problem_of(error, instance)
    return problem.status, {"content-type": MEDIA_TYPE, **headers}, _encode(problem)


def field_path(path: str) -> str:
    """A msgspec path (`$.event_types[0].name`) as fields are named in problems (`event_types[0].name`)."""
    # A value of a mapping is `$.headers[...]`: msgspec does not say which.
    return path.rpartition("` in `")[2].removeprefix("$").replace("[...]", "").removeprefix(".") or "body"


def _unavailable(error: TransientError) -> str:
    # What a store said is for the log; it may name hosts and files.
    if isinstance(error, RateLimitedError):
        return str(error)
    OUTAGES.failed(error, REFUSED)
    return next((text for kind, text in _MISSING.items() if isinstance(error, kind)), _BUSY)


def _headers(error: RoomsError) -> dict[str, str]:
    match error:
        case UnauthenticatedError():
            return {"www-authenticate": 'Bearer realm="rooms"'}
        case RateLimitedError():
            return {"retry-after": str(error.retry_after_s)}
        case TransientError():
            return {"retry-after": str(RETRY_AFTER_S)}
        case _:
            return {}


def _problem(
    status: HTTPStatus, name: str, title: str, *, detail: str, instance: str, errors: list[ProblemField]
) -> Problem:
    return Problem(
        type=TYPE_PREFIX + name, title=title, status=status.value, detail=detail, instance=instance, errors=errors
    )


def _answer(problem: Problem, headers: Mapping[str, str]) -> Response[Problem]:
    return Response(problem, status_code=problem.status, media_type=MEDIA_TYPE, headers=dict(headers))


def answer_rooms_error(request: Request[Any, Any, Any], error: RoomsError) -> Response[Problem]:
    """Litestar's handler for the house's own errors."""
    return _answer(*problem_of(error, request.scope["path"]))


def answer_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[Problem]:
    """Litestar's handler for what Litestar itself refuses: routes, methods, parameters, sizes."""
    instance = request.scope["path"]
    if isinstance(error, ValidationException) and isinstance(error.extra, list):
        names: Mapping[str, str] = request.route_handler.opt.get("query", {})
        kinds = request.route_handler.parsed_fn_signature.parameters
        problems = []
        for item in error.extra:
            if isinstance(item, dict):
                key = str(item.get("key", "request"))
                kind = kinds[key].annotation if key in kinds else None
                message = complaint(str(item.get("message", "is wrong")), kind)
                problems.append(FieldProblem(names.get(key, key), message))
        if any(problem.field == "data" for problem in problems):
            return answer_rooms_error(request, MalformedError("the body is empty; it takes a JSON object"))
        return answer_rooms_error(request, InvalidError(*problems))
    status = HTTPStatus(error.status_code)
    name = _BY_STATUS.get(status, "http")
    detail = error.detail
    match status:
        case HTTPStatus.NOT_FOUND:
            detail = f"nothing is at {instance}; /schema shows what there is"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.method} is not for {instance}; it takes {(error.headers or {}).get('allow', 'others')}"
    problem = _problem(status, name, status.phrase, detail=detail, instance=instance, errors=[])
    return _answer(problem, {name: str(value) for name, value in (error.headers or {}).items()})


def answer_anything(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """Litestar's handler for bugs: logged with their trace, told without it."""
    _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    detail = "the request could not be answered; the log of the service says why"
    return _answer(_problem(*_INTERNAL, detail=detail, instance=request.scope["path"], errors=[]), {})


def documented(*statuses: int) -> dict[int, ResponseSpec]:
    """A handler's `responses`: the problems every route may answer with, and `statuses` on top."""
    titles = {status.value: title for _, status, _, title in _TABLE}
    return {
        status: ResponseSpec(Problem, generate_examples=False, description=titles[status], media_type=MEDIA_TYPE)
        for status in sorted({400, 401, 403, 404, 413, 422, 429, 503, *statuses})
    }
