"""Test WebSockets on the wire: what a client may send, and how one is refused."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import pytest
from uvicorn.server import ServerState
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from rooms.api.fast_routes import Receive, Send
from rooms.api.server import uvicorn_server
from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.responses import SECURITY_HEADERS
from rooms.api.server.uvicorn_server import http_config
from rooms.api.server.websocket import MAX_FRAGMENTS, MAX_MESSAGE_BYTES, SLICE_BYTES, WebSocket
from rooms.domain.principal import Principal
from tests.support.installation import PATIENCE_S
from tests.support.pull_service import until

HANDSHAKE: Final = (
    b"GET /echo HTTP/1.1\r\nHost: rooms\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
KNOWN: Final = Principal(key_id="k", organisation_id="o", scopes=frozenset())  # type: ignore[arg-type]


async def echo(scope: Any, receive: Receive, send: Send) -> None:
    """Echo at `/echo`, and refuse everything else."""
    await receive()
    if scope["path"] != "/echo":
        await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"no"})
        return
    scope["auth"] = KNOWN
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] != "websocket.disconnect":
        await send(
            {
                "type": "websocket.send",
                "text": str(len(message.get("text") or message.get("bytes") or b"")),
            }
        )


@dataclass
class Place:
    """Hold a listener and its connections."""

    address: tuple[str, int]
    connections: ConnectionRegistry
    closed: list[str]
    state: ServerState

    @property
    def url(self) -> str:
        return "ws://{}:{}".format(*self.address)


@asynccontextmanager
async def served(bounds: ConnectionLimits | None = None) -> AsyncIterator[Place]:
    closed: list[str] = []
    connections = ConnectionRegistry(bounds or ConnectionLimits(), count_closed=closed.append)
    config = http_config(echo, registry=connections)
    config.load()
    state = ServerState()
    state.default_headers = config.encoded_headers
    protocol: Any = config.http_protocol_class
    listener = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with listener:
        yield Place(listener.sockets[0].getsockname(), connections, closed, state)
        await until(lambda: not len(connections) and not state.connections)


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[ClientConnection]:
    async with (
        asyncio.timeout(PATIENCE_S),
        connect(f"{place.url}/echo", proxy=None, compression=None, max_size=None) as client,
    ):
        yield client


@asynccontextmanager
async def raw(place: Place) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*place.address)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


def frame(opcode: int, data: bytes = b"", *, last: bool = True) -> bytes:
    """Return a client's frame with a mask of zeros."""
    return struct.pack("!BB", (0x80 if last else 0) | opcode, 0x80 | len(data)) + bytes(4) + data


async def test_frames_right_after_the_handshake_are_not_lost() -> None:
    async with served() as place, raw(place) as (reader, writer):
        writer.write(HANDSHAKE + frame(1, b"early"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert await reader.readexactly(3) == b"\x81\x015"


async def test_a_stream_counts_as_a_client_with_a_key() -> None:
    async with (
        served(ConnectionLimits(connections=8, unauthenticated=1, per_address=1)) as place,
        opened(place) as client,
    ):
        await client.send("x")
        assert await client.recv() == "1"
        await until(lambda: bool(place.connections._authenticated))
        async with raw(place) as (reader, writer):
            writer.write(b"nonsense\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        await client.send("xy")
        assert await client.recv() == "2"


async def test_the_server_stops_while_a_client_closes() -> None:
    """The client's Close has arrived, and the connection is not closed yet."""
    async with served() as place, raw(place) as (reader, writer):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        (protocol,) = place.state.connections
        assert isinstance(protocol, WebSocket)
        protocol.data_received(frame(8, b"\x03\xe8"))
        protocol.shutdown()
        assert (await reader.read())[:2] == b"\x88\x02"


async def test_a_message_that_is_too_long_ends_its_stream() -> None:
    """Check that long messages are refused: credit and acks are short."""
    async with served() as place, opened(place) as client:
        await client.send("x" * MAX_MESSAGE_BYTES)
        assert await client.recv() == str(MAX_MESSAGE_BYTES)
        await client.send("x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionClosedError) as caught:
            await client.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


async def test_a_message_of_empty_fragments_without_end_ends_its_stream() -> None:
    async with served() as place, raw(place) as (reader, writer):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frame(1, last=False) + frame(0, last=False) * MAX_FRAGMENTS)
        answer = await reader.read()
        assert answer[:1] == b"\x88"
        assert struct.unpack("!H", answer[2:4]) == (1009,)


async def test_messages_that_come_together_are_all_answered_in_order() -> None:
    """The application takes one at a time, and what waits behind it is parsed in later turns."""
    sizes = [n % 120 for n in range(2_000)]
    messages = b"".join(frame(1, b"x" * size) for size in sizes)
    answers = b"".join(struct.pack("!BB", 0x81, len(str(n))) + str(n).encode() for n in sizes)
    for early in (HANDSHAKE + messages, HANDSHAKE):
        async with served() as place, raw(place) as (reader, writer):
            writer.write(early)
            await reader.readuntil(b"\r\n\r\n")
            if early == HANDSHAKE:
                writer.write(messages)
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.readexactly(len(answers)) == answers


async def test_tiny_frames_do_not_keep_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a read of 256 KiB, which holds 40,000 empty pings, is parsed in many turns."""
    pings = 0

    def count(protocol: WebSocket) -> None:
        nonlocal pings
        pings += 1
        protocol.conn.data_to_send()  # else the answers would pause reading

    monkeypatch.setattr(WebSocket, "handle_ping", count)
    most, last = 0, 0
    async with served() as place, raw(place) as (reader, writer):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frame(9, b"") * 40_000 + frame(1, b"behind"))
        async with asyncio.timeout(PATIENCE_S):
            while pings < 40_000:
                await asyncio.sleep(0)
                most, last = max(most, pings - last), pings
            assert await reader.readexactly(3) == b"\x81\x016"
    # Of one turn: a slice of what was kept, and one of what was just read.
    assert 0 < most <= 2 * (SLICE_BYTES // len(frame(9)) + 1)


async def test_pings_of_a_client_that_does_not_read_are_not_read_either() -> None:
    """Check that pings of a client that does not read stop: each answer would wait in memory."""
    loop = asyncio.get_running_loop()
    async with served(ConnectionLimits(write_timeout_s=0.3)) as place:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, place.address)
            await loop.sock_sendall(client, HANDSHAKE)
            with suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE_S):
                    await loop.sock_sendall(client, frame(9, b"p" * 100) * 200_000)
            await until(lambda: place.closed == ["slow_reader"])


def test_pings_have_the_documented_interval() -> None:
    config = http_config(echo)
    assert (config.ws_ping_interval, config.ws_ping_timeout) == (20, 20)


async def test_a_client_that_answers_no_ping_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "PING_S", 0.1)
    async with served() as place, raw(place) as (reader, writer):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2) == b"\x89\x04"
        await reader.readexactly(4)
        closed = await reader.read()
        assert closed[:1] == b"\x88"
        assert struct.unpack("!H", closed[2:4]) == (1011,)


async def test_a_client_that_answers_pings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "PING_S", 0.4)
    async with served() as place, raw(place) as (reader, writer):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(2):
            assert await reader.readexactly(2) == b"\x89\x04"
            writer.write(frame(10, await reader.readexactly(4)))
        writer.write(frame(1, b"here"))
        assert await reader.readexactly(3) == b"\x81\x014"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HANDSHAKE.replace(b"/echo", b"/elsewhere"), 403),
        (HANDSHAKE.replace(b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b""), 400),
        (HANDSHAKE.replace(b"Version: 13", b"Version: 12"), 400),
        (HANDSHAKE.replace(b"Key: ", b"Key: \xff"), 400),
        (HANDSHAKE.replace(b"/echo", b"/echo%00%ff"), 403),
    ],
)
async def test_each_refusal_has_the_headers_of_all_answers(data: bytes, status: int) -> None:
    async with served() as place, raw(place) as (reader, writer):
        writer.write(data)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        for name, value in SECURITY_HEADERS:
            assert head.lower().count(f"\r\n{name}: {value}".lower().encode()) == 1
        if status != 403:
            assert json.loads(body)["status"] == status


async def test_an_accepted_stream_has_the_headers_of_all_answers() -> None:
    async with served() as place, opened(place) as client:
        assert client.response is not None
        for name, value in SECURITY_HEADERS:
            assert client.response.headers[name] == value
    async with served() as place:
        with pytest.raises(InvalidStatus):
            await connect(f"{place.url}/elsewhere", proxy=None)
