"""Decode serialised CEL expressions (`cel.expr.CheckedExpr`), as far as bounds need them.

The library has expanded the macros: `xs.exists(…)` is a `Comprehension`. So nothing depends on how
an expression is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_EXPR_FIELD: Final = 4
_ANY_TYPE_URL: Final = b"type.googleapis.com/cel.expr.CheckedExpr"


@dataclass(frozen=True, slots=True)
class Constant:
    """Hold a constant, with `text` for strings only."""

    text: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Variable:
    """Name a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Select:
    """Select a field, or test whether it exists."""

    operand: "Node"
    test: bool


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Call a function, an operator (`_==_`) or a method, whose target is the first argument."""

    function: str
    arguments: Sequence["Node"]


@dataclass(frozen=True, slots=True)
class ListOrMap:
    """Hold the items of a list, or the keys and values of a map."""

    items: Sequence["Node"]


@dataclass(frozen=True, slots=True)
class Comprehension:
    """Hold an expanded macro."""

    variable: str
    range: "Node"
    result_variable: str
    initial: "Node"
    condition: "Node"
    step: "Node"
    result: "Node"


Node = Constant | Variable | Select | FunctionCall | ListOrMap | Comprehension


def parse_checked(serialised: bytes) -> Node:
    """Return the tree of a serialised expression. ValueError: its form is unknown."""
    fields = dict(_fields(serialised))
    if fields.get(1) == _ANY_TYPE_URL:
        fields = dict(_fields(_bytes(fields[2])))
    return _node(_bytes(fields.get(_EXPR_FIELD)))


def _node(message: bytes) -> Node:
    for number, value in _fields(message):
        match number:
            case 3:
                return _constant(_bytes(value))
            case 4:
                return Variable(_text(dict(_fields(_bytes(value))).get(1, b"")))
            case 5:
                parts = dict(_fields(_bytes(value)))
                return Select(_node(_bytes(parts.get(1))), bool(parts.get(3)))
            case 6:
                return _call(_bytes(value))
            case 7:
                return ListOrMap(
                    [_node(_bytes(item)) for field, item in _fields(_bytes(value)) if field == 1]
                )
            case 8:
                return ListOrMap(list(_map_entries(_bytes(value))))
            case 9:
                return _comprehension(_bytes(value))
    raise ValueError("an expression of unknown form")


def _constant(message: bytes) -> Constant:
    for number, value in _fields(message):
        if number == 6:  # noqa: PLR2004 - string_value
            return Constant(_text(value), len(_bytes(value)))
        return Constant(None, len(value) if isinstance(value, bytes) else 8)
    return Constant(None, 8)


def _call(message: bytes) -> FunctionCall:
    target: list[Node] = []
    function, arguments = "", []
    for number, value in _fields(message):
        match number:
            case 1:
                target = [_node(_bytes(value))]
            case 2:
                function = _text(value)
            case 3:
                arguments.append(_node(_bytes(value)))
    return FunctionCall(function, target + arguments)


def _map_entries(message: bytes) -> Iterator[Node]:
    for number, value in _fields(message):
        if number == 2:  # noqa: PLR2004 - entries
            yield from (
                _node(_bytes(part)) for field, part in _fields(_bytes(value)) if field in {3, 4}
            )


def _comprehension(message: bytes) -> Comprehension:
    fields = dict(_fields(message))
    if fields.get(8):
        raise ValueError("a loop with two variables")
    return Comprehension(
        _text(fields.get(1, b"")),
        _node(_bytes(fields.get(2))),
        _text(fields.get(3, b"")),
        *(_node(_bytes(fields.get(number))) for number in (4, 5, 6, 7)),
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                value, at = _varint(message, at)
                yield tag >> 3, value
            case 1:
                yield tag >> 3, message[at : at + 8]
                at += 8
            case 2:
                size, at = _varint(message, at)
                yield tag >> 3, message[at : at + size]
                at += size
            case 5:
                yield tag >> 3, message[at : at + 4]
                at += 4
            case _:
                raise ValueError("no protocol buffer")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message):
            raise ValueError("a protocol buffer that ends too early")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the last byte has no high bit
            return value, at
        shift += 7


def _bytes(value: int | bytes | None) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("an expression that lacks a part")  # noqa: TRY004 - the message is invalid
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()
