"""Split a stream of bytes into requests, wherever the packets were cut.

Nothing is parsed that is not bounded first, and what is read does not depend on how the bytes came. Trailers are checked for
their size and dropped: RFC 9110, 6.5.1 has them merged into the headers only where the meaning of each is known.
"""

from enum import Enum, auto
from http import HTTPStatus
from typing import Final

from rooms.rest.server.head import CHUNKED, MAX_HEAD_BYTES, MAX_HEADERS, Head, RefusedError, read_head, too_many_headers

_MAX_CHUNK_LINE_BYTES: Final = 256
_MAX_SIZE_DIGITS: Final = 15
_HEX: Final = frozenset(b"0123456789abcdefABCDEF")
_FIRST: Final = frozenset(b"\rABCDEFGHIJKLMNOPQRSTUVWXYZ")
_END: Final = b"\r\n\r\n"


class _Stage(Enum):
    HEAD = auto()
    CONTENT = auto()
    """A body of a known length."""
    SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILERS = auto()


class Framing:
    """Split what `put` gives it. RefusedError: the rest of the connection cannot be read."""

    __slots__ = ("_buffer", "_left", "_scanned", "_stage")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        """So much of the buffer has no end of what is read now."""
        self._left = 0
        """Bytes of the content, or of the chunk, that are still to come."""
        self._stage = _Stage.HEAD

    @property
    def between(self) -> bool:
        """Return whether the next thing to read is a head."""
        return self._stage is _Stage.HEAD

    @property
    def pending(self) -> int:
        """Return how many bytes wait to be read."""
        return len(self._buffer)

    @property
    def empty(self) -> bool:
        """Return whether no request has begun, and no byte waits."""
        return self._stage is _Stage.HEAD and not self._buffer

    def rest(self) -> bytes:
        """Take everything that waits."""
        return self._take(len(self._buffer))

    def put(self, data: bytes) -> None:
        """Add what came."""
        self._buffer += data

    def head(self) -> Head | None:
        """Read the next head; None: it is not complete."""
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: empty lines in front of a request
            del buffer[:2]
            self._scanned = 0
        if not buffer:
            return None
        if buffer[0] not in _FIRST or (buffer[0] == _END[0] and len(buffer) > 1):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "a request begins with its method")
        end = self._find(_END, MAX_HEAD_BYTES)
        if end < 0:
            if len(buffer) >= MAX_HEAD_BYTES + len(_END) - 1:
                raise _head_too_large(line=b"\r\n" not in buffer[:MAX_HEAD_BYTES])
            return None
        text = self._take(end + len(_END))
        head = read_head(text)
        self._left = head.length
        if head.length == CHUNKED:
            self._stage, self._left = _Stage.SIZE, 0
        elif head.length:
            self._stage = _Stage.CONTENT
        return head

    def body(self) -> bytes:
        """Take what has come of the body under way; it was the last of it where `between` holds then."""
        pieces: list[bytes] = []
        while self._stage is not _Stage.HEAD and self._step(pieces):
            pass
        return b"".join(pieces)

    def _step(self, pieces: list[bytes]) -> bool:
        """Read one part of the body; False: it has not come."""
        match self._stage:
            case _Stage.CONTENT:
                return self._content(pieces, _Stage.HEAD)
            case _Stage.CHUNK:
                return self._content(pieces, _Stage.CHUNK_END)
            case _Stage.CHUNK_END:
                return self._chunk_end()
            case _Stage.SIZE:
                return self._size()
            case _:
                return self._trailers()

    def _chunk_end(self) -> bool:
        if len(self._buffer) < len(b"\r\n"):
            return False
        if self._take(2) != b"\r\n":
            raise _bad_chunk()
        self._stage = _Stage.SIZE
        return True

    def _content(self, pieces: list[bytes], then: _Stage) -> bool:
        piece = self._take(min(self._left, len(self._buffer)))
        pieces.append(piece)
        self._left -= len(piece)
        if self._left:
            return False
        self._stage = then
        return True

    def _size(self) -> bool:
        end = self._find(b"\r\n", _MAX_CHUNK_LINE_BYTES)
        if end < 0:
            if len(self._buffer) > _MAX_CHUNK_LINE_BYTES:
                raise _bad_chunk()
            return False
        line = self._take(end + 2)[:-2]
        digits, semicolon, extension = line.partition(b";")
        digits = digits.rstrip(b" \t") if semicolon else digits
        if not digits or len(digits) > _MAX_SIZE_DIGITS or not _HEX.issuperset(digits) or not _printable(extension):
            raise _bad_chunk()
        self._left = int(digits, 16)
        self._stage = _Stage.CHUNK if self._left else _Stage.TRAILERS
        return True

    def _trailers(self) -> bool:
        buffer = self._buffer
        if buffer.startswith(b"\r\n"):
            self._take(2)
            self._stage = _Stage.HEAD
            return True
        end = self._find(_END, MAX_HEAD_BYTES)
        if end < 0:
            if len(buffer) >= MAX_HEAD_BYTES + len(_END) - 1:
                raise _head_too_large(line=False)
            return False
        lines = self._take(end + len(_END))[: -len(_END)].split(b"\r\n")
        if len(lines) > MAX_HEADERS:
            raise too_many_headers()
        if not all(_printable(line) and b":" in line for line in lines):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "each trailer is one line `Name: value` that ends with CR LF")
        self._stage = _Stage.HEAD
        return True

    def _find(self, end: bytes, most: int) -> int:
        """Return where `end` begins, at less than `most`; -1: not in what has come."""
        found = self._buffer.find(end, max(0, self._scanned - len(end) + 1), most + len(end) - 1)
        self._scanned = 0 if found >= 0 else min(len(self._buffer), most)
        return found

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._scanned = 0
        return taken


def _printable(line: bytes) -> bool:
    return all(byte >= ord(" ") or byte == ord("\t") for byte in line) and b"\x7f" not in line


def _bad_chunk() -> RefusedError:
    return RefusedError(HTTPStatus.BAD_REQUEST, "the body is not in chunks, as its Transfer-Encoding says")


def _head_too_large(*, line: bool) -> RefusedError:
    limit = f"{MAX_HEAD_BYTES} bytes"
    if line:
        return RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, f"the request line may have {limit}")
    return RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the headers, or the trailers, may have {limit}")
