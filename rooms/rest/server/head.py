"""Read the head of a request strictly: what two servers could read differently is refused, never guessed."""

from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import httptools

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request line with all headers, and of all trailers."""
MAX_HEADERS: Final = 100
CHUNKED: Final = -1
"""The length of a body that comes in chunks."""
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
_KNOWN: Final = frozenset(method.encode() for method in METHODS)
_LINE_PARTS: Final = 3
_LENGTH_DIGITS: Final = 18
_SINGLE: Final = (b"host", b"content-length", b"transfer-encoding", b"authorization")
"""Headers whose meaning depends on which of several is read."""
_HOST: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~%!$&'()*+,;=:[]")
_HIDDEN: Final = frozenset({b"upgrade", b"http2-settings"})

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, in the order in which they came."""


class RefusedError(Exception):
    """Say that the connection cannot be read any further; `status` and the text are its last answer."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class WholeReader:
    """Read requests that come whole with llhttp. It keeps what it read last: `given`, `body`, `lasting`."""

    __slots__ = ("_begun", "_ended", "_parser", "_past_head", "body", "count", "given", "lasting")

    def __init__(self) -> None:
        self._clear()
        self._parser = httptools.HttpRequestParser(self)

    def _clear(self) -> None:
        self.given: dict[bytes, bytes] = {}
        self.body = b""
        self.count = self._begun = self._ended = 0
        self._past_head = False

    def read(self, data: bytes) -> bool:
        """Read one request that is all of `data`, without headers that come twice; False: it is anything else."""
        self._clear()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._ended = 0
        if self._begun == self._ended == 1 and len(self.given) == self.count:
            return True
        self._parser = httptools.HttpRequestParser(self)
        return False

    def on_message_begin(self) -> None:
        """Count."""
        self._begun += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are dropped."""
        if not self._past_head:
            self.count += 1
            self.given[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Note whether the connection outlives the request."""
        self._past_head = True
        self.lasting = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self.body += body

    def on_message_complete(self) -> None:
        """Count."""
        self._ended += 1


class _HeadReader:
    """Read one head with llhttp."""

    def __init__(self, text: bytes) -> None:
        self.headers: Headers = []
        self.target = b""
        self.lasting = self.complete = False
        self._parser = httptools.HttpRequestParser(self)
        with suppress(httptools.HttpParserUpgrade, httptools.HttpParserError):
            self._parser.feed_data(text)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.lasting = self._parser.should_keep_alive()
        self.complete = True


class Head:
    """Hold a request without its body."""

    __slots__ = ("continues", "given", "headers", "lasting", "length", "method", "target", "version", "websocket")

    def __init__(self, method: bytes, target: bytes, version: str, headers: Headers, *, lasting: bool) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.headers = headers
        self.given = dict(reversed(headers))
        self.lasting = lasting
        self.length = 0
        """Of the body, or CHUNKED."""
        self.continues = False
        """Its sender waits for 100 Continue."""
        self.websocket = False
        """It asks for a WebSocket."""


def read_head(text: bytes) -> Head:
    """Read a head, which ends with its empty line. RefusedError says what is wrong with it."""
    lines = text.count(b"\r\n") - 2  # neither the request line nor the empty one
    if lines > MAX_HEADERS:
        raise too_many_headers()
    line = text[: text.find(b"\r\n")]
    parts = line.split(b" ")
    if len(parts) != _LINE_PARTS:
        raise _malformed("the request line must read METHOD TARGET HTTP/1.1, with one space between them")
    method, _, protocol = parts
    if protocol not in {b"HTTP/1.1", b"HTTP/1.0"}:
        if protocol.startswith(b"HTTP/") and protocol[5:].replace(b".", b"").isdigit():
            raise RefusedError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this server speaks HTTP/1.1")
        raise _malformed("the request line must end with HTTP/1.1")
    if method not in _KNOWN:
        raise RefusedError(
            HTTPStatus.METHOD_NOT_ALLOWED, f"no resource takes this method; there are {', '.join(METHODS)}"
        )
    reader = _HeadReader(text)
    if not reader.complete:
        raise _malformed(
            "the head is no HTTP/1.1: each header is one line `Name: value` that ends with CR LF, without control characters"
        )
    return _checked(method, protocol[5:].decode(), reader)


def _checked(method: bytes, version: str, reader: _HeadReader) -> Head:
    head = Head(method, reader.target, version, reader.headers, lasting=reader.lasting and version == "1.1")
    given = head.given
    if len(head.headers) != len(given):
        for name in _SINGLE:
            if sum(known == name for known, _ in head.headers) > 1:
                raise _malformed(f"the header {name.decode()} may come once")
    _check_host(head)
    _check_target(head)
    _read_length(head)
    expected = given.get(b"expect")
    if expected is not None and version == "1.1":
        if expected.lower() != b"100-continue":
            raise RefusedError(HTTPStatus.EXPECTATION_FAILED, "Expect may be 100-continue only")
        head.continues = True
    _read_upgrade(head)
    return head


def _check_host(head: Head) -> None:
    host = head.given.get(b"host")
    if host is None:
        if head.version == "1.1":
            raise _malformed("the header Host is missing")
    elif not _HOST.issuperset(host):
        raise _malformed("the header Host is no HOST or HOST:PORT")


def _check_target(head: Head) -> None:
    """Bring the absolute form into the usual one; its authority replaces Host (RFC 9112, 3.2.2)."""
    target = head.target
    if b"#" in target:
        raise _malformed("the target of a request has no fragment")
    if target.startswith(b"/") or (target == b"*" and head.method == b"OPTIONS"):
        return
    scheme, colon, rest = target.partition(b"://")
    if not colon or scheme.lower() not in {b"http", b"https"}:
        raise _malformed("the target of a request is a path that begins with /")
    try:
        authority = urlsplit(target.decode("ascii")).netloc.encode()
    except ValueError:
        raise _malformed("the target of the request is no URL") from None
    if not authority or not _HOST.issuperset(authority):
        raise _malformed("the target of the request names no host")
    path = rest[len(authority) :]
    if not path.startswith(b"/"):
        path = b"*" if not path and head.method == b"OPTIONS" else b"/" + path
    head.target = path
    head.headers = [(name, authority if name == b"host" else value) for name, value in head.headers]
    head.given[b"host"] = authority


def _read_length(head: Head) -> None:
    length, coding = head.given.get(b"content-length"), head.given.get(b"transfer-encoding")
    if coding is not None:
        if length is not None:
            raise _malformed("a request has either Content-Length or Transfer-Encoding")
        if head.version != "1.1" or coding.lower() != b"chunked":
            raise _malformed("Transfer-Encoding may be chunked only, in HTTP/1.1")
        head.length = CHUNKED
    elif length is not None:
        if not length.isdigit() or len(length) > _LENGTH_DIGITS:
            raise _malformed("Content-Length is no number of bytes")
        head.length = int(length)


def _read_upgrade(head: Head) -> None:
    """Hide an upgrade that is none of ours: RFC 9110, 7.8 has it ignored, and the request answered as it is."""
    upgrade = head.given.get(b"upgrade")
    if upgrade is None:
        return
    tokens = _tokens(head.headers, b"connection")
    if upgrade.lower() == b"websocket" and b"upgrade" in tokens and head.method == b"GET":
        head.websocket = head.version == "1.1" and not head.length
    if not head.websocket:
        head.headers = [header for header in head.headers if header[0] not in _HIDDEN]
        head.given = dict(reversed(head.headers))
        # With an upgrade, llhttp does not say what the other tokens mean.
        head.lasting = head.version == "1.1" and b"close" not in tokens


def _tokens(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> set[bytes]:
    return {token.strip().lower() for known, value in headers if known == name for token in value.split(b",")}


def _malformed(detail: str) -> RefusedError:
    return RefusedError(HTTPStatus.BAD_REQUEST, detail)


def too_many_headers() -> RefusedError:
    """Make the error for more headers, or trailers, than are read."""
    return RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request may have {MAX_HEADERS} headers")
