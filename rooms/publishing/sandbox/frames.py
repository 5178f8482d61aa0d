"""Encode checks and outcomes for the pipes of the sandbox: a length, then MessagePack.

The checks of a request share few schemas, filters and messages. A job has each of these once, and
its checks refer to them by number. A job is bounded, so that encoding it does not keep the event
loop.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

HEADER: Final = struct.Struct("!I")
MAX_JOB_CHECKS: Final = 1_000
MAX_JOB_BYTES: Final = 2 * 1024 * 1024
"""Most bytes of a job beyond its first check."""
CHECK_FAILED: Final = 70
"""The exit status of a process that a check ended, as EX_SOFTWARE of sysexits.h. A process that
cannot start has another one.
"""


class FilterMessage(msgspec.Struct, gc=False):
    """Hold a message for any number of filters."""

    payload: bytes
    headers: dict[str, str]
    event_type: str
    event_version: int
    ordering_key: str | None
    priority: int


class SchemaCheck(msgspec.Struct, gc=False):
    """Ask to validate a payload. Problems name places under `at`."""

    schema: bytes
    payload: bytes
    at: str


class SchemaCompile(msgspec.Struct, gc=False):
    """Ask whether a text is a schema. Problems name places under `at`."""

    schema: bytes
    at: str


class FilterCheck(msgspec.Struct, gc=False):
    """Ask to evaluate a filter for a message."""

    expression: str
    message: FilterMessage


Check = SchemaCheck | SchemaCompile | FilterCheck


class SchemaTask(msgspec.Struct, tag=0, array_like=True, gc=False):
    """Validate a payload of the job by one of its schemas."""

    schema: int
    payload: int
    at: str


class CompileTask(msgspec.Struct, tag=1, array_like=True, gc=False):
    """Compile a schema of the job."""

    schema: int
    at: str


class FilterTask(msgspec.Struct, tag=2, array_like=True, gc=False):
    """Evaluate a filter of the job for one of its messages."""

    expression: int
    message: int


Task = SchemaTask | CompileTask | FilterTask


class CheckJob(msgspec.Struct, gc=False):
    """Hold checks as tasks, which name parts of the job by their positions."""

    cpu_ms: float
    """CPU time for all of them."""
    filter_ms: float
    """CPU time for one filter."""
    texts: list[bytes] = []
    """Schemas and payloads."""
    expressions: list[str] = []
    messages: list[FilterMessage] = []
    tasks: list[Task] = []


class CheckOutcome(msgspec.Struct, gc=False):
    """Hold the problems of a payload or schema, or the result of a filter."""

    problems: list[tuple[str, str, str | None]] = []
    matches: bool = True
    error: str | None = None
    cpu_ms: float = 0.0
    final: bool = True
    """False: the payload is invalid, and its problems are still being listed."""
    late: bool = False
    """The check was ended because it took too much time or memory."""


class _JobParts:
    """Number the parts of a job. Equal parts are one if they are the same object."""

    def __init__(self, job: CheckJob) -> None:
        self._job = job
        self._numbers: dict[int, int] = {}

    def new_bytes(self, check: Check) -> int:
        """Return about so many bytes that a check would add."""
        return sum(_size(part) for part in _parts(check) if id(part) not in self._numbers)

    def add(self, check: Check) -> None:
        """Add a check as a task."""
        self._job.tasks.append(self._task(check))

    def _task(self, check: Check) -> Task:
        job, number = self._job, self._number
        match check:
            case SchemaCheck(schema, payload, at):
                return SchemaTask(number(job.texts, schema), number(job.texts, payload), at)
            case SchemaCompile(schema, at):
                return CompileTask(number(job.texts, schema), at)
            case FilterCheck(expression, message):
                return FilterTask(
                    number(job.expressions, expression), number(job.messages, message)
                )

    def _number(self, parts: list[Any], part: object) -> int:
        found = self._numbers.get(id(part))
        if found is None:
            found = self._numbers[id(part)] = len(parts)
            parts.append(part)
        return found


def make_job(checks: Sequence[Check], start: int, *, cpu_ms: float, filter_ms: float) -> CheckJob:
    """Return a job of the checks from `start` on, as many as its bounds allow; one at least."""
    job = CheckJob(cpu_ms, filter_ms)
    parts = _JobParts(job)
    parts.add(checks[start])
    left = MAX_JOB_BYTES
    for index in range(start + 1, min(len(checks), start + MAX_JOB_CHECKS)):
        left -= parts.new_bytes(checks[index])
        if left < 0:
            break
        parts.add(checks[index])
    return job


def _parts(check: Check) -> tuple[bytes | str | FilterMessage, ...]:
    match check:
        case SchemaCheck(schema, payload, _):
            return schema, payload
        case SchemaCompile(schema, _):
            return (schema,)
        case FilterCheck(expression, message):
            return expression, message


def _size(part: bytes | str | FilterMessage) -> int:
    if not isinstance(part, FilterMessage):
        return len(part)
    return len(part.payload) + sum(len(name) + len(value) for name, value in part.headers.items())


_encode: Final = msgspec.msgpack.encode


def encode_frame(frame: CheckJob | CheckOutcome) -> bytes:
    """Encode a frame for a pipe."""
    content = _encode(frame)
    return HEADER.pack(len(content)) + content


decode_job: Final = msgspec.msgpack.Decoder(CheckJob).decode
decode_outcome: Final = msgspec.msgpack.Decoder(CheckOutcome).decode
