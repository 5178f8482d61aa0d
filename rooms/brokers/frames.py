"""STOMP 1.2 frames as bytes: a parser that costs little a frame, and encoding that no value can break.

Lines end with LF alone, as Artemis writes them; header values travel escaped.
"""

import re
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

_T = TypeVar("_T")

_ESCAPES: Final = {ord("\\"): "\\\\", ord("\n"): "\\n", ord("\r"): "\\r", ord(":"): "\\c"}
_CLEAN: Final = re.compile(r"[^\\\n\r:\0]*")
_PLAIN: Final = {"\\": "\\", "n": "\n", "r": "\r", "c": ":"}
_MOST_HEAD_BYTES: Final = 1 << 20
_MOST_BODY_BYTES: Final = 1 << 30
_LENGTH: Final = b"\ncontent-length:"
_LF: Final = 10


class ProtocolError(Exception):
    """What came is no STOMP: the stream cannot be followed any further."""


class Frame(NamedTuple):
    """`head`: the header lines as they came, between LFs; `body`: the bytes as they were sent."""

    command: bytes
    head: bytes
    body: bytes


def escape(value: str) -> str:
    """A header value that stays in its line. ValueError for NUL, which no frame can carry."""
    if _CLEAN.fullmatch(value):
        return value
    if "\0" in value:
        raise ValueError("a header value cannot carry NUL")
    return value.translate(_ESCAPES)


def unescape(value: str) -> str:
    """The value that `escape` hid. ValueError for an escape that means nothing."""
    first, *rest = value.split("\\")
    parts = [first]
    skip = False
    for part in rest:
        if skip:
            parts.append(part)
            skip = False
        elif part:
            if part[0] not in _PLAIN:
                raise ValueError(f"the escape \\{part[0]} means nothing")
            parts.append(_PLAIN[part[0]] + part[1:])
        else:
            parts.append("\\")
            skip = True
    return "".join(parts)


def encode(command: str, headers: dict[str, str], body: bytes | None = None) -> bytes:
    """A frame; None: no body, and no length either. For the few frames that speed does not matter for."""
    plain = command == "CONNECT"  # its values are not escaped, for the sake of STOMP 1.0
    lines = [command, *(f"{name}:{value if plain else escape(value)}" for name, value in headers.items())]
    if body is not None:
        lines.append(f"content-length:{len(body)}")
    return "\n".join([*lines, "", ""]).encode() + (body or b"") + b"\0"


def header(head: bytes, name: bytes) -> bytes | None:
    """One header as it came, of a frame whose others may be unreadable; the last where there are two."""
    start = head.rfind(b"\n" + name + b":")
    if start < 0:
        return None
    end = head.find(b"\n", start + 1)
    return head[start + len(name) + 2 : end if end >= 0 else len(head)]


Shortcut = Callable[[bytes, str, int], tuple[_T, int] | None]
"""What is read of the frame at a place in these bytes, and where the next begins; None: cut it out, it has to be looked at.
The same bytes come as Latin-1, in which a place is the same place.
"""


class Parser(Generic[_T]):
    """Cuts a stream of bytes into frames, and leaves to a shortcut those that it can read as they lie there."""

    def __init__(self, shortcut: Shortcut[_T] | None = None) -> None:
        self._shortcut = shortcut
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = 1

    def feed(self, data: bytes) -> list[Frame | _T]:
        """The frames that are complete now, in their order. Heart-beats are none. ProtocolError: close the connection."""
        self._chunks.append(data)
        self._have += len(data)
        if self._have < self._need:
            return []
        if len(self._chunks) > 1:
            data = b"".join(self._chunks)
        frames: list[Frame | _T] = []
        start = self._cut(data, frames)
        self._chunks = [data[start:]] if start < len(data) else []
        self._have = len(data) - start
        return frames

    def _cut(self, data: bytes, frames: list[Frame | _T]) -> int:
        """Append the frames of `data`; where the first that is not complete starts."""
        self._need = 1
        at, size = 0, len(data)
        find, shortcut = data.find, self._shortcut
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
                if size - at > _MOST_HEAD_BYTES:
                    raise ProtocolError("a frame's head has no end")
                return at
            line = find(b"\n", at, end + 1)
            head = data[line : end + 1]
            body = end + 2
            place = head.find(_LENGTH)
            if place < 0:
                stop = find(b"\0", body)
                if stop < 0:
                    self._need = size - at + 1
                    return at
            else:
                stop = body + _length(head, place)
                if stop >= size:
                    self._need = stop + 1 - at
                    return at
                if data[stop]:
                    raise ProtocolError("a frame does not end where it says")
            frames.append(Frame(data[at:line], head, data[body:stop]))
            at = stop + 1


def _length(head: bytes, place: int) -> int:
    start = place + len(_LENGTH)
    digits = head[start : head.find(b"\n", start)]
    if not digits.isdigit() or int(digits) > _MOST_BODY_BYTES:
        raise ProtocolError(f"a frame has the length {digits[:32]!r}")
    return int(digits)
