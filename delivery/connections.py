"""One HTTP/1.1 connection to an endpoint, one exchange at a time: every byte of an answer is counted."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from delivery.bulkhead import PoolKey
from delivery.errors import AttemptFailedError, StaleConnectionError
from rooms.domain.attempt import ErrorClass

_FIRST_STATUS = 100
_FIRST_FINAL_STATUS = 200
_FIRST_FAILURE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the sender holds to, in connections, bytes and seconds.

    `max_connections`: of all endpoints together, those being opened included; give it one a slot of the caller's.
    `max_per_organisation`, `max_per_endpoint`: of these at most for one organisation, and for one origin of it; None: all.
    `max_age_s`, `max_requests`: after that a connection is closed instead of being kept.
    `head_bytes`: of an answer, interim ones included. `body_bytes`: of the body, as it comes over the wire; the first
    `kept_bytes` are kept. `sweep_s`: how often deadlines are looked at, so how late a time-out may come.
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
    kept_bytes: int = 1024
    sweep_s: float = 0.25


class Connection(asyncio.BaseProtocol):
    """A connection, plain or TLS, to `address`, one of the vetted addresses of the host in `key`.

    `expires`: when to give up on the exchange, or on being used again; the pool's sweep looks at it.
    `retires`: from then on it carries no further exchange.
    """

    __slots__ = (
        "_body_from",
        "_collected",
        "_complete",
        "_exchanges",
        "_headers",
        "_limits",
        "_loop",
        "_lost",
        "_parser",
        "_seen",
        "_transport",
        "_waiter",
        "address",
        "body_head",
        "expires",
        "key",
        "on_header",
        "retires",
        "reusable",
        "status",
    )

    def __init__(self, key: PoolKey, address: str, limits: Limits, lost: Callable[["Connection"], None]) -> None:
        self.key = key
        self.address = address
        self.expires = inf
        self.retires = inf
        self.reusable = True
        self._limits = limits
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._collected: dict[bytes, bytes] = {}
        # The parser calls this for each header. Of two by one name the first counts, and nothing of ours runs.
        self.on_header = self._collected.setdefault
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._exchanges = 0
        self._complete = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.body_head = b""
        self._collected.clear()
        self._headers = self._collected
        self._seen = 0
        # -1: the head has not come to its end.
        self._body_from = -1

    def exchange(self, request: bytes, deadline: float) -> asyncio.Future[None]:
        """Send a request; the result is there when `status` and its company are the answer's.

        Fails with AttemptFailedError, or StaleConnectionError where the same request may be sent again.
        """
        transport = self._transport
        assert transport is not None
        self.expires = deadline
        self._exchanges += 1
        if self._exchanges > 1:
            self._reset()
            self._complete = False
        self._waiter = waiter = self._loop.create_future()
        transport.write(request)
        return waiter

    def rest(self, now: float) -> bool:
        """Become idle; False where this connection cannot carry another exchange."""
        transport = self._transport
        # A request that was answered before it was read to its end leaves its rest in the buffer.
        if not self.reusable or transport is None or transport.get_write_buffer_size():
            return False
        if now >= self.retires or self._exchanges >= self._limits.max_requests:
            return False
        self._waiter = None
        self.expires = now + self._limits.idle_s
        return True

    def abort(self) -> None:
        """Close without ceremony. Again is harmless."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def gone(self) -> bool:
        """Whether the transport has already said that it is closed."""
        return self._parser is None

    def header(self, name: bytes) -> str | None:
        """Return a header of the answer, by its lower-case name: few answers are asked for any."""
        for given, value in self._headers.items():
            if given.lower() == name:
                return value.strip().decode("latin-1")
        return None

    def expire(self) -> None:
        """The time that `expires` told of has come."""
        if self._seen == 0:
            self._fail(ErrorClass.TIMEOUT, "no answer in time")
        else:
            self._fail(ErrorClass.TIMEOUT, f"the answer was not complete in time ({self._seen} bytes came)")

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        waiter, parser = self._waiter, self._parser
        if waiter is None or waiter.done() or parser is None:
            self.abort()
            return
        before = self._seen
        self._seen = seen = before + len(data)
        try:
            if seen > self._limits.head_bytes and self._body_from < 0:
                room = self._limits.head_bytes - before
                parser.feed_data(data[:room])
                if self._body_from < 0:
                    self._fail(ErrorClass.TOO_LARGE, f"the answer's head exceeds {self._limits.head_bytes} bytes")
                    return
                data = data[room:]
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as exc:
            self.reusable = False
            if not self._complete:
                why = "an upgrade nobody asked for" if isinstance(exc, HttpParserUpgrade) else exc
                self._fail(ErrorClass.PROTOCOL, f"the answer is no HTTP: {why}")
                return
        if self._body_from >= 0 and not self._complete and seen > self._body_from + self._limits.body_bytes:
            # The status is known and is what counts; the rest would only cost.
            self._complete = True
            self.abort()
        if self._complete and not waiter.done():
            self.expires = inf
            waiter.set_result(None)

    def eof_received(self) -> None:
        self.reusable = False
        if self._body_from >= 0 and not self._complete and self._ends_with_connection():
            self._complete = True
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        why = f" ({exc})" if exc is not None else ""
        if self._seen == 0:
            self._fail(ErrorClass.CLOSED, f"the connection was closed before an answer{why}", stale=self._exchanges > 1)
        else:
            self._fail(ErrorClass.CLOSED, f"the connection was closed within the answer{why}")
        # The two point at each other; without this, only the garbage collector would free them.
        self._parser = None
        self._lost(self)

    def _ends_with_connection(self) -> bool:
        coding = self.header(b"transfer-encoding")
        if coding is not None:
            return not coding.lower().endswith("chunked")
        return self.header(b"content-length") is None

    def _fail(self, error: ErrorClass, detail: str, *, stale: bool = False) -> None:
        self.abort()
        self.expires = inf
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(StaleConnectionError(error, detail) if stale else AttemptFailedError(error, detail))

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._complete:
            self.reusable = False

    def on_headers_complete(self) -> None:
        # What follows a complete answer is nobody's.
        if self._complete or self._parser is None:
            return
        self.status = status = self._parser.get_status_code()
        if status >= _FIRST_FINAL_STATUS:
            self._body_from = self._seen
            if status >= _FIRST_FAILURE:
                # What the parser collects from here on are trailers, which are no headers (RFC 9110, 6.5).
                self._headers = dict(self._collected)
        elif status < _FIRST_STATUS:
            self._fail(ErrorClass.PROTOCOL, f"the answer is no HTTP: its status is {status:03}")

    def on_body(self, body: bytes) -> None:
        room = self._limits.kept_bytes - len(self.body_head)
        if room > 0 and not self._complete:
            self.body_head += body[:room]

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self.status < _FIRST_FINAL_STATUS:
            self._collected.clear()
        elif not self._complete:
            self._complete = True
            self.reusable = self.reusable and self._parser.should_keep_alive()


class PlainConnection(Connection, asyncio.Protocol):
    """A connection as the transport reads it into bytes of the right size."""

    __slots__ = ()


class TlsConnection(Connection, asyncio.BufferedProtocol):
    """A connection that lends TLS the buffer to decrypt into, which all connections of a loop may share.

    Left alone, the ssl module maps and unmaps 256 KiB for every read, which costs more than all else of a send.
    """

    __slots__ = ("_buffer",)

    def __init__(
        self,
        key: PoolKey,
        address: str,
        limits: Limits,
        lost: Callable[[Connection], None],
        buffer: memoryview,
    ) -> None:
        super().__init__(key, address, limits, lost)
        self._buffer = buffer

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 asyncio's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))
