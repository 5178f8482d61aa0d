"""Evaluate filters of subscriptions: CEL expressions over a message.

A filter that fails matches, so that no message is lost. Patterns are literal, and RE2's. Only this
module imports `cel_expr_python`, the library of the CEL project.

`rooms.publishing.cel_bounds` bounds the cost of an evaluation before it runs. Beyond the budget of
a publish it runs in the sandbox. The library bounds the rounds of loops (10,000), but not their
time. So each round of a list macro checks the time first:

    xs.exists(x, x > 1)    becomes    xs.exists(x, TICK ? (x > 1) : false)
    xs.map(x, x + 1)       becomes    xs.map(x, TICK, x + 1)

Once TICK is an error, the remaining rounds evaluate nothing else.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from cel_expr_python import cel

from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.cel_bounds import cost_ns, rejection_reason
from rooms.publishing.cel_tree import Node, parse_checked
from rooms.publishing.number_bounds import NumberScan, decode_json

LIST_MACROS: Final = ("all", "exists", "exists_one", "filter", "map")
_FIELD: Final = "filter"
_MAP_MACRO: Final = "map"
_MIN_ARGUMENTS: Final = 2
_TOKEN: Final = re.compile(
    r"""
    (?P<blank> \s+ | //[^\n]* )
  | (?P<text>
        (?: [rR][bB]? | [bB][rR] ) (?: \"{3}.*?\"{3} | '{3}.*?'{3} | \"[^\"\n]*\" | '[^'\n]*' )
      | [bB]? (?: \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3}
            | \"(?:\\.|[^\\\"\n])*\" | '(?:\\.|[^\\'\n])*' )
      | `[^`\n]*`
    )
  | (?P<word> [A-Za-z_][A-Za-z0-9_]* )
  | (?P<mark> . )
    """,
    re.VERBOSE | re.DOTALL,
)
MAX_EXPRESSION: Final = 1024
"""Most characters of an expression."""
LOOP_TIMEOUT_S: Final = 0.05
"""Longest time of the loops of one evaluation."""
_ESCAPED_NUL: Final = b"\\u0000"
_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""The escape sequence, and not a backslash (two of them in JSON) before the text `u0000`."""
_ERROR_LOCATION: Final = re.compile(r"<input>:(?P<line>\d+):(?P<column>\d+): (?P<message>.*)")
_MAX_ERROR_CHARS: Final = 300
_TICK: Final = "_tick"
_ENVIRONMENT: Final = f"""
name: filter
stdlib:
  include_macros: [has, {", ".join(LIST_MACROS)}]
variables:
  - {{name: event_type, type_name: string}}
  - {{name: event_version, type_name: int}}
  - {{name: ordering_key, type_name: string}}
  - {{name: priority, type_name: int}}
  - {{name: headers, type_name: map, params: [{{type_name: string}}, {{type_name: string}}]}}
  - {{name: payload, type_name: dyn}}
"""
_VARIABLES: Final = (
    "payload",
    "headers",
    "event_type",
    "event_version",
    "ordering_key",
    "priority",
)
_CONTAINER_SUFFIX: Final = " (in container '')"
"""End of the library's message about an unknown name."""
_config: Final = cel.NewEnvConfigFromYaml(_ENVIRONMENT)
_cel: Final = cel.NewEnv(config=_config)
_RESULT_TYPES: Final = (cel.Type.BOOL, cel.Type.DYN)
_SMALL_BYTES: Final = 256
_SMALL_BYTE_NS: Final = 60
"""Decoding and converting a small payload; counting its parts would take as long."""
_BYTE_NS: Final = 4
_ITEM_NS: Final = 90
_MEMBER_NS: Final = 270
_CONTAINER_NS: Final = 120
"""The same by the parts of a larger one."""
_SCANNED_BYTES: Final = 16_384
"""A smaller payload is not scanned for numbers such as `1e308`: all of them take about 1 ms."""


@dataclass(slots=True, kw_only=True)
class FilterInput:
    """Hold one message for any number of filters. The first evaluation decodes it."""

    payload: bytes
    """JSON text."""
    headers: Mapping[str, str]
    event_type: str
    event_version: int
    ordering_key: str | None
    priority: int
    _activation: Any = field(default=None, init=False, repr=False)
    _decode_ns: float | None = field(default=None, init=False, repr=False)

    def decode_ns(self) -> float:
        """Return an upper bound of the time by which the next evaluation takes longer.

        The first one decodes the payload and converts it; 0 from then on.
        """
        if self._activation is not None:
            return 0
        if self._decode_ns is None:
            # Of a large payload this takes a millisecond, and a message may have many filters.
            self._decode_ns = self._estimate_decoding()
        return self._decode_ns

    def _estimate_decoding(self) -> float:
        text = self.payload
        if len(text) <= _SMALL_BYTES:
            return _SMALL_BYTE_NS * len(text)
        cost_ns = (
            _BYTE_NS * len(text)
            + _ITEM_NS * text.count(b",")
            + _MEMBER_NS * text.count(b":")
            + _CONTAINER_NS * (text.count(b"{") + text.count(b"["))
        )
        return cost_ns + (0 if len(text) < _SCANNED_BYTES else NumberScan(text).decode_ns)

    def activation(self) -> Any:
        """Return the message for the library. ValueError: the library cannot represent it."""
        if self._activation is None:
            if _ESCAPED_NUL in self.payload and _NUL.search(self.payload):
                # The library would read such a text only up to that character.
                raise ValueError("the payload contains U+0000")
            self._activation = _cel.Activation(
                {
                    "event_type": self.event_type,
                    "event_version": self.event_version,
                    "ordering_key": self.ordering_key or "",
                    "priority": self.priority,
                    "headers": {name.lower(): value for name, value in self.headers.items()},
                    "payload": decode_json(self.payload, many=True),
                }
            )
        return self._activation


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Hold whether a message matches. With an `error` it does, so that no message is lost."""

    matches: bool
    error: str | None = None


class MessageFilter:
    """Evaluate one compiled filter."""

    def __init__(self, expression: str, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Compile a filter. `clock_s` times its loops.

        InvalidError: it is too long, does not compile, cannot be bounded, or does not
        return true or false.
        """
        self._clock_s = clock_s
        if len(expression) > MAX_EXPRESSION:
            raise InvalidError(
                FieldProblem(
                    _FIELD, f"an expression has at most {MAX_EXPRESSION} characters", bound="filter"
                )
            )
        if "\x00" in expression:
            raise InvalidError(FieldProblem(_FIELD, "contains the character U+0000"))
        try:
            self._program = _cel.compile(expression)
        except (RuntimeError, ValueError) as exc:
            raise InvalidError(FieldProblem(_FIELD, _compile_error_text(str(exc)))) from exc
        if not any(self._program.return_type() == kind for kind in _RESULT_TYPES):
            kind = self._program.return_type().name()
            raise InvalidError(
                FieldProblem(_FIELD, f"it returns {kind}; a filter returns true or false")
            )
        self._tree = _bounded_tree(self._program)
        self._costs: dict[int, float] = {}
        self.expression = expression
        self._deadline = 0.0
        if (in_time := with_time_limit(expression, f"{_TICK}()")) != expression:
            self._program = self._compile_with_tick(in_time)

    def evaluate(self, subject: FilterInput) -> FilterResult:
        """Return whether the message matches."""
        self._deadline = self._clock_s() + LOOP_TIMEOUT_S
        try:
            found = self._program.eval(subject.activation())
            value = found.value()
        except Exception as exc:  # noqa: BLE001 - the message is delivered
            return FilterResult(matches=True, error=_shortened(str(exc) or type(exc).__name__))
        if value is True or value is False:
            return FilterResult(matches=value)
        if found.type() == cel.Type.ERROR:
            return FilterResult(matches=True, error=_shortened(str(value)))
        return FilterResult(
            matches=True, error=f"it returns {found.type().name()}, which is neither true nor false"
        )

    def cost_ns(self, size: int) -> float:
        """Return an upper bound of the time of `evaluate` for a payload of `size` bytes."""
        magnitude = size.bit_length()
        cost = self._costs.get(magnitude)
        if cost is None:
            cost = self._costs[magnitude] = cost_ns(self._tree, 1 << magnitude)
        return cost

    def _compile_with_tick(self, expression: str) -> Any:
        overload = cel.Overload(_TICK, return_type=cel.Type.BOOL, parameters=[], impl=self._tick)
        try:
            return cel.NewEnv(
                config=_config, functions=[cel.FunctionDecl(_TICK, [overload])]
            ).compile(expression)
        except (RuntimeError, ValueError) as exc:
            raise InvalidError(
                FieldProblem(
                    _FIELD, f"its loops cannot be bounded: {_compile_error_text(str(exc))}"
                )
            ) from exc

    def _tick(self) -> bool:
        if self._clock_s() > self._deadline:
            raise TimeoutError(f"its loops take longer than {LOOP_TIMEOUT_S * 1000:g} ms")
        return True


class BrokenFilter(MessageFilter):
    """Replace a stored expression that no longer compiles. It matches every message."""

    def __init__(self, error: str) -> None:
        self._error = error
        self.expression = "true"

    def cost_ns(self, size: int) -> float:  # noqa: ARG002 - nothing is evaluated
        """Return 0."""
        return 0.0

    def evaluate(self, subject: FilterInput) -> FilterResult:  # noqa: ARG002 - nothing is evaluated
        """Return a match with the error."""
        return FilterResult(matches=True, error=self._error)


class SandboxedFilter(MessageFilter):
    """Leave an expression to the sandbox: here it would take too much memory."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def cost_ns(self, size: int) -> float:  # noqa: ARG002 - whatever the message is
        """Return infinity, so that no process but the sandbox evaluates it."""
        return math.inf

    def evaluate(self, subject: FilterInput) -> FilterResult:  # noqa: ARG002 - whatever it is
        """Raise RuntimeError."""
        raise RuntimeError("only the sandbox evaluates this filter")


def load_filter(expression: str, *, clock_s: Callable[[], float] = time.monotonic) -> MessageFilter:
    """Return the filter of a stored expression, even if it no longer compiles."""
    try:
        return MessageFilter(expression, clock_s=clock_s)
    except InvalidError as exc:
        return BrokenFilter(str(exc))


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def with_time_limit(expression: str, tick: str) -> str:
    """Insert `tick`, which is true or an error, into each round of the loops of an expression.

    The expression must compile.
    """
    tokens = [
        _Token(found.lastgroup or "", found[0], found.start())
        for found in _TOKEN.finditer(expression)
        if found.lastgroup != "blank"
    ]
    cuts: list[tuple[int, str]] = []
    for index, (dot, word, bracket) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False)):
        if (dot.text, word.kind, bracket.text) == (".", "word", "(") and word.text in LIST_MACROS:
            cuts += _insertions(
                list(_argument_spans(tokens[index + 3 :])), tick, is_map=word.text == _MAP_MACRO
            )
    # From the end, so that the positions before stay valid; all differ.
    for at, text in sorted(cuts, reverse=True):
        expression = f"{expression[:at]}{text}{expression[at:]}"
    return expression


def _insertions(
    bounds: Sequence[tuple[int, int]], tick: str, *, is_map: bool
) -> Iterator[tuple[int, str]]:
    """Yield position and text of each insertion into a macro with these arguments."""
    if len(bounds) < _MIN_ARGUMENTS:
        return
    start, end = bounds[1]
    if is_map and len(bounds) == _MIN_ARGUMENTS:
        yield start, f"{tick}, "
        return
    yield start, f"{tick} ? ("
    yield end, "\n) : false"  # On its own line, since a comment may precede it.


def _argument_spans(tokens: Sequence[_Token]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each argument, up to the closing bracket."""
    depth, start = 0, tokens[0].at
    for token, following in zip(tokens, (*tokens[1:], tokens[-1]), strict=True):
        if token.kind != "mark":
            continue
        if depth == 0 and token.text in {",", ")"}:
            yield start, token.at
            start = following.at
            if token.text == ")":
                return
        depth += (token.text in {"(", "[", "{"}) - (token.text in {")", "]", "}"})


def _bounded_tree(program: Any) -> Node:
    try:
        tree = parse_checked(program.serialize())
        refused = rejection_reason(tree)
    except (RecursionError, RuntimeError, ValueError) as exc:
        raise InvalidError(
            FieldProblem(
                _FIELD, f"its cost cannot be bounded: {_shortened(str(exc))}", bound="filter"
            )
        ) from exc
    if refused is not None:
        raise InvalidError(FieldProblem(_FIELD, refused, bound="filter"))
    return tree


def _compile_error_text(message: str) -> str:
    """Return the first error of the library, with line and column."""
    found = _ERROR_LOCATION.search(message)
    if found is None:
        return _shortened(
            message.partition("\n")[0].removeprefix("INVALID_ARGUMENT: ERROR: <input>:-1:-1: ")
        )
    message = found["message"].replace(
        _CONTAINER_SUFFIX, f"; the variables are {', '.join(_VARIABLES)}"
    )
    return _shortened(f"line {found['line']}, column {found['column']}: {message}")


def _shortened(message: str) -> str:
    return message if len(message) <= _MAX_ERROR_CHARS else message[: _MAX_ERROR_CHARS - 1] + "…"
