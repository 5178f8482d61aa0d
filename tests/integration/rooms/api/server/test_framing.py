"""Test malformed and hostile requests, on hot routes and through ASGI."""

import asyncio
import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import pytest

from rooms.api.server.connections import ConnectionLimits
from rooms.api.server.framing import MAX_PARTS, RequestFramer
from rooms.api.server.responses import SECURITY_HEADERS
from tests.support.http_listener import (
    PART,
    PARTS,
    PUBLISH,
    Place,
    answer_from,
    connected,
    post,
    served,
)
from tests.support.installation import PATIENCE_S
from tests.support.pull_service import until

PATHS: Final = (PUBLISH, "/else")
"""A hot request, and one through ASGI."""
LINE: Final = b"POST /v1/rooms/7/messages HTTP/1.1\r\n"
HOST: Final = b"Host: rooms\r\n"


async def answers(place: Place, pieces: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Return everything until the connection is closed; the client sends only these pieces."""
    found = []
    async with connected(place) as (reader, writer):
        with suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if len(pieces) > 1:
                    await asyncio.sleep(0)
            writer.write_eof()
            while (answer := await answer_from(reader))[0]:
                found.append(answer)
    return found


def statuses(found: Sequence[tuple[bytes, bytes]]) -> list[int]:
    return [int(head.split(b" ")[1]) for head, _ in found]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (LINE + b"\r\n", 400),
        (LINE + HOST + HOST + b"\r\n", 400),
        (LINE.replace(b"1.1", b"2.0") + HOST + b"\r\n", 505),
        (LINE.replace(b"POST", b"BREW") + HOST + b"\r\n", 405),
        (LINE + HOST + b"X: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (LINE + HOST + b"X: y\r\n" * 101 + b"\r\n", 431),
        (b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
        (LINE + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}", 400),
        (
            post(PUBLISH, b"0\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", "Transfer-Encoding: chunked"),
            431,
        ),
    ],
)
async def test_a_malformed_request_gets_a_problem_and_closes_the_connection(
    data: bytes, status: int
) -> None:
    async with served() as place, connected(place) as (reader, writer):
        writer.write(data)
        head, body = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 %d " % status)
        problem = json.loads(body)
        assert problem["status"] == status
        assert problem["type"].startswith("urn:rooms:problem:")
        for name, value in SECURITY_HEADERS:
            assert f"{name}: {value}\r\n".encode() in head
        assert b"\r\nconnection: close\r\n" in head
        with suppress(ConnectionError):
            assert await reader.read() == b""
        assert place.closed in (["malformed"], ["head_too_large"])
        assert not place.service.published


@pytest.mark.parametrize("path", PATHS)
async def test_a_last_answer_arrives_although_the_client_still_sends(path: str) -> None:
    """Check that the kernel does not reset the answer while the client still sends."""
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(path, b"first") + b"\x01" * 300_000)
        heads = [await answer_from(reader) for _ in range(2)]
        assert b"first" in heads[0][1]
        assert statuses(heads)[1] == 400
        assert await reader.read() == b""


@pytest.mark.parametrize("path", PATHS)
async def test_complete_requests_before_garbage_are_answered(path: str) -> None:
    async with served() as place:
        found = await answers(
            place, [post(path, b"one") + post(path, b"two") + b"\r\ngarbage\x00\r\n\r\n"]
        )
        assert [b"one" in found[0][1], b"two" in found[1][1]] == [True, True]
        assert statuses(found)[2:] == [400]


@pytest.mark.parametrize("path", PATHS)
async def test_a_half_closed_client_gets_its_answers(path: str) -> None:
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(path, b"wait"))
        await place.service.waiting.wait()
        writer.write(post(path, b"behind"))
        writer.write_eof()
        place.service.opened.set()
        for body in (b"wait", b"behind"):
            _, content = await answer_from(reader)
            assert body in content
        assert await reader.read() == b""


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("behind", [False, True])
async def test_a_half_closed_client_gets_an_answer_in_parts(
    begun: bool,  # noqa: FBT001
    behind: bool,  # noqa: FBT001
) -> None:
    """Check that an export arrives completely, and so does the answer behind it."""
    async with served() as place, connected(place) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: rooms\r\n\r\n")
        if begun:
            await place.service.waiting.wait()
        if behind:
            writer.write(post("/else", b"behind"))
        writer.write_eof()
        await place.service.waiting.wait()
        await asyncio.sleep(0.01)
        place.service.opened.set()
        assert (await answer_from(reader))[1] == PARTS * PART
        if behind:
            assert b"behind" in (await answer_from(reader))[1]
        assert await reader.read() == b""


async def test_a_stream_ends_when_its_client_half_closes() -> None:
    async with served() as place, connected(place) as (reader, writer):
        place.service.opened.set()
        writer.write(b"GET /events HTTP/1.1\r\nHost: rooms\r\n\r\n")
        await reader.readuntil(PART)
        writer.write_eof()
        await place.service.gone.wait()
        with suppress(ConnectionError):
            await reader.read()


@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_poll_of_a_half_closed_client_ends(pieces: int) -> None:
    """Check that no message is leased to a client that may have disconnected."""
    request = post("/v1/subscriptions/9/pull", b"wait")
    async with served() as place, connected(place) as (reader, writer):
        writer.write(request[: len(request) // pieces])
        await asyncio.sleep(0.01)
        writer.write(request[len(request) // pieces :])
        await place.service.waiting.wait()
        writer.write_eof()
        head, _ = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert place.service.gone.is_set()


CHUNKED: Final = "Transfer-Encoding: chunked"
TRAILED: Final = b"3\r\nabc\r\n0\r\nAuthorization: Bearer ours\r\nIdempotency-Key: t\r\n\r\n"


@pytest.mark.parametrize("authorized", [True, False])
async def test_trailers_are_never_headers(authorized: bool) -> None:  # noqa: FBT001
    request = post(PUBLISH, TRAILED, CHUNKED)
    if not authorized:
        request = request.replace(b"Authorization: Bearer ours\r\n", b"", 1)
    async with served() as place:
        found = {
            tuple(await answers(place, pieces))
            for pieces in [
                [request],
                *[[request[:at], request[at:]] for at in range(1, len(request), 5)],
                [request[at : at + 1] for at in range(len(request))],
            ]
        }
        (((head, body),),) = found
        assert head.startswith(b"HTTP/1.1 202 " if authorized else b"HTTP/1.1 401 ")
        if authorized:
            assert body == repr((7, b"abc", None)).encode()
        else:
            assert not place.service.published


DIGITS: Final = b"".join(b"%d" % (number % 10) for number in range(40_000))
TINY: Final = b"".join(b"1\r\n%c\r\n" % digit for digit in DIGITS)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return what grows by one with each part of a body that is parsed."""
    parsed: list[bytes] = []
    read_part = RequestFramer._read_part

    def count(framer: RequestFramer, pieces: list[bytes]) -> bool:
        parsed.append(b"")
        return read_part(framer, pieces)

    monkeypatch.setattr(RequestFramer, "_read_part", count)
    return parsed


async def test_tiny_chunks_do_not_keep_the_loop(parts: list[bytes]) -> None:
    """Check that a read of 256 KiB, which holds 40,000 chunks, is parsed in many turns."""
    most, last = 0, 0
    async with served() as place, connected(place) as (reader, writer):
        for _ in range(2):
            writer.write(post("/else", TINY, CHUNKED))
            await writer.drain()
            end = len(parts) + 3 * len(DIGITS)
            while len(parts) < end:
                await asyncio.sleep(0)
                most, last = max(most, len(parts) - last), len(parts)
            writer.write(b"0\r\n\r\n" + post(PUBLISH, b"behind"))
            head, body = await answer_from(reader)
            assert head.startswith(b"HTTP/1.1 404 ")
            assert repr(DIGITS).encode() in body
            _, body = await answer_from(reader)
            assert b"behind" in body
    # Of one turn: the end of what was kept, and a slice of what was just read.
    assert 0 < most <= 2 * MAX_PARTS


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_of_tiny_chunks_is_complete_however_it_is_cut(path: str) -> None:
    """Check requests behind it as well, although the client has sent its end."""
    digits = DIGITS[:1_000]
    request = post(path, TINY[: 6 * len(digits)] + b"0\r\nX: y\r\n\r\n", CHUNKED)
    behind = post(PUBLISH, b"behind")
    async with served() as place:
        for size in (len(request + behind), 4_000, 601, 100):
            data = request + behind + request + behind
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
            found = await answers(place, pieces)
            assert [digits in body for _, body in found] == [True, False] * 2
            assert [b"behind" in body for _, body in found] == [False, True] * 2


async def test_chunks_behind_an_early_answer_end_the_connection(parts: list[bytes]) -> None:
    """Check that a client without a key cannot have its chunks parsed without end."""
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post("/early", TINY, CHUNKED))
        head, _ = await answer_from(reader)
        assert head.startswith(b"HTTP/1.1 404 ")
        assert await reader.read() == b""
        assert len(parts) <= 2 * MAX_PARTS
        with suppress(ConnectionError):
            writer.write(TINY)
            await writer.drain()
        assert len(parts) <= 2 * MAX_PARTS


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("upgrade", ["h2c", "TLS/1.0", "foo, websocket", "websocket"])
async def test_an_unsupported_upgrade_is_ignored_and_its_body_kept(path: str, upgrade: str) -> None:
    """Send the upgrade that Java's HttpClient and `curl --http2` send with the first request."""
    lines = (
        "Connection: Upgrade, HTTP2-Settings",
        f"Upgrade: {upgrade}",
        "HTTP2-Settings: AAEAAEAAAAIAAAAB",
    )
    async with served() as place:
        request = post(path, b"precious", *lines)
        for pieces in ([request], [request[:60], request[60:]]):
            ((head, body),) = await answers(place, pieces)
            assert b"precious" in body
            assert head.startswith(b"HTTP/1.1 202 " if path == PUBLISH else b"HTTP/1.1 404 ")


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_waits_for_100_gets_it_before_it_sends_its_body(path: str) -> None:
    async with served() as place, connected(place) as (reader, writer):
        whole = post(path, b"late", "Expect: 100-continue")
        writer.write(whole[:-4])
        head, _ = await answer_from(reader)
        assert head == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(whole[-4:])
        _, body = await answer_from(reader)
        assert b"late" in body


async def test_requests_pipelined_behind_a_slow_one_are_not_read() -> None:
    async with served() as place, connected(place) as (reader, writer):
        writer.write(post(PUBLISH, b"wait"))
        await place.service.waiting.wait()
        flood = post(PUBLISH, b"x") * 100_000
        writer.write(flood)
        (protocol,) = place.protocols
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert protocol._framer.buffered_bytes < 2_000_000  # of 16 MB
        place.service.opened.set()
        for _ in range(1000):
            head, _ = await answer_from(reader)
            assert head.startswith(b"HTTP/1.1 202 ")


async def test_a_path_with_an_empty_part_is_refused() -> None:
    async with served() as place:
        found = await answers(place, [post("//v1//rooms/7/messages") + post("/v1/rooms//messages")])
        assert statuses(found) == [404, 404]
        assert not place.service.published


async def test_the_absolute_form_is_taken_as_its_path() -> None:
    async with served() as place:
        ((head, body),) = await answers(place, [post(f"http://elsewhere{PUBLISH}", b"absolute")])
        assert head.startswith(b"HTTP/1.1 202 ")
        assert b"absolute" in body


async def test_a_question_in_the_room_is_a_query_on_both_ways() -> None:
    async with served() as place:
        first = post(PUBLISH)  # later requests may take the hot route
        found = await answers(
            place, [first, post("/v1/rooms/7?x/messages"), first, post("/v1/rooms/7#x/messages")]
        )
        assert statuses(found) == [202, 404, 202, 400]


async def test_a_missing_body_times_out() -> None:
    bounds = ConnectionLimits(
        grace_s=0.05, body_bytes_per_s=1000, head_timeout_s=PATIENCE_S, linger_s=0.2
    )
    for path in PATHS:
        async with served(bounds=bounds) as place, connected(place) as (reader, writer):
            writer.write(post(path, b"x", length=2))
            head, _ = await answer_from(reader)
            assert head.startswith(b"HTTP/1.1 408 ")
            assert await reader.read() == b""
            assert place.closed == ["slow_request"]
            assert not place.service.published


@pytest.mark.parametrize("sent", [b"", b"POST", LINE + HOST, post(PUBLISH) + LINE])
async def test_a_missing_head_times_out(sent: bytes) -> None:
    bounds = ConnectionLimits(head_timeout_s=0.5, linger_s=0.2)
    async with served(bounds=bounds) as place, connected(place) as (reader, writer):
        writer.write(sent)
        everything = await reader.read()
        assert everything.count(b"HTTP/1.1 408 ") == bool(sent)
        assert everything.count(b"HTTP/1.1 202 ") == sent.startswith(post(PUBLISH))
        assert place.closed == ["slow_request"]
        async with asyncio.timeout(PATIENCE_S):
            writer.close()
            await until(lambda: not len(place.connections))


async def test_a_client_that_never_reads_is_dropped() -> None:
    """Check that answers of a client that does not read do not wait in memory without limit."""
    bounds = ConnectionLimits(write_timeout_s=0.2, body_bytes_per_s=1)
    loop = asyncio.get_running_loop()
    async with served(bounds=bounds) as place:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await loop.sock_connect(raw, place.address)
            sending = asyncio.ensure_future(
                loop.sock_sendall(raw, post(PUBLISH, b"y" * 1500) * 20_000)
            )
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda: "slow_reader" in place.closed)
                with suppress(ConnectionError):
                    await sending
        await until(lambda: not len(place.connections))
