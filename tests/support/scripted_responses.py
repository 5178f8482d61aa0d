"""A sender whose endpoint is a list of pieces: no socket, so that thousands of answers take a second."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from delivery.push.http.client import HttpSender
from delivery.push.http.connection import HttpConnection, HttpLimits, PlainHttpConnection, PoolKey
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl

ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
TARGET = PushUrl.parse("http://hook.test/in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Describe how an endpoint ends a connection after its pieces."""

    eof: bool = False
    reset: bool = False


class AnyAddress:
    """Vet every name."""

    def cached(self, host: str, organisation: OrganisationId) -> tuple[str, ...]:
        return ("192.0.2.1",)

    async def resolve(self, host: str, port: int, organisation: OrganisationId) -> tuple[str, ...]:
        return ("192.0.2.1",)


class PiecesTransport(asyncio.Transport):
    """Answer each request with the same pieces, one for each turn of the loop."""

    def __init__(self, connection: HttpConnection, pieces: Sequence[bytes], ending: Ending) -> None:
        super().__init__()
        self._connection: Any = connection
        self._pieces = pieces
        self._ending = ending
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._requests = 0

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        """Begin to answer."""
        self._requests += 1
        self._loop.call_soon(self._next, 0, self._requests)

    def get_write_buffer_size(self) -> int:
        """Return 0: requests are taken at once."""
        return 0

    def abort(self) -> None:
        """Close."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._connection.connection_lost, None)

    def _next(self, number: int, request: int) -> None:
        if self._closed:
            return
        if number < len(self._pieces):
            self._connection.data_received(self._pieces[number])
            self._loop.call_soon(self._next, number + 1, request)
        elif self._ending.reset:
            self._closed = True
            self._connection.connection_lost(ConnectionResetError("reset"))
        elif self._ending.eof:
            self._connection.eof_received()
            self.abort()
        elif request == self._requests and self._connection.expires_at != float("inf"):
            # The endpoint stays silent until the deadline, which the pool's sweep looks at.
            self._connection.on_expired()


class PiecesSender(HttpSender):
    """Send to an endpoint that answers with these pieces. `dialled`: how often it connected."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        ending: Ending,
        *,
        limits: HttpLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(AnyAddress(), limits=limits, clock=clock)
        self._pieces = pieces
        self._ending = ending
        self.dialled = 0

    async def _dial(
        self, key: PoolKey, addresses: tuple[str, ...], deadline: float
    ) -> HttpConnection:
        self.dialled += 1
        connection = PlainHttpConnection(key, addresses[0], self._limits, self._pool.on_closed)
        connection.connection_made(PiecesTransport(connection, self._pieces, self._ending))
        self._pool.add(connection)
        return connection

    async def post(self, organisation: OrganisationId = ORGANISATION) -> AttemptResult:
        """Send a small request."""
        return await self.send(
            TARGET, b"webhook-id: 1\r\n", b"{}", organisation=organisation, timeout_s=60
        )
