"""The headers that a subscription may add."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.room import MAX_HEADER_BYTES, MAX_HEADERS, header_problems

TOKEN = st.text("!#$%&'*+-.^_`|~0123456789abcXYZ", min_size=1, max_size=20).map(
    lambda name: "x" + name
)
VALUE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)


@given(st.dictionaries(TOKEN, VALUE, max_size=10))
def test_tokens_and_visible_ascii_are_right(headers: dict[str, str]) -> None:
    distinct = {name.lower(): value for name, value in headers.items()}
    assert list(header_problems(distinct)) == []


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=5))
def test_what_passes_can_end_no_line(headers: dict[str, str]) -> None:
    if not list(header_problems(headers)):
        for name, value in headers.items():
            line = f"{name}: {value}".encode("latin-1")
            assert name.strip() == name != ""
            assert not any((byte < 0x20 and byte != 0x09) or byte > 0x7E for byte in line)


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "Content-Length",
        "content-anything",
        "Connection",
        "Transfer-Encoding",
        "TE",
        "Webhook-Signature",
        "ROOMS-Delivery-Attempt",
        "ce-id",
        "User-Agent",
        "Expect",
        "Proxy-Authorization",
        "Upgrade",
        "Date",
    ],
)
def test_reserved_names_are_refused_in_any_case(name: str) -> None:
    for spelt in (name, name.lower(), name.upper()):
        assert [problem[0] for problem in header_problems({spelt: "x"})] == [spelt]


def test_authorization_is_the_subscribers_to_set() -> None:
    assert list(header_problems({"Authorization": "Bearer x", "X-Api-Key": "y"})) == []


def test_number_and_size_are_bounded() -> None:
    assert list(header_problems({f"x{number}": "" for number in range(MAX_HEADERS)})) == []
    assert [
        problem[0]
        for problem in header_problems({f"x{number}": "" for number in range(MAX_HEADERS + 1)})
    ] == [""]
    assert [problem[0] for problem in header_problems({"x": "a" * MAX_HEADER_BYTES})] == [""]
