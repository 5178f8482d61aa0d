"""Test that payloads are decoded alike, whatever numbers they contain, and in bounded time."""

import time
from typing import Any

import msgspec
import pytest

from rooms.api.codec import decode
from rooms.errors import InvalidError
from rooms.publishing.cel_filter import FilterInput, MessageFilter
from rooms.publishing.json_schema import PayloadSchema
from rooms.publishing.number_bounds import NumberScan, decode_json

EXTREME = ["1e300", "1E308", "-1.7976931348623157e+308", "5e-324", "2.2250738585072014e-308"]


@pytest.mark.parametrize(
    "number", [*EXTREME, "1e23", "1e-23", "0.1", "1e9", "12", "9" * 50, "-0.0"]
)
def test_a_payload_has_the_same_value_with_either_decoder(number: str) -> None:
    text = f'{{"a": [{number}, "1e300", null]}}'.encode()
    assert decode_json(text) == msgspec.json.decode(text)
    assert decode_json(text, many=True) == msgspec.json.decode(text)


@pytest.mark.parametrize(
    "text", [b"1e400", b'{"a": [-1e999]}', b"[1e300, 1e3000]", b"[1e300,]", b"1e30x"]
)
def test_what_is_no_payload_is_refused_alike(text: bytes) -> None:
    with pytest.raises(ValueError) as expected:
        msgspec.json.decode(text)
    with pytest.raises(ValueError) as caught:
        decode_json(text, many=True)
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("number", EXTREME)
def test_a_large_payload_of_extreme_numbers_is_decoded_in_bounded_time(number: str) -> None:
    """Check schemas and filters with 20,000 numbers, for each of which msgspec takes 6 to 10 µs."""
    text = b"[" + b",".join([number.encode()] * 20_000) + b"]"
    subject = FilterInput(
        payload=text, headers={}, event_type="e", event_version=1, ordering_key=None, priority=4
    )
    begun_s = time.process_time()
    for _ in range(3):
        assert PayloadSchema({"type": "array"}).problems(text, "payload") == []
    assert time.process_time() - begun_s < 0.25
    begun_s = time.process_time()
    assert MessageFilter("payload.size() == 20000").evaluate(subject).error is None
    assert time.process_time() - begun_s < 0.1


@pytest.mark.parametrize(
    ("text", "extreme"),
    [
        (b"1e30", True),
        (b"-1E+30", True),
        (b"[1, 1.5e-20]", True),
        (b'{"a":' + b"1" * 24 + b"}", True),
        (b"[\n0." + b"0" * 30 + b"1]", True),
        (b"1e9", False),
        (b"-0.30000000000000004", False),
        (b'{"id": "3f2b4e55-9a7d-4e55"}', False),
        (b"[18446744073709551615]", False),
        (b'{"amount":1e-05}', False),
        (b"[1e16, 1.5E+20, 2.5e-15, 0e99]", False),
        (b'{"id":"1234:  12e10", "amount":1}', False),
        (b'["a\\\\", "b\\"", ": 1e300"]', False),
        (b'["a\\"", 1e300]', True),
        (b"[" + b"1e-05," * 9000 + b"1]", False),
    ],
)
def test_extreme_numbers_are_found(text: bytes, extreme: bool) -> None:  # noqa: FBT001 - a column
    assert NumberScan(text).find_extreme() is extreme


def an_array(number: str, count: int, *others: str) -> bytes:
    return f"[{','.join([number] * count + list(others))}]".encode()


@pytest.mark.parametrize("schema", [{"type": "array"}, {"items": {"minimum": 0}}])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        an_array("1e23", 9_000),
        an_array("1e308", 9_000),
        # One number makes Python decode all of them.
        an_array("0.5", 9_000, "1e300"),
        an_array("1e5", 9_000, "1e300"),
    ],
)
def test_numbers_that_take_long_are_charged_before_they_are_decoded(
    schema: Any,
    text: bytes,
    many: bool,  # noqa: FBT001 - a column
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun_s = time.process_time()
    NumberScan(text).decode()
    taken_ns = (time.process_time() - begun_s) * 1e9
    spent: list[float] = []

    def spend(cost_ns: float) -> bool:
        spent.append(cost_ns)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(NumberScan, "decode", None)
        assert PayloadSchema(schema).problems(text, "payload", spend, many=many) is None
    assert spent[0] >= 9_000 * 400
    assert taken_ns < 3 * spent[0]


def test_too_many_exponents_are_not_decoded_to_compare_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NumberScan, "decode", None)
    text = an_array("1e23", 10_001)
    assert PayloadSchema({"items": {"minimum": 0}}).problems(text, "payload") is None


def test_ordinary_numbers_are_decoded_without_a_further_charge() -> None:
    text = an_array("19.99", 1_000, '"3f2b4e55-9a7d-4e55"', '"1e300"')
    assert PayloadSchema({"type": "array"}).problems(text, "payload", lambda _: False) == []


@pytest.mark.parametrize(
    ("text", "numbers"),
    [(b"1", 1), (b"[]", 0), (b"[1, [ -2,{}]]", 2), (b'{"a" :\n{"b":[1,2e-05, "3f2b4e55"]}}', 2)],
)
def test_the_numbers_of_a_text_are_bounded(text: bytes, numbers: int) -> None:
    assert numbers <= NumberScan(text).count() <= numbers + 1


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Have a field of any value, as bodies of the API have."""

    ratio: float
    payload: Any


def test_bodies_of_the_api_are_decoded_alike_and_in_bounded_time() -> None:
    begun_s = time.process_time()
    numbers = ",".join(["1e308"] * 60_000)
    found = decode(f'{{"ratio": 1e300, "payload": [{numbers}]}}'.encode(), Body)
    assert time.process_time() - begun_s < 0.3
    assert found == Body(ratio=1e300, payload=[1e308] * 60_000)
    with pytest.raises(InvalidError) as caught:
        decode(b'{"ratio": 1e300, "payload": {"a": 1e999}}', Body)
    assert "out of range" in caught.value.problems[0].message
    with pytest.raises(InvalidError) as caught:
        decode(b'{"ratio": "1e300", "payload": 1e300}', Body)
    assert caught.value.problems[0].field == "ratio"
