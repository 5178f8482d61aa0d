"""Filters: what they see, what they cannot say, and that no message is lost for their sake."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.errors import InvalidError
from rooms.publishing import cel_filter
from rooms.publishing.cel_filter import (
    MAX_EXPRESSION,
    FilterInput,
    MessageFilter,
    load_filter,
    with_time_limit,
)
from rooms.publishing.number_bounds import NumberScan

PAID = {
    "order": {"total": 120.5, "country": "AT"},
    "tags": ["new", "gift"],
    "count": 3,
    "none": None,
    "items": [{"sku": "A", "n": 1}, {"sku": "B", "n": 2}, {"sku": "C", "n": 3}],
}


def a_subject(
    payload: object = PAID, headers: Mapping[str, str] | None = None, *, raw: bytes | None = None
) -> FilterInput:
    return FilterInput(
        payload=json.dumps(payload).encode() if raw is None else raw,
        headers=headers or {},
        event_type="order.paid",
        event_version=2,
        ordering_key=None,
        priority=4,
    )


LARGE = a_subject({"a": list(range(9000)), "b": list(range(100_000))})


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        ("payload.order.total > 100", True),
        ("payload.order.total > 100.0 && payload.order.country in ['AT', 'DE']", True),
        ("payload.order.country == 'DE'", False),
        ("'gift' in payload.tags && payload.tags[0] == 'new'", True),
        ("has(payload.order.coupon) && payload.order.coupon == 'X'", False),
        ("payload.none == null", True),
        (
            "event_type.startsWith('order.') && event_version >= 2 && priority == 4 && ordering_key == ''",
            True,
        ),
        ("headers['x-tenant'] == 'acme'", True),
        ("'X-Tenant' in headers", False),
        ("payload.order.country.matches('^[A-Z]{2}$')", True),
        ("size(payload.tags) == payload.count - 1", True),
        ("payload.items.exists(item, item.sku == 'B' && item.n > 1)", True),
        ("payload.items.all(item, item.n > 1)", False),
        ("payload.items.exists_one(item, item.n == 1)", True),
        ("payload.items.filter(item, item.n > 1).size() == 2", True),
        ("payload.items.map(item, item.sku) == ['A', 'B', 'C']", True),
        ("payload.items.map(item, item.n > 1, item.sku) == ['B', 'C']", True),
        (
            "payload.items.exists(a, payload.items.filter(b, b.n > a.n).all(c, c.sku == 'C') && a.n == 2)",
            True,
        ),
        (
            "payload.items . exists ( item , item.sku in ['A)', 'x,y', \"B\"] // a comment )\n)",
            True,
        ),
        ("payload.items.exists(item, item.sku.matches(r'^[\\\\B)]$'))", True),
        ("headers.exists(name, name.startsWith('x-'))", True),
    ],
)
def test_what_a_filter_says(expression: str, matches: bool) -> None:  # noqa: FBT001 - a column of a table
    judgement = MessageFilter(expression).evaluate(a_subject(headers={"X-Tenant": "acme"}))
    assert (judgement.matches, judgement.error) == (matches, None)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("payload.a >", "line 1, column 12: Syntax error"),
        (
            "payload.a == 1 &&\n  unknown == 2",
            "line 2, column 3: undeclared reference to 'unknown'",
        ),
        ("1 + 1", "it returns INT"),
        ("payload.tags.exists(t, t == 'x' || u)", "line 1, column 36: undeclared reference to 'u'"),
        ("payload.tags.exists(t)", "undeclared reference to 't'"),
        ("_tick()", "undeclared reference"),
        ("(" * 200 + "true" + ")" * 200, "recursion"),
        ("true || " * 200 + "true", f"at most {MAX_EXPRESSION} characters"),
        ("payload.a == '\x00'", "U+0000"),
        ("", "line 1, column 1: Syntax error"),
    ],
)
def test_an_invalid_filter_is_reported_with_its_position(expression: str, expected: str) -> None:
    with pytest.raises(InvalidError) as caught:
        MessageFilter(expression)
    (problem,) = caught.value.problems
    assert problem.field == "filter"
    assert expected in problem.message


@pytest.mark.parametrize(
    ("expression", "subject", "expected"),
    [
        ("payload.missing == 1", a_subject(), "missing"),
        ("payload.order", a_subject(), "neither true nor false"),
        (
            "payload.count == 'x' || payload.order.total.startsWith('1')",
            a_subject(),
            "No matching overloads",
        ),
        ("payload.big == 1", a_subject({"big": 2**70}), "out of range"),
        ("payload.text == 'a'", a_subject({"text": "a\x00b"}), "U+0000"),
        ("payload.text == 'a'", a_subject(raw=b'{"text": "\\ud800"}'), ""),
        ("payload == 1", a_subject(raw=b"[" * 5000 + b"]" * 5000), "depth"),
        ("payload.tags[7] == 'x'", a_subject(), "index"),
    ],
)
def test_a_filter_that_cannot_say_lets_the_message_pass_and_logs_why(
    expression: str, subject: FilterInput, expected: str
) -> None:
    judgement = MessageFilter(expression).evaluate(subject)
    assert judgement.matches
    assert judgement.error is not None
    assert expected in judgement.error


@pytest.mark.parametrize("slashes", range(1, 9))
def test_only_an_escaped_nul_is_one(slashes: int) -> None:
    """Pairs of backslashes in JSON are backslashes of the text, as in a path of Windows."""
    raw = b'{"region": "us", "path": "C:' + b"\\" * slashes + b'u0000abc"}'
    result = MessageFilter("payload.region == 'eu'").evaluate(a_subject(raw=raw))
    contains_nul = "\x00" in json.loads(raw)["path"]
    assert result.matches is contains_nul
    assert (result.error is not None) is contains_nul


def test_many_backslashes_are_searched_in_one_pass() -> None:
    """A quadratic search of these would take minutes."""
    raw = b'{"region": "us", "path": "' + b"\\" * 400_000 + b'u0000"}'
    assert MessageFilter("payload.region == 'eu'").evaluate(a_subject(raw=raw)).error is None


@pytest.mark.parametrize(
    "loop",
    [
        "payload.a.exists(i, {slow} && i == -1)",
        "payload.a.all(i, payload.a.all(j, {slow}))",
        "payload.a.map(i, {slow}).size() == 1",
        "payload.a.map(i, {slow}, i).size() == 1",
        "payload.a.filter(i, {slow}).size() == 1",
        "payload.a.exists_one(i, {slow})",
        "payload.a.exists(i, i == -1 || payload.a.map(j, payload.b).map(k, k == payload.b) == [])",
    ],
)
def test_a_loop_that_would_take_for_ever_ends_in_time(loop: str) -> None:
    """Each round of it compares 100,000 numbers, some milliseconds: but for the bound it would take minutes."""
    judgement = MessageFilter(loop.format(slow="payload.b == payload.b")).evaluate(LARGE)
    assert judgement.matches
    # In nested ones the library's own bound, of rounds, may be met while the rest of them is passed over.
    assert any(
        expected in (judgement.error or "")
        for expected in ("its loops take longer than 50 ms", "Iteration budget")
    )


def test_a_loop_of_too_many_rounds_ends_too() -> None:
    judgement = MessageFilter("payload.b.all(i, i >= 0)").evaluate(LARGE)
    assert judgement.matches
    assert any(
        expected in (judgement.error or "")
        for expected in ("its loops take longer than 50 ms", "Iteration budget")
    )


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("a.b == 'x.all(y, z)'", None),
        ('a.exists(x, x.s == ")")', 'a.exists(x, T ? (x.s == ")"\n) : false)'),
        ("a.map(x, x)", "a.map(x, T, x)"),
        ("a.map(x, [x, 1].all(y, f(y, 2)))", "a.map(x, T, [x, 1].all(y, T ? (f(y, 2)\n) : false))"),
        ("a.map(x, p, {1: x})", "a.map(x, T ? (p\n) : false, {1: x})"),
        (
            "a.filter(x, r'\\').all(y, y)",
            "a.filter(x, T ? (r'\\'\n) : false).all(y, T ? (y\n) : false)",
        ),
        ("all(x, y) && a.all", None),
        (
            "a.exists(x, x == '''it's )''' /* no */)",
            "a.exists(x, T ? (x == '''it's )''' /* no */\n) : false)",
        ),
    ],
)
def test_each_round_of_a_loop_is_asked_and_nothing_else(expression: str, found: str | None) -> None:
    assert with_time_limit(expression, "T") == (found or expression)


def test_a_kept_expression_that_no_longer_compiles_lets_everything_pass() -> None:
    judgement = load_filter("no longer an expression").evaluate(a_subject())
    assert judgement.matches
    assert "line 1, column" in (judgement.error or "")


@given(st.text(max_size=60))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        found = MessageFilter(text)
    except InvalidError:
        return
    assert found.evaluate(a_subject()).matches in {True, False}


def test_a_large_payload_is_looked_at_once_for_all_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters that cost too much inline do not decode it, and each asks what that would cost."""
    scanned = []

    def scan(text: bytes) -> NumberScan:
        scanned.append(len(text))
        return NumberScan(text)

    monkeypatch.setattr(cel_filter, "NumberScan", scan)
    subject = a_subject([1.5] * 10_000)
    estimates = {subject.decode_ns() for _ in range(3)}
    assert len(estimates) == len(scanned) == 1
    subject.activation()
    assert subject.decode_ns() == 0
