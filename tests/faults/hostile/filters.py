"""Filters that are made to cost much, over messages that make them.

What must hold: an expression is a filter or is refused; judging a message never holds up the loop, and ends; what takes too long
counts as "cannot say", which lets the message pass; and inline and sandbox say the same.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

from rooms.errors import InvalidError
from rooms.metrics import Metrics
from rooms.publishing.cel_filter import MAX_EXPRESSION, FilterInput, MessageFilter
from rooms.publishing.deferred_checks import BASE_BUDGET_NS, BUDGET_NS_PER_BYTE, Checker
from rooms.publishing.sandbox.client import CheckSandbox
from rooms.publishing.sandbox.frames import FilterCheck, FilterMessage
from tests.faults.hostile.suite import Suite
from tests.faults.hostile.watch import watching

HELD_UP_S = 3.0


class Case(NamedTuple):
    expression: str
    payload: Any


def _generate(rng: Random) -> Case:
    expression = ""
    for _ in range(rng.choice((1, 30))):
        expression = rng.choice(_EXPRESSIONS)(rng)
        if _compiles(expression):
            break
    size = rng.choice((1, 30, 3000, 60_000))
    payload = {
        "s": rng.choice(("a", "ab", "é")) * size,
        "t": "a" * (size // 2) + "b",
        "l": list(range(size)),
        "k": [f"x{number}" for number in range(size)],
        "m": {str(number): number for number in range(min(size, 5000))},
        "o": [{"a": number, "b": "x"} for number in range(min(size, 5000))],
        "z": rng.choice(("/dev/stdin", "Europe/Vienna", "../../etc/passwd", "x" * 1000)),
        "n": rng.choice((1, 1.5, None, "2020-01-01T00:00:00Z", "1h", 2**70, -1e308)),
    }
    return Case(expression[: MAX_EXPRESSION + 5], payload)


def _compiles(expression: str) -> bool:
    try:
        MessageFilter(expression)
    except InvalidError:
        return False
    return True


def _path(rng: Random) -> str:
    name = rng.choice("stlkmozn")
    return rng.choice((f"payload.{name}", f"payload['{name}']", "payload", "headers", "event_type"))


def _value(rng: Random, depth: int = 0) -> str:
    """Any function of the library, over anything."""
    if depth > 3 or rng.random() < 0.3:
        return rng.choice((_path(rng), _path(rng), *_LITERALS))
    made = rng.choice(_FORMS)
    for mark, words in _WORDS.items():
        made = made.replace(mark, rng.choice(words))
    while "PATH" in made:
        made = made.replace("PATH", _path(rng), 1)
    while "ANY" in made:
        made = made.replace("ANY", _value(rng, depth + 1), 1)
    return made


def _whole(rng: Random) -> str:
    return f"{_value(rng)} == {_value(rng)}"


def _doubling(rng: Random) -> str:
    step = rng.choice(
        (
            ".map(v, v + v)",
            ".map(v, [v, v])",
            ".map(v, {'a': v, 'b': v})",
            ".filter(v, [[v, v]].exists(w, w == v))",
        )
    )
    range_ = rng.choice(("[payload]", "[payload.s]", "payload.l", "[payload.l]"))
    chain = range_ + step * rng.choice((1, 5, 12, 40))
    return rng.choice(
        (f"{chain} == {chain}", f"size({chain}[0]) == 1", f"{chain}.exists(v, v == payload)")
    )


def _nested(rng: Random) -> str:
    names = "abcdefghijklm"[: rng.randrange(1, 8)]
    body = rng.choice(
        (
            "true",
            "payload.s == payload.t",
            "payload.s.contains(payload.t)",
            "payload.s.matches('(a|b)*c')",
        )
    )
    for name in names:
        body = f"{_path(rng)}.{rng.choice(('all', 'exists', 'exists_one'))}({name}, {body})"
    return body


def _noise(rng: Random) -> str:
    return "".join(
        rng.choice("abx.()[]{}'\"`\\+-?:,&|!<>= \n\t\x00é1payload")
        for _ in range(rng.randrange(60))
    )


_LITERALS = ("1", "'a'", "1.5", "true", "null", "[1, 2]", "{'a': 1}", "b'x'", "2u")
_FORMS = (
    "(ANY OPERATOR ANY)", "CONVERSION(ANY)", "ANY.METHOD(ANY)", "matches(ANY, PATTERN)", "PATH.matches(PATTERN)",
    "timestamp(ANY).TIME()", "timestamp(ANY).TIME(PATH)", "timestamp(ANY).TIME('Europe/Vienna')", "PATH.MACRO(v, ANY)",
    "PATH.MACRO(v, v == ANY)", "PATH.map(v, ANY, [v, ANY])", "(ANY ? ANY : ANY)", "[ANY, ANY]", "{'a': ANY, 'b': ANY}", "PATH[ANY]",
    "!ANY", "-ANY", "ANY.size()", "has(payload.a.b)",
)  # fmt: skip
_CONVERSIONS = (
    "int",
    "uint",
    "double",
    "string",
    "bytes",
    "bool",
    "timestamp",
    "duration",
    "dyn",
    "type",
    "size",
)
_PATTERNS = (
    "'[ab]*a[ab]{900}c'", "'(a{1000}){1000}'", "'^a+$'", "'(a|b)*c'", "payload.s", "'a' + 'b'", "r'\\\\pL{900}'", "'('", "dyn('a')",
    "'(?i)[^x]{300}y'",
)  # fmt: skip
_TIMES = ("getHours", "getFullYear", "getDayOfWeek", "getMilliseconds", "getDate")
_WORDS = {
    "OPERATOR": ("+", "-", "*", "/", "%", "==", "!=", "<", "<=", ">", ">=", "&&", "||", "in"),
    "CONVERSION": _CONVERSIONS,
    "METHOD": ("contains", "startsWith", "endsWith", "matches"),
    "PATTERN": _PATTERNS,
    "TIME": _TIMES,
    "MACRO": ("all", "exists", "exists_one", "filter", "map"),
}
_EXPRESSIONS: tuple[Callable[[Random], str], ...] = (_whole, _whole, _doubling, _nested, _noise)


@asynccontextmanager
async def _target(_: str) -> AsyncIterator[Callable[[Case], Awaitable[str]]]:
    async with (
        CheckSandbox(processes=2, cpu_ms=200, memory_bytes=1 << 28, metrics=Metrics()) as sandbox,
        watching() as watch,
    ):
        checker = Checker(sandbox, max_schema_bytes=1024)

        async def run(case: Case) -> str:
            if not _compiles(case.expression):
                return "refused"
            found = MessageFilter(case.expression)
            subject = FilterInput(
                payload=json.dumps(case.payload).encode(), headers={"x-a": "b"}, event_type="e", event_version=1,
                ordering_key=None, priority=4,
            )  # fmt: skip
            message = FilterMessage(subject.payload, {"x-a": "b"}, "e", 1, None, 4)
            inline = found.cost_ns(
                len(subject.payload)
            ) <= BASE_BUDGET_NS + BUDGET_NS_PER_BYTE * len(subject.payload)
            watch.begin()
            judgement = await checker.evaluate_filter("tenant", found, subject)
            await asyncio.sleep(0)
            assert watch.longest_s < HELD_UP_S, f"the loop was held up for {watch.longest_s:.3f} s"
            assert judgement.error is None or judgement.matches, "what cannot say must match"
            way = "inline" if inline else "sandbox"
            if inline:
                (there,) = await sandbox.run("tenant", [FilterCheck(case.expression, message)])
                same = (there.matches, there.error) == (judgement.matches, judgement.error)
                assert same or there.late or _is_timing(there.error, judgement.error), (
                    there,
                    judgement,
                )
            if judgement.error is not None:
                return f"{way}: {'late' if 'its share' in judgement.error else 'cannot say'}"
            return f"{way}: {judgement.matches}"

        yield run


def _is_timing(*errors: str | None) -> bool:
    """Return whether one of the evaluations ended at the deadline of loops, as either may."""
    return any(error is not None and "its loops take longer" in error for error in errors)


SUITE = Suite(name="filters", cases=150, generate=_generate, target=_target)
