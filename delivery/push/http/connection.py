"""Hold one HTTP/1.1 connection to an endpoint, one exchange at a time, and count every byte."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from delivery.push.errors import AttemptFailedError, StaleConnectionError
from rooms.domain.attempt import ErrorClass
from rooms.domain.ids import OrganisationId

Origin = tuple[str, str, int]
"""Scheme, host and port as the target names them."""
PoolKey = tuple[OrganisationId, Origin]
"""Only requests of one organisation to one origin share connections."""

KEPT_BODY_BYTES = 1024
_FIRST_STATUS = 100
_FIRST_FINAL_STATUS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bound the sender's connections, bytes and seconds.

    `max_connections`: all connections, those being opened included; one for each attempt at a
    time. `max_per_organisation`, `max_per_endpoint`: limits within that; None: no limit of their
    own. `max_age_s`, `max_requests`: after that a connection is closed when it becomes idle.
    `head_bytes`: of a response, interim ones included. `body_bytes`: of a body on the wire, of
    which the first `kept_body_bytes` are kept. `sweep_s`: how often deadlines are checked, and so
    how late a time-out may come.
    """

    max_connections: int = 512
    max_per_organisation: int | None = None
    max_per_endpoint: int | None = None
    max_idle_per_host: int = 64
    idle_s: float = 30.0
    max_age_s: float = 600.0
    max_requests: int = 10_000
    head_bytes: int = 32 * 1024
    body_bytes: int = 64 * 1024
    kept_body_bytes: int = KEPT_BODY_BYTES
    sweep_s: float = 0.25


class HttpConnection(asyncio.BaseProtocol):
    """Exchange requests and responses with `address`, a vetted address of the host in `key`.

    `expires_at`: the end of the exchange or of idling, checked by the pool's sweep. `retire_at`:
    after it no further exchange begins.
    """

    __slots__ = (
        "_body_start",
        "_complete",
        "_exchanges",
        "_head",
        "_headers",
        "_limits",
        "_loop",
        "_on_closed",
        "_parser",
        "_received_bytes",
        "_transport",
        "_waiter",
        "address",
        "body_head",
        "expires_at",
        "key",
        "retire_at",
        "reusable",
        "status",
    )

    def __init__(
        self,
        key: PoolKey,
        address: str,
        limits: HttpLimits,
        on_closed: Callable[["HttpConnection"], None],
    ) -> None:
        self.key = key
        self.address = address
        self.expires_at = inf
        self.retire_at = inf
        self.reusable = True
        self._limits = limits
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._exchanges = 0
        self._complete = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.body_head = b""
        self._head = b""
        """The bytes of the head, and what came together with its end."""
        self._headers: dict[bytes, bytes] | None = None
        self._received_bytes = 0
        # -1: the head is not complete.
        self._body_start = -1

    def exchange(self, request: bytes, deadline: float) -> asyncio.Future[None]:
        """Send a request; the future is done when `status` and the other fields hold the response.

        Fails with AttemptFailedError, or StaleConnectionError if the same request may be sent
        again.
        """
        transport = self._transport
        assert transport is not None
        self.expires_at = deadline
        self._exchanges += 1
        if self._exchanges > 1:
            self._reset()
            self._complete = False
        self._waiter = waiter = self._loop.create_future()
        transport.write(request)
        return waiter

    def make_idle(self, now: float) -> bool:
        """Become idle; return False if this connection cannot carry another exchange."""
        transport = self._transport
        # An endpoint that responds before it has read the request leaves the rest in the buffer.
        if not self.reusable or transport is None or transport.get_write_buffer_size():
            return False
        if now >= self.retire_at or self._exchanges >= self._limits.max_requests:
            return False
        self._waiter = None
        self._head = b""
        self.expires_at = now + self._limits.idle_s
        return True

    def abort(self) -> None:
        """Close at once. A second call has no effect."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_closed(self) -> bool:
        """Return whether the transport has reported that it is closed."""
        return self._parser is None

    def header(self, name: bytes) -> str | None:
        """Return a header of the response by its lower-case name; None if there is none."""
        if self._headers is None:
            self._headers = _read_headers(self._head)
        value = self._headers.get(name)
        return None if value is None else value.strip().decode("latin-1")

    def on_expired(self) -> None:
        """Fail the exchange because `expires_at` has passed."""
        if self._received_bytes == 0:
            self._fail(ErrorClass.TIMEOUT, "no answer in time")
        else:
            self._fail(
                ErrorClass.TIMEOUT,
                f"the answer was not complete in time ({self._received_bytes} bytes came)",
            )

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        waiter, parser = self._waiter, self._parser
        if waiter is None or waiter.done() or parser is None:
            self.abort()
            return
        before = self._received_bytes
        self._received_bytes = seen = before + len(data)
        if self._body_start < 0:
            self._head = self._head + data if before else data
        try:
            if seen > self._limits.head_bytes and self._body_start < 0:
                room = self._limits.head_bytes - before
                parser.feed_data(data[:room])
                if self._body_start < 0:
                    self._fail(
                        ErrorClass.TOO_LARGE,
                        f"the answer's head exceeds {self._limits.head_bytes} bytes",
                    )
                    return
                data = data[room:]
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as exc:
            self.reusable = False
            if not self._complete:
                reason = "an upgrade without request" if isinstance(exc, HttpParserUpgrade) else exc
                self._fail(ErrorClass.PROTOCOL, f"the answer is not HTTP: {reason}")
                return
        if (
            self._body_start >= 0
            and not self._complete
            and seen > self._body_start + self._limits.body_bytes
        ):
            # The status is known, and the rest of the body is not needed.
            self._complete = True
            self.abort()
        if self._complete and not waiter.done():
            self.expires_at = inf
            waiter.set_result(None)

    def eof_received(self) -> None:
        self.reusable = False
        if self._body_start >= 0 and not self._complete and self._ends_at_close():
            self._complete = True
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f" ({exc})" if exc is not None else ""
        if self._received_bytes == 0:
            self._fail(
                ErrorClass.CLOSED,
                f"the connection was closed before an answer{reason}",
                stale=self._exchanges > 1,
            )
        else:
            self._fail(ErrorClass.CLOSED, f"the connection was closed within the answer{reason}")
        # Connection and parser refer to each other; otherwise only the garbage collector frees
        # them.
        self._parser = None
        self._on_closed(self)

    def _ends_at_close(self) -> bool:
        coding = self.header(b"transfer-encoding")
        if coding is not None:
            return not coding.lower().endswith("chunked")
        return self.header(b"content-length") is None

    def _fail(self, error: ErrorClass, detail: str, *, stale: bool = False) -> None:
        self.abort()
        self.expires_at = inf
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(
                StaleConnectionError(error, detail) if stale else AttemptFailedError(error, detail)
            )

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._complete:
            self.reusable = False

    def on_headers_complete(self) -> None:
        # Data after a complete response belongs to no request.
        if self._complete or self._parser is None:
            return
        self.status = status = self._parser.get_status_code()
        if status >= _FIRST_FINAL_STATUS:
            self._body_start = self._received_bytes
        elif status < _FIRST_STATUS:
            self._fail(ErrorClass.PROTOCOL, f"the answer is not HTTP: its status is {status:03}")

    def on_body(self, body: bytes) -> None:
        room = self._limits.kept_body_bytes - len(self.body_head)
        if room > 0 and not self._complete:
            self.body_head += body[:room]

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self.status >= _FIRST_FINAL_STATUS and not self._complete:
            self._complete = True
            self.reusable = self.reusable and self._parser.should_keep_alive()


class _HeaderCollector:
    """Collect the headers of a final response, as httptools' parser reads them.

    Headers of few responses are read, and collecting them on arrival costs a third of the parsing.
    """

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.parser = HttpResponseParser(self)
        self._complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        # The first of a name counts. Trailers are not headers (RFC 9110, 6.5).
        if not self._complete:
            self.headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        if self.parser.get_status_code() >= _FIRST_FINAL_STATUS:
            self._complete = True
        else:
            self.headers.clear()


def _read_headers(head: bytes) -> dict[bytes, bytes]:
    """Return the headers of the final response in `head` by their names in lower case."""
    collector = _HeaderCollector()
    # What follows the head may be anything.
    with suppress(HttpParserError, HttpParserUpgrade):
        collector.parser.feed_data(head)
    return collector.headers


class PlainHttpConnection(HttpConnection, asyncio.Protocol):
    """Read without TLS: the transport passes bytes of the right size."""

    __slots__ = ()


class TlsHttpConnection(HttpConnection, asyncio.BufferedProtocol):
    """Read with TLS into a buffer that all connections of a loop share.

    Without it the ssl module maps and unmaps 256 KiB for every read, which costs more than the rest
    of a send.
    """

    __slots__ = ("_buffer",)

    def __init__(
        self,
        key: PoolKey,
        address: str,
        limits: HttpLimits,
        on_closed: Callable[[HttpConnection], None],
        buffer: memoryview,
    ) -> None:
        super().__init__(key, address, limits, on_closed)
        self._buffer = buffer

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 asyncio's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))
