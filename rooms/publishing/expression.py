"""CEL expressions as trees: decodes what the library serialises (`cel.expr.CheckedExpr`), as far as bounds need it.

The macros are expanded there (`xs.exists(…)` is a `Loop`), so that nothing depends on how an expression is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_EXPR: Final = 4
_WRAPPED: Final = b"type.googleapis.com/cel.expr.CheckedExpr"


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant; `text` of a string only."""

    text: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Name:
    """A variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Select:
    """A field, or a test whether there is one."""

    operand: "Node"
    test: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A function, an operator (`_==_`) or a method, whose target is its first argument."""

    function: str
    arguments: Sequence["Node"]


@dataclass(frozen=True, slots=True)
class Collection:
    """A list, or the keys and values of a map."""

    items: Sequence["Node"]


@dataclass(frozen=True, slots=True)
class Loop:
    """A macro, expanded."""

    variable: str
    range: "Node"
    result_variable: str
    initial: "Node"
    condition: "Node"
    step: "Node"
    result: "Node"


Node = Literal | Name | Select | Call | Collection | Loop


def parse_checked(serialised: bytes) -> Node:
    """Return the tree of a serialised expression. ValueError: it has a form that is not known here."""
    fields = dict(_fields(serialised))
    if fields.get(1) == _WRAPPED:
        fields = dict(_fields(_bytes(fields[2])))
    return _node(_bytes(fields.get(_EXPR)))


def _node(message: bytes) -> Node:
    for number, value in _fields(message):
        match number:
            case 3:
                return _literal(_bytes(value))
            case 4:
                return Name(_text(dict(_fields(_bytes(value))).get(1, b"")))
            case 5:
                parts = dict(_fields(_bytes(value)))
                return Select(_node(_bytes(parts.get(1))), bool(parts.get(3)))
            case 6:
                return _call(_bytes(value))
            case 7:
                return Collection([_node(_bytes(item)) for field, item in _fields(_bytes(value)) if field == 1])
            case 8:
                return Collection(list(_entries(_bytes(value))))
            case 9:
                return _loop(_bytes(value))
    raise ValueError("an expression without a form")


def _literal(message: bytes) -> Literal:
    for number, value in _fields(message):
        if number == 6:  # noqa: PLR2004 - string_value
            return Literal(_text(value), len(_bytes(value)))
        return Literal(None, len(value) if isinstance(value, bytes) else 8)
    return Literal(None, 8)


def _call(message: bytes) -> Call:
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
    return Call(function, target + arguments)


def _entries(message: bytes) -> Iterator[Node]:
    for number, value in _fields(message):
        if number == 2:  # noqa: PLR2004 - entries
            yield from (_node(_bytes(part)) for field, part in _fields(_bytes(value)) if field in {3, 4})


def _loop(message: bytes) -> Loop:
    fields = dict(_fields(message))
    if fields.get(8):
        raise ValueError("a loop with two variables")
    return Loop(
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
        raise ValueError("an expression that lacks a part")  # noqa: TRY004 - it is the message that is wrong
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()
