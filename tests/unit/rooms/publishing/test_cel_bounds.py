"""Bounds of filters: what is refused, and that the cost of every function of the library is known."""

import json
import re

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
from rooms.publishing.cel_bounds import UNBOUNDED
from rooms.publishing.cel_filter import MAX_EXPRESSION, FilterInput, MessageFilter, load_filter
from rooms.publishing.request import decode_message

CHEAP_NS = 10_000_000


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
