"""Write the answers of the protocol itself, as problems, before an application sees the request.

The security headers of every answer let a browser do nothing but show it.
"""

import hashlib
from base64 import b64encode
from http import HTTPStatus
from typing import Final

import msgspec

from rooms.api.errors import MEDIA_TYPE, TYPE_PREFIX, Problem
from rooms.api.openapi import STYLE
from rooms.api.server.head import METHODS

_PROBLEM_NAMES: Final = {
    HTTPStatus.BAD_REQUEST: "bad-request",
    HTTPStatus.METHOD_NOT_ALLOWED: "method-not-allowed",
    HTTPStatus.REQUEST_TIMEOUT: "timeout",
    HTTPStatus.REQUEST_URI_TOO_LONG: "too-large",
    HTTPStatus.EXPECTATION_FAILED: "expectation-failed",
    HTTPStatus.TOO_MANY_REQUESTS: "rate-limited",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "too-large",
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: "http-version",
}
CLOSE_REASONS: Final = {
    HTTPStatus.REQUEST_TIMEOUT: "slow_request",
    HTTPStatus.REQUEST_URI_TOO_LONG: "head_too_large",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "head_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "bodies",
}
"""The reasons that closed connections are counted by, other than `malformed`."""
_encode: Final = msgspec.json.Encoder().encode


class HeaderLines:
    """Format the headers that every answer has, once for each list of them."""

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._lines = b""

    def format(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return their lines. uvicorn makes a new list each second, for the date."""
        if headers is not self._headers:
            self._headers = headers
            self._lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        return self._lines


def problem_body(status: HTTPStatus, detail: str) -> bytes:
    """Return the problem of a request that reached no resource."""
    name = _PROBLEM_NAMES.get(status, "http")
    problem = Problem(
        type=TYPE_PREFIX + name, title=status.phrase, status=status, detail=detail, instance=""
    )
    return _encode(problem)


def error_response(status: HTTPStatus, detail: str, common_lines: bytes) -> bytes:
    """Return a complete last answer; `common_lines` are the header lines of every answer."""
    body = problem_body(status, detail)
    allow = f"allow: {', '.join(METHODS)}\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    own = (
        f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
        f"{allow}connection: close\r\n\r\n"
    )
    return b"HTTP/1.1 %d %b\r\n%b%b%b" % (
        status,
        status.phrase.encode(),
        common_lines,
        own.encode(),
        body,
    )


# The page at /schema has one style sheet, which the policy names by its hash; nothing else may load
# or run.
_STYLE_HASH: Final = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
SECURITY_HEADERS: Final = [
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    (
        "content-security-policy",
        (
            f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    ("x-frame-options", "DENY"),
    ("cache-control", "no-store"),
]
"""Answers contain tenants' data: no browser or proxy may store them."""
