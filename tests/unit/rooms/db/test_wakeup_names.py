"""Test which names a wake-up carries, and in how many payloads."""

import random
from collections.abc import Sequence

import pytest

from rooms.db.wakeup_names import MAX_NAMES, MAX_OF_PAYLOAD, MAX_OF_ROOM, WakeupNames
from rooms.domain.ids import IdGenerator, RoomId

IDS = IdGenerator(random.Random(7).getrandbits)
PAYLOAD_BYTES = 8000


def of_room(room: int, count: int) -> list[str]:
    return [str(IDS.generate(RoomId(room), 0)) for _ in range(count)]


def pulls(*names: str) -> WakeupNames:
    pending = WakeupNames(by_room=True)
    for name in names:
        pending.add(name)
    return pending


def sent(payloads: Sequence[str]) -> set[str]:
    return {name for payload in payloads for name in payload.split(",")}


def test_names_are_sent_in_payloads_that_fit() -> None:
    names = of_room(1, MAX_OF_ROOM)
    payloads = pulls(*names, *names).payloads()
    assert len(payloads) == MAX_OF_ROOM // MAX_OF_PAYLOAD
    assert max(map(len, payloads)) < PAYLOAD_BYTES
    assert sent(payloads) == set(names)


def test_the_longest_names_fit() -> None:
    pending = WakeupNames(by_room=False)
    for number in range(MAX_OF_PAYLOAD):
        pending.add(f"{number:050}")
    (payload,) = pending.payloads()
    assert len(payload) < PAYLOAD_BYTES


def test_a_room_with_too_many_names_is_named_itself() -> None:
    few = of_room(2, 3)
    assert sent(pulls(*of_room(1, MAX_OF_ROOM + 2), *few).payloads()) == {"1", *few}


def test_with_too_many_names_in_all_each_room_is_named_itself() -> None:
    rooms = range(1, MAX_NAMES // 100 + 2)
    names = [name for room in rooms for name in of_room(room, 100)]
    payloads = pulls(*names).payloads()
    assert sent(payloads) >= {str(room) for room in rooms[:-1]}
    assert len(payloads) == 1 + 99 // MAX_OF_PAYLOAD


def test_with_too_many_rooms_anything_may_have_changed() -> None:
    assert pulls(*(of_room(room, 1)[0] for room in range(1, MAX_NAMES + 2))).payloads() == [""]


@pytest.mark.parametrize("name", ["", "x" * 51, "é" * 26])
def test_a_name_that_cannot_be_sent_stands_for_any(name: str) -> None:
    assert pulls("a", name, "b").payloads() == [""]


def test_other_names_are_no_subscriptions() -> None:
    pending = WakeupNames(by_room=False)
    names = of_room(1, MAX_OF_ROOM + 1)
    for name in names:
        pending.add(name)
    assert sent(pending.payloads()) == set(names)
    for number in range(MAX_NAMES):
        pending.add(str(number))
    assert pending.payloads() == [""]


def test_merged_names_keep_what_each_stands_for() -> None:
    few, late = of_room(2, 3), of_room(1, 2)
    whole = pulls(*of_room(1, MAX_OF_ROOM + 1))
    whole.merge(pulls(*few, *late))
    assert sent(whole.payloads()) == {"1", *few}
    of_few = pulls(*late)
    of_few.merge(whole)
    assert sent(of_few.payloads()) == {"1", *few}
    of_few.merge(pulls(""))
    assert of_few.payloads() == [""]
