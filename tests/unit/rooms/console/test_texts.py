"""Test that every text of the console has a translation, with the same values in it."""

import re
from typing import Final

import pytest

from rooms.console.texts import LANGUAGES, SOURCE_LANGUAGE, choose_language, read_translations
from tests.support.catalogues import read_catalogue, text_of, texts

VALUE: Final = re.compile(r"%\([a-z_]+\)s|%%|%")


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
