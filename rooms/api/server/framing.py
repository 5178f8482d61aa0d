"""Split a stream of bytes into requests, independent of how packets were cut.

Everything is bounded before it is parsed. Trailers are checked for their size and dropped: RFC
9110, 6.5.1 only merges those whose meaning is known.
"""

import re
from enum import Enum, auto
from http import HTTPStatus
from typing import Final

from rooms.api.server.head import (
    CHUNKED,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    RequestHead,
    RequestRejectedError,
    read_head,
    too_many_headers,
)

MAX_PARTS: Final = 300
"""Most parts of a body that are read at a time: 100 chunks with their sizes and ends."""
_MAX_CHUNK_LINE_BYTES: Final = 256
_MAX_SIZE_DIGITS: Final = 15
_HEX: Final = frozenset(b"0123456789abcdefABCDEF")
_FIRST_BYTES: Final = frozenset(b"\rABCDEFGHIJKLMNOPQRSTUVWXYZ")
_HEAD_END: Final = b"\r\n\r\n"
_EMPTY_LINES: Final = re.compile(rb"(?:\r\n)+")


class _Stage(Enum):
    HEAD = auto()
    CONTENT = auto()
    """A body of known length."""
    SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILERS = auto()


class RequestFramer:
    """Split the bytes that `feed` receives. RequestRejectedError: the rest cannot be read."""

    __slots__ = ("_buffer", "_pieces", "_remaining", "_scanned", "_stage", "is_interrupted")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        """The length of the buffer that was searched without success."""
        self._remaining = 0
        """Bytes of the body, or of the chunk, that are still to come."""
        self._stage = _Stage.HEAD
        self._pieces: list[bytes] = []
        """Content that `next_body` has read, and not returned yet."""
        self.is_interrupted = False
        """`next_body` must be called again, although nothing more has come."""

    @property
    def at_head(self) -> bool:
        """Return whether a head comes next."""
        return self._stage is _Stage.HEAD

    @property
    def buffered_bytes(self) -> int:
        """Return how many bytes wait to be read."""
        return len(self._buffer)

    @property
    def is_empty(self) -> bool:
        """Return whether no request has begun, and no byte waits."""
        return self._stage is _Stage.HEAD and not self._buffer

    def drain(self) -> bytes:
        """Take all bytes that wait."""
        return self._take(len(self._buffer))

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def next_head(self) -> RequestHead | None:
        """Read the next head; None: it is not complete."""
        buffer = self._buffer
        if empty := _EMPTY_LINES.match(buffer):  # RFC 9112, 2.2: empty lines before a request
            del buffer[: empty.end()]
            self._scanned = 0
        if not buffer:
            return None
        if buffer[0] not in _FIRST_BYTES or (buffer[0] == _HEAD_END[0] and len(buffer) > 1):
            raise RequestRejectedError(HTTPStatus.BAD_REQUEST, "a request begins with its method")
        end = self._find(_HEAD_END, MAX_HEAD_BYTES)
        if end < 0:
            if len(buffer) >= MAX_HEAD_BYTES + len(_HEAD_END) - 1:
                raise _head_too_large(line=b"\r\n" not in buffer[:MAX_HEAD_BYTES])
            return None
        text = self._take(end + len(_HEAD_END))
        head = read_head(text)
        self._remaining = head.length
        if head.length == CHUNKED:
            self._stage, self._remaining = _Stage.SIZE, 0
        elif head.length:
            self._stage = _Stage.CONTENT
        return head

    def next_body(self) -> bytes:
        """Take the received part of the body; it is the last one if `at_head` holds then.

        At most `MAX_PARTS` are read, since chunks of one byte would keep the event loop. If there
        may be more, `is_interrupted` holds then, and a later call returns the content.
        """
        if self.at_head:
            return b""
        for _ in range(MAX_PARTS):
            if not self._read_part(self._pieces) or self.at_head:
                self.is_interrupted = False
                content, self._pieces = b"".join(self._pieces), []
                return content
        self.is_interrupted = True
        return b""

    def _read_part(self, pieces: list[bytes]) -> bool:
        """Read one part of the body; False: it is not complete."""
        match self._stage:
            case _Stage.CONTENT:
                return self._read_content(pieces, _Stage.HEAD)
            case _Stage.CHUNK:
                return self._read_content(pieces, _Stage.CHUNK_END)
            case _Stage.CHUNK_END:
                return self._read_chunk_end()
            case _Stage.SIZE:
                return self._read_chunk_size()
            case _:
                return self._read_trailers()

    def _read_chunk_end(self) -> bool:
        if len(self._buffer) < len(b"\r\n"):
            return False
        if self._take(2) != b"\r\n":
            raise _bad_chunk()
        self._stage = _Stage.SIZE
        return True

    def _read_content(self, pieces: list[bytes], next_stage: _Stage) -> bool:
        piece = self._take(min(self._remaining, len(self._buffer)))
        pieces.append(piece)
        self._remaining -= len(piece)
        if self._remaining:
            return False
        self._stage = next_stage
        return True

    def _read_chunk_size(self) -> bool:
        end = self._find(b"\r\n", _MAX_CHUNK_LINE_BYTES)
        if end < 0:
            if len(self._buffer) > _MAX_CHUNK_LINE_BYTES:
                raise _bad_chunk()
            return False
        line = self._take(end + 2)[:-2]
        digits, semicolon, extension = line.partition(b";")
        digits = digits.rstrip(b" \t") if semicolon else digits
        if (
            not digits
            or len(digits) > _MAX_SIZE_DIGITS
            or not _HEX.issuperset(digits)
            or not _printable(extension)
        ):
            raise _bad_chunk()
        self._remaining = int(digits, 16)
        self._stage = _Stage.CHUNK if self._remaining else _Stage.TRAILERS
        return True

    def _read_trailers(self) -> bool:
        buffer = self._buffer
        if buffer.startswith(b"\r\n"):
            self._take(2)
            self._stage = _Stage.HEAD
            return True
        end = self._find(_HEAD_END, MAX_HEAD_BYTES)
        if end < 0:
            if len(buffer) >= MAX_HEAD_BYTES + len(_HEAD_END) - 1:
                raise _head_too_large(line=False)
            return False
        lines = self._take(end + len(_HEAD_END))[: -len(_HEAD_END)].split(b"\r\n")
        if len(lines) > MAX_HEADERS:
            raise too_many_headers()
        if not all(_printable(line) and b":" in line for line in lines):
            raise RequestRejectedError(
                HTTPStatus.BAD_REQUEST,
                "each trailer is one line `Name: value` that ends with CR LF",
            )
        self._stage = _Stage.HEAD
        return True

    def _find(self, end: bytes, limit: int) -> int:
        """Return where `end` begins, within `limit` bytes; -1: it has not come."""
        found = self._buffer.find(end, max(0, self._scanned - len(end) + 1), limit + len(end) - 1)
        self._scanned = 0 if found >= 0 else min(len(self._buffer), limit)
        return found

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._scanned = 0
        return taken


def _printable(line: bytes) -> bool:
    return all(byte >= ord(" ") or byte == ord("\t") for byte in line) and b"\x7f" not in line


def _bad_chunk() -> RequestRejectedError:
    return RequestRejectedError(
        HTTPStatus.BAD_REQUEST, "the body is not chunked as its Transfer-Encoding says"
    )


def _head_too_large(*, line: bool) -> RequestRejectedError:
    limit = f"{MAX_HEAD_BYTES} bytes"
    if line:
        return RequestRejectedError(
            HTTPStatus.REQUEST_URI_TOO_LONG, f"the request line may have {limit}"
        )
    return RequestRejectedError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"the headers, or the trailers, may have {limit}",
    )
