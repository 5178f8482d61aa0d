"""Translate texts, and show numbers, times, sizes and hostile text in the language of the reader.

Every text on a page passes `visible`: what a terminal or a browser would obey is shown as a symbol.

Texts are translated by gettext's catalogues. English is the language of the sources, so it has no
catalogue. A catalogue is read from its `.po` file when the process starts; a text that it lacks
stays English.
"""

import gettext
import json
import unicodedata
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from importlib.resources import files
from io import BytesIO
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from babel import Locale
from babel.dates import format_datetime, format_timedelta
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from babel.numbers import format_decimal, format_percent
from markupsafe import Markup

NONE: Final = "–"  # noqa: RUF001 - a dash, for what there is not
_CONTROL_PICTURES: Final = 0x2400
_DELETE: Final = 0x7F
_FIRST_PRINTABLE: Final = 0x20
_KEPT: Final = "\t\n"
_REPLACED: Final = "�"
_BIDI: Final = {
    "\u202a": "[LRE]",
    "\u202b": "[RLE]",
    "\u202c": "[PDF]",
    "\u202d": "[LRO]",
    "\u202e": "[RLO]",
    "\u2066": "[LRI]",
    "\u2067": "[RLI]",
    "\u2068": "[FSI]",
    "\u2069": "[PDI]",
    "\u200e": "[LRM]",
    "\u200f": "[RLM]",
    "\u061c": "[ALM]",
}
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})
_MAX_SHOWN: Final = 4000
_MAX_JSON: Final = 3900
"""Characters of JSON in a page: less than `visible` shows, and with room for the mark."""
_INDENT: Final = "  "
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI: Final = 1024
_KEPT_NUMBERS: Final = 4096
_MS_PER_S: Final = 1000
_MAX_ZONE: Final = 64
SOURCE_LANGUAGE: Final = "en"
LANGUAGES: Final[Mapping[str, str]] = {"en": "English", "de": "Deutsch"}
"""The language's own name, by its code."""
_RIGHT_TO_LEFT: Final = frozenset({"ar", "fa", "he", "ur"})
_MAX_HEADER: Final = 200


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def visible(value: Any) -> Any:
    """Return a value for a template, text without anything that a reader's program would obey."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = value
    if len(text) > _MAX_SHOWN:
        text = f"{text[:_MAX_SHOWN]}… (+{len(value) - _MAX_SHOWN})"
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible_char, text))


def _visible_char(char: str) -> str:
    if char in _KEPT:
        return char
    code = ord(char)
    if code < _FIRST_PRINTABLE:
        return chr(_CONTROL_PICTURES + code)
    if code == _DELETE:
        return "\u2421"
    if char in _BIDI:
        return _BIDI[char]
    return _REPLACED if unicodedata.category(char) in _INVISIBLE else char


def pretty_json(value: Any, limit: int = _MAX_JSON) -> str:
    """Return a JSON value with indents, and `…` in place of what is beyond `limit` characters.

    What is beyond is not made: with indents, a text that is nested deeply grows a thousand times.
    """
    parts: list[str] = []
    left = limit
    for part in _json_parts(value):
        parts.append(part)
        left -= len(part)
        if left < 0:
            return f"{''.join(parts)[:limit]}…"
    return "".join(parts)


def first_lines(value: Any, limit: int) -> tuple[list[str], int]:
    """Return whole lines of JSON with indents, within `limit` characters, and how many more follow.

    The first line is among them, however long it is.
    """
    lines: list[str] = []
    line: list[str] = []
    left = limit
    for part in _json_parts(value):
        left -= len(part)
        if part.startswith("\n"):
            lines.append("".join(line))
            line = []
        line.append(part.removeprefix("\n"))
        if left < 0 and lines:
            break
    else:
        lines.append("".join(line))
    return lines, _measure(value)[0] - len(lines)


def count_indents(value: Any) -> int:
    """Return the number of characters that indents add to JSON, without line feeds."""
    return _measure(value)[1]


def _json_parts(value: Any) -> Iterator[str]:
    """Yield JSON with indents. What begins a line begins with its line feed.

    The levels are a list, because recursion would cost each item as much as its depth.
    """
    levels: list[Iterator[tuple[str, Any]]] = [iter((("", value),))]
    ends: list[str] = []
    separator = ""
    while levels:
        name, one = next(levels[-1], (None, None))
        if name is None:
            levels.pop()
            if levels:
                yield f"\n{_INDENT * (len(levels) - 1)}{ends.pop()}"
            separator = ","
            continue
        if separator:
            yield separator
        if len(levels) > 1:
            yield f"\n{_INDENT * (len(levels) - 1)}"
        separator = ","
        match one:
            case dict() if one:
                levels.append((f"{_dumps(key)}: ", inner) for key, inner in one.items())
                ends.append("}")
                yield f"{name}{{"
                separator = ""
            case list() if one:
                levels.append(("", inner) for inner in one)
                ends.append("]")
                yield f"{name}["
                separator = ""
            case _:
                yield f"{name}{_dumps(one)}"


def _measure(value: Any) -> tuple[int, int]:
    """Return the number of lines of JSON with indents, and the characters of these indents."""
    lines, indents = 1, 0
    waiting = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        if isinstance(one, dict | list) and one:
            lines += len(one) + 1
            indents += len(_INDENT) * (len(one) * (depth + 1) + depth)
            inside = one.values() if isinstance(one, dict) else one
            waiting.extend((part, depth + 1) for part in inside if isinstance(part, dict | list))
    return lines, indents


def find_zone(name: str | None) -> tzinfo:
    """Return a time zone by its name; UTC where there is none of that name."""
    return _known_zone(name) or UTC


def is_zone(name: str | None) -> bool:
    """Return whether there is a time zone of this name."""
    return _known_zone(name) is not None


def _known_zone(name: str | None) -> tzinfo | None:
    if name and len(name) <= _MAX_ZONE:
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            pass
    return None


def sentence(text: str) -> str:
    """Return a text with a capital first letter, and the rest as it is."""
    return text[:1].upper() + text[1:]


class Formatter:
    """Format for one reader: a language, a time zone, and the time of the request."""

    def __init__(
        self, language: str, zone: tzinfo, now: datetime, *, exact_times: bool = False
    ) -> None:
        """`exact_times`: read times to the millisecond, and relative ones by hovering."""
        self.locale = Locale.parse(language)
        self.zone = zone
        self.now = now
        self.exact_times = exact_times

    @property
    def zone_name(self) -> str:
        """Return the zone's name, as it is shown beside times."""
        return getattr(self.zone, "key", "UTC")

    def number(self, value: float | None) -> str:
        """Return a number with the language's separators; a dash for None."""
        return NONE if value is None else _decimal(value, self.locale)

    def percent(self, value: float | None) -> str:
        """Return a share of 1 as percent, with one digit where that says more."""
        if value is None:
            return NONE
        return format_percent(value, format="#,##0.#%", locale=self.locale)

    def size(self, count: float | None) -> str:
        """Return a number of bytes in a unit that keeps it short."""
        if count is None:
            return NONE
        unit = 0
        while count >= _KIBI and unit < len(_UNITS) - 1:
            count, unit = count / _KIBI, unit + 1
        return f"{_decimal(round(count, 1 if unit else 0), self.locale)} {_UNITS[unit]}"

    def milliseconds(self, value: float | None) -> str:
        """Return a duration in milliseconds or seconds, or longer ones in words."""
        if value is None:
            return NONE
        if value < _MS_PER_S:
            return f"{_decimal(round(value, 1), self.locale)} ms"
        return self.seconds(value / _MS_PER_S)

    def seconds(self, value: float | None) -> str:
        """Return a duration in its two largest units, as `2 min 5 s`."""
        if value is None:
            return NONE
        if value < 60:  # noqa: PLR2004 - seconds of a minute
            return f"{_decimal(round(value, 1), self.locale)} s"
        parts: list[str] = []
        rest = round(value)
        for length, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
            count, rest = divmod(rest, length)
            if count:
                parts.append(f"{count} {unit}")
        return " ".join(parts[:2])

    def exact(self, value: datetime | str | None) -> str:
        """Return a time in the reader's zone, to the millisecond; a dash for None."""
        moment = _moment(value)
        if moment is None:
            return NONE
        local = self._in_zone(moment)
        digits = local.replace(tzinfo=None).isoformat(" ", "milliseconds")
        return f"{digits} {format_datetime(local, 'zzz', locale=self.locale)}"

    def _in_zone(self, moment: datetime) -> datetime:
        try:
            return moment.astimezone(self.zone)
        except OverflowError:  # in the year 0 or 10000 there
            return moment.astimezone(UTC)

    def relative(self, value: datetime | str | None) -> str:
        """Return a time as the reader would say it: `3 minutes ago`."""
        moment = _moment(value)
        if moment is None:
            return NONE
        delta = moment - self.now
        if abs(delta) < timedelta(seconds=1):
            delta = timedelta(seconds=-1)
        return format_timedelta(delta, add_direction=True, locale=self.locale, threshold=1.5)

    def has_come(self, value: datetime | str | None) -> bool:
        """Return whether a time is not in the future; None has not come."""
        moment = _moment(value)
        return moment is not None and moment <= self.now

    def clock(self, value: datetime | str | None) -> str:
        """Return the hour and minute of a time in the reader's zone; a dash for None."""
        moment = _moment(value)
        if moment is None:
            return NONE
        return f"{self._in_zone(moment):%H:%M}"

    def when(self, value: datetime | str | None) -> Markup:
        """Return a time as an element: relative to read and exact to hover, or the reverse."""
        moment = _moment(value)
        if moment is None:
            return Markup.escape(NONE)
        shown = [self.exact(moment), self.relative(moment)]
        if self.exact_times:
            shown.reverse()
        return Markup('<time datetime="{}" title="{}">{}</time>').format(
            moment.astimezone(UTC).isoformat(timespec="milliseconds"), *shown
        )


@lru_cache(maxsize=_KEPT_NUMBERS)
def _decimal(value: float, locale: Locale) -> str:
    """Return a number in a language; kept, because a page shows the same ones in many cells."""
    return format_decimal(value, locale=locale)


def _moment(value: datetime | str | None) -> datetime | None:
    if value is None or isinstance(value, datetime):
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


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
