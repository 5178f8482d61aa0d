"""Bound filters: which expressions are accepted, and what evaluating one may cost.

The cost is an upper bound from the expression's tree, for a payload of a given size. Each node has
a greatest size of its value, a greatest number of elements, and a time. Strings that are joined
grow, and lists of lists multiply. A loop costs its time for each element that its range may have.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from rooms.domain.message_headers import MAX_DELIVERED_BYTES, MAX_DELIVERED_HEADERS
from rooms.publishing.cel_tree import (
    Comprehension,
    Constant,
    FunctionCall,
    ListOrMap,
    Node,
    Select,
    Variable,
)
from rooms.publishing.regex_bounds import pattern_weight

MAX_PATTERN: Final = 2_000
"""Largest weight of a pattern, which is about the states of its automaton."""
UNBOUNDED: Final = 1e30
"""A cost beyond any budget."""

_NODE_NS: Final = 150.0
_ROUND_NS: Final = 1_500.0
"""One round of a loop: its bookkeeping, and reading the clock once."""
_COMPARE_NS: Final = 40.0
"""A byte of two values that are compared."""
_JOIN_NS: Final = 40.0
_SEARCH_NS: Final = 0.02
"""A byte of a text times a byte of the searched text."""
_STATE_NS: Final = 8.0
"""A byte of a text times a state of a pattern."""
_STATE_BUILD_NS: Final = 500.0
_HEADERS_EXTENT: Final = (float(MAX_DELIVERED_BYTES), float(MAX_DELIVERED_HEADERS))
_FIELD_EXTENT: Final = (520.0, 1.0)
"""Greatest size and number of elements, of the headers and of the other fields of a message."""
_ZONE_METHODS: Final = frozenset(
    {
        "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear", "getFullYear", "getHours",
        "getMilliseconds", "getMinutes", "getMonth", "getSeconds",
    }
)  # fmt: skip
_OFFSET: Final = re.compile(r"[+-]?\d{2}:\d{2}")
_MATCHES: Final = "matches"
_TWO_ARGUMENTS: Final = 2


def rejection_reason(node: Node) -> str | None:
    """Return why a filter is refused whatever it costs; None: it is accepted."""
    for one in _descendants(node):
        if not isinstance(one, FunctionCall):
            continue
        if one.function == _MATCHES:
            pattern = one.arguments[-1] if len(one.arguments) == _TWO_ARGUMENTS else None
            if not isinstance(pattern, Constant) or pattern.text is None:
                return (
                    "matches() takes a literal pattern, for example"
                    " payload.code.matches('^[A-Z]+$')"
                )
            if pattern_weight(pattern.text) > MAX_PATTERN:
                return "the pattern of matches() repeats too much; use smaller counts"
        elif one.function in _ZONE_METHODS and len(one.arguments) == _TWO_ARGUMENTS:
            zone = one.arguments[-1]
            # The library opens the file of that name, and keeps every name for ever.
            if not isinstance(zone, Constant) or zone.text is None or not _is_time_zone(zone.text):
                return (
                    f"{one.function}() takes a literal time zone,"
                    " for example 'Europe/Vienna' or '+01:00'"
                )
    return None


def cost_ns(node: Node, size: int) -> float:
    """Return an upper bound of the time to evaluate an expression for a payload of `size` bytes."""
    whole = float(size)
    short: Mapping[str, _Extent] = dict.fromkeys(
        ("event_type", "event_version", "ordering_key", "priority"), _Extent(*_FIELD_EXTENT)
    )
    found = _CostModel().estimate(
        node,
        {**short, "headers": _Extent(*_HEADERS_EXTENT), "payload": _Extent(whole, whole / 2 + 1)},
    )
    return min(found.ns, UNBOUNDED)


def _descendants(node: Node) -> Sequence[Node]:
    found, left = [], [node]
    while left:
        one = left.pop()
        found.append(one)
        left.extend(_children(one))
    return found


def _children(node: Node) -> Sequence[Node]:
    match node:
        case Select():
            return (node.operand,)
        case FunctionCall():
            return node.arguments
        case ListOrMap():
            return node.items
        case Comprehension():
            return (node.range, node.initial, node.condition, node.step, node.result)
        case _:
            return ()


def _is_time_zone(name: str) -> bool:
    if _OFFSET.fullmatch(name):
        return True
    try:
        ZoneInfo(name)
    except (OSError, ValueError):
        return False
    return True


class _Extent(NamedTuple):
    """Bound a value: its bytes, with shared parts counted each time, and its elements."""

    size: float
    elements: float


class _Estimate(NamedTuple):
    size: float
    elements: float
    ns: float


_Extents = Mapping[str, _Extent]
_SCALAR: Final = _Extent(8.0, 1.0)


class _CostModel:
    def estimate(self, node: Node, names: _Extents) -> _Estimate:
        match node:
            case Constant():
                return _Estimate(node.size, 1.0, _NODE_NS)
            case Variable():
                return _Estimate(*names.get(node.name, _SCALAR), _NODE_NS)
            case Select():
                inner = self.estimate(node.operand, names)
                return _Estimate(*(_SCALAR if node.test else inner[:2]), inner.ns + _NODE_NS)
            case ListOrMap():
                parts = [self.estimate(item, names) for item in node.items]
                most = max([float(len(parts)), *(part.elements for part in parts)])
                return _Estimate(8.0 + sum(part.size + 1 for part in parts), most, _total_ns(parts))
            case FunctionCall():
                return self._call(
                    node.function,
                    [self.estimate(argument, names) for argument in node.arguments],
                    node,
                )
            case Comprehension():
                return self._loop(node, names)

    def _call(self, function: str, parts: Sequence[_Estimate], node: FunctionCall) -> _Estimate:
        extent, ns = _RULES.get(function, _unknown_rule)(parts, node)
        return _Estimate(
            min(extent.size, UNBOUNDED),
            min(extent.elements, UNBOUNDED),
            min(_total_ns(parts) + ns, UNBOUNDED),
        )

    def _loop(self, node: Comprehension, names: _Extents) -> _Estimate:
        over = self.estimate(node.range, names)
        initial = self.estimate(node.initial, names)
        element = _Extent(over.size, over.elements)
        inside = {
            **names,
            node.variable: element,
            node.result_variable: _Extent(initial.size, initial.elements),
        }
        condition, step = self.estimate(node.condition, inside), self.estimate(node.step, inside)
        rounds = over.elements
        result = _Extent(max(initial.size, step.size), max(initial.elements, step.elements))
        ns = over.ns + initial.ns + rounds * (_ROUND_NS + condition.ns + step.ns)
        if isinstance(node.initial, ListOrMap):
            # Each round adds to the list, and copies it.
            growth = step.size - initial.size
            total = over.size + 16 * rounds if _adds_element(node) else rounds * growth
            result = _Extent(initial.size + total, max(rounds, step.elements))
            ns += rounds * _JOIN_NS * total
        final = self.estimate(node.result, {**names, node.result_variable: result})
        return _Estimate(
            min(final.size, UNBOUNDED),
            min(final.elements, UNBOUNDED),
            min(ns + final.ns, UNBOUNDED),
        )


def _adds_element(node: Comprehension) -> bool:
    """Return whether rounds add only elements of the range, whose total is bounded by it."""
    return any(
        isinstance(one, ListOrMap) and list(one.items) == [Variable(node.variable)]
        for one in _descendants(node.step)
    )


def _total_ns(parts: Sequence[_Estimate]) -> float:
    return _NODE_NS + sum(part.ns for part in parts)


_Rule = Callable[[Sequence[_Estimate], FunctionCall], tuple[_Extent, float]]


def _unknown_rule(_: Sequence[_Estimate], __: FunctionCall) -> tuple[_Extent, float]:
    return _SCALAR, UNBOUNDED


def _constant_rule(_: Sequence[_Estimate], __: FunctionCall) -> tuple[_Extent, float]:
    return _SCALAR, 0.0


def _conditional_rule(parts: Sequence[_Estimate], _: FunctionCall) -> tuple[_Extent, float]:
    return _Extent(max(part.size for part in parts), max(part.elements for part in parts)), 0.0


def _index_rule(parts: Sequence[_Estimate], _: FunctionCall) -> tuple[_Extent, float]:
    return _Extent(parts[0].size, parts[0].elements), parts[-1].size


def _comparison_rule(parts: Sequence[_Estimate], _: FunctionCall) -> tuple[_Extent, float]:
    return _SCALAR, _COMPARE_NS * min(part.size for part in parts)


def _membership_rule(parts: Sequence[_Estimate], _: FunctionCall) -> tuple[_Extent, float]:
    return _SCALAR, 2 * parts[0].size + _COMPARE_NS * parts[-1].size


def _concatenation_rule(parts: Sequence[_Estimate], _: FunctionCall) -> tuple[_Extent, float]:
    size = sum(part.size for part in parts)
    return _Extent(size, sum(part.elements for part in parts)), _JOIN_NS * size


def _search_rule(parts: Sequence[_Estimate], _: FunctionCall) -> tuple[_Extent, float]:
    return _SCALAR, parts[0].size + _SEARCH_NS * parts[0].size * parts[-1].size


def _regex_rule(parts: Sequence[_Estimate], node: FunctionCall) -> tuple[_Extent, float]:
    pattern = node.arguments[-1]
    weight = pattern_weight(pattern.text or "") if isinstance(pattern, Constant) else UNBOUNDED
    return _SCALAR, weight * (_STATE_BUILD_NS + _STATE_NS * parts[0].size)


def _parse_rule(parts: Sequence[_Estimate], _: FunctionCall) -> tuple[_Extent, float]:
    return _SCALAR, 2_000.0 + 2 * parts[0].size


def _format_rule(parts: Sequence[_Estimate], _: FunctionCall) -> tuple[_Extent, float]:
    return _Extent(8 * parts[0].size + 64, 1.0), 1_000.0 + 8 * parts[0].size


_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(
        ("_&&_", "_||_", "!_", "@not_strictly_false", "__not_strictly_false__"), _constant_rule
    ),
    **dict.fromkeys(("_-_", "_*_", "_/_", "_%_", "-_", "type"), _constant_rule),
    **dict.fromkeys(
        ("_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_", "startsWith", "endsWith"), _comparison_rule
    ),
    **dict.fromkeys(
        ("int", "uint", "double", "bool", "timestamp", "duration", "size"), _parse_rule
    ),
    **dict.fromkeys(("string", "bytes"), _format_rule),
    **dict.fromkeys(_ZONE_METHODS, _parse_rule),
    "_?_:_": _conditional_rule,
    "dyn": _index_rule,
    "_[_]": _index_rule,
    "@in": _membership_rule,
    "_+_": _concatenation_rule,
    "contains": _search_rule,
    _MATCHES: _regex_rule,
}
