"""Decode the escapes of URLs, of strings in JSON and programs, and of HTML.

The work is done by a few calls for a whole text, not by one for each escape: endpoints may answer
with nothing but escapes.
"""

import html
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, overload

_MAX_CACHED: Final = 1024
"""Escapes of one kind whose characters are remembered."""
# The end of each pattern is the beginning of an escape at which the text ends. It stands for
# nothing.
_URL: Final = r"(%[0-9a-fA-F]{2}|%[0-9a-fA-F]?\Z)"
_STRING: Final = (
    r"(\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\[^ux]|\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?\Z)"
)
_HTML: Final = r"(&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]{2,8});|&#?[0-9A-Za-z]{0,8}\Z)"
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "b": "\b", "f": "\f"}


class _Characters(dict[str, str]):
    """Remember the characters of escapes of one kind."""

    def __init__(self, character: Callable[[str], str]) -> None:
        super().__init__()
        self._character = character

    def __missing__(self, escape: str) -> str:
        if len(self) >= _MAX_CACHED:
            self.clear()
        character = self[escape] = self._character(escape)
        return character


class EscapeKind:
    """Decode one kind of escapes, each of which begins with `mark`."""

    def __init__(self, mark: str, pattern: str, character: Callable[[str], str]) -> None:
        """`character` returns the character of an escape; empty: it is cut off; itself: it is none.

        `pattern` has one group, the escape.
        """
        self.mark = mark
        self._split = re.compile(pattern, re.DOTALL).split
        self._characters = _Characters(character)

    def decode(self, text: str, places: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Decode the escapes of a text; return also the place of each character, and of the end.

        `places`: those of the text itself.
        """
        parts = self._split(text)
        if len(parts) == 1:
            return text, places
        decoded = parts.copy()
        decoded[1::2] = map(self._characters.__getitem__, parts[1::2])
        if not decoded[-2]:  # the text ends in this escape
            del parts[-2:], decoded[-2:]
        return "".join(decoded), _Places(decoded, parts, places)


class _Places(Sequence[int]):
    """Hold the place of each character of a decoded text, and of its end.

    Most texts are decoded without asking for any place, so it is computed only then.
    """

    __slots__ = ("_begins", "_decoded", "_parts", "_places", "_sources")
    _begins: list[int]
    _sources: list[int]

    def __init__(self, decoded: list[str], parts: list[str], places: Sequence[int]) -> None:
        """`decoded` has the decoded texts of `parts`: as long, or one character."""
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
    return chr(int(escape[1:], 16)) if len(escape) == len("%00") else ""


def _of_string(escape: str) -> str:
    after = escape[1:]
    if len(after) == 1 and after not in "ux":
        return _CONTROLS.get(after, after)
    if len(after) == {"u": 5, "x": 3}.get(after[:1]):
        return chr(int(after[1:], 16))
    return ""


def _of_html(escape: str) -> str:
    if not escape.endswith(";"):
        return ""
    character = html.unescape(escape)
    return character if len(character) == 1 else escape


KINDS: Final = (
    EscapeKind("%", _URL, _of_url),
    EscapeKind("\\", _STRING, _of_string),
    EscapeKind("&", _HTML, _of_html),
)
