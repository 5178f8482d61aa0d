"""Test that settings survive a form, and that only changed ones are sent."""

import json
import time
from typing import Any

import pytest

from rooms.console.fields import (
    Field,
    Kind,
    read_changes,
    read_fields,
    shown_texts,
    to_texts,
    typed_texts,
)
from rooms.console.form import Form

FIELDS = (
    Field("text"),
    Field("number", Kind.NUMBER),
    Field("flag", Kind.FLAG),
    Field("choice", Kind.YES_NO),
    Field("many", Kind.MANY),
    Field("numbers", Kind.NUMBERS),
    Field("lines", Kind.LINES),
    Field("number_lines", Kind.NUMBER_LINES),
    Field("interests", Kind.INTERESTS),
    Field("headers", Kind.HEADERS),
)
VALUES: dict[str, Any] = {
    "text": "a <b> \u202e",
    "number": 2.5,
    "flag": True,
    "choice": False,
    "many": ["one", "two"],
    "numbers": [401, 403],
    "lines": ["order.*", "paid"],
    "number_lines": [1001, 1000],
    "interests": [{"name": "order.*"}, {"name": "paid", "versions": [1, 2]}],
    "headers": {"X-One": "a: b", "X-Two": "***"},
}
NOTHING: dict[str, Any] = dict.fromkeys(VALUES)


def sent(values: dict[str, Any]) -> Form:
    """Return what a browser sends for a form that shows these values."""
    texts = to_texts(FIELDS, values)
    fields = {
        name: text.split("\n") if name == "many" else [text.replace("\n", "\r\n")]
        for name, text in texts.items()
        if text or name not in {"flag", "many"}
    }
    return Form({**fields, "shown": [shown_texts(texts)]})


@pytest.mark.parametrize("values", [VALUES, NOTHING])
def test_a_form_that_is_sent_as_it_was_shown_changes_nothing(values: dict[str, Any]) -> None:
    form = sent(values)
    assert typed_texts(FIELDS, form) == to_texts(FIELDS, values)
    assert read_changes(FIELDS, form) == {}


def test_every_kind_of_value_survives_a_form() -> None:
    assert read_fields(FIELDS, sent(VALUES)) == VALUES


def test_a_large_number_is_shown_whole() -> None:
    assert to_texts(FIELDS, {"number": 1234567.0})["number"] == "1234567"


def test_what_is_emptied_becomes_null() -> None:
    form = Form({"shown": [shown_texts(to_texts(FIELDS, VALUES))]})
    changes = read_changes(FIELDS, form)
    assert changes == NOTHING | {"flag": False, "many": []}


@pytest.mark.parametrize("shown", ["", "[", "[]", "null", "7"])
def test_a_form_that_does_not_say_what_it_showed_sends_all(shown: str) -> None:
    assert read_changes(FIELDS, Form({"text": ["a"], "shown": [shown]})) == {"text": "a"}


@pytest.mark.parametrize(
    "shown", ["[" * 200_000, '{"a":1e308}', '{"text":"a","b":[1]}', '{"text":"\\ud800"}']
)
def test_what_no_form_shows_counts_as_nothing_shown(shown: str) -> None:
    assert read_changes(FIELDS, Form({"text": ["a"], "shown": [shown]})) == {"text": "a"}


def test_the_largest_settings_can_be_changed() -> None:
    """1,000 event types with names of 128 characters, each with a thousand versions."""
    versions = ", ".join(map(str, range(1, 1001)))
    lines = "\n".join(f"{number:0128} {versions}" for number in range(400))
    shown = json.dumps({"text": lines})
    assert len(shown) > 1_500_000
    assert read_changes(FIELDS, Form({"text": [lines], "shown": [shown]})) == {}


@pytest.mark.parametrize("item", ["1e308", "{}", '"x"'])
def test_what_was_shown_is_decoded_in_little_time(item: str) -> None:
    items = ",".join([item] * (2_000_000 // (len(item) + 1)))
    begin = time.process_time()
    read_changes(FIELDS, Form({"shown": [f'{{"a":[{items}]}}']}))
    assert time.process_time() - begin < 0.05


def test_what_cannot_be_read_is_left_to_the_api() -> None:
    form = Form({"number": ["fast"], "numbers": ["1, x"], "interests": ["a one"], "headers": ["x"]})
    read = read_fields(FIELDS, form)
    assert read["number"] == "fast"
    assert read["numbers"] == [1, "x"]
    assert read["interests"] == [{"name": "a", "versions": ["one"]}]
    assert read["headers"] == {"x": ""}


def test_what_was_shown_is_kept_in_ascii() -> None:
    shown = shown_texts({"a": "\u202e"})
    assert shown.isascii()
    assert json.loads(shown) == {"a": "\u202e"}
