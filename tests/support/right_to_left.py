"""Serve the console in Hebrew letters: `python -m tests.support.right_to_left serve`.

No catalogue of a language that is written from right to left is complete, so every text is turned
into letters of one, a third longer. What is not a text of the console stays as it is.
"""

import gettext
import re
from typing import Final

from rooms.cli import main
from rooms.console import app, formatting

LANGUAGE: Final = "he"
_LETTERS: Final = "אבגדהוזחטיכלמנסעפצקרשת"
_KEPT: Final = re.compile(r"(%\(\w+\)s|%%|<[^>]+>|&\w+;)")
_LATIN: Final = re.compile(r"[A-Za-z]")


def turned(text: str) -> str:
    """Return a text with each Latin letter replaced; placeholders stay."""
    parts = _KEPT.split(text)
    return "".join(part if number % 2 else _turn(part) for number, part in enumerate(parts))


def _turn(part: str) -> str:
    return " ".join(
        _LATIN.sub(lambda found: _LETTERS[ord(found[0].lower()) % len(_LETTERS)], word)
        + "ה" * (len(word) // 3)
        if _LATIN.search(word)
        else word
        for word in part.split(" ")
    )


class Turned(gettext.NullTranslations):
    """Translate into Hebrew letters."""

    def gettext(self, message: str) -> str:
        return turned(message)

    def ngettext(self, msgid1: str, msgid2: str, n: int) -> str:
        return turned(msgid1 if n == 1 else msgid2)


def offer() -> None:
    """Offer the language in this process."""
    others = formatting.read_translations()
    known = formatting.LANGUAGES
    assert isinstance(known, dict)
    known[LANGUAGE] = "עברית"
    vars(app)["read_translations"] = lambda: {**others, LANGUAGE: Turned()}


if __name__ == "__main__":
    offer()
    main()
