"""Test how numbers, times and hostile text are shown, and that every text has a translation."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.console.formatting import (
    LANGUAGES,
    SOURCE_LANGUAGE,
    Formatter,
    choose_language,
    count_indents,
    find_zone,
    first_lines,
    pretty_json,
    read_translations,
    sentence,
    visible,
)
from tests.support.catalogues import read_catalogue, text_of, texts

NOW = datetime(2026, 11, 23, 14, 0, tzinfo=UTC)
ENGLISH = Formatter("en", UTC, NOW)
GERMAN = Formatter("de", find_zone("Europe/Berlin"), NOW)
VALUE: Final = re.compile(r"%\([a-z_]+\)s|%%|%")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31m", "\u241b[31m"),
        ("\x00\x7f", "\u2400\u2421"),
        ("a\u202eb", "a[RLO]b"),
        ("\u200f\u061c", "[RLM][ALM]"),
        ("\u200b\ud800\ufeff", "���"),
        ("Grüße 漢字 🐟 שלום", "Grüße 漢字 🐟 שלום"),
    ],
)
def test_nothing_that_a_program_obeys_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_shown_text_is_printable_but_for_tabs_and_lines(text: str) -> None:
    shown = visible(text)
    assert all(char.isprintable() or char in "\t\n" or char.isspace() for char in shown)


def test_long_text_says_how_much_is_left_out() -> None:
    shown = visible("x" * 10_000)
    assert len(shown) < 4100
    assert shown.endswith("… (+6000)")


def test_other_values_stay_what_they_are() -> None:
    assert visible(None) is None
    assert visible(3) == 3


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.25, "0.2 s"), (59.04, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (90_061, "1 d 1 h")],
)
def test_durations_have_their_two_largest_units(seconds: float, shown: str) -> None:
    assert ENGLISH.seconds(seconds) == shown


def test_numbers_follow_the_language() -> None:
    assert ENGLISH.number(1234567) == "1,234,567"
    assert GERMAN.number(1234567) == "1.234.567"
    assert ENGLISH.size(1536) == "1.5 KiB"
    assert ENGLISH.percent(0.123) == "12.3%"
    assert ENGLISH.milliseconds(999.96) == "1,000 ms"
    assert ENGLISH.milliseconds(1500) == "1.5 s"


def test_times_are_relative_with_the_exact_one_beside() -> None:
    moment = NOW - timedelta(minutes=3)
    assert ENGLISH.relative(moment) == "3 minutes ago"
    assert GERMAN.relative(moment) == "vor 3 Minuten"
    assert ENGLISH.relative(NOW + timedelta(hours=2)) == "in 2 hours"
    assert GERMAN.exact(moment) == "2026-11-23 14:57:00.000 MEZ"
    element = ENGLISH.when("2026-11-23T13:57:00Z")
    assert 'datetime="2026-11-23T13:57:00.000+00:00"' in element
    assert "3 minutes ago" in element


def test_a_time_is_cut_to_the_millisecond() -> None:
    assert ENGLISH.exact("2026-11-23T13:57:05.999999Z") == "2026-11-23 13:57:05.999 UTC"
    assert ENGLISH.exact("2026-11-23T13:57:05.004500Z") == "2026-11-23 13:57:05.004 UTC"


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/Los_Angeles"])
@pytest.mark.parametrize("value", ["9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00Z"])
def test_a_time_that_the_zone_has_not_is_shown_in_utc_at_worst(zone: str, value: str) -> None:
    element = Formatter("en", find_zone(zone), NOW).when(value)
    assert f'datetime="{value[:19]}.' in element
    assert value[:4] in element


def test_a_time_without_an_offset_is_taken_as_utc() -> None:
    assert GERMAN.exact("2026-11-23T13:57:00") == "2026-11-23 14:57:00.000 MEZ"


@pytest.mark.parametrize("value", [None, "nonsense", ""])
def test_what_is_no_time_is_a_dash(value: str | None) -> None:
    assert len(ENGLISH.when(value)) == 1


@pytest.mark.parametrize("name", ["../../etc/passwd", "x" * 1000, "", "Nowhere/Town", None, "\x00"])
def test_an_unknown_zone_is_utc(name: str | None) -> None:
    assert find_zone(name) is UTC


def test_a_sentence_begins_with_a_capital_and_keeps_the_others() -> None:
    assert sentence("vorschau der Aufbewahrung") == "Vorschau der Aufbewahrung"
    assert sentence("") == ""


def test_a_clock_shows_the_hour_of_the_reader() -> None:
    assert ENGLISH.clock("2026-11-23T14:05:59Z") == "14:05"
    assert GERMAN.clock("2026-11-23T14:05:59Z") == "15:05"
    assert GERMAN.clock(None) == ENGLISH.exact(None)


def test_times_are_relative_or_exact_as_the_reader_likes() -> None:
    exact = Formatter("en", UTC, NOW, exact_times=True)
    assert ENGLISH.when(NOW - timedelta(minutes=5)).endswith(">5 minutes ago</time>")
    shown = exact.when(NOW - timedelta(minutes=5))
    assert 'title="5 minutes ago"' in shown
    assert shown.endswith(">2026-11-23 13:55:00.000 UTC</time>")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
ENOUGH = 10**9


@given(JSON_VALUES)
def test_json_with_indents_is_that_of_the_standard_library(value: object) -> None:
    expected = json.dumps(value, indent=2, ensure_ascii=False)
    assert pretty_json(value, ENOUGH) == expected
    assert first_lines(value, ENOUGH) == (expected.split("\n"), 0)
    indents = sum(len(line) - len(line.lstrip(" ")) for line in expected.split("\n"))
    assert count_indents(value) == indents


@given(JSON_VALUES, st.integers(1, 100))
def test_cut_json_is_the_beginning_of_the_whole(value: object, limit: int) -> None:
    expected = json.dumps(value, indent=2, ensure_ascii=False)
    cut = pretty_json(value, limit)
    assert cut == expected if len(expected) <= limit else cut == f"{expected[:limit]}…"
    lines, more = first_lines(value, limit)
    assert lines == expected.split("\n")[: len(lines)]
    assert len(lines) + more == expected.count("\n") + 1
    assert len(lines) == 1 or len("\n".join(lines)) <= limit


def test_what_is_not_shown_of_deep_json_is_not_made() -> None:
    value: object = [1] * 100_000
    for _ in range(2000):  # deeper than a function could call itself
        value = [value]
    # With its indents it has 400 million characters.
    assert len(pretty_json(value)) < 4000
    lines, more = first_lines(value, 100_000)
    assert sum(map(len, lines)) < 100_000
    assert len(lines) + more == 100_000 + 2 * 2001


@pytest.mark.parametrize("language", [one for one in LANGUAGES if one != SOURCE_LANGUAGE])
def test_a_catalogue_is_complete_and_has_nothing_else(language: str) -> None:
    wanted = {text: name for name, text in texts()}
    assert len(wanted) > 50
    found = {text_of(one.id): one for one in read_catalogue(language) if one.id}
    missing = sorted(f"{name}: {text}" for text, name in wanted.items() if text not in found)
    assert not missing, "\n".join(missing)
    assert not sorted(str(text) for text in found if text not in wanted)
    for text, message in found.items():
        assert not message.fuzzy, text
        sources = [text] if isinstance(text, str) else list(text)
        forms = [message.string] if isinstance(text, str) else list(message.string or ())
        for form, source in zip(forms, sources, strict=True):
            assert isinstance(form, str), text
            assert form, text
            assert sorted(VALUE.findall(form)) == sorted(VALUE.findall(source)), text


def test_every_catalogue_can_be_read() -> None:
    assert set(read_translations()) == set(LANGUAGES)


@pytest.mark.parametrize(
    ("preferred", "accepted", "chosen"),
    [
        (None, "", "en"),
        (None, "de-DE,de;q=0.9,en;q=0.8", "de"),
        (None, "fr,de;q=0.5", "de"),
        ("en", "de", "en"),
        ("xx", "de", "de"),
        (None, "," * 100_000, "en"),
    ],
)
def test_the_language_is_the_chosen_one_or_one_that_the_browser_accepts(
    preferred: str | None, accepted: str, chosen: str
) -> None:
    assert choose_language(preferred, accepted) == chosen
