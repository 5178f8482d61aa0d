"""Bounds of filters: what is refused, and that the cost of every function of the library is known."""

import json
import re
import time

import pytest

from rooms.domain.message_headers import (
    HEADER_OVERHEAD,
    MAX_DELIVERED_BYTES,
    MAX_DELIVERED_HEADERS,
    MAX_NAME,
    MAX_SIGNATURE,
    MAX_VALUE,
)
from rooms.errors import InvalidError
from rooms.publishing.cel_bounds import _RULES, UNBOUNDED
from rooms.publishing.cel_filter import (
    LIST_MACROS,
    MAX_EXPRESSION,
    FilterInput,
    MessageFilter,
    load_filter,
)
from rooms.publishing.request import decode_message

CHEAP_NS = 10_000_000
CALL_NS = 50_000
"""Entering the library once, which the bound of an expression leaves out: 4,000 here."""


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("payload.s.matches(payload.s)", "literal"),
        ("matches(payload.s, payload.s)", "literal"),
        (".matches(payload.s, payload.p)", "literal"),
        ("payload.s.matches('a' + payload.s)", "literal"),
        ("payload.s.matches(dyn('a'))", "literal"),
        ("payload.s.matches(true ? 'a' : payload.s)", "literal"),
        ("payload.l.exists(p, payload.s.matches(p))", "literal"),
        ("[payload.s.matches(payload.s)].exists(x, x)", "literal"),
        ("{'a': payload.s.matches(payload.s)}.a", "literal"),
        ("has(payload.a) ? true : payload.s.matches(headers['x'])", "literal"),
        ("payload.s.matches('([ab]{900}){900}')", "repeats too much"),
        ("payload.s.matches('\\\\pL{900}')", "repeats too much"),
        ("timestamp(payload.t).getHours(payload.z) == 1", "time zone"),
        ("timestamp(payload.t).getFullYear('/dev/stdin') == 1", "time zone"),
        ("timestamp(payload.t).getDate('../../etc/passwd') == 1", "time zone"),
    ],
)
def test_what_cannot_be_bounded_is_refused(expression: str, expected: str) -> None:
    with pytest.raises(InvalidError, match=expected):
        MessageFilter(expression)


@pytest.mark.parametrize(
    "expression", ["payload.s.matches(payload.s)", "timestamp(payload.t).getHours(payload.z) == 1"]
)
def test_a_kept_filter_that_is_refused_by_now_is_never_run(expression: str) -> None:
    found = load_filter(expression)
    assert found.cost_ns(1 << 20) == 0
    judgement = found.evaluate(
        FilterInput(
            payload=b"{", headers={}, event_type="", event_version=1, ordering_key=None, priority=4
        )
    )
    assert judgement.matches
    assert "literal" in (judgement.error or "")


@pytest.mark.parametrize(
    "expression",
    [
        "payload.s.matches('^[A-Z]{2,8}-[0-9]+$')",
        "matches(payload.s, 'a|b')",
        "payload.l.exists(x, x.sku == 'B' && x.n > 1)",
        "payload.l.all(x, x in ['a', 'b'])",
        "headers.exists(name, name.startsWith('x-'))",
        "payload.s.contains(payload.t)",
        "timestamp(payload.t).getHours('Europe/Vienna') >= 8 && timestamp(payload.t).getDayOfWeek() < 5",
        "timestamp(payload.t).getMinutes('+01:00') == 3",
        "duration(payload.d) > duration('1h') || duration(payload.d).getSeconds() == 1",
        "int(payload.n) % 2 == 0 && uint(payload.n) > 1u && double(payload.n) / 2.0 < 3.0",
        "string(payload.n) == '1' && bytes(payload.s) == b'x' && bool(payload.b)",
        "type(payload.n) == int && dyn(payload.n) != null && -payload.n < 1 && !(payload.n >= 1)",
        "size(payload.s) > 3 && payload.l.size() == 2 && payload.l[0] == payload['l'][1]",
        "(payload.a ? payload.b : payload.c) == {'a': [1, 2.5, true, null]}",
        "payload.a + payload.b > 10 && payload.a - 1 == 2 * 3",
        "has(payload.a.b) && payload.s.startsWith('a') && payload.s.endsWith('b')",
        "payload.t < payload.u && payload.t <= payload.u",
    ],
)
def test_what_filters_are_for_is_cheap_with_a_small_payload(expression: str) -> None:
    assert 0 < MessageFilter(expression).cost_ns(500) < CHEAP_NS


@pytest.mark.parametrize(
    "expression",
    [
        "[payload.s].map(a, a + a).map(a, a + a).map(a, a + a).map(a, a + a)[0] == 'x'",
        "[payload].map(a, [a, a]).map(a, [a, a]).map(a, [a, a]) == []",
        "[[payload, payload]].exists(a, [[a, a]].exists(b, [[b, b]].exists(c, c == b)))",
        "payload.a.exists(a, payload.b.exists(b, a == b))",
        "payload.s.contains(payload.t)",
        "payload.l.filter(x, x > 1).size() == 2",
        "payload.s.matches('[ab]*a[ab]{900}c')",
        "payload.l.map(x, payload.s + payload.s) == []",
        "payload.l.all(x, payload.b == payload.b)",
    ],
)
def test_what_grows_faster_than_its_payload_is_beyond_any_budget_with_a_large_one(
    expression: str,
) -> None:
    found = MessageFilter(expression)
    assert found.cost_ns(250_000) > 50 * CHEAP_NS
    assert found.cost_ns(250_000) <= UNBOUNDED


def test_the_cost_grows_with_the_payload() -> None:
    found = MessageFilter("payload.l.exists(x, x == payload.s)")
    costs = [found.cost_ns(size) for size in (1, 100, 10_000, 1_000_000)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


@pytest.mark.parametrize(
    "operator", [name for name in re.split(r"\s+", "+ - * / % == != < <= > >= && || in") if name]
)
def test_each_operator_has_a_cost(operator: str) -> None:
    assert MessageFilter(f"dyn(payload.a {operator} payload.b)").cost_ns(100) < CHEAP_NS


EVALUATED: dict[str, tuple[str, ...]] = {
    "_&&_": ("payload.s == payload.t && payload.n == 1",),
    "_||_": ("payload.s == payload.t || payload.n == 1",),
    "!_": ("!(payload.s == payload.t)",),
    "_-_": ("payload.n - 1 == 0",),
    "_*_": ("payload.n * 2 == 2",),
    "_/_": ("payload.n / 2 == 0",),
    "_%_": ("payload.n % 2 == 1",),
    "-_": ("-payload.n == -1",),
    "type": ("type(payload.s) == string",),
    "_==_": ("payload.s == payload.t", "payload.l == payload.l", "payload.m == payload.m"),
    "_!=_": ("payload.s != payload.t", "payload.l != payload.l", "payload.m != payload.m"),
    "_<_": ("payload.s < payload.t",),
    "_<=_": ("payload.s <= payload.t",),
    "_>_": ("payload.s > payload.t",),
    "_>=_": ("payload.s >= payload.t",),
    "startsWith": ("payload.s.startsWith(payload.t)",),
    "endsWith": ("payload.s.endsWith(payload.t)",),
    "int": ("int(payload.digits) == 1", "int(payload.s) == 1"),
    "uint": ("uint(payload.digits) == 1u", "uint(payload.s) == 1u"),
    "double": ("double(payload.digits) == 1.0", "double(payload.s) == 1.0"),
    "bool": ("bool(payload.yes)", "bool(payload.s)"),
    "timestamp": (
        "timestamp(payload.ts) > timestamp('2020-01-01T00:00:00Z')",
        "timestamp(payload.s) > timestamp('2020-01-01T00:00:00Z')",
    ),
    "duration": (
        "duration(payload.d) > duration('1s')",
        "duration(payload.s) > duration('1s')",
    ),
    "size": ("size(payload.s) == 1", "size(payload.m) == 1"),
    "string": ("string(payload.n) == payload.s", "string(payload.s) == payload.t"),
    "bytes": ("bytes(payload.s) == bytes(payload.t)",),
    "_?_:_": ("payload.n == 1 ? payload.s == payload.t : payload.yes == 'x'",),
    "dyn": ("dyn(payload.s) == dyn(payload.t)",),
    "_[_]": ("payload.l[8999] == 1", "payload.m['4999'] == 4999", "payload['s'] == 'a'"),
    "@in": ("payload.s in payload.k", "payload.s in payload.m", "payload.n in payload.l"),
    "_+_": ("payload.s + payload.t == payload.s", "payload.l + payload.l == payload.l"),
    "contains": ("payload.s.contains(payload.d)",),
    "matches": ("payload.s.matches('^a+$')", "payload.s.matches('[ab]*a[ab]{90}c')"),
    **{
        method: tuple(
            f"timestamp(payload.{field}).{method}({zone}) == 1"
            for field in ("ts", "s")
            for zone in ("", "'Europe/Vienna'", "'+01:00'")
        )
        for method in (
            "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear", "getFullYear", "getHours",
            "getMilliseconds", "getMinutes", "getMonth", "getSeconds",
        )
    },
}  # fmt: skip
"""Filters by the function of the library that they call, some of which fail."""
OF_LOOPS = {"@not_strictly_false", "__not_strictly_false__"}
"""The library's macros call them, and no expression can."""
LOOPS = {
    macro: f"payload.l.{macro}(x, x == 8999){' == []' if macro in {'filter', 'map'} else ''}"
    for macro in LIST_MACROS
}
DURATION_METHODS = ("getHours", "getMilliseconds", "getMinutes", "getSeconds")
LARGE = json.dumps(
    {
        "s": "a" * 60_000, "t": "a" * 59_999 + "b", "n": 1, "digits": "1", "yes": "true",
        "ts": "2026-01-01T00:00:00Z", "d": "1h", "l": list(range(9000)),
        "k": [f"x{number}" for number in range(5000)],
        "m": {str(number): number for number in range(5000)},
    }
).encode()  # fmt: skip


def test_each_function_with_a_rule_is_evaluated() -> None:
    assert set(EVALUATED) | OF_LOOPS == set(_RULES)


@pytest.fixture(scope="module")
def large() -> FilterInput:
    """Return a message that is decoded already."""
    found = FilterInput(
        payload=LARGE, headers={}, event_type="e", event_version=1, ordering_key=None, priority=4
    )
    found.activation()
    return found


@pytest.mark.parametrize(
    "expression",
    [
        *(expression for several in EVALUATED.values() for expression in several),
        *LOOPS.values(),
        *(f"duration(payload.d).{method}() == 1" for method in DURATION_METHODS),
    ],
)
def test_each_function_takes_no_longer_than_its_bound(expression: str, large: FilterInput) -> None:
    """Measure the thread's own time, so that other processes do not count."""
    found = MessageFilter(expression)
    bound_ns = found.cost_ns(len(LARGE))
    assert bound_ns < UNBOUNDED
    # The library prepares itself at the first one.
    result, taken_ns = found.evaluate(large), []
    for _ in range(3):
        begun_ns = time.thread_time_ns()
        found.evaluate(large)
        taken_ns.append(time.thread_time_ns() - begun_ns)
    assert min(taken_ns) <= bound_ns + CALL_NS
    assert "no such overload" not in (result.error or "")
    assert "found no matching" not in (result.error or "")


def test_a_long_expression_is_still_refused() -> None:
    with pytest.raises(InvalidError, match=str(MAX_EXPRESSION)):
        MessageFilter("true || " * 200 + "true")


def test_the_bounds_hold_for_the_largest_headers_of_a_signed_message() -> None:
    message = decode_message(
        json.dumps(
            {
                "event_type": "made",
                "version": 1,
                "id": "one",
                "payload": 1,
                "headers": {f"{number:0{MAX_NAME}}": "x" * MAX_VALUE for number in range(20)},
                "signature": "s" * MAX_SIGNATURE,
            }
        ).encode()
    )
    headers = message.delivered_headers
    assert headers is not None
    size = sum(len(name) + len(value) for name, value in headers.items())
    assert size + len(headers) * HEADER_OVERHEAD == MAX_DELIVERED_BYTES
    assert len(headers) == MAX_DELIVERED_HEADERS
    compared = MessageFilter("headers == {'a': headers['b']}").cost_ns(1)
    assert compared > MAX_DELIVERED_BYTES * 40
