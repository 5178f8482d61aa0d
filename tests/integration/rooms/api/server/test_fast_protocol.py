"""Test that hot requests on the connection get the same answers as through uvicorn's protocol."""

import asyncio
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import pytest

from rooms.api.server.connections import ConnectionLimits
from rooms.api.server.fast_protocol import FastProtocol
from rooms.api.server.head import MAX_HEAD_BYTES, MAX_HEADERS
from tests.support.http_listener import (
    MAX_BODY_BYTES,
    PUBLISH,
    Plain,
    answer_from,
    connected,
    post,
    served,
)
from tests.support.installation import PATIENCE_S

SETTLE_S: Final = 0.05
END: Final = b"GET /end HTTP/1.1\r\nhost: rooms\r\nconnection: close\r\n\r\n"


WHOLE: Final[dict[str, tuple[bytes, int]]] = {
    "publish": (post(PUBLISH, b'{"n": 1}'), 1),
    "batch": (post(f"{PUBLISH}/batch", b"[]"), 1),
    "pull": (post("/v1/subscriptions/9/pull"), 1),
    "ack": (post("/v1/subscriptions/9/ack"), 1),
    "no body": (post(PUBLISH, b""), 1),
    "with a key": (post(PUBLISH, b"{}", "Idempotency-Key: one", "idempotency-key: two"), 1),
    "with blanks": (
        post(PUBLISH, b"{}", "Idempotency-Key:\t key \t").replace(b" ours", b" ours \t"),
        1,
    ),
    "replayed": (post(PUBLISH, b"again"), 1),
    "in chunks": (
        post(PUBLISH, b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        1,
    ),
    "no room": (post("/v1/rooms/none/messages"), 1),
    "a bug": (post(PUBLISH, b"bug"), 1),
    "unknown key": (post(PUBLISH).replace(b"Bearer ours", b"Bearer theirs"), 1),
    "two at once": (post(PUBLISH, b"one") + post(PUBLISH, b"two"), 2),
    "to be upgraded": (post(PUBLISH, b"", "Connection: upgrade", "Upgrade: h2c"), 1),
    "closing": (post(PUBLISH, b"{}", "Connection: close"), 1),
}
"""Hot requests, and the number of their answers."""
OTHERS: Final[dict[str, tuple[bytes, int]]] = {
    "too large": (post(PUBLISH, b"x" * (MAX_BODY_BYTES + 1)), 1),
    "with a query": (post(f"{PUBLISH}?a=b"), 1),
    "with a fragment": (post(f"{PUBLISH}#a"), 1),
    "escaped": (post("/v1/rooms/%37/messages"), 1),
    "another route": (post("/v1/rooms"), 1),
    "another method": (post(PUBLISH).replace(b"POST", b"PUT"), 1),
    "old": (post(PUBLISH, version="1.0"), 1),
    "expecting": (post(PUBLISH, b"{}", "Expect: 100-continue"), 2),
    "three of two kinds": (
        post(PUBLISH, b"one") + post("/else", b"two") + post(PUBLISH, b"three"),
        3,
    ),
}
"""Requests that go through ASGI."""
ENDING: Final[dict[str, tuple[bytes, int]]] = {
    "behind a closing one": (post(PUBLISH, b"one", "Connection: close") + post(PUBLISH, b"two"), 1),
    "not ASCII": (post("/v1/rooms/\u00fc/messages"), 1),
    "smuggled": (post(PUBLISH, b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"), 1),
    "two lengths": (post(PUBLISH, b"{}", "Content-Length: 7"), 1),
    "no header": (post(PUBLISH, b"{}", "nonsense"), 1),
    "no length": (post(PUBLISH, b"{}", length=-1), 1),
    "noise": (b"POST /v1/ noise\r\n\r\n", 1),
}
"""Requests that end their connection before all input is read.

In pieces, the rest may find it closed.
"""
MIXED: Final = {"three of two kinds": 1, "behind a closing one": 0}
"""Return how many of these requests go through ASGI."""
STEP: Final = 7


async def conversation(
    protocol: type[FastProtocol],
    pieces: Sequence[bytes],
    count: int,
    *,
    without_task: bool = False,
) -> tuple[list[tuple[bytes, bytes]], int]:
    """Return the answers to a request in these pieces and to the next one, and the count through ASGI."""
    async with (
        served(protocol, without_task=without_task) as place,
        connected(place) as (reader, writer),
    ):
        if without_task:
            # The first request of a connection takes no short cut.
            writer.write(post(PUBLISH))
            await answer_from(reader)
        for piece in pieces:
            writer.write(piece)
            if len(pieces) > 1:
                await asyncio.sleep(0.001)
        answers = [await answer_from(reader) for _ in range(count)]
        with suppress(ConnectionError):
            writer.write(END)
            answers.append(await answer_from(reader))
            assert await reader.read() == b""
        return answers, place.service.passed_on


@pytest.mark.parametrize("name", [*WHOLE, *OTHERS, *ENDING])
async def test_both_protocols_answer_alike(name: str) -> None:
    request, count = (WHOLE | OTHERS | ENDING)[name]
    theirs, by_asgi = await conversation(Plain, [request], count)
    ours, passed_on = await conversation(FastProtocol, [request], count)
    assert ours == theirs
    without_task, _ = await conversation(FastProtocol, [request], count, without_task=True)
    assert without_task == theirs
    assert all(head for head, _ in ours[:count])
    assert passed_on == MIXED.get(name, 0 if name in WHOLE else by_asgi)


@pytest.mark.parametrize(
    "name", [name for name, (request, _) in (WHOLE | OTHERS).items() if len(request) < 500]
)
async def test_a_request_in_pieces_gets_the_same_answer(name: str) -> None:
    """Cut the request everywhere, into any number of pieces."""
    request, count = (WHOLE | OTHERS)[name]
    whole, _ = await conversation(Plain, [request], count)
    cuts = range(1, len(request), STEP)
    for pieces in [[request[:at], request[at:]] for at in cuts] + [
        [request[at : at + 1] for at in range(len(request))]
    ]:
        answers, _ = await conversation(FastProtocol, pieces, count)
        assert answers == whole, pieces


async def test_many_requests_share_a_connection_whatever_they_are() -> None:
    async with served() as place, connected(place) as (reader, writer):
        for n in range(30):
            body = b"%d" % n
            writer.write(post(PUBLISH if n % 3 else "/else", body))
            head, content = await answer_from(reader)
            assert head.startswith(b"HTTP/1.1 202 " if n % 3 else b"HTTP/1.1 404 ")
            assert body in content
        assert place.service.passed_on == 10
        assert place.state.total_requests == 30


@pytest.mark.parametrize("blank", [" ", "\t"])
async def test_blanks_behind_a_header_are_no_part_of_it(blank: str) -> None:
    """Check that the first request of a connection, and later ones, get the same answer."""
    request = post(PUBLISH, b"{}", f"Idempotency-Key: abc{blank}")
    request = request.replace(b" ours", b" ours" + blank.encode())
    async with served() as place, connected(place) as (reader, writer):
        for _ in range(2):
            writer.write(request)
            head, body = await answer_from(reader)
            assert head.startswith(b"HTTP/1.1 202 ")
            assert body == repr((7, b"{}", "abc")).encode()


@pytest.mark.parametrize("path", [PUBLISH, "/else"])
async def test_a_pipelined_request_waits_for_the_answer_before_it(path: str) -> None:
    """Check that nothing more is read meanwhile, and that answers come in order."""
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(path, b"wait"))
        await place.service.waiting.wait()
        for body in (b"second", b"third"):
            writer.write(post(PUBLISH, body))
            await writer.drain()
            await asyncio.sleep(SETTLE_S)
        (protocol,) = place.protocols
        assert protocol.flow.read_paused
        place.service.opened.set()
        for body in (b"wait", b"second", b"third"):
            _, content = await answer_from(reader)
            assert body in content
        assert not protocol.flow.read_paused


async def test_the_address_of_the_client_is_known_by_both_ways() -> None:
    """Check that the cost of unknown keys is charged to their address."""
    async with served() as place, connected(place) as (reader, writer):
        whole = post(PUBLISH, b"x")
        for pieces in ([whole], [whole[:-1], whole[-1:]]):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(SETTLE_S)
            await answer_from(reader)
        assert place.service.passed_on == 1
        assert place.service.clients == [writer.get_extra_info("sockname")] * 2


async def test_nothing_is_published_behind_a_request_that_ends_its_connection() -> None:
    """Check that the request's client gets an answer."""
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH, b"wait", "Connection: close"))
        await place.service.waiting.wait()
        writer.write(post(PUBLISH, b"behind"))
        await writer.drain()
        await asyncio.sleep(SETTLE_S)
        place.service.opened.set()
        _, content = await answer_from(reader)
        assert b"wait" in content
        with suppress(ConnectionError):
            assert await reader.read() == b""
        await asyncio.sleep(SETTLE_S)
        assert place.service.published == [b"wait"]


async def test_a_body_that_looks_like_a_request_is_a_body() -> None:
    """Check that a request answered before its body came leaves nothing under way."""
    async with served() as place, connected(place) as (reader, writer):
        inner = post(PUBLISH, b"inner")
        whole = post("/early", inner)
        writer.write(whole[: -len(inner)])
        head, _ = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 404 ")
        writer.write(inner)
        await writer.drain()
        await asyncio.sleep(SETTLE_S)
        writer.write(post(PUBLISH, b"next"))
        _, content = await answer_from(reader)
        assert b"next" in content
        assert place.service.published == [b"next"]


async def test_a_disconnect_reaches_a_waiting_poll() -> None:
    async with served() as place:
        async with connected(place) as (_, writer):
            writer.write(post("/v1/subscriptions/9/pull", b"wait"))
            await place.service.waiting.wait()
            assert not place.service.gone.is_set()
        async with asyncio.timeout(PATIENCE_S):
            await place.service.gone.wait()
        assert place.service.passed_on == 0


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once, in both directions."""
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("path", [PUBLISH, "/else"])
async def test_an_answer_to_a_disconnected_client_is_dropped(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as place:
        async with connected(place) as (_, writer):
            writer.write(post(path, b"wait"))
            await place.service.waiting.wait()
            reset(writer)
        async with asyncio.timeout(PATIENCE_S):
            while place.state.connections:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0.005)
            (task,) = place.state.tasks
            place.service.opened.set()
            await task
        assert not place.state.tasks
        assert not len(place.connections)
        assert not caplog.records


async def test_a_client_that_reads_nothing_gets_no_more_to_read() -> None:
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH, b"wait"))
        await place.service.waiting.wait()
        (protocol,) = place.protocols
        protocol.pause_writing()
        place.service.opened.set()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), SETTLE_S)
        protocol.resume_writing()
        head, _ = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 202 ")


async def test_shutdown_waits_for_requests_under_way() -> None:
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH, b"wait"))
        await place.service.waiting.wait()
        (protocol,) = place.protocols
        protocol.shutdown()
        place.service.opened.set()
        head, content = await answer_from(reader)
        assert b"\r\nconnection: close\r\n" in head
        assert b"wait" in content
        assert await reader.read() == b""
        assert not place.state.connections


async def test_an_abandoned_answer_closes_its_connection() -> None:
    """Check the end of the shutdown time: the client can see that its request is in doubt."""
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH, b"wait"))
        await place.service.waiting.wait()
        (task,) = place.state.tasks
        task.cancel()
        assert await reader.read() == b""
        assert not place.state.connections


async def test_shutdown_closes_idle_connections() -> None:
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH))
        await answer_from(reader)
        (protocol,) = place.protocols
        protocol.shutdown()
        assert await reader.read() == b""
        assert not place.state.connections


async def test_a_connection_is_idle_from_the_answer_to_the_next_request() -> None:
    """Check that the idle time only starts then."""
    now, idle_s = asyncio.get_running_loop().time, ConnectionLimits().idle_timeout_s
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH))
        await answer_from(reader)
        (protocol,) = place.protocols
        for _ in range(2):
            writer.write(post(PUBLISH, b"wait"))
            await place.service.waiting.wait()
            protocol.check_timeouts(now() + 10 * idle_s)
            place.service.opened.set()
            head, _ = await answer_from(reader)
            assert head.startswith(b"HTTP/1.1 202 ")
            protocol.check_timeouts(now() + idle_s - 5)
            place.service.opened.clear()
            place.service.waiting.clear()
        protocol.check_timeouts(now() + idle_s + 1)
        assert await reader.read() == b""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([f"X-{number}: y" for number in range(MAX_HEADERS - 3)], 202),
        ([f"X-{number}: y" for number in range(MAX_HEADERS - 2)], 431),
        (["X: " + "y" * (MAX_HEAD_BYTES - 500)], 202),
        (["X: " + "y" * MAX_HEAD_BYTES], 431),
    ],
)
async def test_the_head_of_a_later_request_is_bounded(headers: list[str], status: int) -> None:
    """Check the bounds without the framer, through which the first request of a connection goes."""
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH))
        assert (await answer_from(reader))[0].startswith(b"HTTP/1.1 202 ")
        (protocol,) = place.protocols
        place.routes.max_body_bytes = 2 * MAX_HEAD_BYTES  # a longer request is not hot
        protocol.data_received(post(PUBLISH, b"{}", *headers))  # in one read
        head, _ = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert len(place.service.published) == 1 + (status == 202)
        assert place.service.passed_on == 0
