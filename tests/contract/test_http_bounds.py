"""The bounds of connections, and which of them make room for others."""

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import sys
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import pytest

from rooms.rest.server.connections import Bounds, Connections
from tests.installation import PATIENCE_S
from tests.pulling import until
from tests.serving import PUBLISH, Place, answer_from, connected, post, served

STRANGE: Final = post(PUBLISH).replace(b"Bearer ours", b"Bearer theirs")
LIMIT: Final = 64
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(streams: Streams, request: bytes) -> int:
    """The status of the answer."""
    reader, writer = streams
    writer.write(request)
    head, _ = await answer_from(reader)
    return int(head.split(b" ")[1])


async def is_closed(streams: Streams) -> bool:
    with suppress(ConnectionError):
        return await streams[0].read() == b""
    return True


async def many(place: Place, stack: AsyncExitStack, count: int) -> list[Streams]:
    return [await stack.enter_async_context(connected(place)) for _ in range(count)]


async def test_strangers_never_take_the_places_of_clients_with_a_key() -> None:
    """The oldest stranger makes room for each that comes: so a health check and a client with a key always get in."""
    bounds = Bounds(connections=8, unauthenticated=6, per_address=0)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        known = await many(place, stack, 4)
        assert [await ask(one, post(PUBLISH)) for one in known] == [202] * 4
        strangers = await many(place, stack, 20)
        assert [await is_closed(one) for one in strangers[:16]] == [True] * 16
        assert len(place.connections) == 8
        assert place.closed == ["unauthenticated"] * 16
        (check,) = await many(place, stack, 1)
        assert await ask(check, b"GET /health/live HTTP/1.1\r\nHost: rooms\r\n\r\n") == 404
        assert [await ask(one, post(PUBLISH)) for one in known] == [202] * 4


async def test_clients_with_a_key_never_take_the_place_of_a_health_check() -> None:
    """Nor does one of them take the place of another, while it is answered."""
    bounds = Bounds(connections=3, per_address=0)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        for _ in range(5):
            (one,) = await many(place, stack, 1)
            assert await ask(one, post(PUBLISH)) == 202
            (check,) = await many(place, stack, 1)
            assert await ask(check, b"GET /health/live HTTP/1.1\r\nHost: rooms\r\n\r\n") == 404
            assert len(place.connections) <= 3


async def test_a_request_that_is_being_answered_makes_no_room() -> None:
    bounds = Bounds(connections=4, unauthenticated=1, per_address=0)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        (first,) = await many(place, stack, 1)
        first[1].write(b"POST /else HTTP/1.1\r\nHost: rooms\r\nContent-Length: 4\r\n\r\nwait")
        await place.service.waiting.wait()
        (second,) = await many(place, stack, 1)
        assert await is_closed(second)
        place.service.opened.set()
        head, _ = await answer_from(first[0])
        assert head.startswith(b"HTTP/1.1 404 ")
        assert place.closed == ["unauthenticated"]


async def test_one_address_has_a_bound_of_its_own() -> None:
    async with served(bounds=Bounds(per_address=2)) as place, AsyncExitStack() as stack:
        connections = await many(place, stack, 3)
        assert await is_closed(connections[0])
        assert place.closed == ["per_address"]
        assert [await ask(one, post(PUBLISH)) for one in connections[1:]] == [202] * 2
        for _ in range(5):
            assert [await ask(one, post(PUBLISH)) for one in await many(place, stack, 1)] == [202]
        assert place.closed == ["per_address"]


async def test_a_proxy_has_none() -> None:
    trusted = (ipaddress.ip_network("127.0.0.0/8"),)
    async with served(bounds=Bounds(per_address=2, trusted=trusted)) as place, AsyncExitStack() as stack:
        assert [await ask(one, STRANGE) for one in await many(place, stack, 5)] == [401] * 5
        assert not place.closed


async def test_a_key_that_is_not_known_any_more_has_no_place_of_its_own() -> None:
    bounds = Bounds(connections=8, unauthenticated=2, per_address=0)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        (one,) = await many(place, stack, 1)
        assert await ask(one, post(PUBLISH)) == 202
        assert await ask(one, STRANGE) == 401
        await many(place, stack, 3)
        assert await is_closed(one)


class Fake:
    """A connection that can go, or not."""

    def __init__(self, address: str | None = None, *, idle: bool = True) -> None:
        self.address = address
        self.idle = idle
        self.unread = 0
        self.dropped = False

    def check(self, now: float) -> None:
        """Wait for ever."""

    def drop(self) -> None:
        self.dropped = True


async def test_the_organisation_with_most_connections_makes_room_for_the_others() -> None:
    closed: list[str] = []
    connections = Connections(Bounds(connections=5, per_address=0), count=closed.append)
    large = [Fake(idle=number != 0) for number in range(3)]
    small, new = Fake(), Fake()
    for connection, organisation in [(one, "large") for one in large] + [(small, "small"), (new, "new")]:
        assert connections.opened(connection)
        connections.signed_in(connection, organisation)  # type: ignore[arg-type]
    assert [one.dropped for one in (*large, small, new)] == [False, True, False, False, False]
    assert closed == ["organisation"]
    for connection in (*large, small, new):
        connections.closed(connection)
        connections.closed(connection)
    assert not len(connections)


async def test_neighbours_in_ipv6_are_one_address() -> None:
    closed: list[str] = []
    connections = Connections(Bounds(per_address=1), count=closed.append)
    first, second, other = Fake("2001:db8::1"), Fake("2001:db8::2"), Fake("2001:db8:0:1::1")
    mapped, same = Fake("::ffff:192.0.2.1"), Fake("192.0.2.1")
    assert all(connections.opened(one) for one in (first, second, other, mapped, same))
    assert [one.dropped for one in (first, second, other, mapped, same)] == [True, False, False, True, False]
    for one in (second, other, same):
        connections.closed(one)


async def test_a_process_without_files_says_so_once_and_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[str] = []
    connections = Connections(Bounds(), count=counted.append)
    real = os.open

    def none_left(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", none_left)
    connections.check_files()
    connections.check_files()
    monkeypatch.setattr(os, "open", real)
    connections.check_files()
    connections.check_files()
    assert counted == ["files", "files"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


async def test_a_process_without_files_serves_again_when_it_has_some() -> None:
    """Those that come meanwhile are closed, those that are there are served, and the process notices."""
    command = (sys.executable, "-m", "tests.contract.few_files", str(LIMIT))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            port = int(await process.stdout.readline())

            async def counted() -> list[int]:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(b"\n")
                return [int(number) for number in (await process.stdout.readline()).split()]

            first = await asyncio.open_connection("127.0.0.1", port)
            assert await ask(first, post(PUBLISH)) == 202
            flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * LIMIT)]
            assert await is_closed(flood[-1])
            count, exhausted = await counted()
            assert count < LIMIT
            assert exhausted == 1
            assert await ask(first, post(PUBLISH)) == 202
            for _, writer in flood:
                writer.close()
            while (await counted())[0] > 1:
                pass
            last = await asyncio.open_connection("127.0.0.1", port)
            assert await ask(last, post(PUBLISH)) == 202
            assert (await counted())[0] == 2
            process.stdin.close()
            for _, writer in (first, last):
                writer.close()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_nothing_is_left_of_connections_that_have_gone() -> None:
    async with served(bounds=Bounds(unauthenticated=2)) as place:
        for _ in range(3):
            async with AsyncExitStack() as stack:
                await many(place, stack, 4)
        await until(lambda: not place.state.connections and not len(place.connections))


HALVES: Final = Bounds(organisation_body_bytes=3_000, small_body_bytes=100)
HALF: Final = post(PUBLISH, b"x" * 1_000, length=1_001)


async def upload(streams: Streams, place: Place) -> None:
    """Send a request without the last byte of its body, the head first, until all of it is held."""
    before = len(place.service.clients)
    streams[1].write(HALF[:-1_000])
    await until(lambda: len(place.service.clients) > before)
    held = place.connections.held
    streams[1].write(HALF[-1_000:])
    await until(lambda: place.connections.held == held + 900)


async def test_bodies_that_do_not_end_are_bounded_for_each_organisation() -> None:
    """One key must not fill the memory of the process: the body beyond the bound is refused, not those that came first."""
    async with served(bounds=HALVES) as place, AsyncExitStack() as stack:
        first = await many(place, stack, 3)
        for one in first:
            await upload(one, place)
        (beyond,) = await many(place, stack, 1)
        assert await ask(beyond, HALF) == 429
        assert await is_closed(beyond)
        assert place.closed == ["bodies"]
        (small,) = await many(place, stack, 1)
        assert await ask(small, post(PUBLISH)) == 202
        assert [await ask(one, b"y") for one in first] == [202] * 3
        assert place.service.published == [b"{}", *[b"x" * 1_000 + b"y"] * 3]


async def test_answers_that_nobody_reads_are_bounded_for_each_organisation() -> None:
    """One key must not fill the memory of the process by never reading: its fullest connections are closed first."""
    loop = asyncio.get_running_loop()
    bounds = Bounds(organisation_body_bytes=1_000_000, write_s=PATIENCE_S)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        (reading,) = await many(place, stack, 1)
        assert await ask(reading, post(PUBLISH)) == 202
        silent = []
        for _ in range(4):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await loop.sock_connect(raw, place.address)
            silent.append(asyncio.ensure_future(loop.sock_sendall(raw, post(PUBLISH))))
        await asyncio.gather(*silent)
        await until(lambda: len(place.service.published) == 5)
        for protocol in place.protocols[1:]:
            protocol.transport.write(b"x" * 5_000_000)  # more than the kernel takes for a client that does not read
        await until(lambda: place.closed == ["unread"] * 4)
        assert await ask(reading, post(PUBLISH)) == 202


async def test_a_body_is_held_until_its_request_is_answered_or_its_client_gone() -> None:
    async with served(bounds=HALVES) as place, AsyncExitStack() as stack:
        for _ in range(5):
            (one,) = await many(place, stack, 1)
            for _ in range(3):
                await upload(one, place)
                assert await ask(one, b"y") == 202
                assert place.connections.held == 0
            await upload(one, place)
            one[1].close()
            await until(lambda: place.connections.held == 0)
        assert not place.closed
