"""Publish a file of messages (one per line) in batches.

The idempotency key of a batch is the prefix and the byte offset of its first line. The same file is
cut into the same batches each time. A repeated upload therefore sends the same keys, and publishes
nothing twice while the service knows them, for 24 hours.

A batch that is too much for the service (413) is sent in halves. Its first half has the same key.
So where an earlier upload sent halves, the key of the whole batch was used for another request
(409), and halves are tried then too.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, BinaryIO, Final

import msgspec

from rooms.cli.client import ApiClient
from rooms.cli.errors import CliError, ProblemError, UnreachableError, is_transient

MAX_LINE_BYTES: Final = 2 * 1024 * 1024
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
"""Limit of one batch, so that its request stays below the limit of the service."""

LineParser = Callable[[bytes], bytes]
"""Return the message (JSON) of a line. Raise ValueError if the line is not one."""

RETRIES: Final = 5
_MAX_PAUSE_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.5
_TIMEOUT_S: Final = 120.0
_MESSAGE_INDEX: Final = re.compile(r"messages(?:\[|/)(\d+)\]?")


def resume_hint(prefix: str, line: int, *, again: bool) -> str:
    """Say how an upload that stopped at a line goes on; `again`: it was one with `--again`.

    Each run with `--again` has a prefix of its own, so the same command would publish all again.
    """
    resume = f"--idempotency-prefix {prefix} --from-line {line}"
    if again:
        return f"continue with this in place of --again: {resume}"
    safe = "for 24 hours, repeating the command publishes nothing twice"
    return f"{safe}; later, or to skip finished lines: {resume}"


class LineError(Exception):
    """Report a line that is not a message."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFile:
    """Describe a file: a digest of its content, and its messages from the first line wanted on."""

    digest: str
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishBatch:
    """Hold the messages of one request, with their line numbers and byte offsets."""

    offsets: tuple[int, ...]
    lines: tuple[int, ...]
    messages: tuple[bytes, ...]

    @property
    def body(self) -> bytes:
        """Return the body of the request."""
        return b'{"messages":[' + b",".join(self.messages) + b"]}"

    def halves(self) -> "tuple[PublishBatch, PublishBatch]":
        """Return the same messages as two batches."""
        middle = (len(self.messages) + 1) // 2
        first, second = (
            PublishBatch(
                offsets=self.offsets[part], lines=self.lines[part], messages=self.messages[part]
            )
            for part in (slice(middle), slice(middle, None))
        )
        return first, second


def parse_message_line(line: bytes) -> bytes:
    """Return a line that is a message: {event_type, payload, …}. Raise ValueError if it is not."""
    try:
        line.decode()  # the decoder does not check what stays raw
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"not a JSON object: {exc}") from exc
    if missing := [name for name in ("event_type", "payload") if name not in found]:
        raise ValueError(
            f"no {' and no '.join(missing)} in it; name an EVENT_TYPE if each line is a payload"
        )
    return line


def payload_parser(fields: dict[str, object]) -> LineParser:
    """Return a parser for lines that are payloads of messages with these fields."""

    def wrap(line: bytes) -> bytes:
        try:
            line.decode()
            msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ValueError(f"not JSON: {exc}") from exc
        return msgspec.json.encode({**fields, "payload": msgspec.Raw(line)})

    return wrap


def scan_file(
    file: BinaryIO, parse: LineParser, *, first_line: int = 1, salt: bytes = b""
) -> BatchFile:
    """Read the whole file before anything is sent. Raise LineError at the first invalid line."""
    digest = hashlib.sha256(salt)
    messages = 0
    for _, number, line in _read_lines(file, digest.update):
        if number >= first_line:
            _parse_line(parse, number, line)
            messages += 1
    return BatchFile(digest=digest.hexdigest()[:32], messages=messages)


def read_batches(
    file: BinaryIO, parse: LineParser, *, size: int, first_line: int = 1
) -> Iterator[PublishBatch]:
    """Yield batches of `size` messages, or fewer where they are large, from `first_line` on."""
    found: list[tuple[int, int, bytes]] = []
    room = MAX_BATCH_BYTES
    for start, number, line in _read_lines(file):
        if number < first_line:
            continue
        message = _parse_line(parse, number, line)
        if found and (len(found) == size or len(message) > room):
            yield _to_batch(found)
            found, room = [], MAX_BATCH_BYTES
        found.append((start, number, message))
        room -= len(message)
    if found:
        yield _to_batch(found)


def _to_batch(found: Sequence[tuple[int, int, bytes]]) -> PublishBatch:
    offsets, lines, messages = zip(*found, strict=True)
    return PublishBatch(offsets=offsets, lines=lines, messages=messages)


def _parse_line(parse: LineParser, number: int, line: bytes) -> bytes:
    try:
        return parse(line)
    except ValueError as exc:
        raise LineError(number, str(exc)) from exc


def _read_lines(
    file: BinaryIO, on_line: Callable[[bytes], None] = lambda _: None
) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset, line number, line) of every line that is not blank."""
    file.seek(0)
    offset, number = 0, 1
    while raw := file.readline(MAX_LINE_BYTES):
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raise LineError(number, f"longer than {MAX_LINE_BYTES} bytes")
        on_line(raw)
        if line := raw.strip():
            yield offset, number, line
        offset += len(raw)
        number += 1


class UploadError(CliError):
    """Report where an upload stopped. Everything before `line` is published; `line` resumes it."""

    def __init__(
        self, cause: CliError, batch: PublishBatch, *, published: int, prefix: str, again: bool
    ) -> None:
        self.cause = cause
        self.batch = batch
        self.published = published
        self.prefix = prefix
        self.again = again
        super().__init__(
            f"lines {batch.lines[0]} to {batch.lines[-1]} were not accepted: {cause.message}"
        )

    @property
    def line(self) -> int:
        """Return the first line that is not known to be published."""
        return self.batch.lines[0]

    def problems(self) -> list[tuple[int | None, str, str]]:
        """Return (line, field, problem) for each error that the service reported."""
        found = []
        for field, message in self.cause.fields if isinstance(self.cause, ProblemError) else []:
            index = _MESSAGE_INDEX.search(field)
            known = index is not None and int(index[1]) < len(self.batch.lines)
            line = self.batch.lines[int(index[1])] if index is not None and known else None
            found.append(
                (
                    line,
                    field[index.end() :].lstrip("./") if index is not None and known else field,
                    message,
                )
            )
        return found

    def describe(self) -> dict[str, Any]:
        return {
            **self.cause.describe(),
            "lines": [self.batch.lines[0], self.batch.lines[-1]],
            "errors": [
                {"line": line, "field": field, "message": text}
                for line, field, text in self.problems()
            ],
            "published": self.published,
            "from_line": self.line,
            "idempotency_prefix": self.prefix,
        }

    def lines(self) -> list[str]:
        problems = self.problems()
        detail = [] if problems else self.cause.lines()[1:]
        where = [
            f"line {line}: {field}: {text}" if line else f"{field}: {text}"
            for line, field, text in problems
        ]
        return [self.message, *detail, *where, *self._resume_hint()]

    def _resume_hint(self) -> list[str]:
        before = (
            f"{self.published} messages are published"
            if self.published
            else "nothing of this run is published"
        )
        if _is_key_reused(self.cause):
            return [
                f"{before}. This part of the file was published before with other content:",
                "use the same --batch-size again, or --again to publish all of it again",
            ]
        if isinstance(self.cause, ProblemError) and not is_transient(self.cause):
            how = " in place of --again" if self.again else ""
            resume = f"--idempotency-prefix {self.prefix} --from-line {self.line}"
            return [f"{before}. Correct these lines, then continue with{how}: {resume}"]
        return [f"{before}. {resume_hint(self.prefix, self.line, again=self.again)}"]


@dataclass(slots=True, kw_only=True)
class Upload:
    """Send batches to `path` of the API.

    Transient errors (the service is unreachable, busy or restarting) are retried RETRIES times. A
    batch that is too much for the service is sent in halves, and later ones in as small parts.
    `again`: the command had `--again`.
    """

    client: ApiClient
    path: str
    prefix: str
    again: bool = False
    sleep: Callable[[float], None]
    warn: Callable[[str], None]
    published: int = 0
    """Messages that are known to be published, by an earlier upload too."""
    max_messages: int = sys.maxsize
    """Messages that the service takes at a time, as far as is known."""

    def send_all(self, batches: Iterable[PublishBatch]) -> Iterator[tuple[PublishBatch, bool]]:
        """Send each in order, and yield what was sent, with True if an earlier upload had sent it.

        UploadError.
        """
        for batch in batches:
            yield from self._send_parts(batch)

    def _send_parts(self, batch: PublishBatch) -> Iterator[tuple[PublishBatch, bool]]:
        count = len(batch.messages)
        if count > self.max_messages:
            yield from self._send_halves(batch)
            return
        try:
            repeated = self._send(batch)
        except CliError as exc:
            error = UploadError(
                exc, batch, published=self.published, prefix=self.prefix, again=self.again
            )
            if count == 1 or not (_is_too_costly(exc) or _is_key_reused(exc)):
                raise error from exc
            if _is_key_reused(exc):
                yield from self._send_again_in_halves(batch, error)
                return
            self.max_messages = (count + 1) // 2
            self.warn(f"{exc.message}; going on with {self.max_messages} messages at a time")
            yield from self._send_halves(batch)
        else:
            self.published += count
            yield batch, repeated

    def _send_halves(self, batch: PublishBatch) -> Iterator[tuple[PublishBatch, bool]]:
        for half in batch.halves():
            yield from self._send_parts(half)

    def _send_again_in_halves(
        self, batch: PublishBatch, error: UploadError
    ) -> Iterator[tuple[PublishBatch, bool]]:
        """Send a batch in the parts in which an earlier upload sent it, if there are such."""
        before = self.published
        try:
            yield from self._send_halves(batch)
        except UploadError:
            if self.published > before:
                raise
            raise error from error.cause

    def _send(self, batch: PublishBatch) -> bool:
        wait_s = _FIRST_PAUSE_S
        for left in range(RETRIES, -1, -1):
            retry_after_s = None
            try:
                answer = self.client.send(
                    "POST",
                    self.path,
                    body=batch.body,
                    headers={"Idempotency-Key": f"{self.prefix}-{batch.offsets[0]}"},
                    timeout_s=_TIMEOUT_S,
                )
            except UnreachableError as exc:
                if not left:
                    raise
                message = exc.message
            except ProblemError as exc:
                if not left or not is_transient(exc):
                    raise
                message, retry_after_s = exc.message, exc.retry_after_s
            else:
                return bool(answer.headers.get("idempotent-replayed") == "true")
            wait_s = min(_MAX_PAUSE_S, max(wait_s * 2, retry_after_s or 0.0))
            self.warn(
                f"lines {batch.lines[0]} to {batch.lines[-1]}: {message}; retrying in {wait_s:g} s"
            )
            self.sleep(wait_s)
        raise AssertionError("the last try returns or raises")


def _is_too_costly(cause: CliError) -> bool:
    """Return whether the whole request was too much, not one message of it.

    A proxy before the service may refuse it too.
    """
    if not isinstance(cause, ProblemError) or cause.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return False
    texts = [str(cause.problem.get("detail") or ""), *(field for field, _ in cause.fields)]
    return not any(_MESSAGE_INDEX.search(text) for text in texts)


def _is_key_reused(cause: CliError) -> bool:
    return isinstance(cause, ProblemError) and cause.kind == "idempotency-key-reused"
