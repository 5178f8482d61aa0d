"""Show numbers, times, sizes and hostile text, in the language of the reader.

Every text on a page passes `visible`: what a terminal or a browser would obey is shown as a symbol.
"""

import json
import unicodedata
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from babel import Locale
from babel.dates import format_datetime, format_timedelta
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
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI: Final = 1024
_MS_PER_S: Final = 1000
_MAX_ZONE: Final = 64


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


def pretty_json(value: Any) -> str:
    """Return a JSON value with indents."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def find_zone(name: str | None) -> tzinfo:
    """Return a time zone by its name; UTC where there is none of that name."""
    if name and len(name) <= _MAX_ZONE:
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            pass
    return UTC


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
        return NONE if value is None else format_decimal(value, locale=self.locale)

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
        return (
            f"{format_decimal(round(count, 1 if unit else 0), locale=self.locale)} {_UNITS[unit]}"
        )

    def milliseconds(self, value: float | None) -> str:
        """Return a duration in milliseconds or seconds, or longer ones in words."""
        if value is None:
            return NONE
        if value < _MS_PER_S:
            return f"{format_decimal(round(value, 1), locale=self.locale)} ms"
        return self.seconds(value / _MS_PER_S)

    def seconds(self, value: float | None) -> str:
        """Return a duration in its two largest units, as `2 min 5 s`."""
        if value is None:
            return NONE
        if value < 60:  # noqa: PLR2004 - seconds of a minute
            return f"{format_decimal(round(value, 1), locale=self.locale)} s"
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
        local = moment.astimezone(self.zone)
        return format_datetime(local, "yyyy-MM-dd HH:mm:ss.SSS zzz", locale=self.locale)

    def relative(self, value: datetime | str | None) -> str:
        """Return a time as the reader would say it: `3 minutes ago`."""
        moment = _moment(value)
        if moment is None:
            return NONE
        delta = moment - self.now
        if abs(delta) < timedelta(seconds=1):
            delta = timedelta(seconds=-1)
        return format_timedelta(delta, add_direction=True, locale=self.locale, threshold=1.5)

    def clock(self, value: datetime | str | None) -> str:
        """Return the hour and minute of a time in the reader's zone; a dash for None."""
        moment = _moment(value)
        if moment is None:
            return NONE
        return format_datetime(moment.astimezone(self.zone), "HH:mm", locale=self.locale)

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


def _moment(value: datetime | str | None) -> datetime | None:
    if value is None or isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return None
