"""Test the contract of `rooms.ports.Sender` with HttpSender and real endpoints that misbehave."""

import asyncio
import gc
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path

import pytest

from delivery.push.http.client import HttpSender
from delivery.push.http.connection import HttpLimits
from delivery.push.http.dns import DnsResolver, Resolver
from delivery.push.http.ssrf import IpNetwork, SsrfGuard
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from rooms.ports import Sender
from tests.support.certificates import Authority
from tests.support.scripted_endpoints import (
    BOUND_S,
    NO_CONTENT,
    OK,
    Endpoint,
    Stream,
    answering,
    deaf_port,
    hanging,
    serving,
)

LOOPBACK: tuple[IpNetwork, ...] = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
HEADERS = b"Content-Type: application/json\r\nwebhook-id: msg_1\r\n"
BODY = b'{"a": 1}\x00\xff\r\n\r\n'
ORGANISATION = OrganisationId("01900000-0000-7000-8000-000000000001")
SHORT_S = 0.5
LONG_S = 60.0


def at(
    port: int, *, host: str = "127.0.0.1", scheme: str = "http", path: str = "/hook?x=%20"
) -> PushUrl:
    return PushUrl.parse(f"{scheme}://{host}:{port}{path}")


@asynccontextmanager
async def sending(
    *,
    allow: Sequence[IpNetwork] = LOOPBACK,
    resolver: Resolver | None = None,
    clock: Callable[[], float] = time.monotonic,
    tls: ssl.SSLContext | None = None,
    max_connections: int = 100,
    max_idle_per_host: int = 100,
    idle_s: float = 30.0,
    sender_clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[HttpSender]:
    own = DnsResolver()
    guard = SsrfGuard(allow, resolver=resolver or own, clock=clock)
    limits = HttpLimits(
        max_connections=max_connections,
        max_idle_per_host=max_idle_per_host,
        idle_s=idle_s,
        sweep_s=0.02,
    )
    async with HttpSender(guard, limits=limits, tls=tls, clock=sender_clock) as sender:
        yield sender
    own.close()
    assert sender.connections == 0


async def post(
    sender: Sender,
    target: PushUrl,
    *,
    body: bytes = BODY,
    timeout_s: float = LONG_S,
) -> AttemptResult:
    sending = sender.send(target, HEADERS, body, organisation=ORGANISATION, timeout_s=timeout_s)
    return await asyncio.wait_for(sending, BOUND_S)


async def failing(
    script: Callable[[Stream], object], *, timeout_s: float = LONG_S
) -> tuple[AttemptResult, Endpoint]:
    """Make one attempt that the script makes fail, with a sender of its own."""
    async with serving(script) as endpoint, sending() as sender:  # type: ignore[arg-type] # scripts are coroutines
        answer = await post(sender, at(endpoint.port), timeout_s=timeout_s)
        await endpoint.one_left()
    assert answer.status is None or answer.error is not None
    assert "\n" not in answer.detail
    return answer, endpoint


# The request, and successful responses.


async def test_the_request_has_the_given_target_headers_and_body() -> None:
    async with serving(answering(OK)) as endpoint, sending() as sender:
        answer = await post(sender, at(endpoint.port))
    [(head, body)] = endpoint.requests
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /hook?x=%20 HTTP/1.1"
    assert f"Host: 127.0.0.1:{endpoint.port}".encode() in lines
    assert f"Content-Length: {len(BODY)}".encode() in lines
    assert b"webhook-id: msg_1" in lines
    assert body == BODY
    assert (answer.status, answer.error, answer.detail, answer.body_head) == (200, None, "", b"ok")
    assert answer.latency_ms > 0


async def test_one_connection_carries_many_requests() -> None:
    async with serving(answering(OK)) as endpoint, sending() as sender:
        for number in range(20):
            path = f"/{number % 3}"
            assert (
                await post(sender, at(endpoint.port, path=path), body=b"%d" % number)
            ).status == 200
    assert endpoint.connections == 1
    assert [body for _, body in endpoint.requests] == [b"%d" % number for number in range(20)]
    assert [head.split(b" ")[1] for head, _ in endpoint.requests] == [
        b"/%d" % (number % 3) for number in range(20)
    ]


async def test_empty_and_large_bodies_arrive_whole() -> None:
    large = bytes(range(256)) * 8192
    async with serving(answering(NO_CONTENT)) as endpoint, sending() as sender:
        for body in (b"", large, b"after"):
            assert (await post(sender, at(endpoint.port), body=body)).status == 204
    assert [body for _, body in endpoint.requests] == [b"", large, b"after"]
    assert endpoint.connections == 1


async def test_ipv6_is_dialled_and_bracketed() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    async with serving(answering(OK), host="::1") as endpoint, sending() as sender:
        assert (await post(sender, at(endpoint.port, host="[::1]"))).status == 200
    assert f"\r\nHost: [::1]:{endpoint.port}\r\n".encode() in endpoint.requests[0][0]


async def test_chunks_are_joined_and_the_head_of_the_body_is_kept() -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (300, b"%d" % number * 300) for number in range(5))
    whole = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\nRetry-After: 9\r\n\r\n"
    )
    async with serving(answering(whole)) as endpoint, sending() as sender:
        for _ in range(2):
            answer = await post(sender, at(endpoint.port))
            assert answer.status == 200
            assert answer.body_head == (b"0" * 300 + b"1" * 300 + b"2" * 300 + b"3" * 300)[:1024]
    assert endpoint.connections == 1


async def test_a_response_may_arrive_in_any_pieces() -> None:
    whole = b"HTTP/1.1 503 Busy\r\nRetry-After:  17 \r\nContent-Length: 4\r\n\r\nbusy"

    async def script(stream: Stream) -> None:
        await stream.request()
        for byte in whole:
            await stream.write(bytes([byte]))
            await asyncio.sleep(0)

    async with serving(script) as endpoint, sending() as sender:
        answer = await post(sender, at(endpoint.port))
    assert (answer.status, answer.error, answer.detail) == (503, ErrorClass.STATUS, "HTTP 503")
    assert (answer.retry_after, answer.body_head) == ("17", b"busy")


async def test_interim_responses_are_skipped() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nRetry-After: 1\r\nLink: <a>\r\n\r\n"
    final = b"HTTP/1.1 429 Slow\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n"
    async with serving(answering(interim + final)) as endpoint, sending() as sender:
        for _ in range(2):
            answer = await post(sender, at(endpoint.port))
            assert (answer.status, answer.retry_after) == (429, "2")
    assert endpoint.connections == 1


async def test_body_that_ends_with_the_connection() -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.write(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")

    async with serving(script) as endpoint, sending() as sender:
        for _ in range(2):
            answer = await post(sender, at(endpoint.port))
            assert (answer.status, answer.error, answer.body_head) == (200, None, b"until the end")
    assert endpoint.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno",
        OK + b"HTTP/1.1 2",
        OK + b"trailing bytes",
    ],
    ids=["close", "http-1.0", "second-answer", "half-answer", "garbage"],
)
async def test_a_connection_in_an_unclear_state_is_not_reused(answer: bytes) -> None:
    async with serving(answering(answer)) as endpoint, sending() as sender:
        for _ in range(2):
            assert (await post(sender, at(endpoint.port))).body_head == b"ok"
            await endpoint.one_left()
    assert endpoint.connections == 2


async def test_bytes_on_an_idle_connection_close_it() -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.write(OK)
        await reported.wait()
        await stream.write(b"HTTP/1.1 500 Poison\r\nContent-Length: 0\r\n\r\n")
        await stream.gone()

    reported = asyncio.Event()
    async with serving(script) as endpoint, sending() as sender:
        assert (await post(sender, at(endpoint.port))).status == 200
        reported.set()
        await endpoint.one_left()
        assert (await post(sender, at(endpoint.port))).status == 200
    assert endpoint.connections == 2


async def test_an_early_response_leaves_no_partial_request_behind() -> None:
    async def script(stream: Stream) -> None:
        await stream.reader.readuntil(b"\r\n\r\n")
        await stream.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await reported.wait()

    reported = asyncio.Event()
    async with serving(script) as endpoint, sending() as sender:
        for _ in range(2):
            answer = await post(sender, at(endpoint.port), body=bytes(32 * 1024 * 1024))
            assert (answer.status, answer.error) == (413, ErrorClass.STATUS)
        reported.set()
    assert endpoint.connections == 2


# Responses that are failures.


async def test_redirect_is_a_failure_and_not_followed() -> None:
    async with serving(answering(OK)) as elsewhere:
        to = f"http://127.0.0.1:{elsewhere.port}/stolen"
        redirect = f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()
        async with serving(answering(redirect)) as endpoint, sending() as sender:
            answer = await post(sender, at(endpoint.port))
    assert (answer.status, answer.error) == (302, ErrorClass.REDIRECT)
    assert to in answer.detail
    assert elsewhere.connections == 0


@pytest.mark.parametrize("status", [400, 404, 410, 500, 599])
async def test_other_statuses_are_failures(status: int) -> None:
    line = f"HTTP/1.1 {status} No\r\nContent-Length: 3\r\n\r\nwhy".encode()
    async with serving(answering(line)) as endpoint, sending() as sender:
        answer = await post(sender, at(endpoint.port))
    assert (answer.status, answer.error, answer.body_head) == (status, ErrorClass.STATUS, b"why")


async def test_hanging_endpoint_times_out() -> None:
    answer, _ = await failing(hanging, timeout_s=SHORT_S)
    assert (answer.status, answer.error) == (None, ErrorClass.TIMEOUT)


async def test_drip_cannot_extend_the_deadline() -> None:
    async def drip(stream: Stream) -> None:
        await stream.request()
        await stream.write(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            await stream.write(b"x")
            await asyncio.sleep(0.01)

    answer, _ = await failing(drip, timeout_s=SHORT_S)
    assert (answer.status, answer.error) == (None, ErrorClass.TIMEOUT)
    assert answer.latency_ms < BOUND_S * 1000


@pytest.mark.parametrize("piece", [b"X-Header: value\r\n", b"x", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_endless_head_is_cut(piece: bytes) -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        if not piece.startswith(b"HTTP"):
            await stream.write(b"HTTP/1.1 200 OK\r\nX: \r\n"[: -2 if piece == b"x" else None])
        while True:
            await stream.write(piece * 100)

    answer, _ = await failing(script)
    assert (answer.status, answer.error) == (None, ErrorClass.TOO_LARGE)


async def test_large_head_is_cut_even_when_it_comes_at_once() -> None:
    async with sending() as sender:
        for size, outcome in ((30_000, 200), (40_000, None)):
            head = b"HTTP/1.1 200 OK\r\nX: %b\r\nContent-Length: 0\r\n\r\n" % (b"x" * size)
            async with serving(answering(head)) as endpoint:
                assert (await post(sender, at(endpoint.port))).status == outcome


@pytest.mark.parametrize(
    ("piece", "kept"),
    [(b"400\r\n%b\r\n" % (b"c" * 1024), 1024), (b"1;%b\r\nc\r\n" % (b"e" * 1000), None)],
    ids=["chunks", "chunk-extensions"],
)
@pytest.mark.parametrize("status", [200, 500])
async def test_endless_chunks_are_cut_and_the_status_counts(
    piece: bytes, kept: int | None, status: int
) -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
        while True:
            await stream.write(piece)

    async with serving(script) as endpoint, sending() as sender:
        answer = await post(sender, at(endpoint.port))
        await endpoint.one_left()
    assert (answer.status, answer.error) == (status, None if status == 200 else ErrorClass.STATUS)
    assert set(answer.body_head) == {ord("c")}
    assert len(answer.body_head) <= 1024
    assert kept is None or len(answer.body_head) == kept


async def test_huge_body_is_not_read_to_its_end() -> None:
    size = 50 * 1024 * 1024
    sent = 0

    async def script(stream: Stream) -> None:
        nonlocal sent
        await stream.request()
        await stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            await stream.write(b"b" * 65536)
            sent += 65536

    async with serving(script) as endpoint, sending() as sender:
        answer = await post(sender, at(endpoint.port))
        await endpoint.one_left()
        assert sent < size
        assert (answer.status, answer.error, answer.body_head) == (200, None, b"b" * 1024)
        sent = 0
        assert (await post(sender, at(endpoint.port))).status == 200
        assert endpoint.connections == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HTTP/1.1 two-hundred OK\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot-a-size\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nxxx",
    ],
)
async def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    answer, _ = await failing(answering(garbage))
    assert (answer.status, answer.error) == (None, ErrorClass.PROTOCOL)


async def test_a_truncated_response_is_a_failure() -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nnot a hundred")

    answer, _ = await failing(script)
    assert (answer.status, answer.error) == (None, ErrorClass.CLOSED)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_new_connection_closed_without_response_is_not_retried(how: str) -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        if how == "reset":
            stream.reset()

    answer, endpoint = await failing(script)
    assert (answer.status, answer.error) == (None, ErrorClass.CLOSED)
    assert endpoint.connections == 1


async def test_a_closed_port_is_a_connect_error() -> None:
    async with sending() as sender:
        with deaf_port() as port:
            answer = await post(sender, at(port))
        assert (answer.status, answer.error) == (None, ErrorClass.CONNECT)
        assert sender.connections == 0


# Kept connections that are stale.


async def test_connection_closed_while_idle_is_replaced() -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.write(OK)

    async with serving(script) as endpoint, sending() as sender:
        for _ in range(3):
            assert (await post(sender, at(endpoint.port))).status == 200
            await endpoint.one_left()
    assert endpoint.connections == 3
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_connection_closed_on_the_second_request_is_replaced_once(how: str) -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        if stream.number < 3:
            await stream.write(OK)
            await stream.request()
        if how == "reset":
            stream.reset()

    async with serving(script) as endpoint, sending() as sender:
        assert (await post(sender, at(endpoint.port), body=b"first")).status == 200
        # The kept one is closed, the new one responds.
        assert (await post(sender, at(endpoint.port), body=b"second")).status == 200
        # The same, but now the new one closes as well.
        answer = await post(sender, at(endpoint.port), body=b"third")
        assert (answer.status, answer.error) == (None, ErrorClass.CLOSED)
    assert [body for _, body in endpoint.requests] == [
        b"first",
        b"second",
        b"second",
        b"third",
        b"third",
    ]
    assert endpoint.connections == 3


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(("took_s", "sent"), [(0.9, 3), (1.1, 2)])
async def test_a_request_that_the_endpoint_worked_on_is_not_sent_again_at_once(
    how: str, took_s: float, sent: int
) -> None:
    """It may have ended the endpoint's process, so it waits for its backoff like any other."""
    ahead_s = 0.0

    async def script(stream: Stream) -> None:
        nonlocal ahead_s
        await stream.request()
        await stream.write(OK)
        if stream.number == 1:
            await stream.request()
            ahead_s += took_s
            if how == "reset":
                stream.reset()

    async with (
        serving(script) as endpoint,
        sending(sender_clock=lambda: time.monotonic() + ahead_s) as sender,
    ):
        assert (await post(sender, at(endpoint.port))).status == 200
        answer = await post(sender, at(endpoint.port))
    assert answer.error is (ErrorClass.CLOSED if sent == 2 else None)
    assert len(endpoint.requests) == sent


async def test_a_connection_that_began_to_respond_is_not_replaced() -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.write(OK)
        await stream.request()
        await stream.write(b"H")

    async with serving(script) as endpoint, sending() as sender:
        assert (await post(sender, at(endpoint.port))).status == 200
        answer = await post(sender, at(endpoint.port))
    assert (answer.status, answer.error) == (None, ErrorClass.CLOSED)
    assert len(endpoint.requests) == 2


async def test_the_second_sending_has_the_same_deadline() -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        if stream.number == 1:
            await stream.write(OK)
            await stream.request()
        else:
            await stream.gone()

    async with serving(script) as endpoint, sending() as sender:
        assert (await post(sender, at(endpoint.port))).status == 200
        answer = await post(sender, at(endpoint.port), timeout_s=3 * SHORT_S)
    assert (answer.error, endpoint.connections) == (ErrorClass.TIMEOUT, 2)


async def test_idle_connection_is_closed_in_time() -> None:
    async with serving(answering(OK)) as endpoint, sending(idle_s=0.05) as sender:
        assert (await post(sender, at(endpoint.port))).status == 200
        await endpoint.one_left()
        assert (await post(sender, at(endpoint.port))).status == 200
    assert endpoint.connections == 2


# TLS.


async def test_tls_with_a_good_certificate(tmp_path: Path) -> None:
    authority = Authority("127.0.0.1", "localhost")
    async with (
        serving(answering(OK), tls=authority.server(tmp_path)) as endpoint,
        sending(tls=authority.client()) as sender,
    ):
        for host in ("127.0.0.1", "localhost", "127.0.0.1"):
            answer = await post(
                sender, at(endpoint.port, host=host, scheme="https"), body=bytes(200_000)
            )
            assert (answer.status, answer.body_head) == (200, b"ok")
    assert endpoint.connections == 2


@pytest.mark.parametrize("fault", ["other-host", "self-signed", "unknown-authority", "plain"])
async def test_an_invalid_certificate_is_refused(tmp_path: Path, fault: str) -> None:
    authority = Authority(
        "elsewhere.example" if fault == "other-host" else "127.0.0.1",
        self_signed=fault == "self-signed",
    )
    trusted = Authority() if fault == "unknown-authority" else authority
    context = None if fault == "plain" else authority.server(tmp_path)

    async def plain(stream: Stream) -> None:
        await stream.reader.read(1)
        await stream.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    script = plain if fault == "plain" else answering(OK)
    async with serving(script, tls=context) as endpoint, sending(tls=trusted.client()) as sender:
        answer = await post(sender, at(endpoint.port, scheme="https"))
    assert (answer.status, answer.error) == (None, ErrorClass.TLS)
    assert "\n" not in answer.detail
    assert endpoint.requests == []


async def test_tls_handshake_that_hangs_times_out(tmp_path: Path) -> None:
    async def silent(stream: Stream) -> None:
        await stream.gone()

    async with serving(silent) as endpoint, sending(tls=Authority().client()) as sender:
        answer = await post(sender, at(endpoint.port, scheme="https"), timeout_s=SHORT_S)
        assert (answer.status, answer.error) == (None, ErrorClass.TIMEOUT)
        await endpoint.one_left()
        assert sender.connections == 0


async def test_a_close_during_the_handshake_is_a_tls_error(tmp_path: Path) -> None:
    async def rude(stream: Stream) -> None:
        await stream.reader.read(1)

    async with serving(rude) as endpoint, sending(tls=Authority().client()) as sender:
        answer = await post(sender, at(endpoint.port, scheme="https"))
    assert (answer.status, answer.error) == (None, ErrorClass.TLS)


# Addresses.


async def test_vetted_address_is_the_one_dialled() -> None:
    answers = iter([["127.0.0.2"], ["127.0.0.3"], ["10.9.8.7"], ["127.0.0.3"]])
    now = 0.0

    async def resolver(host: str) -> list[str]:
        return next(answers)

    async with (
        serving(answering(OK), host="127.0.0.2") as first,
        serving(answering(OK), host="127.0.0.3", port=first.port) as second,
        sending(resolver=resolver, clock=lambda: now) as sender,
    ):
        target = at(first.port, host="rebinding.example")
        for _ in range(2):
            assert (await post(sender, target)).status == 200
        assert (len(first.requests), first.connections, second.connections) == (2, 1, 0)
        # The name has a new address, so the kept connection to the old one is not used.
        now += 6
        assert (await post(sender, target)).status == 200
        assert (len(first.requests), len(second.requests)) == (2, 1)
        await first.one_left()
        # The name has a private address now: nothing is sent, although a connection is kept.
        now += 6
        answer = await post(sender, target)
        assert (answer.status, answer.error) == (None, ErrorClass.BLOCKED)
        assert (len(first.requests), len(second.requests)) == (2, 1)
        now += 6
        assert (await post(sender, target)).status == 200
        assert second.connections == 1


async def test_host_header_and_certificate_are_those_of_the_name(tmp_path: Path) -> None:
    async def resolver(host: str) -> list[str]:
        return ["127.0.0.1"]

    authority = Authority("hooks.example")
    async with (
        serving(answering(OK), tls=authority.server(tmp_path)) as endpoint,
        sending(resolver=resolver, tls=authority.client()) as sender,
    ):
        assert (
            await post(sender, at(endpoint.port, host="hooks.example", scheme="https"))
        ).status == 200
    assert f"\r\nHost: hooks.example:{endpoint.port}\r\n".encode() in endpoint.requests[0][0]


async def test_next_address_is_tried() -> None:
    async def resolver(host: str) -> list[str]:
        return ["10.0.0.1", "127.0.0.2", "127.0.0.3"]

    async with (
        serving(answering(OK), host="127.0.0.3") as endpoint,
        sending(resolver=resolver) as sender,
    ):
        assert (await post(sender, at(endpoint.port, host="two.example"))).status == 200


async def test_at_most_three_addresses_are_tried() -> None:
    async def resolver(host: str) -> list[str]:
        return ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"]

    async with (
        serving(answering(OK), host="127.0.0.5") as endpoint,
        sending(resolver=resolver) as sender,
    ):
        answer = await post(sender, at(endpoint.port, host="four.example"))
    assert (answer.error, endpoint.connections) == (ErrorClass.CONNECT, 0)


async def test_blocked_and_unresolvable_are_different_errors() -> None:
    async def resolver(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with serving(answering(OK)) as endpoint, sending(allow=(), resolver=resolver) as sender:
        answer = await post(sender, at(endpoint.port))
        assert (answer.status, answer.error) == (None, ErrorClass.BLOCKED)
        assert "ROOMS_ALLOW_TARGETS" in answer.detail
        answer = await post(sender, at(endpoint.port, host="nowhere.example"))
        assert (answer.status, answer.error) == (None, ErrorClass.DNS)
    assert endpoint.connections == 0


async def test_resolver_that_hangs_times_out() -> None:
    async def resolver(host: str) -> list[str]:
        await forever.wait()
        return []

    forever = asyncio.Event()
    async with sending(resolver=resolver) as sender:
        answer = await post(sender, at(80, host="slow.example"), timeout_s=SHORT_S)
        assert (answer.status, answer.error) == (None, ErrorClass.TIMEOUT)
        assert "resolving" in answer.detail
        forever.set()


# Cancelling, limits, closing.


async def test_cancelling_closes_the_connection() -> None:
    async with serving(hanging) as endpoint, sending() as sender:
        task = asyncio.create_task(post(sender, at(endpoint.port)))
        await endpoint.until(requests=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await endpoint.one_left()
        assert sender.connections == 0


async def test_cancelling_while_connecting_releases_the_slot() -> None:
    async def silent(stream: Stream) -> None:
        await stream.gone()

    async with (
        serving(silent) as endpoint,
        serving(answering(OK)) as healthy,
        sending(tls=Authority().client(), max_connections=1) as sender,
    ):
        task = asyncio.create_task(post(sender, at(endpoint.port, scheme="https")))
        await endpoint.until(connections=1)
        waiting = asyncio.create_task(post(sender, at(healthy.port)))
        impatient = asyncio.create_task(post(sender, at(healthy.port)))
        await asyncio.sleep(0)
        impatient.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert (await waiting).status == 200


async def test_the_connection_limit_holds_and_every_request_gets_a_turn() -> None:
    most = 0

    async def script(stream: Stream) -> None:
        nonlocal most
        while True:
            await stream.request()
            most = max(most, sender.connections)
            await stream.write(OK)

    async with serving(script) as one, serving(script) as two, sending(max_connections=3) as sender:
        targets = [
            at(port, path=f"/{number}") for number in range(30) for port in (one.port, two.port)
        ]
        answers = await asyncio.gather(*(post(sender, target) for target in targets))
        assert {answer.status for answer in answers} == {200}
    assert (len(one.requests), len(two.requests)) == (30, 30)
    assert most == 3


async def test_waiting_for_a_connection_ends_at_the_deadline() -> None:
    async with (
        serving(hanging) as endpoint,
        serving(answering(OK)) as healthy,
        sending(max_connections=1) as sender,
    ):
        task = asyncio.create_task(post(sender, at(endpoint.port), timeout_s=LONG_S))
        await endpoint.until(requests=1)
        answer = await post(sender, at(healthy.port), timeout_s=SHORT_S)
        assert (answer.status, answer.error) == (None, ErrorClass.TIMEOUT)
        assert "1 connections" in answer.detail
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await post(sender, at(healthy.port))).status == 200


async def test_idle_connection_makes_room_for_another_endpoint() -> None:
    async with (
        serving(answering(OK)) as one,
        serving(answering(OK)) as two,
        sending(max_connections=1) as sender,
    ):
        for endpoint in (one, two, one, two):
            assert (await post(sender, at(endpoint.port))).status == 200
            assert sender.connections == 1
    assert (one.connections, two.connections) == (2, 2)


async def test_idle_connections_of_one_endpoint_are_capped() -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        await all_here.acquire()
        await stream.write(OK)
        await stream.gone()

    all_here = asyncio.Semaphore(0)
    async with serving(script) as endpoint, sending(max_idle_per_host=2) as sender:
        tasks = [asyncio.create_task(post(sender, at(endpoint.port))) for _ in range(5)]
        await endpoint.until(requests=5)
        for _ in range(5):
            all_here.release()
        assert {answer.status for answer in await asyncio.gather(*tasks)} == {200}
        for _ in range(3):
            await endpoint.one_left()
        assert sender.connections == 2


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_concurrent_requests_get_their_own_responses(scheme: str, tmp_path: Path) -> None:
    async def script(stream: Stream) -> None:
        while True:
            body = await stream.request()
            await stream.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )

    authority = Authority()
    context = authority.server(tmp_path) if scheme == "https" else None
    async with (
        serving(script, tls=context) as endpoint,
        sending(max_connections=40, tls=authority.client()) as sender,
    ):

        async def slot(number: int) -> None:
            for turn in range(25):
                body = b"%d-%d " % (number, turn) * (1 + turn * 200)
                answer = await post(sender, at(endpoint.port, scheme=scheme), body=body)
                assert (answer.status, answer.body_head) == (200, body[:1024])

        await asyncio.gather(*(slot(number) for number in range(40)))
    assert len({body for _, body in endpoint.requests}) == 1000
    assert endpoint.most_open <= 40


async def test_hanging_endpoint_delays_no_other() -> None:
    async with serving(hanging) as stuck, serving(answering(OK)) as healthy, sending() as sender:
        hung = [asyncio.create_task(post(sender, at(stuck.port), timeout_s=60)) for _ in range(50)]
        await stuck.until(requests=50)
        for _ in range(50):
            assert (await post(sender, at(healthy.port))).status == 200
        assert not any(task.done() for task in hung)
        for task in hung:
            task.cancel()
        await asyncio.gather(*hung, return_exceptions=True)


async def test_closing_ends_requests_in_progress_and_is_idempotent() -> None:
    async with serving(hanging) as endpoint, sending(max_connections=1) as sender:
        under_way = asyncio.create_task(post(sender, at(endpoint.port)))
        await endpoint.until(requests=1)
        waiting = asyncio.create_task(post(sender, at(endpoint.port)))
        await asyncio.sleep(0)
        await sender.__aexit__()
        for task in (under_way, waiting):
            assert (await task).error is ErrorClass.CLOSED
        assert (await post(sender, at(endpoint.port))).error is ErrorClass.CLOSED


async def test_closed_connections_leave_nothing_behind() -> None:
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    def alive() -> int:
        return sum(type(thing).__name__ == "HttpResponseParser" for thing in gc.get_objects())

    gc.collect()
    before = alive()
    gc.disable()
    try:
        async with serving(script) as endpoint, sending() as sender:
            for _ in range(20):
                assert (await post(sender, at(endpoint.port))).status == 200
                await endpoint.one_left()
            # All but the last are freed without the garbage collector.
            assert alive() <= before + 2
    finally:
        gc.enable()
