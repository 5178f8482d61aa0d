"""Checks that the sandbox does, and how they and their outcomes go through its pipes: a length, and MessagePack."""

import struct
from typing import Final

import msgspec

HEADER: Final = struct.Struct("!I")


class SchemaCheck(msgspec.Struct, tag="schema", gc=False):
    """Check a payload by the schema of its event type. Problems name places under `at`."""

    schema: bytes
    payload: bytes
    at: str


class SchemaCompile(msgspec.Struct, tag="compile", gc=False):
    """Check whether a text is a schema. Problems name places under `at`."""

    schema: bytes
    at: str


class FilterCheck(msgspec.Struct, tag="filter", gc=False):
    """Evaluate a filter over a message."""

    expression: str
    payload: bytes
    headers: dict[str, str]
    event_type: str
    event_version: int
    ordering_key: str | None
    priority: int


Check = SchemaCheck | SchemaCompile | FilterCheck


class Job(msgspec.Struct, gc=False):
    """Checks, with milliseconds of CPU time for each and for all."""

    cpu_ms: float
    each_ms: list[float]
    checks: list[Check]


class Outcome(msgspec.Struct, gc=False):
    """One check's outcome. `problems`: of a payload or a schema; `matches`, `error`: of a filter."""

    problems: list[tuple[str, str]] = []
    matches: bool = True
    error: str | None = None
    cpu_ms: float = 0.0
    final: bool = True
    """False: the payload does not fit, and its problems are still being listed."""
    late: bool = False
    """The check was ended, as it took too much time or memory."""


_encode: Final = msgspec.msgpack.encode


def packed(frame: Job | Outcome) -> bytes:
    """Return a frame as it goes through a pipe."""
    content = _encode(frame)
    return HEADER.pack(len(content)) + content


read_job: Final = msgspec.msgpack.Decoder(Job).decode
read_outcome: Final = msgspec.msgpack.Decoder(Outcome).decode
