"""Names that people choose, and the names of destinations."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.ids import MAX_ROOM, IdGenerator, RoomId, SubscriptionId
from rooms.domain.names import MAX_NAME, check_name
from rooms.domain.room import destination_name

IDS = IdGenerator(random.Random(1).getrandbits)


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
