"""Translate the console's texts, by gettext's catalogues.

English is the language of the sources, so it has no catalogue. A catalogue is read from its `.po`
file when the process starts; a text that it lacks stays English.
"""

import gettext
from collections.abc import Mapping
from importlib.resources import files
from io import BytesIO
from typing import Final

from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po

SOURCE_LANGUAGE: Final = "en"
LANGUAGES: Final[Mapping[str, str]] = {"en": "English", "de": "Deutsch"}
"""The language's own name, by its code."""
_RIGHT_TO_LEFT: Final = frozenset({"ar", "fa", "he", "ur"})
_MAX_HEADER: Final = 200


def read_translations() -> dict[str, gettext.NullTranslations]:
    """Return the translations of every language."""
    found: dict[str, gettext.NullTranslations] = {SOURCE_LANGUAGE: gettext.NullTranslations()}
    for language in LANGUAGES:
        if language != SOURCE_LANGUAGE:
            resource = files("rooms.console").joinpath("locale", f"{language}.po")
            compiled = BytesIO()
            with resource.open("rb") as file:
                write_mo(compiled, read_po(file, locale=language))
            compiled.seek(0)
            found[language] = gettext.GNUTranslations(compiled)
    return found


def choose_language(preferred: str | None, accept_language: str) -> str:
    """Return the language that a person chose, or the first one that the browser accepts."""
    if preferred is not None and preferred in LANGUAGES:
        return preferred
    for part in accept_language[:_MAX_HEADER].split(","):
        language = part.split(";")[0].strip().lower().partition("-")[0]
        if language in LANGUAGES:
            return language
    return SOURCE_LANGUAGE


def direction(language: str) -> str:
    """Return the direction in which a language is written, as HTML names it."""
    return "rtl" if language in _RIGHT_TO_LEFT else "ltr"
