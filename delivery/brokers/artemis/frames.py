"""Parse STOMP 1.2 frames fast, and encode them safely for every value.

Lines end with LF only, as Artemis writes them. Header values are escaped.
"""

import re
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

_T = TypeVar("_T")

_ESCAPES: Final = {ord("\\"): "\\\\", ord("\n"): "\\n", ord("\r"): "\\r", ord(":"): "\\c"}
_UNESCAPED_TEXT: Final = re.compile(r"[^\\\n\r:\0]*")
_UNESCAPED_CHARS: Final = {"\\": "\\", "n": "\n", "r": "\r", "c": ":"}
_MAX_HEAD_BYTES: Final = 1 << 20
_MAX_BODY_BYTES: Final = 1 << 30
_LENGTH: Final = b"\ncontent-length:"
_LF: Final = 10


class ProtocolError(Exception):
    """Report bytes that are not STOMP: the stream cannot be followed any further."""


class Frame(NamedTuple):
    """Hold a frame: `head` is the header lines between LFs, `body` the bytes as they were sent."""

    command: bytes
    head: bytes
    body: bytes


def escape(value: str) -> str:
    """Return a header value that stays in its line. ValueError: it has a NUL."""
    if _UNESCAPED_TEXT.fullmatch(value):
        return value
    if "\0" in value:
        raise ValueError("a header value cannot carry NUL")
    return value.translate(_ESCAPES)


def unescape(value: str) -> str:
    """Return the value that `escape` encoded. ValueError: an invalid escape."""
    first, *rest = value.split("\\")
    parts = [first]
    skip = False
    for part in rest:
        if skip:
            parts.append(part)
            skip = False
        elif part:
            if part[0] not in _UNESCAPED_CHARS:
                raise ValueError(f"the escape \\{part[0]} is invalid")
            parts.append(_UNESCAPED_CHARS[part[0]] + part[1:])
        else:
            parts.append("\\")
            skip = True
    return "".join(parts)


def encode(command: str, headers: dict[str, str], body: bytes | None = None) -> bytes:
    """Return a frame; without a body it has no length either.

    Used for the few frames outside the hot path.
    """
    plain = (
        command == "CONNECT"
    )  # CONNECT does not escape its values, for compatibility with STOMP 1.0
    lines = [
        command,
        *(f"{name}:{value if plain else escape(value)}" for name, value in headers.items()),
    ]
    if body is not None:
        lines.append(f"content-length:{len(body)}")
    return "\n".join([*lines, "", ""]).encode() + (body or b"") + b"\0"


def header(head: bytes, name: bytes) -> bytes | None:
    """Return one header as received, the last if it is repeated. Other headers may be malformed."""
    start = head.rfind(b"\n" + name + b":")
    if start < 0:
        return None
    end = head.find(b"\n", start + 1)
    return head[start + len(name) + 2 : end if end >= 0 else len(head)]


FastDecode = Callable[[bytes, str, int], tuple[_T, int] | None]
"""Decodes the frame at an offset; returns it and the offset of the next one, or None.

None: the frame must be parsed. The same bytes come as Latin-1 text, which has the same offsets.
"""


class FrameParser(Generic[_T]):
    """Split a stream into frames; those that the fast decoder can read become its results."""

    def __init__(self, fast_decode: FastDecode[_T] | None = None) -> None:
        self._fast_decode = fast_decode
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._needed_bytes = 1

    def feed(self, data: bytes) -> list[Frame | _T]:
        """Return the frames that are complete now, without heart-beats.

        ProtocolError: close the connection.
        """
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes < self._needed_bytes:
            return []
        if len(self._chunks) > 1:
            data = b"".join(self._chunks)
        frames: list[Frame | _T] = []
        start = self._split(data, frames)
        self._chunks = [data[start:]] if start < len(data) else []
        self._buffered_bytes = len(data) - start
        return frames

    def _split(self, data: bytes, frames: list[Frame | _T]) -> int:
        """Append the frames of `data`; return where the first incomplete one starts."""
        self._needed_bytes = 1
        at, size = 0, len(data)
        find, shortcut = data.find, self._fast_decode
        text = "" if shortcut is None else data.decode("latin-1")
        while True:
            while at < size and data[at] == _LF:
                at += 1
            if shortcut is not None and (read := shortcut(data, text, at)) is not None:
                frames.append(read[0])
                at = read[1]
                continue
            end = find(b"\n\n", at)
            if end < 0:
                if size - at > _MAX_HEAD_BYTES:
                    raise ProtocolError("the head of a frame is too long")
                return at
            line = find(b"\n", at, end + 1)
            head = data[line : end + 1]
            body = end + 2
            place = head.find(_LENGTH)
            if place < 0:
                stop = find(b"\0", body)
                if stop < 0:
                    self._needed_bytes = size - at + 1
                    return at
            else:
                stop = body + _content_length(head, place)
                if stop >= size:
                    self._needed_bytes = stop + 1 - at
                    return at
                if data[stop]:
                    raise ProtocolError("a frame is longer than its content-length")
            frames.append(Frame(data[at:line], head, data[body:stop]))
            at = stop + 1


def _content_length(head: bytes, at: int) -> int:
    start = at + len(_LENGTH)
    digits = head[start : head.find(b"\n", start)]
    if not digits.isdigit() or int(digits) > _MAX_BODY_BYTES:
        raise ProtocolError(f"a frame has the content-length {digits[:32]!r}")
    return int(digits)
