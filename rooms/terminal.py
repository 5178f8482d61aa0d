"""Text of strangers on its way to a terminal, a log or a page: nothing in it is obeyed, hidden or taken for another line."""

import re
from typing import Final

# What is shown as nothing although Python calls it printable: fillers, joiners, selectors.
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def terminal_safe(text: str) -> str:
    """Return the text in one line, with everything escaped that a terminal would obey or not show.

    These are control characters (C0 but for the tab, C1, DEL), line ends, bidi marks and overrides, zero-width characters,
    lone surrogates and what no font has. What is left has a glyph, or belongs to the glyph before it.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(char if char == "\t" or _shown(char) else ascii(char)[1:-1] for char in text)


def lines_safe(text: str) -> str:
    """Return text of several lines, each of them safe."""
    return "\n".join(map(terminal_safe, text.split("\n")))


def json_safe(text: str) -> str:
    """Return a JSON text with the same meaning that is safe for a terminal: such characters stand in its strings only, where
    an escape means the same. A carriage return stands between values only.
    """
    text = text.replace("\r", " ")
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(char if char in "\t\n" or _shown(char) else _escaped(char) for char in text)


def _shown(char: str) -> bool:
    # `ascii` leaves no invisible character as it is: all of them are beyond ASCII.
    return char.isprintable() and not _INVISIBLE.match(char)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
