"""Bounds of filters: what an expression may ask for, and what evaluating it may cost for a payload of a given size.

The cost is an upper bound, made from the expression's tree: each node has a greatest size of its value (strings that are joined
grow, lists of lists multiply), a greatest number of elements, and a time. A loop counts as often as its range may have elements.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from rooms.publishing.expression import Call, Collection, Literal, Loop, Name, Node, Select
from rooms.publishing.patterns import pattern_weight

MAX_PATTERN: Final = 2_000
"""Weight of a pattern: about the states that its automaton may have."""
NEVER: Final = 1e30
"""A cost beyond any budget."""

_NODE_NS: Final = 150.0
_ROUND_NS: Final = 1_500.0
"""One round of a loop: its bookkeeping, and one look at the clock."""
_COMPARE_NS: Final = 40.0
"""A byte of two values that are compared."""
_JOIN_NS: Final = 40.0
_SEARCH_NS: Final = 0.02
"""A byte of a text times a byte of what is searched in it."""
_STATE_NS: Final = 8.0
"""A byte of a text times a state of a pattern."""
_STATE_MADE_NS: Final = 500.0
_HEADERS: Final = (25_000.0, 20.0)
_SHORT: Final = (520.0, 1.0)
"""Greatest size and number of elements, of the headers and of the other fields of a message."""
_ZONE_METHODS: Final = frozenset(
    {
        "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear", "getFullYear", "getHours", "getMilliseconds", "getMinutes",
        "getMonth", "getSeconds",
    }
)  # fmt: skip
_OFFSET: Final = re.compile(r"[+-]?\d{2}:\d{2}")
_MATCHES: Final = "matches"
_PAIR: Final = 2


def refusal(node: Node) -> str | None:
    """Return why a filter is refused, whatever it costs; None: it is not."""
    for one in _all(node):
        if not isinstance(one, Call):
            continue
        if one.function == _MATCHES:
            pattern = one.arguments[-1] if len(one.arguments) == _PAIR else None
            if not isinstance(pattern, Literal) or pattern.text is None:
                return "matches() takes a pattern that is a literal text, like payload.code.matches('^[A-Z]+$')"
            if pattern_weight(pattern.text) > MAX_PATTERN:
                return "the pattern of matches() repeats too much; use smaller counts"
        elif one.function in _ZONE_METHODS and len(one.arguments) == _PAIR:
            zone = one.arguments[-1]
            # The library opens the file of that name, and keeps every name that it was ever given.
            if not isinstance(zone, Literal) or zone.text is None or not _is_zone(zone.text):
                return f"{one.function}() takes a time zone that is a literal text, like 'Europe/Vienna' or '+01:00'"
    return None


def cost_ns(node: Node, size: int) -> float:
    """Return an upper bound of what evaluating the expression takes with a payload of `size` bytes."""
    whole = float(size)
    short: Mapping[str, _Extent] = dict.fromkeys(
        ("event_type", "event_version", "ordering_key", "priority"), _Extent(*_SHORT)
    )
    found = _Cost().of(node, {**short, "headers": _Extent(*_HEADERS), "payload": _Extent(whole, whole / 2 + 1)})
    return min(found.ns, NEVER)


def _all(node: Node) -> Sequence[Node]:
    found, left = [], [node]
    while left:
        one = left.pop()
        found.append(one)
        left.extend(_parts(one))
    return found


def _parts(node: Node) -> Sequence[Node]:
    match node:
        case Select():
            return (node.operand,)
        case Call():
            return node.arguments
        case Collection():
            return node.items
        case Loop():
            return (node.range, node.initial, node.condition, node.step, node.result)
        case _:
            return ()


def _is_zone(name: str) -> bool:
    if _OFFSET.fullmatch(name):
        return True
    try:
        ZoneInfo(name)
    except (OSError, ValueError):
        return False
    return True


class _Extent(NamedTuple):
    """How large a value may be: its bytes, shared parts counted as often as they stand in it, and its most elements."""

    size: float
    elements: float


class _Spent(NamedTuple):
    size: float
    elements: float
    ns: float


_Names = Mapping[str, _Extent]
_ONE: Final = _Extent(8.0, 1.0)


class _Cost:
    def of(self, node: Node, names: _Names) -> _Spent:
        match node:
            case Literal():
                return _Spent(node.size, 1.0, _NODE_NS)
            case Name():
                return _Spent(*names.get(node.name, _ONE), _NODE_NS)
            case Select():
                inner = self.of(node.operand, names)
                return _Spent(*(_ONE if node.test else inner[:2]), inner.ns + _NODE_NS)
            case Collection():
                parts = [self.of(item, names) for item in node.items]
                most = max([float(len(parts)), *(part.elements for part in parts)])
                return _Spent(8.0 + sum(part.size + 1 for part in parts), most, _total(parts))
            case Call():
                return self._call(node.function, [self.of(argument, names) for argument in node.arguments], node)
            case Loop():
                return self._loop(node, names)

    def _call(self, function: str, parts: Sequence[_Spent], node: Call) -> _Spent:
        extent, ns = _FUNCTIONS.get(function, _unknown)(parts, node)
        return _Spent(min(extent.size, NEVER), min(extent.elements, NEVER), min(_total(parts) + ns, NEVER))

    def _loop(self, node: Loop, names: _Names) -> _Spent:
        over = self.of(node.range, names)
        initial = self.of(node.initial, names)
        element = _Extent(over.size, over.elements)
        inside = {**names, node.variable: element, node.result_variable: _Extent(initial.size, initial.elements)}
        condition, step = self.of(node.condition, inside), self.of(node.step, inside)
        rounds = over.elements
        result = _Extent(max(initial.size, step.size), max(initial.elements, step.elements))
        ns = over.ns + initial.ns + rounds * (_ROUND_NS + condition.ns + step.ns)
        if isinstance(node.initial, Collection):
            # A list grows by what each round adds, and is copied each time.
            growth = step.size - initial.size
            total = over.size + 16 * rounds if _adds_element(node) else rounds * growth
            result = _Extent(initial.size + total, max(rounds, step.elements))
            ns += rounds * _JOIN_NS * total
        final = self.of(node.result, {**names, node.result_variable: result})
        return _Spent(min(final.size, NEVER), min(final.elements, NEVER), min(ns + final.ns, NEVER))


def _adds_element(node: Loop) -> bool:
    """Return whether the rounds add the elements themselves, which are no more in all than the range is."""
    return any(isinstance(one, Collection) and list(one.items) == [Name(node.variable)] for one in _all(node.step))


def _total(parts: Sequence[_Spent]) -> float:
    return _NODE_NS + sum(part.ns for part in parts)


_Rule = Callable[[Sequence[_Spent], Call], tuple[_Extent, float]]


def _unknown(_: Sequence[_Spent], __: Call) -> tuple[_Extent, float]:
    return _ONE, NEVER


def _constant(_: Sequence[_Spent], __: Call) -> tuple[_Extent, float]:
    return _ONE, 0.0


def _largest(parts: Sequence[_Spent], _: Call) -> tuple[_Extent, float]:
    return _Extent(max(part.size for part in parts), max(part.elements for part in parts)), 0.0


def _first(parts: Sequence[_Spent], _: Call) -> tuple[_Extent, float]:
    return _Extent(parts[0].size, parts[0].elements), parts[-1].size


def _compared(parts: Sequence[_Spent], _: Call) -> tuple[_Extent, float]:
    return _ONE, _COMPARE_NS * min(part.size for part in parts)


def _contained(parts: Sequence[_Spent], _: Call) -> tuple[_Extent, float]:
    return _ONE, 2 * parts[0].size + _COMPARE_NS * parts[-1].size


def _joined(parts: Sequence[_Spent], _: Call) -> tuple[_Extent, float]:
    size = sum(part.size for part in parts)
    return _Extent(size, sum(part.elements for part in parts)), _JOIN_NS * size


def _searched(parts: Sequence[_Spent], _: Call) -> tuple[_Extent, float]:
    return _ONE, parts[0].size + _SEARCH_NS * parts[0].size * parts[-1].size


def _matched(parts: Sequence[_Spent], node: Call) -> tuple[_Extent, float]:
    pattern = node.arguments[-1]
    weight = pattern_weight(pattern.text or "") if isinstance(pattern, Literal) else NEVER
    return _ONE, weight * (_STATE_MADE_NS + _STATE_NS * parts[0].size)


def _read(parts: Sequence[_Spent], _: Call) -> tuple[_Extent, float]:
    return _ONE, 2_000.0 + 2 * parts[0].size


def _written(parts: Sequence[_Spent], _: Call) -> tuple[_Extent, float]:
    return _Extent(8 * parts[0].size + 64, 1.0), 1_000.0 + 8 * parts[0].size


_FUNCTIONS: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(("_&&_", "_||_", "!_", "@not_strictly_false", "__not_strictly_false__"), _constant),
    **dict.fromkeys(("_-_", "_*_", "_/_", "_%_", "-_", "type"), _constant),
    **dict.fromkeys(("_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_", "startsWith", "endsWith"), _compared),
    **dict.fromkeys(("int", "uint", "double", "bool", "timestamp", "duration", "size"), _read),
    **dict.fromkeys(("string", "bytes"), _written),
    **dict.fromkeys(_ZONE_METHODS, _read),
    "_?_:_": _largest,
    "dyn": _first,
    "_[_]": _first,
    "@in": _contained,
    "_+_": _joined,
    "contains": _searched,
    _MATCHES: _matched,
}
