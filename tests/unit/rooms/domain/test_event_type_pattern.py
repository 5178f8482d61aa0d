"""Patterns of event types: what they match, and which of them covers which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.event_type_pattern import check_pattern, covers, matches, matches_any

_names = st.text(alphabet="ab.", min_size=1, max_size=6)
_patterns = st.one_of(st.just("*"), _names, _names.map(lambda name: f"{name}.*"))


@pytest.mark.parametrize(
    ("pattern", "event_type", "expected"),
    [
        ("order.paid", "order.paid", True),
        ("order.paid", "order.paid.late", False),
        ("order.*", "order.paid", True),
        ("order.*", "order.paid.late", True),
        ("order.*", "order", False),
        ("order.*", "orders.paid", False),
        ("*", "anything", True),
    ],
)
def test_pattern_matches(pattern: str, event_type: str, *, expected: bool) -> None:
    assert matches(pattern, event_type) is expected


@pytest.mark.parametrize(
    "text", ["", "*.paid", "order*", "or*er", "**", "order.*.x*", "a b", ".*", "a" * 127 + ".*"]
)
def test_invalid_patterns_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="all"):
        check_pattern(text)


@pytest.mark.parametrize("text", ["*", "order", "order.*", "a.b-c_d.*"])
def test_valid_patterns_are_returned(text: str) -> None:
    assert check_pattern(text) == text


def test_no_patterns_match_all_and_an_empty_list_none() -> None:
    assert matches_any(None, "a")
    assert not matches_any((), "a")


@given(st.lists(_patterns, max_size=3), _patterns, _names)
def test_a_covered_pattern_matches_nothing_more(
    granted: list[str], wanted: str, event_type: str
) -> None:
    if covers(granted, wanted) and matches(wanted, event_type):
        assert matches_any(granted, event_type)


@pytest.mark.parametrize(
    ("granted", "wanted", "expected"),
    [
        ("order.*", "order.paid", True),
        ("order.*", "order.paid.*", True),
        ("order.paid.*", "order.paid.late", True),
        ("order.paid.*", "order.*", False),
        ("order.*", "order", False),
        ("order", "order.paid", False),
        ("order.*", "orders.paid", False),
        ("order.*", "*", False),
        ("*", "order.*", True),
    ],
)
def test_what_a_pattern_covers(granted: str, wanted: str, *, expected: bool) -> None:
    assert covers([granted], wanted) is expected
