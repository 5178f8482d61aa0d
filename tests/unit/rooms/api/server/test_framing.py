"""Test framing: the result does not depend on the cuts, and matches llhttp."""

import re
from contextlib import suppress
from http import HTTPStatus
from itertools import pairwise
from typing import Final

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.api.server.framing import MAX_PARTS, RequestFramer
from rooms.api.server.head import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    RequestParser,
    RequestRejectedError,
)

Read = tuple[list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]], HTTPStatus | None]
"""Hold the requests (method, target, headers, body), and the refusal of the rest."""

LINE: Final = b"POST /a HTTP/1.1\r\nHost: rooms\r\n"


def read(data: bytes, cuts: list[int]) -> Read:
    """Return what is read of `data` when it comes in these pieces."""
    framing = RequestFramer()
    found: Read = ([], None)
    head, body = None, b""
    try:
        for start, end in pairwise([0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]):
            framing.feed(data[start:end])
            while True:
                if head is None:
                    head, body = framing.next_head(), b""
                    if head is None:
                        break
                body += framing.next_body()
                while framing.is_interrupted:
                    body += framing.next_body()
                if not framing.at_head:
                    break
                found[0].append((head.method, head.target, head.headers, body))
                head = None
    except RequestRejectedError as exc:
        return found[0], exc.status
    return found


def only(data: bytes) -> HTTPStatus | None:
    return read(data, [])[1]


tokens = st.sampled_from(
    [b"GET", b"POST", b" ", b"/", b"/a//b", b"*", b"http://h/x", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"\r\n", b"\r\n\r\n", b"\n",
     b"\r", b"\0", b"\x80", b":", b"Host: h\r\n", b"Content-Length: 3\r\n", b"Content-Length: 03\r\n", b"Transfer-Encoding: chunked\r\n",
     b"Transfer-Encoding: chunked, identity\r\n", b"Upgrade: h2c\r\nConnection: upgrade\r\n", b"Connection: close\r\n", b"X: y\r\n",
     b" folded\r\n", b"abc", b"3\r\nabc\r\n", b"0\r\n", b"1;e=x\r\nz\r\n", b"Authorization: t\r\n", b"Expect: 100-continue\r\n", LINE]
)  # fmt: skip
requests = st.lists(
    st.one_of(
        st.lists(tokens, max_size=12).map(b"".join),
        st.just(LINE + b"Content-Length: 3\r\n\r\nabc"),
        st.just(
            LINE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: t\r\n\r\n"
        ),
        st.lists(tokens, max_size=5).map(lambda extra: LINE + b"".join(extra) + b"\r\n"),
    ),
    max_size=4,
).map(b"".join)


@given(data=requests, cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_requests_do_not_depend_on_the_cuts(data: bytes, cuts: list[int]) -> None:
    whole = read(data, [])
    assert read(data, cuts) == whole
    assert read(data, list(range(len(data)))) == whole


@pytest.mark.parametrize("count", [*range(95, 105), 200, 300, 1_000])
def test_a_body_of_many_chunks_is_read_in_several_calls(count: int) -> None:
    """Check each number of chunks around those of one call, and every cut."""
    content = [b"%d" % number for number in range(count)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in content)
    data = LINE + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    behind = LINE + b"\r\n"
    whole = read(data + behind, [])
    assert [body for *_, body in whole[0]] == [b"".join(content), b""]
    for step in (1, 7, 1_000):
        assert read(data + behind, list(range(0, len(data), step))) == whole
    framing = RequestFramer()
    framing.feed(data)
    framing.next_head()
    calls = 1
    while (body := framing.next_body(), framing.is_interrupted)[1]:
        assert not body
        calls += 1
    assert framing.at_head
    assert body == b"".join(content)
    assert calls == -(-(3 * count + 2) // MAX_PARTS)


def test_the_fast_path_takes_no_body_in_chunks_and_no_second_request() -> None:
    """Check that it stops there: each chunk and request would cost calls."""
    parser = RequestParser()
    chunked = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
    assert not parser.read(chunked + b"1\r\nx\r\n" * 1_000)
    assert not parser.read(chunked + b"1\r\nx\r\n0\r\n\r\n")
    assert parser.body == b""
    plain = LINE + b"Content-Length: 1\r\n\r\nx"
    assert not parser.read(plain + plain)
    assert parser.read(plain)
    assert parser.body == b"x"


class Library:
    """Return one request as llhttp reads it."""

    def __init__(self, data: bytes) -> None:
        self.target = self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.head = self.whole = False
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(data)
        self.method = parser.get_method()

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head:
            self.headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        self.head = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True


@given(data=requests)
def test_accepted_requests_match_llhttp(data: bytes) -> None:
    """Check that two parsers agree: a difference would let requests be smuggled."""
    framing = RequestFramer()
    framing.feed(data)
    with suppress(RequestRejectedError):
        head = framing.next_head()
        if head is None or b"pgrade" in data or b"://" in data:
            return
        body = framing.next_body()
        if framing.at_head:
            taken = data[: len(data) - framing.buffered_bytes]
            library = Library(taken)
            assert library.whole
            assert (library.method, library.target) == (head.method, head.target)
            assert (library.headers, library.body) == (head.headers, body)


blanks = st.text(" \t", max_size=3).map(str.encode)
values = st.tuples(blanks, st.sampled_from([b"", b"abc", b"a b\tc", b"Bearer x"]), blanks)


@given(values=st.lists(values, max_size=4))
def test_both_parsers_read_the_same_headers(values: list[tuple[bytes, bytes, bytes]]) -> None:
    """Check that it makes no difference whether a request takes the fast path."""
    lines = [b"X-%d:%b\r\n" % (number, b"".join(parts)) for number, parts in enumerate(values)]
    data = LINE + b"".join(lines) + b"Content-Length: 3 \t\r\n\r\nabc"
    framing, parser = RequestFramer(), RequestParser()
    framing.feed(data)
    head = framing.next_head()
    assert head is not None
    assert parser.read(data)
    assert parser.header_map == head.header_map
    assert parser.body == framing.next_body() == b"abc"
    for number, (_, value, _) in enumerate(values):
        assert parser.header_map[b"x-%d" % number] == value


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 3\r\nContent-Length: 3\r\n",
        b"Content-Length: 3, 3\r\n",
        b"Content-Length: +3\r\n",
        b"Content-Length: 3" + b"0" * 30 + b"\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"X: a\r\n folded\r\n",
        b"X: a\nY: b\r\n",
        b"X: a\rb\r\n",
        b"X: a\0b\r\n",
        b"X: a\x01b\r\n",
        b"X : a\r\n",
        b": a\r\n",
        b"nonsense\r\n",
        b"Host: another\r\n",
        b"Authorization: one\r\nAuthorization: two\r\n",
    ],
)
def test_ambiguous_requests_are_refused(lines: bytes) -> None:
    assert only(LINE + lines + b"\r\n3\r\nabc\r\n0\r\n\r\n") == HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", HTTPStatus.HTTP_VERSION_NOT_SUPPORTED),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTPStatus.HTTP_VERSION_NOT_SUPPORTED),
        (b"GET / HTTP/x\r\nHost: a\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /#x HTTP/1.1\r\nHost: a\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /\x80 HTTP/1.1\r\nHost: a\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET x HTTP/1.1\r\nHost: a\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET http://u@h/ HTTP/1.1\r\nHost: a\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", HTTPStatus.METHOD_NOT_ALLOWED),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", HTTPStatus.METHOD_NOT_ALLOWED),
        (LINE + b"Expect: miracles\r\n\r\n", HTTPStatus.EXPECTATION_FAILED),
        (b"\x16\x03\x01\x02\x00", HTTPStatus.BAD_REQUEST),
        (LINE + b"X: y\r\n" * MAX_HEADERS + b"\r\n", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (LINE + b"X: " + b"y" * MAX_HEAD_BYTES, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (b"GET /" + b"y" * MAX_HEAD_BYTES, HTTPStatus.REQUEST_URI_TOO_LONG),
        (LINE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 101 + b"\r\n",
         HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (LINE + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"y" * MAX_HEAD_BYTES,
         HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (LINE + b"Transfer-Encoding: chunked\r\n\r\n3;" + b"e" * 300, HTTPStatus.BAD_REQUEST),
        (LINE + b"Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n", HTTPStatus.BAD_REQUEST),
        (LINE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n", HTTPStatus.BAD_REQUEST),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused_with_a_reason(data: bytes, status: HTTPStatus) -> None:
    assert only(data) == status
    assert read(data, list(range(0, len(data), 999)))[1] == status


def test_the_absolute_form_names_the_host() -> None:
    """Check RFC 9112, 3.2.2: the target decides, not the header."""
    (found, refused) = read(b"GET http://real:8/x?y HTTP/1.1\r\nHost: other\r\n\r\n", [])
    assert refused is None
    assert found == [(b"GET", b"/x?y", [(b"host", b"real:8")], b"")]


def test_an_unsupported_upgrade_is_ignored() -> None:
    lines = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\nContent-Length: 3\r\n\r\nabc"
    (found, refused) = read(LINE + lines, [])
    assert refused is None
    ((_, _, headers, body),) = found
    assert body == b"abc"
    assert {b"upgrade", b"http2-settings"}.isdisjoint(dict(headers))


def test_requests_up_to_the_limits_are_read() -> None:
    text = LINE + b"X: y\r\n" * (MAX_HEADERS - 1) + b"\r\n"
    assert len(read(text, [])[0]) == 1
    filled = re.sub(rb"y\r\n\r\n$", b"y" * (MAX_HEAD_BYTES - len(text) + 4) + b"\r\n\r\n", text)
    assert len(read(filled, list(range(0, len(filled), 777)))[0]) == 1
    assert only(filled.replace(b"yy", b"yyy", 1)) == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
