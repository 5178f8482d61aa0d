"""Test the messages for invalid values, from errors that msgspec itself raises."""

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta, Struct

from rooms.domain.names import NAME_PATTERN, NAME_RULE
from rooms.validation_messages import (
    invalid_json_message,
    unknown_field_message,
    validation_message,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(Struct):
    colour: Colour


class Thing(Struct):
    whole: Annotated[int, Meta(ge=1, le=5)] | None = None
    number: Annotated[float, Meta(gt=1)] = 2.0
    text: Annotated[str, Meta(min_length=1, max_length=3)] = "x"
    name: Annotated[str, Meta(pattern=NAME_PATTERN)] = "x"
    colours: Annotated[list[Colour], Meta(min_length=1)] = []
    inner: list[Inner] = []
    colour: Colour | None = None
    at: Annotated[datetime, Meta(tz=True)] | None = None
    either: bool | dict[str, int] | None = None


TIME = "must be a time with its offset, like 2026-01-31T12:00:00Z"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"whole": 0}', "must be a whole number, at least 1"),
        ('{"whole": 6}', "must be a whole number, at most 5"),
        ('{"whole": "x"}', "must be a whole number, not text"),
        ('{"whole": 1.5}', "must be a whole number, not a fraction"),
        ('{"number": 1}', "must be a number, more than 1.0"),
        ('{"text": ""}', "must have at least 1 character(s)"),
        ('{"text": "long"}', "must have at most 3 character(s)"),
        ('{"text": null}', "must be text, not null"),
        ('{"name": "a b"}', NAME_RULE),
        ('{"colours": []}', "must have at least 1 item(s)"),
        ('{"colours": ["green"]}', "must be one of blue, red"),
        ('{"inner": [{"colour": "red"}, {"colour": "green"}]}', "must be one of blue, red"),
        ('{"colour": "green"}', "must be one of blue, red"),
        ('{"at": "tomorrow"}', TIME),
        ('{"at": "2026-01-31T12:00:00"}', TIME),
        ('{"at": 5}', TIME),
        ('{"either": "x"}', "must be true or false or an object, not text"),
        ("[]", "must be an object, not a list"),
        ('{"whole": 1e400}', "Number out of range"),
    ],
)
def test_it_says_what_the_value_must_be(body: str, expected: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=Thing)
    found = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", str(caught.value))
    assert found is not None
    assert validation_message(found[1], Thing, found[2] or "") == expected


def test_a_choice_of_which_nothing_is_known_is_named_at_least() -> None:
    assert (
        validation_message("Invalid enum value 'green'")
        == "is not one of the valid values: 'green'"
    )


def test_a_field_that_is_nearly_there_is_named() -> None:
    assert (
        unknown_field_message("delay", ("delay_ms", "payload"))
        == "there is no such field; is delay_ms meant?"
    )
    assert unknown_field_message("bogus", ("delay_ms", "payload")) == "there is no such field"


def test_what_is_no_utf_8_may_be_compressed() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\x1f\x8b\x08".decode()
    assert (
        invalid_json_message(caught.value)
        == "the body is not UTF-8 (byte 1); send JSON, and not compressed"
    )
    assert invalid_json_message(RecursionError()) == "the body is nested too deeply"


@pytest.mark.parametrize(
    ("text", "is_half"),
    [
        (r'{"id":"\ud800"}', True),
        (r'{"id":"\uDC00"}', True),
        (r'{"id":"\\\ud800"}', True),
        (r'{"id":"\ud800 and more text"}', True),
        (r'{"id":"\ud800\ud800 and more"}', True),
        (r'{"id":"\ud83d\ude00', False),
        (r'{"id":"\\ud800', False),
        ('{"id":"a', False),
    ],
)
def test_half_of_a_surrogate_pair_is_not_a_body_that_was_cut(text: str, *, is_half: bool) -> None:
    body = text.encode()
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body)
    message = invalid_json_message(caught.value, body)
    assert message.startswith("the body is not valid Unicode") is is_half
    assert ("truncated" in message) is not is_half
