"""Read the head of a request strictly: ambiguous heads are refused, never guessed."""

from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import httptools

MAX_HEAD_BYTES: Final = 64 * 1024
"""The size of a request line with all headers, and of all trailers."""
MAX_HEADERS: Final = 100
CHUNKED: Final = -1
"""The length of a body that comes in chunks."""
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
_KNOWN_METHODS: Final = frozenset(method.encode() for method in METHODS)
_LINE_PARTS: Final = 3
_LENGTH_DIGITS: Final = 18
_SINGLE_HEADERS: Final = (
    b"host",
    b"content-length",
    b"transfer-encoding",
    b"authorization",
    b"x-govstack-client",
    b"x-forwarded-client-cert",
)
"""Headers that must not come twice, because their first or last value would decide."""
_HOST_BYTES: Final = frozenset(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~%!$&'()*+,;=:[]"
)
_FORWARDED_FOR: Final = b"x-forwarded-for"
_HIDDEN_HEADERS: Final = frozenset({b"upgrade", b"http2-settings"})

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, in the order of the request."""


class RequestRejectedError(Exception):
    """Refuse to read the connection any further; `status` and the text are its last answer."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _OtherRequestError(Exception):
    """Stop llhttp: the fast path does not take what comes."""


class RequestParser:
    """Parse complete requests with llhttp; the attributes describe the last one."""

    __slots__ = (
        "_begun",
        "_complete",
        "_parser",
        "body",
        "header_count",
        "header_map",
        "keep_alive",
    )

    def __init__(self) -> None:
        self._reset()
        self._parser = httptools.HttpRequestParser(self)

    def _reset(self) -> None:
        self.header_map: dict[bytes, bytes] = {}
        self.body = b""
        self.header_count = 0
        self._begun = self._complete = False

    def read(self, data: bytes) -> bool:
        """Read one request that is all of `data`, without repeated headers; False: it is not.

        A body in chunks is not read either: each chunk, of one byte perhaps, is a call.
        """
        self._reset()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._complete = False
        if self._complete and len(self.header_map) == self.header_count:
            return True
        self._parser = httptools.HttpRequestParser(self)
        return False

    def on_message_begin(self) -> None:
        """Stop at a second request."""
        if self._begun:
            raise _OtherRequestError
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header without the blanks around it."""
        self.header_count += 1
        self.header_map[name.lower()] = value.strip(b" \t")

    def on_headers_complete(self) -> None:
        """Note whether the connection stays open after the request."""
        if b"transfer-encoding" in self.header_map:
            raise _OtherRequestError
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self.body += body

    def on_message_complete(self) -> None:
        """Note the end of the request."""
        self._complete = True


class _HeadParser:
    """Read one head with llhttp."""

    def __init__(self, text: bytes) -> None:
        self.headers: Headers = []
        self.target = b""
        self.keep_alive = self.complete = False
        self._parser = httptools.HttpRequestParser(self)
        with suppress(httptools.HttpParserUpgrade, httptools.HttpParserError):
            self._parser.feed_data(text)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.keep_alive = self._parser.should_keep_alive()
        self.complete = True


class RequestHead:
    """Hold a request without its body."""

    __slots__ = (
        "expects_continue",
        "header_map",
        "headers",
        "keep_alive",
        "length",
        "method",
        "target",
        "version",
        "wants_websocket",
    )

    def __init__(
        self, method: bytes, target: bytes, version: str, headers: Headers, *, keep_alive: bool
    ) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.headers = headers
        self.header_map = dict(reversed(headers))
        self.keep_alive = keep_alive
        self.length = 0
        """The length of the body, or CHUNKED."""
        self.expects_continue = False
        """The client waits for 100 Continue."""
        self.wants_websocket = False
        """The request is for a WebSocket."""


def read_head(text: bytes) -> RequestHead:
    """Read a head that ends with its empty line. RequestRejectedError names its fault."""
    lines = text.count(b"\r\n") - 2  # neither the request line nor the empty one
    if lines > MAX_HEADERS:
        raise too_many_headers()
    line = text[: text.find(b"\r\n")]
    parts = line.split(b" ")
    if len(parts) != _LINE_PARTS:
        raise _bad_request(
            "the request line must read METHOD TARGET HTTP/1.1, with one space between them"
        )
    method, _, protocol = parts
    if protocol not in {b"HTTP/1.1", b"HTTP/1.0"}:
        if protocol.startswith(b"HTTP/") and protocol[5:].replace(b".", b"").isdigit():
            raise RequestRejectedError(
                HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this server speaks HTTP/1.1"
            )
        raise _bad_request("the request line must end with HTTP/1.1")
    if method not in _KNOWN_METHODS:
        raise RequestRejectedError(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"no resource takes this method; there are {', '.join(METHODS)}",
        )
    reader = _HeadParser(text)
    if not reader.complete:
        raise _bad_request(
            "the head is not HTTP/1.1: each header is one line `Name: value` "
            "that ends with CR LF, without control characters"
        )
    return _build_head(method, protocol[5:].decode(), reader)


def _build_head(method: bytes, version: str, reader: _HeadParser) -> RequestHead:
    head = RequestHead(
        method,
        reader.target,
        version,
        reader.headers,
        keep_alive=reader.keep_alive and version == "1.1",
    )
    given = head.header_map
    if len(head.headers) != len(given):
        for name in _SINGLE_HEADERS:
            if sum(known == name for known, _ in head.headers) > 1:
                raise _bad_request(f"the header {name.decode()} may come once")
        _join_forwarded_for(head)
    _check_host(head)
    _check_target(head)
    _read_length(head)
    expected = given.get(b"expect")
    if expected is not None and version == "1.1":
        if expected.lower() != b"100-continue":
            raise RequestRejectedError(
                HTTPStatus.EXPECTATION_FAILED, "Expect may be 100-continue only"
            )
        head.expects_continue = True
    _read_upgrade(head)
    return head


def _join_forwarded_for(head: RequestHead) -> None:
    """Make one header of several: some proxies add a line of their own."""
    addresses = [value for name, value in head.headers if name == _FORWARDED_FOR]
    if len(addresses) > 1:
        joined = b", ".join(addresses)
        head.headers = [header for header in head.headers if header[0] != _FORWARDED_FOR]
        head.headers.append((_FORWARDED_FOR, joined))
        head.header_map[_FORWARDED_FOR] = joined


def _check_host(head: RequestHead) -> None:
    host = head.header_map.get(b"host")
    if host is None:
        if head.version == "1.1":
            raise _bad_request("the header Host is missing")
    elif not _HOST_BYTES.issuperset(host):
        raise _bad_request("the header Host is no HOST or HOST:PORT")


def _check_target(head: RequestHead) -> None:
    """Convert an absolute target; its authority replaces Host (RFC 9112, 3.2.2)."""
    target = head.target
    if b"#" in target:
        raise _bad_request("the target of a request has no fragment")
    if target.startswith(b"/") or (target == b"*" and head.method == b"OPTIONS"):
        return
    scheme, colon, rest = target.partition(b"://")
    if not colon or scheme.lower() not in {b"http", b"https"}:
        raise _bad_request("the target of a request is a path that begins with /")
    try:
        authority = urlsplit(target.decode("ascii")).netloc.encode()
    except ValueError:
        raise _bad_request("the target of the request is no URL") from None
    if not authority or not _HOST_BYTES.issuperset(authority):
        raise _bad_request("the target of the request names no host")
    path = rest[len(authority) :]
    if not path.startswith(b"/"):
        path = b"*" if not path and head.method == b"OPTIONS" else b"/" + path
    head.target = path
    head.headers = [(name, authority if name == b"host" else value) for name, value in head.headers]
    head.header_map[b"host"] = authority


def _read_length(head: RequestHead) -> None:
    length, coding = (
        head.header_map.get(b"content-length"),
        head.header_map.get(b"transfer-encoding"),
    )
    if coding is not None:
        if length is not None:
            raise _bad_request("a request has either Content-Length or Transfer-Encoding")
        if head.version != "1.1" or coding.lower() != b"chunked":
            raise _bad_request("Transfer-Encoding may be chunked only, in HTTP/1.1")
        head.length = CHUNKED
    elif length is not None:
        if not length.isdigit() or len(length) > _LENGTH_DIGITS:
            raise _bad_request("Content-Length is no number of bytes")
        head.length = int(length)


def _read_upgrade(head: RequestHead) -> None:
    """Hide an upgrade to an unsupported protocol: RFC 9110, 7.8 says to ignore it."""
    upgrade = head.header_map.get(b"upgrade")
    if upgrade is None:
        return
    tokens = _header_tokens(head.headers, b"connection")
    if upgrade.lower() == b"websocket" and b"upgrade" in tokens and head.method == b"GET":
        head.wants_websocket = head.version == "1.1" and not head.length
    if not head.wants_websocket:
        head.headers = [header for header in head.headers if header[0] not in _HIDDEN_HEADERS]
        head.header_map = dict(reversed(head.headers))
        # With an upgrade, llhttp does not report the other tokens.
        head.keep_alive = head.version == "1.1" and b"close" not in tokens


def _header_tokens(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> set[bytes]:
    return {
        token.strip().lower()
        for known, value in headers
        if known == name
        for token in value.split(b",")
    }


def _bad_request(detail: str) -> RequestRejectedError:
    return RequestRejectedError(HTTPStatus.BAD_REQUEST, detail)


def too_many_headers() -> RequestRejectedError:
    """Return the error for too many headers or trailers."""
    return RequestRejectedError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request may have {MAX_HEADERS} headers"
    )
