"""A subscription's filter: a CEL expression over a message, compiled once, bounded, and never the end of a message.

`cel_expr_python` (the CEL project's own) is imported here alone. Patterns are RE2's and literal. The library bounds how many
rounds the loops of an evaluation make (10,000), but not how long they take: each round asks for the time
(`rooms.publishing.loops`). What an evaluation may cost is known before (`rooms.publishing.filter_bounds`): beyond a publish's
budget it runs in the sandbox.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from cel_expr_python import cel

from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.expression import Node, parse_checked
from rooms.publishing.filter_bounds import cost_ns, refusal
from rooms.publishing.loops import MACROS, bounded

MAX_EXPRESSION: Final = 1024
"""In characters."""
LOOPS_S: Final = 0.05
"""How long the loops of an evaluation may go on."""
_NUL: Final = b"\\u0000"
_PLACE: Final = re.compile(r"<input>:(?P<line>\d+):(?P<column>\d+): (?P<message>.*)")
_LONGEST_MESSAGE: Final = 300
_TICK: Final = "_tick"
_ENVIRONMENT: Final = f"""
name: filter
stdlib:
  include_macros: [has, {", ".join(MACROS)}]
variables:
  - {{name: event_type, type_name: string}}
  - {{name: event_version, type_name: int}}
  - {{name: ordering_key, type_name: string}}
  - {{name: priority, type_name: int}}
  - {{name: headers, type_name: map, params: [{{type_name: string}}, {{type_name: string}}]}}
  - {{name: payload, type_name: dyn}}
"""
_NAMES: Final = ("payload", "headers", "event_type", "event_version", "ordering_key", "priority")
_NOWHERE: Final = " (in container '')"
"""How the library ends its complaint about a name that it does not know."""
_config: Final = cel.NewEnvConfigFromYaml(_ENVIRONMENT)
_cel: Final = cel.NewEnv(config=_config)
_KINDS: Final = (cel.Type.BOOL, cel.Type.DYN)


@dataclass(slots=True, kw_only=True)
class Subject:
    """What a filter looks at: one message. It may be judged by any number of filters, and is read by the first."""

    payload: bytes
    """JSON text."""
    headers: Mapping[str, str]
    event_type: str
    event_version: int
    ordering_key: str | None
    priority: int
    _activation: Any = field(default=None, init=False, repr=False)

    def activation(self) -> Any:
        """The message as the library takes it. ValueError: it cannot be shown to a filter."""
        if self._activation is None:
            if _NUL in self.payload:
                # The library would see no more of such a text than what stands before it.
                raise ValueError("the payload contains U+0000")
            self._activation = _cel.Activation(
                {
                    "event_type": self.event_type,
                    "event_version": self.event_version,
                    "ordering_key": self.ordering_key or "",
                    "priority": self.priority,
                    "headers": {name.lower(): value for name, value in self.headers.items()},
                    "payload": msgspec.json.decode(self.payload),
                }
            )
        return self._activation


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a filter says of a message. With an `error` it matches: no message is lost for a filter's sake."""

    matches: bool
    error: str | None = None


class MessageFilter:
    """A compiled filter."""

    def __init__(self, expression: str, *, at: str = "filter", clock_s: Callable[[], float] = time.monotonic) -> None:
        """InvalidError (naming `at`): it is too long, does not compile, cannot be bounded, or says neither true nor false.

        `clock_s`: what loops are timed by.
        """
        self._clock_s = clock_s
        if len(expression) > MAX_EXPRESSION:
            raise InvalidError(FieldProblem(at, f"an expression has at most {MAX_EXPRESSION} characters"))
        if "\x00" in expression:
            raise InvalidError(FieldProblem(at, "contains the character U+0000"))
        try:
            self._program = _cel.compile(expression)
        except (RuntimeError, ValueError) as exc:
            raise InvalidError(FieldProblem(at, _told(str(exc)))) from exc
        if not any(self._program.return_type() == kind for kind in _KINDS):
            kind = self._program.return_type().name()
            raise InvalidError(FieldProblem(at, f"it says {kind}; a filter says true or false"))
        self._tree = _bounded_tree(self._program, at)
        self._costs: dict[int, float] = {}
        self.expression = expression
        self._until = 0.0
        if (in_time := bounded(expression, f"{_TICK}()")) != expression:
            self._program = self._with_tick(in_time, at)

    def judge(self, subject: Subject) -> Judgement:
        """Whether the subscription wants the message."""
        self._until = self._clock_s() + LOOPS_S
        try:
            found = self._program.eval(subject.activation())
            value = found.value()
        except Exception as exc:  # noqa: BLE001 - whatever a filter meets, its message is delivered
            return Judgement(matches=True, error=_shortened(str(exc) or type(exc).__name__))
        if value is True or value is False:
            return Judgement(matches=value)
        if found.type() == cel.Type.ERROR:
            return Judgement(matches=True, error=_shortened(str(value)))
        return Judgement(matches=True, error=f"it says {found.type().name()}, which is neither true nor false")

    def cost_ns(self, size: int) -> float:
        """Return an upper bound of what `judge` takes for a payload of that many bytes."""
        magnitude = size.bit_length()
        cost = self._costs.get(magnitude)
        if cost is None:
            cost = self._costs[magnitude] = cost_ns(self._tree, 1 << magnitude)
        return cost

    def _with_tick(self, expression: str, at: str) -> Any:
        overload = cel.Overload(_TICK, return_type=cel.Type.BOOL, parameters=[], impl=self._tick)
        try:
            return cel.NewEnv(config=_config, functions=[cel.FunctionDecl(_TICK, [overload])]).compile(expression)
        except (RuntimeError, ValueError) as exc:
            raise InvalidError(FieldProblem(at, f"its loops cannot be bounded: {_told(str(exc))}")) from exc

    def _tick(self) -> bool:
        if self._clock_s() > self._until:
            raise TimeoutError(f"its loops take longer than {LOOPS_S * 1000:g} ms")
        return True


class BrokenFilter(MessageFilter):
    """Stands for a kept expression that no longer compiles: it lets everything pass, and says why."""

    def __init__(self, error: str) -> None:
        self._error = error
        self.expression = "true"

    def cost_ns(self, size: int) -> float:  # noqa: ARG002 - it looks at nothing
        """Return 0."""
        return 0.0

    def judge(self, subject: Subject) -> Judgement:  # noqa: ARG002 - it looks at nothing
        """It matches, with its error."""
        return Judgement(matches=True, error=self._error)


def kept_filter(expression: str, *, clock_s: Callable[[], float] = time.monotonic) -> MessageFilter:
    """The filter of a stored expression, whatever the library thinks of it by now."""
    try:
        return MessageFilter(expression, clock_s=clock_s)
    except InvalidError as exc:
        return BrokenFilter(str(exc))


def _bounded_tree(program: Any, at: str) -> Node:
    try:
        tree = parse_checked(program.serialize())
        refused = refusal(tree)
    except (RecursionError, RuntimeError, ValueError) as exc:
        raise InvalidError(FieldProblem(at, f"its cost cannot be bounded: {_shortened(str(exc))}")) from exc
    if refused is not None:
        raise InvalidError(FieldProblem(at, refused))
    return tree


def _told(message: str) -> str:
    """The library's first complaint, with its place."""
    found = _PLACE.search(message)
    if found is None:
        return _shortened(message.partition("\n")[0].removeprefix("INVALID_ARGUMENT: ERROR: <input>:-1:-1: "))
    message = found["message"].replace(_NOWHERE, f"; there are {', '.join(_NAMES)}")
    return _shortened(f"line {found['line']}, column {found['column']}: {message}")


def _shortened(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 1] + "…"
