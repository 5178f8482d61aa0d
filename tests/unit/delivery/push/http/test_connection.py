"""Test that an attempt has a result and releases its slot, whatever bytes the endpoint sends."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delivery.push.http.connection import HttpLimits
from delivery.push.redaction import hidden_texts, redact
from rooms.domain.attempt import AttemptResult, ErrorClass
from tests.support.scripted_responses import Ending, PiecesSender

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
FLOOD = b"HTTP/1.1 100 Continue\r\n\r\n\r\n\r\n" * 5
_FRAGMENTS = (
    OK,
    FLOOD,
    b"HTTP/1.1 ",
    b"HTTP/1.0 200 OK\r\n",
    b"HTTP/1.1 503 Busy\r\n",
    b"HTTP/1.1 302 Found\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nRetry-After: 9\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    b"HTTP/1.1 000 None\r\n",
    b"HTTP/1.1 999 All\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"Retry-After: 5\r\n",
    b"retry-after:\r\n",
    b"Location: \r\n",
    b"Location: http://127.0.0.1/\x01\xff\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: 99999999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Connection: close\r\n",
    b": nameless\r\n",
    b"\r\n",
    b"\n",
    b"\r\n\r\n",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"0\r\nRetry-After: 7\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"x" * 1000,
    b"X: " + b"y" * 40_000 + b"\r\n",
)
_bytes = st.lists(st.sampled_from(_FRAGMENTS) | st.binary(max_size=40), max_size=12).map(b"".join)
_cuts = st.lists(st.integers(min_value=1, max_value=60), max_size=20)
_endings = st.sampled_from((Ending(), Ending(eof=True), Ending(reset=True)))


def pieces_of(whole: bytes, sizes: list[int]) -> list[bytes]:
    """Cut into pieces of these sizes, and the rest."""
    pieces = []
    for size in sizes:
        pieces.append(whole[:size])
        whole = whole[size:]
    return [piece for piece in (*pieces, whole) if piece]


async def outcome(
    pieces: list[bytes], ending: Ending, *, limits: HttpLimits | None = None
) -> list[AttemptResult]:
    """Send twice; then check that connections are kept or closed, and no slot is taken."""
    async with PiecesSender(pieces, ending, limits=limits) as sender:
        answers = [await sender.post() for _ in range(2)]
        await asyncio.sleep(0)
        idle = sum(len(idle) for idle in sender._pool._idle.values())
        assert sender.connections == idle <= 1
    assert sender.connections == 0
    assert not sender._pool._open
    return answers


@given(_bytes, _cuts, _endings)
@example(FLOOD + b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n", [], Ending())
@example(FLOOD + b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", [7] * 20, Ending(eof=True))
@settings(max_examples=600, deadline=None)
def test_every_response_has_a_result_and_every_slot_is_released(
    whole: bytes, cuts: list[int], ending: Ending
) -> None:
    for answer in asyncio.run(outcome(pieces_of(whole, cuts), ending)):
        assert (answer.status is None) or 100 <= answer.status <= 999
        assert (answer.error is None) == (answer.status is not None and 200 <= answer.status < 300)
        assert "\n" not in answer.detail
        assert len(answer.retry_after or "") <= 100
        assert len(answer.body_head) <= 1024


@given(_cuts)
@settings(deadline=None)
def test_the_pieces_of_a_response_make_no_difference(cuts: list[int]) -> None:
    whole = FLOOD + b"HTTP/1.1 503 Busy\r\nRetry-After:  17 \r\nContent-Length: 4\r\n\r\nbusy"
    for answer in asyncio.run(outcome(pieces_of(whole, cuts), Ending())):
        assert (answer.status, answer.error) == (503, ErrorClass.STATUS)
        assert (answer.retry_after, answer.body_head) == ("17", b"busy")


async def test_blank_lines_between_interim_responses_are_no_header() -> None:
    """Check that headers are not searched by blank lines, which the parser skips."""
    for answer in await outcome(
        [FLOOD + b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"], Ending()
    ):
        assert (answer.status, answer.retry_after, answer.detail) == (500, None, "HTTP 500")


async def test_headers_of_interim_responses_and_trailers_do_not_count() -> None:
    interim = b"HTTP/1.1 103 Early\r\nRetry-After: 1\r\nLocation: http://no.test/\r\n\r\n"
    final = b"HTTP/1.1 302 Found\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nRetry-After: 2\r\nLocation: /no\r\n\r\n"
    for answer in await outcome([interim + final], Ending()):
        assert (answer.retry_after, answer.detail) == (
            None,
            "HTTP 302, and redirects are not followed: elsewhere",
        )


async def test_a_secret_in_the_target_of_a_redirect_is_kept_whole_for_hiding() -> None:
    """Hiding finds only what was not cut before."""
    to = f"/?{'p' * 176}s3cret-token-1".encode()
    whole = b"HTTP/1.1 302 No\r\nLocation: " + to + b"\r\nContent-Length: 0\r\n\r\n"
    for answer in await outcome([whole], Ending()):
        assert answer.detail.endswith(to.decode())
        kept = redact(answer, hidden_texts(["Bearer s3cret-token-1"])).detail
        assert kept.endswith("ppp***")


async def test_of_two_headers_by_one_name_the_first_counts() -> None:
    whole = b"HTTP/1.1 503 No\r\nretry-AFTER: 4\r\nretry-AFTER: 8\r\nContent-Length: 0\r\n\r\n"
    assert {answer.retry_after for answer in await outcome([whole], Ending())} == {"4"}


@pytest.mark.parametrize("status", [b"000", b"042", b"099"])
async def test_a_status_below_100_is_a_protocol_error(status: bytes) -> None:
    for answer in await outcome(
        [b"HTTP/1.1 %b What\r\nContent-Length: 0\r\n\r\n" % status], Ending()
    ):
        assert (answer.status, answer.error) == (None, ErrorClass.PROTOCOL)
        assert status.decode() in answer.detail


async def test_an_internal_error_releases_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_connection: object) -> None:
        raise IndexError("a fault of ours")

    monkeypatch.setattr("delivery.push.http.client._classify_response", broken)
    async with PiecesSender([b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"], Ending()) as sender:
        for _ in range(3):
            with pytest.raises(IndexError):
                await sender.post()
            await asyncio.sleep(0)
            assert sender.connections == 0


async def test_a_connection_is_closed_after_its_maximum_of_requests() -> None:
    async with PiecesSender([OK], Ending(), limits=HttpLimits(max_requests=3)) as sender:
        for _ in range(7):
            assert (await sender.post()).status == 200
        assert sender.dialled == 3


async def test_a_connection_is_closed_at_its_age() -> None:
    times = [0.0]
    async with PiecesSender(
        [OK], Ending(), limits=HttpLimits(max_age_s=100), clock=lambda: times[-1]
    ) as sender:
        # At 100 it becomes idle for the last time.
        for now, dialled in ((0.0, 1), (99.0, 1), (100.0, 1), (101.0, 2), (200.0, 2)):
            times.append(now)
            assert (await sender.post()).status == 200
            assert sender.dialled == dialled
