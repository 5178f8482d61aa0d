"""Attack the sender with answers of endpoints: broken heads, floods, odd chunks and silence."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_network
from random import Random
from typing import Final

from delivery.push.http.client import MAX_LOCATION, HttpSender
from delivery.push.http.connection import HttpLimits
from delivery.push.http.ssrf import SsrfGuard
from delivery.push.redaction import redact
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from tests.faults.hostile.suite import Suite
from tests.support.scripted_endpoints import OK, Endpoint, Stream, answering, serving

_HOSTILE: Final = OrganisationId("01900000-0000-7000-8000-000000000001")
_HEALTHY: Final = OrganisationId("01900000-0000-7000-8000-000000000002")
_TIMEOUT_S: Final = 0.5
_STATUSES: Final = (
    200,
    204,
    301,
    302,
    304,
    400,
    410,
    429,
    500,
    503,
    599,
    999,
    100,
    102,
    103,
    101,
    0,
    42,
)
_CONNECTIONS: Final = 6
_SELDOM: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCase:
    """Describe the pieces that a connection sends, `requests` times, and its end."""

    pieces: tuple[bytes, ...]
    pause_s: float
    before_request: bool
    """The first piece comes before the request was read."""
    ending: str
    """keep, close, reset, or again: send it all once more, unasked."""
    requests: int


def _head(rng: Random) -> bytes:
    version = b"HTTP/1.1"
    if rng.random() < _SELDOM:
        version = rng.choice((b"HTTP/1.0", b"HTTP/2", b"http/1.1", b"RTSP/1.0", b"\x00HTTP/1.1"))
    lines = [
        b"%b %03d %b"
        % (version, rng.choice(_STATUSES), rng.choice((b"OK", b"", b"\xff" * 9, b"x" * 3000)))
    ]
    kinds = (
        (
            b"Retry-After",
            rng.choice((b"5", b"", b"-1", b"9" * 400, b"Fri, 31 Dec 9999 23:59:59 GMT", b"\xff")),
        ),
        (b"Location", rng.choice((b"/", b"http://127.0.0.1/", b"\xff" * 500, b""))),
        (b"Connection", rng.choice((b"close", b"keep-alive", b"upgrade"))),
        (b"Trailer", b"Retry-After"),
        (b"X" * rng.choice((1, 40, 5000)), b"y" * rng.choice((0, 10, 9000))),
    )
    if rng.random() < _SELDOM:
        kinds = (
            (b"", b"nameless"),
            (b" folded", b"line"),
            (b"Upgrade", b"h2c"),
            (b"Location", b"\x7f"),
            (b"A b", b"c"),
        )
    lines += [b"%b: %b" % rng.choice(kinds) for _ in range(rng.choice((0, 1, 3, 8, 200)))]
    return (b"\n" if rng.random() < _SELDOM else b"\r\n").join(lines)


def _framing(rng: Random) -> bytes:
    body = rng.randbytes(rng.choice((0, 1, 100, 2000, 100_000)))
    match rng.randrange(8):
        case 0 | 1 | 2:
            return b"\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        case 3:
            return b"\r\nContent-Length: %d\r\n\r\n%b" % (
                rng.choice((len(body) + 5, 10**30, max(0, len(body) - 5))),
                body,
            )
        case 4:
            sizes = (b"%x" % len(body), b"0" * 5000, b"-1", b"f" * 20, b"1;" + b"e" * 3000, b"zz")
            return (
                b"\r\nTransfer-Encoding: chunked\r\n\r\n%b\r\n%b\r\n0\r\nRetry-After: 7\r\n\r\n"
                % (
                    rng.choice(sizes),
                    body,
                )
            )
        case 5:
            return b"\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc"
        case 6:
            return b"\r\n\r\n" + body
        case _:
            return b""


def _interim(rng: Random) -> bytes:
    blank = b"\r\n" * rng.choice((0, 1, 2, 50))
    return (
        b"HTTP/1.1 %d Wait\r\nRetry-After: 1\r\n\r\n" % rng.choice((100, 102, 103)) + blank
    ) * rng.choice((1, 3, 900))


def generate(rng: Random) -> AnswerCase:
    """Make an answer of one or two messages, cut anywhere."""
    whole = b"".join(
        (
            rng.randbytes(30)
            if rng.random() < _SELDOM
            else rng.choice((_interim(rng), b"\r\n", b"", b""))
        )
        + _head(rng)
        + _framing(rng)
        for _ in range(rng.choice((1, 1, 1, 1, 2)))
    )
    if rng.random() < _SELDOM:
        whole = whole[: rng.randrange(len(whole) + 1)]
    count = rng.choice((0, 0, 1, 3, 12))
    cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(count))
    pieces = tuple(
        whole[start:end] for start, end in zip((0, *cuts), (*cuts, len(whole)), strict=True)
    )
    return AnswerCase(
        pieces=pieces,
        pause_s=rng.choice((0, 0, 0, 0.01)),
        before_request=rng.random() < _SELDOM,
        ending=rng.choice(("keep", "keep", "close", "reset", "again")),
        requests=rng.choice((1, 2)),
    )


def _script(case: AnswerCase) -> Callable[[Stream], Awaitable[None]]:
    async def script(stream: Stream) -> None:
        for number in range(case.requests):
            if not (case.before_request and number == 0):
                await stream.request()
            for piece in case.pieces:
                await stream.write(piece)
                await asyncio.sleep(case.pause_s)
        if case.ending == "again":
            for piece in case.pieces:
                await stream.write(piece)
        if case.ending == "reset":
            with suppress(OSError):
                stream.reset()
        elif case.ending != "close":
            await stream.gone()

    return script


@asynccontextmanager
async def target(_database_url: str) -> AsyncIterator[Callable[[AnswerCase], Awaitable[str]]]:
    """Attack a sender with few connections. After each case all of them are there again, for another organisation."""
    limits = HttpLimits(
        max_connections=_CONNECTIONS, max_per_organisation=_CONNECTIONS - 1, sweep_s=0.02
    )
    guard = SsrfGuard((ip_network("127.0.0.0/8"),))
    async with serving(answering(OK)) as healthy, HttpSender(guard, limits=limits) as sender:

        async def post(
            endpoint: Endpoint, organisation: OrganisationId, timeout_s: float
        ) -> AttemptResult:
            to = PushUrl.parse(f"http://127.0.0.1:{endpoint.port}/")
            return await sender.send(
                to, b"webhook-id: 1\r\n", b"{}", organisation=organisation, timeout_s=timeout_s
            )

        async def run(case: AnswerCase) -> str:
            async with serving(_script(case)) as hostile:
                calls = [
                    asyncio.create_task(post(hostile, _HOSTILE, _TIMEOUT_S))
                    for _ in range(_CONNECTIONS + 2)
                ]
                # While they are under way, another organisation is served.
                assert (await post(healthy, _HEALTHY, 10)).status == 200
                answers = await asyncio.gather(*calls)
            for answer in answers:
                _check(answer)
            await _all_slots_are_back(sender)
            fine = await asyncio.gather(*(post(healthy, _HOSTILE, 10) for _ in range(_CONNECTIONS)))
            assert {answer.status for answer in fine} == {200}
            return str(answers[0].error or "delivered")

        yield run


def _check(answer: AttemptResult) -> None:
    assert answer.error is not None or (answer.status is not None and answer.status // 100 == 2)
    assert len(answer.body_head) <= 1024
    assert len(answer.retry_after or "") <= 100
    # A target is kept whole until what must be hidden in it is found.
    assert len(answer.detail) <= 500 or answer.error is ErrorClass.REDIRECT
    assert len(answer.detail) <= MAX_LOCATION + 100
    assert len(redact(answer, ()).detail) <= 500
    assert "\n" not in answer.detail


async def _all_slots_are_back(sender: HttpSender) -> None:
    """Return when only idle connections have slots."""
    pool = sender._pool
    async with asyncio.timeout(5):
        while sender.connections != sum(len(idle) for idle in pool._idle.values()):  # noqa: ASYNC110 - slots send no signal
            await asyncio.sleep(0.005)


SUITE: Final = Suite(name="answers", cases=60, generate=generate, target=target)
