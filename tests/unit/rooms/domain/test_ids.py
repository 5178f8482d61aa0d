"""Ids: UUIDv7 text that says by itself when and in which room it was made."""

import random
import uuid
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.ids import (
    MAX_ROOM,
    IdGenerator,
    JobId,
    MessageId,
    RoomId,
    created_ms,
    first_id,
    id_text,
    is_replayed,
    replayed_id,
    room_of,
)

rooms = st.integers(0, MAX_ROOM).map(RoomId)
times = st.integers(0, (1 << 48) - 1)


def maker(start: int = 0) -> IdGenerator:
    return IdGenerator(lambda _bits: start)


@given(room=rooms, at_ms=times, start=st.integers(0, (1 << 42) - 1))
def test_an_id_is_a_uuid_of_version_7_that_contains_its_room_and_birth(
    room: RoomId, at_ms: int, start: int
) -> None:
    identity = maker(start).generate(room, at_ms)
    parsed = uuid.UUID(identity)
    assert str(parsed) == identity
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert room_of(identity) == room
    assert created_ms(identity) == at_ms


@given(
    room=rooms,
    at_ms=times,
    start=st.integers(0, (1 << 42) - 1)
    | st.integers(-20, 20).map(lambda off: (1 << 30) * 7 + off)
    | st.just((1 << 42) - 3),
    counts=st.lists(st.integers(0, 20), max_size=4),
)
def test_octets_are_the_same_ids(room: RoomId, at_ms: int, start: int, counts: list[int]) -> None:
    """Also if the counter wraps meanwhile; later ids continue from there."""
    several, single = maker(start), maker(start)
    for count in counts:
        made = [
            id_text(int.from_bytes(octets, "big"))
            for octets in several.generate_octets(room, at_ms, count)
        ]
        assert made == [single.generate(room, at_ms) for _ in range(count)]


@given(
    room=rooms,
    at_ms=times,
    start=st.integers(0, (1 << 42) - 1)
    | st.integers(-9, 9).map(lambda off: (1 << 16) * 7 + off)
    | st.integers(-9, 9).map(lambda off: (1 << 30) * 7 + off)
    | st.just((1 << 42) - 3),
    fanout=st.integers(1, 20),
    jobs=st.lists(st.uuids().map(str), max_size=5),
)
def test_an_id_says_whether_a_replay_made_it(
    room: RoomId, at_ms: int, start: int, fanout: int, jobs: list[str]
) -> None:
    message, *published = [
        id_text(int.from_bytes(octets, "big"))
        for octets in maker(start).generate_octets(room, at_ms, 1 + fanout)
    ]
    assert not any(is_replayed(delivery, message) for delivery in published)
    for job in jobs:
        replayed = replayed_id(MessageId(message), JobId(job), 0)
        assert is_replayed(replayed, message)
        assert (room_of(replayed), created_ms(replayed)) == (room, at_ms)


@pytest.mark.parametrize("ahead", [0, 1, 1000, 65_535, (1 << 24) - 1])
def test_a_replay_avoids_the_ids_that_a_publish_could_have_drawn(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The id comes from a hash, which may be any number."""
    start = (1 << 42) - 10
    message = maker(start - 1).generate(RoomId(1), 5)
    drawn = ((start + ahead) % (1 << 42)).to_bytes(8, "big")
    hashes = SimpleNamespace(sha256=lambda _: SimpleNamespace(digest=lambda: drawn))
    monkeypatch.setattr("rooms.domain.ids.hashlib", hashes)
    assert is_replayed(replayed_id(MessageId(message), JobId("job"), 0), message)
    published = maker((start + ahead - 1) % (1 << 42)).generate(RoomId(1), 5)
    assert not is_replayed(published, message)


@given(room=rooms, at_ms=st.integers(0, (1 << 48) - 2), start=st.integers(0, (1 << 42) - 1))
def test_every_id_of_a_millisecond_lies_between_its_bounds(
    room: RoomId, at_ms: int, start: int
) -> None:
    identity = maker(start).generate(room, at_ms)
    assert first_id(at_ms) < identity < first_id(at_ms + 1)


def test_ids_of_one_millisecond_are_all_different_and_in_order() -> None:
    ids = IdGenerator(random.Random(1).getrandbits)
    made = [ids.generate(RoomId(1), 1_700_000_000_000) for _ in range(20_000)]
    assert sorted(set(made)) == made


def test_the_counter_starts_over_without_touching_what_surrounds_it() -> None:
    ids = maker((1 << 42) - 2)
    last, first = ids.generate(RoomId(MAX_ROOM), 99), ids.generate(RoomId(MAX_ROOM), 99)
    assert uuid.UUID(last).version == uuid.UUID(first).version == 7
    assert {room_of(last), room_of(first)} == {MAX_ROOM}
    assert created_ms(last) == created_ms(first) == 99
    assert last != first


def test_what_belongs_to_no_room_says_room_0() -> None:
    assert room_of(maker().generate_global(1)) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "01900000-0000-7000-8000-00000000000",
        "01900000-0000-7000-8000-0000000000001",
        "01900000000070008000000000000001",
        "01900000-0000-7000-8000_000000000001",
        "0190000g-0000-7000-8000-000000000001",
        "0x900000-0000-7000-8000-000000000001",
        "+1900000-0000-7000-8000-000000000001",
        "01900000-0000-7000-8000-0000000_0001",
        " 1900000-0000-7000-8000-000000000001",
        "01900000-0000-7000-8000-000000000001\n",
        "\u06601900000-0000-7000-8000-000000000001",
    ],
)
def test_what_is_no_id_has_no_room(text: str) -> None:
    with pytest.raises(ValueError, match="not an id"):
        room_of(text)


@given(st.text(max_size=40))
def test_any_text_is_an_id_for_postgresql_too_or_refused(text: str) -> None:
    try:
        room_of(text)
    except ValueError:
        return
    assert str(uuid.UUID(text)) == text.lower()
