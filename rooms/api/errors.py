"""Render errors as problem details (RFC 9457), by one table."""

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec

from rooms.errors import (
    BrokerUnavailableError,
    ConflictError,
    ElectionUnavailableError,
    EncodedBodyError,
    FieldProblem,
    ForbiddenError,
    InvalidError,
    KeyReusedError,
    LeaseExpiredError,
    MagazineUnavailableError,
    MalformedError,
    NotFoundError,
    QueryTimeoutError,
    QuotaConflictError,
    QuotaExceededError,
    QuotaTooLargeError,
    RateLimitedError,
    RoomsError,
    SuspendedError,
    TooLargeError,
    TransientError,
    UnauthenticatedError,
)
from rooms.outages import OUTAGES, REQUESTS_REFUSED
from rooms.publishing.batch_bounds import BatchTooCostlyError
from rooms.validation_messages import validation_message

_log = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:rooms:problem:"
RETRY_AFTER_S: Final = 1
_MAX_FIELDS: Final = 100
_MAX_TEXT: Final = 1000
_MAX_DETAIL: Final = 4000


class ProblemField(msgspec.Struct, kw_only=True):
    """Name one wrong field of the request."""

    field: str
    message: str


class AckIdStatus(msgspec.Struct, kw_only=True):
    """Describe the status of one ack id: acked, nacked, extended, late or unknown."""

    ack_id: str
    status: str


class Problem(msgspec.Struct, kw_only=True):
    """Describe problem details (RFC 9457).

    `errors` names every wrong field of a body, or the first one of a body beyond 64 KiB. `results`
    where all ack ids of the request are late; `limit` names the quota that is used up.
    """

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[ProblemField] = []
    results: list[AckIdStatus] | msgspec.UnsetType = msgspec.UNSET
    limit: str | msgspec.UnsetType = msgspec.UNSET


# The first class that fits decides; the name ends the problem's type.
_PROBLEMS: Final[Sequence[tuple[type[RoomsError], HTTPStatus, str, str]]] = (
    (
        EncodedBodyError,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "encoded-body",
        "The body is encoded",
    ),
    (MalformedError, HTTPStatus.BAD_REQUEST, "malformed", "The body is not JSON"),
    (InvalidError, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid", "Fields of the request are wrong"),
    (UnauthenticatedError, HTTPStatus.UNAUTHORIZED, "unauthenticated", "A valid API key is needed"),
    (
        SuspendedError,
        HTTPStatus.FORBIDDEN,
        "organisation-suspended",
        "The organisation is suspended",
    ),
    (ForbiddenError, HTTPStatus.FORBIDDEN, "forbidden", "The key may not do this"),
    (NotFoundError, HTTPStatus.NOT_FOUND, "not-found", "Not found"),
    (LeaseExpiredError, HTTPStatus.CONFLICT, "late", "The leases have ended"),
    (
        KeyReusedError,
        HTTPStatus.CONFLICT,
        "idempotency-key-reused",
        "The Idempotency-Key was used for another request",
    ),
    (ConflictError, HTTPStatus.CONFLICT, "conflict", "Conflict with the present state"),
    (
        BatchTooCostlyError,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "batch-too-costly",
        "A batch makes too much work",
    ),
    (TooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", "Beyond a limit"),
    (
        QuotaExceededError,
        HTTPStatus.TOO_MANY_REQUESTS,
        "quota-exceeded",
        "A quota is used up",
    ),
    (RateLimitedError, HTTPStatus.TOO_MANY_REQUESTS, "rate-limited", "Too many requests"),
    (TransientError, HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", "Try again soon"),
)
_BUSY_DETAIL: Final = "the service cannot do this right now; retry, nothing is lost"
_UNAVAILABLE_DETAILS: Final[Mapping[type[TransientError], str]] = {
    ElectionUnavailableError: (
        "the store of the election (ELECTION_URL, else PostgreSQL) does not answer, "
        "so the leader and the shares of work are unknown. "
        "Start it, or check its log; publishing and delivery continue without it"
    ),
    BrokerUnavailableError: (
        "the broker (BROKER_URL, else PostgreSQL) does not answer. Start it, or check its log; "
        "publishing continues without it; retry, nothing is lost"
    ),
    MagazineUnavailableError: (
        "the store of the magazines (MAGAZINE_URL, else PostgreSQL) does not answer or is full. "
        "Start it, or check its log; "
        "publishing to rooms continues without it; retry, nothing is lost"
    ),
}
_NAMES_BY_STATUS: Final = {
    HTTPStatus.BAD_REQUEST: "malformed",
    HTTPStatus.NOT_FOUND: "not-found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method-not-allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too-large",
}
# Litestar names it in its text only.
_MISSING: Final = re.compile(r"Missing required query parameter '(?P<name>[^']+)'")
_INTERNAL_ERROR: Final = (HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "Something went wrong here")
TITLES: Final = (*(title for *_, title in _PROBLEMS), _INTERNAL_ERROR[-1])
"""The titles of all problems."""
_encode: Final = msgspec.json.Encoder().encode


def to_problem(error: RoomsError, instance: str) -> tuple[Problem, dict[str, str]]:
    """Return the problem and the headers for an error. One that is not in the table is a 500."""
    found = next(
        (
            (status, name, title)
            for kind, status, name, title in _PROBLEMS
            if isinstance(error, kind)
        ),
        None,
    )
    if found is None:
        _log.error("an error without a problem type: %s", error, exc_info=error)
        found = _INTERNAL_ERROR
    errors: list[ProblemField] = []
    if isinstance(error, InvalidError):
        errors = [
            ProblemField(field=_cut(problem.field), message=_cut(problem.message))
            for problem in error.problems[:_MAX_FIELDS]
        ]
    detail = _unavailable_detail(error) if isinstance(error, TransientError) else str(error)
    problem = _make_problem(
        *found, detail=_cut(detail, _MAX_DETAIL), instance=instance, errors=errors
    )
    if isinstance(error, LeaseExpiredError):
        problem.results = [
            AckIdStatus(ack_id=ack_id, status=status) for ack_id, status in error.results
        ]
    if isinstance(error, QuotaExceededError | QuotaConflictError | QuotaTooLargeError):
        problem.limit = error.limit
    return problem, _problem_headers(error)


def explain_encoding(error: RoomsError, encoding: bytes | None) -> RoomsError:
    """Return the error to answer with, if the body of the request has this Content-Encoding.

    Only where it was refused: a header does no harm to a body that is JSON.
    """
    if not isinstance(error, MalformedError) or not encoding or encoding.lower() == b"identity":
        return error
    return EncodedBodyError(
        f"the body has the Content-Encoding {encoding.decode('latin-1')}; send JSON without one"
    )


def _cut(text: str, limit: int = _MAX_TEXT) -> str:
    """Return a text as a problem has it: what it repeats of the request may be long."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def render(error: RoomsError, instance: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers (with content type) and body, for hot routes that bypass Litestar."""
    problem, headers = to_problem(error, instance)
    return problem.status, {"content-type": MEDIA_TYPE, **headers}, _encode(problem)


def to_field_path(path: str) -> str:
    """Return a msgspec path (`$.types[0].name`) as problems name it (`types[0].name`)."""
    # A value of a mapping is `$.headers[...]`: msgspec does not say which.
    return (
        path.rpartition("` in `")[2].removeprefix("$").replace("[...]", "").removeprefix(".")
        or "body"
    )


def _unavailable_detail(error: TransientError) -> str:
    # The message of a store may name hosts and files: it is only for the log.
    if isinstance(error, RateLimitedError | QueryTimeoutError):
        return str(error)
    OUTAGES.record_failure(error, REQUESTS_REFUSED)
    return next(
        (text for kind, text in _UNAVAILABLE_DETAILS.items() if isinstance(error, kind)),
        _BUSY_DETAIL,
    )


def _problem_headers(error: RoomsError) -> dict[str, str]:
    match error:
        case UnauthenticatedError():
            return {"www-authenticate": 'Bearer realm="rooms"'}
        case RateLimitedError():
            return {"retry-after": str(error.retry_after_s)}
        case TransientError():
            return {"retry-after": str(RETRY_AFTER_S)}
        case _:
            return {}


def _make_problem(
    status: HTTPStatus,
    name: str,
    title: str,
    *,
    detail: str,
    instance: str,
    errors: list[ProblemField],
) -> Problem:
    return Problem(
        type=TYPE_PREFIX + name,
        title=title,
        status=status.value,
        detail=detail,
        instance=instance,
        errors=errors,
    )


def _to_response(problem: Problem, headers: Mapping[str, str]) -> Response[Problem]:
    return Response(
        problem, status_code=problem.status, media_type=MEDIA_TYPE, headers=dict(headers)
    )


def handle_rooms_error(request: Request[Any, Any, Any], error: RoomsError) -> Response[Problem]:
    """Handle a `RoomsError` for Litestar, and count a schema or filter beyond a bound."""
    if isinstance(error, InvalidError):
        for bound in {problem.bound for problem in error.problems if problem.bound}:
            request.app.state.services.metrics.bounds_refused.labels(bound).inc()
    encoding = request.headers.get("content-encoding", "").encode("latin-1")
    return _to_response(*to_problem(explain_encoding(error, encoding), request.scope["path"]))


def handle_http_exception(
    request: Request[Any, Any, Any], error: HTTPException
) -> Response[Problem]:
    """Handle what Litestar itself refuses: routes, methods, parameters, sizes."""
    instance = request.scope["path"]
    if isinstance(error, ValidationException) and isinstance(error.extra, list):
        names: Mapping[str, str] = request.route_handler.opt.get("query", {})
        kinds = request.route_handler.parsed_fn_signature.parameters
        problems = []
        for item in error.extra:
            if isinstance(item, dict):
                key = str(item.get("key", "request"))
                kind = kinds[key].annotation if key in kinds else None
                message = validation_message(str(item.get("message", "is wrong")), kind)
                problems.append(FieldProblem(names.get(key, key), message))
        if any(problem.field == "data" for problem in problems):
            return handle_rooms_error(
                request, MalformedError("the body is empty; it takes a JSON object")
            )
        return handle_rooms_error(request, InvalidError(*problems))
    if isinstance(error, ValidationException) and (missing := _MISSING.match(error.detail)):
        left_out = FieldProblem(missing["name"], "is missing")
        return handle_rooms_error(request, InvalidError(left_out))
    status = HTTPStatus(error.status_code)
    name = _NAMES_BY_STATUS.get(status, "http")
    detail = error.detail
    match status:
        case HTTPStatus.NOT_FOUND:
            detail = f"nothing is at {instance}; /schema shows what there is"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("allow", "others")
            detail = f"{request.method} is not for {instance}; it takes {allowed}"
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            limit = request.route_handler.resolve_request_max_body_size()
            detail = f"the body of this request may have {limit} bytes"
    problem = _make_problem(
        status, name, status.phrase, detail=detail, instance=instance, errors=[]
    )
    return _to_response(
        problem, {name: str(value) for name, value in (error.headers or {}).items()}
    )


def handle_unexpected_error(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    """Handle a bug: log its trace, and answer without details."""
    _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    detail = "the request could not be answered; the log of the service says why"
    return _to_response(
        _make_problem(*_INTERNAL_ERROR, detail=detail, instance=request.scope["path"], errors=[]),
        {},
    )


def documented_responses(*statuses: int) -> dict[int, ResponseSpec]:
    """Return a handler's `responses`: the problems of every route, and `statuses`."""
    titles = {status.value: title for _, status, _, title in _PROBLEMS}
    return {
        status: ResponseSpec(
            Problem, generate_examples=False, description=titles[status], media_type=MEDIA_TYPE
        )
        for status in sorted({400, 401, 403, 404, 413, 422, 429, 503, *statuses})
    }
