"""HTTP requests, as bytes: mutated, cut anywhere, never ended, or ended in any way, against the API on a socket under uvloop.

After each case a request of another client is answered, no answer was a 5xx (505 is right for another version of HTTP),
nothing was logged as an error, its loop never stood still, and the server has let go of the case's connection; at the end it
has the files again that it began with, but for its pool.
"""

import asyncio
import logging
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Self

import uvloop

from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.uvicorn_server import BoundedServer, http_config
from rooms.app.api import make_asgi
from rooms.loop_watchdog import COLLECTION, Stall, watch_loop
from tests.faults.hostile.suite import Suite
from tests.integration.rooms.api.conftest import open_api
from tests.support.pull_service import until

BOUNDS: Final = ConnectionLimits(
    head_timeout_s=2.0, idle_timeout_s=2.0, grace_s=1.0, write_timeout_s=0.5, linger_s=0.2
)
_KEY: Final = b"@KEY@"
_ROOM: Final = b"@ROOM@"
_READ_S: Final = 0.25
_STALL_S: Final = 0.25
_POOL: Final = 4
"""Connections to PostgreSQL that the API opens as it needs them, and keeps: requests that overlap need more than one."""
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_AUTH: Final = b"Host: rooms\r\nAuthorization: Bearer " + _KEY + b"\r\n"
_BODY: Final = b'{"event_type":"made","payload":{"a":1}}'
_BASES: Final = (
    b"POST /v1/rooms/@ROOM@/messages HTTP/1.1\r\n" + _AUTH + b"Content-Length: 39\r\n\r\n" + _BODY,
    b"POST /v1/rooms/@ROOM@/messages/batch HTTP/1.1\r\n" + _AUTH + b"Transfer-Encoding: chunked\r\n\r\n27\r\n" + _BODY + b"\r\n0\r\n\r\n",
    b"POST /v1/subscriptions/x/pull HTTP/1.1\r\n" + _AUTH + b"Content-Length: 2\r\n\r\n{}",
    b"POST /v1/rooms HTTP/1.1\r\n" + _AUTH + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /v1/rooms?limit=2 HTTP/1.1\r\n" + _AUTH + b"\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: rooms\r\n\r\n",
    b"GET /health/live HTTP/1.0\r\n\r\n",
    b"GET http://rooms/health/live HTTP/1.1\r\nHost: other\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: rooms\r\n\r\n",
    b"HEAD /v1/rooms HTTP/1.1\r\n" + _AUTH + b"\r\n",
    b"GET /v1/stream?subscription=x&for_ms=50 HTTP/1.1\r\n" + _AUTH + b"\r\n",
    b"GET /v1/stream?subscription=x HTTP/1.1\r\n" + _AUTH
    + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    + b"\x81\x8d\0\0\0\0" + b'{"credit": 1}',
)  # fmt: skip
_PIECES: Final = (
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b"\x7f", b"\xff", b" ", b"\t", b":", b"/", b"//", b"%", b"%2f", b"?", b"#", b"*", b"\r\n ",
    b"Content-Length: 1\r\n", b"Content-Length: 99999999999\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding: chunked, identity\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\n",
    b"Upgrade: h2c\r\n", b"Upgrade: websocket\r\n", b"Expect: 100-continue\r\n", b"Expect: x\r\n", b"Host: evil\r\n",
    b"Idempotency-Key: k\r\n", b"HTTP/2.0", b"HTTP/1.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"0\r\n", b"ffffffffffffffff\r\n",
    b"0\r\nAuthorization: Bearer " + _KEY + b"\r\n\r\n", b"X: y\r\n",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Describe the pieces of a request, and how the connection ends."""

    pieces: tuple[bytes, ...]
    ending: str


def _mutate(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0:
            return data[:at] + rng.choice(_PIECES) + data[at:]
        case 1:
            return data[:at] + data[at + rng.randrange(1, 20) :]
        case 2:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 3:
            return data[:at] + data[rng.randrange(len(data) + 1) :]
        case 4:
            return data[:at]
        case 5:
            # Right after a line, at a header or a chunk.
            line = data.find(b"\r\n", at) + 2
            return data[:line] + rng.choice(_PIECES) + data[line:]
        case _:
            return data[:at] + rng.choice(_PIECES) * rng.choice((2, 120, 40_000)) + data[at:]


def generate(rng: Random) -> Case:
    """Make one to four requests, most of them wrong, and cut them."""
    requests = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_BASES)
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            data = _mutate(rng, data)
        requests.append(data)
    data = b"".join(requests)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3, 8))))
    pieces = tuple(
        data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
    )
    return Case(
        pieces, rng.choices(("half", "close", "reset", "deaf", "wait"), (60, 20, 15, 4, 1))[0]
    )


class _Errors(logging.Handler):
    """Collect logged errors: clients must not be able to fill the log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def _errors() -> Iterator[list[str]]:
    handler = _Errors()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger().removeHandler(handler)


class _Listening:
    """The API in a thread of its own, under uvloop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ready = threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self.port = 0
        self.key = self.room = b""
        self.stalls: list[Stall] = []
        self.connections = ConnectionRegistry(BOUNDS, count_closed=lambda _: None)

    async def __aenter__(self) -> Self:
        self._thread.start()
        await asyncio.to_thread(self._ready.wait)
        if self._failed is not None:
            raise self._failed
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as exc:
                self._failed = exc
                raise
            finally:
                self._ready.set()

    async def _serve(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        async with open_api(self._url) as api:
            self.key = api.keys["admin"].encode()
            room = await api.room()
            await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
            self.room = str(room["id"]).encode()
            app = await asyncio.to_thread(make_asgi, api.services)
            config = http_config(app, registry=self.connections)
            config.load()
            server = BoundedServer(config, self.connections, api.services.pull_service.end_polls)
            server.lifespan = config.lifespan_class(config)
            await server.startup()
            self.port = server.servers[0].sockets[0].getsockname()[1]
            self._ready.set()
            with watch_loop(self.stalls.append, threshold_s=_STALL_S):
                await stopped.wait()
            await server.shutdown()


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def _read(
    loop: asyncio.AbstractEventLoop, client: socket.socket, within_s: float | None
) -> bytes:
    """Everything until the server closes, or for so long."""
    found = bytearray()
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(within_s):
            while piece := await loop.sock_recv(client, 1 << 16):
                found += piece
    return bytes(found)


async def _healthy(port: int) -> bytes:
    """The answer to a request that is right."""
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: rooms\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return answer


async def _send(
    loop: asyncio.AbstractEventLoop, client: socket.socket, case: Case, listening: _Listening
) -> None:
    with suppress(ConnectionError, TimeoutError):
        # A server that has given its last answer stops reading after a while.
        async with asyncio.timeout(2):
            for piece in case.pieces:
                await loop.sock_sendall(
                    client, piece.replace(_KEY, listening.key).replace(_ROOM, listening.room)
                )
                await asyncio.sleep(0)


async def _run(case: Case, listening: _Listening) -> str:
    loop = asyncio.get_running_loop()
    answer = b""
    with socket.socket() as client:
        client.setblocking(False)
        if case.ending == "deaf":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(client, ("127.0.0.1", listening.port))
        await _send(loop, client, case, listening)
        match case.ending:
            case "half":
                with suppress(OSError):
                    client.shutdown(socket.SHUT_WR)
                answer = await _read(loop, client, _READ_S)
            case "wait":
                answer = await _read(loop, client, None)  # the deadlines of the server end it
            case "deaf":
                await asyncio.sleep(_READ_S)
            case "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case _:
                answer = await _read(loop, client, 0.001)
    other = await _healthy(listening.port)
    assert other.startswith(b"HTTP/1.1 200 "), other
    async with asyncio.timeout(8):
        await until(lambda: not len(listening.connections))
    statuses = [int(status) for status in _STATUS.findall(answer)]
    assert not [status for status in statuses if status >= 500 and status != 505], answer
    return f"{case.ending} {statuses[0] if statuses else 'unanswered'}"


@asynccontextmanager
async def _target(database_url: str) -> AsyncIterator[Callable[[Case], Awaitable[str]]]:
    with _errors() as errors:
        async with _Listening(database_url) as listening:
            for base in _BASES:  # what is opened with the first use of it stays open
                await _run(Case((base,), "half"), listening)
            before = _files()

            async def run(case: Case) -> str:
                kind = await _run(case, listening)
                assert not errors, errors
                stalls = [stall for stall in listening.stalls if stall.cause != COLLECTION]
                assert not stalls, stalls
                return kind

            yield run
            await until(lambda: _files() <= before + _POOL)


SUITE: Final = Suite(name="requests", cases=200, generate=generate, target=_target)
