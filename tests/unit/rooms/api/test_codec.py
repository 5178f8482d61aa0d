"""Test that a body is refused with all its wrong fields, of which msgspec names the first."""

from enum import StrEnum
from typing import Annotated, Any

import pytest
from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.api.codec import decode, decode_kept
from rooms.errors import InvalidError, MalformedError

TEXT = "must be text, not a whole number"
WHOLE = "must be a whole number, not text"


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Item(Struct, forbid_unknown_fields=True):
    count: int
    name: str = ""


class Order(Struct, forbid_unknown_fields=True):
    name: str
    count: Annotated[int, Meta(ge=1)]
    colour: Colour = Colour.RED
    items: list[Item] | None = None
    headers: dict[str, str] = {}
    note: str | UnsetType | None = UNSET
    raw: Any = None


def wrong(body: bytes, kind: Any = Order) -> dict[str, str]:
    with pytest.raises(InvalidError) as refused:
        decode(body, kind)
    fields = [problem.field for problem in refused.value.problems]
    assert len(set(fields)) == len(fields)
    return {problem.field: problem.message for problem in refused.value.problems}


def test_every_wrong_field_is_named_in_the_order_of_the_body() -> None:
    found = wrong(
        b'{"count": "x", "colour": "green", "note": 5, "cuont": 1, "headers": {"a": 1},'
        b' "items": [{"count": 1}, {"count": "y"}]}'
    )
    assert list(found.items()) == [
        ("count", WHOLE),
        ("colour", "must be one of blue, red"),
        ("note", TEXT),
        ("cuont", "there is no such field; is count meant?"),
        ("headers", TEXT),
        ("items[1].count", WHOLE),
        ("name", "is missing"),
    ]


def test_fields_of_a_field_are_named_with_it() -> None:
    assert wrong(b'{"name": 1, "count": 1, "items": [{"count": 1, "nmae": ""}]}') == {
        "name": TEXT,
        "items[0].nmae": "there is no such field",
    }
    assert wrong(b'{"name": 1, "count": 1, "items": [{"name": "x"}]}') == {
        "name": TEXT,
        "items[0].count": "is missing",
    }


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"5"])
def test_what_is_no_object_has_no_fields(body: bytes) -> None:
    assert list(wrong(body)) == ["body"]


def test_a_body_that_may_be_null_has_the_same_fields() -> None:
    body = b'{"name": 1, "count": "x"}'
    assert wrong(body, Order | None) == wrong(body) == {"name": TEXT, "count": WHOLE}
    assert decode(b"null", Order | None) is None


def test_a_whole_number_with_a_point_is_right() -> None:
    assert decode(b'{"name": "n", "count": 5.0}', Order).count == 5
    assert wrong(b'{"name": 1, "count": 5.0, "colour": "green"}').keys() == {"name", "colour"}
    with pytest.raises(InvalidError) as refused:
        decode_kept(b'{"name": 1, "count": 5.0}', Order)
    assert [problem.field for problem in refused.value.problems] == ["name", "count"]


def test_a_field_that_occurs_twice_is_named_though_the_last_is_right() -> None:
    assert wrong(b'{"name": 1, "name": "n", "count": "x"}') == {"name": TEXT, "count": WHOLE}


def test_what_follows_the_first_wrong_field_may_be_no_json() -> None:
    assert wrong(b'{"name": 1, "count": ') == {"name": TEXT}
    assert wrong(b'{"name": 1, "colour": "\xff", "count": "x"}') == {"name": TEXT, "count": WHOLE}
    with pytest.raises(MalformedError):
        decode(b'{"name": "n", "colour": "\xff"}', Order)


def test_only_so_much_is_named() -> None:
    many = b"".join(b'"x%d": 1, ' % number for number in range(1000))
    assert len(wrong(b"{" + many + b'"count": "x"}')) == 50
    long = b'"raw": "' + b"x" * 64 * 1024 + b'"'
    assert wrong(b'{"name": 1, "count": "x", ' + long + b"}") == {"name": TEXT}
    name = "n" * 2000
    (problem,) = wrong(f'{{"{name}": 1, "name": "n", "count": 1}}'.encode())
    assert len(problem) < 1000
