"""Test that a batch is counted before its messages become objects, and is otherwise as it was."""

import tracemalloc

import pytest

from rooms.errors import InvalidError, MalformedError
from rooms.publishing import batch_bounds
from rooms.publishing.batch_bounds import MOST_COMMAS, bound_batch
from rooms.publishing.request import decode_batch

ITEMS = MOST_COMMAS * 8
OBJECTS = ITEMS * 64
"""Bytes of the objects of so many items. Other threads of the run allocate some megabytes, too."""
ONE = b'{"event_type":"made","payload":{"a":[1, 2]},"id":"%d"}'


def batch(*messages: bytes) -> bytes:
    return b'{"messages": [%b]}' % b" , ".join(messages)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_bounds, "MOST_COMMAS", 0)


@pytest.mark.parametrize("item", [b"1", b"{}", b"[]", ONE % 1])
def test_many_items_are_refused_without_objects(item: bytes) -> None:
    body = batch(*[item] * ITEMS)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidError) as refused:
            decode_batch(body, 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (problem,) = refused.value.problems
    assert problem.field == "messages"
    assert "1 to 1000 messages; this one has more" in problem.message
    assert peak < 2 * len(body) + OBJECTS / 2, "copies of the body, and nothing for each item"


def test_what_is_sent_twice_makes_no_objects_either() -> None:
    first = b",".join([b"1"] * ITEMS)
    body = b'{"messages":[%b],"messages":[%b]}' % (first, ONE % 1)
    tracemalloc.start()
    try:
        (message,) = decode_batch(body, 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (message.id, peak < OBJECTS / 2) == ("1", True)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_batch_within_its_bound_is_decoded_as_it_was(count: int) -> None:
    messages = decode_batch(batch(*[ONE % n for n in range(count)]), 3)
    assert [message.id for message in messages] == [str(n) for n in range(count)]
    assert {bytes(message.payload) for message in messages} == {b'{"a":[1, 2]}'}


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b"[1,2]", "body"),
        (b'{"other":1,"and":2}', "other"),
        (b'{"messages":{"a":1,"b":2}}', "messages"),
        (b'{"messages":"a,b"}', "messages"),
        (b'{"messages":null,"messages":5}', "messages"),
        (b'{"messages":[5,5]}', "messages[0]"),
        (batch(ONE % 1, b'{"event_type":"x","payload":1,"zork":2}'), "messages[1].zork"),
        (batch(*[ONE % 1] * 4), "messages"),
    ],
)
def test_a_wrong_batch_names_what_is_wrong(body: bytes, wrong: str) -> None:
    with pytest.raises(InvalidError) as refused:
        decode_batch(body, 3)
    assert refused.value.problems[0].field == wrong


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    "body", [b'{"messages":[1,2', b'{"messages":[1,,2]}', b",", b'{"m\xff":1,}']
)
def test_what_is_no_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_batch(body, 3)


def test_a_body_of_few_items_is_not_looked_through() -> None:
    body = batch(ONE % 1, ONE % 2)
    assert bound_batch(body, 1) is body
