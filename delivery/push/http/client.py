"""Send webhooks by HTTP/1.1, with the SSRF guard before every dial."""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Protocol, Self

from delivery.push.errors import (
    AttemptFailedError,
    BlockedError,
    LookupShortageError,
    StaleConnectionError,
    UnresolvableError,
)
from delivery.push.http.bulkhead import LimitScope
from delivery.push.http.connection import (
    HttpConnection,
    HttpLimits,
    PlainHttpConnection,
    PoolKey,
    TlsHttpConnection,
)
from delivery.push.http.pool import ConnectionPool
from delivery.push.http.shortage import ShortageReporter
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl

_MAX_DIALS = 3
_READ_BYTES = 64 * 1024
_STALE_WITHIN_S = 1.0
"""A close that crossed a request arrives within a round trip of it.

An endpoint that closes later was at work on the request, and may have failed because of it.
"""
MAX_LOCATION = 2048
"""Longer than what is kept of it: what must be hidden in it is found as a whole."""
_MAX_RETRY_AFTER = 100
_SUCCESS = range(200, 300)
_REDIRECTS = range(300, 400)


class TargetResolver(Protocol):
    """Resolve hosts to vetted addresses, as `SsrfGuard` does."""

    def cached(self, host: str, organisation: OrganisationId) -> tuple[str, ...] | None: ...

    async def resolve(
        self, host: str, port: int, organisation: OrganisationId
    ) -> tuple[str, ...]: ...


class HttpSender:
    """Implement `rooms.ports.Sender` over HTTP/1.1 with keep-alive; an async context manager.

    A time-out may come `limits.sweep_s` late. If a kept connection is closed before any byte of the
    response, and within a second of the request, they crossed on the way: the request is sent once
    more on a new one, within the same deadline. A later close fails the attempt.
    Leaving the context closes all connections, and requests in progress get CLOSED: stop sending
    first.
    """

    def __init__(
        self,
        resolver: TargetResolver,
        *,
        limits: HttpLimits | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_wait: Callable[[LimitScope], None] = lambda _scope: None,
        on_shortage: Callable[[str], None] = lambda _error: None,
    ) -> None:
        """Configure the sender.

        `on_wait` gets the limit at which a request waits, `on_shortage` the system's error for
        which a request was not sent.
        """
        self._resolver = resolver
        self._limits = limits or HttpLimits()
        self._tls = tls
        self._clock = clock
        self._pool = ConnectionPool(self._limits, clock, on_wait)
        self._shortages = ShortageReporter(on_shortage)
        self._buffer = memoryview(bytearray(_READ_BYTES))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pool.close()

    @property
    def connections(self) -> int:
        """Return how many connections are open or being opened."""
        return self._pool.size

    async def send(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
    ) -> AttemptResult:
        """Send `body` to `target` by POST; see the port.

        ResourceShortageError: this process or machine cannot connect to anything right now.
        """
        started = self._clock()
        deadline = started + timeout_s
        key = (organisation, target.origin)
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        request = b"".join((target.request_head, headers, length, body))
        addresses = self._resolver.cached(target.host, organisation)
        connection = self._pool.take_idle(key, addresses) if addresses is not None else None
        sent = started
        try:
            if connection is None:
                connection = await self._connect(key, deadline, fresh=False)
                sent = self._clock()
            try:
                await connection.exchange(request, deadline)
            except StaleConnectionError:
                if self._clock() - sent > _STALE_WITHIN_S:
                    raise
                connection = await self._connect(key, deadline, fresh=True)
                await connection.exchange(request, deadline)
            now = self._clock()
            status, latency_ms = connection.status, (now - started) * 1000
            if status in _SUCCESS:
                result = AttemptResult(status, None, "", connection.body_head, None, latency_ms)
            else:
                error, detail, retry_after = _classify_response(connection)
                result = AttemptResult(
                    status, error, detail, connection.body_head, retry_after, latency_ms
                )
            self._pool.release(connection, now)
            return result
        except AttemptFailedError as failure:
            return AttemptResult(
                status=None,
                error=failure.error,
                detail=failure.detail,
                body_head=b"",
                retry_after=None,
                latency_ms=(self._clock() - started) * 1000,
            )
        except BaseException:
            # Closing the connection releases its slot, whatever the error was.
            if connection is not None:
                connection.abort()
            raise

    async def _connect(self, key: PoolKey, deadline: float, *, fresh: bool) -> HttpConnection:
        """Return a connection that is ready for an exchange.

        AttemptFailedError, ResourceShortageError.
        """
        organisation, (_, host, port) = key
        stage = "resolving the name"
        try:
            async with asyncio.timeout(deadline - self._clock()):
                addresses = await self._resolver.resolve(host, port, organisation)
                if not fresh and (idle := self._pool.take_idle(key, addresses)) is not None:
                    return idle
                stage = f"waiting for one of {self._pool.describe_limit(key)} to come free"
                freed = await self._pool.acquire_slot(key, addresses, fresh=fresh)
                if freed is not None:
                    return freed
                stage = "connecting"
                try:
                    connection = await self._dial(key, addresses, deadline)
                except BaseException:
                    self._pool.release_slot(key)
                    raise
                return connection
        except TimeoutError as exc:
            raise AttemptFailedError(ErrorClass.TIMEOUT, f"timed out while {stage}") from exc
        except BlockedError as exc:
            raise AttemptFailedError(ErrorClass.BLOCKED, str(exc)) from exc
        except LookupShortageError as exc:
            raise self._shortages.of_lookup(exc.error) from exc
        except UnresolvableError as exc:
            raise AttemptFailedError(ErrorClass.DNS, str(exc)) from exc

    async def _dial(
        self, key: PoolKey, addresses: tuple[str, ...], deadline: float
    ) -> HttpConnection:
        """Connect to the first vetted address that accepts.

        AttemptFailedError, ResourceShortageError.
        """
        _, (scheme, host, port) = key
        loop = asyncio.get_running_loop()
        tls = self._tls_context() if scheme == "https" else None
        failure = AttemptFailedError(ErrorClass.CONNECT, "no address")
        dials = addresses[:_MAX_DIALS]
        for left, address in zip(range(len(dials), 0, -1), dials, strict=True):
            connection = (
                PlainHttpConnection(key, address, self._limits, self._pool.on_closed)
                if tls is None
                else TlsHttpConnection(
                    key, address, self._limits, self._pool.on_closed, self._buffer
                )
            )
            try:
                # An address that drops packets must leave time for the next one.
                async with asyncio.timeout((deadline - self._clock()) / left):
                    await loop.create_connection(
                        lambda connection=connection: connection,
                        address,
                        port,
                        ssl=tls,
                        server_hostname=host if tls is not None else None,
                    )
            except TimeoutError:
                failure = AttemptFailedError(
                    ErrorClass.TIMEOUT, f"timed out while connecting to {address}"
                )
            except (ssl.SSLError, ValueError) as exc:
                # A ValueError: the name is not possible in a certificate or a ClientHello.
                raise AttemptFailedError(ErrorClass.TLS, f"TLS with {host} failed: {exc}") from exc
            except OSError as exc:
                if tls is not None and isinstance(
                    exc, ConnectionResetError | ConnectionAbortedError | BrokenPipeError
                ):
                    detail = f"{host} closed the connection during the TLS handshake"
                    raise AttemptFailedError(ErrorClass.TLS, detail) from exc
                self._shortages.check(exc, address, port)
                failure = AttemptFailedError(
                    ErrorClass.CONNECT, f"cannot connect to {address} port {port}: {exc}"
                )
            else:
                if self._pool.closed or connection.is_closed:
                    connection.abort()
                    detail = (
                        "the sender is closed"
                        if self._pool.closed
                        else f"{address} closed the connection at once"
                    )
                    raise AttemptFailedError(ErrorClass.CLOSED, detail)
                self._shortages.end()
                self._pool.add(connection)
                return connection
        raise failure

    def _tls_context(self) -> ssl.SSLContext:
        # Created at first use: reading the system's certificates takes a while.
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


def _classify_response(connection: HttpConnection) -> tuple[ErrorClass, str, str | None]:
    retry_after = (connection.header(b"retry-after") or "")[:_MAX_RETRY_AFTER] or None
    if connection.status in _REDIRECTS:
        location = "".join(
            char for char in connection.header(b"location") or "elsewhere" if char.isprintable()
        )
        # The endpoint's text comes last: where it is cut, a value that it repeats is still found.
        detail = (
            f"HTTP {connection.status}, and redirects are not followed: {location[:MAX_LOCATION]}"
        )
        return ErrorClass.REDIRECT, detail, retry_after
    return ErrorClass.STATUS, f"HTTP {connection.status}", retry_after
