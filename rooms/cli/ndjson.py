"""A file of messages, one a line, cut into batches that come out alike each time it is read."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import msgspec

LONGEST_LINE: Final = 2 * 1024 * 1024
MOST_BYTES: Final = 8 * 1024 * 1024
"""Of the messages of one batch, so that its request stays under the service's limit."""

Wrap = Callable[[bytes], bytes]
"""Makes a message (JSON) of a line. Raises ValueError where it cannot be one."""


class LineError(Exception):
    """A line that is no message."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a file holds: `digest` stands for all of it, `messages` are those from the wanted line on."""

    digest: str
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Messages that go out in one request: the byte at which the first begins, and the line that each stands on."""

    offset: int
    lines: tuple[int, ...]
    messages: tuple[bytes, ...]

    @property
    def body(self) -> bytes:
        """The request."""
        return b'{"messages":[' + b",".join(self.messages) + b"]}"


def whole_message(line: bytes) -> bytes:
    """A line that is a message itself: {event_type, payload, …}."""
    try:
        line.decode()  # what stays raw is not looked at by the decoder
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"no JSON object: {exc}") from exc
    if missing := [name for name in ("event_type", "payload") if name not in found]:
        raise ValueError(f"no {' and no '.join(missing)} in it; name an EVENT_TYPE where each line is a payload")
    return line


def payload_of(fields: dict[str, object]) -> Wrap:
    """Lines that are payloads of messages with these fields; a payload's bytes stay as they are."""

    def wrap(line: bytes) -> bytes:
        try:
            line.decode()
            msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ValueError(f"no JSON: {exc}") from exc
        return msgspec.json.encode({**fields, "payload": msgspec.Raw(line)})

    return wrap


def survey(file: BinaryIO, wrap: Wrap, *, first_line: int = 1, salt: bytes = b"") -> Survey:
    """Read all of it once. Raises LineError at the first line that is no message, before anything was sent."""
    digest = hashlib.sha256(salt)
    messages = 0
    for _, number, line in _lines(file, digest.update):
        if number >= first_line:
            _wrapped(wrap, number, line)
            messages += 1
    return Survey(digest=digest.hexdigest()[:32], messages=messages)


def batches(file: BinaryIO, wrap: Wrap, *, size: int, first_line: int = 1) -> Iterator[Batch]:
    """Batches of `size` messages (fewer where they are large), from a line on."""
    offset = 0
    lines: list[int] = []
    messages: list[bytes] = []
    room = MOST_BYTES
    for start, number, line in _lines(file):
        if number < first_line:
            continue
        message = _wrapped(wrap, number, line)
        if messages and (len(messages) == size or len(message) > room):
            yield Batch(offset=offset, lines=tuple(lines), messages=tuple(messages))
            lines, messages, room = [], [], MOST_BYTES
        if not messages:
            offset = start
        lines.append(number)
        messages.append(message)
        room -= len(message)
    if messages:
        yield Batch(offset=offset, lines=tuple(lines), messages=tuple(messages))


def _wrapped(wrap: Wrap, number: int, line: bytes) -> bytes:
    try:
        return wrap(line)
    except ValueError as exc:
        raise LineError(number, str(exc)) from exc


def _lines(file: BinaryIO, see: Callable[[bytes], None] = lambda _: None) -> Iterator[tuple[int, int, bytes]]:
    """(offset, number, line) of every line that is not blank."""
    file.seek(0)
    offset, number = 0, 1
    while raw := file.readline(LONGEST_LINE):
        if len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
            raise LineError(number, f"longer than {LONGEST_LINE} bytes")
        see(raw)
        if line := raw.strip():
            yield offset, number, line
        offset += len(raw)
        number += 1
