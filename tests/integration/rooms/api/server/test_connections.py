"""Test the bounds of connections, and which connections are closed for others."""

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

from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from tests.support.http_listener import PUBLISH, Place, answer_from, connected, post, served
from tests.support.installation import PATIENCE_S
from tests.support.pull_service import until

STRANGE: Final = post(PUBLISH).replace(b"Bearer ours", b"Bearer theirs")
LIMIT: Final = 64
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(streams: Streams, request: bytes) -> int:
    """Return the status of the answer."""
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


async def test_strangers_never_displace_clients_with_a_key() -> None:
    """Check that the oldest stranger is closed for each new connection.

    A health check and a client with a key always get in.
    """
    bounds = ConnectionLimits(connections=8, unauthenticated=6, per_address=0)
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


async def test_clients_with_a_key_never_displace_a_health_check() -> None:
    """Check that a connection is not replaced while it is answered."""
    bounds = ConnectionLimits(connections=3, per_address=0)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        for _ in range(5):
            (one,) = await many(place, stack, 1)
            assert await ask(one, post(PUBLISH)) == 202
            (check,) = await many(place, stack, 1)
            assert await ask(check, b"GET /health/live HTTP/1.1\r\nHost: rooms\r\n\r\n") == 404
            assert len(place.connections) <= 3


async def test_a_connection_under_way_is_not_displaced() -> None:
    bounds = ConnectionLimits(connections=4, unauthenticated=1, per_address=0)
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


HALF_SENT: Final = b"POST /else HTTP/1.1\r\nHost: rooms\r\nContent-Length: 2000\r\n\r\nkey="
CHECK: Final = b"GET /health/live HTTP/1.1\r\nHost: rooms\r\n\r\n"


async def test_half_sent_requests_without_a_key_make_room_for_a_health_check() -> None:
    """Check that the oldest one is closed, and none that is answered or has a key."""
    bounds = ConnectionLimits(unauthenticated=8, per_address=0)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        answered, known, *half_sent = await many(place, stack, 8)
        answered[1].write(b"POST /else HTTP/1.1\r\nHost: rooms\r\nContent-Length: 4\r\n\r\nwait")
        known[1].write(post(PUBLISH, b"x", length=2))
        for _, writer in half_sent:
            writer.write(HALF_SENT)
        await until(lambda: place.service.passed_on == 8)
        for closed in half_sent[:3]:
            (check,) = await many(place, stack, 1)
            assert await ask(check, CHECK) == 404
            assert await is_closed(closed)
            check[1].close()
            await until(lambda: len(place.connections) < 8)
            (beyond,) = await many(place, stack, 1)
            beyond[1].write(HALF_SENT)
            sent = place.service.passed_on
            await until(lambda sent=sent: place.service.passed_on > sent)  # type: ignore[misc]
        assert place.closed == ["unauthenticated"] * 3
        place.service.opened.set()
        assert (await answer_from(answered[0]))[0].startswith(b"HTTP/1.1 404 ")
        assert await ask(known, b"y") == 202


async def test_half_sent_requests_of_one_address_make_room_for_its_others() -> None:
    bounds = ConnectionLimits(per_address=2)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        half_sent = await many(place, stack, 2)
        for _, writer in half_sent:
            writer.write(HALF_SENT)
        await until(lambda: place.service.passed_on == 2)
        (check,) = await many(place, stack, 1)
        assert await ask(check, CHECK) == 404
        assert await is_closed(half_sent[0])
        assert place.closed == ["per_address"]


async def test_one_address_has_a_bound_of_its_own() -> None:
    async with served(bounds=ConnectionLimits(per_address=2)) as place, AsyncExitStack() as stack:
        connections = await many(place, stack, 3)
        assert await is_closed(connections[0])
        assert place.closed == ["per_address"]
        assert [await ask(one, post(PUBLISH)) for one in connections[1:]] == [202] * 2
        for _ in range(5):
            assert [await ask(one, post(PUBLISH)) for one in await many(place, stack, 1)] == [202]
        assert place.closed == ["per_address"]


async def test_a_trusted_proxy_has_no_bound_of_its_own() -> None:
    trusted = (ipaddress.ip_network("127.0.0.0/8"),)
    async with (
        served(bounds=ConnectionLimits(per_address=2, trusted=trusted)) as place,
        AsyncExitStack() as stack,
    ):
        assert [await ask(one, STRANGE) for one in await many(place, stack, 5)] == [401] * 5
        assert not place.closed


async def test_a_revoked_key_loses_its_reserved_place() -> None:
    bounds = ConnectionLimits(connections=8, unauthenticated=2, per_address=0)
    async with served(bounds=bounds) as place, AsyncExitStack() as stack:
        (one,) = await many(place, stack, 1)
        assert await ask(one, post(PUBLISH)) == 202
        assert await ask(one, STRANGE) == 401
        await many(place, stack, 3)
        assert await is_closed(one)


class Fake:
    """Fake a connection that can be closed, or not."""

    def __init__(
        self, address: str | None = None, *, idle: bool = True, awaits_body: bool = False
    ) -> None:
        self.address = address
        self.idle = idle
        self.awaits_body = awaits_body
        self.unsent_bytes = 0
        self.dropped = False

    def check_timeouts(self, now: float) -> None:
        """Wait for ever."""

    def drop(self) -> None:
        self.dropped = True


async def test_an_idle_connection_goes_before_one_that_awaits_a_body() -> None:
    connections = ConnectionRegistry(
        ConnectionLimits(unauthenticated=4, per_address=0), count_closed=lambda _: None
    )
    awaiting = [Fake(idle=False, awaits_body=True) for _ in range(2)]
    busy, idle = Fake(idle=False), Fake()
    new = [Fake(idle=False) for _ in range(4)]
    held = (*awaiting, busy, idle)
    assert all(connections.add(one) for one in held)
    assert connections.add(new[0])
    assert [one.dropped for one in held] == [False, False, False, True]
    assert connections.add(new[1])
    assert [one.dropped for one in held] == [True, False, False, True]
    assert connections.add(new[2])
    assert not connections.add(new[3])
    assert [one.dropped for one in held] == [True, True, False, True]
    for connection in (busy, *new):
        connections.remove(connection)


async def test_an_idle_connection_behind_many_busy_ones_is_found() -> None:
    connections = ConnectionRegistry(
        ConnectionLimits(unauthenticated=301, per_address=0), count_closed=lambda _: None
    )
    busy, idle, new = [Fake(idle=False) for _ in range(300)], Fake(), Fake()
    assert all(connections.add(one) for one in (*busy, idle, new))
    assert idle.dropped
    for connection in (*busy, new):
        connections.remove(connection)


async def test_a_flood_examines_busy_connections_in_turn() -> None:
    """Check that each new connection costs a bounded time, and that an idle one is found then."""
    examined = 0

    class Counting(Fake):
        @property
        def idle(self) -> bool:
            nonlocal examined
            examined += 1
            return self.is_idle

        @idle.setter
        def idle(self, idle: bool) -> None:
            self.is_idle = idle

    connections = ConnectionRegistry(
        ConnectionLimits(connections=1000, unauthenticated=900, per_address=0),
        count_closed=lambda _: None,
    )
    held = [Counting(idle=False) for _ in range(900)]
    assert all(connections.add(one) for one in held)
    tries = 20
    assert not any(connections.add(Fake()) for _ in range(tries))
    assert examined <= tries * 256 + 1000
    held[700].idle = True
    assert any(connections.add(Fake()) for _ in range(4))
    assert held[700].dropped
    for connection in list(connections._unauthenticated):
        connections.remove(connection)


async def test_the_organisation_with_most_connections_is_displaced_first() -> None:
    closed: list[str] = []
    connections = ConnectionRegistry(
        ConnectionLimits(connections=5, per_address=0), count_closed=closed.append
    )
    large = [Fake(idle=number != 0) for number in range(3)]
    small, new = Fake(), Fake()
    for connection, organisation in [(one, "large") for one in large] + [
        (small, "small"),
        (new, "new"),
    ]:
        assert connections.add(connection)
        connections.mark_authenticated(connection, organisation)  # type: ignore[arg-type]
    assert [one.dropped for one in (*large, small, new)] == [False, True, False, False, False]
    assert closed == ["organisation"]
    for connection in (*large, small, new):
        connections.remove(connection)
        connections.remove(connection)
    assert not len(connections)


async def test_neighbours_in_ipv6_are_one_address() -> None:
    closed: list[str] = []
    connections = ConnectionRegistry(ConnectionLimits(per_address=1), count_closed=closed.append)
    first, second, other = Fake("2001:db8::1"), Fake("2001:db8::2"), Fake("2001:db8:0:1::1")
    mapped, same = Fake("::ffff:192.0.2.1"), Fake("192.0.2.1")
    assert all(connections.add(one) for one in (first, second, other, mapped, same))
    assert [one.dropped for one in (first, second, other, mapped, same)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    for one in (second, other, same):
        connections.remove(one)


async def test_a_process_without_files_says_so_once_and_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[str] = []
    connections = ConnectionRegistry(ConnectionLimits(), count_closed=counted.append)
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
    """Check that new connections are closed, existing ones are served, and the process notices."""
    command = (sys.executable, "-m", "tests.support.few_files_listener", str(LIMIT))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
    )
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


async def test_closed_connections_leave_no_state() -> None:
    async with served(bounds=ConnectionLimits(unauthenticated=2)) as place:
        for _ in range(3):
            async with AsyncExitStack() as stack:
                await many(place, stack, 4)
        await until(lambda: not place.state.connections and not len(place.connections))


HALVES: Final = ConnectionLimits(organisation_body_bytes=3_000, small_body_bytes=100)
HALF: Final = post(PUBLISH, b"x" * 1_000, length=1_001)


async def upload(streams: Streams, place: Place) -> None:
    """Send a request without the last byte of its body, until all of it is held."""
    before = len(place.service.clients)
    streams[1].write(HALF[:-1_000])
    await until(lambda: len(place.service.clients) > before)
    held = place.connections.body_bytes
    streams[1].write(HALF[-1_000:])
    await until(lambda: place.connections.body_bytes == held + 900)


async def test_bodies_that_do_not_end_are_bounded_for_each_organisation() -> None:
    """Check that one key cannot fill the memory: the body beyond the bound is refused."""
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


async def test_unread_answers_are_bounded_for_each_organisation() -> None:
    """Check that a key that never reads cannot fill the memory: its fullest connections are closed."""
    loop = asyncio.get_running_loop()
    bounds = ConnectionLimits(organisation_body_bytes=1_000_000, write_timeout_s=PATIENCE_S)
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
            protocol.transport.write(
                b"x" * 5_000_000
            )  # more than the kernel takes for a client that does not read
        await until(lambda: place.closed == ["unread"] * 4)
        assert await ask(reading, post(PUBLISH)) == 202


async def test_a_body_is_held_until_its_request_is_answered_or_its_client_gone() -> None:
    async with served(bounds=HALVES) as place, AsyncExitStack() as stack:
        for _ in range(5):
            (one,) = await many(place, stack, 1)
            for _ in range(3):
                await upload(one, place)
                assert await ask(one, b"y") == 202
                assert place.connections.body_bytes == 0
            await upload(one, place)
            one[1].close()
            await until(lambda: place.connections.body_bytes == 0)
        assert not place.closed
