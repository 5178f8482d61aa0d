"""Decode the escapes of URLs, of strings in JSON and programs, of HTML, and of CSS.

The work is done by a few calls for a whole text, not by one for each escape: endpoints may answer
with nothing but escapes.
"""

import html
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from string import hexdigits
from typing import Final, overload

_MAX_CACHED: Final = 1024
"""Escapes of one kind whose characters are remembered."""
_MAX_CACHED_LENGTH: Final = 32
"""Longer escapes have many zeros in front; so what is remembered has a bound."""
# The end of each pattern, or the one but it, is the beginning of an escape at which the text ends.
# It stands for nothing. Whatever repeats without a bound is possessive: to fail takes no longer.
_URL: Final = r"(%[0-9a-fA-F]{2}|%u[0-9a-fA-F]{4}|%(?:[0-9a-fA-F]|u[0-9a-fA-F]{0,3})?\Z)"
_STRING: Final = (
    r"(\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\x[0-9a-fA-F]{2}|\\[ux]\{[0-9a-fA-F]++\}"
    r"|\\(?:[0-3][0-7]{0,2}|[4-7][0-7]?)"
    r"|\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?|[ux]\{[0-9a-fA-F]*+)?\Z|\\[^uUx])"
)
_HTML: Final = (
    r"(&(?:#[0-9]++;?|#[xX][0-9a-fA-F]++;?|[A-Za-z][0-9A-Za-z]{1,15};"
    r"|amp|AMP|lt|LT|gt|GT|quot|QUOT)"
    r"|&(?:#[xX]?|[0-9A-Za-z]{0,16})\Z)"
)
_CSS: Final = r"(\\(?:[0-9a-fA-F]{1,6}(?:\r\n|[ \t\r\n\f])?|[^0-9a-fA-F\r\n\f]|\Z))"
_HAS_CSS: Final = r"\\[0-9a-fA-F]"
# Escapes of which more may follow where the text ends.
_OPEN_STRING: Final = r"\\(?:[0-3][0-7]?|[4-7])"
_OPEN_CSS: Final = r"\\[0-9a-fA-F]{1,5}"
_OPEN_HTML: Final = r"&#(?:[0-9]++|[xX][0-9a-fA-F]++)"
_UNTERMINATED: Final = frozenset({"amp", "lt", "gt", "quot"})
"""Names that escape HTML, which browsers know without a semicolon, too."""
_NEVER: Final = r"(?!)"
_MAX_DIGITS: Final = 7
"""Digits of the largest character, in decimal."""
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "b": "\b", "f": "\f"}


class _Characters(dict[str, str]):
    """Remember the characters of escapes of one kind."""

    def __init__(self, character: Callable[[str], str]) -> None:
        super().__init__()
        self._character = character

    def __missing__(self, escape: str) -> str:
        character = self._character(escape)
        if len(escape) <= _MAX_CACHED_LENGTH:
            if len(self) >= _MAX_CACHED:
                self.clear()
            self[escape] = character
        return character


class EscapeKind:
    """Decode one kind of escapes, each of which begins with `mark`."""

    def __init__(
        self,
        mark: str,
        pattern: str,
        open_pattern: str,
        character: Callable[[str], str],
        *,
        needed: str = "",
    ) -> None:
        """`character` returns the character of an escape; empty: it is cut off; itself: it is none.

        `pattern` has one group, the escape. `open_pattern`: of which more may follow. A text
        without a match of `needed` has no escapes of this kind.
        """
        self.mark = mark
        self._finds_needed = re.compile(needed).search
        self._split = re.compile(pattern, re.DOTALL).split
        self._is_open = re.compile(open_pattern).fullmatch
        self._characters = _Characters(character)

    def decode(self, text: str, places: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Decode the escapes of a text; return also the place of each character, and of the end.

        `places`: those of the text itself. What may be cut off at the end is left out.
        """
        parts = self._split(text) if self._finds_needed(text) else [text]
        if len(parts) == 1:
            return text, places
        decoded = parts.copy()
        decoded[1::2] = map(self._characters.__getitem__, parts[1::2])
        lacking = left_out(places)
        if not parts[-1] and self._is_open(parts[-2]):
            lacking += 1
            del parts[-2:], decoded[-2:]
        elif not decoded[-2]:  # the text ends in this escape
            del parts[-2:], decoded[-2:]
        return "".join(decoded), _Places(decoded, parts, places, lacking)


def left_out(places: Sequence[int]) -> int:
    """Return how many characters a decoded text may lack at its end, by its places.

    `&#83` may be whole, or the beginning of `&#835`.
    """
    return places.left_out if isinstance(places, _Places) else 0


class _Places(Sequence[int]):
    """Hold the place of each character of a decoded text, and of its end.

    Most texts are decoded without asking for any place, so it is computed only then.
    """

    __slots__ = ("_begins", "_decoded", "_parts", "_places", "_sources", "left_out")
    _begins: list[int]
    _sources: list[int]

    def __init__(
        self, decoded: list[str], parts: list[str], places: Sequence[int], left_out: int
    ) -> None:
        """`decoded` has the decoded texts of `parts`: as long, or one character."""
        self.left_out = left_out
        self._decoded = decoded
        self._parts = parts
        self._places = places

    def __len__(self) -> int:
        return self._positions()[-1] + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        begins = self._positions()
        if index < 0:
            index += len(self)
        if not 0 <= index <= begins[-1]:
            raise IndexError(index)
        part = bisect_right(begins, index) - 1
        return self._places[self._sources[part] + index - begins[part]]

    def _positions(self) -> list[int]:
        try:
            return self._begins
        except AttributeError:
            self._begins = list(accumulate(map(len, self._decoded), initial=0))
            self._sources = list(accumulate(map(len, self._parts), initial=0))
            return self._begins


def _of_url(escape: str) -> str:
    digits, whole = (escape[2:], 4) if escape[1:2] == "u" else (escape[1:], 2)
    return chr(int(digits, 16)) if len(digits) == whole else ""


def _of_string(escape: str) -> str:
    kind, digits = escape[1:2], escape[2:]
    if kind and kind in "01234567":
        return chr(int(escape[1:], 8))
    if kind in {"u", "x"} and digits[:1] == "{":
        return _of_digits(escape, digits[1:-1], 16) if digits[-1] == "}" else ""
    if len(digits) == {"u": 4, "U": 8, "x": 2}.get(kind):
        return _of_digits(escape, digits, 16)
    return "" if kind in {"", "u", "U", "x"} else _CONTROLS.get(kind, kind)


def _of_css(escape: str) -> str:
    digits = escape[1:].rstrip(" \t\r\n\f")
    if digits and digits[0] in hexdigits:
        return _of_digits(escape, digits, 16)
    return escape[1:]


def _of_html(escape: str) -> str:
    if escape[1:2] == "#":
        is_hex = escape[2:3] in {"x", "X"}
        digits = escape[3 if is_hex else 2 :].rstrip(";")
        return _of_digits(escape, digits, 16 if is_hex else 10) if digits else ""
    if not escape.endswith(";") and escape[1:].lower() not in _UNTERMINATED:
        return ""
    character = html.unescape(escape)
    return character if len(character) == 1 else escape


def _of_digits(escape: str, digits: str, base: int) -> str:
    """Return the character of this number; the escape: there is none."""
    digits = digits.lstrip("0") or "0"
    if len(digits) > _MAX_DIGITS or (number := int(digits, base)) > sys.maxunicode:
        return escape
    return chr(number)


KINDS: Final = (
    EscapeKind("%", _URL, _NEVER, _of_url),
    EscapeKind("\\", _STRING, _OPEN_STRING, _of_string),
    EscapeKind("&", _HTML, _OPEN_HTML, _of_html),
)
# What follows a backslash is mostly the escape of a string. Only hexadecimal digits show this kind.
CSS: Final = EscapeKind("\\", _CSS, _OPEN_CSS, _of_css, needed=_HAS_CSS)
