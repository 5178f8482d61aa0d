"""Test that requests are counted before they become objects, and are otherwise as they were."""

import json
import tracemalloc

import pytest

from rooms.domain.message_headers import MAX_HEADERS, MAX_VALUE
from rooms.errors import FieldProblem, InvalidError, MalformedError, TooLargeError
from rooms.publishing import batch_bounds, request
from rooms.publishing.batch_bounds import (
    MAX_DESTINATIONS,
    MAX_OTHER_COMMAS,
    MOST_COMMAS,
    UNCOUNTED_BYTES,
    BatchTooCostlyError,
    bound_batch,
)
from rooms.publishing.request import (
    MAX_PROBLEMS,
    MAX_TEXT,
    decode_batch,
    decode_message,
)

ITEMS = MOST_COMMAS * 8
OBJECTS = ITEMS * 64
"""Bytes of the objects of so many items. Other threads of the run allocate some megabytes, too."""
ONE = b'{"event_type":"made","payload":{"a":[1, 2]},"id":"%d"}'


def batch(*messages: bytes) -> bytes:
    return b'{"messages": [%b]}' % b" , ".join(messages)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch_bounds, request):
        monkeypatch.setattr(module, "MOST_COMMAS", 0)


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
        (b'{"messages":[5,5],"messages":[]}', "messages"),
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


# Lists in a message

NAMED, OTHERS = 100, 10
"""So many destinations may be named in these tests, and commas be outside of them and payloads."""
LONG = b",".join([b'"a"'] * (NAMED + 1))
FIELDS = b",".join(b'"x%d":""' % number for number in range(OTHERS + 2))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_bounds, "MAX_OTHER_COMMAS", OTHERS)
    monkeypatch.setattr(batch_bounds, "MAX_DESTINATIONS", NAMED)
    monkeypatch.setattr(batch_bounds, "MAX_BATCH_DELIVERIES", NAMED)
    for module in (batch_bounds, request):
        monkeypatch.setattr(module, "MOST_COMMAS", 0)
        monkeypatch.setattr(module, "UNCOUNTED_BYTES", 0)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "message",
    [
        b'{"event_type":"made","payload":1,"destinations":[%b]}' % LONG,
        b' {"event_type":"made","payload":1,"destinations":[%b],"destinations":["a"]}' % LONG,
        b'{"event_type":"made","payload":[%b],"payload":1}' % LONG,
        b'{"event_type":"made","payload":1,"headers":{%b}}' % FIELDS,
        b'{"event_type":"made","payload":1,%b}' % FIELDS,
        b'{"event_type":"made","destinations":["a"],%b}' % FIELDS,
    ],
)
def test_a_message_that_lists_too_much_is_refused_before_it_is_decoded(message: bytes) -> None:
    with pytest.raises(TooLargeError, match=r"more than 10 commas|at most 100$"):
        decode_message(message)
    with pytest.raises(TooLargeError, match=r"more than 10 commas|at most 100$"):
        decode_batch(batch(ONE % 1, message), 10)


@pytest.mark.usefixtures("few")
def test_the_destinations_of_all_messages_of_a_batch_count_together() -> None:
    message = b'{"event_type":"made","payload":[1,2],"destinations":["a","b","c","d"]}'
    assert len(decode_batch(batch(*[message] * 25), 50)) == 25
    with pytest.raises(BatchTooCostlyError, match="publish fewer messages at a time"):
        decode_batch(batch(*[message] * 26), 50)


@pytest.mark.usefixtures("few")
def test_the_commas_of_payloads_do_not_count() -> None:
    message = b'{"event_type":"made","payload":[%b],"id":"1","destinations":["a"]}' % LONG
    assert decode_message(message).id == "1"
    (found,) = decode_batch(batch(message), 10)
    assert bytes(found.payload) == b"[%b]" % LONG


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("body", [b'{"payload":[%b' % LONG, b'{"a\xff":[%b]}' % LONG])
def test_a_long_body_that_is_no_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_message(body)


def test_a_body_that_is_not_counted_has_few_fields() -> None:
    assert len(b'"a":1,') * MAX_OTHER_COMMAS < UNCOUNTED_BYTES


def test_a_message_whose_headers_are_full_of_commas_is_within_the_bound() -> None:
    headers = {f"x-{number}": "," * (MAX_VALUE - 2) for number in range(MAX_HEADERS)}
    texts = dict.fromkeys(("ordering_key", "business_key", "correlation_id", "id"), "," * MAX_TEXT)
    message = {"event_type": "made", "payload": 1, "headers": headers, **texts}
    body = json.dumps(message).encode()
    assert body.count(b",") < MAX_OTHER_COMMAS / 2


def test_a_message_names_so_many_destinations_at_most() -> None:
    def named(count: int) -> bytes:
        names = b",".join([b'"a"'] * count)
        return b'{"event_type":"made","payload":1,"destinations":[%b]}' % names

    assert len(decode_message(named(MAX_DESTINATIONS)).destinations or ()) == MAX_DESTINATIONS
    too_many = named(MAX_DESTINATIONS + 1)
    for refuse in (decode_message, lambda body: decode_batch(batch(body), 10)):
        with pytest.raises(InvalidError) as refused:
            refuse(too_many)
        (problem,) = refused.value.problems
        assert problem.field.endswith("destinations")
        assert "40000" in problem.message


def test_a_batch_makes_no_more_problems_than_an_answer_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def make_problem(field: str, message: str) -> FieldProblem:
        made.append(field)
        return FieldProblem(field, message)

    monkeypatch.setattr(request, "FieldProblem", make_problem)
    wrong = b'{"event_type":"made","payload":1,"id":"a b","correlation_id":"a b"}'
    with pytest.raises(InvalidError) as refused:
        decode_batch(batch(*[wrong] * 1000), 1000)
    assert len(made) == len(refused.value.problems) == MAX_PROBLEMS
