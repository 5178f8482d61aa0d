"""Encode checks and outcomes for the pipes of the sandbox: a length, then MessagePack."""

import struct
from typing import Final

import msgspec

HEADER: Final = struct.Struct("!I")


class SchemaCheck(msgspec.Struct, tag="schema", gc=False):
    """Ask to validate a payload. Problems name places under `at`."""

    schema: bytes
    payload: bytes
    at: str


class SchemaCompile(msgspec.Struct, tag="compile", gc=False):
    """Ask whether a text is a schema. Problems name places under `at`."""

    schema: bytes
    at: str


class FilterCheck(msgspec.Struct, tag="filter", gc=False):
    """Ask to evaluate a filter for a message."""

    expression: str
    payload: bytes
    headers: dict[str, str]
    event_type: str
    event_version: int
    ordering_key: str | None
    priority: int


Check = SchemaCheck | SchemaCompile | FilterCheck


class CheckJob(msgspec.Struct, gc=False):
    """Hold checks, with the CPU milliseconds for each and for all."""

    cpu_ms: float
    each_ms: list[float]
    checks: list[Check]


class CheckOutcome(msgspec.Struct, gc=False):
    """Hold the problems of a payload or schema, or the result of a filter."""

    problems: list[tuple[str, str]] = []
    matches: bool = True
    error: str | None = None
    cpu_ms: float = 0.0
    final: bool = True
    """False: the payload is invalid, and its problems are still being listed."""
    late: bool = False
    """The check was ended because it took too much time or memory."""


_encode: Final = msgspec.msgpack.encode


def encode_frame(frame: CheckJob | CheckOutcome) -> bytes:
    """Encode a frame for a pipe."""
    content = _encode(frame)
    return HEADER.pack(len(content)) + content


decode_job: Final = msgspec.msgpack.Decoder(CheckJob).decode
decode_outcome: Final = msgspec.msgpack.Decoder(CheckOutcome).decode
