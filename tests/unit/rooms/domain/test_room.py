"""Test names that people choose, names of destinations, and headers of subscriptions."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.ids import MAX_ROOM, IdGenerator, RoomId, SubscriptionId
from rooms.domain.names import MAX_NAME, check_name
from rooms.domain.room import MAX_HEADER_BYTES, MAX_HEADERS, destination_name, header_problems

IDS = IdGenerator(random.Random(1).getrandbits)
TOKEN = st.text("!#$%&'*+-.^_`|~0123456789abcXYZ", min_size=1, max_size=20).map(
    lambda name: "x" + name
)
VALUE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)


@given(st.from_regex(r"[a-zA-Z0-9_.\-]{1,128}", fullmatch=True))
def test_names_of_the_charset_are_taken(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a\n", "ä", "a/b", "a:b", "a,b", "x" * (MAX_NAME + 1), "\u0661"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="characters"):
        check_name(name)


@given(room=st.integers(0, MAX_ROOM).map(RoomId), at_ms=st.integers(0, (1 << 48) - 1))
def test_a_destination_reads_back(room: RoomId, at_ms: int) -> None:
    subscription = SubscriptionId(IDS.generate(room, at_ms))
    text = destination_name(room, subscription)
    assert text == f"room-{room}::subscription-{subscription}"


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
