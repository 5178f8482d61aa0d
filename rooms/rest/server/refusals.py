"""Write the answers that the protocol itself gives, before an application sees the request: problems, as all others."""

from http import HTTPStatus
from typing import Final

import msgspec

from rooms.rest.problems import MEDIA_TYPE, TYPE_PREFIX, Problem
from rooms.rest.server.head import METHODS

_NAMES: Final = {
    HTTPStatus.BAD_REQUEST: "bad-request",
    HTTPStatus.METHOD_NOT_ALLOWED: "method-not-allowed",
    HTTPStatus.REQUEST_TIMEOUT: "timeout",
    HTTPStatus.REQUEST_URI_TOO_LONG: "too-large",
    HTTPStatus.EXPECTATION_FAILED: "expectation-failed",
    HTTPStatus.TOO_MANY_REQUESTS: "rate-limited",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "too-large",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "http-version",
}
_encode: Final = msgspec.json.Encoder().encode


def problem_body(status: HTTPStatus, detail: str) -> bytes:
    """Return the problem of a request that no resource has seen."""
    name = _NAMES.get(status, "http")
    problem = Problem(type=TYPE_PREFIX + name, title=status.phrase, status=status, detail=detail, instance="")
    return _encode(problem)


def refusal(status: HTTPStatus, detail: str, common: bytes) -> bytes:
    """Return the whole answer, after which the connection is closed; `common` are header lines that every answer has."""
    body = problem_body(status, detail)
    allow = f"allow: {', '.join(METHODS)}\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    own = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n{allow}connection: close\r\n\r\n"
    return b"HTTP/1.1 %d %b\r\n%b%b%b" % (status, status.phrase.encode(), common, own.encode(), body)
