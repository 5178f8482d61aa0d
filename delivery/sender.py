"""The webhook sender: HTTP/1.1 over asyncio with the httptools parser, a pool of its own, and the guard before every dial."""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Protocol, Self

from delivery.bulkhead import Bound, PoolKey
from delivery.connections import Connection, Limits, PlainConnection, TlsConnection
from delivery.errors import AttemptFailedError, BlockedError, StaleConnectionError, UnresolvableError
from delivery.pool import Pool
from rooms.domain.attempt import Answer, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target

_MAX_DIALS = 3
_READ_BYTES = 64 * 1024
_MAX_LOCATION = 200
_MAX_RETRY_AFTER = 100
_SUCCESS = range(200, 300)
_REDIRECTS = range(300, 400)


class Vetting(Protocol):
    """What the sender needs of the guard."""

    def known(self, host: str, organisation: OrganisationId) -> tuple[str, ...] | None: ...

    async def vet(self, host: str, port: int, organisation: OrganisationId) -> tuple[str, ...]: ...


class HttpSender:
    """`rooms.ports.Sender` over HTTP/1.1 with keep-alive; an async context manager.

    A time-out may come `limits.sweep_s` late. A request whose kept connection turns out closed before any byte of the
    answer is sent once again, on a fresh connection, within the same deadline. Leaving the context closes all
    connections: whoever is still sending gets CLOSED, so stop sending first.
    """

    def __init__(
        self,
        guard: Vetting,
        *,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[Bound], None] = lambda _bound: None,
    ) -> None:
        """`waited` is called with the bound where a request has to wait for a connection."""
        self._guard = guard
        self._limits = limits or Limits()
        self._tls = tls
        self._clock = clock
        self._pool = Pool(self._limits, clock, waited)
        self._buffer = memoryview(bytearray(_READ_BYTES))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pool.close()

    @property
    def connections(self) -> int:
        """Connections that are open, or being opened."""
        return self._pool.size

    async def send(
        self, target: Target, headers: bytes, body: bytes, *, organisation: OrganisationId, timeout_s: float
    ) -> Answer:
        """POST `body` to `target`; see the port."""
        started = self._clock()
        deadline = started + timeout_s
        key = (organisation, target.origin)
        request = b"%b%bContent-Length: %d\r\n\r\n%b" % (target.opening, headers, len(body), body)
        addresses = self._guard.known(target.host, organisation)
        connection = self._pool.take(key, addresses) if addresses is not None else None
        try:
            if connection is None:
                connection = await self._connect(key, deadline, fresh=False)
            try:
                await connection.exchange(request, deadline)
            except StaleConnectionError:
                connection = await self._connect(key, deadline, fresh=True)
                await connection.exchange(request, deadline)
            now = self._clock()
            status = connection.status
            error, detail, retry_after = (None, "", None) if status in _SUCCESS else _judge(connection)
            answer = Answer(status, error, detail, connection.body_head, retry_after, (now - started) * 1000)
            self._pool.put(connection, now)
            return answer
        except AttemptFailedError as failure:
            return Answer(
                status=None,
                error=failure.error,
                detail=failure.detail,
                body_head=b"",
                retry_after=None,
                latency_ms=(self._clock() - started) * 1000,
            )
        except BaseException:
            # Whatever went wrong, the connection ends here, and its slot comes back with it.
            if connection is not None:
                connection.abort()
            raise

    async def _connect(self, key: PoolKey, deadline: float, *, fresh: bool) -> Connection:
        """A connection that is ready for an exchange. Raises AttemptFailedError."""
        organisation, (_, host, port) = key
        stage = "resolving the name"
        try:
            async with asyncio.timeout(deadline - self._clock()):
                addresses = await self._guard.vet(host, port, organisation)
                if not fresh and (idle := self._pool.take(key, addresses)) is not None:
                    return idle
                stage = f"waiting for one of {self._pool.reached(key)} to come free"
                handed = await self._pool.slot(key, addresses, fresh=fresh)
                if handed is not None:
                    return handed
                stage = "connecting"
                try:
                    connection = await self._dial(key, addresses, deadline)
                except BaseException:
                    self._pool.leave(key)
                    raise
                return connection
        except TimeoutError as exc:
            raise AttemptFailedError(ErrorClass.TIMEOUT, f"timed out while {stage}") from exc
        except BlockedError as exc:
            raise AttemptFailedError(ErrorClass.BLOCKED, str(exc)) from exc
        except UnresolvableError as exc:
            raise AttemptFailedError(ErrorClass.DNS, str(exc)) from exc

    async def _dial(self, key: PoolKey, addresses: tuple[str, ...], deadline: float) -> Connection:
        """Connect to the first of the vetted addresses that answers. Raises AttemptFailedError."""
        _, (scheme, host, port) = key
        loop = asyncio.get_running_loop()
        tls = self._context() if scheme == "https" else None
        failure = AttemptFailedError(ErrorClass.CONNECT, "no address")
        dials = addresses[:_MAX_DIALS]
        for left, address in zip(range(len(dials), 0, -1), dials, strict=True):
            connection = (
                PlainConnection(key, address, self._limits, self._pool.lost)
                if tls is None
                else TlsConnection(key, address, self._limits, self._pool.lost, self._buffer)
            )
            try:
                # An address that swallows packets must leave time for the next one.
                async with asyncio.timeout((deadline - self._clock()) / left):
                    await loop.create_connection(
                        lambda connection=connection: connection,
                        address,
                        port,
                        ssl=tls,
                        server_hostname=host if tls is not None else None,
                    )
            except TimeoutError:
                failure = AttemptFailedError(ErrorClass.TIMEOUT, f"timed out while connecting to {address}")
            except (ssl.SSLError, ValueError) as exc:
                # A ValueError: the name cannot stand in a certificate, or in a ClientHello.
                raise AttemptFailedError(ErrorClass.TLS, f"TLS with {host} failed: {exc}") from exc
            except OSError as exc:
                if tls is not None and isinstance(exc, ConnectionResetError | ConnectionAbortedError | BrokenPipeError):
                    detail = f"{host} closed the connection within the TLS handshake"
                    raise AttemptFailedError(ErrorClass.TLS, detail) from exc
                failure = AttemptFailedError(ErrorClass.CONNECT, f"cannot connect to {address} port {port}: {exc}")
            else:
                if self._pool.closed or connection.gone:
                    connection.abort()
                    who = "the sender is closed" if self._pool.closed else f"{address} closed the connection at once"
                    raise AttemptFailedError(ErrorClass.CLOSED, who)
                self._pool.add(connection)
                return connection
        raise failure

    def _context(self) -> ssl.SSLContext:
        # Made at first use: reading the system's certificates takes a while.
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


def _judge(connection: Connection) -> tuple[ErrorClass, str, str | None]:
    retry_after = (connection.header(b"retry-after") or "")[:_MAX_RETRY_AFTER] or None
    if connection.status in _REDIRECTS:
        to = "".join(char for char in connection.header(b"location") or "elsewhere" if char.isprintable())
        detail = f"HTTP {connection.status} to {to[:_MAX_LOCATION]}; redirects are not followed"
        return ErrorClass.REDIRECT, detail, retry_after
    return ErrorClass.STATUS, f"HTTP {connection.status}", retry_after
